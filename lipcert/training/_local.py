"""Local bounds for training: boxes, constant units and norms of masked operators, for each image of a batch.

Source: Huang, Zhang, Shi, Kolter and Anandkumar, "Training certifiably robust neural networks with efficient local
Lipschitz bounds", NeurIPS 2021 (arXiv 2111.01395); equation numbers below are of this paper. The boxes and worst logits
are those of Lee, Lee and Park, "Lipschitz-certifiable training with a tight outer bound", NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.bounds import analyze, kept_whole
from lipcert.errors import InputError
from lipcert.graph import Node, capture, needed
from lipcert.model import Model
from lipcert.surgery import ClippedMaxMin, ClippedReLU, MaxMin

_STEPS = 2  # steps of power iteration per update; table 3
_UPPER_WEIGHT = 0.1  # λ_θ of table 3
_TINY = 1e-12
_FIXED = ("add", "sub", "mul", "div")
_SAME = ("identity", "dropout", "reshape")
_PIECEWISE = ("relu", ClippedReLU, MaxMin, ClippedMaxMin)

Linear = Callable[[Tensor, Tensor], Tensor]


@dataclass
class BoxState:
    """A value of N images within a ball around each.

    Attributes:
        nominal: the value at the images, shape (N, ...).
        low, high: bounds on its entries, of the same shape.
        rho: a bound on the norm of its deviation, shape (N,).
        moves: 1 for entries that can vary and 0 for constant ones, of the shape of ``nominal``.
    """

    nominal: Tensor
    low: Tensor
    high: Tensor
    rho: Tensor
    moves: Tensor


class LocalBound:
    """Worst logits of feed-forward networks in balls around images, differentiable in weights and thresholds.

    The network must be a sequence of matrices and convolutions, each followed by ReLU, clipped ReLU or MaxMin
    (algorithm 1). Variable entries are those of equations 3 and 9. Norms of masked operators (equation 6) come from two
    steps of power iteration per image, starting from the mean result of the last update. So they are estimates.

    Args:
        model: the model.

    Raises:
        UnsupportedOperation: an operation without a rule.
        InputError: the network is not of this kind.
    """

    def __init__(self, model: Model):
        self.model = model
        self.image = torch.rand(1, *model.input_size, generator=torch.Generator().manual_seed(0))
        analyze(model)
        self.vectors: dict[int, Tensor] = {}
        nodes = self._nodes()
        for before, node in zip(nodes, nodes[1:], strict=False):
            known = node.op in (*_FIXED, *_SAME, *_PIECEWISE, "conv2d", "linear")
            if not known or set(node.operands) != {before}:
                raise InputError(
                    "the losses local-b and local-g are for matrices, convolutions, ReLU, clipped ReLU and MaxMin in "
                    f"a row, and the network has {node.name} at {node.path or 'its top'}; use the loss emma"
                )
        if nodes[-1].op != "linear":
            raise InputError("the losses local-b and local-g need a linear layer at the end; use the loss emma")

    def _nodes(self) -> list[Node]:
        image = self.image.to(self.model.device, self.model.dtype)
        return list(needed(capture(self.model, image, whole=kept_whole, gradients=True)).nodes)

    def worst(self, images: Tensor, labels: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, worst logits (equation 24) and the sparsity loss (equation 12).

        Args:
            images: shape (N, C, H, W).
            labels: the classes y, shape (N,).
            eps: ε in ℓ2 on pixels.

        Returns:
            f and z*, shape (N, classes), where z*_j − z*_y estimates an upper bound on f_j − f_y in the ball; and the
            mean over units and images of max(0, high) + 0.1 max(0, θ − low), for MaxMin of max(0, high of the minimum −
            lower) + 0.1 max(0, upper − low of the maximum).
        """
        x, last, sparsity, _ = self._walk(images, eps)
        weight, bias = _linear(last)[1:]
        logits = F.linear(x.nominal, weight, bias)
        rows = weight - weight[labels][:, None]  # w_j − w_y, (N, classes, features)
        rise = reach(rows, (x.nominal - x.low)[:, None], (x.high - x.nominal)[:, None], x.rho[:, None])
        return logits, logits + rise, torch.stack(sparsity).mean() if sparsity else logits.new_zeros(())

    @torch.no_grad()
    def measured(self, images: Tensor, eps: float) -> tuple[float, float]:
        """The share of units that are constant in the balls around images, and the mean local bound.

        Both are estimates, as the norms are: ten passes warm the vectors of power iteration. The local bound is the
        bound on the change of the last features over ε, times the norm of the last matrix.

        Args:
            images: shape (N, C, H, W).
            eps: ε in ℓ2 on pixels.
        """
        for _ in range(10):
            x, last, _, moving = self._walk(images, eps)
        norm = torch.linalg.matrix_norm(_linear(last)[1], 2)
        constant = 1 - torch.cat(moving, 1).mean()
        return float(constant), float(x.rho.mean() / eps * norm)

    def _walk(self, images: Tensor, eps: float) -> tuple[BoxState, Node, list[Tensor], list[Tensor]]:
        """The input of the last layer, this layer, and of each activation its sparsity loss and which units move."""
        low, high = (images - eps).clamp(min=0), (images + eps).clamp(max=1)
        x = BoxState(images, low, high, images.new_full((len(images),), eps), torch.ones_like(images))
        nodes = self._nodes()[1:]
        sparsity: list[Tensor] = []
        moving: list[Tensor] = []
        for place, node in enumerate(nodes[:-1]):
            if node.op in _SAME:
                shape = (len(images), *node.shape[1:])
                parts = (part.reshape(shape) for part in (x.nominal, x.low, x.high, x.moves))
                nominal, low, high, moves = parts
                x = BoxState(nominal, low, high, x.rho, moves)
            elif node.op in _FIXED:
                x = _fixed(x, node)
            elif node.op in _PIECEWISE:
                x, loss = _activated(x, node)
                sparsity.append(loss)
                moving.append(x.moves.flatten(1))
            else:
                x = self._mapped(x, node, nodes[place + 1], place)
        return x, nodes[-1], sparsity, moving

    def _mapped(self, x: BoxState, node: Node, follower: Node, place: int) -> BoxState:
        """The value Wx + b: its box by equations 21 to 23, its ball by the norm of W between variable entries."""
        apply, weight, bias = _linear(node)
        shift = 0 if bias is None else bias.reshape(-1, *[1] * (len(node.shape) - 2))
        nominal, middle = (apply(v, weight) + shift for v in (x.nominal, (x.low + x.high) / 2))
        spread = apply((x.high - x.low) / 2, weight.abs())
        rows = apply(torch.ones_like(x.nominal[:1]), weight.square()).clamp_min(_TINY).sqrt()
        ball = rows * x.rho.view(-1, *[1] * (nominal.dim() - 1))
        high = torch.minimum(middle + spread, nominal + ball)
        low = torch.maximum(middle - spread, nominal - ball)
        out = torch.ones_like(nominal)
        if follower.op in ("relu", ClippedReLU):
            module: Any = follower.function
            limit = module.threshold if follower.op is ClippedReLU else torch.inf
            out = ((high > 0) & (low < limit)).to(nominal)
        gain = self._norm(apply, weight, x.moves, out, place)
        return BoxState(nominal, low, high, x.rho * gain, out)

    def _norm(self, apply: Linear, weight: Tensor, inner: Tensor, outer: Tensor, place: int) -> Tensor:
        """A lower estimate of ‖diag(outer) W diag(inner)‖ for each image, shape (N,)."""
        start = self.vectors.get(place)
        if start is None:
            start = torch.randn(inner[:1].shape, generator=torch.Generator().manual_seed(place)).to(inner)
        v, fixed = _unit(start * inner), weight.detach()
        u = outer
        for _ in range(_STEPS):
            with torch.enable_grad():
                point = v.detach().requires_grad_()
                result = apply(point * inner, fixed) * outer
                u = _unit(result.detach())
                (back,) = torch.autograd.grad(result, point, u)
            v = _unit(back)
        self.vectors[place] = v.mean(0, keepdim=True)
        return (u * apply(v * inner, weight) * outer).flatten(1).sum(1)


