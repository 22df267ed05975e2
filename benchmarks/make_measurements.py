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

Made by `benchmarks/make_measurements.py` from the files in `benchmarks/results`, which name the machine that each
measurement ran on. Shares are of the images that are stated. ε is in ℓ2, on pixels in [0, 1].
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
    text = """Certified shares are on the [leaderboard](leaderboard.md). Accuracy under PGD and AutoAttack is an
estimate from above, and so is the first-order limit, the share that margins and gradients at the pixels alone would
certify. AutoAttack attacked what PGD left of the first images of the shuffle.
"""
    columns = ["network", "images", "PGD", "limit", "CPU s a verdict", "AutoAttack on", "PGD there", "AutoAttack"]
    return section("Attacks on CIFAR-10 at ε = 36/255", columns, rows, text)


def _attacked() -> str:
    campaign, fuzz = read("campaign"), read("fuzz")
    rows = [
        [method, f"{one['trials']:,}", f"{one['reached']:,}", f"{one['closest']:.4f}", f"{one['median']:.2f}"]
        for method, one in campaign["by_method"].items()
    ]
    counted = "; ".join(
        f"of {fuzz[kind]['counted']:,} {kind}, {fuzz[kind]['held']:,} held, {fuzz[kind]['refused']:,} were refused, "
        f"and {fuzz[kind]['false']} were false"
        for kind in ("programs", "arguments")
    )
    text = f"""{campaign["trials"]:,} radii of {campaign["networks"]} random networks were attacked;
{len(campaign["violations"])} were broken. The ratios are those of the distance at which the attack
changed the prediction to the radius: below 1 a certificate is false.

`benchmarks.fuzz` draws programs from torch's tensor API, and attacks what is certified; it calls
single operations with odd arguments, and measures what is claimed of them: {counted}.
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
    text = """The first images of the shuffle, α = 0.001. The networks are smoothed behind `--denoiser natural`, weights
unchanged, with σ chosen by `--sigma auto`; the LiResNet, of CIFAR-10, is certified by its Lipschitz bound. `clean` is
the accuracy without noise, `smoothed` that of the smoothed classifier; abstentions are wrong, also of images whose
draws ended early because a certificate was improbable.
"""
    columns = ["network", "clean", "ε", "σ", "smoothed", "certified", "draws an image", "CPU s an image"]
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
        "With default names, from an empty folder, on few images: `convert` and each command that it leads to by "
        "advice, then the others in turn. Wall seconds of one run, on two cores that other jobs shared.\n"
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
