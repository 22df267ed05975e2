"""Programs from torch's whole tensor API, odd arguments, kernels, scales: each is refused, or attacked.

    python -m benchmarks.fuzz --programs 20000 --arguments 20000 --kernels 30000 --scales 5000

writes a line a network to the rows, goes on after those that are there, and sums up in benchmarks/results. Networks
that do not run in plain PyTorch, in float32 and in float64, are left out and not counted. The outcome of a network is
the worst over methods and types:

* refused: lipcert says in one line why there is no certificate;
* zero: a certificate without a radius;
* held: a radius above 0 that no attack broke;
* traceback: another error than lipcert's own, a defect;
* false: the network itself predicts another class nearer than the radius, a defect;
* died, too long: the process ended, or ran for minutes, in torch or in lipcert.

Kernels of single operations are compared with their rounding rules (:mod:`benchmarks._kernels`). The summary has the
largest share of a bound that an error used, by operation and type. A network at another scale that has a larger radius
counts as false (:mod:`benchmarks._scales`).

``--inflate 2 --rows other.jsonl --results other.json`` shows what the attacks can find: how many radii, made twice as
large, they break. ``--show program:17`` prints what a seed draws, and examines it.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import subprocess
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import _arguments, _judge, _kernels, _programs, _scales
from benchmarks._env import environment
from benchmarks._judge import OUTCOMES, Runner, Subject, examine

KINDS = ("program", "argument", "kernel", "scale")
_FAILED = ("false", "traceback", "died", "too long")
_COUNTED = (*_FAILED, "held", "zero", "refused")
_LONGEST = 180.0
_IMAGES = 3
_TYPE = re.compile(r"finfo|element_size|itemsize|nbytes|type\(\)|dtype (==|is)|get\(t\d+\.dtype")
_CASTS = re.compile(r"float|half|dtype|\.to\(|type")


def subject(seed: int) -> Subject | None:
    """The program of a seed and its images; None where nothing was drawn that runs."""
    try:
        program = _programs.draw(seed)
        plain = Subject(
            seed=seed,
            kind="program",
            family=program.stratum,
            size=program.size,
            build=program.build,
            images=_pictures(program.size, seed),
            casts=bool(_CASTS.search(program.source)),
            looks_at_type=bool(_TYPE.search(program.source)) and "1e9" not in program.source,
        )
        return _with_near_ones(plain)
    except Exception:
        return None


def _pictures(size: tuple[int, int, int], seed: int) -> Tensor:
    """Inside the box, and on its faces or without contrast."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(_IMAGES, *size, dtype=torch.float64, generator=generator)
    odd = (images[-1].round(), images[-1] * 0, images[-1] * 0 + 1, images[-1] * 0 + 0.5, images[-1].mul(4).round() / 4)
    images[-1] = odd[seed % 5]
    return images


def _with_near_ones(plain: Subject) -> Subject:
    """Replaces the second image by one near where the prediction changes, if such a place is found."""
    runner = Runner(plain, "real")
    generator = torch.Generator().manual_seed(plain.seed + 1)
    count = 24 if runner.together else 4
    points = torch.cat([plain.images, torch.rand(count, *plain.size, dtype=torch.float64, generator=generator)])
    classes = runner(points).argmax(1)
    others = (classes != classes[0]).nonzero()[:, 0]
    if not len(others):
        return plain
    one, other = points[0], points[others[0]]
    for _ in range(20 if runner.together else 8):
        middle = (one + other) / 2
        same = runner(middle[None]).argmax(1) == classes[0]
        one, other = (middle, other) if bool(same) else (one, middle)
    back = 10.0 ** -(plain.seed % 4 + 1)
    images = plain.images.clone()
    images[1] = one + back * (points[0] - one)
    return Subject(**{**vars(plain), "images": images})


