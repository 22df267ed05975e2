"""Products with the Jacobian of the first cut with respect to the perturbed value, from a stored matrix.

Lanczos takes about a hundred products for the norm of G(x → u), and each runs through everything between the perturbed
value x and u. What comes first is often the largest part: a stem of convolutions, of which each token reads a window.
If every path to u passes through c, then G(x → u) = G(c → u) G(x → c), and the second factor is stored here: as a
factor of it (:mod:`.matrices`), if c is an affine map of x, or as G(v → c) diag(φ') G(x → z) multiplied out, with a
single entrywise operation v = φ(z) in between. All but the slopes φ' is the same for all images.

**Rounding.** Let Ê be what is stored. Lanczos bounds the norm of G(c → u) Ê from products with unit vectors, whose
errors are those of products with G(c → u), times ‖Ê‖, and those of products with Ê, times ‖G(c → u)‖. They are
multiplied by c (:meth:`.jacobians.Jacobians.error_factor`). The distance ‖Ê − G(x → c)‖ counts once: columns of stored
matrices have errors of at most S, so matrices of n columns of at most √n S, which c S / 100 exceeds by the choice of c.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipcert.certifier.anchored.matrices import JacobianMatrix
from lipcert.norms import dot_error
from lipcert.numerics import at_most

# The share of the error of a stored matrix that counts as an error of products with it.
ONCE = 0.01


@dataclass(frozen=True)
class Windows:
    """A matrix in groups of rows, each of which reads some of the columns; several groups may read the same column.

    Attributes:
        entries: at N images, or one for all, shape (N or 1, B, r, c).
        rows: the rows of each group, shape (B, r); each row is in one group.
        columns: the columns that each group reads, shape (B, c), with any column where the entries are 0.
        width: the number of columns.
        again: the largest number of groups that read the same column.
        lost: a bound on the norm of the rounding errors of the products by which it was computed, shape (N or 1,).
    """

    entries: Tensor
    rows: Tensor
    columns: Tensor
    width: int
    again: int
    lost: Tensor

    @classmethod
    def of(cls, row: Tensor, column: Tensor, value: Tensor, rows: Tensor, width: int) -> Windows:
        """A matrix of ``width`` columns that is 0 but for the given entries, with these groups of rows."""
        count, high = rows.shape
        group, place = torch.empty_like(rows.flatten()), torch.empty_like(rows.flatten())
        group[rows.flatten()] = torch.arange(count, device=rows.device).repeat_interleave(high)
        place[rows.flatten()] = torch.arange(high, device=rows.device).repeat(count)
        key = group[row] * width + column
        read, number = key.unique(return_inverse=True)
        owner, index = read // width, read % width
        wide = owner.bincount(minlength=count)
        slot = torch.arange(len(read), device=rows.device) - (wide.cumsum(0) - wide)[owner]
        most = int(wide.amax())
        columns = rows.new_zeros(count, most)
        columns[owner, slot] = index
        entries = value.new_zeros(count, high, most)
        entries[group[row], place[row], slot[number]] = value
        return cls(entries[None], rows, columns, width, int(index.bincount().amax()), value.new_zeros(1))

    @classmethod
    def of_matrix(cls, matrix: JacobianMatrix) -> Windows:
        """The same as a matrix in blocks."""
        rows, columns = matrix.blocks()
        return cls(matrix.entries, rows, columns, columns.numel(), 1, matrix.error)

    def only(self, index: Tensor | slice) -> Windows:
        """The same for the images with the given indices."""
        return self if len(self.entries) == 1 else replace(self, entries=self.entries[index], lost=self.lost[index])

    def _vectors(self, v: Tensor) -> Tensor:
        """Vectors of shape (K, n) for every matrix, shape (N or 1, n, K/N or K); vector k is for image k mod N."""
        return v.reshape(-1, len(self.entries), v.shape[1]).permute(1, 2, 0)

    def product(self, v: Tensor) -> Tensor:
        """The products with vectors, shape (K, columns) → (K, rows): vector k with the matrix at image k mod N."""
        moved = (self.entries @ self._vectors(v)[:, self.columns]).flatten(1, 2)
        result = torch.empty_like(moved).index_copy_(1, self.rows.flatten(), moved)
        return result.permute(2, 0, 1).reshape(len(v), -1)

    def adjoint(self, u: Tensor) -> Tensor:
        """The same for the transposed matrices, shape (K, rows) → (K, columns)."""
        moved = (self.entries.mT @ self._vectors(u)[:, self.rows]).flatten(1, 2)
        total = moved.new_zeros(len(moved), self.width, moved.shape[2]).index_add_(1, self.columns.flatten(), moved)
        return total.permute(2, 0, 1).reshape(len(u), -1)

    def size(self) -> Tensor:
        """Bounds on the norms of the matrices of absolute values, shape (N or 1,): ‖A‖² ≤ ‖A‖₁ ‖A‖_∞."""
        absolute = replace(self, entries=self.entries.abs())
        rows = absolute.entries.sum(3).flatten(1).amax(1)
        columns = absolute.adjoint(rows.new_ones(len(rows), self.rows.numel())).amax(1)
        return at_most((rows * columns).sqrt())

    def error(self) -> Tensor:
        """Bounds on the rounding errors of products with unit vectors, shape (N or 1,).

        They are multiplied by :func:`lanczos_error`, ``lost`` counts once.
        """
        terms = max(self.entries.shape[3], self.entries.shape[2] * self.again)
        return at_most(dot_error(terms) * self.size() + ONCE * self.lost)


@dataclass(frozen=True)
class Stem:
    """G(v → c) and G(x → z) for an operation v = φ(z): windows of the first read whole groups of rows of the second.

    Attributes:
        last: G(v → c).
        first: G(x → z).
        inside: the k groups of rows of G(x → z) that each window of G(v → c) reads, shape (B, k).
        order: for each of these rows its place in the window, shape (B, k, r).
        shape: places of the product in windows, without its entries.
        into: for each column of each of the groups its place in the window of the product, shape (B, k, c).
    """

    last: Windows
    first: Windows
    inside: Tensor
    order: Tensor
    shape: Windows
    into: Tensor

    @classmethod
    def of(cls, last: Windows, first: Windows) -> Stem | None:
        """None unless every group lies in one window, as many in each, and the product is not 0."""
        count, width = last.columns.shape
        entries = torch.arange(count * width, device=last.columns.device)
        flat = last.columns.flatten()
        if first.rows.numel() != len(flat) or not torch.equal(flat.sort().values, entries):
            return None  # several windows read the same entry, or none does
        place = torch.empty_like(flat).index_copy_(0, flat, entries)[first.rows]
        owner, slot = place // width, place % width
        each = owner[:, 0].bincount(minlength=count)
        if bool((owner != owner[:, :1]).any()) or bool((each != each[0]).any()):
            return None
        inside = owner[:, 0].argsort(stable=True).reshape(count, -1)
        read = first.columns[inside].flatten(1)  # (B, k c)
        window = torch.arange(count, device=read.device)[:, None].expand_as(read)
        row = last.rows[:, :1].expand_as(read)
        filled = (first.entries[0] != 0).any(1)[inside].flatten(1)
        if not bool(filled.any()):
            return None
        shape = Windows.of(row[filled], read[filled], filled[filled].double(), last.rows, first.width)
        into = read.new_zeros(count, first.width)
        known = shape.entries[0].amax(1) > 0
        into[window[:, :1].expand_as(shape.columns)[known], shape.columns[known]] = torch.arange(
            shape.columns.shape[1], device=read.device
        ).expand_as(shape.columns)[known]
        return cls(last, first, inside, slot[inside], shape, into.gather(1, read).reshape(*inside.shape, -1))

    def product(self, slopes: Tensor) -> Windows:
        """G(v → c) diag(φ') G(x → z) for slopes of shape (N, entries of v)."""
        count, groups, _ = self.into.shape
        across = torch.arange(count, device=self.into.device)[:, None, None]
        after = self.last.entries[0].mT[across, self.order]  # (B, k, r, rows)
        before = self.first.entries[0].mT[self.inside]  # (B, k, c, r)
        most = self.shape.columns.shape[1]
        places = (self.into + across * most).flatten()
        entries = slopes.new_empty(len(slopes), count, after.shape[3], most)
        for total, some in zip(entries, slopes[:, self.first.rows[self.inside]], strict=True):
            parts = (before * some[:, :, None] @ after).flatten(0, 2)
            total.copy_(
                torch.zeros_like(total)
                .reshape(-1, after.shape[3])
                .index_add_(0, places, parts)
                .unflatten(0, (count, most))
                .mT
            )
        terms = self.first.rows.shape[1] * groups
        lost = dot_error(terms) * slopes.abs().amax(1) * self.last.size() * self.first.size()
        return replace(self.shape, entries=entries, lost=at_most(lost))
