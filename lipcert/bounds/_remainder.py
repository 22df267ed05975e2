"""Remainder rules: bounds on the difference between an operation and its linearisation at the nominal point.

For an operation f at h and a deviation Δ of its operands, R(Δ) = f(h + Δ) − f(h) − J Δ with J the Jacobian of f at h.
Linear operations have R = 0 and need no rule. :class:`Remainder` is the base class of all rules; :class:`Smooth`,
:class:`Bilinear` are bounds that several rules share, and those of :mod:`._piecewise` and :mod:`._tokens`.

The first axis of every tensor is the image: nominal values have shape (N, ...), every ρ and every answer has shape
(N,). The bounds are sums and products of non-negative float64 numbers, so their rounding errors are relative and far
below the 1e-6 by which the certificate is reduced in the end.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lipcert.bounds._registry import RULES, NoAnswer, answer_of, check_entries, registered
from lipcert.graph import Node
from lipcert.numerics import at_most, l2_norm, times

if TYPE_CHECKING:
    from typing_extensions import Self

Against = Callable[[Sequence[Tensor]], Tensor]
RemainderClass = TypeVar("RemainderClass", bound="type[Remainder]")

# Far more than rounding in float64 takes of the entries of a 2 × 2 matrix and its eigenvectors.
ROUNDED = 1e-9
# The steps in which largest_share halves the range of τ.
_HALVINGS = 10


class Remainder(ABC):
    """One nonlinear operation, linearised at the nominal point of N images: upper bounds on its remainder R.

    A rule must define :meth:`norm` and :meth:`against`. The other answers are optional and let certificates use more
    of what the rule knows. Every answer must be non-decreasing in every ρ.

    Attributes:
        entrywise: the operation is applied entry by entry to one operand, and the rule uses a bound on the deviation of
            any single entry.
        sums, contracts: whether the class defines :meth:`total` and :meth:`contracted`.
        nonsmooth: the operation is not differentiable everywhere; near such points R is as large as the deviation.

    Args:
        node: the captured operation.
        operands: the nominal values of ``node.operands``, each of shape (N, ...).
        result: the nominal value of the result, shape (N, ...).

    Raises:
        NoAnswer: the rule does not cover these arguments of the operation.
    """

    entrywise: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    contracts: ClassVar[bool] = False
    nonsmooth: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.sums, cls.contracts = cls.total is not Remainder.total, cls.contracted is not Remainder.contracted

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):  # noqa: B027
        """Keeps what the bounds need of the nominal values."""

    @classmethod
    def block(cls, node: Node) -> int:
        """The number of consecutive entries of the operand for which the rule uses a separate bound; 0 for none.

        The blocks start at the first entry. If a bound on the norm of the deviation of every block is known, it is
        appended to the ``rho`` of all answers.
        """
        return int(cls.entrywise)

    def only(self, index: Tensor) -> Self | None:
        """The rule at the images with the given indices, for rules that take long to make; None to make it anew."""
        return None

    def uncertain(self, noise: Tensor) -> Tensor:
        """Whether rounding errors of norm at most ``noise``, shape (N,), may make the Jacobian jump, shape (N,)."""
        return torch.zeros_like(noise, dtype=torch.bool)

    @abstractmethod
    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        """An upper bound on ‖R‖, shape (N,).

        Args:
            rho: upper bounds on the norms of the deviations of the operands, each of shape (N,), followed by the bounds
                for :meth:`block` where they are known.
        """

    @abstractmethod
    def against(self, direction: Tensor) -> Against:
        """A function ρ ↦ upper bound on −⟨direction, R⟩, at least 0, shape (N,).

        It is smaller than ‖direction‖ · norm(ρ): curvature counts neither where the direction vanishes, nor where it
        changes the inner product in the other sense.

        Args:
            direction: has the shape of the result.
        """

    def contracted(self, direction: Tensor, rho: Sequence[Tensor], likely: Tensor | None = None) -> Contracted | None:
        """A bound on −⟨direction, R⟩ by norms ‖Mδ‖ of linear maps M of the deviations, within ``rho``; None if unknown.

        M combines the direction with the second derivative of the operation. With a Jacobian G in front of the
        operation, ‖M G‖ is often much smaller than ‖M‖ ‖G‖.

        Args:
            direction: has the shape of the result.
            rho: as for :meth:`norm`.
            likely: a deviation of the first operand near which the bound should be small; 0 by default. The bound holds
                for every deviation within ``rho``.
        """
        return None

    def total(self, weight: Tensor, rho: Sequence[Tensor], size: Tensor | None = None) -> Tensor:
        """An upper bound on Σ w_i |R_i|, shape (N,), for w ≥ 0 of shape (N, entries); ∞ if unknown.

        ``size`` is a bound on ‖√w ∘ δ‖ for the deviation δ of the operand, shape (N,), if one is known.

        After a linear map A, the remainder has norm at most Σ_i ‖column i of A‖ |R_i|. That is often much smaller than
        ‖A‖ · norm(ρ): A stretches only few directions by its norm, and they are no single entries.
        """
        return torch.full_like(rho[0], math.inf)


def remainder(*targets: Any) -> Callable[[RemainderClass], RemainderClass]:
    """Registers a subclass of :class:`Remainder` for operations; targets as for :func:`~lipcert.bounds.rule`.

    Raises:
        TypeError: the class is no subclass of :class:`Remainder`.
    """

    def register(rule: RemainderClass) -> RemainderClass:
        if not (isinstance(rule, type) and issubclass(rule, Remainder)):
            raise TypeError(f"a remainder rule must be a subclass of lipcert.bounds.Remainder, got {rule!r}")
        return registered("remainder", targets, rule)

    return register


@dataclass(frozen=True)
class Form:
    """A linear map M of the deviation of one operand of an operation, at N images.

    Attributes:
        function: (δ, *tensors) ↦ Mδ, from (N, *shape of the operand) to (N, ...), for autograd.
        tensors: the coefficients of M, each with the images as its first axis.
        norm: upper bounds on ‖M‖, shape (N,).
        size: upper bounds on the norm of M with the absolute values of its coefficients, for rounding errors.
        operand: the index of the operand.
    """

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    norm: Tensor
    size: Tensor
    operand: int = 0

    def __call__(self, deviation: Tensor) -> Tensor:
        return self.function(deviation, *self.tensors)

    def only(self, index: Tensor | slice) -> Form:
        """The form at the images with the given indices."""
        tensors = tuple(tensor[index] for tensor in self.tensors)
        return Form(self.function, tensors, self.norm[index], self.size[index], self.operand)

    @classmethod
    def weights(cls, scale: Tensor) -> Form:
        """δ ↦ scale ∘ δ."""
        largest = per_image(scale).abs().amax(1)
        return cls(torch.mul, (scale,), largest, largest)


@dataclass(frozen=True)
class Contracted:
    """The answer ``contracted`` of a rule.

    Attributes:
        forms: maps M.
        function: (ρ, ‖Mδ‖ for each M, *tensors) ↦ an upper bound on −⟨direction, R⟩ − ⟨linear, δ⟩, shape (N,).
        tensors: the coefficients of the bound, each with the images as its first axis.
        linear: has the shape of the first operand, whose deviation is δ; None for 0.
    """

    forms: tuple[Form, ...]
    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    linear: Tensor | None = None

    def bound(self, rho: Sequence[Tensor], sizes: Sequence[Tensor]) -> Tensor:
        """The upper bound, from ρ and ‖Mδ‖ for each M."""
        return self.function(rho, sizes, *self.tensors)

    def only(self, index: Tensor) -> Contracted:
        """The bound at the images with the given indices, without forms and linear term."""
        return Contracted((), self.function, tuple(tensor[index] for tensor in self.tensors))


def remainder_of(node: Node) -> type[Remainder] | None:
    """The remainder rule of a captured operation; None if it is affine in its image-dependent operands."""
    if isinstance(node.op, str) and node.dtype is not None and not node.dtype.is_floating_point:
        raise NoAnswer(f"rounds to {node.dtype}")
    check_entries(node)
    rule = RULES.get(node.op)
    if rule is not None and rule.linear is not None and rule.linear(node):
        return None
    return answer_of(node.op, "remainder")


def per_image(tensor: Tensor) -> Tensor:
    """The tensor of shape (N, ...) with shape (N, entries)."""
    return tensor.reshape(len(tensor), -1)


def worst(weights: Tensor, factors: Tensor) -> Tensor:
    """The largest product weight · factor per image, shape (N,); ∞ where a weight is ∞."""
    return at_most(weights * factors).amax(1)


class Smooth(Remainder):
    """φ applied entry by entry with |φ''| ≤ c: R_i = ½ φ''(ξ_i) δ_i² by Taylor's theorem.

    Norm: if |δ_i| ≤ p_i, then ‖R‖ ≤ max(½ c_i p_i) ‖δ‖, and ‖R‖ ≤ ‖½ c p²‖. As ξ_i is within p_i of z_i, c_i may be the
    supremum over |t| ≥ |z_i| − p_i, which ``envelope`` gives.

    Against g: −g_i R_i ≤ w_i δ_i² with w_i = ½|g_i| c_i⁺, c_i⁺ ≥ φ'', where g_i < 0, and w_i = ½ g_i c_i⁻, c_i⁻ ≥ −φ'',
    where g_i > 0. With t_i = δ_i² ≤ p_i² and Σ t_i ≤ ρ², Σ w_i t_i is largest if the largest w_i get t_i = p_i².

    Total: Σ w_i |R_i| ≤ Σ ½ w_i c_i t_i is bounded in the same way, and it is at most ½ max c ‖√w ∘ δ‖².

    A subclass whose remainder has other parts, as at breakpoints, must add them to all four answers: ``norm``,
    ``against``, ``contracted`` and ``total``. It reads bounds on entries with :func:`each_entry`.

    Attributes:
        curvature: an upper bound on |φ''|.
        downward: an upper bound on −φ'', if it is smaller.
    """

    curvature: ClassVar[float]
    downward: ClassVar[float] = math.inf
    entrywise = True
    _latest: tuple[Tensor, Tensor] | None = None

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        self.z = per_image(operands[0])
        self.size = self.z.abs()

    def envelope(self, distance: Tensor) -> Tensor:
        """A non-increasing upper bound on |φ''(t)| over |t| ≥ distance ≥ 0."""
        return torch.full_like(distance, self.curvature)

    def second(self, reach: Tensor) -> Tensor:
        """Upper bounds on |φ''| within ``reach`` of z, both of shape (N, entries)."""
        return self.envelope((self.size - reach).clamp_min(0))

    def _local(self, rho: Sequence[Tensor]) -> Tensor:
        """:meth:`second`, computed once for all answers at one ρ."""
        if self._latest is None or self._latest[0] is not rho[-1]:
            self._latest = rho[-1], self.second(each_entry(rho))
        return self._latest[1]

    def _signed(self, rho: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Upper bounds on φ'' and on −φ'' within p of z, at least 0."""
        local = self._local(rho)
        return local, local.clamp_max(self.downward)

    def _weights(self, direction: Tensor, rho: Sequence[Tensor]) -> Tensor:
        g = per_image(direction)
        upward, downward = self._signed(rho)
        return torch.where(g < 0, -g * upward, g * downward) / 2

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        steep = at_most(self._local(rho) / 2 * each_entry(rho))
        return torch.minimum(steep.amax(1) * rho[0], l2_norm(at_most(steep * each_entry(rho)), 1))

    def against(self, direction: Tensor) -> Against:
        return lambda rho: largest_share(self._weights(direction, rho), rho[0], each_entry(rho))

    def contracted(self, direction: Tensor, rho: Sequence[Tensor], likely: Tensor | None = None) -> Contracted | None:
        form = Form.weights(self._weights(direction, rho).sqrt().reshape(direction.shape))
        return Contracted((form,), lambda rho, sizes: sizes[0].square())

    def total(self, weight: Tensor, rho: Sequence[Tensor], size: Tensor | None = None) -> Tensor:
        local = self._local(rho) / 2
        share = largest_share(weight * local, rho[0], each_entry(rho))
        return share if size is None else torch.minimum(share, times(local.amax(1), times(size, size)))


