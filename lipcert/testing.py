"""Checks for rules of your own: is the bound above everything that can be measured?

>>> @lipcert.bounds.rule(my_operation)
... def answer(call, x):
...     "Why the constant holds."
...     return lipcert.bounds.Value(x.shape, 2 * x.lip)
>>> lipcert.testing.check_rule(my_operation, (3, 4))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lipcert.bounds import analyze
from lipcert.errors import InputError

# Jacobians and quotients are computed in float64; an exact bound may lie below them by that rounding.
_SLACK = 1 + 1e-9


@dataclass(frozen=True)
class Contract:
    """What :func:`check_rule` measured.

    Attributes:
        bound: the Lipschitz constant that the rules give.
        quotient: the largest ‖f(x) − f(y)‖/‖x − y‖ over pairs of sampled points.
        jacobian: the largest norm of a Jacobian at sampled points, by dense singular values.
        ascent: the largest that gradient ascent on that norm has found.
    """

    bound: float
    quotient: float
    jacobian: float
    ascent: float

    @property
    def tightness(self) -> float:
        """How much of the bound was reached, at most 1; little means a loose bound, or an attack that is too weak."""
        return max(self.quotient, self.jacobian, self.ascent) / self.bound if self.bound > 0 else 1.0


def check_rule(
    function: Callable[[Tensor], Tensor] | nn.Module,
    size: tuple[int, ...],
    *,
    points: int = 12,
    steps: int = 8,
    seed: int = 0,
) -> Contract:
    """Attacks the bound that the rules give for a function of one tensor.

    A check that passes is no proof: it finds mistakes, and the docstring of the rule carries the proof.

    Args:
        function: an operation, or a module, of values in [0, 1], shape (1, *size); it is run in float64.
        size: shape of the input without the batch, small enough for dense Jacobians (some hundred entries).
        points: how many points are sampled: inside the box [0, 1]^size, in its corners, on its faces and near 0.
        steps: steps of gradient ascent from the worst of them.
        seed: of the random numbers.

    Returns:
        The figures, for a look at how tight the bound is.

    Raises:
        AssertionError: something measured exceeds the bound; the message says what.
        InputError: the bound is not finite, so there is nothing to check.
        UnsupportedOperation: an operation has no rule.
    """
    module = _Applied(function).double().eval()
    bound = float(analyze(module, size).output.lip)
    if not bound < float("inf"):
        raise InputError("the rules give no finite constant for this function; bound its input, as a sigmoid does")
    generator = torch.Generator().manual_seed(seed)
    inputs = [_point(size, index, generator) for index in range(points)]
    with torch.no_grad():
        results = [module(x) for x in inputs]
        quotient = max(
            _quotient(results[i] - results[j], inputs[i] - inputs[j]) for i in range(points) for j in range(i)
        )
    norms = [float(torch.linalg.matrix_norm(_jacobian(module, x), 2)) for x in inputs]
    ascent = _ascend(module, inputs[norms.index(max(norms))], steps)
    found = Contract(bound, quotient, max(norms), ascent)
    for what in ("quotient", "jacobian", "ascent"):
        value = getattr(found, what)
        assert value <= bound * _SLACK, f"the bound is {bound:.6g}, and the check by {what} has found {value:.6g}"
    return found


class _Applied(nn.Module):
    """A function as a module, with a parameter to tell its type from."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function
        self.marker = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _point(size: tuple[int, ...], index: int, generator: torch.Generator) -> Tensor:
    """By turns a point inside, a corner, a point of some faces, and a small one, shape (1, *size)."""
    x = torch.rand(1, *size, generator=generator, dtype=torch.float64)
    return (x, x.round(), (2 * x - 0.5).clamp(0, 1), x * 2.0 ** -(2 + index))[index % 4]


def _quotient(moved: Tensor, by: Tensor) -> float:
    return float(moved.norm() / by.norm()) if by.norm() > 0 else 0.0


def _jacobian(module: nn.Module, x: Tensor) -> Tensor:
    full = torch.autograd.functional.jacobian(lambda point: module(point).flatten(), x)
    return full.reshape(-1, x.numel())


def _ascend(module: nn.Module, x: Tensor, steps: int) -> float:
    """The largest Jacobian norm on a way up inside the box; the start's where there is no second derivative."""
    best, stride = 0.0, 0.3
    with sdpa_kernel(SDPBackend.MATH):  # the other forms of attention have no second derivative
        for _ in range(steps + 1):
            left, values, right = torch.linalg.svd(_jacobian(module, x), full_matrices=False)
            best = max(best, float(values[0]))
            point = x.clone().requires_grad_()
            (first,) = torch.autograd.grad(module(point).flatten() @ left[:, 0], point, create_graph=True)
            if not first.requires_grad:
                break
            try:
                (second,) = torch.autograd.grad(first.flatten() @ right[0], point, allow_unused=True)
            except RuntimeError as error:
                if "not implemented" not in str(error):
                    raise
                break
            if second is None or not second.abs().max() > 0:
                break
            x, stride = (x + stride * second / second.abs().max()).clamp(0, 1), 0.7 * stride
    return best
