"""The page of measurements, and the picture of the README, from the files in ``benchmarks/results``.

python -m benchmarks.make_measurements
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks._page import percent, section
from benchmarks.networks import NETWORKS
from lipcert.results import share

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "measurements.md"
PICTURE = ROOT / "docs" / "pictures" / "certified.svg"
DARK = PICTURE.with_name("certified-dark.svg")
HEAD = """# Measurements

`benchmarks/make_measurements.py` makes this page from the files in `benchmarks/results`, which name the machine of each
measurement. Shares refer to the stated images. ε is in ℓ2, on pixels in [0, 1].
"""
_COLOURS = ("#CC79A7", "#0072B2", "#009E73")


def read(name: str) -> Any:
    """What a measurement has written."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def page() -> str:
    """The page of results as Markdown."""
    return "\n".join([HEAD, _accuracy(), *_networks(), _attacked(), *_journeys()])


def points() -> dict[str, list[tuple[float, float]]]:
    """For each curve of the picture, ε and the certified share there; at 0 the clean accuracy."""
    measured = read("certified_accuracy")
    shown = {"LiResNet, anchored": "liresnet-w128", "LiResNet, gloro": "liresnet", "ViT, anchored": "vit"}
    curves = {name: measured[f"cifar10-{network}"] for name, network in shown.items()}
    return {
        name: [(0.0, one["clean"]), *((_value(e), share) for e, share in one["certified"].items())]
        for name, one in ((name, one.get("curve", one)) for name, one in curves.items())
    }


def picture(kind: str = "default") -> str:
    """Certified accuracy over ε on CIFAR-10, an SVG file; between two ε the share at the larger one is drawn.

    Args:
        kind: a style of matplotlib: ``"default"``, or ``"dark_background"``.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    curves = points()
    with style.context([kind, {"svg.hashsalt": "lipcert", "svg.fonttype": "path", "font.size": 11}]):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        axes = figure.subplots()
        for (name, line), colour, marker in zip(curves.items(), _COLOURS, "^os", strict=True):
            eps, shares = zip(*line, strict=True)
            axes.step(eps, [100 * s for s in shares], where="pre", color=colour, linewidth=2.2, label=name)
            axes.plot(eps, [100 * s for s in shares], linestyle="", marker=marker, color=colour, clip_on=False)
        axes.axvline(36 / 255, color="0.5", linewidth=0.8, linestyle=(0, (1, 2)))
        axes.text(36 / 255, 82.5, "ε = 36/255", ha="center", va="bottom")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(xlim=(0, 0.44), ylim=(0, 82), xlabel="ε, ℓ2 on pixels in [0, 1]", ylabel="certified accuracy in %")
        axes.legend(frameon=False)
        file = io.StringIO()
        figure.savefig(
            file,
            format="svg",
            transparent=kind != "default",
            metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
        )
    text = file.getvalue()
    return f"{text[text.index('<svg') :]}<!-- {json.dumps(curves)} -->\n"


def _accuracy() -> str:
    rows = []
    for name, one in read("certified_accuracy").items():
        strong = one.get("autoattack")
        auto = [f"{strong['images']:,}", percent(strong["pgd"]), percent(strong["accuracy"])] if strong else ["–"] * 3
        seconds = f"{one['cpu_seconds_a_verdict']:.2g}"
        rows.append([f"`{name}`", f"{one['images']:,}", percent(one["pgd"]), percent(one["limit"]), seconds, *auto])
    text = """Certified shares are on the [leaderboard](leaderboard.md). The accuracies under PGD and AutoAttack are
