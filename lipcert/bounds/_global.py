"""The global analysis: Lipschitz constants of every value of the network over the whole image box.

For a chain of layers with 1-Lipschitz activations the constants multiply to ∏ ‖W_l‖: equation 2 of Gupta and Verma 2023
(arXiv 2302.10287), and equations 1 and 2 of Huang et al. 2021 (arXiv 2111.01395).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipcert.bounds._arguments import named
from lipcert.bounds._registry import RULES, Call, NoAnswer, Tag, answer_of, check_entries, kept_whole, refusal, tagged
from lipcert.bounds._scales import check_scales
from lipcert.bounds._value import Value
from lipcert.bounds.rules.patterns import canonical_forms
from lipcert.errors import InputError, LipcertError, UnsupportedOperation, first_line
from lipcert.graph import Graph, Node, capture, evaluate, examine, examples, needed, same_logits, without_fused_kernels
from lipcert.model import Model, alone, checked, network_of, unusable
from lipcert.numerics import INFINITE, Bound, LayerBound, RealArithmetic, Upper, is_out_of_memory, leaves

Progress = Callable[[int, int, str], None]

_REFERENCE = "composition of the rules of lipcert.bounds, each with its source"


@dataclass(frozen=True)
class Analysis:
    """The result of the global analysis: a Value for every operation of the captured network."""

    graph: Graph
    values: dict[Node, Any]

    @property
    def output(self) -> Value:
        return self.values[self.graph.output]

    def bound(self) -> Bound:
        """The Lipschitz constant from pixels to logits, with its budget."""
        return Bound.deterministic(self.output.lip, "composition", _REFERENCE, layers=tuple(self._budget()))

    def obstacles(self) -> list[tuple[str, str, str]]:
        """(operation, module path, reason) for every operation that makes the bound infinite; [] if it is finite."""
        if self.output.lip.finite:
            return []
        obstacles = []
        for node in self.graph.nodes:
            value = self.values[node]
            operands = [self.values[operand] for operand in node.operands]
            if not isinstance(value, Value) or value.lip.finite:
                continue
            if all(operand.lip.finite for operand in operands if isinstance(operand, Value)):
                obstacles.append((node.name, node.path, value.unbounded or "nothing bounds the values it multiplies"))
        return obstacles

    def _budget(self) -> list[LayerBound]:
        """The path with the largest constants, from pixels to logits, with the gain of each of its operations.

        The path is built backwards: each operation is preceded by its operand with the largest constant, so the gains
        multiply to the bound. Linear operations that are bounded as one operator share one line, which lists their
        names. A normalisation without its scale is a separate line. Operations with gain 1 have no line.
        """
        lines: list[LayerBound] = []
        makers: dict[int, Node] = {}  # the first operation that computes each value
        for node in self.graph.nodes:
            makers.setdefault(id(self.values[node]), node)

        def add(nodes: Sequence[Node], before: Upper, after: Upper, method: str) -> None:
            if before > 0 and after > 0 and abs(gain := after.log10 - before.log10) > 1e-12:
                name = " + ".join(dict.fromkeys(node.name for node in nodes))
                lines.append(LayerBound(nodes[-1].path, name, gain, after.log10, method))

        node = self.graph.output
        while node is not self.graph.input:
            value = self.values[node]
            if isinstance(value, Value) and value.base is not None and value.map is not None:
                folded = self._folded(node, value.base)
                add(folded, value.base.lip, value.lip, f"{type(value.map).__name__.lower()} norm")
                if id(value.base) in makers:
                    node = makers[id(value.base)]
                    continue
                node, after = folded[0], value.base.lip
            else:
                after = value.lip if isinstance(value, Value) else INFINITE
            operands = self._inputs(node)
            if not operands:
                break
            largest = max(operands, key=lambda operand: operand.lip)
            add([node], largest.lip, after, "rule")
            node = makers[id(largest)]
        return lines[::-1]

    def _inputs(self, node: Node) -> list[Value]:
        """The operands' values; for an operand with several results, the values of its own operands."""
        inputs: list[Value] = []
        for operand in node.operands:
            value = self.values[operand]
            inputs += [value] if isinstance(value, Value) else self._inputs(operand)
        return inputs

    def _folded(self, node: Node, base: Value) -> list[Node]:
        """The operations between a value and a linear map of it, in the order of the network."""
        folded, pending = {node}, [node]
        while pending:
            for operand in pending.pop().operands:
                value = self.values[operand]
                if operand not in folded and isinstance(value, Value) and value.base is base:
                    folded.add(operand)
                    pending.append(operand)
        return [node for node in self.graph.nodes if node in folded]


