"""The page of certified networks for CIFAR-10: ours from ``benchmarks/results``, the literature's with their sources.

python -m benchmarks.make_leaderboard
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._page import table
from benchmarks.make_checkpoints import ALL
from benchmarks.make_measurements import read
from benchmarks.papers.recipes import CIFAR, EPS
from benchmarks.papers.tables import find
from lipcert.results import interval

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "leaderboard.md"
HEAD = f"""# Leaderboard: CIFAR-10, ℓ2, ε = {EPS}

Certified accuracy is the share of test images that are classified correctly and whose class no perturbation of ℓ2 norm
up to ε changes, with pixels in [0, 1]. Made by `benchmarks/make_leaderboard.py`. Networks of lipcert name the
measurement that they are from; their training minutes are those of one core. Where fewer than 10,000 images were
certified, they are the first of a fixed shuffle, and the 95 % confidence interval (Wilson) of the certified share is
given. PGD is given where it attacked all certified images. The other entries are as their sources report them, on the
whole test set; none was run again. Entries by `anchored` are of version 0.2.0.
"""
FOOT = """
- *global*: a Lipschitz constant of the whole network; *local*: one that is valid near the image; *1-Lipschitz*: layers
  with constant 1 by construction. All three are valid for every perturbation up to ε.
- *anchored*: the certificate on [its own page](anchored.md). δ is its failure probability per image. *After a Lipschitz
  prefix*: of the layers behind a value; its radius is divided by the Lipschitz constant of the layers before.
- *smoothed*: randomized smoothing. The certificate is about the class that the network predicts most often under
  noise, not about the network itself, and fails with probability at most 0.001 per image. Not comparable with others.
- *no bound*: the product that CertViT computes for vision transformers leaves out some of their operations.
- "DDPM": trained with images of a diffusion model in addition.
- "Prach et al. 2024, logs": the last epoch of the training logs that come with the authors' code for "1-Lipschitz
  Layers Compared" (arXiv 2311.16833); 24 hours of training each, and for each layer the size that certifies the most.
"""
_CURVE = ("36/255", "48/255", "60/255", "72/255", "108/255")
_LOGS = "Prach et al. 2024, logs"
# data/runs/CIFAR10/final_training_24h/*/*/*/training_statistics.csv in
# github.com/berndprach/1LipschitzLayersCompared at 01e3f2a: accuracy, and certified at 36, 72, and 108/255.
_LAYERS_COMPARED = {
    "AOL ConvNetM": (73.41, 60.98, 47.06, 34.65),
    "BCOP ConvNetM": (73.99, 60.51, 45.72, 32.20),
    "Cayley ConvNetS": (74.15, 61.06, 46.30, 32.82),
    "CPL ConvNetM": (76.65, 65.07, 51.52, 38.10),
    "LOT ConvNetS": (76.65, 64.56, 50.57, 37.50),
    "SLL ConvNetM": (75.30, 62.78, 48.86, 35.83),
    "SOC ConvNetM": (76.90, 66.34, 53.37, 39.99),
}
BEYOND = f"""## Beyond {EPS}

Certified accuracy at larger ε. The networks that are certified behind a cut were trained for {EPS}, and their
certificates reach no further than the layers after the cut are nearly linear.
"""
COMMANDS = """## Commands

