"""Attacks on the answers of rules: what tests of built-in rules, and the fuzzer, hold them to."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lipcert.bounds import (
    RULES,
    Analysis,
    Boxes,
    NoAnswer,
    Operand,
    Walk,
    analyze,
    kept_whole,
    local_error,
    remainder_of,
)
from lipcert.bounds.testing import _Applied
from lipcert.errors import InputError
from lipcert.graph import Graph, Node, capture, explicit_attention, needed, run
from lipcert.numerics import DTYPES, Format

# Jacobians and quotients are computed in float64. Rounding may raise them slightly above a tight bound.
_SLACK = 1 + 1e-9
# Radii of the balls for boxes, and of the deviations for remainders.
_BALLS = (1e-2, 0.3)
_DEVIATIONS = (1e-2, 1.0)


def answers(question: str) -> dict[Any, Any]:
    """The answers to one question, by operation."""
    return {key: answer for key, rule in RULES.items() if (answer := getattr(rule, question)) is not None}


@dataclass(frozen=True)
class Contract:
    """The measurements of :func:`check_rule`.

    Attributes:
        bound: the Lipschitz constant given by the rules.
        quotient: the largest ‖f(x) − f(y)‖/‖x − y‖ over pairs of sampled points.
        jacobian: the largest norm of a Jacobian at sampled points, by dense singular values.
        ascent: the largest norm of a Jacobian found by gradient ascent.
        box: the largest measured deviation of an entry, as a fraction of its box in a ball.
        remainder: the largest measured remainder of a linearisation, as a fraction of its bound.
        gain: the largest norm of the absolute values of a Jacobian, as a fraction of its bound.
        rounding: the largest rounding error in float32, float16 and bfloat16, as a fraction of its bound. For this and
            the three attributes above, None means that an operation has no finite bound.
    """

    bound: float
    quotient: float
    jacobian: float
    ascent: float
    box: float | None = None
    remainder: float | None = None
    gain: float | None = None
    rounding: float | None = None

    @property
    def tightness(self) -> float:
        """The largest measurement divided by the bound, at most 1; small for a loose bound or a weak attack."""
        return max(self.quotient, self.jacobian, self.ascent) / self.bound if self.bound > 0 else 1.0


def check_rule(
    function: Callable[[Tensor], Tensor] | nn.Module,
    size: tuple[int, ...],
    *,
    points: int = 12,
    steps: int = 8,
    seed: int = 0,
    slack: float = _SLACK - 1,
    analysis: Analysis | None = None,
) -> Contract:
    """Attacks the bounds that the rules give for a function of one tensor.

    Lipschitz constants are compared with difference quotients, Jacobians and gradient ascent on their norm; boxes with
    images in a ball; remainders and linearity with ascent on the deviation; bounds on Jacobians with dense Jacobians;
    rounding errors with the operations in float32, float16 and bfloat16.

    Passing the check is not a proof. The check finds mistakes; the docstring of the rule contains the proof.
    """
    module = applied(function)
    analysis = analyze(module, size) if analysis is None else analysis
    bound = float(analysis.output.lip)
    if not bound < float("inf"):
        raise InputError("the rules give no finite constant for this function; bound its input, as a sigmoid does")
    generator = torch.Generator().manual_seed(seed)
    inputs = [_point(size, index, generator) for index in range(points)]
    with torch.no_grad():
        results = [module(x) for x in inputs]
        quotient = max(
            _quotient(results[i] - results[j], inputs[i] - inputs[j]) for i in range(points) for j in range(i)
        )
    jacobians = [float(torch.linalg.matrix_norm(_jacobian(module, x), 2)) for x in inputs]
    ascent = _ascend(module, inputs[jacobians.index(max(jacobians))], steps)
    for quantity, value in (("quotient", quotient), ("jacobian", max(jacobians)), ("ascent", ascent)):
        assert value <= bound * (1 + slack), (
            f"the bound is {bound:.6g}, and the check by {quantity} has found {value:.6g}"
        )
    images = torch.stack(inputs[:4])
    box = check_box(module, analysis, images, generator)
    graph = _captured(module, images[0], partial(kept_whole, question="remainder"))
    remainder, gain = _check_remainders(graph, images), _check_gains(graph, images)
    return Contract(bound, quotient, max(jacobians), ascent, box, remainder, gain, _check_rounding(module, images))


def applied(function: Callable[[Tensor], Tensor] | nn.Module) -> nn.Module:
    """A function as a module in float64."""
    return _Applied(function).double().eval()


def _point(size: tuple[int, ...], index: int, generator: torch.Generator) -> Tensor:
    """Alternately an interior point, a corner, a point on faces, and a point near 0, shape (1, *size)."""
    x = torch.rand(1, *size, generator=generator, dtype=torch.float64)
    return (x, x.round(), (2 * x - 0.5).clamp(0, 1), x * 2.0 ** -(2 + index))[index % 4]


def _quotient(moved: Tensor, by: Tensor) -> float:
    return float(moved.norm() / by.norm()) if by.norm() > 0 else 0.0


def _jacobian(module: nn.Module, x: Tensor) -> Tensor:
    full = torch.autograd.functional.jacobian(lambda point: module(point).flatten(), x)
    return full.reshape(-1, x.numel())


def _ascend(module: nn.Module, x: Tensor, steps: int) -> float:
    """The largest Jacobian norm along gradient ascent inside the box; stops if there is no second derivative."""
    best, stride = 0.0, 0.3
    with sdpa_kernel(SDPBackend.MATH):  # the other forms of attention have no second derivative
        for _ in range(steps + 1):
            u, values, vh = torch.linalg.svd(_jacobian(module, x), full_matrices=False)
            best = max(best, float(values[0]))
            point = x.clone().requires_grad_()
            result = module(point)
            if not result.requires_grad:
                break
            (first,) = torch.autograd.grad(result.flatten() @ u[:, 0], point, create_graph=True)
            if not first.requires_grad:
                break
            try:
                (second,) = torch.autograd.grad(first.flatten() @ vh[0], point, allow_unused=True)
            except RuntimeError as error:
                if "not implemented" not in str(error):
                    raise
                break
            if second is None or not second.abs().max() > 0:
                break
            x, stride = (x + stride * second / second.abs().max()).clamp(0, 1), 0.7 * stride
    return best


def check_box(
    module: nn.Module, analysis: Analysis, images: Tensor, generator: torch.Generator, draws: int = 5
) -> float | None:
    """Attacks the boxes of a network's output in balls around images, shape (N, 1, ...)."""
    boxes, shares = Boxes(analysis), []
    nominal = boxes.nominal(images[:, 0])
    for radius in _BALLS:
        output = Walk(boxes, nominal, torch.full((len(images),), radius, dtype=torch.float64)).output
        for _ in range(draws):
            delta = torch.randn(images.shape, generator=generator, dtype=torch.float64)
            delta = _of_length(delta, radius)
            delta = (images + delta).clamp(0, 1) - images
            with torch.no_grad():
                moved = torch.stack([module(x + d) - module(x) for x, d in zip(images, delta, strict=True)])
            slack = 1e-12 * (1 + output.value.abs())
            for side, limit in ((moved, output.up), (-moved, output.down)):
                assert bool((side <= limit + slack).all()), f"an entry leaves its box in a ball of radius {radius:g}"
                shares += (side / limit)[limit.isfinite() & (limit > slack)].tolist()
            far = norms(moved) <= output.constant * norms(delta) * _SLACK + 1e-12
            assert bool(far.all()), f"the output moves further than its constant in a ball of radius {radius:g} allows"
    return max(shares, default=None)


