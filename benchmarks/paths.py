"""Five ways from a network to a card: runs the commands of their how-to pages, each section in an empty folder.

    python -m benchmarks.paths --real ../real --cifar ../shared/data/cifar10 --work paths
    python -m benchmarks.paths --only a-small-vit --cifar ../shared/data/cifar10 --work paths

``--real`` is a folder with lite0.safetensors, imagenet.tar (1,000 classes), vit.safetensors, cnn.safetensors of a
MobileNetV2, and images/train and images/val; ``--cifar`` one with train.tar and test.tar. Pages whose files are missing
are left out. A page's module is written beside the links to its files. Each page gets a line with the time and the
result of each of its sections.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

PAGES = Path(__file__).parents[1] / "docs/how-to"
WAYS = ("a-pretrained-cnn", "a-pretrained-vit", "a-small-vit", "a-liresnet", "a-module-of-your-own")
LINKED = {
    "real": ("lite0.safetensors", "imagenet.tar", "vit.safetensors", "cnn.safetensors", "images"),
    "cifar": ("cifar10",),
}
# The line that a run adds to a section, or replaces.
RESULT = (
    "`python -m benchmarks.paths` ran these commands in {:.0f} CPU minutes: "
    "{} of {} images are certified and classified correctly."
)


def run(commands: list[str], module: tuple[str, str] | None, files: dict[str, Path], folder: Path) -> str:
    """Runs the commands of a section in a new folder; returns the section's line."""
    folder.mkdir(parents=True)
    for name, target in files.items():
        if any(name in command for command in commands):
            (folder / name).symlink_to(target)
    if module is not None:
        (folder / module[0]).write_text(module[1])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for command in commands:
        print("lipcert", command, flush=True)
        subprocess.run([sys.executable, "-m", "lipcert", *shlex.split(command)], cwd=folder, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    minutes = (used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime) / 60
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return RESULT.format(minutes, sum(row["certified"] and row["correct"] for row in rows), len(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", type=Path, help="folder with the pretrained checkpoints")
    parser.add_argument("--cifar", type=Path, help="folder with train.tar and test.tar")
    parser.add_argument("--work", type=Path, help="an empty folder")
    parser.add_argument("--only", nargs="*", choices=WAYS, default=WAYS)
    args = parser.parse_args()
    files = {name: (args.real / name).resolve() for name in LINKED["real"] if args.real}
    files |= {"cifar10": args.cifar.resolve()} if args.cifar else {}
    missing = [name for names in LINKED.values() for name in names if name not in files]
    for name in args.only:
        page = PAGES / f"{name}.md"
        found = re.search(r"^`(\w+\.py)` is\n\n```python\n(.*?)^```$", page.read_text(), re.M | re.S)
        first, *sections = re.split(r"(?=^## )", page.read_text(), flags=re.M)
        for number, section in enumerate(sections):
            commands = re.findall(r"^    lipcert (.*)$", section, re.M)
            if any(file in command for file in missing for command in commands):
                continue
            line = run(commands, found and (found[1], found[2]), files, args.work / f"{name}-{number}")
            print(line, flush=True)
            old = re.compile(r"\n`python -m benchmarks\.paths`.*\n")
            sections[number] = f"{old.sub('', section).rstrip()}\n\n{line}\n" + "\n" * (number + 1 < len(sections))
            page.write_text(first + "".join(sections))


if __name__ == "__main__":
    main()
