"""The page of measurements, and the picture of the README, from the files in ``benchmarks/results``.

python -m benchmarks.make_measurements
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._page import percent, section, table
from benchmarks.papers.page import of_papers

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "measurements.md"
EXPERIMENTS = ROOT / "docs" / "experiments.md"
PICTURE = ROOT / "docs" / "pictures" / "certified.svg"
DARK = PICTURE.with_name("certified-dark.svg")
HEAD = """# Measurements

Made by `benchmarks/make_measurements.py` from the files in `benchmarks/results`, which name the machine that each
measurement ran on. Shares are of the images that are stated. ε is in ℓ2, on pixels in [0, 1]. Experiments with
training, and the papers' tables, are on [a page of their own](experiments.md).
"""
EXPERIMENTS_HEAD = """# Experiments

Made by `benchmarks/make_measurements.py`: how settings of training change certified accuracy, and the tables of the
papers at a small scale, which is no reproduction. The results are on the page of [measurements](measurements.md).
"""
_VITS = {
    "cifar10-vit": "`cifar10-vit`, 2 blocks after a convolution",
    "smooth3": "ViT, 3 blocks",
    "kinked3": "ViT, 3 blocks, projections with a kink",
}
_COUNTED = ("gloro", "staged", "limit behind the cut", "limit")
_COLOURS = ("#CC79A7", "#0072B2", "#009E73", "#D55E00")
_SECONDS = "cpu seconds of an image that gloro leaves open, mean"
_EPS = {"0.02": 0.02, "0.05": 0.05, "0.1": 0.1, "36/255": 36 / 255}


def read(name: str) -> Any:
    """What a measurement has written."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def page() -> str:
    """The page of results as Markdown."""
    parts = [
        _accuracy(),
        _from_pretrained(),
        _smoothing(),
        *([_denoised()] if (RESULTS / "denoised.json").exists() else []),
        _methods(),
        _surgery(),
        _behind_a_cut(),
        _attacked(),
        _attacks_per_second(),
        _beside_crown(),
        _cost(),
        _memory(),
    ]
    return "\n".join([HEAD, *parts])


def experiments() -> str:
    """The page of training experiments and of the papers' tables as Markdown."""
    parts = [
        _recipes(),
        _hybrids(),
        _search(),
        _lipnext(),
        _gradients(),
        _updates(),
        _margin_losses(),
        *of_papers(read("papers")),
    ]
    return "\n".join([EXPERIMENTS_HEAD, *parts])


def points() -> dict[str, list[tuple[float, float]]]:
    """For each curve of the picture, ε and the certified share there; at 0 the clean accuracy."""
    measured, vit = read("certified_accuracy"), read("anchored_radii")["cifar10-vit"]
    shown = {"LiResNet, anchored": "liresnet-w128", "LiResNet, gloro": "liresnet", "ViT, anchored": "vit"}
    curves = {name: measured[f"cifar10-{network}"] for name, network in shown.items()}
    found = {
        name: [(0.0, one["clean"]), *((_value(e), share) for e, share in one["certified"].items())]
        for name, one in ((name, one.get("curve", one)) for name, one in curves.items())
    }
    shares = vit["certificates"]["lofast"]
    layerwise = [(0.0, vit["clean"]), *((eps, shares[f"at_{typed}"]) for typed, eps in _EPS.items())]
    return {**found, "the same ViT, layer by layer": layerwise}


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
        for (name, line), colour, marker in zip(curves.items(), _COLOURS, "^osD", strict=True):
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
        certified = one["certified"]["36/255"]
        shown = _VITS.get(name, f"`{name}`")
        strong = one.get("autoattack")
        auto = (
            f"{percent(strong['accuracy'])} of {strong['images']:,} (PGD {percent(strong['pgd'])})" if strong else "–"
        )
        rows.append([shown, one["images"], one["clean"], one["pgd"], auto, certified, one["method"]])
    pipe = read("cifar_pipeline")["row"]
    rows.append(
        [
            "ViT, 2 blocks, by the commands alone",
            pipe["images"],
            pipe["clean"],
            pipe["pgd"],
            "–",
            pipe["certified"],
            "anchored",
        ]
    )
    for network in ("smooth3", "kinked3"):
        vit = read("anchored_radii")[network]
        certified = vit["certificates"]["anchored"]["at_36/255"]
        rows.append([_VITS[network], vit["images"], vit["clean"], None, "–", certified, "anchored"])
    cells = [
        [name, f"{n:,}", percent(clean), percent(pgd), auto, percent(sure), how]
        for name, n, clean, pgd, auto, sure, how in rows
    ]
    more = "\n".join(
        f"- `{name}`: {percent(one['limit'])}; {one['cpu_seconds_a_verdict']:.2g} CPU seconds a verdict."
        for name, one in read("certified_accuracy").items()
    )
    text = f"""Accuracy under PGD and AutoAttack is an estimate from above; AutoAttack attacked what PGD left of the
first images of the shuffle. The first-order limit, the share that margins and
gradients at the pixels alone would certify, and the time:

{more}
"""
    columns = ["network", "images", "clean", "under PGD", "under AutoAttack", "certified", "method"]
    return section("Certified accuracy on CIFAR-10 at ε = 36/255", columns, cells, text)


