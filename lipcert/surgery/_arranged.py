"""L2 attention for other arrangements of tokens, other biases, and rotary position embeddings.

**Sets.** A network may partition its tokens into sets that attend only among themselves: windows, blocks, mask units.
The sets share no entry, so all sets together have the constant of one. Rearranging entries and padding with zeros have
norm 1. Selecting a part of the result has norm at most 1: attention whose output is one class token, and cropped
windows.

**Bias.** :mod:`lipcert.surgery._distance` holds for any additive bias b that does not depend on the image, whether it
is stored or computed from parameters. For the bound, bias modules are evaluated in float64. Their rounding error is far
below the slack of 1e-9 on the sums of exp(b_ij − b_ii).

**Rotation.** Rotary position embedding maps y_i to z_i = R_i y_i, where the matrix R_i depends only on the position.
Here the logits are −‖z_i − z_j‖²/√d and the values z_j, which are rotated back at the receiving token:

    out_i = concat_h(R_iᵀ Σ_j P_ij R_j y_j · M_h) · W_O + biases.

Let ρ ≥ ‖R_i‖ for every i; ρ is 1 up to the rounding of sines and cosines. Then y ↦ z and the rotation back have norm at
most ρ, and attention z ↦ (Σ_j P_ij z_j)_i has the constant L_h. So L_h becomes ρ²·L_h. If the values were not rotated,
tokens far apart with z_i = z_j would be mixed with weights that do not decrease with their distance, and there would be
no Lipschitz constant.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipcert.errors import InputError
from lipcert.norms import dense_norm
from lipcert.numerics import Bound, Upper, with_slope
from lipcert.surgery._attention import L2Attention, biased_gain, uniform_gain, worst_masks

ARRANGEMENTS = ("tokens", "grid", "channels", "units", "windows")


class L2SetAttention(L2Attention):
    """L2 attention within sets of tokens, with any constant bias; proof in the module docstring.

    The arrangements are:

    * ``tokens``: (..., tokens, dim), one set for each of the leading indices;
    * ``grid``: (N, height, width, dim), all positions of an image or window in one set;
    * ``channels``: (N, dim, height, width), likewise;
    * ``units``: (N, tokens·units, dim), with the unit index varying fastest, as in timm's Hiera;
    * ``windows``: (N, height·width, dim) with the image's size as second argument, padded with zeros and split into
      windows of ``area`` tokens, as in timm's Twins.

    Attributes:
        bias: module whose ``forward()`` gives b, broadcasting to (heads, tokens, tokens); or None.

    Args:
        dim: D.
        num_heads: number of heads.
        arrangement: see above.
        area: number of tokens of a set, for ``units`` and ``windows``.
        first: whether to return only the first token's output, shape (N, 1, dim_out).
        bias: see above.
        **kwargs: as in :class:`L2Attention`.

    Raises:
        InputError: the arrangement is unknown.
    """

    PARTS: ClassVar = {**L2Attention.PARTS, "bias": (nn.Module,)}  # the bound evaluates this module

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        arrangement: str = "tokens",
        area: int | None = None,
        first: bool = False,
        bias: nn.Module | None = None,
        **kwargs: Any,
    ):
        super().__init__(dim, num_heads, **kwargs)
        if arrangement not in ARRANGEMENTS or (arrangement in ("units", "windows")) != (area is not None):
            raise InputError(f"no arrangement {arrangement!r} with area={area}; there are {', '.join(ARRANGEMENTS)}")
        if arrangement == "windows" and math.isqrt(cast(int, area)) ** 2 != area:
            raise InputError(f"windows are squares of tokens, got area={area}")
        self.arrangement = arrangement
        self.area = area
        self.first = first
        self.bias = bias

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        size: Any = None,
        *,
        mask: Tensor | None = None,
        shared_rel_pos: Tensor | None = None,
        shared_rel_pos_bias: Tensor | None = None,
    ) -> Tensor:
        """Attention within each set, for tokens and a result in the module's arrangement.

        Args:
            x: tokens.
            size: the image's (height, width), for ``windows``; other arrangements ignore it.
            mask: added to the logits, shape (windows, tokens, tokens), as Swin passes it.
            shared_rel_pos: a bias shared between layers, broadcasting to (1, heads, tokens, tokens).
            shared_rel_pos_bias: that of BEiT.
        """
        bias = self.position_bias()
        for term in (None if mask is None else mask.unsqueeze(1), shared_rel_pos, shared_rel_pos_bias):
            if term is not None:
                term = term.repeat(x.shape[0] // term.shape[0], 1, 1, 1) if term.shape[0] > 1 else term
                bias = term if bias is None else bias + term
        out = self.attend(self._sets(x, size), bias)
        return out[:, :1] if self.first else self._back(out, x, size)

    def position_bias(self) -> Tensor | None:
        """b, broadcasting to (heads, tokens, tokens), or None."""
        return None if self.bias is None else self.bias()

    def _sets(self, x: Tensor, size: Any) -> Tensor:
        """The sets of tokens, shape (sets, tokens, dim)."""
        if self.arrangement == "tokens":
            return x.flatten(0, -3)
        if self.arrangement == "grid":
            return x.flatten(1, -2)
        if self.arrangement == "channels":
            return x.flatten(2).transpose(1, 2)
        if self.arrangement == "units":
            # Hiera stores token a of unit u at position a · units + u.
            return x.unflatten(1, (self.area, -1)).transpose(1, 2).flatten(0, 1)
        (rows, columns), side = self._geometry(size)
        # −n % side zeros complete the last window of an axis of n positions.
        image = F.pad(x.unflatten(1, (rows, columns)), (0, 0, 0, -columns % side, 0, -rows % side))
        # (N, down, side, right, side, dim) → (N, down, right, side, side, dim): the tokens of a window are adjacent.
        cut = image.unflatten(2, (-1, side)).unflatten(1, (-1, side)).transpose(2, 3)
        return cut.flatten(3, 4).flatten(0, 2)

    def _geometry(self, size: Any) -> tuple[tuple[int, int], int]:
        if not isinstance(size, (tuple, list)) or self.area is None:
            raise InputError("windows need the image's (height, width) as second argument")
        return (size[0], size[1]), math.isqrt(self.area)

    def _back(self, out: Tensor, x: Tensor, size: Any) -> Tensor:
        """The sets' results in the arrangement of x."""
        if self.arrangement in ("tokens", "grid"):
            return out.reshape(*x.shape[:-1], out.shape[-1])
        if self.arrangement == "channels":
            return out.transpose(1, 2).reshape(x.shape[0], out.shape[-1], *x.shape[2:])
        if self.arrangement == "units":
            return out.unflatten(0, (x.shape[0], -1)).transpose(1, 2).flatten(1, 2)
        (rows, columns), side = self._geometry(size)
        down, right = -(-rows // side), -(-columns // side)
        image = out.reshape(x.shape[0], down, right, side, side, -1).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return image[:, :rows, :columns].flatten(1, 2)

    def lipschitz(
        self,
        input_shape: tuple[int, ...],
        token_norm: Upper | None = None,
        *,
        mask: Tensor | None = None,
        shared: Tensor | None = None,
    ) -> Bound:
        """An upper bound on the Lipschitz constant; proof in the module docstring.

        Args:
            input_shape: shape of one sample in the module's arrangement, such as (dim, height, width).
            token_norm: a bound on the norm of every input token, if there is one.
            mask: as in ``forward``.
            shared: the shared bias that ``forward`` gets.

        Raises:
            InputError: a shape does not fit, or a weight is not finite.
        """
        tokens = self._set_size(tuple(input_shape))
        reach = self._reach(token_norm)
        biases = self._biases(tokens, mask, shared, float(reach))
        if biases is None:
            return self._bound([with_slope(partial(uniform_gain, tokens), reach)] * self.num_heads)
        return self._bound(
            [max((with_slope(partial(biased_gain, b), reach) for b in head), key=Upper) for head in biases]
        )

    def _set_size(self, shape: tuple[int, ...]) -> int:
        channel = 0 if self.arrangement == "channels" else -1
        dimensions = {"grid": 3, "channels": 3}.get(self.arrangement, 2)
        if len(shape) < dimensions or shape[channel] != self.dim or min(shape) < 1:
            raise InputError(f"{type(self).__name__} ({self.arrangement}) has dim {self.dim}, got {shape}")
        if self.area is not None:
            return self.area
        if self.arrangement == "tokens":
            return shape[-2]
        return math.prod(shape) // self.dim

    def _biases(
        self, tokens: int, mask: Tensor | None, shared: Tensor | None, reach: float
    ) -> list[list[Tensor]] | None:
        """For each head the distinct biases of its sets, float64, shape (tokens, tokens); None if there are none."""
        parts = [part.detach().cpu().double() for part in (shared, self._fixed_bias()) if part is not None]
        if mask is not None:
            parts.append(worst_masks(mask.detach().cpu().double(), reach).unsqueeze(1))
        if not parts:
            return None
        if any(n not in (1, tokens) for part in parts for n in part.shape[-2:]):
            raise InputError(f"a bias or mask of {type(self).__name__} is not for pairs of {tokens} tokens")
        total = sum(parts, torch.zeros(1, 1, 1, 1, dtype=torch.float64))
        return [list(head) for head in total.expand(-1, self.num_heads, tokens, tokens).transpose(0, 1)]

    def _fixed_bias(self) -> Tensor | None:
        """:meth:`position_bias`, evaluated in float64."""
        return None if self.bias is None else copy.deepcopy(self.bias).cpu().double().eval()()

    def extra_repr(self) -> str:
        return f"{self.dim}, {self.num_heads}, arrangement={self.arrangement!r}, first={self.first}"


class L2WindowAttention(L2SetAttention):
    """L2 attention within Swin's windows, with relative position bias and the mask of shifted windows.

    A mask that is 0 on the diagonal and at most 0 elsewhere, as in Swin, lowers every exp(b_ij − b_ii). If tokens are
    unbounded, that lowers the constant, so the bound without the mask remains valid. If their norms are bounded, the
    mask may raise it: the fewer tokens share the weight of a row, the larger is the share of each. (For small T, ψ is
    negative for large V, and the suprema of :mod:`lipcert.surgery._distance` increase as B_i decreases.) Then each mask
    has its own constant and must be given to ``lipschitz``; −∞ is allowed off the diagonal.

    Attributes:
        relative_position_bias_table: b by offset and head, shape ((2h − 1)(2w − 1), heads), as in timm's
            WindowAttention.

    Args:
        dim: D.
        num_heads: number of heads.
        window_size: (height, width) of a window in tokens.
        table: b; zeros by default.
        **kwargs: as in :class:`L2Attention`.
    """

    relative_position_index: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        window_size: tuple[int, int],
        table: nn.Parameter | None = None,
        **kwargs: Any,
    ):
        super().__init__(dim, num_heads, **kwargs)
        height, width = window_size
        self.window_size = (height, width)
        zeros = torch.zeros((2 * height - 1) * (2 * width - 1), num_heads)
        self.relative_position_bias_table = nn.Parameter(zeros.to(self.q.weight)) if table is None else table
        self.register_buffer("relative_position_index", self._index(), persistent=False)

    def _index(self) -> Tensor:
        """Row of the table for each pair of tokens, (Δ row + h − 1)(2w − 1) + Δ column + w − 1; shape (area, area)."""
        from timm.layers.pos_embed_rel import gen_relative_position_index  # not above: workers need no timm

        return gen_relative_position_index(self.window_size).to(self.q.weight.device)

    def init_non_persistent_buffers(self) -> None:
        """Recomputes the index, for timm, after a model was built without storage."""
        self.relative_position_index.copy_(self._index())

    def position_bias(self) -> Tensor:
        """b, shape (heads, area, area)."""
        return self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)

    def _fixed_bias(self) -> Tensor:
        return self.position_bias()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Attention within each window of x, shape (N·windows, area, dim); ``mask`` has shape (windows, area, area)."""
        return super().forward(x, mask=mask)


class L2RotaryAttention(L2Attention):
    """L2 attention with rotary position embedding, (N, tokens, dim); formula in the module docstring.

    Args:
        dim: D.
        num_heads: number of heads.
        prefix: number of tokens at the front that are not rotated.
        by_halves: whether channel c is paired with c + d/2; otherwise channel 2c is paired with 2c + 1.
        **kwargs: as in :class:`L2Attention`.
    """

    def __init__(self, dim: int, num_heads: int, *, prefix: int = 0, by_halves: bool = False, **kwargs: Any):
        super().__init__(dim, num_heads, **kwargs)
        self.prefix = prefix
        self.by_halves = by_halves

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """:meth:`L2Attention.forward` with rotated tokens.

        ``rope`` holds sines and cosines side by side, and broadcasts to (N, heads, tokens − prefix, 2d).
        """
        self.refuse_mask(attn_mask, is_causal)
        return self.attend(x, rope)

    def attend(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        """The output for tokens x of shape (N, tokens, dim)."""
        return self._out(self.mixed(x, rope) @ self.mixing())

    def mixed(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        """R_iᵀ Σ_j P_ij R_j y_j, shape (N, heads, tokens, head_dim)."""
        z = self._turned(self._queries(x), rope, 1)
        return self._turned(self.attn_drop(self._weights(z)) @ z, rope, -1)

    def _pairs(self, channels: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the second channels of the pairs that are rotated."""
        if self.by_halves:
            first, second = channels.chunk(2, -1)
            return first, second
        return channels[..., ::2], channels[..., 1::2]

    def _turned(self, y: Tensor, rope: Tensor | None, sign: int) -> Tensor:
        """R_i y_i for ``sign`` 1, R_iᵀ y_i for −1, (N, heads, tokens, d); R_i maps a pair to (c₁a − s₁b, s₂a + c₂b)."""
        if rope is None:
            return y
        sine, cosine = rope.to(y.dtype).chunk(2, -1)
        front, tail = y[:, :, : self.prefix], y[:, :, self.prefix :]
        (a, b), (s1, s2), (c1, c2) = (self._pairs(part) for part in (tail, sine, cosine))
        pair = (a * c1 - b * s1, b * c2 + a * s2) if sign > 0 else (a * c1 + b * s2, b * c2 - a * s1)
        turned = torch.cat(pair, -1) if self.by_halves else torch.stack(pair, -1).flatten(-2)
        return torch.cat((front, turned), 2)

    def lipschitz(
        self, input_shape: tuple[int, ...], token_norm: Upper | None = None, rope: Tensor | None = None
    ) -> Bound:
        """:meth:`L2Attention.lipschitz`, for the sines and cosines that ``forward`` gets; see the module docstring."""
        tokens = self._tokens(input_shape)
        rho = self._largest_turn(rope)
        reach = self._reach(None if token_norm is None else token_norm * rho)
        return self._bound([with_slope(partial(uniform_gain, tokens), reach) * rho * rho] * self.num_heads)

    def result_norm(self, token_norm: Upper, rope: Tensor | None = None) -> Upper:
        """Like :meth:`L2Attention.result_norm`, with one factor ρ for the rotation and one for the rotation back."""
        rho = self._largest_turn(rope)
        return super().result_norm(token_norm * rho * rho)

    def _largest_turn(self, rope: Tensor | None) -> Upper:
        """ρ: the largest norm of the 2×2 blocks ((c₁, −s₁), (s₂, c₂)) of the R_i, at least 1."""
        if rope is None:
            return Upper(1)
        sine, cosine = rope.detach().cpu().to(self.q.weight.dtype).double().chunk(2, -1)
        (s1, s2), (c1, c2) = self._pairs(sine), self._pairs(cosine)
        blocks = torch.stack((torch.stack((c1, -s1), -1), torch.stack((s2, c2), -1)), -2).reshape(-1, 2, 2)
        return max(Upper(1), dense_norm(blocks.unique(dim=0)))


