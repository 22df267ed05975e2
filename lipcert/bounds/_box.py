"""Boxes and local Lipschitz constants on balls around N images, computed in one pass over the captured network.

For perturbations ‖δ‖ ≤ ε of an image x, every value v of the network gets

* ``up``, ``down`` ≥ 0: entry i of v(x + δ) lies in [v_i − down_i, v_i + up_i], v the computed nominal value;
* ``constant``: a K with ‖v(x + δ) − v(x + δ')‖ ≤ K‖δ − δ'‖ on the ball.

A box is the intersection of two sets (box constraint propagation, BCP): the interval from the operand's box, and the
ball, |δv_i| ≤ ‖row i‖·K·ε with K the constant of the matrix's operand. Constants are products of norms of
diag(outer)·A·diag(inner). A unit that its box shows to be constant has weight 0, both as a column of the matrix after
it and as a row of the matrix before its activation. Sources: Huang, Zhang, Shi, Kolter and Anandkumar, "Training
Certifiably Robust Neural Networks with Efficient Local Lipschitz Bounds", NeurIPS 2021 (arXiv 2111.01395), equations 3
to 6, 9 to 11 and 21 to 23; for BCP, Lee, Lee and Park, "Lipschitz-Certifiable Training with a Tight Outer Bound",
NeurIPS 2020.

Why weights can be combined. Let δz = A δh exactly, let |δa_i| ≤ s_i|δz_i| for the activation a after A, and let
δh_i = 0 for constant units. Then ‖δa‖ ≤ ‖diag(s) A diag(m)‖‖δh‖, where m is the 0/1 mask of the units that move. An
activation δh = T δu before A, with T diagonal and |T_ii| ≤ s_i, gives ‖A T‖ ≤ ‖A diag(s)‖. Both hold for finite
differences, not only for Jacobians.

Global constants are reused. If the operands of a result have local constants K_i ≤ q·L_i, with L_i their global
constants, the result has local constant q·L. The reason: rules are homogeneous in the constants of their operands,
because another unit for pixels multiplies all constants by the same factor. The analysis folds a scale into the matrix
after it, which makes L smaller than a product of norms. So if an operand was folded, q must also hold for the values it
was folded from. Ranges that a global rule uses (for gates, attention) hold for images in [0, 1].

Rounding. Interval parts are sums of non-negative numbers, inflated by 1e-9. The distance between computed and exact
nominal values is itself propagated as a box, from rounding bounds at matrices and sums. Every other operation is
assumed to be evaluated with an error of at most 1e-10 times its largest result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.bounds._arguments import replayed
from lipcert.bounds._global import Analysis
from lipcert.bounds._masked import Core, core_of
from lipcert.bounds._registry import RULES, Tag, tagged
from lipcert.bounds._remainder import per_image
from lipcert.bounds._value import Value
from lipcert.graph import Graph, Node, needed
from lipcert.norms import Draw, Ledger
from lipcert.numerics import INFLATE, Upper, l2_norm, root_sum

EVALUATION = 1e-10


def top(tensor: Tensor) -> Tensor:
    """The largest entry per image of a tensor (N, ...) with entries ≥ 0; 0 if it has none."""
    # The appended 0 is the result where there are no entries, of which amax has none.
    return F.pad(per_image(tensor), (0, 1)).amax(1)


def over(numbers: Tensor, template: Tensor) -> Tensor:
    """Reshapes numbers of shape (N,) to broadcast with (N, ...)."""
    return numbers.reshape(-1, *[1] * (template.dim() - 1))


def _next_up(tensor: Tensor) -> Tensor:
    return torch.nextafter(tensor, torch.full_like(tensor, math.inf))


def gap(high: Tensor, low: Tensor) -> Tensor:
    """max(high − low, 0), rounded up; exactly 0 where high ≤ low."""
    return torch.where(high <= low, 0.0, _next_up(high - low))


def _varies(weights: Tensor) -> Tensor:
    return (per_image(weights) < top(weights)[:, None]).any(1)


@dataclass
class Factors:
    """‖δv‖ ≤ ‖diag(outer)·A·diag(inner)·δbase‖ for an earlier value ``base``; A is the identity if ``core`` is None.

    ``local`` says whether the weights differ from the global ones.
    """

    base: State
    core: Core | None
    inner: Tensor
    outer: Tensor
    local: bool = False

    def norm(self, node: Node) -> Tensor:
        """The norm per image without the constant units of the base; inf if no unit is constant.

        ``node`` is the operation whose result they bound.
        """
        inner = self.inner * self.base.moving
        if self.core is None:
            return top(self.outer * inner) * INFLATE
        outer = self.outer.expand(len(inner), *self.core.output_shape)
        norms = torch.full((len(inner),), math.inf, dtype=torch.float64, device=inner.device)
        pays = (per_image(inner) == 0).any(1)
        if self.local:
            pays |= _varies(inner) | _varies(outer)
        if bool(pays.any()):
            draw = None if self.core.exact else self.base.propagation.draw(node, pays)
            norms[pays] = self.core.norms(outer[pays], inner[pays], draw)
        return norms


@dataclass(eq=False, repr=False)
class State:
    """Box and local constant of one value for all images; see the module docstring.

    Attributes:
        propagation: the pass that computes it.
        node: the operation.
        up, down: the box, as distances from the nominal value.
        sources: the values that it is computed from.
        all_factors: a bound on its deviation by that of an earlier value.
        open: whether its entries are those of the factors, so that further weights can be added to it.
        bounded: computes another bound on K; called at most once, and only if needed.
    """

    propagation: Propagation
    node: Node
    up: Tensor
    down: Tensor
    sources: Sequence[State] = ()
    all_factors: Factors | None = None
    open: bool = True
    bounded: Callable[[], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.all_factors is not None:
            self.sources = (self.all_factors.base,)

    @property
    def value(self) -> Tensor:
        """The nominal value, shape (N, ...)."""
        return self.propagation.value(self.node)

    @property
    def factors(self) -> Factors | None:
        """The factors to which weights can be added."""
        return self.all_factors if self.open else None

    @property
    def lip(self) -> Upper:
        """L."""
        return self.propagation.boxes.values[self.node].lip

    @cached_property
    def constant(self) -> Tensor:
        """K for each image, at most the global constant."""
        most = float(self.lip)
        bound = torch.full_like(self.propagation.eps, most)
        if self.sources:
            shares = torch.stack([source.share for source in self.sources]).amax(0)
            bound = torch.minimum(bound, (shares * most).nan_to_num(nan=math.inf))
        if self.bounded is not None:
            bound = torch.minimum(bound, self.bounded().nan_to_num(nan=math.inf))
        if self.all_factors is not None:
            norm = self.all_factors.norm(self.node)
            bound = torch.minimum(bound, (self.all_factors.base.constant * norm * INFLATE).nan_to_num(nan=math.inf))
        return bound

    @cached_property
    def share(self) -> Tensor:
        """A q ≤ 1 with K ≤ q·L, for this value and for all values that the global analysis folded into it."""
        if self.lip == 0:
            return torch.zeros_like(self.propagation.eps)
        share = (self.constant / float(self.lip) * INFLATE).nan_to_num(nan=1.0).clamp_max(1.0)
        if self.node in self.propagation.boxes.folded:
            share = torch.stack([share, *(source.share for source in self.sources)]).amax(0)
        return share

    @cached_property
    def moving(self) -> Tensor:
        """1.0 for entries that can move in the ball, 0.0 for those that are constant."""
        return ((self.up > 0) | (self.down > 0)).double()

    @property
    def high(self) -> Tensor:
        return torch.where(self.up > 0, _next_up(self.value + self.up), self.value)

    @property
    def low(self) -> Tensor:
        return torch.where(self.down > 0, -_next_up(self.down - self.value), self.value)

    @property
    def reach(self) -> Tensor:
        """The larger of ``up`` and ``down``."""
        return torch.maximum(self.up, self.down)


def ratio(after: Upper, before: Upper) -> float:
    """after/before, rounded up: the gain between two values with these global constants."""
    if before == 0:
        return 0.0
    high, low = float(after), float(before)
    return high / low * INFLATE if math.isfinite(high) and math.isfinite(low) and low > 1e-290 else math.inf


class Boxes:
    """The captured network, prepared for propagation."""

    def __init__(self, analysis: Analysis):
        self.graph: Graph = needed(analysis.graph)
        self.values = {node: value for node, value in analysis.values.items() if isinstance(value, Value)}
        self.folded = {
            node for node, value in self.values.items() if value.base is not None or value.origin is not None
        }
        self.cores = {node: core for node in self.graph.nodes if (core := core_of(node)) is not None}

    def sources(self, node: Node) -> list[Node]:
        """The operands; an operand with several results is replaced by its own operands."""
        operands: list[Node] = []
        for operand in node.operands:
            operands += [operand] if operand.single or operand in self.values else self.sources(operand)
        return operands

    @torch.no_grad()
    def nominal(self, images: Tensor) -> Nominal:
        """Evaluates the network at images, shape (N, C, H, W)."""
        images = images[:, None]
        values = self.graph.values(images, self.values)
        nominal = Nominal(values, {node: torch.zeros_like(value) for node, value in values.items()})
        centre = Propagation(self, nominal, torch.zeros(len(images), dtype=torch.float64, device=images.device))
        nominal.errors = {node: state.reach for node, state in centre.states.items()}
        return nominal


@dataclass
class Nominal:
    """Computed values of all operations at N images, and bounds on the rounding error of each entry."""

    values: dict[Node, Tensor]
    errors: dict[Node, Tensor]

    def select(self, index: Tensor) -> Nominal:
        """The values and errors of the indexed images."""
        return Nominal({n: v[index] for n, v in self.values.items()}, {n: e[index] for n, e in self.errors.items()})


class Propagation:
    """Boxes and constants of all values of the network, for balls of radius ``eps``, shape (N,).

    With ``eps`` = 0 and errors 0 the boxes contain the rounding errors alone.
    """

    def __init__(
        self,
        boxes: Boxes,
        nominal: Nominal,
        eps: Tensor,
        ledger: Ledger | None = None,
        charge: float = 0.0,
    ):
        self.boxes, self.nominal, self.eps, self.ledger, self.charge = boxes, nominal, eps, ledger, charge
        self.zero_radius = not bool((eps > 0).any())
        self.states: dict[Node, State] = {}
        for node in boxes.graph.nodes:
            if node is boxes.graph.input:
                reach = over(eps, self.value(node)).expand_as(self.value(node))
                self.states[node] = self.result(node, reach, reach)
            elif node in boxes.values:
                operands = [self.states[source] for source in boxes.sources(node)]
                answer = RULES[node.op].box or unknown
                self.states[node] = answer(self, node, *operands)

    @property
    def output(self) -> State:
        return self.states[self.boxes.graph.output]

    def draw(self, node: Node, images: Tensor) -> Draw | None:
        """The start vector of an operation's norm, for the images selected by a mask of shape (N,)."""
        if self.ledger is None:
            return None
        chosen = self.ledger.only(images.nonzero()[:, 0])
        return chosen.draw(self.boxes.graph.nodes.index(node), delta=self.charge)

    def value(self, node: Node) -> Tensor:
        return self.nominal.values[node]

    def result(
        self,
        node: Node,
        up: Tensor,
        down: Tensor,
        sources: Sequence[State] = (),
        *,
        factors: Factors | None = None,
        open: bool = True,
        constant: Callable[[], Tensor] | None = None,
        rounding: Tensor | float = 0.0,
    ) -> State:
        """The state of a node; ``rounding`` bounds the error of its evaluation.

        A box that is NaN or computed in a type other than float64 becomes infinite.
        """
        if isinstance(rounding, Tensor):
            up, down = (up + rounding) * INFLATE, (down + rounding) * INFLATE
        if node.dtype not in (None, torch.float64):
            up, down = torch.full_like(up, math.inf), torch.full_like(down, math.inf)
        up, down = (side.nan_to_num(nan=math.inf, posinf=math.inf) for side in (up, down))
        return State(self, node, up, down, sources, factors, open, constant)

    def within(self, node: Node, up: Tensor, down: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
        """Intersects the box with |δv_i| ≤ reach_i around the exact nominal value, plus its rounding error."""
        if self.zero_radius:
            return up, down
        reach = (reach + self.nominal.errors[node]) * INFLATE
        return torch.minimum(up, reach), torch.minimum(down, reach)

    def rounded(self, node: Node, factor: float = 2.0**-48) -> Tensor:
        """A bound on the rounding error of a few operations on each entry."""
        return self.value(node).abs() * factor


def unknown(propagation: Propagation, node: Node, *operands: State) -> State:
    """For an operation with only a global constant: every entry moves by at most K·ε."""
    value, lip = propagation.value(node), propagation.boxes.values[node].lip
    if propagation.zero_radius:
        moved = torch.zeros_like(propagation.eps)
        for x in operands:
            most = l2_norm(per_image(x.reach), 1) * ratio(lip, x.lip)
            moved = torch.maximum(moved, torch.where(top(x.reach) > 0, most, 0.0))
        error = moved * len(operands) * INFLATE + top(value.abs()) * EVALUATION
        reach = over(error, value).expand_as(value)
        return propagation.result(node, reach, reach, operands)
    wide = torch.full_like(value, math.inf)
    constant = propagation.result(node, wide, wide, operands).constant
    up, down = propagation.within(node, wide, wide, over(constant * propagation.eps * INFLATE, value))
    return propagation.result(node, up, down, operands)


def extended(x: State, weight: Tensor, local: bool = False) -> Factors:
    """The factors of a value whose entries move at most ``weight`` times as far as the same entries of x."""
    if x.factors is not None:
        return replace(x.factors, outer=x.factors.outer * weight, local=x.factors.local or local)
    return Factors(x, None, torch.ones_like(x.value), weight, local)


def operator(propagation: Propagation, node: Node, x: State, *others: State) -> State:
    """For a matrix or convolution: interval ∩ ball, with the row norms of A·diag(inner)."""
    core = propagation.boxes.cores.get(node)
    if core is None:
        return unknown(propagation, node, x, *others)
    ones = torch.ones_like(x.value)
    scales = x.factors if x.factors is not None and x.factors.core is None else Factors(x, None, ones, ones)
    base, inner = scales.base, scales.inner * scales.outer
    up, down = core.interval(x.up, x.down)
    rounding = core.rounding(x.value)
    up, down = (up + rounding) * INFLATE, (down + rounding) * INFLATE
    if not propagation.zero_radius:
        rows = core.row_norms(inner * base.moving)
        up, down = propagation.within(node, up, down, rows * over(base.constant * propagation.eps, rows))
    return propagation.result(
        node, up, down, factors=Factors(base, core, inner, torch.ones_like(propagation.value(node)), scales.local)
    )


def scaled(propagation: Propagation, node: Node, x: State, scale: Tensor) -> State:
    """For entrywise multiplication by constants that broadcast over the value, and a constant shift."""
    positive, negative = scale.clamp_min(0) * INFLATE, (-scale).clamp_min(0) * INFLATE
    up, down = positive * x.up + negative * x.down, positive * x.down + negative * x.up
    rounding = propagation.rounded(node) + (x.value * scale).abs() * 2.0**-48
    weight = (scale.abs() * INFLATE).expand_as(x.value[:1]).expand_as(x.value)
    return propagation.result(node, up, down, factors=extended(x, weight), rounding=rounding)


def nonnegative(propagation: Propagation, node: Node, *operands: State) -> State:
    """For affine operations with weights ≥ 0: f(up) − f(0).

    f(0) consists of copied constants, so it cancels exactly.
    """
    order = list(dict.fromkeys(node.operands))
    if not all(operand in propagation.states for operand in order):
        return unknown(propagation, node, *operands)
    states = [propagation.states[operand] for operand in order]
    zero = replayed(node, *(torch.zeros_like(x.value) for x in states))
    up = (replayed(node, *(x.up for x in states)) - zero) * INFLATE
    down = (replayed(node, *(x.down for x in states)) - zero) * INFLATE
    rounding: Tensor | float = 0.0
    if tagged(node, Tag.SUMS):
        rounding = replayed(node, *(x.value.abs() for x in states)) * (math.prod(order[0].shape) * 2.0**-50)

    constant = None
    if tagged(node, Tag.JOINS) and len(states) == len(node.operands):
        constant = lambda: root_sum(*(x.constant for x in states)) * INFLATE  # noqa: E731
    return propagation.result(node, up, down, states, constant=constant, rounding=rounding)


def monotone(propagation: Propagation, node: Node, x: State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For an exactly computed, increasing function: the box, and the function's values at both ends."""
    low, middle, high = replayed(node, x.low), propagation.value(node), replayed(node, x.high)
    return gap(high, middle), gap(middle, low), low, high


def clip(propagation: Propagation, node: Node, x: State) -> State:
    """For clipping: slope 1 between two limits, 0 outside; constant where both ends of the box give the same value."""
    up, down, low, high = monotone(propagation, node, x)
    return propagation.result(node, up, down, factors=extended(x, (high > low).double(), local=True))
