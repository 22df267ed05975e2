"""The constraint set of CertViT with the ReLU after the layer, and the smallest norm in it.

Gupta and Verma 2023 (arXiv 2302.10287), equations 3 to 10: an activation R = prox_f satisfies R(z) = y if and only if
z − y ∈ ∂f(y), and a changed weight W is measured by the distance of W x − y to ∂f(y). ReLU is the proximity operator
of the indicator function of [0, ∞), whose subdifferential at y is {0} for y > 0 and (−∞, 0] for y = 0. So with
z = W x + b and y = ReLU(W_pre x + b), unit by unit,

    d²(z − y) = (z − y)² where y > 0,    (max(z, 0))² where y = 0:

an inactive unit may have any value below zero. With y = ReLU(z_pre) this is at most (z − z_pre)²: where y > 0,
y = z_pre; where y = 0, z_pre ≤ 0 and max(z, 0) ≤ |z − z_pre|. So this set contains the set without the ReLU at the same
tolerance, and its smallest norm is at most as large.

**Batch normalisation in between.** In evaluation mode the input of the ReLU is a_i = γ_i z_i + β_i with z = W x. The
set of z_i with the same result is the half-line {γ_i z_i + β_i ≤ 0} where a_i ≤ 0, the point where a_i > 0, and ℝ where
γ_i = 0. Distances are those of z, as without the ReLU, so the tolerance has the same meaning.

**Exact engine.** The set {W : Σ_t d_t²(W) ≤ r²} is convex, but no ellipsoid. For any V let P_t be the point of the set
of row t that is nearest to V x_t. Then d_t(W) ≤ ‖W x_t − P_t‖ for every W. So {W : Σ_t ‖W x_t − P_t‖² ≤ r²} is an
ellipsoid within the set, unless it is empty, and :mod:`lipcert.certvit.solve` finds the smallest norm in it. If V is a
member of the set, it is a member of its ellipsoid, so the norm does not increase. The iteration starts from W_pre,
whose ellipsoid is the set without the ReLU, and continues with the ellipsoid of each solution (Marks and Wright 1978,
"A general inner approximation algorithm for nonconvex mathematical programs"). Value and gradient of both constraints
agree at V, so a fixed point V is optimal. Nesterov's momentum extrapolates V, and is reset if the norm increases. Each
ellipsoid gets a few iterations of Douglas–Rachford, which continue those in the one before.

**Lower bound.** With D the matrix of the differences d_t = V x_t − P_t and G = Σ_t d_t x_tᵀ, every member W satisfies
⟨G, W⟩ = Σ_t ⟨d_t, W x_t⟩ ≤ Σ_t ⟨d_t, P_t⟩ + r ‖D‖_F, because d_t is normal to its convex set at P_t, and the distances
of the W x_t from these sets have total norm at most r. Hence ‖W‖ ‖G‖_dual ≥ −⟨G, W⟩ ≥ −(Σ_t ⟨d_t, P_t⟩ + r ‖D‖_F).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipcert.errors import LipcertError
from lipcert.graph import Graph, Node, capture
from lipcert.model import Model

# Operations allowed between a layer and its ReLU: they act on each channel separately and keep the order of entries.
_BETWEEN = ("identity", "dropout", "batch_norm")


@dataclass(frozen=True, repr=False)
class Relu:
    """The ReLU after a layer: its input is scale_i z_i + offset_i, where z = W x is the output without bias.

    Attributes:
        scale: γ, shape (O,), float64; 1 without batch normalisation.
        offset: β, shape (O,), float64: the bias of the layer after batch normalisation.
    """

    scale: Tensor
    offset: Tensor

    def __repr__(self) -> str:
        content = torch.stack([self.scale, self.offset]).double().cpu().contiguous().numpy().tobytes()
        return f"Relu({hashlib.sha256(content).hexdigest()})"

    def of_group(self, group: int, groups: int) -> Relu:
        """The units of one group of a grouped convolution."""
        return Relu(self.scale.chunk(groups)[group], self.offset.chunk(groups)[group])

    def differences(self, outputs: Tensor, before: Tensor) -> Tensor:
        """The differences of ``outputs`` from the nearest points with the same ReLU as ``before``.

        Args:
            outputs: z = W x by rows, (T, O), float64, without bias.
            before: z_pre, likewise.

        Returns:
            (T, O); the squares add up to Σ_t d²_∂f(y_t)(W x_t − y_t).
        """
        scale, offset = self.scale.to(outputs), self.offset.to(outputs)
        beyond = (scale * outputs + offset).clamp_min(0) / torch.where(scale == 0, 1.0, scale)
        change = torch.where(scale * before + offset > 0, outputs - before, beyond)
        return torch.where(scale == 0, 0.0, change)

    def active(self, before: Tensor) -> float:
        """The fraction of entries of z_pre for which the ReLU is active."""
        return float((self.scale.to(before) * before + self.offset.to(before) > 0).double().mean())

    def relative_error(self, weight: Tensor, reference: Tensor, rows: Tensor) -> float:
        """(Σ_t d_t² / Σ_t ‖W_pre x_t‖²)^½ over rows (G, T, M); NaN where the outputs are all zero."""
        squared = energy = 0.0
        groups = len(rows)
        blocks = [matrix.double().reshape(groups, -1, rows.shape[2]) for matrix in (weight, reference)]
        for group, (new, old) in enumerate(zip(*blocks, strict=True)):
            x = rows[group].double()
            before = x @ old.mT
            squared += float(self.of_group(group, groups).differences(x @ new.mT, before).square().sum())
            energy += float(before.square().sum())
        return math.sqrt(squared / energy) if energy else math.nan


def relus(model: Model, layers: dict[str, nn.Linear | nn.Conv2d]) -> dict[str, Relu]:
    """The ReLU directly after each layer that has one, by module path.

    Only batch normalisation in evaluation mode and dropout may stand between them. The layer must be called once, and
    only the ReLU may read its result. The result is empty for a network that cannot be captured.
    """
    image = torch.full((1, *model.input_size), 0.5, dtype=model.dtype, device=model.device)
    try:
        graph = capture(model, image).flat()
    except LipcertError:
        return {}
    readers: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for operand in node.operands:
            readers.setdefault(operand, []).append(node)
    found: dict[str, Relu] = {}
    for path, layer in layers.items():
        calls = [node for node in graph.nodes if node.path == f"net.{path}" and node.op in ("linear", "conv2d")]
        relu = _behind(calls[0], graph, readers, layer) if len(calls) == 1 else None
        if relu is not None:
            found[path] = relu
    return found


def _behind(call: Node, graph: Graph, readers: dict[Node, list[Node]], layer: nn.Linear | nn.Conv2d) -> Relu | None:
    between: list[Node] = []
    node = call
    while node is not graph.output and len(readers.get(node, ())) == 1:
        (node,) = readers[node]
        if node.op == "relu":
            return _measured(call, between, layer)
        if node.op not in _BETWEEN:
            return None
        between.append(node)
    return None


def _measured(call: Node, between: list[Node], layer: nn.Linear | nn.Conv2d) -> Relu:
    """Scale and offset, from the results of the operations in between for the constants 0 and 1."""
    bias = layer.weight.new_zeros(layer.weight.shape[0]) if layer.bias is None else layer.bias.detach()

    def sees(value: Tensor) -> Tensor:
        shape = (1, -1, 1, 1) if call.op == "conv2d" else (*[1] * (len(call.shape) - 1), -1)
        values: dict[Node, Tensor] = {call: value.double().reshape(shape)}

        def exact(argument: Any) -> Any:
            if isinstance(argument, Node):
                return values[argument]
            return argument.double() if isinstance(argument, Tensor) and argument.is_floating_point() else argument

        for node in between:
            kwargs = {key: exact(argument) for key, argument in node.kwargs.items()}
            values[node] = node.function(*map(exact, node.args), **kwargs)
        return values[between[-1] if between else call].flatten().double().cpu()

    with torch.no_grad():
        offset = sees(bias)
        return Relu(sees(bias + 1) - offset if between else torch.ones_like(offset), offset)


@dataclass(frozen=True)
class Inner:
    """The ellipsoid of a matrix V: all W with Σ_t ‖W x_t − P_t‖² ≤ r², by its moments.

    Attributes:
        cross: Σ_t P_t x_tᵀ, (O, M).
        energy: Σ_t ‖P_t‖².
        highest: Σ_t ⟨d_t, P_t⟩ + r ‖D‖_F, an upper bound on ⟨G, W⟩ for all members W.
        outward: G, (O, M).
    """

    cross: Tensor
    energy: float
    highest: float
    outward: Tensor


def inner(weight: Tensor, before: Tensor, rows: Tensor, relu: Relu, radius: float) -> Inner:
    """The ellipsoid of a matrix V, (O, M), as described at the head of this file.

    Args:
        weight: V, float64.
        before: z_pre by rows, (T, O).
        rows: x_t, (T, M), float64.
        relu: the ReLU after the layer.
        radius: r.
    """
    outputs = rows @ weight.mT
    away = relu.differences(outputs, before)
    nearest = outputs - away
    highest = float((away * nearest).sum()) + radius * float(away.norm())
    return Inner(nearest.mT @ rows, float(nearest.square().sum()), highest, away.mT @ rows)
