"""Texts of reports: radii rounded down, and explanations of the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from jinja2 import Environment, PackageLoader, select_autoescape
from timm import is_model
from timm.data import ImageNetInfo

from lipcert.inputs.files import printable
from lipcert.numerics import WORDS
from lipcert.results import Run
from lipcert.settings import shown

TEMPLATES = Environment(loader=PackageLoader("lipcert", "assets"), autoescape=select_autoescape())
IMAGENET = 1000  # classes of ImageNet-1k
# Larger than the diameter of every image box: a radius beyond it means that the whole box is certified.
UNBOUNDED = 1e5
_EVIDENCE = {"rounding": "round-off"}


def promises(runs: Sequence[Run]) -> list[str]:
    """What the results of the runs guarantee and what they do not, one paragraph each."""
    text = TEMPLATES.get_template("promises.md").render(
        pixels=not all(run.inside for run in runs),
        inside=any(run.inside for run in runs),
        network=not all(run.smoothed for run in runs),
        smoothed=any(run.smoothed for run in runs),
        denoised=any(run.denoiser for run in runs),
        deterministic=any(not run.delta for run in runs),
        probabilistic=any(run.delta and not run.smoothed for run in runs),
        words={word for run in runs for found in run.evidence.values() for word in found},
        attacked=any(run.attacked for run in runs),
    )
    return [line for line in text.splitlines() if line]


def right(run: Run) -> str:
    """The name of the accuracy of a run."""
    return "accuracy of the smoothed classifier" if run.smoothed else "clean accuracy"


def about(run: Run) -> str:
    """What the certificates are valid for."""
    dtype = str(run.summary.get("dtype", "unknown"))
    if run.smoothed:
        network = "" if dtype == "real" else f", sampled in {dtype}"
        return f"the smoothed classifier, σ = {run.noise['sigma']:g}{network}; not the network itself"
    place = f", and perturbations of {run.perturbed}, not of the pixels" if run.inside else ""
    return f"exact arithmetic{place}" if dtype == "real" else f"a forward pass in {dtype}"


def evidence(run: Run) -> list[tuple[str, str]]:
    """What of the certificates is proved, what is only checked, and what is assumed."""
    entries = []
    for word in WORDS:
        names = [
            _EVIDENCE.get(name, name) + ("" if found[word] == len(run) else f" of {found[word]} of {len(run)} images")
            for name, found in run.evidence.items()
            if word in found
        ]
        entries += [(word, ", ".join(names))] if names else []
    return entries


def seconds(run: Run) -> str:
    """The time of a run by the clock, where it is known, and of all cores."""
    cpu = f"{run.cpu_seconds:.1f} CPU seconds, {run.cpu_seconds / max(len(run), 1):.3g} per image"
    return cpu if run.seconds is None else f"{run.seconds:.1f} ({cpu})"


def class_name(run: Run, number: int) -> str:
    """The name of a class: from the data set or, for timm networks of 1000 classes, ImageNet-1k; else its number."""
    names = run.summary.get("class_names") or {}
    name = str(names.get(str(number), number))
    if name.startswith("n0") or name.startswith("n1"):
        return ImageNetInfo().label_name_to_description(name)
    if not names and run.classes == IMAGENET and is_model(run.network):
        return ImageNetInfo().index_to_description(number)
    return name


def radius(value: float) -> str:
    """A radius, rounded down."""
    return "unbounded" if value >= UNBOUNDED else shown(value)


def lower_bound(run: Run) -> str:
    """The name of the certified share of a run."""
    what = "certified accuracy" if run.labelled else "certified share of unlabelled images"
    return f"{what}, {run.holds_for}" if run.smoothed else what


def upper_bound(run: Run) -> str:
    """The name of the curve above the certified one."""
    return f"accuracy under {run.attack_name}" if run.attacked else right(run) if run.labelled else "all images"


def listed(items: Sequence[str]) -> str:
    """``a``, ``a and b``, or ``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def other_order(pairs: Sequence[tuple[int, int]], names: Mapping[int, str]) -> str | None:
    """One line if predictions agree far better with the labels under another order of the classes; else None.

    Classes are assigned on the confusion matrix of one half of the (label, prediction) pairs, largest entries first,
    and judged on the other half, so that chance does not count: random predictions gain nothing. It takes two classes
    that gain.
    """
    gains: Counter[int] = Counter()
    example = None
    for half in (0, 1):
        counts = Counter(pairs[half::2])
        assigned: dict[int, int] = {}
        for (label, predicted), count in counts.most_common():
            if count > 1 and label not in assigned and predicted not in assigned.values():
                assigned[label] = predicted
        for label, predicted in pairs[1 - half :: 2]:
            gains[label] += (assigned.get(label, label) == predicted) - (label == predicted)
        example = min(((a, b) for a, b in assigned.items() if a != b), default=example)
    gained = sum(gains.values())
    if example is None or sum(gain > 0 for gain in gains.values()) < 2:
        return None
    if gained <= max(len(pairs) / 10, 3 * len(pairs) ** 0.5):
        return None
    right = sum(a == b for a, b in pairs)
    first, second = (printable(names.get(number, str(number))) for number in example)
    return (
        f"predictions agree with {right} of {len(pairs)} labels, and with about {right + gained} in another order of "
        f"the classes, where {first} is {second}: if the model was trained with it, give that: --classes FILE"
    )
