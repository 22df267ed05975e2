"""Jacobians written out as matrices, computed once for the images and shared by all norms that need them.

All rows of G(a → u), for every a before u, come from one pass backwards with the unit vectors of u; or all columns, for
every u behind a, from one pass with those of a. If a single operation between a and u is not affine, and acts entry by
entry, G(a → u) is a sum and product of matrices that are the same for all images, and of the slopes
(:meth:`.jacobians.Jacobians.bend`). So ‖G‖, the norms of its rows, and ‖M G‖ for the maps M of every rival class take
products of stored matrices, and no further passes.

**Factors.** A matrix L is a *factor* of G if G Gᵀ ⪯ L Lᵀ. Then ‖M G‖ ≤ ‖M L‖ for every M, because
M G Gᵀ Mᵀ ⪯ M L Lᵀ Mᵀ; with M = e_iᵀ that bounds norms of rows. G is a factor of itself. If G is wider than high, a
Cholesky factor of G Gᵀ + s I is one that is square, for s above the rounding errors (:func:`lipcert.norms.factor`). If
L is a factor of G(x → c), and G(x → u) = G(c → u) G(x → c), then G(c → u) L is one of G(x → u). So a large perturbed
value x, of which only an affine map c is read, counts with as many columns as c has entries; and what is before a cut c
is not differentiated again for every value behind it.

**Blocks.** A matrix whose rows and columns fall into groups, such that an entry is 0 unless its row and its column
belong to one group, has the largest of the norms of its blocks. The groups are found from the zeros of the matrix at
one image, and used at images whose matrices have these zeros too.

**Rounding.** What is stored is a matrix of computed products; :mod:`.rounding` bounds its distance from G. Errors of
products of stored matrices are part of ``error``, and those of norms of the bounds of :mod:`lipcert.norms._verify`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lipcert.bounds import Form
from lipcert.norms import dot_error, factor, verified_norms
from lipcert.numerics import INFLATE, UNIT, at_most, l2_norm, root_of_squares

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

    @classmethod
    def joined(cls, parts: Sequence[JacobianMatrix]) -> JacobianMatrix:
        """One for all images, from those of some each."""
        groups = parts[0].groups
        same = all(_equal(part.groups, groups) for part in parts)
        entries = torch.cat([part.entries if same else part.dense()[:, None] for part in parts])
        return cls(entries, groups if same else None, torch.cat([part.error for part in parts]))

    def only(self, index: Tensor) -> JacobianMatrix:
        """The matrices of the images with the given indices."""
        return self if len(self.entries) == 1 else replace(self, entries=self.entries[index], error=self.error[index])

    @property
    def size(self) -> Tensor:
        """An upper bound on the Frobenius norm, shape (N or 1,)."""
        return l2_norm(self.entries.flatten(1), 1) * INFLATE

    def spectral_norm(self) -> Tensor:
        """Upper bounds on the norms, shape (N or 1,); ∞ where entries are not finite."""
        images, blocks = self.entries.shape[:2]
        bounds = verified_norms(self.entries.flatten(0, 1), loose=_LOOSE).reshape(images, blocks)
        return at_most(bounds.amax(1) + self.error)

    def row_norms(self) -> Tensor:
        """Upper bounds on the norms of the rows, shape (N or 1, rows)."""
        flat = l2_norm(self.entries, 3).flatten(1)
        if self.groups is not None:
            flat = torch.empty_like(flat).index_copy_(1, self.groups.rows.flatten(), flat)
        return at_most(flat * INFLATE + self.error[:, None])

    def column_norms(self, scale: Tensor | None = None) -> Tensor:
        """Upper bounds on the norms of the columns, shape (N or 1, columns); only of a G that is its own factor.

        With ``scale``, of shape (N, rows), they are those of diag(scale) G.
        """
        if scale is None:
            bounds, error = l2_norm(self.entries, 2), self.error
        else:
            rows = scale[:, None] if self.groups is None else scale[:, self.groups.rows]
            bounds = root_of_squares(torch.matmul, rows[:, :, None], self.entries)[:, :, 0]
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
        """The matrix with row ``order[i]`` in place i."""
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
        rows, columns = moved[0].nonzero().unbind(1)
        sparse = len(rows) <= moved[0].numel() // 4
        groups = groups_of(rows, columns, (moved.shape[1], moved.shape[2])) if sparse else None
        return replace(JacobianMatrix.of(moved, groups), error=form.norm * self.error)

    def columns_scaled(self, scale: Tensor) -> JacobianMatrix:
        """This times diag(scale), with ``scale`` of shape (N, columns); only of a G that is its own factor."""
        columns = scale[:, None] if self.groups is None else scale[:, self.groups.columns]
        return replace(self, entries=self.entries * columns[:, :, None], error=scale.abs().amax(1) * self.error)

    def plus(self, other: JacobianMatrix) -> JacobianMatrix:
        """The sum of both, in the blocks of this where the other has its zeros; for G that are their own factors."""
        same = _equal(self.groups, other.groups) or JacobianMatrix.of(other.dense(), self.groups).groups is not None
        groups = self.groups if same else None
        total = self.within(groups) + other.within(groups)
        rounding = 2 * UNIT * (self.size + other.size)
        return JacobianMatrix(total, groups, at_most(self.error + other.error + rounding))

    def within(self, groups: Groups | None) -> Tensor:
        """The blocks in these groups, which hold all entries that are not 0."""
        return self.entries if _equal(groups, self.groups) else JacobianMatrix.of(self.dense(), groups).entries

    def times(self, other: JacobianMatrix) -> JacobianMatrix:
        """G(c → u) L for this G(c → u) and a factor L of G(x → c), each for the same images or the same for all.

        If each block of one has its rows, or columns, in one block of the other, the product has the blocks of that.
        """
        blocks = self._nested_times(other)
        if blocks is None:
            flipped = other._transposed()._nested_times(self._transposed())
            blocks = None if flipped is None else (flipped[0].mT, Groups(flipped[1].columns, flipped[1].rows))
        product, groups = ((self.dense() @ other.dense())[:, None], None) if blocks is None else blocks
        if groups is not None and len(groups.rows) == 1:
            rows, columns = (part[0].argsort() for part in groups)
            product, groups = product[:, :, rows][..., columns], None
        lost = dot_error(self.blocks().columns.numel()) * 1.01 * self.size * other.size
        return JacobianMatrix(
            product, groups, at_most(lost + self.size * other.error + self.error * (other.size + other.error))
        )

    def _nested_times(self, other: JacobianMatrix) -> tuple[Tensor, Groups] | None:
        """The blocks of the product if each block of ``other`` has its rows in one block of this; None otherwise."""
        nested = self._nested(other)
        if nested is None:
            return None
        blocks, places = nested  # (B, k): the blocks of L in each block of this; (B, k, r): their rows in it
        count = len(blocks)
        across = torch.arange(count, device=places.device)[:, None]
        chosen = self.entries[:, across, :, places.reshape(count, -1)]  # (B, k r, N, rows)
        chosen = chosen.reshape(*places.shape, *chosen.shape[2:]).permute(3, 0, 1, 4, 2)
        parts = chosen @ other.entries[:, blocks]  # (N, B, k, rows, columns)
        columns = other.blocks().columns[blocks].reshape(count, -1)
        return parts.transpose(2, 3).flatten(3), Groups(self.blocks().rows, columns)

    def _transposed(self) -> JacobianMatrix:
        rows, columns = self.blocks()
        return JacobianMatrix(self.entries.mT, Groups(columns, rows), self.error)

    def blocks(self) -> Groups:
        """The groups, also of one block."""
        if self.groups is not None:
            return self.groups
        rows, columns = (torch.arange(size, device=self.entries.device)[None] for size in self.entries.shape[2:])
        return Groups(rows, columns)

    def _nested(self, other: JacobianMatrix) -> tuple[Tensor, Tensor] | None:
        """For the blocks of this, those of ``other`` with rows in it, and their places in it; None if these differ."""
        whole, inner = self.blocks().columns, other.blocks().rows
        if inner.shape[1] > whole.shape[1] or len(inner) % len(whole):
            return None
        owner, place = (torch.empty(whole.numel(), dtype=torch.long, device=whole.device) for _ in range(2))
        owner[whole.flatten()] = torch.arange(len(whole), device=whole.device).repeat_interleave(whole.shape[1])
        place[whole.flatten()] = torch.arange(whole.shape[1], device=whole.device).repeat(len(whole))
        owners = owner[inner]
        each = owners[:, 0].bincount(minlength=len(whole))
        if bool((owners != owners[:, :1]).any()) or bool((each != each[0]).any()):
            return None
        blocks = owners[:, 0].argsort(stable=True).reshape(len(whole), -1)
        return blocks, place[inner[blocks]]

    def reduced(self) -> JacobianMatrix:
        """A factor with no more columns than rows."""
        if self.entries.shape[3] <= self.entries.shape[2]:
            return self
        images, blocks = self.entries.shape[:2]
        finite = self.entries.isfinite().flatten(1).all(1)[:, None, None, None]
        square = factor(torch.where(finite, self.entries, 0.0).flatten(0, 1)).unflatten(0, (images, blocks))
        square = torch.where(finite, square, math.inf)
        groups = self.groups
        if groups is not None:
            places = torch.arange(groups.rows.numel(), device=groups.rows.device)
            groups = Groups(groups.rows, places.reshape(groups.rows.shape))
        return JacobianMatrix(square, groups, self.error)


def _equal(one: Groups | None, other: Groups | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one.rows, other.rows) and torch.equal(one.columns, other.columns)


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


def written_error(columns: int, rows: int) -> float:
    """The error of norms that are not computed by Lanczos, in units of a bound S on that of a product.

    With n the larger number of entries, each column or row of a matrix computed in full has an error of at most S, and
    the matrix one of at most √n S. For k Gaussian vectors g_t, the root of a sum of squares over t has an error of at
    most S(Σ_t ‖g_t‖²)^½ and is divided by √(ck). With c > 1/8 and Σ_t ‖g_t‖² < 2kn, whose failure probability is below
    e^(−10000) for k ≥ 256 and n ≥ 256, that is at most 4√n S. 16 + 4√n covers both, and one more S.
    """
    return 16 + 4 * math.sqrt(max(columns, rows))