def local_loss(
    bound: LocalBound,
    images: Tensor,
    labels: Tensor,
    eps: float,
    mixture: float,
    *,
    bottom: bool = False,
    sparsity: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(1 − λ) CE(f) + λ CE(z*) plus the sparsity loss: equations 25 and 26.

    Args:
        bound: the local bound of the model.
        images: shape (N, C, H, W).
        labels: shape (N,).
        eps: ε in ℓ2 on pixels.
        mixture: λ.
        bottom: uses (f, max over j ≠ y of z*_j) in place of z*, as Local-Lip-G.
        sparsity: the weight of the sparsity loss.

    Returns:
        The loss, and the logits f, shape (N, classes).
    """
    logits, worst, sparse = bound.worst(images, labels, eps)
    if bottom:
        own = F.one_hot(labels, logits.shape[1]).bool()
        worst = torch.cat([logits, worst.masked_fill(own, -torch.inf).amax(1, keepdim=True)], 1)
    robust = F.cross_entropy(worst, labels)
    return (1 - mixture) * F.cross_entropy(logits, labels) + mixture * robust + sparsity * sparse, logits


def reach(rows: Tensor, down: Tensor, up: Tensor, rho: Tensor) -> Tensor:
    """max ⟨c, δ⟩ over −down ≤ δ ≤ up with ‖δ‖ ≤ ρ, for rows c, with gradients.

    With l_i the limit of |δ_i| in the direction of the sign of c_i, the optimal δ has |δ_i| = min(t|c_i|, l_i) for the
    largest t with ‖δ‖ ≤ ρ (Karush, Kuhn, Tucker). Bisection finds t. The maximum is then Σ |c_i| l_i over the entries
    at their limits, plus √(ρ² − Σ l_i²) times the norm of the other c_i.

    Args:
        rows: c, shape (..., n).
        down: limits of −δ, shape (..., n), ≥ 0.
        up: limits of δ, shape (..., n), ≥ 0.
        rho: ρ, shape (...).

    Returns:
        The maxima, shape (...).
    """
    size = rows.abs()
    limit = torch.where(rows > 0, up, down).clamp_min(0)
    square = rho.square()[..., None]
    with torch.no_grad():
        least, most = torch.zeros_like(size[..., :1]), (limit / size.clamp_min(_TINY)).amax(-1, keepdim=True)
        for _ in range(40):
            t = (least + most) / 2
            fits = torch.minimum(t * size, limit).square().sum(-1, keepdim=True) <= square
            least, most = torch.where(fits, t, least), torch.where(fits, most, t)
        whole = limit.square().sum(-1, keepdim=True) <= square
        full = whole | (least * size >= limit)
    bounded = torch.where(full, size * limit, 0.0).sum(-1)
    left = (square[..., 0] - torch.where(full, limit.square(), 0.0).sum(-1)).clamp_min(_TINY).sqrt()
    free = torch.where(full, 0.0, size).square().sum(-1).clamp_min(_TINY**2).sqrt()
    return bounded + torch.where(whole[..., 0], 0.0, left * free)


def _unit(vectors: Tensor) -> Tensor:
    return F.normalize(vectors.flatten(1), dim=1).view_as(vectors)


def _linear(node: Node) -> tuple[Linear, Tensor, Tensor | None]:
    """The linear map of value and weight, the weight and the bias of a captured matrix or convolution."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if node.op == "linear":
        return F.linear, given["weight"], given.get("bias")
    geometry = {key: given[key] for key in names[3:] if key in given}
    return lambda v, w: F.conv2d(v, w, None, **geometry), given["weight"], given.get("bias")


def _fixed(x: BoxState, node: Node) -> BoxState:
    """The value after a sum or product with a constant, such as the normalisation."""
    ends = []
    for part in (x.nominal, x.low, x.high):
        args = [part if isinstance(argument, Node) else argument for argument in node.args]
        ends.append(node.function(*args, **node.kwargs))
    nominal, one, other = ends
    slope = 1.0
    if node.op in ("mul", "div"):
        constant = torch.as_tensor(next(a for a in node.args if not isinstance(a, Node)), device=nominal.device)
        slope = (constant.abs() if node.op == "mul" else 1 / constant.abs()).max().item()
    return BoxState(nominal, torch.minimum(one, other), torch.maximum(one, other), x.rho * slope, x.moves)


def _activated(x: BoxState, node: Node) -> tuple[BoxState, Tensor]:
    """The value after an activation, which is monotone and 1-Lipschitz, and its part of the sparsity loss."""
    module: Any = node.function
    if node.op in ("relu", ClippedReLU):
        limit = module.threshold if node.op is ClippedReLU else None
        nominal, low, high = (F.relu(part) for part in (x.nominal, x.low, x.high))
        loss = high.mean()
        if limit is not None:
            nominal, low, high = (torch.minimum(part, limit) for part in (nominal, low, high))
            loss = loss + _UPPER_WEIGHT * F.relu(limit - x.low).mean()
        return BoxState(nominal, low, high, x.rho, x.moves), loss
    nominal, low, high = (module(part) for part in (x.nominal, x.low, x.high))
    if node.op is MaxMin:
        return BoxState(nominal, low, high, x.rho, torch.ones_like(nominal)), nominal.new_zeros(())
    (a, b), (c, d) = x.low.chunk(2, module.dim), x.high.chunk(2, module.dim)
    least, most = torch.maximum(a, b), torch.minimum(c, d)
    moves = torch.cat([(least < module.upper), (most > module.lower)], module.dim).to(nominal)
    loss = F.relu(most - module.lower).mean() + _UPPER_WEIGHT * F.relu(module.upper - least).mean()
    return BoxState(nominal, low, high, x.rho, moves), loss
