"""The anchored certificate, and the order in which rival classes are examined.

The proof is in docs/note.md: the identity, theorem 1, and the refinements by forms, columns, sectors and cuts. The
idea, with a network of two layers by hand, is on docs/anchored.md. The certificate is reduced by a relative 1e-6 for
the rounding of sums and products of bounds; :mod:`lipcert.roundoff` has the proof for everything that enters them.

With ``eps``, contracted forms are left out where they cannot change the verdict: they hold up to a multiple of the
radius without them, and certify no image whose margin toward some rival vanishes within ε to first order. Coarse bounds
on norms come first, with half of the failure probability; finer ones follow for images that are nearly certified, with
smaller sectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lipcert.certifier._search import search_each
from lipcert.certifier.anchored.deviations import NO_CURVATURE, NORM, Curvature, Deviations, Linearization
from lipcert.certifier.anchored.margin import FURTHER, RivalMargin, change, head_distances
from lipcert.certifier.anchored.network import Network
from lipcert.certifier.anchored.norms import NormFinder, NormOptions, NormProgress, Norms
from lipcert.certifier.anchored.plan import NormPlan, anchored_pairs
from lipcert.certifier.anchored.ray import SECTORS
from lipcert.graph import Graph, Node
from lipcert.model import Model
from lipcert.norms import Ledger
from lipcert.numerics import SAFETY

# The number of rival classes for which contracted forms are used.
ROUNDS = 4
# Rival classes are examined together while their values have at most so many entries; on a CPU 8 MiB stay in a cache.
_ENTRIES, _TIMES_ON_A_GPU = 2**20, 32
# Below this many floating-point operations for the norms of an image, radii are full in any case.
FULL = 2e10
# Coarse bounds on norms: their tolerance, and their products for norms of rows.
_COARSE: dict[str, Any] = {"tolerance": 0.2, "probes": 128}
# Finer ones, and factors by which they raise radii at most, by experience.
_FINER: list[tuple[dict[str, Any], float]] = [({}, 2.0), ({"tolerance": 0.01, "probes": 1024}, 1.1)]
# What the search for the radius toward a rival class does with each entry in each sector, in floating-point operations.
_SEARCHED = 50


class Anchored:
    """The anchored certificate of one model.

    Attributes:
        network: the captured network after the perturbed value.
        plan: which norms of its Jacobians are computed.
        finder: computes them.
        finer: finders for finer bounds, used in turn, and the factors by which they may raise a radius; none if all
            radii are full.

    Args:
        model: the model, in float64.
        at: the perturbed value: None for the pixels, the path of a module for its output, the index of a stage for its
            start, or a node of ``graph``. ε is measured there; values that do not depend on it stay nominal.
        eps: stops at a verdict at this ε: a radius above it may be smaller than the full one, and so may one below it
            where no certificate at ε is possible. Ignored for networks with few norms. By default all radii are full.
        graph: the captured network; by default the model is captured.
        **options: see :class:`~lipcert.certifier.anchored.NormOptions`.

    Raises:
        InputError: ``at`` names no value of the network; an unknown rigor, or one that needs Jacobians too large.
        UnsupportedOperation: names the operations after ``at`` that have no remainder rule.
    """

    def __init__(
        self,
        model: Model,
        *,
        at: str | int | Node | None = None,
        eps: float | None = None,
        graph: Graph | None = None,
        **options: Any,
    ):
        settings = NormOptions(**options)
        network = self.network = Network(model, at=at, graph=graph, merged=not isinstance(at, int))
        self.plan = NormPlan(network, anchored_pairs(network))
        self.eps = eps if self.plan.work >= FULL else None
        spare, self.budget, self.finer = ROUNDS * form_norms_of_a_rival(network), settings.budget, []
        if self.eps is not None and not settings.deterministic:
            half = settings.budget.split(2)
            each = half.split(len(_FINER)).delta
            self.finer = [
                (NormFinder(network, self.plan, replace(settings, delta=each, **options), spare=spare), factor)
                for options, factor in _FINER
            ]
            settings = replace(settings, delta=half.delta, **_COARSE)
        self.finder = NormFinder(network, self.plan, settings, spare=spare)

    @property
    def work(self) -> float:
        """An estimate of the floating-point operations for the norms of an image."""
        return work_with_curvature(self.plan)

    def __call__(self, images: Tensor, progress: NormProgress | None = None, ledger: Ledger | None = None) -> Anchor:
        """Linearises the network at images, shape (N, C, H, W), and computes the norms; the rest is arithmetic in ε."""
        ledger = self.finder.ledger(len(images), self.budget) if ledger is None else ledger
        return Anchor(self, Linearization(self.finder, images, progress, ledger))


def form_norms_of_a_rival(network: Network) -> int:
    """The largest number of norms with forms for one rival class; a rule has at most one form."""
    return sum(2 + place for stage in network.stages for place in range(len(stage.nonlinear)))


def work_with_curvature(plan: NormPlan, weighings: int = 1) -> float:
    """An estimate of the floating-point operations for the norms of an image, with forms for ``weighings`` searches."""
    contracted = {u for v, rule in plan.network.rules.items() if rule.contracts for u in plan.network.operands(v)}
    weighed = weighings * ROUNDS * sum(plan.work_of(a, b) for a, b in plan.pairs if b in contracted)
    return plan.work + weighed


def work_of_a_rival(plan: NormPlan) -> float:
    """An estimate of the floating-point operations for the radius of an image toward one rival class."""
    read = dict.fromkeys(node for v in plan.network.rules for node in (v, *v.operands))
    return _SEARCHED * SECTORS * max(1, sum(node.entries for node in read))


class Anchor:
    """The network linearised at N images: bounds for any ε."""

    def __init__(self, method: Anchored, linearization: Linearization):
        self.method, self.linearization = method, linearization

    @property
    def norms(self) -> Norms:
        return self.linearization.norms

    def deviations(self, eps: Tensor, curvature: Curvature = NO_CURVATURE) -> Deviations:
        """Bounds on the deviations of values for perturbations of norm at most eps, shape (N,)."""
        return self.linearization.propagate(eps, curvature)

    def radius(self, predicted: Tensor, margins: Tensor, limit: int | None = None) -> Tensor:
        """Certified radii, float64, shape (N,), rounded down, to 1 % or better.

        Args:
            predicted: classes y, shape (N,).
            margins: f_y − f_j, +inf at j = y, shape (N, classes).
            limit: the largest number of rivals to examine with their own gradients; the others are bounded by the
                deviation of the logits.

        Raises:
            LedgerError: called again, although the first call used the start vectors; linearise the images again.
        """
        at, eps, some = self.linearization, self.method.eps, torch.arange(len(predicted), device=predicted.device)
        best = linearized_radius(at, predicted, margins, limit, eps)
        for finder, factor in self.method.finer:
            assert eps is not None
            nearly = ((best[some] <= eps) & (eps < factor * best[some])).nonzero()[:, 0]
            if not len(nearly):
                break
            at, some = at.again(finder, nearly), some[nearly]
            again = linearized_radius(at, predicted[some], margins[some], limit, eps)
            best[some] = torch.maximum(best[some], again)
        return best


@torch.no_grad()
def linearized_radius(
    at: Linearization, predicted: Tensor, margins: Tensor, limit: int | None = None, eps: float | None = None
) -> Tensor:
    """Radii of one linearisation; arguments as for :meth:`Anchor.radius`.

    The deviation of the logits gives a first radius for every rival class, without a backward pass. The class with the
    smallest radius decides, so that is computed with gradients of its own, and then with forms, until the smallest
    radius is one that grows no further. With ``eps`` no forms are computed for images whose verdict they cannot change.
    The result for an image does not depend on the others.
    """
    allowed = _cheap(at, predicted, margins)
    near = allowed.argsort(1).argsort(1) < (allowed.shape[1] if limit is None else limit)
    untried, formed = torch.isfinite(allowed) & near, torch.zeros_like(near)
    possible = torch.ones_like(allowed[:, 0], dtype=torch.bool)
    sure = math.inf if eps is None else eps / (1 - SAFETY)  # forms are computed for radii up to this one
    for round in range(ROUNDS + 1):
        together = 1
        while True:
            tried = torch.where(untried, math.inf, allowed)
            least = tried.amin(1, keepdim=True)
            floors, rivals = torch.where(untried, allowed, math.inf).sort(1)
            images, places = (floors < least)[:, :together].nonzero().unbind(1)
            if not len(images):
                break
            grows = possible[:, None] & (tried <= sure) & ~formed  # by forms, at most by this factor
            enough = torch.where(grows, FURTHER * tried, tried).amin(1)
            for some, classes, toward in _toward(at, images, rivals[images, places], predicted, margins):
                allowed[some, classes] = torch.maximum(allowed[some, classes], toward.radius(enough[some]))
                untried[some, classes] = False
                if eps is not None:
                    possible[some[~(toward.margin > toward.first_order(torch.full_like(toward.margin, eps)))]] = False
            together *= 2
        least, rivals = allowed.min(1)
        done = formed.gather(1, rivals[:, None])[:, 0] | ~possible | (least > sure) | torch.isinf(least)
        if eps is not None:
            done |= FURTHER * least <= sure  # forms raise the radius toward this rival no further
        images = (~done).nonzero()[:, 0]
        if round == ROUNDS or not len(images):
            break
        for some, classes, toward in _toward(at, images, rivals[images], predicted, margins):
            allowed[some, classes] = toward.radius_with_forms(least[some], round)
            formed[some, classes] = True
    best = allowed.amin(1)
    return torch.where(torch.isfinite(best) & ~at.uncertain, best, 0.0) * (1 - SAFETY)


def _toward(
    at: Linearization, images: Tensor, rivals: Tensor, predicted: Tensor, margins: Tensor
) -> Iterator[tuple[Tensor, Tensor, RivalMargin]]:
    """The margins of some images toward one rival class each, with the images and classes, as many as memory allows."""
    entries = max(1, SECTORS * at.entries + sum(value[0].numel() for value in at.values.values()))
    most = _ENTRIES * (_TIMES_ON_A_GPU if at.logits.is_cuda else 1)
    for part in torch.arange(len(images), device=images.device).split(max(1, most // entries)):
        some, classes = images[part], rivals[part]
        yield some, classes, RivalMargin(at.only(some), classes, predicted[some], margins[some])


def _cheap(at: Linearization, predicted: Tensor, margins: Tensor) -> Tensor:
    """Radii from the deviations of the logits and the features, shape (N, classes)."""
    distances = head_distances(at, predicted)
    slope = torch.as_tensor(at.gain(at.network.source, at.network.graph.output, NORM), dtype=torch.float64)
    rivals = torch.isfinite(margins)
    least = torch.where(rivals, margins, math.inf).amin(1, keepdim=True)
    finite = torch.where(rivals, margins, least).clamp_min(0)

    def remaining(eps: Tensor) -> Tensor:
        return finite - change(at, at.propagate(eps), distances)

    return torch.where(rivals, search_each(remaining, finite / slope.reshape(-1, 1)), math.inf)
