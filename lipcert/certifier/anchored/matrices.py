"""Jacobians written out as matrices, computed once for the images and shared by all norms that need them.

All columns of G(a → u), for every u behind a, come from one pass with the unit vectors of a; all rows of G(a → b) from
one pass backwards with those of b. So ‖G‖, the norms of its rows, and ‖M G‖ for the maps M of every rival class take
products of stored matrices, and no further passes.

**Factors.** A matrix L is a *factor* of G if G Gᵀ ⪯ L Lᵀ. Then ‖M G‖ ≤ ‖M L‖ for every M, because
M G Gᵀ Mᵀ ⪯ M L Lᵀ Mᵀ; with M = e_iᵀ that bounds norms of rows. G is a factor of itself. If G is wider than high, a
Cholesky factor of G Gᵀ + s I is one that is square, for s above the rounding errors (:func:`lipcert.norms.factor`). If
L is a factor of G(x → c), and G(x → u) = G(c → u) G(x → c), then G(c → u) L is one of G(x → u). So a large perturbed
value x, of which only an affine map c is read, counts with as many columns as c has entries.

**Blocks.** A matrix whose rows and columns fall into groups, such that an entry is 0 unless its row and its column
belong to one group, has the largest of the norms of its blocks. The groups are found from the zeros of the matrix at
one image, and used at images whose matrices have these zeros too.

**Rounding.** What is stored is a matrix of computed products; :mod:`.rounding` bounds its distance from G. Errors of
products of stored matrices are part of ``error``, and those of norms of the bounds of :mod:`lipcert.norms._verify`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lipcert.bounds import Form
from lipcert.norms import dot_error, factor, verified_norms
from lipcert.numerics import INFLATE, at_most

# The largest relative distance of a norm from the one that Lanczos estimates before it is verified.
_LOOSE = 1e-3
# The largest number of steps in which the groups of rows and columns are found.
_SWEEPS = 16


class Groups(NamedTuple):
    """Groups of the same size of the rows and columns of a matrix: their indices, shapes (B, r) and (B, c)."""

    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class JacobianMatrix:
    """A factor of G at N images, or one for all images.

    Attributes:
        entries: float64, shape (N or 1, B, r, c): its blocks.
        groups: the rows and columns of the blocks; None for one block.
        error: a bound on the norm of the rounding errors of products of stored matrices, shape (N or 1,).
    """

    entries: Tensor
    groups: Groups | None
    error: Tensor

    @classmethod
    def of(cls, dense: Tensor, groups: Groups | None) -> JacobianMatrix:
        """A matrix of shape (N, rows, columns), in these groups where it has their zeros."""
        exact = dense.new_zeros(len(dense))
        if groups is not None:
            blocks = dense[:, groups.rows[:, :, None], groups.columns[:, None, :]]
            if int(blocks.count_nonzero()) == int(dense.count_nonzero()):  # NaN is not zero
                return cls(blocks, groups, exact)
        return cls(dense[:, None], None, exact)

    def only(self, index: Tensor) -> JacobianMatrix:
        """The same for the images with the given indices."""
        return self if len(self.entries) == 1 else replace(self, entries=self.entries[index], error=self.error[index])

    @property
    def size(self) -> Tensor:
        """An upper bound on the Frobenius norm, shape (N or 1,)."""
        return self.entries.flatten(1).norm(dim=1) * INFLATE

    def norm(self) -> Tensor:
        """Upper bounds on the norms, shape (N or 1,); ∞ where entries are not finite."""
        images, blocks = self.entries.shape[:2]
        bounds = verified_norms(self.entries.flatten(0, 1), loose=_LOOSE).reshape(images, blocks)
        return at_most(bounds.amax(1) + self.error)

    def row_norms(self) -> Tensor:
        """Upper bounds on the norms of the rows, shape (N or 1, rows)."""
        flat = self.entries.norm(dim=3).flatten(1)
        if self.groups is not None:
            flat = torch.empty_like(flat).index_copy_(1, self.groups.rows.flatten(), flat)
        return at_most(flat * INFLATE + self.error[:, None])

    def column_norms(self, scale: Tensor | None = None) -> Tensor:
        """The same for the columns; only of a G that is its own factor. With ``scale`` those of diag(scale) G."""
        if scale is None:
            bounds, error = self.entries.norm(dim=2), self.error
        else:
            rows = scale[:, None] if self.groups is None else scale[:, self.groups.rows]
            bounds = (rows.square()[:, :, None] @ self.entries.square())[:, :, 0].sqrt()
            error = scale.abs().amax(1) * self.error
        flat = bounds.flatten(1)
        if self.groups is not None:
            flat = torch.empty_like(flat).index_copy_(1, self.groups.columns.flatten(), flat)
        return at_most(flat * INFLATE + error[:, None])

    def block_norms(self, block: int) -> Tensor:
        """Upper bounds on the norms of the blocks of as many consecutive rows, shape (N or 1, rows / block)."""
        rows = self.dense().unflatten(1, (-1, block))
        return at_most(verified_norms(rows.flatten(0, 1)).reshape(len(rows), -1) + self.error[:, None])

    def dense(self) -> Tensor:
        """Shape (N or 1, rows, columns)."""
        if self.groups is None:
            return self.entries[:, 0]
        rows, columns = self.groups
        whole = self.entries.new_zeros(len(self.entries), rows.numel(), columns.numel())
        whole[:, rows[:, :, None], columns[:, None, :]] = self.entries
        return whole

    def moved(self, order: Tensor) -> JacobianMatrix:
        """The same with row ``order[i]`` in place i."""
        if self.groups is None:
            return replace(self, entries=self.entries[:, :, order])
        place = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        return replace(self, groups=Groups(place[self.groups.rows], self.groups.columns))

    def scaled(self, scale: Tensor) -> JacobianMatrix:
        """diag(scale) times this, with ``scale`` of shape (N, rows)."""
        rows = scale[:, None] if self.groups is None else scale[:, self.groups.rows]
        return replace(self, entries=rows[..., None] * self.entries, error=scale.abs().amax(1) * self.error)

    def formed(self, form: Form, shape: tuple[int, ...]) -> JacobianMatrix:
        """M times this, for the M of a form on deviations of shape (N, *shape)."""
        if form.is_diagonal(shape):
            return self.scaled(form.tensors[0].flatten(1))
        columns = self.dense().movedim(2, 0)
        columns = columns.expand(-1, len(form.norm), -1).reshape(-1, len(form.norm), *shape)
        moved = torch.vmap(form)(columns).flatten(2).movedim(0, 2)
        return JacobianMatrix(moved[:, None], None, form.norm * self.error)

    def times(self, other: JacobianMatrix) -> tuple[Tensor, Tensor]:
        """G(c → u) L for this G(c → u) and a factor L of G(x → c) that is the same for all images, with its error."""
        dense = self.dense()
        if other.groups is None:
            product = dense @ other.entries[:, 0]
        else:
            rows, columns = other.groups
            parts = dense[:, :, rows].movedim(2, 1) @ other.entries  # (N, B, rows of this, c)
            product = torch.empty_like(parts.movedim(1, 2).flatten(2))
            product[:, :, columns.flatten()] = parts.movedim(1, 2).flatten(2)
        lost = dot_error(other.entries.shape[2]) * 1.01 * self.size * other.size
        return product, at_most(lost + self.size * other.error + self.error * other.size)

    def reduced(self) -> JacobianMatrix:
        """A factor with no more columns than rows."""
        if self.entries.shape[3] <= self.entries.shape[2] or not bool(self.entries.isfinite().all()):
            return self
        images, blocks = self.entries.shape[:2]
        square = factor(self.entries.flatten(0, 1)).unflatten(0, (images, blocks))
        groups = self.groups
        if groups is not None:
            places = torch.arange(groups.rows.numel(), device=groups.rows.device)
            groups = Groups(groups.rows, places.reshape(groups.rows.shape))
        return JacobianMatrix(square, groups, self.error)


def groups_of(rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> Groups | None:
    """The groups of rows and columns of a matrix whose entries are 0 but at these places.

    None if there is only one, or if they have different sizes.
    """
    mine = torch.arange(shape[0], device=rows.device)
    for _ in range(_SWEEPS):
        other = mine.new_full(shape[1:], shape[0]).scatter_reduce(0, columns, mine[rows], "amin")
        least = mine.scatter_reduce(0, rows, other[columns], "amin")
        if bool((least == mine).all()):
            break
        mine = least
    else:
        return None
    labels, high = mine.unique(return_counts=True)
    names, wide = other.unique(return_counts=True)
    same = torch.equal(labels, names) and len({*high.tolist()}) == len({*wide.tolist()}) == 1
    if len(labels) < 2 or not same:
        return None
    return Groups(*(part.argsort(stable=True).reshape(len(labels), -1) for part in (mine, other)))