def look(kind: str, seed: int) -> dict[str, Any]:
    """A row for one seed."""
    started = time.process_time()
    if kind in ("argument", "kernel", "scale"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = {"argument": _arguments, "kernel": _kernels, "scale": _scales}[kind].look(seed)
        return {**row, "seconds": round(time.process_time() - started, 3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = subject(seed)
        row = examine(drawn) if drawn else {"seed": seed, "kind": kind, "outcome": "not run"}
    return {**row, "seconds": round(time.process_time() - started, 3)}


def _work(jobs: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)
    parent = os.getppid()
    while os.getppid() == parent:  # or else nobody waits for the row
        if jobs.poll(5):
            jobs.send(look(*jobs.recv()))


class _Worker:
    """A process that examines one seed at a time, and what it is at."""

    def __init__(self) -> None:
        self.ours, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.job: tuple[str, int] | None = None
        self.since = 0.0

    def give(self, job: tuple[str, int]) -> None:
        self.job, self.since = job, time.monotonic()
        self.ours.send(job)

    def lost(self, outcome: str) -> dict[str, Any]:
        """Ends the process; the row of what it was at."""
        self.process.kill()
        self.process.join()
        assert self.job is not None
        return {"kind": self.job[0], "seed": self.job[1], "outcome": outcome, "by": {}, "defects": []}


def rows_of(jobs: Iterator[tuple[str, int]], workers: int) -> Iterator[dict[str, Any]]:
    """Examines jobs in several processes; a process that dies costs the row it was at and nothing else."""
    crew = [_Worker() for _ in range(workers)]
    try:
        for worker in crew:
            if job := next(jobs, None):
                worker.give(job)
        while busy := [worker for worker in crew if worker.job]:
            ready = multiprocessing.connection.wait([worker.ours for worker in busy], timeout=5)
            for place, worker in enumerate(crew):
                if worker.job and worker.ours in ready:
                    try:
                        row = worker.ours.recv()
                    except EOFError:
                        row = worker.lost("died")
                        worker = crew[place] = _Worker()
                elif worker.job and time.monotonic() - worker.since > _LONGEST:
                    row = worker.lost("too long")
                    worker = crew[place] = _Worker()
                else:
                    continue
                worker.job = None
                yield row
                if job := next(jobs, None):
                    worker.give(job)
    finally:
        for worker in crew:
            worker.process.kill()


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Outcomes by kind, by method and type, and by family; why networks are refused; every defect."""
    counted = [row for row in rows if row["outcome"] in _COUNTED]
    table = {}
    for kind in KINDS:
        outcomes = collections.Counter(row["outcome"] for row in counted if row["kind"] == kind)
        number = sum(outcomes.values())
        shares = {"counted": number, "share_refused": round(outcomes["refused"] / number, 4) if number else None}
        table[f"{kind}s"] = {**shares, **{name: outcomes[name] for name in _COUNTED}}
    methods: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    families: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in counted:
        families[f"{row['kind']} {row.get('family', '?')}"][row["outcome"]] += 1
        for key, outcome in row["by"].items():
            methods[key][outcome] += 1
    reasons = collections.Counter(
        _reason(row["why"]) for row in counted if row["outcome"] == "refused" and "why" in row
    )
    defects = [
        {"network": f"{row['kind']}:{row['seed']}", **defect}
        for row in counted
        for defect in row.get("defects", ())[:2]
    ]
    largest: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for row in counted:
        if row["kind"] == "kernel" and "share" in row:
            seen = largest[row["operation"]]
            seen[row["dtype"]] = max(seen.get(row["dtype"], 0.0), round(row["share"], 3))
    return {
        **table,
        "largest_shares": {name: largest[name] for name in sorted(largest)},
        "by_method": {name: _ordered(methods[name]) for name in sorted(methods)},
        "by_family": {name: _ordered(families[name]) for name in sorted(families)},
        "refusals": dict(reasons.most_common(30)),
        "defects": defects[:200],
        "networks_by_code": dict(collections.Counter(row.get("code", "?") for row in counted)),
    }


def _ordered(outcomes: Mapping[str, int]) -> dict[str, int]:
    return {name: outcomes[name] for name in (*_COUNTED, *OUTCOMES) if outcomes.get(name)}


def _reason(why: str) -> str:
    """A refusal without the names that differ from network to network."""
    bare = re.sub(r"\d+", "#", why.split(";")[0])
    return re.sub(r"( at \(?[\w.]+\)?| at \(model\)).*", "", bare)[:100]


def _code() -> str:
    """The revision that runs, with a + where the working tree differs from it."""

    def git(*arguments: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../lipcert")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=20_000, help="go on until so many programs are counted")
    parser.add_argument("--arguments", type=int, default=20_000, help="the same of calls with odd arguments")
    parser.add_argument("--kernels", type=int, default=30_000, help="the same of kernels against rounding rules")
    parser.add_argument("--scales", type=int, default=5_000, help="the same of networks, each at three other scales")
    parser.add_argument("--rows", type=Path, default=Path("fuzz.jsonl"))
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--inflate", type=float, default=1.0, help="multiply radii, to see what the attacks can find")
    parser.add_argument("--redo", action="store_true", help="examine what was no success again: false, traceback, ...")
    parser.add_argument("--show", metavar="KIND:SEED", help="print what a seed draws, and examine nothing else")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "fuzz.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    _judge.inflation = args.inflate
    if args.show:
        kind, _, seed = args.show.partition(":")
        drawing = {"program": _programs, "argument": _arguments}
        if kind in drawing:
            found = drawing[kind].draw(int(seed))
            print(found.source if kind == "program" else found)
        print(json.dumps(look(kind, int(seed)), indent=1))
        return
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()] if args.rows.exists() else []
    if args.redo:
        rows = [row for row in rows if row["outcome"] not in _FAILED]
        args.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = {"program": args.programs, "argument": args.arguments, "kernel": args.kernels, "scale": args.scales}
    counted = collections.Counter(row["kind"] for row in rows if row["outcome"] in _COUNTED)
    done = {(row["kind"], row["seed"]) for row in rows}
    code = _code()

    def jobs() -> Iterator[tuple[str, int]]:
        every = {kind: zip(itertools.repeat(kind), itertools.count(args.seed), strict=False) for kind in KINDS}
        left = {kind: (job for job in every[kind] if job not in done) for kind in KINDS}
        while open_ := [kind for kind in KINDS if counted[kind] < wanted[kind]]:
            kind = max(open_, key=lambda kind: 1 - counted[kind] / wanted[kind])
            yield next(left[kind])

    with args.rows.open("a") as file:
        for row in rows_of(jobs(), args.workers):
            row["code"] = code
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            counted[row["kind"]] += row["outcome"] in _COUNTED
            if row["outcome"] in _FAILED:
                print(f"{row['kind']}:{row['seed']} {row['outcome']} {row['defects'][:1]}", flush=True)
    seconds = round(sum(row.get("seconds", 0.0) for row in rows))
    summary = {**summarise(rows), "seconds": seconds, "environment": environment()}
    args.results.write_text(json.dumps(summary, indent=1) + "\n")
    for name in ("programs", "arguments", "kernels", "scales"):
        print(name, summary[name])
    for name, line in {
        **summary["largest_shares"],
        **summary["by_method"],
        **summary["by_family"],
        **summary["refusals"],
    }.items():
        print(f"{name:40} {line}")


if __name__ == "__main__":
    main()
