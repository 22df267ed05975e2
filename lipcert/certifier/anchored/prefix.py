"""The anchored certificate after a cut, and the Lipschitz constant of the layers before it.

Nonsmooth operations have remainders as large as the deviation itself, so that the anchored certificate is weak near
their breakpoints. Global bounds need no smoothness. Let c be a cut: a value through which alone all later values depend
on the image. Let all operations after it be smooth. With

- K, the Lipschitz constant of x ↦ c(x) on the image box (:mod:`lipcert.bounds`),
- e, a bound on the rounding error ‖ĉ(x) − c(x)‖ of its computed value (:mod:`lipcert.roundoff`), and
- r, a radius of the anchored certificate of c ↦ logits around the computed value ĉ(x),

the prediction is constant for ‖x′ − x‖ < (r − e)/K: theorem 2 of docs/note.md.

To first order (r − e)/K is m/(K‖∇_c m‖), where GloRo has m/(K K′) with a Lipschitz constant K′ of the layers after c:
smooth layers count with their slopes at the image. The certificate after a Lipschitz map is due to Zhong and Tandon,
"SPLITZ", 2024 (arXiv 2407.02811), theorem 1, who use it with randomized smoothing.

K and e belong to the very operations that compute c in the linearised network: both are read from its own graph. K is
also read from one in which modules are whole, if c is certainly the output of a module there. The margins are those of
the replayed network, whose operations after c start from ĉ(x); a given margin that is smaller counts. The rounding of
the operations after c is part of r (:mod:`lipcert.roundoff`).

The last layer before c may count with its gradients, too: :mod:`.layer` bounds the first-order part of a margin from
what that layer does to the value before it. Then r is not a radius for all values around ĉ(x), but for those c(x′) with
K ‖x′ − x‖ + e < r, which is what its proof needs.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds import NoAnswer, Value, canonical_forms, global_values, kept_whole, remainder_of
from lipcert.certifier.anchored.deviations import Linearization
from lipcert.certifier.anchored.layer import Layer, error_at
from lipcert.certifier.anchored.method import FULL, Anchor, Anchored
from lipcert.certifier.anchored.network import an_image, prepared, recorded
from lipcert.certifier.anchored.norms import NormOptions, NormProgress
from lipcert.errors import UnsupportedOperation
from lipcert.graph import Graph, Node, capture, close, cuts, evaluate, examples, needed
from lipcert.model import Model
from lipcert.norms import Budget, Ledger
from lipcert.numerics import INFLATE, SAFETY, computed_l2_norm
from lipcert.roundoff import REAL, Evaluated, Roundoff

# The cut is not used if K‖∇_c m‖ is more than this many times ‖∇_x m‖ on random images: K is loose then.
_LOOSE, _LOOKED_AT = 10.0, 4


class PrefixedAnchored:
    """The anchored certificate after a cut, and that of the whole network where it is available; the larger counts.

    Attributes:
        cut: the value c.
        constant: K, rounded up.
        rounding: bounds e.
        layer: the last nonsmooth layer before the cut; None if :mod:`.layer` has no bound for it.
        after: the certificate after c, with half of the failure probability.
        whole: that of the whole network, with the other half; None where it is not available, or too costly.

    Args:
        model: the model, in float64.
        graph: the network, as it computes its values.
        cut: a cut of ``graph``.
        constant: K.
        budget: the failure probability of both for each image.
        eps: for a verdict at this ε, the whole network is linearised only for images without one.
        whole: the network as :func:`modules_whole` captures it, where that is known.
        options: see :class:`~lipcert.certifier.anchored.NormOptions`.

    Raises:
        UnsupportedOperation: names operations before the cut without a rounding rule.
    """

    def __init__(
        self,
        model: Model,
        graph: Graph,
        cut: Node,
        constant: float,
        *,
        budget: Budget,
        eps: float | None = None,
        whole: Graph | None = None,
        **options: Any,
    ):
        self.cut, self.constant, self.eps = cut, constant, eps
        self.budget = budget
        self.rounding = Roundoff(model, REAL, _up_to(graph, cut))
        eps_at_cut = None if eps is None else eps * constant * (1 + 1e-3)
        half = {**options, "delta": budget.split(2).delta}
        self.after = Anchored(model, at=cut, graph=graph, eps=eps_at_cut, **half)
        self.plan = self.after.plan
        self.layer = self._layer(model, graph, whole, math.inf if eps_at_cut is None else eps_at_cut)
        self.whole: Anchored | None = None

    def _layer(self, model: Model, graph: Graph, whole: Graph | None, radius: float) -> Layer | None:
        upto = _up_to(graph, self.cut)
        start = smooth_cut(upto)
        if start is None or not self.constant:  # the images do not change c
            return None
        try:
            scale = constant_up_to(graph, start, model, whole) / self.constant * INFLATE
            return Layer(model, upto, start, scale, radius)
        except UnsupportedOperation:
            return None

    @property
    def work(self) -> float:
        """An estimate of the floating-point operations for the norms of an image."""
        return self.after.work + (0.0 if self.whole is None else self.whole.work)

    @property
    def proves(self) -> bool:
        """Whether the rounding of every operation after the cut is proved to have a bound; before it, e is one."""
        local = self.after.network.local
        return all(local.bounded(link) for links in local.chains.links.values() for link in links)

    @property
    def described(self) -> str:
        """A clause that says how the network is divided."""
        place = self.cut.path.removeprefix("net").removeprefix(".") or "(model)"
        return f"the layers up to {place} are bounded by their Lipschitz constant, {self.constant:.4g}"

    def __call__(
        self, images: Tensor, progress: NormProgress | None = None, ledger: Ledger | None = None
    ) -> PrefixedAnchor:
        """Linearises the layers after the cut at images, shape (N, C, H, W)."""
        if ledger is None:
            ledger = self.after.finder.ledger(len(images), self.budget)
        before = self.evaluated(images)
        layer = None if self.layer is None else self.layer.at(before)
        at = Linearization(
            self.after.finder, images, progress, ledger.part("behind"), layer=layer, start=before.values[self.cut]
        )
        return PrefixedAnchor(self, images, Anchor(self.after, at), error_at(before, self.cut), ledger, progress)

    def evaluated(self, images: Tensor) -> Evaluated:
        """The operations up to the cut at images."""
        return self.rounding.at(images, torch.zeros(len(images)))


class PrefixedAnchor:
    """The layers after the cut linearised at N images."""

    def __init__(
        self,
        method: PrefixedAnchored,
        images: Tensor,
        anchor: Anchor,
        error: Tensor,
        ledger: Ledger,
        progress: NormProgress | None = None,
    ):
        self.method, self.images, self.anchor, self.error = method, images, anchor, error
        self.ledger, self.progress = ledger, progress

    def radius(self, predicted: Tensor, margins: Tensor, limit: int | None = None) -> Tensor:
        """Certified radii, float64, shape (N,); arguments as for :meth:`lipcert.certifier.anchored.Anchor.radius`."""
        method, logits = self.method, self.anchor.linearization.logits.to(margins)
        replayed = logits.gather(1, predicted[:, None]) - logits
        at_cut = self.anchor.radius(
            predicted, torch.minimum(margins, replayed.scatter(1, predicted[:, None], torch.inf)), limit
        )
        # (r − e)/K, rounded down: 0 where r ≤ e; ∞ elsewhere if K = 0, as no image changes c then.
        error = self.error.to(at_cut)
        best = torch.where(at_cut > error, (at_cut - error) / method.constant * (1 - SAFETY), 0.0)
        if method.whole is None:
            return best
        undecided = (best <= (torch.inf if method.eps is None else method.eps)).nonzero()[:, 0]
        if len(undecided):
            whole = method.whole(self.images[undecided], self.progress, self.ledger.only(undecided).part("whole"))
            best[undecided] = torch.maximum(
                best[undecided], whole.radius(predicted[undecided], margins[undecided], limit)
            )
        return best


def anchored(
    model: Model, *, eps: float | None = None, costly: bool = True, **options: Any
) -> Anchored | PrefixedAnchored:
    """The anchored certificate of a model in float64: after a cut, of the whole network, or both.

    ``costly`` allows the whole network besides a cut at any cost; the other arguments are those of :class:`Anchored`.
    """
    captured = recorded(model)
    fused = canonical_forms(captured, "remainder", examples(an_image(model)))
    plain = prepared(captured, model, forms=False)
    formed = prepared(fused, model, forms=False) if fused.forms else plain
    budget, cut = NormOptions(**options).budget, smooth_cut(plain)
    prefixed: PrefixedAnchored | None = None
    if cut is not None:
        with suppress(UnsupportedOperation):
            kept = modules_whole(model)
            constant = constant_up_to(plain, cut, model, kept)
            if constant <= _LOOSE * slope_up_to(plain, cut, model):
                prefixed = PrefixedAnchored(model, plain, cut, constant, budget=budget, eps=eps, whole=kept, **options)
    if prefixed is None:
        return Anchored(model, eps=eps, graph=formed, **options)
    with suppress(UnsupportedOperation):
        whole = Anchored(model, eps=eps, graph=formed, **{**options, "delta": budget.split(2).delta})
        if costly or whole.work <= max(prefixed.work, FULL):
            prefixed.whole = whole
    return prefixed


def modules_whole(model: Model) -> Graph:
    """The captured network in which modules with a rule of their own, such as L2 attention, are whole."""
    return capture(model, an_image(model), kept_whole)


def constant_up_to(graph: Graph, cut: Node, model: Model, whole: Graph | None = None) -> float:
    """K of x ↦ ``cut`` on the image box, rounded up: from operations, or from :func:`modules_whole` if smaller."""
    whole = modules_whole(model) if whole is None else whole
    node = _module_of(cut, graph, whole, model)
    plain = _up_to(graph, cut)
    if node is None:
        return _constant(plain, model)
    constant = _constant(_up_to(whole, node), model)
    with suppress(UnsupportedOperation):
        constant = min(constant, _constant(plain, model))
    return constant


def _constant(graph: Graph, model: Model) -> float:
    forms = canonical_forms(graph, "lipschitz", examples(an_image(model)))
    value: Value = global_values(forms)[forms.output]
    return float(value.lip)


def _module_of(cut: Node, graph: Graph, whole: Graph, model: Model) -> Node | None:
    """The module of ``whole`` whose output is ``cut``; None if that is not certain.

    The module runs once, and is one operation of ``whole``. ``cut`` is its last operation in ``graph``, and later
    operations depend on the module through it only. So it is its output. The values must agree as well.
    """
    named = [node for node in whole.nodes if node.path == cut.path]
    inside = [node for node in graph.nodes if node.path == cut.path or node.path.startswith(f"{cut.path}.")]
    if len(named) != 1 or not isinstance(named[0].op, type) or not inside or inside[-1] is not cut or not cut.path:
        return None
    for image in examples(an_image(model)):
        with torch.no_grad():
            one = evaluate(graph.nodes, {graph.input: image})[cut]
            other = evaluate(whole.nodes, {whole.input: image})[named[0]]
        if one.shape != other.shape or not close(one, other, 1e-10):
            return None
    return named[0]


def slope_up_to(graph: Graph, cut: Node, model: Model) -> float:
    """‖∇_x m‖/‖∇_c m‖ for the margin m to the runner-up, over random images: what K is compared with.

    0 if there is one class, or if autograd finds no path from the image to the logits, as after ``detach``.
    """
    if graph.output.entries < 2:
        return 0.0
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(_LOOKED_AT, 1, *model.input_size, generator=generator).to(model.device, model.dtype)
    total = torch.zeros(2, dtype=torch.float64)
    for image in images:
        with torch.enable_grad():
            values = evaluate(graph.nodes, {graph.input: image.requires_grad_()})
            first, second = values[graph.output].flatten().topk(2).values
            if not values[cut].requires_grad or not first.requires_grad:
                return 0.0
            slopes = torch.autograd.grad(first - second, (image, values[cut]), allow_unused=True)
        total += torch.tensor([0.0 if slope is None else computed_l2_norm(slope).item() for slope in slopes])
    return float(total[0] / total[1]) if total[1] > 0 else 0.0


def _up_to(graph: Graph, cut: Node) -> Graph:
    """The network whose output is ``cut``."""
    return needed(Graph(graph.input, cut, graph.nodes[: graph.nodes.index(cut) + 1]))


def cut_of(model: Model) -> Node | None:
    """The value after which the anchored certificate of a model starts; None if it starts at the pixels."""
    return smooth_cut(prepared(recorded(model), model, forms=False))


def smooth_cut(graph: Graph) -> Node | None:
    """The value after which the network is linearised; None if the whole network can be, or nothing nonlinear follows.

    It is the first cut after all operations that are nonsmooth or have no remainder rule. The last nonlinear operation
    may be nonsmooth, if its rule has contracted forms.
    """
    unfit: list[int] = []
    last, formed = -1, False
    for place, node in enumerate(graph.nodes):
        try:
            rule = None if node is graph.input else remainder_of(node)
        except NoAnswer:
            unfit.append(place)
            continue
        if rule is not None:
            last, formed = place, rule.contracts
            unfit += [place] * rule.nonsmooth
    if formed and unfit and unfit[-1] == last:
        unfit.pop()
    if not unfit or last <= unfit[-1]:
        return None
    first_cut = next(node for node in cuts(graph) if graph.nodes.index(node) >= unfit[-1])
    return first_cut if graph.nodes.index(first_cut) < last else None
