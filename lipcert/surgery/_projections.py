"""Projections that replace normalisations: outputs are bounded too, but the map is Lipschitz everywhere.

:class:`LayerProject` and :class:`SmoothProject` stand for LayerNorm, their ``Rms`` forms for RMSNorm, which does not
centre, and their ``Group`` forms for GroupNorm, whose tokens are whole groups of channels at all positions.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lipcert.errors import InputError
from lipcert.numerics import Bound, Upper, estimated


class _Projection(nn.Module):
    """output = weight ∘ project(h − mean(h)) + bias for every token h.

    Centring is the orthogonal projection I − 11ᵀ/d, of norm at most 1, and weight ∘ · has norm max|weight|; so if
    ``project`` is 1-Lipschitz, the whole is max|weight|-Lipschitz for each token, hence for all together. If
    ``project`` maps into the ball of radius R, then every token of the output has norm at most max|weight|·R +
    ‖bias‖. Without centring the same holds.
    """

    PARTS: ClassVar[dict[str, tuple[type[nn.Module], ...]]] = {}
    radius: Tensor
    centred = True

    def __init__(
        self,
        dim: int,
        radius: float = 1.0,
        *,
        bias: bool = True,
        channels_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if not 0 < radius < math.inf:
            raise InputError(f"radius must be a positive number, got {radius}")
        self.dim = dim
        self.channels_first = channels_first
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype)) if bias else None
        self.register_buffer("radius", torch.tensor(radius, device=device, dtype=self.weight.dtype))

    def project(self, centred: Tensor) -> Tensor:
        """Maps each token, the last dimension, into the ball of radius R without expanding distances."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = self.rows(x)
        x = self.project(x - x.mean(-1, keepdim=True) if self.centred else x) * self.weight
        if self.bias is not None:
            x = x + self.bias
        return x.movedim(-1, 1) if self.channels_first else x

    def rows(self, x: Tensor) -> Tensor:
        """The vectors that are projected, along the last axis."""
        return x.movedim(1, -1) if self.channels_first else x

    def lipschitz(self, input_shape: tuple[int, ...]) -> Bound:
        """max|weight|; proof above."""
        if not input_shape or input_shape[0 if self.channels_first else -1] != self.dim:
            expected = f"({self.dim}, ...)" if self.channels_first else f"(..., {self.dim})"
            raise InputError(f"{type(self).__name__} takes {expected}, got {tuple(input_shape)}")
        self._checked_radius()
        return Bound.deterministic(_largest(self.weight), "max|weight|", f"lipcert.surgery.{type(self).__name__}")

    def token_norm(self) -> Upper:
        """A bound on the norm of every token of the output: max|weight|·R + ‖bias‖."""
        bound = _largest(self.weight) * self._checked_radius()
        return bound if self.bias is None else bound + _euclidean(self.bias)

    def _checked_radius(self) -> float:
        radius = float(self.radius)
        if not 0 < radius < math.inf:
            raise InputError(f"a projection needs a positive radius, got {radius}; check the checkpoint")
        return radius

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"{self.dim}, radius={float(self.radius):.4g}, bias={bias}, channels_first={self.channels_first}"


class LayerProject(_Projection):
    """weight ∘ u + bias with u = h·min(1, R/‖h‖) for every centred token h: the projection onto the ball of radius R.

    It centres as LayerNorm does, and so is not equation 29 of LoFAST, which is :class:`RmsLayerProject`. The nearest
    point of a convex set is 1-Lipschitz, see there. Computed as h·R/max(‖h‖, R).
    """

    def project(self, centred: Tensor) -> Tensor:
        square = centred.square().sum(-1, keepdim=True)
        return centred * (self.radius * torch.maximum(square, self.radius.square()).rsqrt())


class SmoothProject(_Projection):
    """weight ∘ u + bias with u = h/√(1 + ‖h‖²/R²) for every centred token h: into the open ball of radius R.

    With s = √(1 + ‖h‖²/R²) the Jacobian is (I − hhᵀ/(R²s²))/s, symmetric with eigenvalues 1/s on the complement of h
    and (1 − ‖h‖²/(R²s²))/s = 1/s³ along h, so its norm is 1/s ≤ 1.
    """

    def project(self, centred: Tensor) -> Tensor:
        square = (centred / self.radius).square().sum(-1, keepdim=True)
        return centred * (1 + square).rsqrt()