class Linearised:
    """One operation at N nominal points, and attacks on its remainder rule.

    Attributes:
        rule: the operation's remainder rule; None for a linear operation.
    """

    def __init__(self, node: Node, values: Sequence[Mapping[Node, Tensor]]):
        self.node = node
        self.distinct = list(dict.fromkeys(node.operands))
        self.nominal = [torch.stack([nominal[operand] for nominal in values]) for operand in self.distinct]
        self.result = torch.stack([nominal[node] for nominal in values])
        self.positions = [self.distinct.index(operand) for operand in node.operands]
        self.size = 1 + self.result.abs().amax()
        rule = remainder_of(node)
        with torch.no_grad():
            self.rule: Any = rule and rule(node, [self.nominal[i] for i in self.positions], self.result)

    @property
    def points(self) -> int:
        """N."""
        return len(self.nominal[0])

    def evaluate(self, *operands: Tensor) -> Tensor:
        """The operation on many values of its distinct operands, each of shape (several · N, *shape)."""

        def one(*operands: Tensor) -> Any:
            return run((self.node,), dict(zip(self.distinct, operands, strict=True)))[self.node]

        results: Tensor = torch.vmap(one)(*operands)
        return results

    @cached_property
    def jacobians(self) -> list[Tensor]:
        """For each distinct operand the Jacobians at the nominal points, shape (N, entries, entries of the operand)."""
        matrices = []
        for place, value in enumerate(self.nominal):
            basis = torch.eye(value[0].numel(), dtype=torch.float64).repeat_interleave(self.points, 0)
            tangents = [torch.zeros(len(basis), *other.shape[1:], dtype=torch.float64) for other in self.nominal]
            tangents[place] = basis.reshape(tangents[place].shape)
            nominal = tuple(repeated(other, basis) for other in self.nominal)
            columns = torch.func.jvp(self.evaluate, nominal, tuple(tangents))[1]
            matrices.append(columns.reshape(-1, self.points, self.result[0].numel()).permute(1, 2, 0))
        return matrices

    def remainder(self, deltas: Sequence[Tensor]) -> Tensor:
        """R for deviations of the distinct operands, each of shape (several · N, *shape)."""
        nominal = [repeated(value, delta) for value, delta in zip(self.nominal, deltas, strict=True)]
        base = self.evaluate(*nominal)
        moved = self.evaluate(*(value + delta for value, delta in zip(nominal, deltas, strict=True)))
        linear = torch.zeros_like(moved)
        for jacobian, delta in zip(self.jacobians, deltas, strict=True):
            columns = delta.reshape(-1, self.points, jacobian.shape[2])
            linear = linear + torch.einsum("nij,snj->sni", jacobian, columns).reshape(moved.shape)
        return torch.where(moved == base, 0.0, moved - base) - linear  # masked entries are −∞

    def starts(self, radii: Sequence[float]) -> list[Tensor]:
        """Deviations of norm ρ, each of shape (several · N, *shape).

        They are random, parallel and antiparallel to the operand, in its largest entry, and in its entry nearest zero.
        """
        choices = [[_seeded(*value.shape, seed=seed) for value in self.nominal] for seed in (1, 2)]
        finite = [value.nan_to_num(posinf=0.0, neginf=0.0) for value in self.nominal]  # masked entries are −∞
        choices += [[sign * value + 1e-9 for value in finite] for sign in (1, -1)]
        for value in self.nominal:
            flat = value.reshape(self.points, -1)
            for entry in (flat.argmax(1), flat.abs().argmin(1)):
                single = torch.zeros_like(flat).scatter_(1, entry[:, None], 1.0).reshape(value.shape)
                if all(other.shape == value.shape for other in self.nominal):
                    choices += [[sign * single for _ in self.nominal] for sign in (1, -1)]
        return self.scaled([torch.cat(deltas) for deltas in zip(*choices, strict=True)], radii)

    @staticmethod
    def scaled(deltas: Sequence[Tensor], radii: Sequence[float]) -> list[Tensor]:
        return [_of_length(delta, radius) for delta, radius in zip(deltas, radii, strict=True)]

    def ascent(
        self,
        objective: Callable[[Tensor], Tensor],
        radii: Sequence[float],
        steps: int,
        within: Callable[[list[Tensor]], list[Tensor]] = lambda deltas: deltas,
    ) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yields R and the deviations along gradient ascent on the spheres of radius ρ, from all starts."""
        deltas = within(self.starts(radii))
        for _ in range(steps):
            deltas = [delta.detach().requires_grad_() for delta in deltas]
            remainders = self.remainder(deltas)
            yield remainders.detach(), [delta.detach() for delta in deltas]
            gradients = torch.autograd.grad(objective(remainders).sum(), deltas, allow_unused=True)
            ahead = [
                d.detach() if g is None else torch.where(torch.isfinite(g), g, d.detach())
                for g, d in zip(gradients, deltas, strict=True)
            ]
            deltas = within(self.scaled(ahead, radii))

    def worst(self, objective: Callable[[Tensor], Tensor], radii: Sequence[float], steps: int) -> Tensor:
        """The largest objective(R) that ascent on the spheres of radius ρ finds, shape (N,)."""
        largest = [
            objective(remainder).reshape(-1, self.points).amax(0)
            for remainder, _ in self.ascent(objective, radii, steps)
        ]
        return torch.stack(largest).amax(0).clamp_min(0)

    def radii(self, rho: float) -> list[float]:
        """ρ for the distinct operands: ρ for the first, 2ρ for the second, and so on."""
        return [rho * (1 + index) for index in range(len(self.distinct))]

    def per_operand(self, radii: Sequence[float]) -> list[Tensor]:
        """The radii in the form that rules expect: one tensor per operand, for all points."""
        return [self.result.new_full((self.points,), radii[i]) for i in self.positions]

    def check_norm(self, rho: float, steps: int = 5) -> float:
        """The largest ‖R‖ found by ascent, as a fraction of its bound."""
        radii = self.radii(rho)
        bound = self.rule.norm(self.per_operand(radii))
        assert bound.shape == (self.points,), f"{self.node.name}: a norm for each image, shape (N,), is expected"
        return self._within(self.worst(norms, radii, steps), bound, self.size + rho, "norm")

    def check_against(self, direction: Tensor, rhos: Sequence[float], steps: int = 4) -> float:
        """The largest −⟨direction, R⟩ found by ascent, as a fraction of its bound."""
        answer, shares = self.rule.against(direction), []
        for rho in rhos:
            radii = self.radii(rho)
            attained = self.worst(against(direction), radii, steps)
            size = (self.size + rho) * (1 + norms(direction))
            shares.append(self._within(attained, answer(self.per_operand(radii)), size, "part against a direction"))
        return max(shares)

    def check_linear(self, rho: float) -> None:
        """Checks R = 0 for an operation that is registered as linear."""
        deltas = self.starts(self.radii(rho))
        attained = norms(self.remainder(deltas))
        allowed = 1e-9 * math.sqrt(self.result[0].numel()) * (self.size + sum(delta.abs().sum() for delta in deltas))
        assert bool((attained <= allowed).all()), f"{self.node.name} is registered as linear but is not"

    def _within(self, attained: Tensor, bound: Tensor, size: Tensor | float, quantity: str) -> float:
        """Checks values against bounds; returns the largest value as a fraction of its bound, if that is finite."""
        holds = (attained <= bound * _SLACK + 1e-14 * size) | bound.isinf()
        worst = f"{float(attained[~holds].max()):.6g}" if not holds.all() else ""
        assert bool(holds.all()), (
            f"the remainder of {self.node.name}: its {quantity} is {worst}, above the rule's bound"
        )
        counted = bound.isfinite() & (bound > 1e-12 * size)
        return float((attained[counted] / bound[counted]).max()) if bool(counted.any()) else 0.0


def repeated(value: Tensor, like: Tensor) -> Tensor:
    """Repeats a tensor along its first axis to the length of ``like``."""
    return value.repeat(len(like) // len(value), *[1] * (value.dim() - 1))


def norms(remainder: Tensor) -> Tensor:
    """ℓ2 norms, shape (N,)."""
    return remainder.reshape(len(remainder), -1).norm(dim=1)


def against(direction: Tensor) -> Callable[[Tensor], Tensor]:
    """The function R ↦ −⟨direction, R⟩."""
    return lambda remainder: -(remainder * repeated(direction, remainder)).reshape(len(remainder), -1).sum(1)


def _of_length(delta: Tensor, radius: float) -> Tensor:
    length = norms(delta).reshape(-1, *[1] * (delta.dim() - 1))
    return radius * delta / length.clamp_min(1e-300)


def _seeded(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _captured(module: nn.Module, image: Tensor, whole: Callable[[nn.Module], bool]) -> Graph:
    return needed(explicit_attention(capture(module, image, whole), image.device))


def _check_remainders(graph: Graph, images: Tensor) -> float | None:
    with torch.no_grad():
        values = [run(graph.nodes, {graph.input: image}) for image in images]
    shares = []
    try:
        for node in graph.nodes[1:]:
            if not (node.single and all(operand.single for operand in node.operands)):
                continue
            linearised = Linearised(node, values)
            if linearised.rule is None:
                linearised.check_linear(1.0)
                continue
            direction = _seeded(*linearised.result.shape, seed=3)
            shares += [linearised.check_norm(rho, 3) for rho in _DEVIATIONS]
            shares += [linearised.check_against(g, _DEVIATIONS, 3) for g in (direction, -direction)]
    except NoAnswer:
        return None
    return max(shares, default=0.0)


def _check_gains(graph: Graph, images: Tensor) -> float | None:
    """Compares A of nonlinear operations with the norm of |J| at the images: see :mod:`lipcert.bounds._jacobian`."""
    with torch.no_grad():
        runs = [run(graph.nodes, {graph.input: image}) for image in images]
    shares = []
    for node in graph.nodes[1:]:
        rule = RULES[node.op].jacobian if node.op in RULES else None
        if rule is None or not rule.covers(node):
            continue
        values = {o: torch.stack([values_at[o] for values_at in runs]) for o in (*node.operands, node)}
        for operand in dict.fromkeys(node.operands):
            places = [place for place, o in enumerate(node.operands) if o is operand]
            bounds = sum(rule.bounds(node, place, values)[0] for place in places)
            for values_at, bound in zip(runs, torch.as_tensor(bounds).expand(len(runs)).tolist(), strict=True):
                exact = float(torch.linalg.matrix_norm(_of_operand(node, operand, values_at).abs(), 2))
                assert exact <= bound * _SLACK, f"{node.name}: |J| has norm {exact:.6g}, and the bound is {bound:.6g}"
                shares.append(exact / bound if bound else 1.0)
    return max(shares, default=None)


def _of_operand(node: Node, operand: Node, values: Mapping[Node, Tensor]) -> Tensor:
    """The Jacobian of an operation in one operand, shape (entries of the result, entries of the operand)."""
    fixed = {o: values[o] for o in node.operands if o is not operand}
    jacobian = torch.autograd.functional.jacobian(lambda x: run((node,), {**fixed, operand: x})[node], values[operand])
    return jacobian.reshape(node.entries, operand.entries)


def deployed(node: Node, operands: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Runs an operation in a format, with constants cast, on operands of shape (1, ...); returns float64."""
    remaining = iter(operands)
    args, kwargs = node.arguments(lambda _: next(remaining).to(dtype))

    def cast(tree: Any) -> Any:
        if isinstance(tree, Tensor) and tree.is_floating_point():
            return tree.to(dtype)
        return type(tree)(cast(item) for item in tree) if isinstance(tree, (tuple, list)) else tree

    function = node.function
    if isinstance(function, nn.Module):
        function = copy.deepcopy(function).to(dtype)
    with torch.no_grad():
        result: Tensor = function(*(cast(a) for a in args), **{k: cast(v) for k, v in kwargs.items()})
    return result.double()


