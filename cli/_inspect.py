"""``lipcert inspect``: the Lipschitz budget of a model, largest gains first."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipcert.errors import InputError
from lipcert.inputs.sources import Source
from lipcert.settings import LOOSE, shown, unreached

from ._advice import advise
from ._options import AsJson, ModelName, ModelOptions, options_of
from ._print import command, near, print_facts, print_json, print_table, progress, start, upper

if TYPE_CHECKING:
    from lipcert.bounds import Bound, LayerBound

TOP = 20
NAMED = 3

# A bound is too large if it certifies less than one step of an 8-bit pixel for a margin of 10 logits.
MARGIN, PIXEL_STEP = 10.0, 1 / 255


@options_of(("crop_pct",), source=ModelOptions)
def inspect(
    source: Callable[..., ModelOptions],
    model: ModelName = None,
    everything: Annotated[
        bool, typer.Option("--all", help=f"Show every operation on the path, not only the {TOP} largest.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the Lipschitz constants of the operations on the path that determines the global bound."""
    asked, named = source(), Source.of(model)
    start(*asked.files)
    from lipcert.bounds import lipschitz

    from ._loading import load_model, model_options, status_of, untrained

    loaded = load_model(named, asked, features=True)
    if loaded.sigma is not None:
        certify = command("certify", named.word, "--data", "IMAGES", "--eps", "36/255")
        front = "".join(f", denoiser {step['denoiser']}" for step in loaded.recipe if step["step"] == "denoise")
        what = f"a smoothed classifier, σ = {loaded.sigma:g}{front}, whose certificates are probabilistic"
        raise InputError(f"{named.word} is {what}: it has no Lipschitz bound; {certify}")
    with progress("reading the network") as update:
        bound = lipschitz(loaded, progress=update)
    worst = sorted(bound.layers, key=lambda layer: layer.log10_gain, reverse=True)
    selected = worst if everything else worst[:TOP]
    total = _total_gain(bound)
    parameters = sum(p.numel() for p in loaded.parameters())
    if as_json:
        print_json(_record(bound, worst, parameters))
        return
    print_table(
        ("module", "operation", "gain", "share"),
        [
            (_module(layer), layer.operation, near(layer.log10_gain), _percent(layer.log10_gain, total))
            for layer in selected
        ],
    )
    hint = "" if len(selected) == len(worst) else "; --all shows all"
    kinds = _sums(bound, lambda layer: layer.operation)
    facts = [
        (
            "operations",
            f"{len(selected)} of {len(worst)} on the path{hint}; the product of the exact gains is the bound",
        ),
        ("largest gains", ", ".join(f"{name} {_percent(gain, total)}" for name, gain in kinds[:NAMED])),
        ("parameters", f"{parameters:,}"),
        ("Lipschitz bound", f"{upper(bound.log10)}, {bound.rigor}"),
        ("verdict", verdict(bound)),
    ]
    if getattr(loaded.net, "num_classes", None) == 0:
        facts.append(("output", "features: this network has no classifier"))
    else:
        status = status_of(loaded, model_options(named, asked), log10=bound.log10, random=untrained(loaded.net, asked))
        facts += advise(status).facts
    print_facts(facts)


def verdict(bound: "Bound") -> str:
    """The radius that the bound certifies, and the modules with the largest gains if it is too large."""
    if bound.log10 == -math.inf:
        return "the bound is 0: with these weights the network gives every image the same logits"
    log_radius = math.log10(MARGIN / math.sqrt(2)) - bound.log10
    if abs(log_radius) < 300:
        radius = shown(10**log_radius * (1 - 1e-12))  # covers the rounding errors of the logarithms
    else:
        radius = f"10^{math.floor(log_radius)}" if math.isfinite(log_radius) else "0"
    reach = f"a margin of {MARGIN:g} logits gives a radius of {radius}"
    if log_radius >= math.log10(PIXEL_STEP):
        return f"by methods global and gloro, {reach}"
    whole = _total_gain(bound)
    named: list[str] = []
    covered = 0.0
    for path, gain in _sums(bound, _module)[:NAMED]:
        if covered >= whole / 2:
            break
        named.append(path)
        covered += gain
    if bound.log10 > LOOSE:
        least = unreached(bound.log10)
        advice = f"no method but smoothing has certified ε ≥ {least:g} for a network with so loose a bound"
    else:
        advice = "methods anchored and staged bound the network locally instead"
    return (
        f"too large for methods global and gloro: {reach}; largest gains: {', '.join(named)}, "
        f"{_percent(covered, whole)} of the sum of log10 gains; {advice}"
    )


def _record(bound: "Bound", worst: "list[LayerBound]", parameters: int) -> dict[str, Any]:
    """The bound as values for JSON; None for infinite numbers."""

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "bound": finite(bound.value),
        "log10_bound": finite(bound.log10),
        "rigor": bound.rigor,
        "parameters": parameters,
        "verdict": verdict(bound),
        "layers": [
            {"path": _module(layer), "operation": layer.operation, "log10_gain": finite(layer.log10_gain)}
            for layer in worst
        ],
    }


def _module(layer: "LayerBound") -> str:
    """The path of the module in the timm model."""
    return layer.path.removeprefix("net").removeprefix(".") or "(model)"


def _sums(bound: "Bound", key: "Callable[[LayerBound], str]") -> list[tuple[str, float]]:
    """The sums of positive log10 gains by key, largest first."""
    sums: dict[str, float] = defaultdict(float)
    for layer in bound.layers:
        sums[key(layer)] += max(layer.log10_gain, 0.0)
    return sorted(sums.items(), key=lambda item: item[1], reverse=True)


def _total_gain(bound: "Bound") -> float:
    """The sum of all positive log10 gains."""
    return sum(layer.log10_gain for layer in bound.layers if layer.log10_gain > 0)


def _percent(gain: float, whole: float) -> str:
    return f"{100 * gain / whole:.1f} %" if gain > 0 and 0 < whole < math.inf else "0 %"
