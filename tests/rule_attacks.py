"""Attacks on remainders, Jacobians and rounding errors of single operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lipcert.bounds import (
    RULES,
    remainder_of,
)
from lipcert.bounds.testing import _Applied, _nodes
from lipcert.graph import Node, evaluate

# Jacobians and quotients are computed in float64. Rounding may raise them slightly above a tight bound.
_SLACK = 1 + 1e-9


def answers(question: str) -> dict[Any, Any]:
    """The answers to one question, by operation."""
    return {key: answer for key, rule in RULES.items() if (answer := getattr(rule, question)) is not None}


def applied(function: Callable[[Tensor], Tensor] | nn.Module) -> nn.Module:
    """A function as a module in float64."""
    return _Applied(function).double().eval()


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
            return evaluate((self.node,), dict(zip(self.distinct, operands, strict=True)))[self.node]

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


@torch.no_grad()
def check_gains(function: Callable[[Tensor], Tensor], images: Sequence[Tensor]) -> None:
    """Compares A of nonlinear operations with the norm of |J| at the images: see :mod:`lipcert.bounds._jacobian`."""
    for node, values in _nodes(applied(function), list(images), "remainder"):
        rule = RULES[node.op].jacobian if node.op in RULES else None
        if rule is None or not rule.covers(node):
            continue
        at = {o: values[o][None] for o in (*node.operands, node)}
        for operand in dict.fromkeys(node.operands):
            places = [place for place, o in enumerate(node.operands) if o is operand]
            bound = float(torch.as_tensor(sum(rule.bounds(node, place, at)[0] for place in places)))
            exact = float(torch.linalg.matrix_norm(_of_operand(node, operand, values).abs(), 2))
            assert exact <= bound * _SLACK, f"{node.name}: |J| has norm {exact:.6g}, and the bound is {bound:.6g}"


def _of_operand(node: Node, operand: Node, values: Mapping[Node, Tensor]) -> Tensor:
    """The Jacobian of an operation in one operand, shape (entries of the result, entries of the operand)."""
    fixed = {o: values[o] for o in node.operands if o is not operand}
    jacobian = torch.autograd.functional.jacobian(
        lambda x: evaluate((node,), {**fixed, operand: x})[node], values[operand]
    )
    return jacobian.reshape(node.entries, operand.entries)
