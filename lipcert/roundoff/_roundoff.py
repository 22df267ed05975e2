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
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lipcert.bounds import (
    RULES,
    NoAnswer,
    Operand,
    Schur,
    Tag,
    Value,
    arguments,
    explicit_attention,
    global_value,
    global_values,
    jacobian_of,
    kept_whole,
    local_error,
    per_image,
    refusal,
    row_distances,
    schur_bounds,
    tagged,
)
from lipcert.errors import UnsupportedOperation
from lipcert.graph import Graph, Node, needed
from lipcert.model import Model
from lipcert.numerics import OWN_ROUNDING, REAL, SAFETY, Format, Number, at_most, l2_norm
from lipcert.roundoff._constants import deployed_graph

# (margins f_y − f_j, number of the call) ↦ radii of shape (N,).
Radii = Callable[[Tensor, int], Tensor]

_WIDER = 1.125
# What rounding may take of a margin, relative to it, without a look at the image.
NEGLIGIBLE = 5e-5
# The number of entries of all values of the images that are examined together.
ENTRIES_AT_ONCE = 2**24


class Gains:
    """Ranges of all values of a network over the image box, and Lipschitz constants of its operations on them.

    Attributes:
        values: the global bounds of every node.
        residuals: u and w of the sums u + w with w = Wu, where the norm of I + W is known and only the sum reads w.
        format: the deployed format, with the constants that the network computes.
    """

    def __init__(self, graph: Graph, model: Model, fmt: Format, refused: Sequence[tuple[str, str]] = ()):
        self.values = global_values(graph)
        self.residuals = self._residuals(graph)
        self._branches = {w: v for v, (_, w) in self.residuals.items()} if fmt == REAL else {}
        self._gains: dict[Node, dict[Node, float]] = {}
        # Values of which an operation needs that they stay away from 0.
        read = {node.args[-1] for node in graph.nodes if tagged(node, Tag.SINGULAR) and node.args}
        self._positive = {u for u in graph.nodes if u in read and u.single and self.values[u].lowest > 0}
        self._slopes: dict[Node, dict[Node, float] | None] = {}
        self.device = model.device
        stored = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        missing = list(refused)
        self.format = fmt
        with torch.no_grad():
            nominal = graph.values(_example(model)[:, None])
            zero = torch.zeros(1, dtype=torch.float64, device=model.device)
            for node in graph.nodes:
                if node is graph.input or passes(node):
                    continue
                try:
                    constants = [x for x in node.tensors if x.is_floating_point()]
                    kind = node.dtype
                    if kind is not None and (kind != torch.float64 if fmt == REAL else not kind.is_floating_point):
                        raise NoAnswer(f"a result in {kind}")
                    # In float64 itself the network is the one with these constants as float64 has them.
                    for constant in () if fmt == REAL else constants:
                        is_stored = constant.untyped_storage().data_ptr() in stored
                        if not (is_stored or _is_mask(constant)) and fmt.computed.error_of(constant) is None:
                            raise NoAnswer("a constant that the network computes")
                    fmt.computed.asked.clear()
                    operands = [Operand(nominal[u], zero, torch.full_like(zero, math.inf)) for u in node.operands]
                    self.error(node, operands)
                    if fmt.computed.unread(constants):
                        raise NoAnswer("a constant with an error")
                except NoAnswer as reason:
                    missing.append(refusal(node, reason))
        if missing:
            raise UnsupportedOperation(missing, "rounding")

    def error(self, node: Node, operands: Sequence[Operand]) -> Tensor:
        """Bounds on |e| of an operation, in the type that its result has in the deployed network."""
        return local_error(node, operands, self.format.of_type(node.dtype))

    def _residuals(self, graph: Graph) -> dict[Node, tuple[Node, Node]]:
        readers = Counter(u for node in graph.nodes for u in dict.fromkeys(node.operands))
        readers[graph.output] += 1
        residuals = {}
        for node in graph.nodes:
            adds = tagged(node, Tag.ADDS) and not tagged(node, Tag.SUBTRACTS)
            if not adds or len(node.operands) != 2 or node.kwargs.get("alpha", 1) != 1:
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
        floor = value.lowest * (2 - _WIDER) if node in self._positive else -math.inf
        return Value(value.shape, lip, magnitude=value.magnitude * _WIDER, rows=rows, floor=floor)

    def slack(self, node: Node) -> float:
        """The ℓ2 distance from its range that a value may have inside the widened range."""
        value = self.values[node]
        sizes: list[Any] = [value.magnitude] if value.rows is None else [value.magnitude, value.rows[1]]
        if node in self._positive:
            sizes.append(value.lowest)
        return float(min(sizes)) * (_WIDER - 1) / OWN_ROUNDING

    def of(self, node: Node) -> dict[Node, float]:
        """‖f(…, u', …) − f(…, u, …)‖ ≤ gain · ‖u' − u‖, for every operand u."""
        if node not in self._gains:
            self._gains[node] = {u: self._gain(node, u) for u in dict.fromkeys(node.operands)}
        return self._gains[node]

    def slopes(self, node: Node) -> dict[Node, float] | None:
        """Growth of the error of an affine operation in float64 per unit of an operand; None for other operations.

        The errors of an affine operation are sums of those of its constants and of products with the matrix J of each
        operand; the latter are at most κ‖·‖ (:func:`lipcert.bounds.schur_bounds`).
        """
        if node not in self._slopes:
            answer = jacobian_of(node)
            found = None
            if isinstance(answer, Schur):
                like = {u: torch.zeros(1, *u.shape, dtype=torch.float64, device=self.device) for u in node.operands}
                found = dict.fromkeys(node.operands, 0.0)
                for place, u in enumerate(node.operands):
                    found[u] += schur_bounds(answer, node, place, like)[1]
            self._slopes[node] = found
        return self._slopes[node]

    def _gain(self, node: Node, operand: Node) -> float:
        if passes(node):
            return 1.0
        value = self.values[node]
        if value.base is self.values[operand] and value.map is not None and len(set(node.operands)) == 1:
            if (total := self._branches.get(node)) is not None:
                return float(self.values[total].map.norm + 1)  # ‖W‖ ≤ ‖I + W‖ + 1 suffices for the size of an operand
            return float(value.map.norm)
        args, kwargs = node.arguments(lambda u: self.widened(u, 1 if u is operand else 0))
        if isinstance(node.op, type):
            args = (node.function, *args)
        try:
            return float(global_value(node, args, kwargs).lip)
        except NoAnswer:
            return math.inf