def _recipes() -> str:
    found = read("training_recipes")
    what = f"A LiResNet of width {found['network']['width']}"
    return _one_at_a_time("One setting of a training changed at a time", found, what)


def _hybrids() -> str:
    found = read("hybrid_recipes")
    network = found["network"]
    what = f"""`{network["name"]}` with residual blocks of width {network["width"]} and tokens of width
{network["embed_dim"]}. `start` scales the initial weights at the end of each branch, `radius` is that of the
projections before attention and MLPs, `neck` the width of a dense layer on all tokens, instead of their
mean. Trained"""
    return _one_at_a_time("A hybrid with L2 attention: changes of the network", found, what)


def _search() -> str:
    found = read("recipe_search")["hybrid"]
    about, runs = found["about"], [run for run in found["runs"] if run["round"]]
    keys = [(part, key) for part, named in runs[0]["recipe"].items() for key in named if key != "name"]
    keys = [one for one in keys if len({str(run["recipe"][one[0]][one[1]]) for run in runs}) > 1]
    rows = [
        [
            run["round"], *(f"{run['recipe'][part][key]}" for part, key in keys), run["epochs"],
            percent(run.get("clean")), percent(run["certified"]), f"{run['core_seconds']:.0f}",
        ]
        for run in sorted(runs, key=lambda run: (-run["round"], -run["certified"]))
    ]  # fmt: skip
    text = f"""`benchmarks.recipe_search`: {about["recipes"]} hybrids with L2 attention drawn at random, all trained for
about {about["seconds"]:.0f} core seconds on {about["images"]:,} images; the better half by certified accuracy
(`gloro`, ε = 36/255, {about["held_out"]:,} other training images) anew for twice as long, and so on.
"""
    columns = ["round", *(f"`{key}`" for _, key in keys), "epochs", "clean", "certified", "core seconds"]
    return section("A search for a hybrid by certified accuracy", columns, rows, text)


def _lipnext() -> str:
    """The best of each round of two searches with the same budgets."""
    rows = []
    for key, name in (("lipnext", "LipNeXt"), ("liresnet", "LiResNet")):
        about, runs = (read("recipe_search")[key][part] for part in ("about", "runs"))
        for turn in range(1, 1 + max(run["round"] for run in runs)):
            best = max((run for run in runs if run["round"] == turn), key=lambda run: float(run["certified"]))
            recipe = {**best["recipe"]["network"], **best["recipe"]["training"]}
            settings = ", ".join(f"{setting} {value}" for setting, value in recipe.items() if setting != "name")
            shares = percent(best["clean"]), percent(best["certified"])
            rows.append([name, f"{about['seconds'] * 2 ** (turn - 1):.0f}", *shares, best["epochs"], settings])
    rows.sort(key=lambda row: int(row[1]))
    text = f"""`benchmarks.recipe_search`: {about["recipes"]} recipes of each drawn at random, trained for the same core
seconds on {about["images"]:,} images, the better half anew for twice as long, and so on; the best of each round by
certified accuracy (`gloro`, ε = 36/255, {about["held_out"]:,} other training images).
"""
    columns = ["network", "core seconds", "clean", "certified", "epochs", "recipe"]
    return section("LipNeXt beside LiResNet at equal core seconds", columns, rows, text)


