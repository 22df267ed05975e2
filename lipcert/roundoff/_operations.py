"""Rounding errors in float64 of single operations: of their values, and of products with their Jacobians."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from lipcert.bounds import WINDOW, Jacobian, Schur, Tag, gamma, jacobian_of, lengths, schur_bounds, tagged
from lipcert.graph import Node
from lipcert.numerics import SMALLEST_NORMAL, at_most
from lipcert.roundoff._chains import Chains, Link

# The relative error of a product with the Jacobian of an operation that has no bounds of its own.
_UNKNOWN = 2.0**-40
# What an entry of a result or of a product may lose by underflow.
UNDERFLOW = math.sqrt(SMALLEST_NORMAL * WINDOW)


class OperationRounding:
    """The rounding errors of the single operations of a network, from norms of the absolute values of their Jacobians.

    Let A ≥ ‖|J|‖ for an operation as a function of one operand. A product with J whose entries are sums of n terms has
    an error of at most κ ‖v‖ with κ = γ_n A. The rule of an operation knows A and κ (:mod:`lipcert.bounds._jacobian`):
    its ``jacobian``, or ``schur`` where it is affine. Operations without, such as a user's own, have no bounds here.
    The error of a value is at most γ(Σ A‖ĥ_o‖ + ‖constants‖), and ‖constants‖ ≤ ‖result‖ + Σ A‖ĥ_o‖.

    Attributes:
        answers: the rule's bounds on the Jacobian of each operation; None without any.
    """

    def __init__(self, chains: Chains):
        self.chains = chains
        self.answers = {node: jacobian_of(node) for node in chains.links}
        self._affine: dict[Link, tuple[float, float]] = {}

    def bounded(self, link: Link) -> bool:
        """Whether the norm of an operation is bounded here; otherwise it must be computed."""
        return link.isometric or (len(link.path) == 1 and self.answers[link.node] is not None)

    @torch.no_grad()
    def __call__(self, values: Mapping[Node, Tensor], norms: Mapping[Link, Tensor] = MappingProxyType({})) -> Errors:
        """Bounds at nominal values, each of shape (N, *node.shape), given the computed norms, each of shape (N,)."""
        gains: dict[Link, Tensor] = {}
        off: dict[Link, Tensor] = {}
        errors: dict[Node, Tensor] = {}
        like = values[self.chains.source]
        zeros = torch.zeros(len(like), dtype=torch.float64, device=like.device)
        for node, links in self.chains.links.items():
            error = gamma(0) * lengths(values[node])
            for link in links:
                gain, kappa = self._link(link, values, norms=True) if self.bounded(link) else _from_norm(link, norms)
                gains[link], off[link] = at_most(zeros + gain), at_most(zeros + kappa)
                error = error + 2 * off[link] * lengths(values[link.operand])
            if all(link.isometric for link in links) and tagged(node, Tag.REARRANGES):
                error = zeros
            errors[node] = at_most(error + _lost(node))
        return Errors(gains, off, errors, zeros)

    @torch.no_grad()
    def errors(self, values: Mapping[Node, Tensor]) -> dict[Node, Tensor]:
        """Bounds on ‖e_w‖ without computed norms, each of shape (N,); estimates for operations without bounds."""
        bounds: dict[Node, Tensor] = {}
        for node, links in self.chains.links.items():
            whole, answer = lengths(values[node]), self.answers[node]
            error = (0 if all(link.moves for link in links) else gamma(0)) * whole
            for link in links:
                size = lengths(values[link.operand])
                if link.moves:
                    continue
                if isinstance(answer, Jacobian) and answer.absolute is not None:
                    error = error + answer.absolute * gamma(0) * size
                elif self.bounded(link):
                    error = error + 2 * self._link(link, values)[1] * size
                else:
                    error = error + _UNKNOWN * (size + whole)
            bounds[node] = at_most(error if all(link.moves for link in links) else error + _lost(node))
        return bounds

    def _link(
        self, link: Link, values: Mapping[Node, Tensor], *, norms: bool = False
    ) -> tuple[Tensor | float, Tensor | float]:
        """A and κ; with ``norms`` a smaller bound on ‖J‖ for A, if there is one."""
        node, answer = link.node, self.answers[link.node]
        if link.isometric:
            return 1.0, gamma(0)
        places = [place for place, operand in enumerate(node.operands) if operand is link.operand]
        if isinstance(answer, Schur):
            if link not in self._affine:
                bounds = [schur_bounds(answer, node, place, values) for place in places]
                self._affine[link] = sum(gain for gain, _ in bounds), sum(kappa for _, kappa in bounds)
            return self._affine[link]
        assert answer is not None
        pairs = [answer.bounds(node, place, values) for place in places]
        gains = [gain for gain, _ in pairs]
        if norms and answer.norm is not None:
            gains = [answer.norm(node, place, values) for place in places]
        return sum(gains), sum(kappa for _, kappa in pairs)


@dataclass(frozen=True)
class Errors:
    """Bounds for single operations, each of shape (N,).

    Attributes:
        gains: bounds on ‖J_wo‖.
        off: bounds κ_wo on the errors of products.
        errors: bounds on ‖e_w‖.
        zeros: zeros.
    """

    gains: dict[Link, Tensor]
    off: dict[Link, Tensor]
    errors: dict[Node, Tensor]
    zeros: Tensor


def _from_norm(link: Link, norms: Mapping[Link, Tensor]) -> tuple[Tensor | float, Tensor | float]:
    """A and κ of an operation without bounds, from its norm: ‖|J|‖ ≤ ‖J‖_F ≤ √min(m, n) ‖J‖ for an m × n matrix J."""
    norm = norms.get(link, math.inf)
    gain = 2 * math.sqrt(min(math.prod(link.operand.shape), math.prod(link.node.shape))) * norm
    return gain, _UNKNOWN * gain


def _lost(node: Node) -> float:
    """A bound on the norm of the underflow errors of a result, which may be the root of a sum that underflows."""
    return UNDERFLOW * math.sqrt(max(1, math.prod(node.shape)))
