"""The constraint set of CertViT with the ReLU after a layer, and the smallest norm in it: its table "equation 10" here.

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

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lipcert.certvit import Solution
from lipcert.certvit._measures import MEASURES
from lipcert.certvit.moments import watching
from lipcert.certvit.solve import _gap, _Inputs, _minimise, _Point, _Problem, _rounded, _Start
from lipcert.errors import LipcertError
from lipcert.graph import Graph, Node, capture
from lipcert.model import Model, evaluating
from lipcert.norms import dense_norm

_EACH = 10  # iterations for each ellipsoid, until they are too few
_ROUNDS = 200  # the largest number of ellipsoids
_BEHIND = 2  # the largest number of iterations for all of them, relative to that of a layer without a ReLU
_FINER = 0.1  # the tolerance for each of them, relative to that of the layer
_DEARER = 0.01  # the largest relative increase of a norm for the sake of zeros
# Operations allowed between a layer and its ReLU: they act on each channel separately and keep the order of entries.
_BETWEEN = ("identity", "dropout", "batch_norm")


@dataclass(frozen=True)
class Relu:
    """The ReLU after a layer: its input is scale_i z_i + offset_i, where z = W x is the output without bias.

    Attributes:
        scale: γ, shape (O,), float64; 1 without batch normalisation.
        offset: β, shape (O,), float64: the bias of the layer after batch normalisation.
    """

    scale: Tensor
    offset: Tensor

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


def relus(model: Model, layers: dict[str, nn.Linear | nn.Conv2d]) -> dict[str, Relu]:
    """The ReLU directly after each layer that has one, by module path.

    Only batch normalisation in evaluation mode and dropout may stand between them. The layer must be called once, and
    only the ReLU may read its result. The result is empty for a network that cannot be captured.
    """
    image = torch.full((1, *model.input_size), 0.5, dtype=model.dtype, device=model.device)
    try:
        graph = capture(model, image)
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


@dataclass(frozen=True)
class _BehindProblem(_Problem):
    """A layer with a ReLU after it: its rows x_t, (T, M), and the ReLU."""

    rows: Tensor
    relu: Relu

    def squared_error(self, weight: Tensor) -> float:
        """Σ_t d²_∂f(y_t)(W x_t − y_t)."""
        away = self.relu.differences(self.rows @ weight.mT, self.rows @ self.pre.mT)
        return float(away.square().sum())


def constrain_behind(
    weight: Tensor,
    rows: Tensor,
    relu: Relu,
    error: float = 1e-2,
    measure: str = "spectral",
    *,
    tolerance: float = 1e-3,
    iterations: int = 150,
) -> Solution:
    """The weight with the smallest measure in {W : Σ_t d²_∂f(y_t)(W x_t − y_t) ≤ error² Σ_t ‖W_pre x_t‖²}.

    Args:
        weight: W_pre, (O, …), of a layer without groups.
        rows: x_t, (T, M).
        relu: the ReLU after the layer.
        error: relative output error, as of :func:`lipcert.certvit.constrain_matrix`.
        measure: "spectral", "l1" or "nuclear".
        tolerance: relative duality gap at which the iteration stops.
        iterations: half the largest number of iterations of Douglas–Rachford.
    """
    started = time.perf_counter()
    pre, x = weight.detach().flatten(1).double(), rows.double()
    energy = float((x @ pre.mT).square().sum())
    problem = _BehindProblem(pre, _Inputs(x.mT @ x), energy, error, x, relu)
    point = _Point(pre, status="zero weight")
    if energy:
        point = _minimise_behind(problem, problem.allowed**0.5, measure, tolerance, iterations)
        point = _rounded(point, problem, weight.dtype)
    result = point.weight.to(weight.dtype)
    return Solution(
        weight=result.reshape(weight.shape),
        norm_before=float(dense_norm(pre)),
        norm_after=float(dense_norm(result)),
        error_asked=error,
        error_reached=(problem.squared_error(result.double()) / energy) ** 0.5 if energy else 0.0,
        sparsity=float((result == 0).double().mean()),
        iterations=point.iterations,
        gap=point.gap,
        status=point.status,
        seconds=time.perf_counter() - started,
        measure=measure,
    )


def _minimise_behind(problem: _BehindProblem, radius: float, measure: str, tolerance: float, iterations: int) -> _Point:
    """Minimises over a sequence of ellipsoids within the set, see the head of this file.

    Neighbouring ellipsoids differ little, so each gets a few iterations, which continue those of the one before. These
    become twice as many where the norm no longer falls.
    """
    chosen = MEASURES[measure]
    problem, columns = _spanned(problem) if chosen.rotates else (problem, None)
    before = problem.rows @ problem.pre.mT
    best, value, lower = _Point(problem.pre), chosen.value(problem.pre), 0.0
    at, taken, gap, momentum, each = problem.pre, 0, 1.0, 1, min(_EACH, iterations)
    start = _Start()
    for _ in range(_ROUNDS):
        around = inner(at, before, problem.rows, problem.relu, radius)
        if around.highest < 0:
            lower = max(lower, -around.highest / chosen.dual(around.outward))
        gap = _gap(value, lower)
        left = _BEHIND * iterations - taken
        if gap <= tolerance or left <= 0 or each > iterations:
            break
        point = _within(problem, around, radius, measure, _FINER * tolerance, min(each, left), start)
        if point is not None:
            taken, start = taken + point.iterations, _Start(point.step, point.governing)
        if point is not None and (reached := chosen.value(point.weight)) < value:
            momentum += 1
            at = point.weight + (momentum - 1) / (momentum + 2) * (point.weight - best.weight)
            best, value = point, reached
        else:  # restart from the best point; after a restart, with more iterations
            each *= 2 if momentum == 1 else 1
            at, momentum = best.weight, 1
    if not chosen.rotates:  # the result has zeros
        around = inner(best.weight, before, problem.rows, problem.relu, radius)
        point = _within(problem, around, radius, measure, _FINER * tolerance, _EACH, replace(start, zeros=True))
        if point is not None and chosen.value(point.weight) <= (1 + _DEARER) * value:
            best, gap = point, _gap(chosen.value(point.weight), lower)
    status = "converged" if gap <= tolerance else "iteration limit"
    weight = best.weight if columns is None else best.weight @ columns.mT
    return replace(best, weight=weight, iterations=taken, gap=gap, status=status)


def _spanned(problem: _BehindProblem) -> tuple[_BehindProblem, Tensor | None]:
    """The problem in an orthonormal basis (M, K) of its rows and those of W_pre; the same one, and None, if K is M.

    Every iterate consists of such rows, and neither norms nor outputs depend on the basis.
    """
    spanning = torch.cat([problem.rows, problem.pre])
    if len(spanning) >= spanning.shape[1]:
        return problem, None
    basis = torch.linalg.qr(spanning.mT).Q
    rows = problem.rows @ basis
    return replace(problem, pre=problem.pre @ basis, rows=rows, inputs=_Inputs(rows.mT @ rows)), basis


def _within(
    problem: _BehindProblem,
    around: Inner,
    radius: float,
    measure: str,
    tolerance: float,
    iterations: int,
    start: _Start,
) -> _Point | None:
    """The smallest norm in an ellipsoid within the set; None if it is empty."""
    centre = _least_squares(problem, around.cross)
    room = radius * radius - _squared_distance(problem, around, centre)
    if room <= 0:
        return None
    return _minimise(centre, problem.inputs, room**0.5, measure, tolerance, iterations, start)


def _least_squares(problem: _BehindProblem, cross: Tensor) -> Tensor:
    """The minimiser of Σ_t ‖W x_t − P_t‖² that is nearest to W_pre: W_pre + (C − W_pre S) S⁺ with C = Σ_t P_t x_tᵀ."""
    eigenvalues, basis = problem.inputs.spectrum
    usable = eigenvalues > eigenvalues[-1] * len(eigenvalues) * torch.finfo(eigenvalues.dtype).eps
    basis = basis[:, usable]
    return problem.pre + ((cross - problem.pre @ problem.inputs.second) @ basis / eigenvalues[usable]) @ basis.mT


def _squared_distance(problem: _BehindProblem, around: Inner, weight: Tensor) -> float:
    """Σ_t ‖W x_t − P_t‖²."""
    quadratic = float(((weight @ problem.inputs.second) * weight).sum())
    return max(0.0, quadratic - 2 * float((weight * around.cross).sum()) + around.energy)


def constrain_network(
    model: Model, batches: Iterable[Tensor], error: float, show: Callable[[str], object] = lambda path: None
) -> tuple[dict[str, Tensor], dict[str, Relu]]:
    """New weights of the layers with a ReLU after them, by path, and these ReLUs; the model stays as it is.

    Convolutions with groups are left out. A layer sees as many rows of every batch as make up four times its inputs
    over all of them, but at least 4096, drawn at random.

    Args:
        model: in evaluation mode.
        batches: images in [0, 1].
        error: relative output error of each layer.
        show: called with the path of each layer before it is solved.
    """
    modules = {
        path: module
        for path, module in model.net.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d)) and getattr(module, "groups", 1) == 1
    }
    behind = relus(model, modules)
    batches = list(batches)
    samples: dict[str, list[Tensor]] = {path: [] for path in behind}
    generator = torch.Generator().manual_seed(0)

    def see(path: str, rows: Tensor) -> None:
        count = max(4096, 4 * rows.shape[2]) // len(batches) + 1
        chosen = torch.randperm(rows.shape[1], generator=generator)[:count]
        samples[path].append(rows[0, chosen].float())

    with evaluating(model), torch.no_grad(), watching({path: modules[path] for path in behind}, see):
        for images in batches:
            model(images)
    solutions = {}
    for path, relu in behind.items():
        show(path)
        solutions[path] = constrain_behind(modules[path].weight, torch.cat(samples[path]), relu, error).weight
    return solutions, behind