def _gradients() -> str:
    found = read("training_bound")
    rows = [
        [*name.split(", "), percent(means["clean"]), percent(means["certified"]), f"{means['bound']:.2f}"]
        for name, means in found["summary"].items()
    ]
    network, settings = found["network"], found["settings"]
    seeds = len({run["seed"] for run in found["runs"]})
    text = f"""A LiResNet of width {network["width"]} and depth {network["depth"]}
with the loss `emma`, {settings["epochs"]} epochs of {settings["images"]:,} images of CIFAR-10 in batches of
{settings["batch_size"]}, certified by `gloro` at ε = 36/255 on {found["tested"]:,} test images; means over {seeds}
seeds. `true` is the gradient of the bound as it is certified, `flattened` that of the norms of the flattened
kernels. With Muon, which makes updates orthogonal, both certify about as many.
"""
    columns = ["optimizer", "gradient", "clean", "certified", "bound"]
    return section("The gradient of the bound in training", columns, rows, text)


def _updates() -> str:
    found = read("training_bound")["cpu_seconds_per_update"]
    rows = [
        [f"`{name}`", f"`{loss}`", f"{seconds:.2f}", f"{seconds / losses['ce']:.2f}"]
        for name, losses in found.items()
        for loss, seconds in losses.items()
    ]
    columns = ["network", "loss", "CPU seconds per update", "of cross-entropy"]
    text = "Batches of 256 images of 32×32, without autocast, on one core with other work beside it.\n"
    return section("What certified training costs", columns, rows, text)


def _one_at_a_time(title: str, found: Any, what: str) -> str:
    """A table of ``benchmarks.training_recipes``."""
    bases, common = found["bases"], found["common"]
    rows = []
    for run in sorted(found["runs"], key=lambda run: -run["certified"]):
        base = f"{run['base']}, lr {bases[run['base']]['lr']:g}"
        changes = {**run["changed"].get("network", {}), **run["changed"]}
        changed = ", ".join(f"{name} {value}" for name, value in changes.items() if name != "network") or "–"
        rows.append([base, changed, percent(run["clean"]), percent(run["certified"]), f"{run['core_seconds']:.0f}"])
    text = f"""{what} with the loss `emma`, {common["epochs"]} epochs of
{common["images"]:,} images of CIFAR-10 in batches of 256, certified by `gloro` at ε = 36/255 on
{found["held_out"]:,} other training images.
"""
    return section(title, ["optimizer", "changed", "clean", "certified", "core seconds"], rows, text)


def _margin_losses() -> str:
    found = read("margin_losses")
    seconds = found["cpu_seconds_a_step"]
    rows = [[f"`{name}`", f"{one:.2f}", f"{one / seconds['anchored']:.2f}"] for name, one in seconds.items()]
    cosines = ", ".join(f"{cosine:.4f} at {eps}" for eps, cosine in found["cosine_of_gradients"].items())
    text = f"""A step on {found["images"]} images for the ViT of 2 blocks after a convolution. For the weights of the
bundled checkpoint, the gradients of `adversarial` and `anchored` have a cosine of {cosines}.
"""
    columns = ["loss", "CPU seconds per step", "of `anchored`"]
    return section("Losses for the anchored certificate", columns, rows, text)


def _methods() -> str:
    rows = []
    for network, name in _VITS.items():
        for method in ("lofast", "anchored", "limit"):
            shares = read("anchored_radii")[network]["certificates"][method]
            shown = "first-order limit, no certificate" if method == "limit" else method
            rows.append([name, shown, *(percent(shares[f"at_{eps}"]) for eps in _EPS)])
    text = "`lofast` multiplies bounds from block to block; `anchored` linearises the network once.\n"
    return section("Layer by layer, and linearised once", ["network", "method", *_EPS], rows, text)


def _surgery() -> str:
    rows = [
        [f"`{row['model']}`", _power(row["log10_bound_before"]), _power(row["log10_bound_after"])]
        for row in read("paper_models")["rows"]
    ]
    text = "Random weights. Without surgery and training no method certifies these networks at a visible ε.\n"
    return section("Global bounds before and after surgery", ["model", "before", "after convert"], rows, text)


def _behind_a_cut() -> str:
    rows = [
        (
            f"`{name}`",
            f"{row['images']:,}",
            *(f"{row[key]:,}" for key in ("clean", *_COUNTED)),
            f"{row[_SECONDS]:.1f} s",
        )
        for name, row in read("kinked_cut").items()
    ]
    columns = (
        "network", "images", "right", "gloro", "staged", "limit behind the cut", "limit at the pixels",
        "CPU time of an image that gloro leaves open",
    )  # fmt: skip
    text = """`benchmarks.kinked_cut`: images that are classified right and certified at 36/255, on networks whose last
activations have kinks. The limits are of first order: m/(K‖∇_c m‖) at the cut c, which no certificate behind c passes,
and m/‖∇m‖.
"""
    return section("Behind a cut, on networks with kinks", columns, rows, text)