def analyze(model: nn.Module, input_size: tuple[int, ...] | None = None, progress: Progress | None = None) -> Analysis:
    """Captures the network and computes a :class:`Value` for each of its operations."""
    if input_size is None or not isinstance(network_of(model), nn.Module) or isinstance(network_of(model), Model):
        model = checked(model)
        input_size = model.input_size
    check_weights(model)
    parameter = next(model.parameters(), torch.zeros(()))
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(1, *input_size, generator=generator).to(parameter.device, parameter.dtype)
    if progress is not None:
        progress(0, 1, "reading the network")
    graph = capture(model, images, whole=kept_whole)
    if isinstance(model, Model):
        _check_independence(model, images)
    _check_unused(graph)
    graph = canonical_forms(graph, "lipschitz", examples(images))
    analysis = Analysis(graph, global_values(graph, progress))
    check_scales(graph, analysis.values, images)
    return analysis


def _check_unused(graph: Graph) -> None:
    """Refuses operations without a rule even if the output does not read their result.

    The output can still depend on them: the size of a result may depend on values, and code may read that size. Integer
    operands are refused too: an index out of range raises an error, which code may catch.
    """
    used = set(needed(graph).nodes)
    known = {op for op, rule in RULES.items() if rule.lipschitz is not None or Tag.POSITIONS in rule.tags}
    unknown = [
        (f"{node.name} (its result is not used)", node.path)
        for node in graph.nodes
        if node not in used and (node.op not in known or any(map(_counts, node.operands)))
    ]
    if unknown:
        raise UnsupportedOperation(unknown)


def analyze_for_training(model: nn.Module, image: Tensor) -> Analysis:
    """Like :func:`analyze`, with gradients and without checks, inside :func:`lipcert.numerics.estimating`."""
    graph = canonical_forms(capture(model, image, whole=kept_whole, gradients=True), "lipschitz", [])
    return Analysis(graph, global_values(graph))


def _counts(node: Node) -> bool:
    return node.dtype is not None and not node.dtype.is_floating_point


def _check_independence(model: nn.Module, images: Tensor) -> None:
    """Refuses a network that mixes the images of a batch: bounds for a single image say nothing about a batch.

    The batch includes an image of zeros and an image of ones, which reveal a minimum, a maximum or a sum over the
    batch. It is also run in reverse order.
    """
    real = images.dtype == torch.float64 or getattr(model, "real", False) is True
    batch, alone = map(torch.cat, examine(model, images, real)[:2])
    with torch.no_grad(), without_fused_kernels(), RealArithmetic() if real else nullcontext():  # as in ``examine``
        for inputs, expected in ((batch, alone), (batch.flip(0), alone.flip(0))):
            check_batch(model, inputs.clone(), expected)


def check_batch(model: nn.Module, images: Tensor, alone: Tensor) -> None:
    """Refuses a network whose logits for a batch are not those of each image alone."""
    problem = "the model mixes the images of a batch; wrap it in a module that processes each image separately"
    try:
        together = model(images)
    except Exception as error:
        if isinstance(error, LipcertError) or is_out_of_memory(error):
            raise
        raise InputError(f"{problem} ({len(images)} images: {first_line(error)})") from None
    # Logits that overflow for a single image may be finite in a batch, which sums in another order.
    finite = alone.isfinite()
    tolerance = 1e-9 if images.dtype == torch.float64 else 1e-3
    finite_alone = alone.where(finite, -math.inf)
    if together.shape != alone.shape or not same_logits(
        together.where(finite, -math.inf), finite_alone, tolerance, finite_alone
    ):
        raise InputError(problem)


