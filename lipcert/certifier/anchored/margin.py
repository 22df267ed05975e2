"""Lower bounds on margins in a ball: for all rivals from the deviation of the logits, for one from its gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from lipcert._numerics import SAFETY, at_most
from lipcert.bounds import Against, Contracted, row_distances
from lipcert.certifier._search import search
from lipcert.certifier.anchored.jacobians import margin_gradients
from lipcert.certifier.anchored.walk import NO_CURVATURE, Curvature, Deviations, FormNorms, Linearization
from lipcert.graph import Node

# The contracted answers of rules, each with the indices of the images for which it is used.
Forms = Mapping[Node, tuple[Contracted, Tensor]]
NO_FORMS: Forms = MappingProxyType({})

# The contracted forms hold up to this multiple of the radius without them, and are used for operations whose remainder
# takes at least this share of the margin.
FURTHER = 2.0
_WORTH = 0.02


def spreads(at: Linearization, predicted: Tensor) -> Tensor | None:
    """Upper bounds on ‖w_y − w_j‖ for a linear head with rows w, shape (N, classes); None without a linear head."""
    if at.network.head is None:
        return None
    weight = at.network.head[1]
    return torch.stack([row_distances(weight, y) for y in predicted.tolist()])


def change(at: Linearization, found: Deviations, spread: Tensor | None) -> Tensor:
    """Upper bounds on the change of f_y − f_j, of shape (N, 1) or (N, classes).

    f_y − f_j = ⟨e_y − e_j, f⟩ changes by at most √2 ρ of the logits, and ⟨w_y − w_j, h⟩ + const by ‖w_y − w_j‖ ρ of the
    features (Leino, Wang, Fredrikson, ICML 2021, section 3).
    """
    rounding, output = at.norms.rounded, at.network.graph.output
    bound = math.sqrt(2) * (found.logits + rounding.noise[output])[:, None]
    if found.features is not None and spread is not None and at.network.head is not None:
        features = found.features + rounding.noise[at.network.head[0]]
        head = math.sqrt(2) * rounding.errors[at.network.root(output)]
        bound = torch.minimum(bound, spread * features[:, None] + head[:, None])
    bound = at_most(bound) * (1 + SAFETY)
    deployed = at.rounding.of_head()
    return bound if deployed is None else bound + 2 * deployed * (1 + SAFETY)


def curvature_norms(at: Linearization, forms: Forms, round: int) -> Curvature:
    """Upper bounds on ‖M G(a → u)‖ for the given forms M; ∞ for images for which a form is not used."""
    network, ledger = at.network, at.norms.ledger.part("weighed", at.weighing, round)
    unknown = torch.full_like(at.logits[:, 0], math.inf, dtype=torch.float64)
    found: dict[Node, list[FormNorms]] = {}
    for stage in network.stages:
        for place, v in enumerate(stage.nonlinear):
            if v not in forms:
                continue
            answer, some = forms[v]
            part, found[v] = at if len(some) == len(unknown) else at.only(some), []
            for number, form in enumerate(answer.forms):
                u, form = network.root(v.operands[form.operand]), form.only(some)
                key = ledger.only(some).part(network.replay.position[v], number)
                norms, left = {u: form.norm}, []
                for a in dict.fromkeys((network.source, stage.start, *stage.nonlinear[:place])):
                    if a is u or (a, u) in at.plan.unconnected:
                        continue
                    if (a, u) in at.plan.chained or not at.finder.wants("form", a, v, number):
                        left.append(a)
                    else:
                        norms[a] = at.finder.formed(a, v, number, part.values, form, part.norms, key)
                known = {a: norm for a, norm in norms.items() if a is not u}
                for a in left:
                    least = at.finder.product(a, u, known, part.norms)
                    norms[a] = torch.minimum(form.norm * part.gain(a, u), least)
                found[v].append(FormNorms(u, {a: unknown.index_copy(0, some, norm) for a, norm in norms.items()}))
    return found


class RivalMargin:
    """The margins f_y − f_j toward one rival class j per image, bounded with their own gradients.

    Args:
        at: the network linearised at N images.
        rivals: the classes j, shape (N,).
        predicted: the classes y, shape (N,).
        margins: f_y − f_j at the images, shape (N, classes).
    """

    def __init__(self, at: Linearization, rivals: Tensor, predicted: Tensor, margins: Tensor):
        self.at = at
        nodes = list(at.network.chains.links)
        at_source, at_nodes = margin_gradients(at.network, at.values, nodes, rivals, predicted)
        self.at_nodes = {v: at_nodes[v] for v in at.remainders}
        self.place = at.norms.rounded.starts
        lost, self.rounding = at.norms.rounded.taken(at_nodes)
        margin = margins.gather(1, rivals[:, None])[:, 0]
        self.margin = (margin - lost * (1 + SAFETY)).clamp_min(0)
        deployed = at.rounding.lost(rivals, predicted)
        if deployed is not None:
            self.margin = (self.margin - deployed).clamp_min(0)
        self.slope = (at_source.norm(dim=1) * (1 + SAFETY)).clamp_min(1e-140)  # smaller squares may underflow
        self.against: dict[Node, Against] = {v: at.remainders[v].against(g) for v, g in self.at_nodes.items()}

    def left(self, eps: Tensor, curvature: Curvature = NO_CURVATURE, forms: Forms = NO_FORMS) -> Tensor:
        """A lower bound on the margin within distance ε, shape (N,)."""
        found = self.at.walk(eps, curvature)
        taken = torch.zeros_like(eps)
        rest = self.rounding[:, 0] * eps  # rounding errors of the gradients
        for v, rho in found.operands.items():
            bound = self.against[v](rho)
            rest = rest + self.rounding[:, self.place[v]] * at_most(self.at.remainders[v].norm(rho))
            if v in found.weighed:
                bound = torch.minimum(bound, at_most(forms[v][0].bound(rho, found.weighed[v])))
            taken = taken + bound
        return self.margin - self.slope * eps - at_most(taken + rest) * (1 + SAFETY)

    def radius(self, enough: Tensor | None = None) -> Tensor:
        """Radii without contracted forms, shape (N,), cut off at ``enough``, where no search is needed."""
        guess = self.margin / self.slope
        known = torch.zeros_like(guess, dtype=torch.bool) if enough is None else torch.isfinite(enough)
        if enough is None or not bool(known.any()):
            return search(self.left, guess)
        known &= self.left(torch.where(known, enough, guess)) > 0
        return enough if bool(known.all()) else torch.where(known, enough, search(self.left, guess))

    def weighed(self, least: Tensor, round: int) -> Tensor:
        """Radii with contracted forms, shape (N,), at least ``least``.

        Args:
            least: valid radii, shape (N,).
            round: the number of rival classes examined before; it identifies the start vectors.
        """
        upto, forms = self.forms(least)
        if not forms:
            return least
        norms = curvature_norms(self.at, forms, round)

        def left(eps: Tensor) -> Tensor:
            return torch.where(eps <= upto, self.left(eps, norms, forms), -1.0)

        return torch.maximum(search(left, least), least)

    def forms(self, least: Tensor) -> tuple[Tensor, dict[Node, tuple[Contracted, Tensor]]]:
        """The ε up to which contracted forms hold, and those worth their norms for radii of about ``least``."""
        upto = FURTHER * least
        moved = self.at.walk(upto).operands
        forms: dict[Node, tuple[Contracted, Tensor]] = {}
        for v, g in self.at_nodes.items():
            found = self.at.remainders[v].contracted(g, moved[v])
            # Decided per image, so that a radius does not depend on the other images.
            worth = (self.against[v](moved[v]) > _WORTH * self.margin).nonzero()[:, 0]
            if found is not None and len(worth):
                forms[v] = found, worth
        return upto, forms