upper bounds. `limit` is the share of images that are classified correctly and whose first-order limit, margin over
gradient norm, exceeds ε; no method but `smoothing` certifies more. AutoAttack attacked those of the first images of the
shuffle that PGD had not broken.
"""
    columns = ["network", "images", "PGD", "limit", "CPU s per verdict", "AutoAttack on", "PGD there", "AutoAttack"]
    return section("Attacks on CIFAR-10 at ε = 36/255", columns, rows, text)


def _attacked() -> str:
    campaign, fuzz = read("campaign"), read("fuzz")
    rows = [
        [method, f"{one['trials']:,}", f"{one['reached']:,}", f"{one['closest']:.4f}", f"{one['median']:.2f}"]
        for method, one in campaign["by_method"].items()
    ]
    kinds = {"programs": "programs", "arguments": "calls", "scales": "networks, each at three other scales,"}
    counted = "; ".join(
        f"of {fuzz[kind]['counted']:,} {name} {fuzz[kind]['held']:,} held, {fuzz[kind]['refused']:,} were refused, "
        f"and {fuzz[kind]['false']} were false"
        for kind, name in kinds.items()
    )
    text = f"""{campaign["trials"]:,} radii of {campaign["networks"]} random networks were attacked;
{len(campaign["violations"])} were broken. A ratio is the distance at which the attack changed the prediction, divided
by the radius; a ratio below 1 means a false certificate.

`benchmarks.fuzz` draws programs from torch's tensor API and attacks their certificates. It calls single operations with
unusual arguments and compares their bounds with measurements. It multiplies the layers of networks by powers of two
that cancel, after which no radius may be larger. Results: {counted}.
"""
    columns = ["method and arithmetic", "radii", "prediction changed", "smallest ratio", "median ratio"]
    return section("Radii under attack", columns, rows, text)


def _networks() -> list[str]:
    """Real networks as they are, once they were measured."""
    if not (RESULTS / "networks.json").is_file():
        return []
    rows = [
        [
            NETWORKS[key].title,
            percent(found["clean"] / found["images"]),
            eps,
            f"{one['sigma']:g}" if one["sigma"] else "–",
            percent(one["right"] / found["images"] if one["sigma"] else None),
            share(one["certified"], found["images"]),
            f"{one['draws']:.0f}" if one["draws"] else "–",
            f"{one['cpu_seconds']:.2g}",
        ]
        for key, found in read("networks").items()
        for eps, one in found["eps"].items()
    ]
    text = """The images are the first of the shuffle; α = 0.001. The pretrained networks are smoothed with
unchanged weights, with `--denoiser natural` and the σ of `--sigma auto`. The LiResNet, on CIFAR-10, is certified by its
Lipschitz bound. `clean` is the accuracy without noise, `smoothed` the accuracy of the smoothed classifier. Abstentions
count as misclassified, including those of images whose draws ended early because a certificate was improbable.
"""
    columns = ["network", "clean", "ε", "σ", "smoothed", "certified", "draws per image", "CPU s per image"]
    return [section("Pretrained networks as they are", columns, rows, text)]


def _journeys() -> list[str]:
    """The commands of a new user, once they were measured."""
    if not (RESULTS / "journeys.json").is_file():
        return []
    rows = [
        [name, f"`lipcert {step['command']}`", f"{step['seconds']:.0f}", step["end"]]
        for name, journey in read("journeys").items()
        for step in journey["steps"]
    ]
    text = (
        "Each journey starts in an empty folder and uses default names and few images: `convert`, the commands\n"
        "that each command advises to run next, then the other commands in turn. Times are wall seconds of one run,\n"
        "on two cores shared with other jobs.\n"
    )
    return [section("From a name to a card", ["network", "command", "s", "last line"], rows, text)]


def _value(typed: str) -> float:
    part, _, whole = typed.partition("/")
    return float(part) / float(whole or 1)


def shown(text: str) -> Mapping[str, list[list[float]]]:
    """The numbers that a picture was drawn from."""
    return json.loads(text[text.index("<!-- {") + 5 : text.rindex("-->")])


if __name__ == "__main__":
    PAGE.write_text(page())
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture())
    DARK.write_text(picture("dark_background"))