What prints the shares of lipcert's networks, with CIFAR-10's test images as a tar file or a folder:
"""
_KINDS = {
    "BCOP": "1-Lipschitz", "Cayley": "1-Lipschitz", "SOC": "1-Lipschitz", "CPL": "1-Lipschitz", "SLL": "1-Lipschitz",
    "GloRo": "global", "LMT": "global", "LiResNet": "global", "CertViT": "global", "Local-Lip": "local",
    "BCP": "local", "IBP": "intervals", "CROWN-IBP": "linear relaxation", "CAP": "linear relaxation",
    "ReLU-Stability": "verification",
}  # fmt: skip
_NO_BOUND = "CertViT ViT"
_SOURCES = {  # paper and table, and the rows that it is the first to report
    ("liresnet", "1"): ("Hu et al. 2023, table 1", ("",)),
    ("local-lip", "2"): ("Huang et al. 2021, table 2", ("",)),
    ("certvit", "1"): ("Gupta and Verma 2023, table 1", ("CertViT",)),
}


@dataclass(frozen=True)
class Entry:
    """A line of the page; shares in percent.

    Attributes:
        name: the network.
        kind: of certificate.
        clean: accuracy without perturbation.
        attacked: accuracy under PGD, or None.
        certified: certified accuracy.
        parameters: in millions, or None.
        images: how many were certified.
        training: CPU minutes, or None.
        source: paper and table, or the file of the measurement.
    """

    name: str
    kind: str
    clean: float
    attacked: float | None
    certified: float
    source: str
    parameters: float | None = None
    images: str = "all"
    training: float | None = None


def page() -> str:
    """The page as Markdown, the highest certified accuracy first."""
    entries = sorted((*_of_papers(), *_ours()), key=lambda entry: -entry.certified)
    columns = ("network", "certified", "clean", "PGD", "certificate", "parameters", "images", "training", "source")
    rows = [
        (
            entry.name, f"**{_percent(entry.certified)}**", *map(_percent, (entry.clean, entry.attacked)), entry.kind,
            "–" if entry.parameters is None else f"{entry.parameters:.3g} M", entry.images,
            "–" if entry.training is None else f"{entry.training:.0f} min", entry.source,
        )
        for entry in entries
    ]  # fmt: skip
    commands = [f"    {row['command']}" for row in _zoo().values() if row["name"].startswith("cifar10")]
    return "\n".join((HEAD, *table(columns, rows), FOOT, BEYOND, *_beyond(), "", COMMANDS, *commands, ""))


def _beyond() -> list[str]:
    """The table of certified accuracy at each ε, the highest at 72/255 first."""
    rows: list[tuple[float, tuple[str, ...]]] = []
    for name, one in read("certified_accuracy").items():
        one = one.get("curve", one)
        shares = [one["certified"].get(eps) for eps in _CURVE]
        shown = [_percent(None if share is None else 100 * share) for share in shares]
        counted = _counted(shares[0], one["images"])
        rows.append((shares[3] or 0.0, (f"**lipcert** `{name}`", counted, _percent(100 * one["clean"]), *shown)))
    for name, (clean, *known) in _LAYERS_COMPARED.items():
        at = dict(zip(("36/255", "72/255", "108/255"), known, strict=True))
        rows.append((at["72/255"] / 100, (f"{name} ({_LOGS})", "all", *map(_percent, (clean, *map(at.get, _CURVE))))))
    columns = ("network", "images", "clean", *_CURVE)
    return table(columns, [row for _, row in sorted(rows, key=lambda row: -row[0])])


def _zoo() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads((ROOT / "lipcert" / "assets" / "certified.json").read_text())}


def _of_papers() -> Iterator[Entry]:
    for (paper, number), (source, first) in _SOURCES.items():
        found = find(paper, number)
        for row in found.rows:
            name = row.name.split(", ", 1)[-1]
            if row.data != CIFAR or row.eps != EPS or name.startswith("Standard") or not name.startswith(first):
                continue
            figures = dict(zip(found.columns, row.paper, strict=False))
            clean, certified = figures["clean"], figures["certified"]
            if clean is None or certified is None:
                continue
            count = figures.get("parameters")
            parameters = count / 1e6 if count else figures.get("parameters in millions")
            kind = (
                "no bound" if name == _NO_BOUND else next(_KINDS[known] for known in _KINDS if name.startswith(known))
            )
            yield Entry(name, kind, clean, figures.get("pgd"), certified, source, parameters)
    for name, (clean, certified, *_) in _LAYERS_COMPARED.items():
        yield Entry(name, "1-Lipschitz", clean, None, certified, _LOGS)


def _ours() -> Iterator[Entry]:
    zoo = _zoo()
    behind = "anchored after a Lipschitz prefix"
    kinds = {
        "cifar10-liresnet-w128": (", labels mixed with a teacher's", behind),
        "cifar10-liresnet-smooth": ("", behind),
        "cifar10-liresnet": ("", "global"),
        "cifar10-liresnet-108": (", trained for ε up to 144/255", "global"),
        "cifar10-hybrid-l2": (", 1 block of L2 attention, which changes few predictions", "global"),
        "cifar10-vit": (", dot-product attention, 2 blocks", "anchored"),
    }
    minutes = {
        "cifar10-liresnet": sum(epoch["seconds"] for epoch in read("liresnet_cifar")["epochs"]) / 60,
        "cifar10-vit": sum(read("both_kinds")["training, cpu minutes"].values()),
    }
    for name, (more, bound) in kinds.items():
        row = zoo[name]
        kind = f"{bound}, {row['rigor']}"
        yield Entry(
            f"**lipcert** `{name}`{more}", kind, 100 * row["clean"], _pgd(row), 100 * row["certified"],
            "`certified.json`", row["parameters"] / 1e6, _counted(row["certified"], row["images"]), minutes.get(name),
        )  # fmt: skip
    both = read("both_kinds")
    found = both["certificates"]["smoothing"]
    yield Entry(
        "**lipcert** ViT of 2 blocks, trained under noise", "smoothed, σ = 0.25", 100 * found["right"], None,
        100 * found["certified"][EPS], "`both_kinds.json`", None, _counted(found["certified"][EPS], found["images"]),
        both["training, cpu minutes"]["noisy"],
    )  # fmt: skip


def _counted(certified: float, images: int) -> str:
    """The number of images; if they are not all, with Wilson's 95 % confidence interval of the certified share."""
    return f"{images:,}" + (f" ({interval(round(certified * images), images)})" if images < ALL else "")


def _pgd(row: dict[str, Any]) -> float | None:
    """Accuracy under PGD in percent, if it attacked all certified images."""
    return 100 * row["attacked"] if row["attacked_images"] == row["images"] else None


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1f} %"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
