"""The anchored certificate: one linearisation of the whole network at the image, and what every nonlinearity adds to it.

Let the operations v of the network be linearised at the image x. For a perturbation δ, operation v leaves its linearisation by
a remainder R_v, and everything behind it sees that as an error put in at its output. With G(a → b) the Jacobian at x of the
value b with respect to the value a, for every δ exactly

    value u deviates by       G(x → u) δ + Σ_v G(v → u) R_v,
    margin m_j changes by     ⟨∇_x m_j, δ⟩ + Σ_v ⟨∇_v m_j, R_v⟩,

by induction over the operations in their order: each is its linear part plus R_v, and G composes linear parts. Therefore, if
‖δ‖ ≤ ε, with r_v ≥ ‖R_v‖ and d_v ≥ |⟨∇_v m_j, R_v⟩| from the remainder rules (lipcert.bounds._remainder),

    ρ_u = ‖G(x → u)‖ ε + Σ_v ‖G(v → u)‖ r_v(ρ),
    m_j(x + δ) ≥ m_j − ‖∇_x m_j‖ ε − Σ_v d_v(ρ),

evaluated in the order of the network, so that every ρ is known before it is used. No norm is multiplied along the depth for the
first-order part: as ε → 0 the radius tends to min_j m_j/‖∇_x m_j‖.

Stages keep the number of norms small. If c is a value through which everything later depends on the image (a cut), then
G(v → u) = G(c → u) G(v → c) for v before and u behind it, and the remainders before c are added up at c.

The norms of G are probabilistic Lanczos bounds (lipcert.norms._lanczos) that share the failure probability δ of an image.
Sums and products here are of non-negative float64 numbers; gradients and margins are reduced by a relative 1e-6 for the
rounding of the nominal forward and backward pass in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lipcert.bounds._registry import NoAnswer
from lipcert.bounds._remainder import REMAINDERS, Against, Remainder, per_image, remainder_of
from lipcert.errors import UnsupportedOperation
from lipcert.graph import Node, Replay, capture, cuts, explicit_attention, needed
from lipcert.graph._graph import run
from lipcert.model import Model
from lipcert.norms import lanczos_norm

_SAFETY = 1e-6
_ISOMETRIES = frozenset(("identity", "dropout", "reshape", "permute", "transpose", "flip", "roll"))


@dataclass
class _Stage:
    """The nonlinear operations between two cuts."""

    start: Node
    end: Node
    nonlinear: list[Node] = field(default_factory=list)


class Anchored:
    """The anchored certificate of one model.

    Args:
        model: the model, in float64.
        delta: failure probability for each image, over the certifier's own random start vectors.
        tolerance: how far the norms of Jacobians may be above what Lanczos has seen.
        seed: of the start vectors.

    Raises:
        UnsupportedOperation: names the operations that have no remainder rule.
    """

    def __init__(self, model: Model, *, delta: float = 1e-9, tolerance: float = 0.05, seed: int = 0):
        self.model = model
        self.delta = delta
        self.tolerance = tolerance
        self.generator = torch.Generator().manual_seed(seed)
        example = torch.rand(1, *model.input_size, generator=self.generator).to(model.device, model.dtype)
        graph = explicit_attention(capture(model, example, whole=lambda module: type(module) in REMAINDERS))
        self.replay = Replay(needed(graph))
        self.graph = self.replay.graph
        self.rules = self._rules()
        self.stages = self._stages()
        self.constants: dict[tuple[Node, Node], float] = {}
        self.pairs = self._pairs()

    def _rules(self) -> dict[Node, type[Remainder]]:
        rules: dict[Node, type[Remainder]] = {}
        missing = []
        for node in self.graph.nodes:
            if node is self.graph.input:
                continue
            try:
                found = remainder_of(node)
            except NoAnswer as reason:
                missing.append((f"{node.name} ({reason})", node.path))
                continue
            if found is not None:
                rules[node] = found
        if missing:
            raise UnsupportedOperation(missing)
        return rules

    def _stages(self) -> list[_Stage]:
        """Stages between those cuts that have a nonlinear operation between them; the first one starts at the pixels."""
        marks = set(cuts(self.graph)) | {self.graph.output}
        stages = [_Stage(self.graph.input, self.graph.input)]
        last = self.graph.input
        for node in self.graph.nodes:
            if node in self.rules:
                if stages[-1].nonlinear and last is not stages[-1].start and self._behind(stages[-1], last):
                    stages[-1].end = last
                    stages.append(_Stage(last, last))
                elif not stages[-1].nonlinear:
                    stages[-1].start = last
                stages[-1].nonlinear.append(node)
            if node in marks:
                last = node
        stages[-1].end = self.graph.output
        return stages

    def _behind(self, stage: _Stage, cut: Node) -> bool:
        return self.replay.position[cut] >= self.replay.position[stage.nonlinear[-1]]

    def operands(self, node: Node) -> list[Node]:
        return [self._root(operand) for operand in node.operands]

    def _root(self, node: Node) -> Node:
        """The value whose entries these are, in another arrangement."""
        while node.op in _ISOMETRIES and len(node.operands) == 1:
            node = node.operands[0]
        return node

    def _pairs(self) -> list[tuple[Node, Node]]:
        """The (a, b) whose ‖G(a → b)‖ the certificate needs, without those that are 1 or 0."""
        pairs: dict[tuple[Node, Node], None] = {}
        pixels = self.graph.input
        for index, stage in enumerate(self.stages):
            for v in stage.nonlinear:
                for u in (*self.operands(v), stage.end):
                    pairs[pixels, u] = None
                    pairs[stage.start, u] = None
            for position, v in enumerate(stage.nonlinear):
                later = [u for w in stage.nonlinear[position + 1 :] for u in self.operands(w)]
                for u in (*later, stage.end):
                    pairs[v, u] = None
            for later_stage in self.stages[index + 1 :]:
                pairs[stage.end, later_stage.start] = None
        return [(a, b) for a, b in pairs if a is not b and self.replay.between(a, [b])]

    def _linear_way(self, a: Node, b: Node) -> bool:
        return not any(node in self.rules for node in self.replay.between(a, [b]))

    def __call__(
        self, images: Tensor, eps: float | None = None, progress: Callable[[int, int], None] | None = None
    ) -> Anchor:
        """Linearises the network at images, shape (N, C, H, W), and takes the norms; the rest is arithmetic in ε."""
        images = images.to(self.model.device, self.model.dtype)[:, None]
        with torch.no_grad():
            values = self._values(images)
        norms: dict[tuple[Node, Node], Tensor] = {}
        share = self.delta / max(1, len(self.pairs))
        by_source: dict[Node, list[Node]] = {}
        for a, b in self.pairs:
            by_source.setdefault(a, []).append(b)
        done = 0
        for a, targets in by_source.items():
            for b in targets:
                norms[a, b] = self._norm(a, b, values, len(images), share)
                done += 1
                if progress is not None:
                    progress(done, len(self.pairs))
        remainders = {
            v: rule(v, [values[operand] for operand in v.operands], values[v]) for v, rule in self.rules.items()
        }
        return Anchor(self, images, values, norms, remainders)

    def _values(self, images: Tensor) -> dict[Node, Tensor]:
        """Nominal values of all nodes with one result, each of shape (N, *node.shape)."""
        single = [node for node in self.graph.nodes if node.shape and node is not self.graph.input]

        def one(image: Tensor) -> tuple[Tensor, ...]:
            known = run(self.graph.nodes, {self.graph.input: image})
            return tuple(known[node] for node in single)

        return {self.graph.input: images, **dict(zip(single, torch.vmap(one)(images), strict=True))}

    def _norm(self, a: Node, b: Node, values: dict[Node, Tensor], images: int, share: float) -> Tensor:
        """Upper bounds on ‖G(a → b)‖, shape (N,). A way without nonlinear operations has the same norm for every image."""
        if (a, b) in self.constants:
            return torch.full((images,), self.constants[a, b], dtype=torch.float64)
        constant = self._linear_way(a, b)
        if constant:
            values = {node: value[:1] for node, value in values.items()}
        count = 1 if constant else images
        source = values[a].detach().requires_grad_()
        with torch.enable_grad():
            (target,) = self.replay(a, source, [b], values)
            weight = torch.zeros_like(target, requires_grad=True)
            (pulled,) = torch.autograd.grad(target, source, weight, create_graph=True)

        def adjoint(u: Tensor) -> Tensor:
            (result,) = torch.autograd.grad(target, source, u.reshape(target.shape), retain_graph=True)
            return result.reshape(count, -1)

        def product(v: Tensor) -> Tensor:
            (result,) = torch.autograd.grad(pulled, weight, v.reshape(source.shape), retain_graph=True)
            return result.reshape(count, -1)

        rows, columns = target[0].numel(), source[0].numel()
        forth, back, size = (product, adjoint, columns) if columns <= rows else (adjoint, product, rows)
        norm = lanczos_norm(
            forth, back, count, size, delta=share, tolerance=self.tolerance, generator=self.generator
        )
        if constant:
            self.constants[a, b] = norm.item()
        return norm.expand(images)


class Anchor:
    """The network linearised at N images: bounds for any ε."""

    def __init__(
        self,
        method: Anchored,
        images: Tensor,
        values: dict[Node, Tensor],
        norms: dict[tuple[Node, Node], Tensor],
        remainders: dict[Node, Remainder],
    ):
        self.method = method
        self.images = images
        self.values = values
        self.norms = norms
        self.remainders = remainders
        self.logits = values[method.graph.output].reshape(len(images), -1)

    def _gain(self, a: Node, b: Node) -> Tensor | float:
        return 1.0 if a is b else self.norms.get((a, b), 0.0)

    def deviations(self, eps: Tensor) -> tuple[dict[Node, list[Tensor]], Tensor]:
        """How far values can move for ‖δ‖ ≤ eps, eps of shape (N,).

        Returns:
            ρ for the operands of every nonlinear operation, and ρ for the logits, each of shape (N,).
        """
        pixels = self.method.graph.input
        at_cuts: dict[Node, Tensor] = {}  # remainders before a cut, added up there
        found: dict[Node, list[Tensor]] = {}
        zero = torch.zeros_like(eps)
        moved = zero
        for stage in self.method.stages:
            arrived = sum((self._gain(cut, stage.start) * error for cut, error in at_cuts.items()), zero)
            at_start = self._gain(pixels, stage.start) * eps + arrived
            inside: list[tuple[Node, Tensor]] = []
            for v in (*stage.nonlinear, None):
                rho = []
                for u in self.method.operands(v) if v is not None else [stage.end]:
                    from_start = self._gain(stage.start, u)
                    linear = torch.minimum(self._gain(pixels, u) * eps + from_start * arrived, from_start * at_start)
                    rho.append(linear + sum((self._gain(w, u) * r for w, r in inside), zero))
                if v is None:
                    moved = rho[0]
                else:
                    found[v] = rho
                    inside.append((v, self.remainders[v].norm(rho)))
            at_cuts[stage.end] = sum((self._gain(w, stage.end) * r for w, r in inside), zero)
        return found, moved

    def gradients(self, rivals: Tensor, predicted: Tensor) -> tuple[Tensor, dict[Node, Tensor]]:
        """∇m at the pixels, shape (N, pixels), and at the result of every nonlinear operation, for the margins f_y − f_j.

        Args:
            rivals: the classes j, shape (N,).
            predicted: the classes y, shape (N,).
        """
        graph, nodes = self.method.graph, list(self.remainders)

        def one(image: Tensor, *added: Tensor) -> Tensor:
            known: dict[Node, Tensor] = {graph.input: image}
            extra = dict(zip(nodes, added, strict=True))
            for node in graph.nodes:
                run((node,), known)
                if node in extra:
                    known[node] = known[node] + extra[node]
            return known[graph.output]

        images = self.images.detach().requires_grad_()
        added = [torch.zeros_like(self.values[node], requires_grad=True) for node in nodes]
        with torch.enable_grad():
            logits = torch.vmap(one)(images, *added).reshape(len(images), -1)
            margin = logits.gather(1, predicted[:, None]) - logits.gather(1, rivals[:, None])
            found = torch.autograd.grad(margin.sum(), [images, *added])
        return per_image(found[0]), dict(zip(nodes, found[1:], strict=True))

    def radius(self, predicted: Tensor, gaps: Tensor, limit: int | None = None) -> Tensor:
        """Certified radii, float64, shape (N,), rounded down, to 1 % or better.

        Rival classes are taken in the order of what the deviation of the logits allows them, and left out once that alone
        clears them: it costs no backward pass.

        Args:
            predicted: classes y, shape (N,).
            gaps: f_y − f_j, +inf at j = y, shape (N, classes).
            limit: how many rivals to look at in their own direction at most; the others are held to the cheap bound.
        """
        cheap = self._cheap(gaps)
        order = cheap.argsort(1)
        best = torch.full_like(cheap[:, 0], math.inf)
        for rank in range(cheap.shape[1]):
            rivals = order[:, rank]
            floor = cheap.gather(1, rivals[:, None])[:, 0]
            if rank == limit:
                return torch.minimum(best, floor) * (1 - _SAFETY)
            if bool((floor >= best).all()):
                break
            exact = self._toward(rivals, predicted, gaps.gather(1, rivals[:, None])[:, 0])
            best = torch.minimum(best, torch.maximum(exact, floor))
        return torch.where(torch.isfinite(best), best, 0.0) * (1 - _SAFETY)

    def _cheap(self, gaps: Tensor) -> Tensor:
        """Radii from how far the logits move at all: f_y − f_j moves by at most √2 times that; shape (N, classes)."""
        allowed = []
        for gap in gaps.unbind(1):
            most = torch.where(torch.isfinite(gap), gap, 0.0).clamp_min(0) / self._gain(self.method.graph.input, self.method.graph.output)
            radius = _search(lambda eps, gap=gap: gap - math.sqrt(2) * self.deviations(eps)[1] * (1 + _SAFETY), most)
            allowed.append(torch.where(torch.isfinite(gap), radius, math.inf))
        return torch.stack(allowed, 1)

    def _toward(self, rivals: Tensor, predicted: Tensor, gap: Tensor) -> Tensor:
        """Radius against one rival class for each image, by its own gradients."""
        at_pixels, at_nodes = self.gradients(rivals, predicted)
        slope = at_pixels.norm(dim=1) * (1 + _SAFETY)
        against: dict[Node, Against] = {v: self.remainders[v].against(g) for v, g in at_nodes.items()}

        def left(eps: Tensor) -> Tensor:
            found, _ = self.deviations(eps)
            return gap - slope * eps - sum(against[v](rho) for v, rho in found.items()) * (1 + _SAFETY)

        return _search(left, gap / slope)

    def first_order_limit(self, predicted: Tensor, gaps: Tensor) -> Tensor:
        """min_j m_j/‖∇_x m_j‖, shape (N,): what the radius tends to for small ε. An estimate, not a certificate."""
        ratios = []
        for rank in range(gaps.shape[1] - 1):
            rivals = gaps.argsort(1)[:, rank]
            gradient, _ = self.gradients(rivals, predicted)
            ratios.append(gaps.gather(1, rivals[:, None])[:, 0] / gradient.norm(dim=1))
        return torch.stack(ratios, 1).amin(1)


def _search(left: Callable[[Tensor], Tensor], most: Tensor) -> Tensor:
    """The largest ε ≤ most, to 0.1 %, with left(ε) > 0, for a non-increasing function; 0 where 1e-12 · most is too large."""
    low, high = most * 1e-12, most.clone()
    good = left(low) > 0
    for _ in range(44):
        middle = (low * high).sqrt()
        holds = left(middle) > 0
        low, high = torch.where(holds, middle, low), torch.where(holds, high, middle)
        if bool((high <= low * 1.001).all()):
            break
    return torch.where(good, low, 0.0)
