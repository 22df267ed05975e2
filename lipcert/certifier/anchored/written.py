"""The Jacobians of a network at images as matrices (:mod:`.matrices`), each computed when it is first asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from lipcert.certifier.anchored.chains import Pair
from lipcert.certifier.anchored.jacobians import Jacobians
from lipcert.certifier.anchored.matrices import JacobianMatrix
from lipcert.graph import Node

# Matrices of this many times as many columns as rows count with a square factor.
_WIDE = 2


class Written:
    """The Jacobians of a network at N images as matrices, each computed when it is first asked for.

    Args:
        jacobians: the network, and the matrices that are the same for all images.
        values: nominal values.
        pairs: the pairs (a, u) whose matrices are computed together.
    """

    def __init__(self, jacobians: Jacobians, values: Mapping[Node, Tensor], pairs: Iterable[Pair]):
        self.jacobians, self.values, self.pairs = jacobians, values, list(pairs)
        self._matrices: dict[Pair, JacobianMatrix] = {}
        self._factors: dict[Pair, JacobianMatrix] = {}

    def only(self, index: Tensor) -> Written:
        """The same for the images with the given indices; nothing is copied before it is asked for."""
        return _Some(self, index)

    def matrix(self, a: Node, b: Node) -> JacobianMatrix:
        """G(a → b), with the rows in the order of the value of which b is a rearrangement."""
        by, u = self.jacobians, self.jacobians.network.root(b)
        if (a, u) in by.constants:
            return by.constants[a, u]
        if (a, u) not in self._matrices:
            affine = by.network.affine_path(a, u)
            targets = [u]
            if not affine:
                more = (w for start, w in self.pairs if start is a and (a, w) not in self._matrices and by.writes(a, w))
                targets += [w for w in more if w is not u and not by.network.affine_path(a, w)]
            values = {node: value[:1] for node, value in self.values.items()} if affine else self.values
            computed = zip(((a, w) for w in targets), by.matrices(a, targets, values), strict=True)
            (by.constants if affine else self._matrices).update(computed)
        return by.constants[a, u] if (a, u) in by.constants else self._matrices[a, u]

    def factor(self, a: Node, b: Node) -> JacobianMatrix:
        """A factor of G(a → b), with the rows in the order in which b has its entries."""
        by, u = self.jacobians, self.jacobians.network.root(b)
        matrix = by.factors.get((a, u)) or self._factors.get((a, u))
        if matrix is None:
            matrix = self._factor(a, u)
            (by.factors if by.network.affine_path(a, u) else self._factors)[a, u] = matrix
        return matrix if b is u else matrix.moved(by.network.order(b).to(matrix.entries.device))

    def _factor(self, a: Node, u: Node) -> JacobianMatrix:
        by = self.jacobians
        first, entrance = by.first(u) if a is by.network.source else None, by.entrance()
        if first is None or entrance is None:
            matrix = self.matrix(a, u)
        elif u is first:
            return entrance
        else:
            dense, error = self.matrix(first, u).times(entrance)
            matrix = JacobianMatrix.of(dense, by.groups_at(a, u, dense))
            matrix = replace(matrix, error=error)
        return matrix.reduced() if matrix.entries.shape[3] >= _WIDE * matrix.entries.shape[2] else matrix


class _Some(Written):
    """The matrices at some of the images of others."""

    def __init__(self, whole: Written, index: Tensor):
        super().__init__(whole.jacobians, {}, ())
        self.whole, self.index = whole, index

    def matrix(self, a: Node, b: Node) -> JacobianMatrix:
        return self.whole.matrix(a, b).only(self.index)

    def factor(self, a: Node, b: Node) -> JacobianMatrix:
        return self.whole.factor(a, b).only(self.index)