def global_values(graph: Graph, progress: Progress | None = None, source: Value | None = None) -> dict[Node, Any]:
    # On the box [0, 1]^(C×H×W) pixels have magnitude at most 1. The identity has Lipschitz constant 1.
    values: dict[Node, Any] = {graph.input: source or Value(graph.input.shape, 1, magnitude=1, floor=0.0)}
    missing: list[tuple[str, str]] = []

    def bounded(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if progress is not None:
            progress(len(values), len(graph.nodes), "bounding the network")
        if any(values[operand] is None for operand in node.operands):
            return None  # depends on an operation that is already listed
        try:
            return global_value(node, (node.function, *args) if isinstance(node.op, type) else args, kwargs)
        except NoAnswer as reason:
            missing.append(refusal(node, reason))
        except (IndexError, NotImplementedError, RuntimeError, ValueError) as error:  # torch, for odd arguments
            if isinstance(error, LipcertError) or is_out_of_memory(error):
                raise
            missing.append(refusal(node, NoAnswer(f"{type(error).__name__}: {first_line(error)[:200]}")))
        return None

    evaluate(graph.nodes, values, on=bounded)
    if missing:
        raise UnsupportedOperation(missing)
    return values


def global_value(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Applies the operation's rule, if the rule's signature admits the arguments.

    A parameter annotated ``Value`` must depend on the image. A parameter with another annotation, except ``Any``, must
    not.
    """
    rule = answer_of(node.op, "lipschitz")
    if _counts(node):
        raise NoAnswer(f"its result is {node.dtype}, not real")
    check_entries(node)
    if isinstance(node.op, str):
        if not node.single and not tagged(node, Tag.SPLITS):
            raise NoAnswer("several results")
        kwargs = named(kwargs)
        if "input" in kwargs and not args:
            args = (kwargs.pop("input"),)
    call = Call(node.shape, node.path, node.op)
    signature = inspect.signature(rule)
    try:
        arguments = signature.bind(call, *args, **kwargs).arguments
    except TypeError as mismatch:
        raise NoAnswer(str(mismatch)) from None
    for name, argument in arguments.items():
        annotation = signature.parameters[name].annotation
        if annotation in ("Value", Value):
            if not isinstance(argument, Value):
                raise NoAnswer(f"{name} does not depend on the image, but another operand does")
        elif annotation is not inspect.Parameter.empty and "Any" not in str(annotation) and _depends(argument):
            raise NoAnswer(f"{name} depends on the image")
    try:
        value = rule(call, *args, **kwargs)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, LipcertError):
            raise
        raise NoAnswer(f"its rule refuses the arguments: {type(error).__name__}: {first_line(error)}") from error
    if value is None or isinstance(value, (float, int, Tensor)):
        raise NoAnswer(f"its rule gives {type(value).__name__}, not a Value such as x.scaled(1.2)")
    return value


def _depends(argument: Any) -> bool:
    return any(isinstance(leaf, Value) for leaf in leaves(argument))


@alone
def lipschitz(model: nn.Module, input_size: tuple[int, ...] | None = None, progress: Progress | None = None) -> Bound:
    """An upper bound on the ℓ2 Lipschitz constant of the map from pixels in [0, 1] to logits.

    Args:
        model: a :class:`lipcert.Model`, or any module in evaluation mode that takes images in [0, 1].
        input_size: (C, H, W), for a module that is not a ``Model``.
        progress: called with (done, total, text), the number of operations that are bounded.

    Returns:
        A deterministic :class:`Bound`; ``.layers`` lists the gain of each operation in the order of the network. If the
        bound overflows float64, ``.value`` is ``inf`` and ``.log10`` is still its logarithm.

    Raises:
        UnsupportedOperation: an operation has no rule; lists all of them with their module paths.
        InputError: the weights hold NaN or infinity.
    """
    return analyze(model, input_size, progress).bound()


def check_weights(model: nn.Module) -> None:
    """Refuses weights that are not finite."""
    problem = unusable(model)
    if problem is not None:
        raise InputError(f"{problem}; nothing can be certified with it")
