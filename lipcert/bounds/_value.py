"""Bounds on a value of the network over the whole image domain: the abstract value of the global analysis.

A :class:`Value` represents a tensor h(x) computed from an image x in the box [0, 1]^d. It carries bounds that hold for
every image of the box:

* ``lip``: the Lipschitz constant of x ↦ h(x), Frobenius norm over the whole tensor of one image;
* ``magnitude``: the largest absolute entry;
* ``row_norm(axis)``: the largest ℓ2 norm of a vector along an axis, such as one token;
* ``floor``: a lower bound on the entries.

Gates and dot-product attention are not Lipschitz on the whole space; magnitudes and row norms give them finite
constants. Floors give quotients and roots finite constants.

The norm of a linear map is computed as late as possible. A value may be ``offset + map(base)``, with the map kept as a
matrix. So scale, convolution and batch norm, or x + Wx, are folded into one operator before its norm is computed:
‖AB‖ ≤ ‖A‖‖B‖ and ‖I + W‖ ≤ 1 + ‖W‖, usually strictly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from lipcert.errors import InputError
from lipcert.norms import COMPOSED
from lipcert.numerics import INFINITE, Number, Upper, computed_l2_norm, detached, estimated, l2_norm


class LinearMap(Protocol):
    """A linear map represented by its weights."""

    @property
    def norm(self) -> Upper:
        """Upper bound on its operator norm."""

    def scaled(self, scale: Tensor) -> LinearMap | None:
        """diag(scale) ∘ self, for a scale that broadcasts with the output; None if this class cannot represent it."""

    def plus_identity(self) -> LinearMap | None:
        """I + self, or None."""


class Scale:
    """Entrywise multiplication by ``scale``, float64, with as many dimensions as the value it acts on."""

    def __init__(self, scale: Tensor):
        self.scale = detached(scale).double()

    @cached_property
    def norm(self) -> Upper:
        return largest(self.scale) * COMPOSED

    def scaled(self, scale: Tensor) -> Scale:
        return Scale(self.scale * scale.to(self.scale.device))

    def plus_identity(self) -> Scale | None:
        total = self.scale + 1
        # If an entry nearly cancels the 1, the rounding errors in ``scale`` are no longer small relative to the sum.
        return Scale(total) if bool((total.abs() >= 2.0**-10 * self.scale.abs()).all()) else None

    def along(self, axis: int) -> Tensor | None:
        """The scale as a vector along ``axis``, or None if it varies along another axis."""
        return self.scale.reshape(-1) if self.scale.numel() == self.scale.shape[axis] else None


@dataclass(frozen=True)
class Origin:
    """The relation of a value to an earlier one, for normalisations that a network writes as several operations.

    Attributes:
        kind: ``square`` (source²), ``mean`` (mean over dims, plus eps), ``centred`` (source minus that mean),
            ``energy`` q (‖source‖²/count over dims, of the centred source if ``centred``, plus eps), ``root`` (√q) or
            ``inverse`` (1/√q). Reduced dimensions are kept with size 1, or expanded again.
        source: the earlier value.
        dims: the reduced dimensions.
        count: the divisor of an energy, or the number of entries in a mean.
        eps: the added constant.
        centred: whether the energy is a variance.
    """

    kind: str
    source: Value
    dims: tuple[int, ...] = ()
    count: int = 1
    eps: float = 0.0
    centred: bool = False


class Value:
    """Bounds on a tensor that depends on the image; see the module docstring.

    Args:
        shape: the tensor's shape for a batch of one image.
        lip: Lipschitz constant from the pixels; omitted if ``base`` and ``map`` determine it.
        magnitude: bound on the absolute entries.
        rows: (axis, bound): bound on the ℓ2 norm of every vector along that axis.
        base, map: the value is ``offset + map(base)``, and its ``lip`` is ``base.lip * map.norm``.
        offset: that constant as a float64 vector along the last axis; None if unknown.
        offset_error: bound on the norm of the rounding error of ``offset``.
        stochastic: the value is a softmax along its last axis whose ``lip`` is half that of its argument.
        floor: lower bound on the entries, one number or one per position on the last axis, always on the CPU; -inf for
            no bound.
        unbounded: the reason for an infinite ``lip``.

    Attributes:
        mass: lower bound on the sums along the last axis.
        origin: see :class:`Origin`.
        arranged: a value with the same entries in another shape.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        lip: Number | None = None,
        *,
        magnitude: Number = INFINITE,
        rows: tuple[int, Number] | None = None,
        base: Value | None = None,
        map: LinearMap | None = None,
        offset: Tensor | None = None,
        offset_error: Number = 0,
        stochastic: bool = False,
        floor: Tensor | float = -math.inf,
        unbounded: str = "",
    ):
        self.shape = tuple(shape)
        self._lip = None if lip is None else Upper(lip)
        self.rows = (rows[0] % len(shape), Upper(rows[1])) if rows is not None else None
        self.magnitude = Upper(magnitude) if self.rows is None else min(Upper(magnitude), self.rows[1])
        self.base = base
        self.map = map
        self.offset = offset
        self.offset_error = Upper(offset_error)
        self.stochastic = stochastic
        self.floor = torch.as_tensor(floor, dtype=torch.float64)
        self.unbounded = unbounded
        self.mass = -math.inf
        self.origin: Origin | None = None
        self.arranged: Value | None = None

    @classmethod
    def constant(cls, tensor: Tensor) -> Value:
        """A tensor that does not depend on the image."""
        shape = tuple(tensor.shape)
        if not tensor.dtype.is_floating_point or not shape:
            return cls(shape, 0, magnitude=largest(tensor))
        rows = largest_row_norm(tensor.reshape(-1, shape[-1])) if tensor.numel() else Upper(0)
        return cls(shape, 0, magnitude=largest(tensor), rows=(-1, rows))

    @cached_property
    def lip(self) -> Upper:
        """Upper bound on the Lipschitz constant from the pixels to this value."""
        if self._lip is not None:
            return self._lip
        assert self.base is not None
        assert self.map is not None
        return self.base.lip * self.map.norm if self.base.lip > 0 else Upper(0)

    def row_norm(self, axis: int) -> Upper:
        """Upper bound on the ℓ2 norm of any vector along ``axis``, for any image."""
        axis = axis % len(self.shape)
        best = Upper(self.shape[axis]).sqrt() * self.magnitude
        if self.rows is not None and self.rows[0] == axis:
            best = min(best, self.rows[1])
        if self.base is not None and self.offset is not None and axis == len(self.shape) - 1:
            assert self.map is not None
            best = min(best, self.map.norm * self.base.row_norm(-1) + vector_norm(self.offset) + self.offset_error)
        return best

    @property
    def last_rows(self) -> Upper | None:
        """The bound of ``rows``, if that is along the last axis."""
        return self.rows[1] if self.rows is not None and self.rows[0] == len(self.shape) - 1 else None

    @property
    def lowest(self) -> float:
        """Lower bound on all entries."""
        return self.floor.min().item() if self.floor.numel() else 0.0

    def total_norm(self) -> Upper:
        """Upper bound on the ℓ2 norm of all entries together, for any image."""
        entries = math.prod(self.shape)
        best = Upper(entries).sqrt() * self.magnitude
        for axis, size in enumerate(self.shape):
            best = min(best, Upper(entries // max(1, size)).sqrt() * self.row_norm(axis))
        return best if self.arranged is None else min(best, self.arranged.total_norm())

    def matrix_norm(self) -> Upper:
        """Upper bound on the spectral norm of the matrices in the last two axes, for any image."""
        n, m = self.shape[-2:]
        best = min(Upper(n).sqrt() * self.row_norm(-1), Upper(m).sqrt() * self.row_norm(-2))
        return min(best, Upper(n).sqrt()) if self.stochastic else best

    def like(self, shape: tuple[int, ...], lip: Number, rows_axis: int | None = None) -> Value:
        """A value of another shape whose entries are those of this value or convex combinations of them.

        ``rows_axis`` is the new position of the axis of ``rows``; None drops that bound.
        """
        rows = (rows_axis, self.rows[1]) if rows_axis is not None and self.rows is not None else None
        return Value(shape, lip, magnitude=self.magnitude, rows=rows, floor=self.lowest)

    def scaled(self, factor: Number, magnitude: Number = INFINITE) -> Value:
        """The value after an operation with Lipschitz constant ``factor`` on the range of this value.

        Args:
            factor: Lipschitz constant of the operation itself, a finite number ≥ 0, rounded up.
            magnitude: bound on the absolute entries of the result.

        Raises:
            TypeError: ``factor`` is not a number.
            ValueError: it is negative or NaN.
        """
        if not isinstance(factor, (Upper, int, float)):
            raise TypeError(f"scaled(factor) takes a number, not {type(factor).__name__}")
        if not factor >= 0:
            raise ValueError(f"a Lipschitz constant is at least 0, not {factor}")
        return Value(self.shape, self.lip * factor, magnitude=magnitude)

    def bounded(self, lip: Number, magnitude: Number = INFINITE) -> Value:
        """The value after an elementwise φ with |φ(x)| ≤ |x|: the bounds on entries and rows stay valid.

        Args:
            lip: Lipschitz constant of the *result* from the pixels, such as ``x.lip`` if |φ'| ≤ 1, or ``x.lip * 1.2``
                if |φ'| ≤ 1.2. It is not a factor; for a factor use :meth:`scaled`.
            magnitude: a further bound on the absolute entries of the result.

        Raises:
            TypeError: ``lip`` is a plain number, so it cannot include the constant of the operand.
        """
        if not isinstance(lip, Upper):
            raise TypeError(f"bounded(lip) takes the result's constant, such as x.lip * {lip}, not a factor")
        return Value(self.shape, lip, magnitude=min(self.magnitude, Upper(magnitude)), rows=self.rows)


def lowest(x: Any) -> float:
    """A lower bound on all entries of a value or constant."""
    return x.lowest if isinstance(x, Value) else torch.as_tensor(x, dtype=torch.float64).min().item()


def rounded_down(number: Tensor | float) -> Tensor:
    """A lower bound on the exact value of a number computed by a few float64 operations without cancellation."""
    tensor = torch.as_tensor(number, dtype=torch.float64)
    # 2⁻⁴⁵ = 256 · 2⁻⁵³ is more than a few roundings.
    return torch.where(tensor.isfinite(), tensor - tensor.abs() * 2.0**-45, tensor)


def largest(tensor: Tensor) -> Upper:
    """The largest absolute entry, exactly; 0 for an empty tensor."""
    if not tensor.numel():
        return Upper(0)
    if (number := estimated(tensor, lambda t: t.abs().amax())) is not None:
        return number
    entries = tensor.detach() if tensor.is_floating_point() else tensor.double()
    low, high = entries.aminmax()
    peak = max(-low.item(), high.item())
    if math.isnan(peak):
        raise InputError("a constant in the model's forward code is NaN; nothing can be certified with it")
    return Upper(peak)


def vector_norm(tensor: Tensor) -> Upper:
    """The ℓ2 norm of all entries, rounded up."""
    return largest_row_norm(tensor.reshape(1, -1))


def largest_row_sum(weight: Tensor) -> Upper:
    """max_o Σ |w_o|, rounded up: the ℓ∞ norm of a matrix whose rows are the first axis."""
    if not weight.numel():
        return Upper(0)
    if (number := estimated(weight, lambda w: w.flatten(1).abs().sum(1).amax())) is not None:
        return number
    rows = weight.detach().reshape(weight.shape[0], -1)
    sums = rows.double().abs().sum(1)
    return Upper(sums.max().item()) * (1 + (rows.shape[1] + 2) * 2.0**-52)


def largest_row_norm(weight: Tensor) -> Upper:
    """max_o ‖w_o‖₂, rounded up."""
    if not weight.numel():
        return Upper(0)
    if (number := estimated(weight, lambda w: computed_l2_norm(w.flatten(1), 1).amax())) is not None:
        return number
    rows = weight.detach().reshape(weight.shape[0], -1)
    return Upper(l2_norm(rows, 1).max().item())
