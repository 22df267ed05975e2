"""``lipcert inspect``: the Lipschitz budget, worst first."""

import math
from collections.abc import Callable
from typing import Annotated

import typer

from lipcert.bounds import Bound, LayerBound, lipschitz

from ._errors import one_line_errors
from ._options import Checkpoint, ModelArgs, ModelName, NoPretrained, load_model
from ._print import lower, print_facts, print_table, progress, upper

TOP = 20
NAMED = 3

# A bound is called vacuous if not even a margin of 10 logits certifies one step of an 8-bit pixel.
MARGIN, PIXEL_STEP = 10.0, 1 / 255


@one_line_errors
def inspect(
    model: ModelName = None,
    everything: Annotated[bool, typer.Option("--all", help=f"Every operation, not only the {TOP} worst.")] = False,
    checkpoint: Checkpoint = None,
    no_pretrained: NoPretrained = False,
    model_args: ModelArgs = None,
) -> None:
    """Show the Lipschitz budget: how much each operation can stretch a perturbation, worst first."""
    loaded = load_model(model, checkpoint, no_pretrained, model_args, features=True)
    with progress("bounding the network") as update:
        bound = lipschitz(loaded, progress=update)
    worst = sorted(bound.layers, key=lambda layer: layer.gain, reverse=True)
    shown = worst if everything else worst[:TOP]
    stretched = _stretched(bound)
    kinds = _sums(bound, lambda layer: layer.operation)
    print_table(
        ("module", "operation", "gain", "share"),
        [(_module(layer), layer.operation, upper(layer.gain), _percent(layer.gain, stretched)) for layer in shown],
    )
    rest = "" if len(shown) == len(worst) else ", --all shows the rest"
    facts = [
        ("operations", f"{len(shown)} of {len(worst)} shown{rest}"),
        ("stretched by", ", ".join(f"{name} {_percent(gain, stretched)}" for name, gain in kinds[:NAMED])),
        ("parameters", f"{sum(p.numel() for p in loaded.parameters()):,}"),
        ("Lipschitz bound", f"{upper(bound.log10)}, {bound.rigor}"),
    ]
    if getattr(loaded.net, "num_classes", None) == 0:
        facts.append(("output", "features: this network has no classifier"))
    print_facts(facts)
    print(verdict(bound))


def verdict(bound: Bound) -> str:
    """One sentence: what the bound is good for, or which modules make it good for nothing."""
    if bound.log10 == -math.inf:
        return "The bound is 0: with these weights the network gives every image the same logits."
    log_radius = math.log10(MARGIN / math.sqrt(2)) - bound.log10
    if abs(log_radius) < 300:
        radius = lower(10**log_radius * (1 - 1e-12))  # below what the logarithms may have rounded up
    else:
        radius = f"10^{math.floor(log_radius)}" if math.isfinite(log_radius) else "0"
    reach = f"with it a margin of {MARGIN:g} logits certifies a radius of {radius}"
    if log_radius >= math.log10(PIXEL_STEP):
        return f"The bound is of use: {reach}."
    whole = _stretched(bound)
    named: list[str] = []
    covered = 0.0
    for path, gain in _sums(bound, _module)[:NAMED]:
        if covered >= whole / 2:
            break
        named.append(path)
        covered += gain
    return f"The bound is vacuous: {reach}; {', '.join(named)} stretch most, {_percent(covered, whole)} of all."


def _module(layer: LayerBound) -> str:
    """The module's path as timm knows it, without the name under which the model holds the network."""
    return layer.path.removeprefix("net.") or "(model)"


def _sums(bound: Bound, key: Callable[[LayerBound], str]) -> list[tuple[str, float]]:
    """The powers of ten by which the operations with one key stretch, largest first."""
    sums: dict[str, float] = {}
    for layer in bound.layers:
        sums[key(layer)] = sums.get(key(layer), 0.0) + max(layer.gain, 0.0)
    return sorted(sums.items(), key=lambda item: item[1], reverse=True)


def _stretched(bound: Bound) -> float:
    """The powers of ten of all operations that stretch."""
    return sum(layer.gain for layer in bound.layers if layer.gain > 0)


def _percent(gain: float, whole: float) -> str:
    return f"{100 * gain / whole:.1f} %" if gain > 0 and 0 < whole < math.inf else "0 %"
