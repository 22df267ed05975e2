"""What the commands give and cost on networks that people have: bounds, first rows, seconds and memory.

    python -m benchmarks.what_to_expect vit_base_patch16_224 resnet50
    python -m benchmarks.what_to_expect tf_efficientnet_lite0 --checkpoint FILE --data IMAGES --limit 8
    python -m benchmarks.what_to_expect --surgery vit_base_patch16_224 --data IMAGES
    python -m benchmarks.what_to_expect --page

Each network is measured by the commands that a user types, one process each: ``inspect``, ``convert`` with each kind of
norm, and ``certify --eps 36/255``, with random weights and drawn images where no files are given. Seconds are those of
the processor, of one thread. ``--surgery`` goes on from ``convert --norm smooth`` with ``constrain`` on 64 images and
one update of ``finetune --max-norm``. The results are kept in benchmarks/results/what_to_expect.json; ``--page`` writes
docs/what-to-expect.md from them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._env import environment
from benchmarks._page import table

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "what_to_expect.json"
PAGE = ROOT / "docs" / "what-to-expect.md"
NETWORKS = (
    "vit_base_patch16_224",
    "vit_tiny_patch16_224",
    "swin_tiny_patch4_window7_224",
    "convnext_tiny",
    "resnet50",
    "tf_efficientnet_lite0",
)
NORMS = ("keep", "smooth")
HEAD = """# What to expect for your network

Made by `python -m benchmarks.what_to_expect --page` from measurements of the commands, one thread. The global
Lipschitz bound of a pretrained network is astronomical, since it is the product of the bounds of its layers. Linearised
certificates cannot exceed the first-order limit, margin over gradient norm, and for most images of such a network an
attack finds an adversarial example near it. `lipcert certify` says that no certificate is in reach, and
why.

- **A pretrained ImageNet network, unmodified**: certify its smoothed classifier,
  `lipcert certify MODEL --method smoothing --sigma auto --denoiser natural --data IMAGES --eps 36/255`.
- **A ViT that you can modify**: `lipcert convert --norm smooth`, `lipcert constrain`, then `lipcert finetune`. Small
  networks on small images have the largest certified radii.
- **A free choice of network**: one of lipcert's architectures,
  [trained from random weights](how-to/train-a-certifiable-network.md).
"""


def run(arguments: Sequence[str], folder: str) -> dict[str, Any]:
    """One command: what it printed, its exit code, and processor seconds until the first row of r.jsonl."""
    command = [sys.executable, "-m", "lipcert", *arguments]
    rows = Path(folder) / "r.jsonl"
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    first = None
    while process.poll() is None:
        if first is None and rows.exists() and rows.stat().st_size:
            times = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            first = (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
        time.sleep(0.05)
    printed = process.stdout.read() if process.stdout else ""
    return {"printed": printed, "exit": process.returncode, "first_row": first}


def measured(arguments: Sequence[str], folder: str) -> dict[str, Any]:
    """:func:`run` in a process of its own, so that the peak of memory is that of the command."""
    code = (
        "import json, resource, sys; from benchmarks.what_to_expect import run; "
        "done = run(json.loads(sys.argv[1]), sys.argv[2]); used = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(json.dumps({**done, 'cpu_seconds': round(used.ru_utime + used.ru_stime, 1), "
        "'megabytes': round(used.ru_maxrss / 1024)}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(list(arguments)), folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout))


def network(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The row of one network."""
    with tempfile.TemporaryDirectory() as folder:
        weights = ["--checkpoint", str(Path(args.checkpoint).resolve())] if args.checkpoint else ["--no-pretrained"]
        data = ["--data", str(Path(args.data).resolve())] if args.data else []
        found: dict[str, Any] = {"weights": "pretrained" if args.checkpoint else "random"}
        inspected = measured(["inspect", name, *weights, "--json"], folder)
        record = json.loads(inspected["printed"])
        found |= {"parameters": record["parameters"], "log10_bound": record["log10_bound"]}
        certify = ["certify", name, *weights, *data, "--eps", "36/255", "--out", "r.jsonl", "--limit", str(args.limit)]
        certified = measured(certify, folder)
        rows = [json.loads(line) for line in (Path(folder) / "r.jsonl").read_text().splitlines()]
        found["certify"] = {
            **{key: certified[key] for key in ("cpu_seconds", "first_row", "megabytes")},
            "images": len(rows),
            "certified": sum(row["certified"] for row in rows),
            "limits": sorted(row["limit"] for row in rows if row["limit"] is not None),
            "correct": sum(row["correct"] for row in rows) if "correct" in rows[0] else None,
        }
        for norm in NORMS:
            out = f"{norm}.safetensors"
            done = measured(["convert", name, *weights, "--norm", norm, "--out", out, "--json"], folder)
            made = json.loads(done["printed"]) if done["exit"] == 0 else {}
            found[f"convert_{norm}"] = {
                "log10_bound": made.get("log10_bound"),
                "agreement": made.get("agreement"),
                "cpu_seconds": done["cpu_seconds"],
                "megabytes": done["megabytes"],
            }
    return found


