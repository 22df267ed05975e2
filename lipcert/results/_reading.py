"""Reads result files as :class:`Run`, and checks rows and summary before they are used."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lipcert.errors import InputError, counted
from lipcert.inputs.data import order_of
from lipcert.inputs.files import ROWS, check_name, listing, printable
from lipcert.inputs.preprocessing import in_words
from lipcert.results._rows import DAMAGED, broken_at, check, contradiction, same, same_examples
from lipcert.results._statistics import Tally, interval, share
from lipcert.settings import NAMES, STAGED, CertifySettings, FinetuneSettings, noise_fields, parse_eps, settings_of

# The entries of a summary that must agree before rows of two runs may share a file.
_SETTINGS = [one.name for one in fields(CertifySettings) if one.init]
_IDENTITY = ("model", "preprocessing", *_SETTINGS, "lipcert")
_VERSIONS = ("torch", "timm")
_LISTED = 4
# The settings of fine-tuning that a head fitted in one step, without updates, does not use.
_OF_UPDATES = {one.name for one in fields(FinetuneSettings)} - {"loss", "epochs", "sigma", "denoiser", "only"}


class Run(Tally):
    """The results of one model on one set of images.

    Attributes:
        path: the file with the rows.
        name: the run's name in tables and figures: the file's name, with its folder if two files share the name.
        summary: the content of the summary file.
        rows: one mapping per image.
        notes: remarks on missing rows, one line each.
    """

    def __init__(self, path: Path, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], half: bool = False):
        super().__init__(rows)
        self.seconds = summary.get("seconds")
        self.path = path
        self.name = printable(path.stem)
        self.summary = summary
        self.notes: list[str] = []
        if half:
            self.notes.append(f"{path}: the last row is half-written and left out")
        if not self.complete:
            order = "of a random order" if self.sampled else "in the order of the data, so there are no intervals"
            images = counted(len(rows), "image")
            self.notes.append(f"{path}: the run did not finish; these are its first {images}, {order}")
        if part := re.fullmatch(r".+\.shard-(\d+)-of-(\d+)", path.stem):
            self.notes.append(f"{path}: part {part[1]} of {part[2]} of a run")

    @property
    def complete(self) -> bool:
        """Whether all images of the run have a row."""
        return bool(self.summary.get("complete", True))

    @property
    def sampled(self) -> bool:
        """Whether the images are a random sample of the data, or all of it: the run finished, or they are the first."""
        data = self.summary.get("data") or {}
        if self.complete or type(total := data.get("images")) is not int:
            return self.complete
        chosen_on = (self.summary.get("sigma_choice") or {}).get("indices") or ()
        left_out = {*(data.get("removed") or ()), *chosen_on}
        order = [index for index in order_of(total, None) if index not in left_out]
        return {row["index"] for row in self.rows} == {*order[: len(self)]}

    def interval(self, part: int) -> str:
        """The 95 % confidence interval of a number of images; a dash where the images are no sample."""
        return interval(part, len(self)) if self.sampled else "–"

    def share(self, part: int) -> str:
        """A number of images with its percentage, and its 95 % confidence interval where the images are a sample."""
        return share(part, len(self), self.sampled)

    @property
    def eps(self) -> float:
        """The ε of the run, in ℓ2 on pixels in [0, 1]."""
        return float(self.summary["eps"])

    @property
    def eps_typed(self) -> str:
        """ε as the user wrote it."""
        return str(self.summary.get("eps_typed", f"{self.eps:.6g}"))

    @property
    def every_eps(self) -> list[tuple[float, str]]:
        """All ε of the run with their texts, ascending."""
        further = [str(text) for text in self.summary.get("further_eps") or ()]
        return [(self.eps, self.eps_typed), *((parse_eps(text), text) for text in further)]

    @property
    def right(self) -> NDArray[np.bool_]:
        """Whether each prediction is the label, shape (N,); True everywhere without labels."""
        return np.array([row.get("correct", True) for row in self.rows], dtype=bool)

    @property
    def radii(self) -> NDArray[np.float64]:
        """Certified radii, shape (N,)."""
        return np.array([row["radius"] for row in self.rows], dtype=float)

    @property
    def broken_at(self) -> NDArray[np.float64]:
        """Distance at which an attack changed the prediction, shape (N,); ∞ if it did not, or without an attack."""
        return np.array([broken_at(row, self.eps) for row in self.rows])

    def surviving_at(self, eps: float) -> int:
        """The number of correct images that no attack broke within ``eps``: an upper bound on the robust ones."""
        return int((self.right & (self.broken_at > eps)).sum())

    @property
    def rigor(self) -> str:
        """``deterministic``, or ``probabilistic`` with the largest δ of a row."""
        return f"probabilistic, δ ≤ {self.delta:g} per image" if self.delta else "deterministic"

    @property
    def noise(self) -> dict[str, Any]:
        """The noise settings if the certificates are about a smoothed classifier; otherwise empty."""
        return {one.name: self.summary.get(one.name) for one in noise_fields()} if self.smoothed else {}

    @property
    def denoiser(self) -> str | None:
        """The name of the denoiser in front of the network; None without one."""
        steps = self.summary["model"]["recipe"]
        return next((str(step["denoiser"]) for step in steps if step.get("step") == "denoise"), None)

    @property
    def smoothed(self) -> bool:
        """Whether the certificates are about a smoothed classifier instead of the network itself."""
        return self.holds_for != "network"

    @property
    def perturbed(self) -> str:
        """What is perturbed: ``the pixels``, or ``the output of blocks.0`` for a run with ``at="blocks.0"``."""
        return f"the output of {self.summary['at']}" if self.inside else "the pixels"

    @property
    def inside(self) -> bool:
        """Whether a value inside the network is perturbed (``at``) instead of the pixels."""
        return self.summary.get("at") is not None

    @property
    def holds_for(self) -> str:
        """The certified function: ``network``, or ``smoothed(σ)``."""
        return str(self.rows[0].get("holds_for", "network")) if self.rows else "network"

    @property
    def weights_hash(self) -> str:
        """SHA-256 of the weights."""
        return str(self.summary["model"].get("weights_hash", ""))

    @property
    def example_logits(self) -> Any:
        """The model's logits on fixed example images; None in files that have none."""
        return self.summary.get("example_logits")

    @property
    def classes(self) -> int:
        """The number of classes; 0 if it is not known."""
        return int(self.summary.get("classes") or len((self.example_logits or [[]])[0]))

    @property
    def named(self) -> str:
        """The model as the command that certified it names it."""
        return str(self.summary.get("name") or self.network)

    @property
    def network(self) -> str:
        """timm's name of the network, or ``a module``."""
        return str(self.summary["model"].get("source", {}).get("name", "a module"))

    @property
    def architecture(self) -> str:
        """timm's name of the network with its arguments, and the names of the steps after it."""
        arguments = ", ".join(_pairs(self.summary["model"].get("source", {}).get("arguments", {})))
        return " → ".join([f"{self.network}({arguments})", *(name for name, _ in self.steps)])

    @property
    def steps(self) -> list[tuple[str, str]]:
        """The steps of surgery and training: each with its settings, without those that are off or unused."""
        steps = []
        for step in self.summary["model"]["recipe"]:
            unused = {"step", *(_OF_UPDATES if step.get("fitted") else ())}
            settings = {key: value for key, value in step.items() if key not in unused and value not in (None, [])}
            on = {key: value for key, value in settings.items() if value is not False}
            steps.append((str(step.get("step")), ", ".join(_pairs(on))))
        return steps

    @property
    def preprocessing(self) -> str:
        """The preprocessing of the images, in one line."""
        return in_words(self.summary.get("preprocessing") or {})

    @property
    def staged(self) -> bool:
        """Whether several methods were tried in turn."""
        return bool(self.summary.get("method") == "staged")

    @property
    def stopped(self) -> bool:
        """Whether the search for a radius ended as soon as the verdict was known: nothing is known of larger ε."""
        return self.staged or (self.smoothed and not self.noise.get("all_samples"))

    @property
    def attack_name(self) -> str:
        """The attack's name."""
        return str((self.summary.get("attack") or {}).get("name", "attack"))

    @property
    def attack(self) -> str:
        """The attack's name, another package's version, and settings, as far as the summary has them."""
        attack = self.summary.get("attack") or {}
        settings = attack.get("settings") or {}
        version = str(attack.get("version", ""))
        name = f"{self.attack_name} {'' if version.isdigit() else version}".rstrip()  # a digit is lipcert's own
        return f"{name} ({', '.join(_pairs(settings))})" if settings else name

    def settings(self, attack: Any = None) -> CertifySettings:
        """The settings of the run, with ``attack`` in place of the summary's attack."""
        recorded = {name: self.summary[name] for name in _SETTINGS if name in self.summary}
        return settings_of(CertifySettings, **{**recorded, "attack": attack})

    def contradictions(self) -> Iterator[str]:
        """Yields the contradictions within the summary and between summary and rows."""
        try:
            if "eps_typed" in self.summary and not math.isclose(parse_eps(self.eps_typed), self.eps, rel_tol=1e-12):
                yield f"the summary says that ε was {self.eps_typed}, and that it is {self.eps:.9g}"
        except InputError:
            yield f"the summary says that ε was {self.eps_typed!r}, which is not a radius"
        method, asked = self.summary.get("method"), self.summary.get("rigor", "probabilistic")
        if method not in NAMES:
            yield f"the summary names the method {method!r}, which lipcert does not have"
        if asked == "deterministic" and self.delta:
            yield f"the summary says deterministic, and rows state δ = {self.delta:g}"
        attack = self.summary.get("attack")
        if any((row.get("attacked") is not None) is not (attack is not None) for row in self.rows):
            yield f"the summary says that the attack was {self.attack_name if attack else attack}, and rows differ"
        if self.complete and "counts" in self.summary:
            yield from self.miscounted()

    def miscounted(self) -> Iterator[str]:
        """Yields the counts in the summary that differ from the rows."""
        counts, claimed = self.counts(), self.summary.get("counts")
        claimed = claimed if isinstance(claimed, dict) else {}
        for name in claimed.keys() & counts.keys() or counts:  # earlier versions counted less
            if not same(claimed.get(name), counts[name]):
                what = name.replace("_", " ")
                yield f"the summary counts {claimed.get(name)} for {what}, the rows {counts.get(name)}"

    def refuse_false_rows(self) -> None:
        """Refuses rows that cannot be true for any model; names the first."""
        for number, row in enumerate(self.rows, start=1):
            if reason := contradiction(row, self.eps, self.summary.get("method")):
                raise InputError(_NO_RESULT.format(number, self.path, reason))


