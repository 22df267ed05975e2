"""L2 attention, whose weights depend on distances and which is Lipschitz on the whole space, for ViT, DeiT and Swin.

For head h with y = x·W_h, W_h ∈ ℝ^(D×d) shared by queries and keys:

    P_ij ∝ exp(−‖y_i − y_j‖²/√d + b_ij),    z_i = Σ_j P_ij y_j·M_h + bias,    M_h = W_hᵀ·V_h/√d,
    out = concat_h(z)·W_O + bias.

This is Σ_j P_ij x_j·A_h·V_h with A_h = W_h·W_hᵀ/√d, the form of Kim, Papamakarios and Mnih, "The Lipschitz Constant of
Self-Attention", ICML 2021 (arXiv 2006.04710), section 3.2, computed through y. Without A_h, the values of tokens that
are far apart in the null space of W_h would be mixed with weights that do not decrease with that distance, and there
would be no Lipschitz constant. There is no query bias, because it would cancel in the distance.

**The constant.** Attention y ↦ (Σ_j P_ij y_j)_i is L_h-Lipschitz by :mod:`lipcert.surgery._distance`. For any ρ_h > 0

    ‖d out‖ = ‖Σ_h dg_h·M_h·W_O,h‖ ≤ ‖stack_h(M_h·W_O,h/ρ_h)‖ · √(Σ_h ρ_h² L_h² ‖dx·W_h‖²)
            ≤ ‖stack_h(M_h·W_O,h/ρ_h)‖ · ‖[ρ_h L_h W_h]_h‖ · ‖dx‖.

With ρ_h = ‖M_h‖ that is at most √(Σ_h L_h²‖W_h‖²‖M_h‖²)·‖W_O‖. A second choice of ρ balances the heads; the result is
the smaller bound. Products are computed in float64. A product with inner length n has an error of at most
16·(n + 8)·2⁻⁵³ times the product of the Frobenius norms of its factors, which is added to the norm.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from lipcert.errors import InputError
from lipcert.norms import dense_norm
from lipcert.numerics import INFINITE, UNIT, Bound, Upper, as_tensor, detached, with_slope
from lipcert.surgery._distance import attention_gain
from lipcert.surgery._linear import LipLinear

_REFERENCE = "lipcert.surgery._distance, after Kim et al., arXiv 2006.04710"


class L2Attention(nn.Module):
    """L2 attention, (N, tokens, dim) → (N, tokens, dim_out); formulas in the module docstring.

    Attributes:
        q: x ↦ y for all heads, weight of shape (heads·head_dim, dim), no bias.
        v_weight: the V_h, shape (heads·value_dim, dim).
        v_bias: bias of the values, shape (heads·value_dim,), or None.
        proj: W_O and its bias.

    Args:
        dim: D.
        num_heads: number of heads.
        head_dim: d; dim / num_heads by default.
        value_dim: width of the values of a head; d by default.
        dim_out: width of the output; dim by default.
        value_bias: whether the values have a bias.
        proj_bias: whether the output has a bias.
    """

    # The classes of submodules for which the bound of the whole module holds.
    PARTS: ClassVar[dict[str, tuple[type[nn.Module], ...]]] = {
        "q": (LipLinear,),
        "proj": (LipLinear,),
        "attn_drop": (nn.Identity, nn.Dropout),
        "proj_drop": (nn.Identity, nn.Dropout),
    }

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        dim_out: int | None = None,
        value_bias: bool = True,
        proj_bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = head_dim or dim // num_heads
        self.value_dim = value_dim or self.head_dim
        self.scale = self.head_dim**-0.5
        width = self.num_heads * self.value_dim
        self.q = LipLinear(dim, self.num_heads * self.head_dim, bias=False, device=device, dtype=dtype)
        self.v_weight = nn.Parameter(torch.empty(width, dim, device=device, dtype=self.q.weight.dtype))
        self.v_bias = nn.Parameter(torch.zeros(width, device=device, dtype=dtype)) if value_bias else None
        self.attn_drop: nn.Module = nn.Identity()
        self.proj = LipLinear(width, dim_out or dim, bias=proj_bias, device=device, dtype=dtype)
        self.proj_drop: nn.Module = nn.Identity()
        nn.init.xavier_uniform_(self.q.weight)
        nn.init.xavier_uniform_(self.v_weight)

    def mixing(self) -> Tensor:
        """M_h for all heads, shape (heads, d, value_dim), in the weights' dtype."""
        queries, values = self._by_head(self.q.weight), self._by_head(self.v_weight)
        return queries @ values.transpose(1, 2) * self.scale

    def attend(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The output for tokens x of shape (N, tokens, dim), with b broadcasting to (N, heads, tokens, tokens)."""
        y = self._queries(x)
        return self._out(self.attn_drop(self._weights(y, bias)) @ (y @ self.mixing()))

    def mixed(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Σ_j P_ij y_j for the arguments of :meth:`attend`, shape (N, heads, tokens, head_dim)."""
        y = self._queries(x)
        return self._weights(y, bias) @ y

    def _queries(self, x: Tensor) -> Tensor:
        """y, shape (N, heads, tokens, head_dim)."""
        return self.q(x).reshape(x.shape[0], x.shape[1], self.num_heads, self.head_dim).transpose(1, 2)

    def _weights(self, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """P, shape (N, heads, tokens, tokens)."""
        keys = y.square().sum(-1).unsqueeze(-2)  # ‖y_i‖² is constant along a row and cancels in the softmax
        logits = (y @ y.transpose(-2, -1)) * (2 * self.scale) - keys * self.scale
        return (logits if bias is None else logits + bias).softmax(-1)

    def _out(self, mixed: Tensor) -> Tensor:
        """The heads' results, shape (N, heads, tokens, value_dim), as the module's output."""
        out = mixed.transpose(1, 2).flatten(2)
        if self.v_bias is not None:
            out = out + self.v_bias
        return self.proj_drop(self.proj(out))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attention among all tokens.

        Args:
            x: shape (N, tokens, dim).
            attn_mask: must be None; timm's blocks pass this argument.
            is_causal: must be False, likewise.

        Returns:
            Shape (N, tokens, dim_out).

        Raises:
            InputError: a mask is given, which the Lipschitz constant does not cover.
        """
        self.refuse_mask(attn_mask, is_causal)
        return self.attend(x)

    def refuse_mask(self, attn_mask: Tensor | None, is_causal: bool) -> None:
        """Raises an InputError if a mask is given."""
        if attn_mask is not None or is_causal:
            raise InputError(f"{type(self).__name__} takes no mask; convert the model with attention='keep'")

    def lipschitz(self, input_shape: tuple[int, ...], token_norm: Upper | None = None) -> Bound:
        """An upper bound on the Lipschitz constant; proof in the module docstring.

        Args:
            input_shape: (tokens, dim).
            token_norm: a bound on the norm of every input token, if there is one. Then the constant holds only for such
                inputs, and is smaller for smaller bounds.

        Raises:
            InputError: the shape does not fit, or a weight is not finite.
        """
        tokens = self._tokens(input_shape)
        gain = with_slope(partial(uniform_gain, tokens), self._reach(token_norm))
        return self._bound([gain] * self.num_heads)

    def result_norm(self, token_norm: Upper) -> Upper:
        """A bound on the norm of every output token, given a bound on the norm of every input token.

        The weights P_ij of a row sum to 1, so ‖z_h‖ ≤ token_norm·‖W_h‖·‖M_h‖ for head h, with ‖M_h‖ ≤ ‖W_h‖‖V_h‖/√d.
        The norm of the concatenated heads is the root of the sum of squares. W_O and the biases follow.
        """
        pairs = zip(self._by_head(self.q.weight), self._by_head(self.v_weight), strict=True)
        heads = [dense_norm(w) ** 2 * dense_norm(v) * self.scale for w, v in pairs]
        size = sum((head * head for head in heads), Upper(0)).sqrt() * token_norm * (1 + 4 * UNIT)
        if self.v_bias is not None:
            size = size + _frobenius(self.v_bias.detach().double())
        size = size * dense_norm(self.proj.weight)
        return size if self.proj.bias is None else size + _frobenius(self.proj.bias.detach().double())

    def _tokens(self, input_shape: tuple[int, ...]) -> int:
        if len(input_shape) != 2 or input_shape[1] != self.dim or input_shape[0] < 1:
            raise InputError(f"{type(self).__name__} takes (tokens, {self.dim}), got {tuple(input_shape)}")
        return int(input_shape[0])

    def _reach(self, token_norm: Upper | None) -> Upper:
        """T: all τ‖y_i − y_j‖² are at most τ·(2·token_norm·max_h‖W_h‖)²."""
        if token_norm is None:
            return INFINITE
        distance = token_norm * dense_norm(self._by_head(self.q.weight)) * 2
        return distance * distance * self.scale * (1 + 1e-9)

    def _by_head(self, weight: Tensor) -> Tensor:
        return weight.unflatten(0, (self.num_heads, -1))

    def _bound(self, gains: list[Upper]) -> Bound:
        method = "L2 attention"
        weights = [self.q.weight, self.v_weight, self.proj.weight]
        if not all(bool(weight.isfinite().all()) for weight in weights):
            raise InputError("a weight of L2Attention holds NaN or an infinity; check the checkpoint")
        if not all(gain.finite for gain in gains):
            return Bound.deterministic(math.inf, method, _REFERENCE)
        queries, values, output = (detached(weight).double().cpu() for weight in weights)
        queries, values = self._by_head(queries), self._by_head(values)
        outputs = output.unflatten(1, (self.num_heads, self.value_dim)).transpose(0, 1)
        mixing = queries @ values.transpose(1, 2) * self.scale
        folded = outputs @ mixing.transpose(1, 2)
        error = _frobenius(queries) * _frobenius(values) * _frobenius(outputs) * self.scale
        error = error * (16 * (self.dim + 2 * max(self.head_dim, self.value_dim) + 32) * UNIT)
        rises = as_tensor(gains)
        heads = rises * torch.linalg.matrix_norm(queries, 2)
        balanced = (torch.linalg.matrix_norm(folded, 2) / heads).sqrt()
        bounds = []
        for scale in (torch.linalg.matrix_norm(mixing, 2), balanced):
            rho = torch.where((scale > 0) & scale.isfinite(), scale, 1.0)
            inward = (rises * rho)[:, None, None] * queries
            outward = folded / rho[:, None, None]
            first = dense_norm(inward.flatten(0, 1)) + _frobenius(inward) * (4 * UNIT)
            second = dense_norm(outward.transpose(0, 1).flatten(1)) + _frobenius(outward) * (4 * UNIT)
            second = second + error * (1 / float(rho.detach().min()) * (1 + 4 * UNIT))
            bounds.append(first * second)
        return Bound.deterministic(min(bounds), method, _REFERENCE)


@lru_cache(maxsize=64)
def uniform_gain(tokens: int, reach: float) -> Upper:
    return attention_gain(torch.ones(tokens - 1, 1), tokens - 1, tokens - 1, reach)


def biased_gain(bias: Tensor, reach: float) -> Upper:
    """The gain for one head and one window, b of shape (tokens, tokens) in float64.

    For a difference |b_ij − b_ii| ≤ 700 the computed exponential has a relative error of at most 1e-12, and the sums of
    less.
    """
    weights = (bias - bias.diagonal().unsqueeze(1)).exp()
    weights.fill_diagonal_(0)
    if bool(weights.isnan().any()):
        raise InputError("an attention bias or mask holds NaN, or −∞ on its diagonal; check the checkpoint")
    totals = weights.sum(1)
    low, high = float(totals.min()) * (1 - 1e-9), float(totals.max()) * (1 + 1e-9)
    return attention_gain(weights * (1 + 1e-9), low, high, reach)


def worst_masks(masks: Tensor, reach: float) -> Tensor:
    """The distinct masks; only the zero mask if it is among them and the others can only lower the gain.

    They can only lower the gain if T is ∞. Then ψ is positive for every V: its maximum is w·e^(−t) at
    t = 1 + (V − a)/w ≥ 0, or a − V > 0 at t = 0. So the left sides increase with every β_ik.
    """
    lowering = math.isinf(reach) and bool((masks <= 0).all()) and not bool(masks.diagonal(dim1=1, dim2=2).any())
    zero = ~masks.flatten(1).any(1)
    return masks[zero][:1] if lowering and bool(zero.any()) else masks.unique(dim=0)


def _frobenius(matrix: Tensor) -> Upper:
    """‖matrix‖_F, rounded up: a float64 sum of n squares has a relative error ≤ (n + 2)·2⁻⁵³, far below 1e-9."""
    return Upper(float(torch.linalg.vector_norm(matrix.detach()))) * (1 + 1e-9)
