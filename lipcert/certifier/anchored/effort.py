"""Which norms are worth computing, and how tightly: found once for a network, from estimates at two fixed images.

A certificate uses many norms, but few of them decide it. These are computed more tightly than the others, and norms
that decide nothing are bounded by products of others.

The choice is made once for every network, so that a certificate depends neither on the other images nor on the order in
which they come. Two fixed images stand for all: noise, and smooth waves. There all norms are estimated, by the same
methods as later but with a failure probability of one half for each, which takes few passes. The rival class is the one
with the smallest margin. Its margin itself says nothing about other images, so it is replaced by one for which
remainders take _SHARE times as much as the gradient. At the radius for that margin, let s be the derivative of
what is left of it by the logarithm of a norm, over all sectors in which little is left, and c the cost of the norm.

- **Tolerances.** Lanczos takes about τ^(−1/2) steps to come within τ. The sum of c τ^(−1/2) is smallest for a given sum
  of s τ if τ is proportional to (c/s)^(2/3). The factor is chosen such that the sum of s τ is _TIGHTER times that
  of the usual tolerance.
- **Products.** Norms are left to products in the order of s/c, in groups, as long as they take no more than a part of
  the margin that the tolerances gain. A group that is too much is halved.

**Quick norms** are a second choice, from the same estimates and in the same way: looser, and products may take more of
the margin. Their radii are smaller, but most images need no more for a verdict at one ε (:mod:`.method`).

All of this only steers: whatever the choice, every norm is an upper bound, and its failure probability is charged to
the ledger of its image. The start vectors of the estimates differ from those of all certificates, so the choice does
not depend on these. A norm may count more at another image than at the fixed ones. Then the radius there is smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lipcert.bounds import margins
from lipcert.certifier._search import search
from lipcert.certifier.anchored.jacobians import Jacobians
from lipcert.certifier.anchored.margin import Forms, RivalMargin, curvature_norms
from lipcert.certifier.anchored.norms import NormFinder, NormKey, NormOptions
from lipcert.certifier.anchored.plan import NormPlan
from lipcert.certifier.anchored.walk import Curvature, FormNorms, Linearization
from lipcert.graph import Node
from lipcert.model import Model
from lipcert.norms import Budget, Draw, Ledger
from lipcert.numerics import at_most
from lipcert.roundoff import Link

# The failure probability of an estimate, its tolerance, and its random products for norms of rows.
_CHANCE, _ROUGHLY, _PROBES = 0.5, 0.1, 16
# The share of its tolerance by which a norm is usually too large.
_EXCESS = 0.7
# What remainders take at the radius, relative to the gradient.
_SHARE = 3.0
# The sum of s τ relative to that of the usual tolerance, and the range of τ.
_TIGHTER = 0.5
_TIGHTEST, _LOOSEST = 0.01, 0.5
# Products may take this share of what the tolerances gain, because other images differ from the fixed ones, and this
# share of the margin in any case.
_SPENT, _UNSEEN = 0.5, 1e-3
# The same for quick norms: the sum of s τ, and the share of the margin that products may take beyond loose norms.
_LOOSER, _TAKEN = 4.0, 0.7
# Sectors count in which no more than about this share of the margin is left beyond the least.
_NEAR = 0.2
# The largest number of choices that are tried.
_TRIALS = 12
# Below this many floating-point operations for an image, all norms are computed.
_WORTH = 1e11
# The largest number of classes for which deviations of the logits, which only order the rivals, may be loose.
_CLASSES = 32


class Candidate(NamedTuple):
    """A norm, the derivative of the margin by its logarithm, its cost, and whether it depends on the tolerance."""

    key: NormKey
    counts: float
    cost: float
    iterative: bool

    @property
    def worth(self) -> float:
        return self.counts / max(self.cost, 1.0)


class Choice(NamedTuple):
    """Tolerances of norms that differ from the usual one; ∞ leaves a norm to products.

    Attributes:
        whole: for radii as large as with all norms.
        quick: for smaller radii at a fraction of the cost; None without estimates.
    """

    whole: dict[NormKey, float]
    quick: dict[NormKey, float] | None


def worthwhile(plan: NormPlan, options: NormOptions) -> bool:
    """Whether to choose among norms: there are many, and they are not deterministic."""
    return not options.deterministic and plan.work >= _WORTH


def chosen(finder: NormFinder, *, quickly: bool = False) -> Choice:
    """Which norms count; those of quick norms only with ``quickly``.

    Nothing is chosen if that is not :func:`worthwhile`, and if no remainder matters at the two images. Norms planned
    beyond a limit on passes are then left to products.
    """
    options = finder.options
    if not worthwhile(finder.plan, options):
        return Choice({}, None)
    trial = _Trial(finder)
    if not trial.valid:
        return Choice({}, None)
    candidates = sorted(trial.candidates(), key=lambda one: one.worth)
    iterative = [one for one in candidates if one.iterative]
    tight, loose = (_tolerances(iterative, options.tolerance, factor) for factor in (_TIGHTER, _LOOSER))
    least = (1 - _SPENT) * trial.remaining(tight).clamp_min(0) - _UNSEEN
    quick = _fewer(trial, candidates, loose, trial.remaining(loose).clamp_max(0) - _TAKEN) if quickly else None
    return Choice(_fewer(trial, candidates, tight, least), quick)


def _fewer(
    trial: _Trial, candidates: list[Candidate], effort: dict[NormKey, float], least: Tensor
) -> dict[NormKey, float]:
    """The same tolerances with norms left to products, while at least this share of the margin is left.

    ``least`` has the shape of :meth:`_Trial.remaining`.
    """
    groups = [candidates]
    for _ in range(_TRIALS):
        if not groups:
            break
        group = groups.pop()
        fewer = effort | {one.key: math.inf for one in group}
        if bool((trial.remaining(fewer) >= least).all()):
            effort = fewer
        elif len(group) > 1:
            half = len(group) // 2
            groups += [group[half:], group[:half]]
    return effort


def _tolerances(candidates: list[Candidate], usual: float, factor: float) -> dict[NormKey, float]:
    """Tolerances for which the sum of s τ is ``factor`` times that of the usual one."""
    counts = torch.tensor([max(one.counts, 1e-9) for one in candidates], dtype=torch.float64)
    cost = torch.tensor([one.cost for one in candidates], dtype=torch.float64)
    ratio = (cost / counts) ** (2 / 3)
    low, high = 1e-12, 1e12
    for _ in range(100):
        middle = math.sqrt(low * high)
        some = (middle * ratio).clamp(min(_TIGHTEST, usual), max(_LOOSEST, usual))
        low, high = (low, middle) if (counts * some).sum() > factor * usual * counts.sum() else (middle, high)
    some = (low * ratio).clamp(min(_TIGHTEST, usual), max(_LOOSEST, usual))
    return {one.key: tolerance for one, tolerance in zip(candidates, some.tolist(), strict=True)}


class _Estimates(NormFinder):
    """Estimates of norms, each computed once, and raised by what its tolerance may add."""

    def __init__(self, finder: NormFinder):
        options = NormOptions(tolerance=_ROUGHLY, seed=finder.options.seed)
        super().__init__(finder.network, finder.plan, options)
        self.usual, self._charge = finder.options.tolerance, _CHANCE
        self.jacobians = finder.jacobians.within(_ROUGHLY)
        self.jacobians.probes = _PROBES
        self.estimates: dict[NormKey, Tensor] = {}
        self.links: dict[Link, Tensor] = {}
        self.iterative: set[NormKey] = set()
        self._drew = False

    def ledger(self, images: int, budget: Budget | None = None) -> Ledger:
        return Ledger(math.inf, images, self.options.seed).part("effort")

    def _draw(self, ledger: Ledger, kind: str, a: Node, b: Node, *more: Node | int, from_entries: bool) -> Draw | None:
        draw = super()._draw(ledger, kind, a, b, *more, from_entries=from_entries)
        self._drew = draw is not None
        return draw

    def _compute(self, key: NormKey, norm: Callable[[Jacobians], Tensor]) -> Tensor:
        if key not in self.estimates:
            self.estimates[key] = norm(self.jacobians)
            if self._drew and key[0] != "peak":
                self.iterative.add(key)
        if key not in self.iterative:
            return self.estimates[key]
        return self.estimates[key] * (1 + _EXCESS * (self.effort or {}).get(key, self.usual))

    def _link(self, link: Link, number: int, values: dict[Node, Tensor], ledger: Ledger) -> Tensor:
        if link not in self.links:
            self.links[link] = super()._link(link, number, values, ledger)
        return self.links[link]


class _Trial:
    """The margin at the fixed images, with any choice of norms."""

    def __init__(self, finder: NormFinder):
        self.finder = _Estimates(finder)
        network = finder.network
        self.images = _images(network.model)
        at = Linearization(self.finder, self.images)
        self.predicted, self.margins = margins(at.logits)
        self.rivals = self.margins.argmin(1)
        toward = RivalMargin(at, self.rivals, self.predicted, self.margins)
        whole = toward.margin

        def unspent(eps: Tensor) -> Tensor:
            loss = whole - toward.slope * eps - toward.bound(eps)
            return at_most((_SHARE + 1) * toward.slope * eps - loss - toward.slope * eps)

        guess = whole.clamp_min(1e-12) / toward.slope
        eps = search(unspent, guess)
        self.least, self.margin = eps, (1 + _SHARE) * toward.slope * eps
        self.valid = bool((eps > 0).all() & (unspent(2 * eps) < 0).all() & self.margin.isfinite().all())
        if self.valid:
            self.toward, self.upto, self.forms, self.norms = self._with({})
            self.eps = self.toward.furthest(self.least, self.norms, self.forms, self.upto)
            self.valid = bool((self.eps > 0).all())

    def _with(self, effort: Mapping[NormKey, float]) -> tuple[RivalMargin, Tensor, Forms, Curvature]:
        self.finder.effort = effort
        at, linear = Linearization(self.finder, self.images), self.toward.linear if effort else {}
        toward = RivalMargin(at, self.rivals, self.predicted, self.margins, linear)
        toward.margin = self.margin
        if effort:
            upto, forms = self.upto, self.forms
        else:
            toward, upto, forms = toward.forms(self.least)
            toward.margin = self.margin
        return toward, upto, forms, curvature_norms(toward, forms, 0)

    def remaining(self, effort: Mapping[NormKey, float]) -> Tensor:
        """The share of the margin that is left at the radii of the usual tolerances, with and without contracted forms.

        Shape (2, images).
        """
        toward, _, forms, norms = self._with(effort)
        return torch.stack((toward.bound(self.eps, norms, forms), toward.bound(self.least))) / self.margin

    def _nearly_least(self, remaining: Tensor) -> Tensor:
        """About the least of what is left in the sectors, as a share of the margin: other sectors count a little."""
        share = remaining / self.toward.margin[:, None]
        return -_NEAR * (-share / _NEAR).logsumexp(1)

    def candidates(self) -> Iterator[Candidate]:
        """The norms that are computed for every image, if all are."""
        bounds, network, plan = self.toward.at.norms, self.finder.network, self.finder.plan
        logs: dict[NormKey, Tensor] = {}
        ends: dict[NormKey, tuple[Node, Node]] = {}

        def marked(norm: Tensor, a: Node, u: Node, *key: str | Node | int) -> Tensor:
            ends[key] = a, u
            logs[key] = torch.zeros(len(norm), dtype=torch.float64, device=norm.device, requires_grad=True)
            return norm * logs[key].exp()

        with torch.enable_grad():
            for (a, u), norm in bounds.gains.items():
                bounds.gains[a, u] = marked(norm, a, u, "norm", a, u)
            for (a, u), norm in bounds.peaks.items():
                bounds.peaks[a, u] = marked(norm, a, u, "peak", a, u)
            norms: dict[Node, list[FormNorms]] = {}
            for v, forms in self.norms.items():
                norms[v] = []
                for number, form in enumerate(forms):
                    u, sizes = form.operand, form.norms
                    raised = {a: marked(norm, a, u, "form", a, v, number) for a, norm in sizes.items() if a is not u}
                    norms[v].append(replace(form, norms={**sizes, **raised}))
            remaining = self._nearly_least(self.toward.in_sectors(self.eps, norms, self.forms))
            remaining = remaining + self._nearly_least(self.toward.in_sectors(self.least))
            slopes = torch.autograd.grad(remaining.sum(), list(logs.values()), allow_unused=True)
        fixed = set() if self.margins.shape[1] <= _CLASSES else set(network.outputs)
        for key, slope in zip(logs, slopes, strict=True):
            a, u = ends[key]
            if u in fixed or plan.by_products(a, u) or (key[0] != "form" and network.affine_path(a, u)):
                continue
            counts = 0.0 if slope is None else slope.nan_to_num(nan=0.0).abs().amax().item()
            cost = plan.work_of(a, u, peak=key[0] == "peak")
            yield Candidate(key, counts, cost, key in self.finder.iterative)


def _images(model: Model) -> Tensor:
    """Noise, and smooth waves of random direction: shape (2, C, H, W) in [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    channels, height, width = model.input_size
    noise = torch.rand(channels, height, width, generator=generator)
    phase, across, down = (torch.rand(channels, 8, 1, 1, generator=generator) for _ in range(3))
    x, y = torch.linspace(0, 1, width), torch.linspace(0, 1, height)[:, None]
    waves = torch.cos(2 * math.pi * (phase + 4 * (across - 0.5) * x + 4 * (down - 0.5) * y)).sum(1)
    return torch.stack([noise, 0.5 + waves / 16]).to(model.device, model.dtype)
