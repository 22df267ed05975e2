"""The tables and figures of the four papers, run through the package's own commands, beside what the papers report.

    python -m benchmarks.papers --list
    python -m benchmarks.papers --paper certvit --table 1 --scale small --data cifar10=../shared/data/cifar10

``full`` is the paper's setting and prints in what it differs; ``small`` takes minutes and says what it left out: its
figures are no reproduction. ``trial`` runs every command on a few random images in place of data sets that are not
named: its figures mean nothing. ``--model NAME`` gives table 3 of CertViT a row for any pretrained network, with the
weights of ``--checkpoint FILE`` where that is given.
Data sets are those of torchvision by name; ``--data NAME=FOLDER`` names a folder with ``train.tar`` and ``test.tar`` or
with folders of these names. Rows of methods that lipcert does not have are quoted. Tables and environment go to
``benchmarks/results/papers.json``, or to ``--out``, after each row. ``--row NAME`` runs this row alone and adds it to
those stored at the same scale; all others are said not to have been run. ``--keep FOLDER`` keeps the trained networks:
a second table, or a second run, trains none again. In another folder than the repository's, PYTHONPATH names it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._env import environment
from benchmarks.papers import measures, shown, tables_certvit, trained
from benchmarks.papers.recipes import SCALES, Given, Table, differences
from benchmarks.papers.stand_ins import stand_in
from benchmarks.papers.tables import LISTED, TABLES, find

RESULT = Path(__file__).parent.parent / "results" / "papers.json"


def table(
    found: Table,
    scale: str,
    folders: dict[str, str],
    only: str | None = None,
    kept: Path | None = None,
    known: Mapping[str, dict[str, Any]] | None = None,
) -> Iterator[dict[str, Any]]:
    """The rows of a table, as they are made: what was found here, and the paper's figures.

    Args:
        found: the table.
        scale: a key of :data:`SCALES`.
        folders: data sets by name.
        only: the one row that is run; the others are those of ``known``, or are said not to have been run.
        kept: for trained networks.
        known: rows of an earlier run, by name.
    """
    with tempfile.TemporaryDirectory() as work:
        if scale == "trial":
            names = {"cifar10", *(str(one.data) for one in found.rows if one.data)} - folders.keys()
            folders = {**{name: str(stand_in(name, Path(work))) for name in names}, **folders}
        networks = trained.Kept(kept or Path(work))
        if found.measure is not None:
            given = Given(scale != "full", folders.get("cifar10"), networks.folder)
            yield from getattr(measures, found.measure)(found, given)
            return
        if found.needs and scale != "trial":
            yield {"needs": found.needs}
        for one in found.rows:
            if only not in (None, one.name) and one.name in (known or {}):
                yield (known or {})[one.name]
            else:
                yield trained.row(one, found, SCALES[scale], folders, networks, wanted=only in (None, one.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--list", action="store_true", help="say which tables there are, and what they need")
    parser.add_argument("--paper", choices=LISTED)
    parser.add_argument("--table", help="such as 1 or 'figure 4'")
    parser.add_argument("--row", help="only this row, beside those that are stored")
    parser.add_argument("--model", help="of timm: another row of CertViT's table 3")
    parser.add_argument("--checkpoint", help="a file with the weights of --model, in place of timm's")
    parser.add_argument("--scale", choices=tuple(SCALES), default="small")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for trained networks, which tables then share")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    if args.list or args.paper is None or args.table is None:
        for one in TABLES:
            needs = f"; needs {one.needs}" if one.needs else ""
            print(shown.wrapped(f"{one.paper:10} {one.number:12} {one.title}{needs}"))
        return
    folders = dict(item.split("=", 1) for item in args.data)
    for name, folder in folders.items():
        if not any((Path(folder) / train).exists() for train in ("train.tar", "train")):
            parser.error(f"--data {name}={folder}: a folder with train.tar and test.tar, or train and test, is needed")
    found, scale = find(args.paper, args.table), SCALES[args.scale]
    if args.checkpoint is not None and args.model is None:
        parser.error("--checkpoint is for --model")
    if args.model is not None:
        if (args.paper, args.table) != ("certvit", "3"):
            parser.error("--model is for table 3 of certvit")
        found = replace(found, rows=(*found.rows, tables_certvit.pretrained(args.model, args.checkpoint)))
        args.row = args.row or args.model
    if args.row is not None and args.row not in [one.name for one in found.rows]:
        parser.error(f"--row {args.row}: the rows are {'; '.join(one.name for one in found.rows) or 'made together'}")
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    key = f"{args.paper}, {args.table}, {args.scale}"
    earlier = json.loads(args.out.read_text()).get(key, {}) if args.out.exists() else {}
    same = earlier.get("conditions") == shown.scaled(found, scale)
    before = {row["name"]: row for row in earlier["rows"] if "data" in row} if same else {}
    rows: list[dict[str, Any]] = []
    order = None
    for each in table(found, args.scale, folders, args.row, args.keep, before):
        rows.append(each)
        order = shown.compared(found, scale, rows)
        later = [row for name, row in before.items() if all(name != one.get("name") for one in rows)]
        stored: dict[str, Any] = {"environment": environment(), "rows": rows + later}
        stored |= (
            {"scale": scale.described(), "conditions": shown.scaled(found, scale)} if found.measure is None else {}
        )
        stored |= {"order": order, "in words": shown.said(order)} if order is not None else {}
        known = json.loads(args.out.read_text()) if args.out.exists() else {}
        known[key] = stored
        args.out.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    print(f"{args.paper} {args.table}, {args.scale}: {found.title}\n")
    print(shown.text(found, scale, rows, order))
    if args.scale == "full" and found.measure is None:
        print("\nWhere this differs from the paper:")
        print("\n".join(shown.wrapped(f"- {line}") for line in differences(found.rows)))


if __name__ == "__main__":
    main()