def surgery(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The bound and the CPU seconds of each step: convert, constrain, and one update with limited norms."""
    data = ["--data", str(Path(args.data).resolve())]
    with tempfile.TemporaryDirectory() as folder:
        weights = ["--checkpoint", str(Path(args.checkpoint).resolve())] if args.checkpoint else ["--no-pretrained"]
        steps: dict[str, Any] = {}
        for step, arguments in (
            ("convert", [name, *weights, "--norm", "smooth"]),
            ("constrain", ["convert.safetensors", *data, "--limit", "64"]),
            (
                "finetune",
                [
                    "constrain.safetensors",
                    *data,
                    "--limit=8",
                    "--batch-size=8",
                    "--epochs=1",
                    "--loss=ce",
                    "--max-norm=1",
                ],
            ),
        ):
            done = measured([step, *arguments, "--out", f"{step}.safetensors"], folder)
            if done["exit"]:
                raise SystemExit(f"{step} ended with exit code {done['exit']}")
            bound = json.loads(measured(["inspect", f"{step}.safetensors", "--json"], folder)["printed"])
            steps[step] = {"log10_bound": bound["log10_bound"], "cpu_seconds": done["cpu_seconds"]}
            print(f"{name}, {step}: {steps[step]}", flush=True)
    return steps


def page(results: dict[str, Any]) -> str:
    """The page as Markdown."""

    def power(log10: float | None) -> str:
        return "–" if log10 is None else f"10^{log10:.1f}"

    bounds = [
        (
            f"`{name}`",
            f"{row['parameters'] / 1e6:.1f} M",
            power(row["log10_bound"]),
            power(row["convert_keep"]["log10_bound"]),
            power(row["convert_smooth"]["log10_bound"]),
        )
        for name, row in results["networks"].items()
        if "parameters" in row
    ]
    costs = []
    for name, row in results["networks"].items():
        known = row["certify"]
        rest = (known["cpu_seconds"] - known["first_row"]) / max(1, known["images"] - 1)
        limits = known["limits"]
        middle = limits[len(limits) // 2] if limits else None
        costs.append(
            (
                f"`{name}`",
                row["weights"],
                f"{known['certified']} of {known['images']}",
                "–" if middle is None else f"{middle:.2g}",
                f"{known['first_row']:.0f} s",
                f"{rest:.1f} s",
                f"{known['megabytes'] / 1024:.1f} GB",
                f"{row['convert_keep']['cpu_seconds']:.0f} s",
            )
        )
    steps = [
        (
            f"`{name}`",
            *(
                f"{power(row['surgery'][step]['log10_bound'])}, {row['surgery'][step]['cpu_seconds']:.0f} s"
                for step in ("convert", "constrain", "finetune")
            ),
        )
        for name, row in results["networks"].items()
        if "surgery" in row
    ]
    one_by_one = [
        "\nOne after the other, with processor seconds; `constrain` on 64 images, one update of `finetune`:\n",
        *table(("network", "`convert --norm smooth`", "then `constrain`", "then `finetune --max-norm 1`"), steps),
    ]
    env = results["environment"]
    return "\n".join(
        [
            HEAD,
            "## Bounds before and after surgery\n",
            *table(("network", "parameters", "global bound", "`convert`", "`convert --norm smooth`"), bounds),
            "\nWithout pretrained weights, the residual branches of ResNet-50 and ConvNeXt-T are 0 or nearly so, and",
            "their bounds say nothing about trained ones.",
            *(one_by_one if steps else ()),
            "\n## `lipcert certify --eps 36/255`\n",
            "Processor seconds of one thread until the first row, start included, and for each further image.\n",
            *table(("network", "weights", "certified", "limit", "first row", "further", "memory", "`convert`"), costs),
            f"\nMeasured on {env['cpu']} with torch {env['torch']} and timm {env['timm']}.\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", help="timm names; without --page and names, all of the page")
    parser.add_argument("--checkpoint", help="weights of one network")
    parser.add_argument("--data", help="images")
    parser.add_argument("--limit", type=int, default=4, help="images to certify")
    parser.add_argument(
        "--surgery", action="store_true", help="only convert, constrain and finetune, one after the other"
    )
    parser.add_argument("--page", action="store_true", help="write the page and stop")
    args = parser.parse_args()
    if args.surgery and args.data is None:
        parser.error("--surgery needs --data")
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {"networks": {}}
    if not args.page:
        for name in args.networks or NETWORKS:
            row = results["networks"].get(name, {})
            measured_now = {"surgery": surgery(name, args)} if args.surgery else network(name, args)
            results["networks"][name] = row | measured_now
            results["environment"] = environment() | {"threads": 1}
            RESULT.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
            print(name, json.dumps(results["networks"][name]), flush=True)
    PAGE.write_text(page(results))
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