def check_rounding(node: Node, exact: Sequence[Tensor], nominal: Sequence[Tensor], fmt: Format) -> float:
    """The largest rounding error of an operation as a fraction of its bound; 0 if the bound is infinite."""
    operands = []
    for near, exact_values in zip(nominal, exact, strict=True):
        away = (near - exact_values).norm()[None] * (1 + 1e-12)
        operands.append(Operand(near[None], away, torch.full_like(away, math.inf)))
    bound = local_error(node, operands, fmt)[0].detach()
    rounded, unrounded = deployed(node, exact, fmt.dtype), deployed(node, exact, torch.float64)
    error = (rounded - unrounded).abs().masked_fill(rounded == unrounded, 0.0)  # −∞ of a mask is exact: ∞ − ∞ is NaN
    assert bound.shape == error.shape, f"the rounding of {node.name}: a bound for each entry is expected"
    assert bool(((error <= bound) | bound.isinf()).all()), (  # 0/0 is NaN
        f"the error of {node.name} in {fmt.dtype} exceeds its bound by {float((error - bound).max()):.6g}"
    )
    return float((error / bound.clamp_min(1e-300)).nan_to_num(0.0).max()) if error.numel() else 0.0


@torch.no_grad()
def _check_rounding(module: nn.Module, images: Tensor) -> float | None:
    graph = _captured(module, images[0], lambda part: kept_whole(part, "rounding") and kept_whole(part))
    shares = [0.0]
    try:
        for image in images:
            values = run(graph.nodes, {graph.input: image})
            for node in graph.nodes[1:]:
                if not (node.single and all(operand.single for operand in node.operands)):
                    continue
                for dtype in DTYPES.values():
                    exact = {o: values[o].to(dtype).double() for o in node.operands}
                    operands = [exact[operand] for operand in node.operands]
                    try:
                        shares.append(
                            check_rounding(node, operands, [values[o] for o in node.operands], Format.of(dtype))
                        )
                    except NotImplementedError:  # torch has no such kernel on this device, so nothing is deployed
                        continue
    except NoAnswer:
        return None
    return max(shares)