def passes(node: Node) -> bool:
    """Whether a node only splits a value or selects one of the parts."""
    return tagged(node, Tag.PART, Tag.SPLITS)


def error_norm(error: Tensor) -> Tensor:
    """Upper bounds on the ℓ2 norms of (N, ...), shape (N,)."""
    return at_most(l2_norm(per_image(error), 1) * OWN_ROUNDING)


class Roundoff:
    """Bounds on the rounding errors of one model in one format.

    The deployed network is ``model.to(dtype)(images.to(dtype))``. The docstring of :mod:`lipcert.roundoff` states the
    assumptions.
    """

    def __init__(self, model: Model, dtype: str | torch.dtype | Format, graph: Graph | None = None):
        self.format = Format.of(dtype)
        self.model = model
        refused: Sequence[tuple[str, str]] = ()
        if graph is None:
            graph, self.format, refused = deployed_graph(model, self.format, _example(model), _has_rounding_rule)
        self.graph = needed(explicit_attention(graph, model.device))
        self.gains = Gains(self.graph, model, self.format, refused)

    def deployed(self, radii: Radii, images: Tensor, predicted: Tensor, margins: Tensor, least: float = 0.0) -> Tensor:
        """Radii for the deployed network, from a method for the network in real arithmetic.

        The margins are reduced by :meth:`lost` at the radius in real arithmetic, which is an upper limit of the result,
        and :meth:`entry` is subtracted from the radius. Radii up to ``least`` are not examined, and the result is 0.
        """
        real = radii(margins, 0)
        lost = torch.full_like(margins, math.inf)
        asked = (real > least).nonzero()[:, 0]
        if len(asked):
            some = images[asked.to(images.device)]
            lost[asked] = self.lost(some, predicted[asked], real[asked], margins[asked]).to(margins)
        radius = torch.minimum(radii((margins - lost).clamp_min(0).nan_to_num(0.0, posinf=math.inf), 1), real)
        entry = self.entry(images, radius).to(radius.device)
        return torch.where(radius > entry, (radius - entry) * (1 - SAFETY), 0.0)

    def lost(self, images: Tensor, predicted: Tensor, radius: Tensor, margins: Tensor) -> Tensor:
        """Upper bounds as in :meth:`margins`: those over the whole box where they are far below the margins.

        ``margins`` are f_y − f_j, +inf at j = y, shape (N, classes).
        """
        lost = self.everywhere(predicted).to(margins)
        place = (~(lost <= NEGLIGIBLE * margins).all(1)).nonzero()[:, 0]
        if len(place):
            there = place.to(images.device)
            lost[place] = self.margins(images[there], predicted[place], radius[place.to(radius.device)]).to(margins)
        return lost

    @torch.no_grad()
    def everywhere(self, predicted: Tensor) -> Tensor:
        """:meth:`margins` for all images in the box at once: they lie in a ball around the centre of the box."""
        return self._box.margins(predicted.to(self.model.device))

    @cached_property
    def _box(self) -> Evaluated:
        centre = torch.full((1, *self.model.input_size), 0.5, dtype=torch.float64, device=self.model.device)
        radius = centre.new_full((1,), math.sqrt(centre.numel()) / 2 * OWN_ROUNDING)
        return self.at(centre, radius)

    @torch.no_grad()
    def at(self, images: Tensor, radius: Tensor) -> Evaluated:
        """The network at images in [0, 1], and bounds on its rounding errors within ``radius``, shape (N,)."""
        device = self.model.device
        return Evaluated(self.gains, self.graph, images.to(device, torch.float64), radius.to(device, torch.float64))

    @torch.no_grad()
    def margins(self, images: Tensor, predicted: Tensor, radius: Tensor) -> Tensor:
        """Upper bounds on (f_y − f_j) − (f̂_y − f̂_j) at images in [0, 1] within ``radius`` that the format represents.

        They are those of :meth:`Evaluated.margins`.
        """
        size = max(1, ENTRIES_AT_ONCE // sum(node.entries for node in self.graph.nodes))
        parts = [part.split(size) for part in (images, predicted.to(self.model.device), radius)]
        return torch.cat([self.at(some, at).margins(classes) for some, classes, at in zip(*parts, strict=True)])

    @torch.no_grad()
    def values(self, images: Tensor) -> Tensor:
        """Upper bounds on ‖ĥ − h‖ of the output at images in [0, 1], float64, shape (N,); ∞ if there is no bound."""
        zero = torch.zeros(len(images), dtype=torch.float64, device=self.model.device)
        return at_most(self.at(images, zero).errors[self.graph.output] * OWN_ROUNDING)

    def entry(self, images: Tensor, radius: Tensor) -> Tensor:
        """The ℓ2 distance by which rounding the pixels can move an image within ``radius``, shape (N,).

        It must be subtracted from a radius: the deployed network gets an image in [0, 1] that may be this much further
        away.
        """
        return self.format.entry(images.to(radius.device, torch.float64), radius)


class Evaluated:
    """A captured network at N images: its values, and bounds on their rounding errors within a radius.

    The error of an affine operation in float64 within a ball has two bounds: that of its rule for operands
    anywhere in the ball, entry by entry; and that for the operands at the images, plus the error of products with its
    matrix for the distance from there (:meth:`Gains.slopes`). The second depends on ℓ2 lengths alone.

    Attributes:
        values: of every node with one result, each of shape (N, *node.shape).
        errors: bounds on ‖ĥ − h‖ of every value, each of shape (N,).
        local: bounds on the error |e| of an operation itself, in the shape of its value.
        norms: bounds on ‖e‖, each of shape (N,); ∞ where nothing is known of the operands.
    """

    def __init__(self, gains: Gains, graph: Graph, images: Tensor, radius: Tensor):
        self.gains, self.graph, self.radius = gains, graph, radius
        self.ball = bool((radius != 0).any())
        self.values = graph.values(images[:, None])
        zero = torch.zeros_like(radius)
        self.errors = {graph.input: zero}
        self.local: dict[Node, Tensor] = {}
        self.norms: dict[Node, Tensor] = {}
        self._distances: dict[int, Tensor] = {}
        for node in graph.nodes[1:]:
            if (residual := gains.residuals.get(node)) is not None:
                u, w = residual
                error = _times(float(gains.values[node].map.norm), self.errors[u]) + self.norms[w]
            else:
                error = sum((_times(gain, self.errors[u]) for u, gain in gains.of(node).items()), zero)
            if node is not graph.output and bool(error.isinf().all()):  # nothing finite is to be had from there on
                self.norms[node] = torch.full_like(error, math.inf)
            elif not passes(node):
                self.local[node], self.norms[node] = self._operation(node)
                error = error + self.norms[node]
            if node.single:
                error = torch.where(error <= gains.slack(node), error, math.inf)
            self.errors[node] = error * OWN_ROUNDING

    def _operation(self, node: Node) -> tuple[Tensor, Tensor]:
        """The entries and the norm of the error of one operation."""
        error = self.gains.error(node, [self._operand(u, self.ball) for u in node.operands])
        norm = error_norm(error)
        slopes = self.gains.slopes(node) if self.ball and self.gains.format == REAL else None
        if slopes is None:
            return error, norm
        there = self.gains.error(node, [self._operand(u, False) for u in node.operands])
        moved = [_times(2 * slope, self._displacement(u)) for u, slope in slopes.items()]
        further = sum(moved, torch.zeros_like(norm)) * OWN_ROUNDING
        entries = there + further.reshape(-1, *[1] * (there.dim() - 1))
        return torch.minimum(error, entries), torch.minimum(norm, error_norm(there) + further)

    def _operand(self, node: Node, ball: bool) -> Operand:
        """Bounds on a value, in the ball or at the images alone."""
        error = self.errors[node]
        if self.gains.format == REAL:  # the nominal values have errors of the same bound
            error = 2 * error
        moved = error + self._displacement(node) if ball else error
        limit = torch.full_like(error, float(self.gains.values[node].magnitude)) + error
        return Operand(self.values[node], moved, limit)

    def _displacement(self, node: Node) -> Tensor:
        """How far a value moves within the radius."""
        return _times(float(self.gains.values[node].lip), self.radius)

    def margins(self, predicted: Tensor) -> Tensor:
        """Upper bounds on (f_y − f_j) − (f̂_y − f̂_j), shape (M, classes), for M images or one image and M classes y.

        For a linear head f_y − f_j = ⟨w_y − w_j, h⟩ + const. The bound is ‖w_y − w_j‖ times the error of the features h
        plus the rounding of the head itself, or √2 times the error of the logits if that is smaller.
        """
        output, shape = self.graph.output, (len(predicted), self.graph.output.shape[-1])
        bounds = math.sqrt(2) * self.errors[output][:, None].expand(shape)
        if tagged(output, Tag.DENSE) and len(output.shape) == 2:
            weight = arguments(output)["weight"]
            classes, place = predicted.unique(return_inverse=True)
            for y in {*classes.tolist()} - self._distances.keys():
                self._distances[y] = row_distances(weight.detach().double(), y)
            distances = torch.stack([self._distances[y] for y in classes.tolist()])[place]
            head = self.local[output].flatten(1).expand(shape)
            # The rounding errors of logit j and of logit y both count.
            features = self.errors[output.operands[0]][:, None]
            bounds = torch.minimum(bounds, distances * features + head + head.gather(1, predicted[:, None]))
        bounds = at_most(bounds * OWN_ROUNDING)
        return bounds.scatter(1, predicted[:, None], 0.0)


def _is_mask(constant: Tensor) -> bool:
    """Whether all entries are 0, 1 or −∞, as in masks that :func:`explicit_attention` writes out: exact in any type."""
    return bool(((constant == 0) | (constant == 1) | (constant == -math.inf)).all())


def _times(gain: float, error: Tensor) -> Tensor:
    """gain · error with 0 · ∞ = 0, because a constant has no error."""
    return torch.where(error > 0, gain * error, 0.0) if gain > 0 else torch.zeros_like(error)


def _has_rounding_rule(module: nn.Module) -> bool:
    return kept_whole(module, "rounding") and type(module) in RULES


def _example(model: Model) -> Tensor:
    pixels = torch.rand(1, *model.input_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return pixels.to(model.device)