def _attacked() -> str:
    campaign, fuzz = read("campaign"), read("fuzz")
    rows = [
        [method, f"{one['trials']:,}", f"{one['reached']:,}", f"{one['closest']:.4f}", f"{one['median']:.2f}"]
        for method, one in campaign["by_method"].items()
    ]
    counted = "; ".join(
        f"of {fuzz[kind]['counted']:,} {kind}, {fuzz[kind]['held']:,} held, {fuzz[kind]['refused']:,} were refused, "
        f"and {fuzz[kind]['false']} were false"
        for kind in ("programs", "modules", "arguments")
    )
    text = f"""{campaign["trials"]:,} radii of {campaign["networks"]} random networks were attacked;
{len(campaign["violations"])} were broken. The ratios are those of the distance at which the attack
changed the prediction to the radius: below 1 a certificate is false.

`benchmarks.fuzz` draws programs from torch's tensor API and hostile modules, and attacks what is certified; it calls
single operations with odd arguments, and measures what is claimed of them: {counted}.
"""
    columns = ["method and arithmetic", "radii", "prediction changed", "smallest ratio", "median ratio"]
    return section("Radii under attack", columns, rows, text)


def _beside_crown() -> str:
    rows = []
    names = _VITS | {"cifar10-liresnet": "`cifar10-liresnet`, 6 blocks with MaxMin"}
    for network, one in read("crown_radii").items():
        for asked in one["eps"]:
            seconds = [asked[f"cpu seconds of a verdict of {which}"] for which in ("staged", "crown")]
            counts = [one["images"], f"{asked['eps']:.3f}", asked["staged"], asked["crown"]]
            rows.append([names[network], *counts, *(f"{s:.3g}" for s in seconds), f"{seconds[1] / seconds[0]:.0f}"])
    small = read("lirpa_verdicts")
    kinds = {"conv": "convolution and ReLU", "gelu": "GELU", "relu": "ReLU"}
    shares = [
        [kinds[kind], one["images"], *(percent(one[who]) for who in ("lipcert", "CROWN", "α-CROWN"))]
        for kind, one in small["median_share_of_the_distance"].items()
    ]
    within = ", ".join(
        f"{len(small[key])} of {who}"
        for who, key in (("lipcert", "ours_beyond_a_change"), ("auto_LiRPA", "theirs_beyond_a_change"))
    )
    text = f"""The first images of the test set that are predicted right, all of one class, and how many
each certifies at ε. CROWN's verdicts are in float32 and do not count their rounding.

The median share of the distance to the nearest change, on {small["images"]} images of small networks
with one hidden layer. auto_LiRPA does not know that pixels lie in [0, 1]. Radii that exceed the
distance: {within}.

"""
    columns = ["network", "images", "ε", "staged", "CROWN", "CPU s per verdict of `staged`", "of CROWN", "ratio"]
    text += "\n".join([*table(["hidden layer", "images", "lipcert", "CROWN", "α-CROWN"], shares), ""])
    return section(f"Beside CROWN (auto_LiRPA {small['auto_LiRPA']})", columns, rows, text)


def _smoothing() -> str:
    found = read("smoothing")
    false = found["coverage"]["result"]
    rows = [[how, one["false radii"], one["median samples"]] for how, one in false.items()]
    other, cifar = found["locuslab"]["result"], found["cifar"]["result"]
    verdict = cifar["verdict at 36/255"]
    text = f"""2,000 half-spaces with known radii near ε. Beside locuslab/smoothing, given the same
draws: {other["images"]} images, of which {other["classes or abstentions that differ"]} differ in class
or abstention, and {other["counts of 100,000 draws"]:,} counts of 100,000 draws.

A CIFAR-10 ViT trained by `finetune --loss noise --sigma {cifar["sigma"]}` for four short epochs: the
most drawn class is right for {percent(cifar["most drawn class is right"])} of {cifar["images"]}
images, {percent(verdict["certified accuracy at 36/255"])} are certified at 36/255, with a median of
{verdict["median samples"]:.0f} counted draws of {verdict["samples at most"]:,} per image.

{_both_kinds()}
{_variants(found)}
"""
    return section("Randomized smoothing", ["draws", "false radii of 2,000", "median draws"], rows, text)


