"""Perturbations split into the part along one direction and the rest.

The linearised margin changes only by the part of δ along its gradient. So a perturbation that reduces the margin much
is nearly parallel to the gradient, and moves most values by far less than the norms of their Jacobians allow. Let p be
a unit vector and δ = s p + δ' with ⟨δ', p⟩ = 0, so that s² + ‖δ'‖² ≤ ε². For every map M, to first order,

    ‖M G(x → u) δ‖ ≤ min(‖M G(x → u)‖ ε, |s| ‖M G(x → u) p‖ + ‖δ'‖ ‖M G(x → u)‖).

All vectors G(x → u) p come from one product with Jacobians, without random vectors. A *sector* consists of the δ with
|s| ≤ s₀ and ‖δ'‖ ≤ t₀. The ball is covered by the sectors ε cos β ≤ |s| ≤ ε cos α, whose ‖δ'‖ are at most ε sin β, for
angles 0 ≤ α ≤ β ≤ π/2 of a partition. A lower bound on the margin in every sector is one in the ball. A finer
partition gives a larger bound, and takes more evaluations.

Rounding: p is computed, and its norm is 1 to 1e-9; s and t are inflated by that. A computed product with G(x → u) has
an error of at most S (:mod:`lipcert.roundoff`), and 2 S is added for that of G(x → u) p and of what is computed from
it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lipcert.bounds import Form, per_image
from lipcert.certifier.anchored.deviations import Linearization, Seminorm, SeminormKind
from lipcert.certifier.anchored.jacobians import tangents
from lipcert.graph import Node
from lipcert.numerics import INFLATE, ROUNDED_ANGLE, UNIT, at_most, computed_l2_norm, l2_norm, unit_vectors

_ONE = torch.ones((), dtype=torch.float64, device="cpu")
# The angles between the sectors. They are closest where the margin is usually lost.
_ANGLES = (
    0.0, 0.05, 0.1, 0.15, 0.2, 0.26, 0.32, 0.38, 0.42, 0.46, 0.5, 0.54, 0.58, 0.62, 0.67, 0.73, 0.86, 1.02, 1.22,
    math.pi / 2,
)  # fmt: skip
SECTORS = len(_ANGLES) - 1
# Some of the sectors in which margins are usually lost.
_PROBES = (4, 9, 15)


class Ray:
    """First-order deviations along a unit vector p of the source at N images."""

    def __init__(self, at: Linearization, direction: Tensor):
        self.at, network = at, at.network
        unit = unit_vectors(direction)
        self.defined = (computed_l2_norm(unit, 1) - 1).abs() < 1e-10
        ends = [network.source, *(stage.start for stage in network.stages), *network.outputs]
        operands = [u for v in at.remainders for u in v.operands]
        targets = dict.fromkeys((*ends, *operands, *map(network.root, operands)))
        source = network.source
        self.tangents = tangents(network, at.values, [u for u in targets if network.graph.depends(u, source)], unit)
        self._sizes: dict[tuple[Node, Seminorm | None], Tensor] = {}
        self._index: Tensor | None = None

    def only(self, index: Tensor) -> Ray:
        """A copy with the sizes of the images with the given indices."""
        part = copy.copy(self)
        part._index = index if self._index is None else self._index[index]
        return part

    def size(self, u: Node, seminorm: Seminorm) -> Tensor:
        """An upper bound on a seminorm of G(x → u) p, without a form, shape (N,), for a root u; ∞ if unknown."""
        return self._once((u, seminorm), lambda: self._size(u, *seminorm))

    def entries(self, u: Node) -> Tensor:
        """Upper bounds on the entries of |G(x → u) p| for an operand u, shape (N, entries); ∞, (N, 1), if unknown."""
        moved, root = self.tangents.get(u), self.at.network.root(u)
        if moved is None:
            return self._once((u, None), lambda: self._nothing()[:, None])
        return self._once((u, None), lambda: self._raised(per_image(moved).abs().mT, root, _ONE).mT)

    def _once(self, key: tuple[Node, Seminorm | None], compute: Callable[[], Tensor]) -> Tensor:
        if key not in self._sizes:
            self._sizes[key] = compute()
        return self._sizes[key] if self._index is None else self._sizes[key][self._index]

    def _size(self, u: Node, kind: SeminormKind, v: Node | None, _: int) -> Tensor:
        block, place = self.at.plan.blocks.get(u, (1, u)) if kind is SeminormKind.LARGEST else (0, u)
        moved = self.tangents.get(u if block == 1 else place if v is None else v.operands[0])
        if moved is None:
            return self._nothing()
        flat, scale = per_image(moved), _ONE
        if v is not None:
            weights = self.at.weights(v).sqrt()
            flat, scale = weights * flat, weights.amax()
        length = l2_norm(flat.unflatten(1, (-1, block)), 2).amax(1) if block else l2_norm(flat, 1)
        return self._raised(length, u, scale)

    def formed(self, u: Node, form: Form, some: Tensor) -> Tensor:
        """An upper bound on ‖M G(x → u) p‖ for the M of a form at some of the images, shape (len(some),)."""
        moved = self.tangents.get(u)
        if moved is None:
            return self._nothing()[some]
        part = moved[some]
        length = l2_norm(per_image(form(part)), 1)
        terms = max(u.entries, *(tensor[0].numel() for tensor in form.tensors))
        length = length + form.size * 4 * (terms + 16) * UNIT * l2_norm(per_image(part), 1)
        return self._raised(length, self.at.network.root(u), form.norm, some)

    def _raised(self, length: Tensor, u: Node, scale: Tensor, some: Tensor | None = None) -> Tensor:
        """Lengths, shape (..., N), with ``scale`` times the rounding error of the product; ∞ where that is unknown."""
        known = self.at.norms.pairs.get((self.at.network.source, u))
        slack = None if known is None else known.slack
        if slack is None and u is not self.at.network.source:
            return torch.full_like(length, math.inf)
        defined = self.defined
        if some is not None:
            defined, slack = defined[some], None if slack is None else slack[some]
        length = length if slack is None else length + 2 * scale * slack
        return torch.where(defined, at_most(length * INFLATE), math.inf)

    def _nothing(self) -> Tensor:
        return torch.full_like(self.defined, math.inf, dtype=torch.float64)


class Sector(NamedTuple):
    """The perturbations s p + δ' with |s| ≤ ``along`` and ‖δ'‖ ≤ ``across``, each of shape (N,), p that of a ray."""

    ray: Ray
    along: Tensor
    across: Tensor

    def moved(self, size: Tensor, gain: Tensor | float, eps: Tensor) -> Tensor:
        """An upper bound on ‖M G(x → u) δ‖, shape (N,), for δ in this sector with ‖δ‖ ≤ ε."""
        return torch.minimum(at_most(gain * eps), at_most(size * self.along + gain * self.across))


def _angles(device: torch.device, pieces: int) -> Tensor:
    """The angles between the sectors, each divided into so many equal pieces."""
    angles = torch.tensor(_ANGLES, dtype=torch.float64, device=device)
    shares = torch.arange(pieces, dtype=torch.float64, device=device) / pieces
    return torch.cat([torch.lerp(angles[:-1, None], angles[1:, None], shares).flatten(), angles[-1:]])


def most_along(device: torch.device) -> Tensor:
    """The largest share of ε that perturbations of a sector have along the gradient, shape (sectors,)."""
    return _angles(device, 1)[:-1].cos()


def probes(device: torch.device) -> Tensor:
    """Which sectors a search for a radius evaluates first, bool, shape (sectors,)."""
    return torch.isin(torch.arange(SECTORS, device=device), torch.tensor(_PROBES, device=device))


def sector(ray: Ray, eps: Tensor, number: Tensor, pieces: int = 1) -> Sector:
    """One of the sectors that cover the ball of radius ε, for each image: the one with this number, shape (N,).

    With ``pieces`` above 1, every sector is divided into that many, and ``number`` counts the pieces of all sectors.
    """
    angles = _angles(eps.device, pieces)
    cos, sin = angles.cos()[number], angles.sin()[number + 1]
    return Sector(ray, eps * INFLATE * (cos + ROUNDED_ANGLE), eps * INFLATE * (sin + ROUNDED_ANGLE))