class RmsLayerProject(LayerProject):
    """:class:`LayerProject` without centring: in place of RMSNorm, and in place of LayerNorm with ``norm="lofast"``.

    With weight 1 and without bias this is the LayerProject of Havens, Araujo, Zhang and Hu, ICML 2024, equation 29: the
    nearest point P(x) of the ball of radius R. ⟨x − P(x), u − P(x)⟩ ≤ 0 for every u in the ball. Adding this at x for
    u = P(y) and at y for u = P(x) gives ‖P(x) − P(y)‖² ≤ ⟨x − y, P(x) − P(y)⟩, so P is 1-Lipschitz. Tokens of norm at
    most R are not moved, and none after P is longer than R: with n tokens, the matrix of tokens that attention gets
    has a norm of at most √n·R.
    """

    centred = False


class RmsSmoothProject(SmoothProject):
    """:class:`SmoothProject` without centring, in place of RMSNorm."""

    centred = False


class _GroupProjection(_Projection):
    """weight ∘ project(h − mean(h)) + bias with h all entries of a group of channels, and a weight for each channel.

    The proof of :class:`_Projection` holds with groups for tokens: centring and projecting a group are 1-Lipschitz and
    the groups share no entry, so the whole is max|weight|-Lipschitz. The ball of radius R holds every group, so a
    vector of channels, which has entries in all g groups, has norm at most max|weight|·R·√g + ‖bias‖.
    """

    def __init__(self, dim: int, radius: float = 1.0, *, groups: int = 1, **kwargs: Any):
        super().__init__(dim, radius, **{**kwargs, "channels_first": True})
        if groups < 1 or dim % groups:
            raise InputError(f"{dim} channels do not make {groups} groups")
        self.groups = groups

    def rows(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], self.groups, -1)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(x)
        out = self.project(rows - rows.mean(-1, keepdim=True)).reshape(x.shape)
        channels = (-1, *[1] * (x.dim() - 2))
        out = out * self.weight.view(channels)
        return out if self.bias is None else out + self.bias.view(channels)

    def token_norm(self) -> Upper:
        """A bound on the norm of every vector of channels: max|weight|·R·√g + ‖bias‖."""
        bound = _largest(self.weight) * self._checked_radius() * Upper(self.groups).sqrt()
        return bound if self.bias is None else bound + _euclidean(self.bias)


class GroupLayerProject(_GroupProjection, LayerProject):
    """:class:`LayerProject` on groups of channels, in place of GroupNorm."""


class GroupSmoothProject(_GroupProjection, SmoothProject):
    """:class:`SmoothProject` on groups of channels, in place of GroupNorm."""


# By what ``convert(norm=...)`` is asked for, and by the normalisation that is replaced.
PROJECTIONS: dict[str, dict[str, type[_Projection]]] = {
    "project": {"": LayerProject, "rms": RmsLayerProject, "group": GroupLayerProject},
    "smooth": {"": SmoothProject, "rms": RmsSmoothProject, "group": GroupSmoothProject},
    "lofast": {"": RmsLayerProject, "rms": RmsLayerProject},
}


def _largest(values: Tensor) -> Upper:
    if not bool(values.isfinite().all()):
        raise InputError("the weight of a projection holds NaN or an infinity; check the checkpoint")
    return estimated(values, lambda v: v.abs().amax()) or Upper(float(values.detach().abs().max()))


def _euclidean(values: Tensor) -> Upper:
    """‖values‖, rounded up: a float64 sum of n squares is off by at most (n + 2)·2⁻⁵³ relative, far below 1e-9."""
    if not bool(values.isfinite().all()):
        raise InputError("the bias of a projection holds NaN or an infinity; check the checkpoint")
    exact = torch.linalg.vector_norm(values.detach().double())
    return estimated(values, torch.linalg.vector_norm) or Upper(float(exact)) * (1 + 1e-9)
