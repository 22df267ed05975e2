"""What norms of Jacobians cost, and which Jacobians are therefore computed as matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from lipcert.graph import Node

if TYPE_CHECKING:
    from lipcert.certifier.anchored.network import Network

# A Jacobian with at most this many rows or columns is computed in full, which takes fewer products than Lanczos.
FEW = 64
# Row norms are computed exactly for at most this many rows, or rows with at most this many entries, which takes fewer
# products than a probabilistic bound.
PROBES = 256
# The norms of the columns of M G, for one rival class at a time, are computed for at most this many rows.
FORM_ROWS = 1024
# For affine paths, which are the same for all images: Jacobians with at most so many columns are computed in full.
LONG = 4096
# The usual number of products for Lanczos, and what it takes besides, in floating-point operations.
_PASSES = 100
SEARCH = 1e8
# How many times as many floating-point operations a second products of matrices reach as products with vectors.
_FASTER = 4.0
# Matrices have at most this many entries for each image; those that are 0 do not count in matrices for all images.
ENTRIES = 2**24
# The largest number of entries of the Gram matrices of blocks of rows, per image; larger blocks are not bounded
# separately.
GRAMS = 2**25
# The number of unit vectors in one product.
TOGETHER = 64
# The overhead of calling an operation, in floating-point operations: about 30 microseconds on a core.
_CALL = 3e5


def work(path: Iterable[Node]) -> float:
    """An estimate of the floating-point operations that these operations take for one image, calls included."""
    return sum(work_and_calls(path))


def work_and_calls(path: Iterable[Node]) -> tuple[float, float]:
    """The floating-point operations for one image, and what their calls take, in the same unit."""
    nodes = list(path)
    return sum(map(_work, nodes)), _CALL * len(nodes)


def _work(node: Node) -> float:
    entries = math.prod(node.shape)
    weights = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, Tensor) and arg.dim() > 1]
    if node.op in ("linear", "matmul") or (isinstance(node.op, str) and node.op.startswith("conv")):
        inner = math.prod(weights[0].shape[1:]) if weights else (node.operands[0].shape or (1,))[-1]
        return 2.0 * entries * inner
    return 10.0 * entries


def passes_for(a: Node, b: Node, peak: bool) -> int:
    """The usual number of products for ‖G(a → b)‖, or with ``peak`` for the largest norm of a row."""
    few = min(a.entries, b.entries, PROBES)
    return few if peak or few <= FEW else _PASSES


def writing(network: Network, a: Node, b: Node) -> float:
    """An estimate of the floating-point operations of an image for G(a → b) as a matrix and its norm.

    Many products at once take fewer calls, and reach several times as many operations a second.
    """
    if network.affine_path(a, b):
        return 0.0
    a = (network.entrance(b) if a is network.source else None) or a
    few, many = sorted((a.entries, b.entries))
    each, calls = work_and_calls(network.replay.between(a, [b]))
    return few * (each / _FASTER + calls / TOGETHER) + (2 * few**2 * many + 20 * few**3) / _FASTER


def worth_writing(network: Network, a: Node, b: Node) -> bool:
    """Whether that is little more than a single norm takes otherwise: matrices serve for several."""
    return writing(network, a, b) <= 2 * (_PASSES * work(network.replay.between(a, [b])) + SEARCH)


def writes_few(few: int, many: int) -> bool:
    """Whether a matrix is computed in any case, because it has few rows or columns."""
    return few <= FEW and few * many <= ENTRIES
