"""Lower bounds on margins in a ball: for all rivals from the deviation of the logits, for one from its gradient."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from lipcert.bounds import Against, Contracted, per_image, row_distances
from lipcert.certifier._search import search, search_least
from lipcert.certifier.anchored.deviations import NO_CURVATURE, Curvature, Deviations, FormNorms, Linearization
from lipcert.certifier.anchored.jacobians import margin_gradients
from lipcert.certifier.anchored.ray import SECTORS, Ray, Sector, most_along, probes, sector
from lipcert.graph import Node
from lipcert.numerics import ROUNDED_SUM, SAFETY, SMALLEST_NORMAL, at_most, l2_norm


class AppliedForm(NamedTuple):
    """The contracted form of a rule, and whether it is used for each image, bool, shape (N,).

    A form with a linear term is always used, and is larger by the rounding error of the gradient to which the term is
    added: ``error`` times ρ, shape (N,).
    """

    answer: Contracted
    used: Tensor
    error: Tensor | None = None

    def only(self, index: Tensor) -> AppliedForm:
        """The parts of the images with the given indices, without the maps M."""
        return AppliedForm(self.answer.only(index), self.used[index], None if self.error is None else self.error[index])


Forms = Mapping[Node, AppliedForm]
NO_FORMS: Forms = MappingProxyType({})

# The contracted forms hold up to this multiple of the radius without them, and are used for operations whose remainder
# takes at least this share of the margin.
FURTHER = 2.0
_WORTH = 0.02
# The deviations at this multiple of that radius, along the gradient, are the likely ones.
_LIKELY = 1.25
# Where the searches for a radius begin: this share of the margin's first-order limit, and this multiple of the radius
# without contracted forms. Sectors that are positive above the radius are evaluated once.
_FIRST, _AFTER = 0.75, 1.3
# The largest number of entries of what rules read of an image that is repeated for every sector, 256 MiB.
_ENTRIES = 2**25


def head_distances(at: Linearization, predicted: Tensor) -> Tensor | None:
    """‖w_y − w_j‖ for a linear head with rows w and these classes y, shape (N, classes); None without such a head."""
    if at.network.head is None:
        return None
    return torch.stack([row_distances(at.network.head[1], y) for y in predicted.tolist()])


def change(at: Linearization, deviations: Deviations, distances: Tensor | None) -> Tensor:
    """Upper bounds on the change of f_y − f_j, of shape (N, 1) or (N, classes).

    f_y − f_j = ⟨e_y − e_j, f⟩ changes by at most √2 ρ of the logits, and ⟨w_y − w_j, h⟩ + const by ‖w_y − w_j‖ ρ of the
    features (Leino, Wang, Fredrikson, ICML 2021, section 3).
    """
    rounding, output = at.norms.rounded, at.network.graph.output
    bound = math.sqrt(2) * (deviations.logits + rounding.noise[output])[:, None]
    if deviations.features is not None and distances is not None and at.network.head is not None:
        features = deviations.features + rounding.noise[at.network.head[0]]
        head = math.sqrt(2) * rounding.errors[at.network.root(output)]
        for node in at.network.graph.between(at.network.head[0], [output]):
            if node in at.deployed.local:  # operations that copy the logits round too
                head = head + 2 * per_image(at.deployed.local[node]).amax(1)
        bound = torch.minimum(bound, distances * features[:, None] + head[:, None])
    return at_most(bound) * (1 + SAFETY)


def curvature_norms(toward: RivalMargin, forms: Forms, round: int) -> Curvature:
    """Upper bounds on ‖M G(a → u)‖ for the given forms M; ∞ for images for which a form is not used."""
    at = toward.at
    network, ledger = at.network, at.norms.ledger.part("weighed", at.searches, round)
    unknown = torch.full_like(at.logits[:, 0], math.inf, dtype=torch.float64)
    by_operation: dict[Node, list[FormNorms]] = {}
    for stage in network.stages:
        for place, v in enumerate(stage.nonlinear):
            if v not in forms:
                continue
            answer, some = forms[v].answer, forms[v].used.nonzero()[:, 0]
            # Norms are computed for the images that use the form; all others get ∞, so that their bounds do not change.
            part, by_operation[v] = at if len(some) == len(unknown) else at.only(some), []
            for number, form in enumerate(answer.forms):
                operand, form = v.operands[form.operand], form.only(some)
                u = network.root(operand)
                key = ledger.only(some).part(network.graph.position[v], number)
                norms = {u: form.norm}  # ‖M G(u → u)‖ = ‖M‖
                for a in dict.fromkeys((network.source, stage.start, *stage.nonlinear[:place])):
                    if a is u or (a, u) in at.plan.unconnected:
                        continue
                    if (a, u) in at.plan.covered:
                        norms[a] = form.norm * part.gain(a, u)
                    else:
                        norms[a] = at.finder.formed(a, operand, part.values, form, part.norms, key)
                along = unknown[some] if toward.ray is None else toward.ray.formed(operand, form, some)
                every = {a: unknown.index_copy(0, some, norm) for a, norm in norms.items()}
                columns = {}
                for a in stage.nonlinear[:place]:
                    if network.rules[a].sums and (a, u) not in at.plan.unconnected and a is not u:
                        sizes = at.finder.formed_columns(a, operand, part.values, form, part.norms)
                        if sizes is not None:
                            every_column = sizes.new_full((len(unknown), sizes.shape[1]), math.inf)
                            columns[a] = every_column.index_copy(0, some, sizes)
                by_operation[v].append(FormNorms(operand, every, unknown.index_copy(0, some, along), columns))
    return by_operation


def first_order_loss(errors: Mapping[Node, Tensor], gradients: Mapping[Node, Tensor]) -> Tensor:
    """Σ_w Σ_i |∇_w m|_i |e_w|_i for the gradients of a margin, shape (N,)."""
    weighed = [
        per_image(torch.where(gradients[node] == 0, 0.0, gradients[node].abs() * error)).sum(1)
        for node, error in errors.items()
    ]
    return at_most(torch.stack(weighed).sum(0) * (1 + SAFETY))


class RivalMargin:
    """The margins f_y − f_j toward one rival class j per image, bounded with their own gradients.

    Let forms have the linear terms b_u: −⟨g_v, R_v⟩ ≤ ⟨b_u, δ_u⟩ + (the rest of the bound of the form) for the operand
    u of v. The change of the margin is that of m' = m − Σ_u ⟨b_u, u⟩, plus Σ_u ⟨b_u, δ_u⟩, which cancels against the
    terms of the forms. So with the gradients of m' in place of those of m, no linear term is left. The gradient with
    respect to the result of v itself does not change by its own b_u, since u comes before v.

    Attributes:
        linear: the b_u.
    """

    def __init__(
        self,
        at: Linearization,
        rivals: Tensor,
        predicted: Tensor,
        margins: Tensor,
        linear: Mapping[Node, Tensor] = MappingProxyType({}),
    ):
        self.at, self.linear, self._rivalry = at, linear, (rivals, predicted, margins)
        at_source, at_nodes = self._gradients(linear)
        self.at_nodes = {v: at_nodes[v] for v in at.remainders}
        self.place = at.norms.rounded.starts
        lost, self.rounding = at.norms.rounded.loss(at_nodes)
        margin = margins.gather(1, rivals[:, None])[:, 0]
        self.margin = (margin - lost * (1 + SAFETY)).clamp_min(0)
        if at.deployed.local:
            self.margin = (self.margin - first_order_loss(at.deployed.local, at_nodes)).clamp_min(0)
        self.margin = self.margin.masked_fill(at.uncertain, 0)
        self.slope = (l2_norm(at_source, 1) * (1 + SAFETY)).clamp_min(SMALLEST_NORMAL)
        self.against: dict[Node, Against] = {v: at.remainders[v].against(g) for v, g in self.at_nodes.items()}
        self.at_source, self.sectored = at_source, SECTORS * at.entries <= _ENTRIES
        self.decrease = None if at.layer is None else at.layer.decrease(at_source, self.slope, self.margin)

    @cached_property
    def ray(self) -> Ray | None:
        """The perturbations split along the gradient; None if the values of all sectors take too much memory."""
        return Ray(self.at, self.at_source) if self.sectored else None

    def _gradients(self, linear: Mapping[Node, Tensor]) -> tuple[Tensor, dict[Node, Tensor]]:
        at, (rivals, predicted, _) = self.at, self._rivalry
        return margin_gradients(at.network, at.values, list(at.network.chains.links), rivals, predicted, linear)

    def only(self, index: Tensor) -> RivalMargin:
        """The margin of the images with the given indices, for bounds within ε."""
        part = copy.copy(self)
        at = part.at = self.at.only(index, bounds_only=True)
        part.at_nodes = {v: g[index] for v, g in self.at_nodes.items()}
        part.margin, part.slope, part.rounding = self.margin[index], self.slope[index], self.rounding[index]
        part.against = {v: at.remainders[v].against(g) for v, g in part.at_nodes.items()}
        part.ray = None if self.ray is None else self.ray.only(index)
        part.decrease = None if self.decrease is None else self.decrease.only(index)
        return part

    def first_order(self, eps: Tensor, along: Tensor | None = None) -> Tensor:
        """An upper bound on how much the margin decreases within ε to first order, shape (N,)."""
        decrease = self.slope * (eps if along is None else along)
        return decrease if self.decrease is None else torch.minimum(decrease, self.decrease(eps))

    def bound(self, eps: Tensor, curvature: Curvature = NO_CURVATURE, forms: Forms = NO_FORMS) -> Tensor:
        """A lower bound on the margin within distance ε, shape (N,)."""
        ball = self._bound(eps, curvature, forms)
        open_ = (~(ball > 0)).nonzero()[:, 0]  # decided per image, so that a bound does not depend on the others
        if self.ray is None or not len(open_):
            return ball
        images, numbers = _with_sectors(open_)
        inside = self._inside(eps[images], images, numbers, curvature, forms).unflatten(0, (-1, SECTORS)).amin(1)
        return ball.index_copy(0, open_, torch.maximum(ball[open_], inside))

    def _inside(
        self, eps: Tensor, images: Tensor, numbers: Tensor, curvature: Curvature, forms: Forms, pieces: int = 1
    ) -> Tensor:
        """Lower bounds on the margin of some images in one sector each, within their ε, all of shape (rows,).

        A sector with a bound that is not positive is divided into pieces, if the linearisation has some.
        """
        part = self.only(images)
        assert part.ray is not None
        curved = {v: [form.only(images) for form in norms] for v, norms in curvature.items()}
        formed = {v: form.only(images) for v, form in forms.items()}
        bound = part._bound(eps, curved, formed, sector(part.ray, eps, numbers, pieces))
        open_ = (~(bound > 0)).nonzero()[:, 0]
        if pieces == (count := self.at.pieces) or not len(open_):
            return bound
        eps, images, first = eps[open_], images[open_], count * numbers[open_]
        inside = [self._inside(eps, images, first + piece, curvature, forms, count) for piece in range(count)]
        return bound.index_copy(0, open_, torch.maximum(bound[open_], torch.stack(inside).amin(0)))

    def largest_radius(
        self, guess: Tensor, curvature: Curvature = NO_CURVATURE, forms: Forms = NO_FORMS, upto: Tensor | None = None
    ) -> Tensor:
        """The largest ε, to 0.01 % and at most ``upto``, within which the margin stays positive, shape (N,).

        A sector of a ball contains the sector of a smaller ball with the same angles. So where the margin is positive
        in one, it is in the other, and every sector is evaluated at the radius or above it.
        """
        upto = torch.full_like(guess, math.inf) if upto is None else upto
        if self.ray is None:
            return search(lambda eps: torch.where(eps <= upto, self._bound(eps, curvature, forms), -1.0), guess)
        steepness = self.slope[:, None] * most_along(guess.device)
        return search_least(
            lambda eps, images, numbers: self._inside(eps, images, numbers, curvature, forms),
            self.margin,
            steepness,
            guess,
            upto,
            probes(guess.device),
        )

    def _bound(self, eps: Tensor, curvature: Curvature, forms: Forms, sector: Sector | None = None) -> Tensor:
        """A lower bound on the margin within distance ε, in a sector, shape (N,)."""
        deviations = self.at.propagate(eps, curvature, sector=sector, outputs=False)
        loss = torch.zeros_like(eps)
        noise = self.rounding[:, 0] * eps  # rounding errors of the gradients
        for v, rho in deviations.operands.items():
            bound = self.against[v](rho)
            noise = noise + self.rounding[:, self.place[v]] * deviations.remainders[v]
            if v in deviations.form_norms:
                sizes = torch.stack(deviations.form_norms[v])
                finite = sizes.isfinite().all(0)  # without infinite numbers, which have no derivative
                formed = at_most(forms[v].answer.bound(rho, list(torch.where(finite, sizes, 0.0))))
                error = forms[v].error
                if error is None:
                    bound = torch.where(finite, torch.minimum(bound, formed), bound)
                else:
                    bound = torch.where(forms[v].used, torch.where(finite, formed + error * rho[0], math.inf), bound)
            loss = loss + bound
        along = eps if sector is None else torch.minimum(eps, sector.along + 1e-9 * eps)
        return self.margin - self.first_order(eps, along) - at_most(loss + noise) * (1 + SAFETY)

    def radius(self, enough: Tensor | None = None) -> Tensor:
        """Radii without contracted forms, shape (N,), cut off at ``enough``."""
        guess = _FIRST * self.margin / self.slope
        if enough is None:
            return self.largest_radius(guess)
        guess = torch.minimum(guess, enough)
        if not self.sectored:
            return self.largest_radius(guess, upto=enough)
        # The ball takes one evaluation, its sectors many.
        sure = enough.isfinite() & (self._bound(enough.nan_to_num(posinf=0.0), NO_CURVATURE, NO_FORMS) > 0)
        if bool(sure.all()):
            return enough
        return torch.where(sure, enough, self.largest_radius(torch.where(sure, 0.0, guess), upto=enough))

    def radius_with_forms(self, least: Tensor, round: int) -> Tensor:
        """Radii with contracted forms, shape (N,), at least ``least``."""
        toward, upto, forms = self.forms(least)
        if not forms:
            return least
        norms = curvature_norms(toward, forms, round)
        return torch.maximum(toward.largest_radius(_AFTER * least, norms, forms, upto), least)

    def moved(self, eps: Tensor) -> dict[Node, list[Tensor]]:
        """Upper bounds on the deviations of operands within ε: the largest in the sectors that cover the ball."""
        if self.ray is None:
            return self.at.propagate(eps, outputs=False).operands
        images, numbers = _with_sectors(torch.arange(len(eps), device=eps.device))
        part = self.only(images)
        assert part.ray is not None
        operands = part.at.propagate(eps[images], sector=sector(part.ray, eps[images], numbers), outputs=False).operands
        return {v: [bound.unflatten(0, (-1, SECTORS)).amax(1) for bound in rho] for v, rho in operands.items()}

    def forms(self, least: Tensor) -> tuple[RivalMargin, Tensor, Forms]:
        """The margin with the linear terms of contracted forms, and these forms.

        They are the forms worth their norms for radii of about ``least``, and hold up to the ε that is returned. The
        linear term of a form changes the gradients with respect to all earlier operations, so the last comes first.
        """
        upto = FURTHER * least
        moved = self.moved(upto)
        forms: dict[Node, AppliedForm] = {}
        linear: dict[Node, Tensor] = {}
        at_nodes = self.at_nodes
        for v in reversed(at_nodes):  # from the last to the first: see the docstring
            u = v.operands[0]
            along = None if self.ray is None else self.ray.tangents.get(u)
            likely = None if along is None else along * (-_LIKELY * least).reshape(-1, *[1] * (along.dim() - 1))
            contracted = self.at.remainders[v].contracted(at_nodes[v], moved[v], likely)
            # Decided per image, so that a radius does not depend on the other images.
            worth = self.against[v](moved[v]) > _WORTH * self.margin
            if contracted is None or not bool(worth.any()):
                continue
            error = None
            if contracted.linear is not None:
                some = worth.reshape(-1, *[1] * (contracted.linear.dim() - 1))
                used = torch.where(some, contracted.linear, 0.0)
                linear[u] = used + linear[u] if u in linear else used
                at_nodes = self._gradients(linear)[1]
                gradient, term = (l2_norm(per_image(part), 1) for part in (at_nodes.get(u, used), used))
                error = ROUNDED_SUM * (gradient + term)  # of the sum of this term and the gradient
            forms[v] = AppliedForm(contracted, worth, error)
        return RivalMargin(self.at, *self._rivalry, linear) if linear else self, upto, forms


def _with_sectors(images: Tensor) -> tuple[Tensor, Tensor]:
    """Each image once for every sector, and the numbers of the sectors, both of shape (images · sectors,)."""
    numbers = torch.arange(SECTORS, device=images.device).repeat(len(images))
    return images.repeat_interleave(SECTORS), numbers
