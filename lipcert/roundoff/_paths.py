"""Bounds on rounding errors in a linearised network: of values, of gradients and of products with Jacobians.

In float64 an operation w computes ĥ_w = f_w(ĥ) + e_w from the computed values ĥ of its operands o. A product of its
Jacobian at ĥ, or of the transposed Jacobian, with a vector v has an error f with ‖f‖ ≤ κ_wo ‖v‖.
:class:`.OperationRounding` bounds κ_wo and ‖e_w‖ for each operation. Three statements follow. G always
denotes a Jacobian at the *computed* values, so no second-order term is neglected.

**Norms.** A computed product is Ĝ(a → b)v = G(a → b)v + Σ_w G(w → b) f_w, by induction over the operations between a
and b. Let g bound ‖G‖ and the norm of Ĝ applied to a unit vector, for all shorter paths. Then

    ‖Ĝ(a → b)v − G(a → b)v‖ ≤ S(a, b)‖v‖,    S(a, b) = Σ_(o → w) g(a → o) κ_wo g(w → b),

and likewise for the transposed product. A norm computed from such products is raised by c S, where c depends on the
method. S includes one more S than needed, so that a raised norm is a bound
g too. The other g are products of norms of single operations, A + κ each, and of known norms
(:class:`.Chains`). Each norm is first assumed to be slightly larger than computed. If the assumption
does not cover the error, it is enlarged; after several failures the norm is dropped. Once all assumptions hold, all
bounds are proved by induction over the length of the paths.

**Values.** The exact network with the perturbation δ deviates from the computed values by

    Δ_u = G(x → u) δ + Σ_v G(v → u) R_v − Σ_w G(w → u) e_w,

that is by at most ν_u = Σ_w g(w → u) ‖e_w‖ more than without rounding. Remainder rules are made at the computed values
and get bounds on all of Δ.

**Margins.** The computed gradients p satisfy p_o = Σ_w J_woᵀ p_w + f_o with ‖f_o‖ ≤ Σ_w κ_wo ‖p_w‖. Summing ⟨p_w, Δ_w⟩
over all operations and applying the recursion of Δ gives exactly

    change of the margin = ⟨p_x, δ⟩ + Σ_v ⟨p_v, R_v⟩ − Σ_w ⟨p_w, e_w⟩ − Σ_o ⟨f_o, Δ_o⟩.

This holds whatever the error of p, and no norm is multiplied along the depth.

Assumptions on torch's kernels in float64: they sum products in any order, with or without fused multiply-add; they
compute derivatives by the formulas of the operation, with rounding errors relative to the terms; library functions are
accurate to 16 ulp. Operations without bounds of their own, such as LSTM, are assumed to compute products with errors of
2⁻⁴⁰ relative to the terms; their norms are computed like those between operations. If an operand lies exactly at a
breakpoint, remainder rules allow for the slopes of both sides, since the gradients may be of another evaluation; an
image with an operand nearer to one than its rounding error has no certificate (``uncertain`` of remainder rules). With
``at``, rounding errors before the perturbed value are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lipcert.bounds import gamma, lengths
from lipcert.graph import Node
from lipcert.numerics import at_most, times
from lipcert.roundoff._chains import Chains, Link, Pair
from lipcert.roundoff._operations import UNDERFLOW, Errors, OperationRounding

# The first assumption on the relative rounding error of a norm, and the largest number of assumptions.
_SHARE = 1e-6
_ATTEMPTS = 12
# Larger norms count as infinite.
_HUGE = 1e140
_ENTRIES = 2**26


@dataclass(frozen=True)
class RoundingBounds:
    """Bounds on the rounding errors of a network linearised at N images.

    Attributes:
        noise: for each value the error ν plus the error of norms that a rule computes from it, each of shape (N,).
        errors: bounds on ‖e_w‖, each of shape (N,).
        off: bounds κ_wo, each of shape (N,).
        paths: upper bounds on ‖G(a → o)‖, shape (N, starts, values).
        starts: the index of every a.
        place: the index of every value o.
    """

    noise: dict[Node, Tensor]
    errors: dict[Node, Tensor]
    off: dict[Link, Tensor]
    paths: Tensor
    starts: dict[Node, int]
    place: dict[Node, int]

    def only(self, index: Tensor) -> RoundingBounds:
        """The errors of the images with the given indices."""
        noise, errors = ({node: value[index] for node, value in table.items()} for table in (self.noise, self.errors))
        off = {link: value[index] for link, value in self.off.items()}
        return RoundingBounds(noise, errors, off, self.paths[index], self.starts, self.place)

    def loss(self, gradients: Mapping[Node, Tensor]) -> tuple[Tensor, Tensor]:
        """A margin lost to rounding: Σ‖p_w‖‖e_w‖ + Σ_o φ_o ν_o with φ_o = Σ_w κ_wo‖p_w‖, and Σ_o φ_o ‖G(a → o)‖."""
        size = {node: lengths(slope) for node, slope in gradients.items()}
        constant = torch.stack([times(size[node], error) for node, error in self.errors.items() if node in size])
        weight = self.paths.new_zeros(len(self.paths), len(self.place))
        lost = [constant.sum(0)]
        for link, kappa in self.off.items():
            if link.node in size:
                term = times(size[link.node], kappa)
                weight[:, self.place[link.operand]] += term
                lost.append(times(term, self.noise[link.operand]))
        by_paths = torch.where(self.paths > 0, self.paths * weight[:, None], 0.0).sum(2)
        return at_most(torch.stack(lost).sum(0)), at_most(by_paths)


class PathBounds:
    """Upper bounds on ‖G(a → b)‖ and ‖Ĝ(a → b)‖ for all pairs of values, as described at the head of this file.

    Attributes:
        bounds: shape (N, values, values), ∞ where no bound is known; 0 only where b does not depend on a.
        slack: S for the pairs whose norms were computed, each of shape (N,), ∞ for those that were dropped; and for the
            pairs ``also``.
    """

    def __init__(
        self,
        chains: Chains,
        gains: Mapping[Link, Tensor],
        off: Mapping[Link, Tensor],
        computed: Mapping[Pair, Tensor],
        factor: Mapping[Pair, float],
        also: Collection[Pair] = (),
    ):
        self.chains, self.gains, self.off = chains, gains, off
        nodes = [chains.source, *chains.links]
        self.place = {node: number for number, node in enumerate(nodes)}
        assumed = {pair: norm * (1 + _SHARE) for pair, norm in computed.items()}
        for attempt in range(_ATTEMPTS):
            self.bounds = self._table(nodes, assumed)
            self.slack = self._slack((*computed, *also))
            holds = {pair: assumed[pair] >= computed[pair] + factor[pair] * self.slack[pair] for pair in computed}
            if all(bool(good.all()) for good in holds.values()):
                break
            for pair, good in holds.items():
                more = computed[pair] + 4 * factor[pair] * self.slack[pair]
                if attempt >= _ATTEMPTS // 2:
                    more = torch.full_like(more, math.inf)
                assumed[pair] = torch.where(good, assumed[pair], more)
        else:
            assumed = {pair: torch.full_like(norm, math.inf) for pair, norm in computed.items()}
            self.bounds = self._table(nodes, assumed)
            self.slack = self._slack((*computed, *also))
        for pair in computed:
            self.slack[pair] = torch.where(assumed[pair] < math.inf, self.slack[pair], math.inf)

    def _slack(self, pairs: Iterable[Pair]) -> dict[Pair, Tensor]:
        products = self.off_by()
        return {(a, b): products[:, self.place[a], self.place[b]] for a, b in pairs}

    def _table(self, nodes: list[Node], assumed: Mapping[Pair, Tensor]) -> Tensor:
        table = self.chains.table(nodes, assumed, self.gains)
        return at_most(torch.stack([table[node] for node in nodes]).permute(2, 1, 0))

    def off_by(self) -> Tensor:
        """S for all (a, b), shape (N, values, values)."""
        paths = self.bounds.clamp_max(_HUGE)
        first = torch.full_like(paths, UNDERFLOW)
        endless = bool((self.bounds >= _HUGE).any())
        for link, kappa in self.off.items():
            o, w = self.place[link.operand], self.place[link.node]
            first[:, :, w] += paths[:, :, o] * kappa.clamp_max(_HUGE)[:, None]
            endless = endless or bool((kappa >= _HUGE).any())
        endless = endless or bool((first >= _HUGE).any())
        first = torch.where(paths > 0, first.clamp_max(_HUGE), 0.0)
        products = 2 * first @ paths
        if endless:
            large = (first >= _HUGE * gamma(0)).double()
            some = (paths > 0).double()
            unknown = large @ some + some @ (self.bounds >= _HUGE).double()
            products = torch.where(unknown > 0, math.inf, products)
        return products


def bound_rounding(
    local: OperationRounding,
    values: Mapping[Node, Tensor],
    gains: Mapping[Pair, Tensor],
    links: Mapping[Link, Tensor],
    nonlinear: Collection[Node],
    cuts: Iterable[Node],
    requested: Collection[Pair],
    error_factor: Callable[[Node, int], float],
) -> tuple[RoundingBounds, dict[Pair, Tensor], dict[Pair, Tensor]]:
    """Bounds on rounding errors, and S and upper bounds on ‖G(a → b)‖ for all pairs, from computed norms.

    Args:
        local: bounds for single operations.
        values: nominal values, each of shape (N, *node.shape).
        gains: ‖G(a → b)‖ as computed, by (a, b), each of shape (N,).
        links: norms of single operations as computed.
        nonlinear: the operations whose rules compute norms of their operands.
        cuts: the cuts; bounds on all ‖G(a → b)‖ are kept for these, the nonlinear operations and the source.
        requested: further pairs, which products of other norms bound.
        error_factor: (a, rows) ↦ the error of a computed norm in units of S.
    """
    chains, operations = local.chains, local(values, links)
    nodes = [chains.source, *chains.links]
    place = {node: number for number, node in enumerate(nodes)}
    first = {a: row for row, a in enumerate(dict.fromkeys((chains.source, *nonlinear, *cuts)))}
    rows = torch.tensor([place[a] for a in first])
    factor = {(a, b): error_factor(a, b.entries) for a, b in gains}
    exact = {link: _single(link, operations, links, error_factor) for link in operations.gains}
    errors = torch.stack([operations.errors.get(node, operations.zeros) for node in nodes], 1)
    pairs = [*gains, *requested]
    paths, noise, slack, bounds = [], [], [], []
    for part in range(0, len(errors), together := max(1, _ENTRIES // len(nodes) ** 2)):
        some = slice(part, part + together)
        one = PathBounds(
            chains,
            {link: gain[some] for link, gain in exact.items()},
            {link: kappa[some] for link, kappa in operations.off.items()},
            {pair: norm[some] for pair, norm in gains.items()},
            factor,
            requested,
        )
        paths.append(one.bounds[:, rows])
        noise.append(times(one.bounds, errors[some, :, None].expand_as(one.bounds)).sum(1))
        slack.append(one.slack)
        bounds.append({(a, b): one.bounds[:, place[a], place[b]] for a, b in pairs})
    off = {node: torch.cat(noise)[:, place[node]] for node in nodes}
    for v in nonlinear:
        for u in {*v.operands} & off.keys():
            off[u] = off[u] + gamma(8 * u.shape[-1] if u.shape else 0) * lengths(values[u])
    added = {pair: torch.cat([one[pair] for one in slack]) for pair in pairs}
    whole = {pair: torch.cat([one[pair] for one in bounds]) for pair in pairs}
    for pair, norm in gains.items():
        whole[pair] = torch.minimum(whole[pair], norm + factor[pair] * added[pair])
    return RoundingBounds(off, operations.errors, operations.off, torch.cat(paths), first, place), added, whole


def _single(
    link: Link, operations: Errors, links: Mapping[Link, Tensor], error_factor: Callable[[Node, int], float]
) -> Tensor:
    """A bound on ‖J‖ and ‖Ĵ‖ of one operation."""
    gain, kappa = operations.gains[link], operations.off[link]
    if link in links:
        gain = torch.minimum(gain, links[link] + error_factor(link.operand, link.node.entries) * kappa)
    return gain + kappa
