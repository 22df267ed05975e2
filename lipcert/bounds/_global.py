"""The global question: how far can the output move over the whole image box, for one unit of pixel movement?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipcert._bound import Bound, LayerBound
from lipcert._memory import is_out_of_memory
from lipcert._upper import INFINITE, Upper
from lipcert.bounds._arguments import named
from lipcert.bounds._registry import RULES, Call, NoAnswer, answer_of, kept_whole, refusal
from lipcert.bounds._value import Value
from lipcert.bounds.forms import canonical_forms
from lipcert.errors import InputError, LipcertError, UnsupportedOperation, first_line
from lipcert.graph import PIECES, Graph, Node, capture, close, examples, map_nodes, needed, passed, passes
from lipcert.model import Model, unusable

Progress = Callable[[int, int, str], None]

# Of the four examples, each is looked at, replayed, and run alone, and compared twice more if forms are found; the
# first is looked at twice and captured, and all go through together in two orders.
_PASSES = 24
_REFERENCE = "composition of the rules of lipcert.bounds, each with its source"


@dataclass(frozen=True)
class Analysis:
    """What the global walk found: a Value for every operation of the captured network."""

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
        found = []
        for node in self.graph.nodes:
            value = self.values[node]
            operands = [self.values[operand] for operand in node.operands]
            if not isinstance(value, Value) or value.lip.finite:
                continue
            if all(operand.lip.finite for operand in operands if isinstance(operand, Value)):
                found.append((node.name, node.path, value.unbounded or "nothing bounds the values it multiplies"))
        return found

    def _budget(self) -> list[LayerBound]:
        """The path that decides the bound, from pixels to logits, with what each of its operations stretches.

        From the logits back, an operation's largest operand comes before it, so that the gains multiply to the bound.
        Linear operations that are bounded as one operator are one line, with their names. What a normalisation does
        before its scale is a line of its own. Operations that stretch nothing have none.
        """
        lines: list[LayerBound] = []
        makers: dict[int, Node] = {}  # of each value the first operation that has it
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
        """The values that an operation gets; those of the operation before it where that has several results."""
        found: list[Value] = []
        for operand in node.operands:
            value = self.values[operand]
            found += [value] if isinstance(value, Value) else self._inputs(operand)
        return found

    def _folded(self, node: Node, base: Value) -> list[Node]:
        """The operations from a value to a linear map of it, in the order of the network."""
        found, left = {node}, [node]
        while left:
            for operand in left.pop().operands:
                value = self.values[operand]
                if operand not in found and isinstance(value, Value) and value.base is base:
                    found.add(operand)
                    left.append(operand)
        return [one for one in self.graph.nodes if one in found]


def analyze(model: nn.Module, input_size: tuple[int, ...] | None = None, progress: Progress | None = None) -> Analysis:
    """Captures the network and answers the global question for each of its operations.

    Args:
        model: a :class:`lipcert.Model`, or any module that takes images in [0, 1].
        input_size: (C, H, W); a ``Model`` knows its own.
        progress: called with (done, in all, what is being done): passes while the network is read, then operations.

    Raises:
        UnsupportedOperation: names every operation without a rule and where it is.
        InputError: the weights hold NaN or infinity, or the model's form is not that of a classifier.
    """
    if isinstance(model, Model):
        input_size = model.input_size
    if input_size is None:
        raise InputError("input_size=(C, H, W) is needed for a module that is not a lipcert.Model")
    check_weights(model)
    parameter = next(model.parameters(), torch.zeros(()))
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(1, *input_size, generator=generator).to(parameter.device, parameter.dtype)
    with _reading(progress):
        graph = capture(model, images, whole=kept_whole)
        if isinstance(model, Model):
            _check_independence(model, images)
        _check_unused(graph)
        graph = canonical_forms(graph, "lipschitz", examples(images))
    return Analysis(graph, global_values(graph, progress))


@contextmanager
def _reading(progress: Progress | None) -> Iterator[None]:
    """Reports the passes through a network; there are fewer where it has been read before, or writes no form out."""
    done = 0

    def count() -> None:
        nonlocal done
        done = min(done + 1, _PASSES)
        if progress is not None:
            progress(done, _PASSES, "reading the network")

    if progress is not None:
        progress(0, _PASSES, "reading the network")
    with passes(count):
        yield


# Operations without a rule whose results go nowhere: torch.max gives the places of the largest entries beside them.
_HARMLESS = frozenset(("argmax", "argmin", "part"))


def _check_unused(graph: Graph) -> None:
    """Refuses operations without a rule that the output does not depend on.

    Nothing says that it does not: the size of a result may depend on values, and code may look at it. Neither may whole
    numbers be used: positions that a tensor does not have are an error, and code may catch that.

    Raises:
        UnsupportedOperation: names them.
    """
    used = set(needed(graph).nodes)
    unknown = [
        (f"{node.name} (its result is not used)", node.path)
        for node in graph.nodes
        if node not in used and (not (_has_rule(node.op) or node.op in _HARMLESS) or _counts(node.operands))
    ]
    if unknown:
        raise UnsupportedOperation(unknown)


def analyze_for_training(model: nn.Module, image: Tensor) -> Analysis:
    """The same questions with gradients and without checks, inside :func:`lipcert._estimate.estimating`.

    Args:
        model: what :func:`analyze` has been through.
        image: shape (1, C, H, W).
    """
    graph = canonical_forms(capture(model, image, whole=kept_whole, gradients=True), "lipschitz", [])
    return Analysis(graph, global_values(graph))


def _has_rule(op: Any) -> bool:
    return op in RULES and RULES[op].lipschitz is not None


def _counts(operands: Sequence[Node]) -> bool:
    return any(node.dtype is not None and not node.dtype.is_floating_point for node in operands)


def _check_independence(model: nn.Module, images: Tensor) -> None:
    """Refuses a network that mixes the images of a batch: what holds for one image alone says nothing of a batch.

    Among the images are one that is all 0 and one that is all 1, so that a minimum, a maximum or a sum over the batch
    shows, and each is given in the first and in the last place.

    Raises:
        InputError: the logits of an image depend on the others, or several images cannot be given together.
    """
    problem = "the model mixes the images of a batch; wrap it in a module that treats each by itself"
    batch = torch.cat(examples(images))
    tolerance = 1e-9 if batch.dtype == torch.float64 else 1e-3
    with torch.no_grad():
        alone = torch.cat([_counted(model, image[None].clone()) for image in batch])
        for given, expected in ((batch, alone), (batch.flip(0), alone.flip(0))):
            try:
                together = _counted(model, given.clone())
            except Exception as error:
                if isinstance(error, LipcertError) or is_out_of_memory(error):
                    raise
                raise InputError(f"{problem} (several images: {first_line(error)})") from None
            # What overflows for an image alone may not overflow in a batch, where sums are taken in another order.
            known = expected.isfinite()
            if together.shape != expected.shape or not close(
                together.where(known, 0), expected.where(known, 0), tolerance
            ):
                raise InputError(problem)


def _counted(model: nn.Module, images: Tensor) -> Tensor:
    logits: Tensor = model(images)
    passed()
    return logits


def global_values(graph: Graph, progress: Progress | None = None) -> dict[Node, Any]:
    # The box [0, 1]^(C×H×W): pixels have magnitude at most 1, and the constant from the pixels to themselves is 1.
    values: dict[Node, Any] = {graph.input: Value(graph.input.shape, 1, magnitude=1, floor=0.0)}
    missing: list[tuple[str, str]] = []
    for done, node in enumerate(graph.nodes):
        if node is graph.input:
            continue
        if progress is not None:
            progress(done, len(graph.nodes), "bounding the network")
        if any(values[operand] is None for operand in node.operands):
            values[node] = None  # what is behind a missing rule; the rule itself has been noted
            continue
        args, kwargs = map_nodes(values.__getitem__, (node.args, dict(node.kwargs)))
        if isinstance(node.op, type):
            args = (node.function, *args)
        try:
            values[node] = global_value(node, args, kwargs)
        except NoAnswer as reason:
            missing.append(refusal(node, reason))
            values[node] = None
        except (IndexError, NotImplementedError, RuntimeError, ValueError) as error:  # torch's, for odd arguments
            if isinstance(error, LipcertError) or is_out_of_memory(error):
                raise
            missing.append(refusal(node, NoAnswer(f"{type(error).__name__}: {first_line(error)[:200]}")))
            values[node] = None
    if missing:
        raise UnsupportedOperation(missing)
    return values


def global_value(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Asks the operation's rule, if its arguments are such as the rule's signature allows.

    A parameter annotated ``Value`` must depend on the image, one annotated with anything else but ``Any`` must not.

    Raises:
        NoAnswer: no rule, or arguments that it does not cover.
    """
    rule = answer_of(node.op, "lipschitz")
    if node.dtype is not None and not node.dtype.is_floating_point:
        raise NoAnswer(f"its result is {node.dtype}, not real")
    if isinstance(node.op, str):
        if not node.single and node.op not in PIECES:
            raise NoAnswer("several results")
        kwargs = named(kwargs)
        if "input" in kwargs and not args:
            args = (kwargs.pop("input"),)
    call = Call(node.shape, node.path)
    signature = inspect.signature(rule)
    try:
        arguments = signature.bind(call, *args, **kwargs).arguments
    except TypeError as mismatch:
        raise NoAnswer(str(mismatch)) from None
    for name, argument in arguments.items():
        annotation = signature.parameters[name].annotation
        if annotation in ("Value", Value):
            if not isinstance(argument, Value):
                raise NoAnswer(f"{name} does not depend on the image, another operand does")
        elif annotation is not inspect.Parameter.empty and "Any" not in str(annotation) and _holds_value(argument):
            raise NoAnswer(f"{name} depends on the image")
    try:
        return rule(call, *args, **kwargs)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, LipcertError):
            raise
        raise NoAnswer(f"arguments that its rule does not take: {type(error).__name__}: {first_line(error)}") from error