def _both_kinds() -> str:
    """Smoothing and anchored, each on a network trained for it."""
    found = read("both_kinds")
    known, minutes, asked = found["certificates"], found["training, cpu minutes"], found["arguments"]
    columns = ["certificate", "holds for", "class is right", "36/255", "0.25", "0.5", "CPU s per image"]
    rows = [
        [
            f"{name}",
            one["holds for"],
            *(percent(share) for share in (one["right"], *(one["certified"].get(eps) for eps in columns[3:6]))),
            f"{one['cpu seconds an image']:.1f}",
        ]
        for name, one in known.items()
    ]
    images = known["anchored"]["images"]
    head = f"""Both kinds in one run (`benchmarks.both_kinds`), at a small scale: the CIFAR-10 ViT after a
convolution, {minutes["noisy"]:.1f} CPU minutes of training under noise, from there
{minutes["anchored, beyond noisy"]:.1f} more on {asked["limit"]:,} images for anchored, and
{images} test images, on which a share has a 95 % interval of up to ±{98 / images**0.5:.0f} points.
The first table has networks that were trained for longer.
"""
    return "\n".join([head, *table(columns, rows), ""])


def _variants(found: Any) -> str:
    """Other ways to draw and to count, and whether they pay."""
    accuracy = "certified accuracy at 36/255"
    bundled, soft = found["bundled"]["result"], found["soft"]["result"]
    rows = [[f"noise of {name}", percent(one[accuracy])] for name, one in bundled.items()]
    rows += [[name, percent(one[accuracy])] for name, one in soft.items() if isinstance(one, dict)]
    layout = [
        [f"`{name.split(' at ')[0]}` at {name.split(' at ')[1]}", f"{one['plain']:.0f}", f"{one['channels_last']:.0f}"]
        for name, one in found["layout"]["result"].items()
    ]
    head = f"""The bundled network, {soft["images"]} images. Votes and soft outputs are those of {soft["samples"]:,}
draws at sigma 0.25, soft outputs with their variance taken as known, the most that a Lipschitz constant can say of it:
"""
    pace = "Noisy images per processor second, random weights:\n"
    tables = (table(["what is counted", accuracy], rows), table(["network", "plain", "channels last"], layout))
    return "\n".join([head, *tables[0], "", pace, *tables[1]])


def _denoised() -> str:
    """Smoothing of a pretrained network behind each denoiser."""
    found = {name: part["result"] for name, part in read("denoised").items()}
    pace = found["pace"]
    rows = [
        [
            f"`{one['denoiser']}`",
            one["eps"],
            f"{one['sigma']:g}",
            percent(one["most drawn class is right"]),
            percent(one["certified accuracy"]),
            f"{one['draws an image']:.0f}",
            f"{one['draws an image'] * pace[one['denoiser']]['draw']:.1f}",
        ]
        for one in found.values()
        if "denoiser" in one
    ]
    shares = ", ".join(
        f"{100 * pace[name]['forward passes over draws']:.0f} % behind `{name}`" for name in ("dct", "natural")
    )
    text = f"""EfficientNet-Lite0 with its ImageNet weights and nothing changed, in bfloat16, the first
{max(one["images"] for one in found.values() if "denoiser" in one)} images of the shuffle, α = 0.001. Of a draw's
processor time, forward passes of denoiser and network take {shares}. `dct` takes
{1000 * pace["dct"]["denoiser"]:.0f} ms an image, `natural` {1000 * pace["natural"]["denoiser"]:.0f} ms, and a ResNet-18
{1000 * pace["resnet18 in bfloat16"]:.0f} ms.
"""
    columns = ["`--denoiser`", "ε", "σ", "most drawn class is right", "certified", "draws an image", "CPU s an image"]
    return section("Denoised smoothing of a pretrained network", columns, rows, text)


