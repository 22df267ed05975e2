"""Weights as exact float64 numbers of moderate size."""

from __future__ import annotations

import functools
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lipcert.errors import InputError
from lipcert.numerics import Upper

# The number of norms that are kept, and the norms by their hash.
_KEPT = 4096
KNOWN_NORMS: OrderedDict[bytes, Upper] = OrderedDict()


def as_float64(weight: Tensor) -> Tensor:
    """The weight in float64 or complex128, without gradient: exact for every floating-point dtype of torch."""
    if not (weight.is_floating_point() or weight.is_complex()):
        raise InputError(f"a norm needs a floating-point or complex weight, got {weight.dtype}; convert it first")
    device = weight.device if weight.device.type == "cuda" else torch.device("cpu")
    return weight.detach().to(device).to(torch.complex128 if weight.is_complex() else torch.float64)


def normalise(weight: Tensor) -> tuple[Tensor, float]:
    """Splits a float64 or complex128 weight into (weight / scale, scale).

    The scale is the power of two that brings the largest real or imaginary part into [1, 2). The division is exact
    except for parts that underflow, which change by at most 2⁻¹⁰⁷³. A zero or empty weight gives scale 0.
    """
    parts = torch.view_as_real(weight.resolve_conj()) if weight.is_complex() else weight
    largest = max(-float(parts.min()), float(parts.max())) if parts.numel() else 0.0
    if math.isnan(largest):
        raise InputError("the weight holds NaN; a norm needs finite numbers, check the file")
    if math.isinf(largest):
        raise InputError("the weight is infinite or overflows float64; a norm needs finite numbers, check the file")
    if largest == 0:
        return weight, 0.0
    exponent = math.frexp(largest)[1] - 1
    half = exponent // 2
    return (weight * 2.0**-half).mul_(2.0 ** (half - exponent)), math.ldexp(1.0, exponent)


def remembered(norm: Callable[..., Upper]) -> Callable[..., Upper]:
    """A decorator for norms of matrices: those of the same matrices are computed once in a process.

    A network is bounded several times, for its constant, its rounding errors, and the layers before a cut. The last
    norms are kept by a hash of the entries and the other arguments.
    """

    @functools.wraps(norm)
    def once(matrices: Tensor, *args: Any) -> Upper:
        key = hashlib.blake2b(digest_size=32)
        key.update(matrices.detach().resolve_conj().resolve_neg().cpu().contiguous().numpy().data)
        key.update(repr((norm.__qualname__, matrices.shape, matrices.dtype, args)).encode())
        digest = key.digest()
        if digest in KNOWN_NORMS:
            return KNOWN_NORMS[digest]
        result = KNOWN_NORMS[digest] = norm(matrices, *args)
        while len(KNOWN_NORMS) > _KEPT:
            KNOWN_NORMS.popitem(last=False)
        return result

    return once
