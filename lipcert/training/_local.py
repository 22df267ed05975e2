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

from lipcert.bounds import Tag, analyze, arguments, kept_whole, tagged
from lipcert.errors import InputError
from lipcert.graph import Node, capture, needed
from lipcert.model import Model
from lipcert.norms import Geometry
from lipcert.surgery import ClippedMaxMin, ClippedReLU, MaxMin

_LOOKED_AT = 16  # images of a batch that show how often boxes are tighter than balls
_RARELY = 1e-3
_TINY = 1e-12
_LINEAR = (Tag.DENSE, Tag.CONVOLVES)


@dataclass
class BoxState:
    """A value of N images within a ball around each."""

    nominal: Tensor  # the value at the images, shape (N, ...)
    low: Tensor
    high: Tensor
    rho: Tensor  # a bound on the norm of its deviation, shape (N,)
    moves: Tensor | None = None  # 1 for entries that can vary and 0 for constant ones; None if all can vary


class LocalBound:
    """Worst logits of feed-forward networks in balls around images, differentiable in weights and thresholds.

    The network must be a sequence of matrices and convolutions, each followed by ReLU, clipped ReLU or MaxMin
    (algorithm 1). Variable entries are those of equations 3 and 9. Norms of masked operators (equation 6) come from a
    few steps of power iteration per image. So they are estimates. The paper saves the vectors of every image and starts
    from them when the image is seen again, which takes as much memory as all values of the network for all images. Here
    all images start from one vector of each layer, the mean result of the last update, or from random ones.

    The bounds of an entry are the tighter ones of its box and its ball (equations 21 and 22). In most layers the ball
    is tighter almost everywhere. If it is for 999 of 1000 entries of 16 images of the batch, the layer's box is left
    out, which loosens the bounds of the other entries.

    Args:
        model: the model.
        steps: of power iteration in each call.
        random: starts from random vectors in each call.

    Raises:
        UnsupportedOperation: an operation without a rule.
        InputError: the network is not of this kind.
    """

    def __init__(self, model: Model, steps: int = 2, *, random: bool = False):
        self.model, self.steps, self.random = model, steps, random
        self.image = torch.rand(1, *model.input_size, generator=torch.Generator().manual_seed(0))
        analyze(model)
        self.vectors: dict[int, Tensor] = {}
        nodes = self._nodes()
        for before, node in zip(nodes, nodes[1:], strict=False):
            supported = _activates(node) or tagged(node, *_LINEAR, Tag.ADDS, Tag.SCALES, Tag.KEEPS)
            if not supported or set(node.operands) != {before}:
                raise InputError(
                    "the losses local-b and local-g are for matrices, convolutions, ReLU, clipped ReLU and MaxMin in "
                    f"a row, and the network has {node.name} at {node.path or 'its top'}; use the loss emma"
                )
        if not tagged(nodes[-1], Tag.DENSE):
            raise InputError("the losses local-b and local-g need a linear layer at the end; use the loss emma")

    def _nodes(self) -> list[Node]:
        image = self.image.to(self.model.device, self.model.dtype)
        return list(needed(capture(self.model, image, whole=kept_whole, gradients=True)).nodes)

    def worst(
        self, images: Tensor, labels: Tensor, eps: float, upper_weight: float | None = 0.1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, worst logits (equation 24) and the sparsity loss (equation 12).

        Args:
            images: shape (N, C, H, W).
            labels: the classes y, shape (N,).
            eps: ε in ℓ2 on pixels.
            upper_weight: λ_θ, the weight of upper thresholds in the sparsity loss; None leaves this loss out, as 0.

        Returns:
            f and z*, shape (N, classes), where z*_j − z*_y estimates an upper bound on f_j − f_y in the ball; and the
            mean over units and images of max(0, high) + λ_θ max(0, θ − low), for MaxMin of max(0, high of the minimum −
            lower) + λ_θ max(0, upper − low of the maximum).
        """
        x, last, losses, _ = self._walk(images, eps, upper_weight)
        head = _Linear(last)
        logits = head(x.nominal)
        rows = head.weight - head.weight[labels][:, None]  # w_j − w_y, (N, classes, features)
        rise = reach(rows, (x.nominal - x.low)[:, None], (x.high - x.nominal)[:, None], x.rho[:, None])
        return logits, logits + rise, torch.stack(losses).mean() if losses else logits.new_zeros(())

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
        norm = torch.linalg.matrix_norm(_Linear(last).weight, 2)
        constant = 1 - torch.cat(moving, 1).mean()
        return float(constant), float(x.rho.mean() / eps * norm)

    def _walk(
        self, images: Tensor, eps: float, upper_weight: float | None = None
    ) -> tuple[BoxState, Node, list[Tensor], list[Tensor]]:
        """The input of the last layer, this layer, and of each activation its sparsity loss and which units move."""
        ball = images.new_full((len(images),), eps)
        x = BoxState(images, (images - eps).clamp(min=0), (images + eps).clamp(max=1), ball)
        nodes = self._nodes()[1:]
        losses: list[Tensor] = []
        moving: list[Tensor] = []
        for place, node in enumerate(nodes[:-1]):
            if _activates(node) and upper_weight is not None:
                losses.append(_sparsity(node, x, upper_weight))
            x = self._mapped(x, node, nodes[place + 1], place) if tagged(node, *_LINEAR) else _each(x, node)
            if _activates(node):
                moving.append((torch.ones_like(x.nominal) if x.moves is None else x.moves).flatten(1))
        return x, nodes[-1], losses, moving

    def _mapped(self, x: BoxState, node: Node, follower: Node, place: int) -> BoxState:
        """The value Wx + b: its box by equations 21 to 23, its ball by the norm of W between variable entries."""
        linear = _Linear(node)
        nominal = linear(x.nominal)
        rows = linear.product(torch.ones_like(x.nominal[:1]), linear.weight.square()).clamp_min(_TINY).sqrt()
        reached = rows * x.rho.view(-1, *[1] * (nominal.dim() - 1))
        low, high = nominal - reached, nominal + reached
        some = slice(None, None, max(1, len(nominal) // _LOOKED_AT))
        with torch.no_grad():
            least, most = linear.interval(x.low[some], x.high[some])
            tighter = ((least > low[some]) | (most < high[some])).float().mean().item() > _RARELY
        if tighter:
            least, most = linear.interval(x.low, x.high)
            low, high = torch.where(least > low, least, low), torch.where(most < high, most, high)
        moves = _moving(follower, low, high) if tagged(follower, Tag.RECTIFIES) or follower.op is ClippedReLU else None
        return BoxState(nominal, low, high, x.rho * self._norm(linear, x.moves, moves, place), moves)

    def _norm(self, linear: _Linear, inner: Tensor | None, outer: Tensor | None, place: int) -> Tensor:
        """A lower estimate of ‖diag(outer) W diag(inner)‖ for each image, shape (N,), or (1,) without masks.

        With l = diag(outer) W diag(inner) v and r = diag(inner) Wᵀ l in the last step, this is ⟨l, W r⟩/(‖l‖‖r‖), with
        l and r constants for the gradient.
        """
        start = self.vectors.get(place)
        if start is None or self.random:
            size = linear.inputs if inner is None else inner.shape[1:]
            generator = None if self.random else torch.Generator().manual_seed(place)
            start = _unit(torch.randn(1, *size, generator=generator).to(linear.weight))
        masks = [mask for mask in (inner, outer) if mask is not None]
        right = start.expand(len(masks[0]) if masks else 1, *start.shape[1:])
        right = right if inner is None else right * inner
        for step in range(self.steps):
            if step:
                right = _unit(right)
            with torch.enable_grad():
                point = right.detach().requires_grad_()
                result = linear.product(point, linear.weight.detach())
                output = result.detach() if outer is None else result.detach() * outer
                (right,) = torch.autograd.grad(result, point, output)
            right = right if inner is None else right * inner
        output_norm, input_norm = (part.flatten(1).norm(dim=1) for part in (output, right))
        mean = torch.einsum("n,n...->...", 1 / input_norm.clamp_min(_TINY), right)
        self.vectors[place] = _unit(mean[None] + _TINY * start)  # the start again, if all units are constant
        length = (output_norm * input_norm).clamp_min(_TINY)
        return (output * linear.product(right, linear.weight)).flatten(1).sum(1) / length


class _Linear:
    """The map v ↦ Wv + b of a captured matrix or convolution."""

    def __init__(self, node: Node):
        call = arguments(node)
        self.weight: Tensor = call["weight"]
        self.bias: Tensor | None = call.get("bias")
        self.inputs = call["input"].shape[1:]
        self.geometry: Geometry | None = None
        if tagged(node, Tag.CONVOLVES):
            given = {key: call[key] for key in ("stride", "padding", "dilation", "groups") if key in call}
            self.geometry = Geometry.of(tuple(self.weight.shape[2:]), **given)

    def __call__(self, v: Tensor) -> Tensor:
        return self.product(v, self.weight, self.bias)

    def product(self, v: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The map with another weight of the same shape."""
        return F.linear(v, weight, bias) if self.geometry is None else self.geometry.apply(v, weight, bias)

    def interval(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds on the entries of the result between bounds on those of v."""
        middle = self((low + high) / 2)
        spread = self.product((high - low) / 2, self.weight.abs())
        return middle - spread, middle + spread


def local_loss(
    bound: LocalBound,
    images: Tensor,
    labels: Tensor,
    eps: float,
    mixture: float,
    *,
    bottom: bool = False,
    sparsity: float = 0.0,
    upper_weight: float = 0.1,
) -> tuple[Tensor, Tensor]:
    """(1 − λ) CE(f) + λ CE(z*) plus the sparsity loss: equations 25 and 26.

    Args:
        bound: the local bound of the model.
        images: shape (N, C, H, W).
        labels: shape (N,).
        eps: ε in ℓ2 on pixels.
        mixture: λ.
        bottom: uses (f, max over j ≠ y of z*_j) in place of z*, as Local-Lip-G.
        sparsity: the weight of the sparsity loss, λ_sparsity.
        upper_weight: that of upper thresholds in it, λ_θ.

    Returns:
        The loss, and the logits f, shape (N, classes).
    """
    logits, worst, sparse = bound.worst(images, labels, eps, upper_weight if sparsity > 0 else None)
    if bottom:
        is_label = F.one_hot(labels, logits.shape[1]).bool()
        worst = torch.cat([logits, worst.masked_fill(is_label, -torch.inf).amax(1, keepdim=True)], 1)
    robust = F.cross_entropy(worst, labels)
    return (1 - mixture) * F.cross_entropy(logits, labels) + mixture * robust + sparsity * sparse, logits


def reach(rows: Tensor, down: Tensor, up: Tensor, rho: Tensor) -> Tensor:
    """max ⟨c, δ⟩ over −down ≤ δ ≤ up with ‖δ‖ ≤ ρ, for rows c, with gradients.

    With l_i the limit of |δ_i| in the direction of the sign of c_i, the optimal δ has |δ_i| = min(t|c_i|, l_i) for the
    largest t with ‖δ‖ ≤ ρ (Karush, Kuhn, Tucker). With the entries of a set S at their limits and the others at t|c_i|,
    ‖δ‖ = ρ for t_S² = (ρ² − Σ_S l_i²) / Σ_{i∉S} c_i². If S is part of the entries at their limits at the optimum, t_S
    is at most t, so S may take the entries with t_S|c_i| ≥ l_i; S is complete when there are none. The maximum is then
    Σ_S |c_i| l_i + √(ρ² − Σ_S l_i²) times the norm of the other c_i.
    """
    size = rows.abs()
    limit = torch.where(rows > 0, up, down).clamp_min(0)
    square = rho.square()[..., None]
    with torch.no_grad():
        full, complete = limit <= 0, False
        while not complete:
            remaining = (square - torch.where(full, limit.square(), 0.0).sum(-1, keepdim=True)).clamp_min(0)
            t = (remaining / torch.where(full, 0.0, size.square()).sum(-1, keepdim=True).clamp_min(_TINY**2)).sqrt()
            larger = full | (t * size >= limit)
            complete, full = torch.equal(larger, full), larger
    bounded = torch.where(full, size * limit, 0.0).sum(-1)
    remaining = (square[..., 0] - torch.where(full, limit.square(), 0.0).sum(-1)).clamp_min(_TINY).sqrt()
    free = torch.where(full, 0.0, size).square().sum(-1).clamp_min(_TINY**2).sqrt()
    return bounded + remaining * free


def _activates(node: Node) -> bool:
    return tagged(node, Tag.RECTIFIES) or node.op in (ClippedReLU, MaxMin, ClippedMaxMin)


def _unit(vector: Tensor) -> Tensor:
    return F.normalize(vector.flatten(1), dim=1).view_as(vector)


def _each(x: BoxState, node: Node) -> BoxState:
    """The value after another arrangement, a constant, or an activation, which is monotone and 1-Lipschitz."""
    module: Any = node.function

    def after(function: Callable[[Tensor], Tensor], moves: Tensor | None) -> BoxState:
        return BoxState(function(x.nominal), function(x.low), function(x.high), x.rho, moves)

    if tagged(node, Tag.ADDS, Tag.SCALES):
        return _fixed(x, node)
    if tagged(node, Tag.KEEPS):
        shape = node.shape[1:]
        moves = None if x.moves is None else x.moves.reshape(-1, *shape)
        return after(lambda value: value.reshape(-1, *shape), moves)
    if tagged(node, Tag.RECTIFIES):
        return after(F.relu, x.moves)
    if node.op is ClippedReLU:
        return after(lambda value: _clipped(value, module.threshold), x.moves)
    return after(module, None if node.op is MaxMin else _moving(node, x.low, x.high))


def _fixed(x: BoxState, node: Node) -> BoxState:
    """The value after a sum or product with a constant, such as the normalisation."""
    nominal, one, other, unit = (
        node.function(*(value if isinstance(a, Node) else a for a in node.args), **node.kwargs)
        for value in (x.nominal, x.low, x.high, torch.ones_like(x.nominal[:1]))
    )
    slope = unit.abs().max().item() if tagged(node, Tag.SCALES) else 1.0
    return BoxState(nominal, torch.minimum(one, other), torch.maximum(one, other), x.rho * slope, x.moves)


def _clipped(value: Tensor, threshold: Tensor) -> Tensor:
    """ReLUθ; its backward pass takes a third of the time of that of torch.minimum."""
    value = F.relu(value)
    return torch.where(value < threshold, value, threshold)


def _extremes(module: ClippedMaxMin, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Lower bounds on the maxima and upper bounds on the minima of the pairs."""
    (a, b), (c, d) = low.chunk(2, module.dim), high.chunk(2, module.dim)
    return torch.maximum(a, b), torch.minimum(c, d)


@torch.no_grad()
def _moving(node: Node, low: Tensor, high: Tensor) -> Tensor:
    """1 for the results of a clipped activation that vary between bounds on its inputs, equations 3 and 9, else 0."""
    module: Any = node.function
    if node.op is ClippedMaxMin:
        least, most = _extremes(module, low, high)
        return torch.cat([least < module.upper, most > module.lower], module.dim).to(low)
    moving = high > 0
    return ((low < module.threshold).logical_and_(moving) if node.op is ClippedReLU else moving).to(low)


def _sparsity(node: Node, x: BoxState, upper_weight: float) -> Tensor:
    """The part of an activation in the sparsity loss (equation 12), with λ_θ of equation 26."""
    module: Any = node.function
    low, high = x.low, x.high
    if node.op is MaxMin:
        return low.new_zeros(())
    if node.op is ClippedMaxMin:
        least, most = _extremes(module, low, high)
        return F.relu(most - module.lower).mean() + upper_weight * F.relu(module.upper - least).mean()
    loss = F.relu(high).mean()
    return loss + upper_weight * F.relu(module.threshold - low).mean() if node.op is ClippedReLU else loss