def _from_pretrained() -> str:
    """Each way that has been measured."""
    if not (RESULTS / "from_pretrained.json").exists():
        return ""
    found = read("from_pretrained")
    ways = {
        "under noise": ("noise", found.get("noise"), "smoothing, σ = 0.25"),
        "with GELU, by `adversarial`": ("smooth", found.get("smooth"), "staged"),
        "LiResNet, taught by the first": ("taught", found.get("student", {}).get("taught"), "gloro"),
        "LiResNet alone": ("alone", found.get("student", {}).get("alone"), "gloro"),
    }
    rows = []
    for name, (step, row, method) in ways.items():
        if row is not None:
            of = found["student"] if step in ("taught", "alone") else row
            asked, minutes = of["settings"], of["core_minutes"]
            trained = f"{asked['images']:,} × {asked['epochs']}"
            shares = [percent(row["right"]), percent(row["certified"]["36/255"])]
            beyond = percent(row["certified"]["0.25"]) if step == "noise" else "–"
            power = _power(row["log10_bound"]) if "log10_bound" in row else "–"
            spent = [f"{minutes[part]:.1f}" if part in minutes else "–" for part in (step, f"certify {step}")]
            rows.append([name, trained, row["images"], *shares, beyond, method, power, *spent])
    columns = ["network", "images × epochs", "test images", "right", "certified at 36/255", "at 0.25", "method"]
    columns += ["bound", "core minutes, training", "certifying"]
    text = (
        "EfficientNet-Lite0 with ImageNet weights, fine-tuned on a part of CIFAR-10 at 64 pixels, and LiResNets of\n"
        "width 16 at 32 pixels. ε is measured on what each network gets, so it is the weaker promise at 64 pixels. In\n"
        "the first row the smoothed classifier is meant.\n"
    )
    return section("Fine-tuning of a pretrained network", columns, rows, text)


def _attacks_per_second() -> str:
    record = read("attacks_per_second")
    rows = [
        [
            f"`{row['network']}`",
            f"{row['eps']:.3g}",
            row["images"],
            row["attack"],
            row["changed"],
            f"{row['seconds']:.1f}",
            f"{row['per second']:.2f}",
        ]
        for row in record["rows"]
    ]
    size = f"{record['steps']} steps with {record['restarts']} restarts"
    text = f"""`benchmarks.attacks_per_second`: ℓ2 PGD of {size} on correctly classified images, one thread.
lipcert's maximises the margin, after restarts toward other classes; PGDL2 of torchattacks maximises the cross-entropy.
"""
    columns = ["network", "ε", "images", "attack", "predictions changed", "CPU s", "changed per CPU s"]
    return section("PGD beside torchattacks", columns, rows, text)


def _cost() -> str:
    rows = []
    for row in read("methods_224")["rows"]:
        passes = "–" if row["passes"] is None else f"{row['passes']:.0f}"
        seconds = (f"{row[key]:.1f}" for key in ("cpu_seconds_an_image", "cpu_seconds_once"))
        size = f"{row['peak_mib']:,.0f}"
        rows.append([row["method"], row["attention"], passes, *seconds, f"{row['largest_radius']:.2g}", size])
    zoo = [row for row in read("zoo_certificates")["rows"] if "inside" in row]
    took = [row["methods"]["anchored"]["seconds"] for row in zoo]
    text = f"""The smallest architecture of each of timm's files, random weights, 32×32 pixels where it
takes them: {len(zoo)} got an anchored radius, in {min(took):.0f} to {max(took):.0f} CPU seconds,
the median {median(took):.0f}; {sum(row["inside"] for row in zoo)} attacks succeeded inside.
"""
    columns = ["method", "attention", "`--passes`", "CPU s per image", "CPU s once", "radius", "peak MiB"]
    return section("Cost of `vit_tiny_patch16_224` at 224×224, 10 classes, random weights", columns, rows, text)


def _memory() -> str:
    rows = [
        [f"`{row['name']}`", f"{row['weights_bytes'] / 2**20:,.0f}", f"{row['ratio']:.2f}", f"{row['seconds']:.0f}"]
        for row in read("bound_memory")["rows"]
    ]
    columns = ["model", "weights in MiB", "peak memory over weights", "seconds"]
    return section("Memory that a global bound takes", columns, rows, "")


def _power(log10: float) -> str:
    """A bound, rounded up."""
    return f"10^{math.ceil(10 * log10) / 10:.1f}"


def _value(typed: str) -> float:
    part, _, whole = typed.partition("/")
    return float(part) / float(whole or 1)


def shown(text: str) -> Mapping[str, list[list[float]]]:
    """The numbers that a picture was drawn from."""
    return json.loads(text[text.index("<!-- {") + 5 : text.rindex("-->")])


if __name__ == "__main__":
    PAGE.write_text(page())
    EXPERIMENTS.write_text(experiments())
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture())
    DARK.write_text(picture("dark_background"))
