"""Bounds on the difference between the logits of the deployed network and of the network in real arithmetic.

Every operation v of the deployed network computes ĥ_v = f_v(ĥ_operands) + e_v, with |e_v| bounded by the rounding rules
of :mod:`lipcert.bounds`. With L the Lipschitz constants of f_v in its operands,

    ‖ĥ_v − h_v‖ ≤ Σ_operands L ‖ĥ_u − h_u‖ + ‖e_v‖.

In a residual block x + Wx the errors of x move both, so that instead of 1 + ‖W‖ the norm of I + W counts: for v = u + w
with w = Wu,

    ‖ĥ_v − h_v‖ ≤ ‖I + W‖ ‖ĥ_u − h_u‖ + ‖e_w‖ + ‖e_v‖.

The constants L come from the rules of the global analysis. These hold while the operands stay in their ranges over the
image box. Here the ranges are widened by an eighth, and the bound is ∞ if a rounding error leaves the widened range.
The rules' constants hold for any two points of their region, not only for values of two images: each bounds the
operation's difference quotient, or its derivative on a convex set, from the ranges of its operands alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from lipcert.bounds import (
    NoAnswer,
    Operand,
    Value,
    global_value,
    global_values,
    kept_whole,
    local_error,
    refusal,
    row_distances,
    rule_for,
)
from lipcert.errors import UnsupportedOperation
from lipcert.graph import PIECES, Graph, Node, capture, explicit_attention, map_nodes, needed, run
from lipcert.model import Model
from lipcert.numerics import OWN_ROUNDING, REAL, SAFETY, Address, Format, Number, address, at_most
from lipcert.roundoff._constants import computed_error

# (margins f_y − f_j, number of the call) ↦ radii of shape (N,).
Radii = Callable[[Tensor, int], Tensor]

_WIDER = 1.125


class Gains:
    """Ranges of all values of a network over the image box, and Lipschitz constants of its operations on them.

    Attributes:
        values: the global bounds of every node.
        residuals: u and w of the sums u + w with w = Wu, where the norm of I + W is known and only the sum reads w.
        format: the deployed format, with the constants that the network computes.
    """

    def __init__(self, graph: Graph, model: Model, fmt: Format):
        self.values = global_values(graph)
        self.residuals = self._residuals(graph)
        self._branches = {w: v for v, (_, w) in self.residuals.items()} if fmt == REAL else {}
        self._gains: dict[Node, dict[Node, float]] = {}
        stored = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        missing = []
        computed: dict[Address, tuple[Tensor, Tensor]] = {}
        self.format = replace(fmt, computed=computed)
        with torch.no_grad():
            nominal = evaluate(graph, _example(model)[:, None])
            zero = torch.zeros(1, dtype=torch.float64, device=model.device)
            for node in graph.nodes:
                if node is graph.input or passes(node):
                    continue
                try:
                    # In float64 itself the network is the one with these constants as float64 has them.
                    for constant in () if fmt == REAL else _constants(node, stored):
                        error = computed_error(constant, node.path, model, fmt)
                        if error is None:
                            raise NoAnswer("a constant that the network computes")
                        computed[address(constant)] = constant, error
                    operands = [Operand(nominal[u], zero, torch.full_like(zero, math.inf)) for u in node.operands]
                    local_error(node, operands, self.format)
                except NoAnswer as reason:
                    missing.append(refusal(node, reason))
        if missing:
            raise UnsupportedOperation(missing, "rounding")

    def _residuals(self, graph: Graph) -> dict[Node, tuple[Node, Node]]:
        readers = Counter(u for node in graph.nodes for u in dict.fromkeys(node.operands))
        readers[graph.output] += 1
        residuals = {}
        for node in graph.nodes:
            if node.op != "add" or len(node.operands) != 2 or node.kwargs.get("alpha", 1) != 1:
                continue
            for u, w in (node.operands, node.operands[::-1]):
                of_u = self.values[node].base is self.values[w].base is self.values[u]
                if of_u and w.operands == (u,) and readers[w] == 1 and not passes(w):
                    residuals[node] = u, w
        return residuals

    def widened(self, node: Node, lip: Number) -> Value:
        """The widened ranges of a value, with another Lipschitz constant."""
        value = self.values[node]
        rows = None if value.rows is None else (value.rows[0], value.rows[1] * _WIDER)
        return Value(value.shape, lip, magnitude=value.magnitude * _WIDER, rows=rows)

    def slack(self, node: Node) -> float:
        """The ℓ2 distance from its range that a value may have inside the widened range."""
        value = self.values[node]
        sizes = [value.magnitude] if value.rows is None else [value.magnitude, value.rows[1]]
        return float(min(sizes)) * (_WIDER - 1) / OWN_ROUNDING

    def of(self, node: Node) -> dict[Node, float]:
        """‖f(…, u', …) − f(…, u, …)‖ ≤ gain · ‖u' − u‖, for every operand u."""
        if node not in self._gains:
            self._gains[node] = {u: self._gain(node, u) for u in dict.fromkeys(node.operands)}
        return self._gains[node]

    def _gain(self, node: Node, operand: Node) -> float:
        if passes(node):
            return 1.0
        value = self.values[node]
        if value.base is self.values[operand] and value.map is not None and len(set(node.operands)) == 1:
            if (total := self._branches.get(node)) is not None:
                return float(self.values[total].map.norm + 1)  # ‖W‖ ≤ ‖I + W‖ + 1 suffices for the size of an operand
            return float(value.map.norm)

        def value_of(u: Node) -> Value:
            return self.widened(u, 1 if u is operand else 0)

        args, kwargs = map_nodes(value_of, (node.args, dict(node.kwargs)))
        if isinstance(node.op, type):
            args = (node.function, *args)
        try:
            return float(global_value(node, args, kwargs).lip)
        except NoAnswer:
            return math.inf


def _constants(node: Node, stored: set[int]) -> list[Tensor]:
    """The constants of an operation that the network computes, because their storage is not ``stored``."""
    if node.dtype is not None and node.dtype != torch.float64:
        raise NoAnswer(f"a result in {node.dtype}")
    constants: list[Tensor] = []
    _tensors((node.args, dict(node.kwargs)), constants)
    return [constant for constant in constants if constant.untyped_storage().data_ptr() not in stored]


def passes(node: Node) -> bool:
    """Whether a node only splits a value or selects one of the parts."""
    return node.op == "part" or node.op in PIECES


def _tensors(tree: object, tensors: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        if tree.is_floating_point():
            tensors.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _tensors(item, tensors)
    elif isinstance(tree, dict):
        _tensors(list(tree.values()), tensors)


def error_norm(error: Tensor) -> Tensor:
    """Upper bounds on the ℓ2 norms of (N, ...), shape (N,)."""
    flat = error.reshape(len(error), -1)
    if not flat.shape[1]:
        return flat.new_zeros(len(flat))
    scale = flat.amax(1, keepdim=True)
    unit = torch.where(scale > 0, flat / scale, 0.0).norm(dim=1) * scale[:, 0]
    return at_most(unit * OWN_ROUNDING)


class Roundoff:
    """Bounds on the rounding errors of one model in one format.

    The deployed network is ``model.to(dtype)(images.to(dtype))``. The docstring of :mod:`lipcert.roundoff` states the
    assumptions.
    """

    def __init__(self, model: Model, dtype: str | torch.dtype | Format, graph: Graph | None = None):
        self.format = Format.of(dtype)
        self.model = model
        if graph is None:
            graph = capture(model, _example(model), _has_rounding_rule, casts=self.format != REAL)
        self.graph = needed(explicit_attention(graph, model.device))
        self.gains = Gains(self.graph, model, self.format)

    def deployed(self, radii: Radii, images: Tensor, predicted: Tensor, margins: Tensor) -> Tensor:
        """Radii for the deployed network, from a method for the network in real arithmetic.

        The margins are reduced by :meth:`margins` at the radius in real arithmetic, which is an upper limit of the
        result, and :meth:`entry` is subtracted from the radius.
        """
        real = radii(margins, 0)
        lost = self.margins(images, predicted, real).to(margins.device)
        radius = torch.minimum(radii((margins - lost).clamp_min(0), 1), real)
        entry = self.entry(images, radius).to(radius.device)
        return torch.where(radius > entry, (radius - entry) * (1 - SAFETY), 0.0)

    @torch.no_grad()
    def margins(self, images: Tensor, predicted: Tensor, radius: Tensor) -> Tensor:
        """Upper bounds on (f_y − f_j) − (f̂_y − f̂_j) at images in [0, 1] within ``radius`` that the format represents.

        For a linear head f_y − f_j = ⟨w_y − w_j, h⟩ + const. The bound is ‖w_y − w_j‖ times the error of the features h
        plus the rounding of the head itself, or √2 times the error of the logits if that is smaller.
        """
        predicted = predicted.to(self.model.device)
        errors, local = self._errors(images, radius.to(self.model.device, torch.float64))
        output = self.graph.output
        bounds = math.sqrt(2) * errors[output][:, None].expand(-1, output.shape[-1])
        if output.op == "linear" and len(output.shape) == 2:
            weight = output.kwargs["weight"] if "weight" in output.kwargs else output.args[1]
            distances = torch.stack([row_distances(weight.detach().double(), y) for y in predicted.tolist()])
            head = local[output].reshape(len(images), -1)
            # The rounding errors of logit j and of logit y both count.
            through = distances * errors[output.operands[0]][:, None] + head + head.gather(1, predicted[:, None])
            bounds = torch.minimum(bounds, through)
        bounds = at_most(bounds * OWN_ROUNDING)
        return bounds.scatter(1, predicted[:, None], 0.0)

    @torch.no_grad()
    def values(self, images: Tensor) -> Tensor:
        """Upper bounds on ‖ĥ − h‖ of the output at images in [0, 1], float64, shape (N,); ∞ if there is no bound."""
        zero = torch.zeros(len(images), dtype=torch.float64, device=self.model.device)
        errors, _ = self._errors(images, zero)
        return at_most(errors[self.graph.output] * OWN_ROUNDING)

    def entry(self, images: Tensor, radius: Tensor) -> Tensor:
        """The ℓ2 distance by which rounding the pixels can move an image within ``radius``, shape (N,).

        It must be subtracted from a radius: the deployed network gets an image in [0, 1] that may be this much further
        away.
        """
        return self.format.entry(images.to(radius.device, torch.float64), radius)

    def _errors(self, images: Tensor, radius: Tensor) -> tuple[dict[Node, Tensor], dict[Node, Tensor]]:
        """Bounds on ‖ĥ − h‖ of every value, shape (N,), and on |e| of every operation."""
        nominal = evaluate(self.graph, images.to(self.model.device, torch.float64)[:, None])
        zero = torch.zeros_like(radius)
        errors = {self.graph.input: zero}
        local: dict[Node, Tensor] = {}
        for node in self.graph.nodes[1:]:
            if (residual := self.gains.residuals.get(node)) is not None:
                u, w = residual
                error = _times(float(self.gains.values[node].map.norm), errors[u]) + error_norm(local[w])
            else:
                error = sum((_times(gain, errors[u]) for u, gain in self.gains.of(node).items()), zero)
            if not passes(node):
                operands = [self._operand(u, nominal[u], radius, errors[u]) for u in node.operands]
                local[node] = local_error(node, operands, self.gains.format)
                error = error + error_norm(local[node])
            if node.single:
                error = torch.where(error <= self.gains.slack(node), error, math.inf)
            errors[node] = error * OWN_ROUNDING
        return errors, local

    def _operand(self, node: Node, nominal: Tensor, radius: Tensor, error: Tensor) -> Operand:
        value = self.gains.values[node]
        if self.format == REAL:  # the nominal values have errors of the same bound
            error = 2 * error
        moved = error + (_times(float(value.lip), radius) if bool((radius != 0).any()) else 0.0)
        return Operand(nominal, moved, torch.full_like(radius, float(value.magnitude)) + error)


def _times(gain: float, error: Tensor) -> Tensor:
    """gain · error with 0 · ∞ = 0, because a constant has no error."""
    return torch.where(error > 0, gain * error, 0.0) if gain > 0 else torch.zeros_like(error)


def _has_rounding_rule(module: nn.Module) -> bool:
    return kept_whole(module, "rounding") and rule_for(type(module)) is not None


def _example(model: Model) -> Tensor:
    pixels = torch.rand(1, *model.input_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return pixels.to(model.device)


def evaluate(graph: Graph, images: Tensor) -> dict[Node, Tensor]:
    """Values of all nodes with one result, each of shape (N, *node.shape), for images of shape (N, 1, C, H, W)."""
    single = [node for node in graph.nodes if node.single and node is not graph.input]

    def evaluated(image: Tensor) -> tuple[Tensor, ...]:
        computed = run(graph.nodes, {graph.input: image})
        return tuple(computed[node] for node in single)

    return {graph.input: images, **dict(zip(single, torch.vmap(evaluated)(images), strict=True))}