_NO_RESULT = "row {} of {} is no result ({}); certify the images again, into another file"


def summary_path(path: Path) -> Path:
    """The path of the summary of a result file: ``r.summary.json`` for ``r.jsonl``."""
    return path.with_name(f"{path.name.removesuffix(ROWS)}.summary.json")


def read_run(path: Path) -> Run:
    """Reads a result file and its summary, without checking rows for contradictions."""
    if path.is_dir():
        found = [file.name for file in sorted(path.glob(f"[!.]*{ROWS}"))]
        raise InputError(f"{path} is a folder; give a file of rows in it{f': {listing(found)}' if found else ''}")
    if not path.is_file():
        raise InputError(f"there is no file {path}; lipcert certify --out {path} writes it")
    run = _read(path, _summary(path))
    if not run.rows:
        raise InputError(f"{path} holds no rows; let lipcert certify finish at least one image")
    return run


def read_runs(paths: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Reads result files.

    Args:
        paths: ``.jsonl`` files that ``certify --out`` wrote, each with its summary in the same folder, or folders of
            such files; other ``.jsonl`` files of a folder, and damaged ones, are left out with a warning.

    Returns:
        The runs in the given order; those of a folder are sorted by name.

    Raises:
        InputError: a file is missing, empty or damaged, or contradicts itself.
    """
    found = {file: Path(path) for path in paths for file in _files(Path(path))}
    runs, damaged = [], None
    for file, path in found.items():
        try:
            run = read_run(file)
            run.refuse_false_rows()
            if reason := next(run.contradictions(), None):
                raise InputError(f"{file} contradicts itself: {reason}; certify the images again, into another file")
            runs.append(run)
        except InputError as error:
            if file == path:
                raise
            damaged = error
            warnings.warn(f"left out: {error}", stacklevel=2)
    if damaged and not runs:
        raise damaged
    shared = {run.name for run in runs if sum(run.name == other.name for other in runs) > 1}
    for run in runs:
        if run.name in shared:
            run.name = printable(run.path.with_suffix("").as_posix())
    return runs


def read_earlier(path: Path, description: Mapping[str, Any]) -> Run | None:
    """The rows that an earlier start of the same run left in a file; None if there is no file or it is empty."""
    check_name(path)
    if not os.path.exists(path) or not path.stat().st_size:
        return None
    if not os.path.exists(summary_path(path)):
        raise InputError(f"{path} has no summary {summary_path(path)}, as results have; copy it, or give another --out")
    earlier = _summary(path)
    # Convert to JSON and back like the earlier description, which turns tuples into lists.
    current = json.loads(json.dumps(dict(description)))
    different = [key for key in _IDENTITY if earlier.get(key) != current.get(key)]
    labelled = [(summary.get("data") or {}).get("labelled") for summary in (earlier, current)]
    different += ["kind of data: one with labels, one without"] if labelled[0] != labelled[1] else []
    before, now = (summary.get("environment") or {} for summary in (earlier, current))
    different += [key for key in _VERSIONS if before.get(key) != now.get(key)]
    if not same_examples(earlier.get("example_logits"), current.get("example_logits")):
        different.append("logits on the example images")
    if different == ["samples"] and not current["all_samples"]:  # a confidence sequence goes on after any draw
        different = []
    if different == ["samples"]:
        raise InputError(
            f"{path}: the bound of --all-samples is for a number of draws fixed in advance, so none can be added; give "
            "another --out, or the same --samples"
        )
    if different == ["eps"]:
        typed = current.get("eps_typed", current["eps"])
        certify = "give another --out"
        if current.get("method") != STAGED:  # a staged run stops at the verdict for its ε
            certify = f"its radii answer for any ε: lipcert report {path} --eps {typed}; or {certify}"
        raise InputError(f"{path} holds results of a run with another eps; {certify}")
    if different:
        names = dict.fromkeys("eps" if key == "further_eps" else key for key in different)
        raise InputError(f"{path} holds results of a run with another {', '.join(names)}; give another --out")
    run = _read(path, earlier)
    run.refuse_false_rows()
    return run


def read_rows(path: Path, description: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The complete rows of a file; empty if there is no file. Arguments and errors as for ``read_earlier``."""
    earlier = read_earlier(path, description)
    return [] if earlier is None else earlier.rows


def _files(path: Path) -> list[Path]:
    """The path, or the result files of a folder; says which other ``.jsonl`` files it holds."""
    if not path.is_dir():
        return [path]
    files: list[Path] = []
    others: list[Path] = []
    for file in sorted(path.glob(f"[!.]*{ROWS}")):
        try:
            _summary(file)
            (files if b"\n" in file.read_bytes() else others).append(file)
        except (InputError, OSError):
            others.append(file)
    left_out = f"no rows of lipcert certify with a summary: {', '.join(printable(file.name) for file in others)}"
    if not files:
        found = f", but {left_out}" if others else ""
        raise InputError(
            f"the folder {path} holds no results{found}; lipcert certify --out {path / 'r.jsonl'} writes some"
        )
    if others:
        warnings.warn(f"{path}: left out, {left_out}", stacklevel=4)
    return files


def _read(path: Path, summary: Mapping[str, Any]) -> Run:
    """Reads and checks the rows of a file; a half-written last row is left out."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if content.lstrip()[:1] == b"[":
        raise InputError(f"{path} is a JSON array, and rows are one object per line; write them so: jq -c '.[]' {path}")
    lines, half = content.splitlines(), False
    if lines and not content.endswith(b"\n"):  # an editor may have taken the last line break
        try:
            json.loads(lines[-1])
        except DAMAGED:
            half = bool(lines.pop())
    rows: list[Mapping[str, Any]] = []
    places: dict[int, int] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            check(row)
        except DAMAGED as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise InputError(_NO_RESULT.format(number, path, reason)) from error
        place = places.setdefault(row["index"], len(rows))
        if place < len(rows) and row.get("samples", 0) > rows[place].get("samples", math.inf):
            rows[place] = row  # with more draws of the same image
        else:
            rows.append(row)
    if len({row["index"] for row in rows}) < len(rows) or len({"correct" in row for row in rows}) > 1:
        raise InputError(f"{path} mixes rows that do not belong together; certify the images again, into another file")
    return Run(path, summary, rows, half)


# The kinds of entries of a summary, and of its model; each may be missing.
_KINDS: Mapping[str, Any] = {
    **dict.fromkeys(("data", "environment", "class_names", "bound", "preprocessing", "attack"), dict),
    "further_eps": list, "command": str, "complete": bool, "seconds": (int, float),
}  # fmt: skip
_KINDS_OF_MODEL = {"source": dict, "weights_hash": str}


def _summary(path: Path) -> Mapping[str, Any]:
    beside = summary_path(path)
    if path.name.endswith(summary_path(Path(ROWS)).name):
        rows = path.name.removesuffix(summary_path(Path(ROWS)).name) + ROWS
        raise InputError(f"{path} is the summary of a run; give the file of its rows, {path.with_name(rows)}")
    if path.suffix != ROWS:
        raise InputError(f"{path} is no file of rows; give one that lipcert certify --out wrote, such as r{ROWS}")
    try:
        summary = json.loads(beside.read_text(encoding="utf-8"))
        if not (math.isfinite(summary["eps"]) and summary["eps"] > 0 and isinstance(summary["model"]["recipe"], list)):
            raise ValueError("no ε or no model")
        for entries, kinds in ((summary, _KINDS), (summary["model"], _KINDS_OF_MODEL)):
            wrong = [name for name, kind in kinds.items() if not isinstance(entries.get(name), (kind, NoneType))]
            if wrong:
                raise ValueError(f"of another kind: {', '.join(wrong)}")
        if "rigor_asked" in summary:  # of the settings, by which runs are compared
            summary["rigor"] = summary.pop("rigor_asked")
        shlex.split(summary.get("command") or "")
    except OSError as error:
        raise InputError(
            f"{path} has no summary {beside.name} in its folder; copy both, or give another file"
        ) from error
    except DAMAGED as error:
        raise InputError(f"{beside} is not a summary of results; copy it again, or give another file") from error
    return dict(summary)


def sigma_choice_of(path: Path, settings: CertifySettings, weights_hash: str) -> dict[str, Any] | None:
    """How an earlier start of a run chose σ, from its summary; None if there is none, or it was given."""
    summary = _summary(path) if os.path.exists(summary_path(path)) else {}
    choice = summary.get("sigma_choice")
    if not isinstance(choice, dict) or "sigma" not in choice:
        return None
    same_run = summary["model"].get("weights_hash") == weights_hash and summary["eps"] == settings.eps
    return dict(choice) if same_run else None


def _pairs(entries: Mapping[str, Any]) -> list[str]:
    """The entries; a long list, such as the names of layers, by its first and last entry and its length."""
    long = {key: value for key, value in entries.items() if isinstance(value, list) and len(value) > _LISTED}
    brief = {key: f"{value[0]} … {value[-1]} ({len(value)})" for key, value in long.items()}
    return [f"{key}={brief.get(key, value)}" for key, value in entries.items()]