class TableBias(nn.Module):
    """A bias looked up in a table: b_hij = table[index_ij, h]."""

    index: Tensor

    def __init__(self, table: nn.Parameter, index: Tensor):
        super().__init__()
        self.table = table
        self.register_buffer("index", index.clone(), persistent=False)

    def forward(self) -> Tensor:
        return self.table[self.index].permute(2, 0, 1)


class GivenBias(nn.Module):
    """A bias that a timm module computes in ``get_bias``."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self) -> Tensor:
        bias: Tensor = self.module.get_bias()  # type: ignore[operator]
        return bias.reshape(-1, *bias.shape[-2:])


class ContinuousBias(nn.Module):
    """The continuous position bias of Swin v2: 16·sigmoid(mlp(offset)) looked up for each pair of tokens."""

    coordinates: Tensor
    index: Tensor

    def __init__(self, mlp: nn.Module, coordinates: Tensor, index: Tensor):
        super().__init__()
        self.mlp = mlp
        self.register_buffer("coordinates", coordinates.clone(), persistent=False)
        self.register_buffer("index", index.clone(), persistent=False)

    def forward(self) -> Tensor:
        table = self.mlp(self.coordinates).flatten(0, -2)
        return 16 * torch.sigmoid(table[self.index].permute(2, 0, 1))


class PairBias(nn.Module):
    """The position bias of the first Swin v2 code: an mlp of the offset of each pair of tokens."""

    coordinates: Tensor

    def __init__(self, mlp: nn.Module, coordinates: Tensor):
        super().__init__()
        self.mlp = mlp
        self.register_buffer("coordinates", coordinates.clone(), persistent=False)

    def forward(self) -> Tensor:
        tokens = math.isqrt(self.coordinates.shape[0])
        return self.mlp(self.coordinates).T.reshape(-1, tokens, tokens)