def each_entry(rho: Sequence[Tensor]) -> Tensor:
    """The bounds on the deviations of all entries, shape (N, entries), or on that of any single one, shape (N, 1)."""
    return rho[-1] if rho[-1].dim() == 2 else rho[-1][:, None]


def largest_share(weight: Tensor, rho: Tensor, most: Tensor) -> Tensor:
    """A bound on the largest Σ w_i t_i over 0 ≤ t_i ≤ c_i = most_i² with Σ t_i ≤ ρ², shape (N,), for w ≥ 0.

    For every τ ≥ 0, Σ w_i t_i ≤ τ Σ t_i + Σ (w_i − τ)₊ t_i ≤ τ ρ² + Σ (w_i − τ)₊ c_i. This is smallest at 0 or at the
    w_i where the c_j of larger w_j have added up to ρ². Halving the range of τ finds it, or a w_i close to it.
    """
    square, top = rho.square()[:, None], weight.amax(1, keepdim=True)
    whole = at_most(top * square)[:, 0]
    if bool((most >= rho[:, None]).all()):  # one entry may take all
        return whole
    caps = torch.minimum(most.square(), square)
    with torch.no_grad():  # the derivative by τ is 0 at the smallest bound
        low, high = torch.zeros_like(top), top
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            filled = torch.where(weight > middle, caps, 0.0).sum(1, keepdim=True) > square
            low, high = torch.where(filled, middle, low), torch.where(filled, high, middle)
        high = torch.where(weight <= high, weight, low).amax(1, keepdim=True)

    def bound(tau: Tensor) -> Tensor:
        budget = torch.where(tau > 0, tau * square, 0.0)  # 0 · ∞ would be NaN
        return at_most(budget + ((weight - tau).clamp_min(0) * caps).sum(1, keepdim=True))[:, 0]

    return torch.minimum(whole, torch.minimum(bound(low), bound(high)) * (1 + ROUNDED))


def smooth(*targets: Any, curvature: float, downward: float = math.inf) -> None:
    """Registers entrywise functions with upper bounds on |φ''| and, if that is smaller, on −φ''."""
    remainder(*targets)(
        type("Smooth", (Smooth,), {"__doc__": Smooth.__doc__, "curvature": curvature, "downward": downward})
    )


class Bilinear(Remainder):
    """A function f(x, y) that is linear in x and in y: R = f(δx, δy), with ‖f(x, y)‖ ≤ K‖x‖‖y‖.

    Attributes:
        factor: K.
        factors: the indices of x and y among the operands.
    """

    factor = 1.0
    factors = (0, 1)

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        x, y = self.factors
        return self.factor * rho[x] * rho[y]

    def against(self, direction: Tensor) -> Against:
        size = l2_norm(per_image(direction), 1)
        return lambda rho: size * self.norm(rho)
