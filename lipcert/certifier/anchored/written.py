"""The Jacobians of a network at images as matrices (:mod:`.matrices`), each computed when it is first asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from lipcert.bounds import column_sums
from lipcert.certifier.anchored.matrices import JacobianMatrix
from lipcert.graph import Node
from lipcert.roundoff import Pair

if TYPE_CHECKING:
    from lipcert.certifier.anchored.jacobians import Jacobians

# Matrices of this many times as many columns as rows count with a square factor.
_WIDE = 2


class Written:
    """The Jacobians of a network at N images as matrices, each computed when it is first asked for."""

    def __init__(self, jacobians: Jacobians, values: Mapping[Node, Tensor], pairs: Iterable[Pair]):
        self.jacobians, self.values, self.pairs = jacobians, values, list(pairs)
        self._matrices: dict[Pair, JacobianMatrix] = {}
        self._factors: dict[Pair, JacobianMatrix] = {}

    def only(self, index: Tensor) -> Written:
        """The matrices of the images with the given indices; nothing is copied before it is asked for."""
        return _Some(self, index)

    def matrix(self, a: Node, b: Node) -> JacobianMatrix:
        """G(a → b), with the rows in the order of the value of which b is a rearrangement."""
        by, u = self.jacobians, self.jacobians.network.root(b)
        if by.network.affine_path(a, u):
            return by.constant(a, u, {node: value[:1] for node, value in self.values.items()})
        if (a, u) not in self._matrices:
            pairs = {(a, u)} if self._matrices else {(a, u), *self._shared()}
            self._matrices |= by.matrices(pairs - self._matrices.keys(), self.values)
        return self._matrices[a, u]

    def _shared(self) -> Iterator[Pair]:
        """The pairs whose matrices are computed from products with the network, without those of the same for all."""
        by = self.jacobians
        for a, b in self.pairs:
            u = by.network.root(b)
            if by.writes(a, u) and not (a is by.network.source and u is by.first(u)):
                start = by.through(a, u) or a
                if not by.network.affine_path(start, u) and by.bend(start, u) is None:
                    yield start, u

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
        if a is by.network.source and u is by.first(u):
            entrance = by.entrance()
            assert entrance is not None
            return entrance
        c = by.through(a, u)
        start, last = (a, None) if c is None else (c, self.factor(a, c))
        if by.bend(start, u) is not None:
            return JacobianMatrix.joined([self._narrow(a, u, part) for part in self._bent(a, u, last)])
        matrix = self.matrix(start, u)
        return self._narrow(a, u, matrix if last is None else matrix.times(last))

    def _narrow(self, a: Node, u: Node, matrix: JacobianMatrix) -> JacobianMatrix:
        """The matrix in its blocks, or a square factor if it is wide."""
        if matrix.groups is None:
            dense = matrix.dense()
            matrix = replace(JacobianMatrix.of(dense, self.jacobians.groups_at(a, u, dense)), error=matrix.error)
        return matrix.reduced() if matrix.entries.shape[3] >= _WIDE * matrix.entries.shape[2] else matrix

    def _bent(self, a: Node, u: Node, last: JacobianMatrix | None) -> Iterator[JacobianMatrix]:
        """G(v → u) diag(φ') G(c → z) + G₀ as for :meth:`.Jacobians.bend`, times the factor ``last`` of G(a → c).

        One image after the other: a product may be much larger than what is kept of it.
        """
        by = self.jacobians
        start = by.through(a, u) or a
        v = by.bend(start, u)
        assert v is not None
        if (a, u) not in by.bent:
            (z,) = v.operands
            alone = {node: value[:1] for node, value in self.values.items()}
            before, beside = self.matrix(start, z), by.beside(start, u, v, alone)
            if z is not by.network.root(z):
                before = before.moved(by.network.order(z).to(before.entries.device))
            if last is not None:
                before, beside = before.times(last), None if beside is None else beside.times(last)
            after = self.matrix(v, u)
            if beside is None:
                before = self._narrow(a, z, before)
            else:  # in the blocks that the sum will have
                groups = after.times(before).groups
                beside = (
                    replace(beside, entries=beside.within(groups), groups=groups)
                    if (JacobianMatrix.of(beside.dense(), groups).groups is not None)
                    else beside
                )
            by.bent[a, u] = after, before, beside
        after, before, beside = by.bent[a, u]
        for slopes in column_sums(v, 0, self.values).split(1):
            product = after.columns_scaled(slopes).times(before)
            yield product if beside is None else product.plus(beside)


class _Some(Written):
    """The matrices at some of the images of others."""

    def __init__(self, whole: Written, index: Tensor):
        super().__init__(whole.jacobians, {}, ())
        self.whole, self.index = whole, index

    def matrix(self, a: Node, b: Node) -> JacobianMatrix:
        return self.whole.matrix(a, b).only(self.index)

    def factor(self, a: Node, b: Node) -> JacobianMatrix:
        return self.whole.factor(a, b).only(self.index)