def _holds_value(tree: Any) -> bool:
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return any(_holds_value(item) for item in tree) if isinstance(tree, (tuple, list)) else isinstance(tree, Value)


def lipschitz(model: nn.Module, input_size: tuple[int, ...] | None = None, progress: Progress | None = None) -> Bound:
    """An upper bound on the ℓ2 Lipschitz constant of the map from pixels in [0, 1] to logits.

    Args:
        model: a :class:`lipcert.Model`, or any module in evaluation mode that takes images in [0, 1].
        input_size: (C, H, W), for a module that is not a ``Model``.
        progress: called with (done, in all, what is being done): passes while the network is read, then operations.

    Returns:
        A deterministic :class:`Bound`; ``.layers`` is the budget in the order of the network. Where the bound is too
        large for float64, ``.value`` is ``inf`` and ``.log10`` still says how large.

    Raises:
        UnsupportedOperation: names every operation without a rule and where it is.
        InputError: the weights hold NaN or infinity.
    """
    return analyze(model, input_size, progress).bound()


def check_weights(model: nn.Module) -> None:
    """Refuses weights of which no bound could be true.

    Raises:
        InputError: naming the first tensor that holds NaN, or the first weight that is infinite.
    """
    problem = unusable(model)
    if problem is not None:
        raise InputError(f"{problem}; nothing can be certified with it")
