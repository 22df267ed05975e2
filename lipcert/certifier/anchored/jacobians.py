"""Products with the Jacobians of a network at nominal values, and norms computed from them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lipcert.bounds import Form
from lipcert.certifier.anchored.costs import ENTRIES, FEW, GRAMS, LONG, PROBES, TOGETHER, worth_writing
from lipcert.certifier.anchored.gradients import Values, disturbed
from lipcert.certifier.anchored.matrices import Groups, JacobianMatrix, groups_of, written_error
from lipcert.certifier.anchored.network import Network, an_image
from lipcert.certifier.anchored.sparse import nonzero_entries, pixels
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.graph import Node
from lipcert.norms import (
    Draw,
    explicit_norm,
    explicit_row_norms,
    lanczos_error,
    lanczos_norm,
    row_norms,
    start_vectors,
    written_row_norms,
)
from lipcert.roundoff import Pair

# Norms of longer columns are bounded with this many products.
_COLUMN_PROBES = 512
# The largest number of products of numbers in a Gram matrix, some seconds of a core.
_GRAM_WORK = 2**36
# The largest number of entries of the Jacobians computed at once, 1 GiB.
_MOST = 2**27
# Lanczos runs from all start vectors at once if the values have at most this many entries for an image.
_COPIED = 2**19
# The number of entries of all values in one product, so that they stay in the cache.
_CACHED = 2**22


class LinearOperator(NamedTuple):
    """G as products: ``product`` is v ↦ Gv, ``adjoint`` u ↦ Gᵀu, on tensors of shape (..., N, entries)."""

    product: Callable[[Tensor], Tensor]
    adjoint: Callable[[Tensor], Tensor]


class Jacobians:
    """Norms of the Jacobians G(a → b) of a network."""

    def __init__(
        self,
        network: Network,
        *,
        tolerance: float,
        deterministic: bool,
        seed: int,
        delta: float = 0.0,
    ):
        self.network, self.tolerance, self.deterministic, self.seed = network, tolerance, deterministic, seed
        self.delta = delta
        self.constants: dict[Pair, JacobianMatrix] = {}
        self.factors: dict[Pair, JacobianMatrix] = {}
        self.groups: dict[Pair, Groups | None] = {}
        self._written: dict[Pair, bool] = {}
        self.bent: dict[Pair, tuple[JacobianMatrix, JacobianMatrix, JacobianMatrix | None]] = {}
        self._bends: dict[Pair, Node | None] = {}
        self._entrance: list[JacobianMatrix | None] = []

    def within(self, tolerance: float) -> Jacobians:
        """A copy with another tolerance."""
        other = copy.copy(self)
        other.tolerance = tolerance
        return other

    def check_sizes(self, pairs: Sequence[Pair]) -> None:
        """Checks that every Jacobian is small enough to be computed in full."""
        a, b = max(pairs, key=lambda pair: pair[0].entries * pair[1].entries)
        rows, columns = b.entries, a.entries
        if rows * columns > _MOST:
            raise InputError(
                f"deterministic norms need full Jacobians, and one of this network has {rows} x {columns} entries; "
                "use rigor='probabilistic'"
            )

    def writes_out(self, a: Node, rows: int) -> bool:
        """Whether the norm of a G(a → b) with this many rows is computed from its entries, without start vectors."""
        return self.deterministic or min(a.entries, rows) <= FEW

    def writes(self, a: Node, b: Node) -> bool:
        """Whether G(a → b) is computed as a matrix (:mod:`.matrices`), from which all its norms follow."""
        b = self.network.root(b)
        if (a, b) not in self._written:
            self._written[a, b] = self._worthwhile(a, b)
        return self._written[a, b]

    def _worthwhile(self, a: Node, b: Node) -> bool:
        network = self.network
        few, many = sorted((a.entries, b.entries))
        if not few:
            return False
        first = self.first(b) if a is network.source else None
        if first is not None:
            return b is first or self.writes(first, b)
        if few * many > ENTRIES * (1 if not network.affine_path(a, b) else 4) or few**2 * many > _GRAM_WORK:
            return False
        return few <= FEW or self.deterministic or worth_writing(network, a, b)

    def first(self, b: Node) -> Node | None:
        """The start c of the first stage, if the perturbed value counts with a factor of its Jacobian there."""
        start = self.network.entrance(b)
        return start if start is not None and self.entrance() is not None else None

    def through(self, a: Node, b: Node) -> Node | None:
        """The c, the last start of a stage, with G(a → b) = G(c → b) G(a → c) where this product is computed."""
        network = self.network
        if a is not network.source or not self.writes(a, b):
            return None
        first, place = self.first(b), network.replay.position
        for c in (stage.start for stage in reversed(network.stages[1:]) if place[stage.start] < place[b]):
            if self.writes(a, c) and self.writes(c, b) and self.bend(c, b) is None:
                return c if network.chains.on_every_path(c, b) else first
        return None if first is b else first

    def error_of(self, a: Node, b: Node) -> float:
        """The error of the norm of G(a → b) in units of S, as in :meth:`error_factor`, whichever way it is found."""
        return written_error(a.entries, b.entries) if self.writes(a, b) else self.error_factor(a, b.entries)

    def error_factor(self, a: Node, rows: int) -> float:
        """The error of :meth:`norm` for a matrix with these rows, in units of a bound S on that of products with it."""
        if self.writes_out(a, rows):
            return written_error(a.entries, rows)
        return lanczos_error(part=start_vectors(self.delta, min(a.entries, rows))[1])

    def writes_out_rows(self, a: Node, b: Node) -> bool:
        """Whether the largest norm of a row is computed from the entries: of an affine path, once for all images."""
        few = min(a.entries, b.entries) <= PROBES
        return self.deterministic or few or (a.entries <= LONG and self.network.affine_path(a, b))

    def operator(
        self,
        a: Node,
        b: Node,
        values: Values,
        *,
        several: bool,
        form: Form | None = None,
        path: Sequence[Node] | None = None,
    ) -> LinearOperator:
        """M G(a → b) by autograd.

        If b does not depend on a, for instance because the value is overwritten, then Gᵀw does not depend on w for
        autograd. A derivative that was detached looks the same. So G = 0 is checked on a random w.
        """
        source = values[a].detach().requires_grad_()
        with torch.enable_grad():
            (target,) = self.network.replay(a, source, [b], dict(values), path)
            target = target if form is None else form(target)
            weight = torch.zeros_like(target, requires_grad=True)
            (pulled,) = torch.autograd.grad(target, source, weight, create_graph=True)
        if not pulled.requires_grad:
            self._check_zero(b, target, source)

        def adjoint(u: Tensor) -> Tensor:
            u = u.reshape(*u.shape[:-1], *target.shape[1:])
            (result,) = torch.autograd.grad(target, source, u, retain_graph=True, is_grads_batched=several)
            return result.reshape(*result.shape[: u.dim() - target.dim() + 1], -1)

        def product(v: Tensor) -> Tensor:
            v = v.reshape(*v.shape[:-1], *source.shape[1:])
            if not pulled.requires_grad:
                return v.new_zeros(*v.shape[: v.dim() - source.dim() + 1], target[0].numel())
            (result,) = torch.autograd.grad(pulled, weight, v, retain_graph=True, is_grads_batched=several)
            return result.reshape(*result.shape[: v.dim() - source.dim() + 1], -1)

        return LinearOperator(product, adjoint)

    def entrance(self) -> JacobianMatrix | None:
        """A factor of G(x → c) for the start c of the first stage; None if it has no groups and is too large."""
        if not self._entrance:
            network = self.network
            values = network.values(an_image(network.model)[:, None])
            matrix = self._sparse(network.source, network.stages[0].start, values)
            self._entrance.append(None if matrix is None else matrix.reduced())
        return self._entrance[0]

    def _sparse(self, a: Node, b: Node, values: Values) -> JacobianMatrix | None:
        """G(a → b), the same for all images, from the entries that are not 0; None if these are too many."""
        filled = self._filled(a, b, values)
        if filled is None:
            return None
        row, column, value = filled
        groups = groups_of(row, column, (b.entries, a.entries))
        if groups is None:
            if a.entries * b.entries > 4 * ENTRIES:
                return None
            dense = value.new_zeros(1, b.entries, a.entries)
            dense[0, row, column] = value
            return JacobianMatrix.of(dense, None)
        down, across = (part.flatten().argsort() for part in groups)  # the places of rows and columns in their order
        high, wide = groups.rows.shape[1], groups.columns.shape[1]
        blocks = value.new_zeros(len(groups.rows) * high * wide)
        blocks[down[row] * wide + across[column] % wide] = value
        return JacobianMatrix(blocks.reshape(1, -1, high, wide), groups, value.new_zeros(1))

    def constant(self, a: Node, u: Node, values: Values) -> JacobianMatrix:
        """G(a → u) for an affine path, from the values at one image."""
        if (a, u) not in self.constants:
            matrix = self._sparse(a, u, values)
            self.constants[a, u] = self.matrices([(a, u)], values)[a, u] if matrix is None else matrix
            self.groups[a, u] = self.constants[a, u].groups
        return self.constants[a, u]

    def _filled(self, a: Node, b: Node, values: Values) -> tuple[Tensor, Tensor, Tensor] | None:
        """The rows, columns and values of the entries of G(a → b) that are not 0; None if these are too many."""
        jacobian, by_rows = self.operator(a, b, values, several=True), b.entries <= 4 * a.entries
        product, node = (jacobian.adjoint, b) if by_rows else (jacobian.product, a)
        entries = nonzero_entries(product, pixels(node, values[node].device), node.entries, 4 * ENTRIES)
        if entries is None or by_rows:
            return entries
        column, row, value = entries
        return row, column, value

    def matrices(self, pairs: Iterable[Pair], values: Values) -> dict[Pair, JacobianMatrix]:
        """G(a → u) for some pairs: rows of one u from the same products, or columns of one a, at thrice the time."""
        starts: dict[Node, list[Node]] = {}
        for a, u in pairs:
            starts.setdefault(u, []).append(a)
        by_rows = {u: some for u, some in starts.items() if u.entries <= sum(a.entries for a in some)}
        targets: dict[Node, list[Node]] = {}
        for u in starts.keys() - by_rows.keys():
            for a in starts[u]:
                targets.setdefault(a, []).append(u)
        dense = self._rows(by_rows, values) if by_rows else {}
        for a, some in targets.items():
            dense |= {(a, u): part for u, part in zip(some, self._columns(a, some, values), strict=True)}
        return {pair: JacobianMatrix.of(part, self.groups_at(*pair, part)) for pair, part in dense.items()}

    def _together(self, path: Sequence[Node]) -> int:
        """The number of images in a product with several vectors."""
        return max(1, _CACHED // (TOGETHER * max(1, sum(math.prod(node.shape) for node in path))))

    def _rows(
        self, starts: Mapping[Node, Sequence[Node]], values: Values, path: Sequence[Node] | None = None
    ) -> dict[Pair, Tensor]:
        """All rows of G(a → u), shape (N, entries of u, entries of a), for every u and its a, along ``path`` alone."""
        position = self.network.replay.position
        sources = sorted({a for some in starts.values() for a in some}, key=position.__getitem__)
        if path is None:
            inside = {node for a in sources for node in self.network.replay.between(a, list(starts))}
            path = sorted(inside, key=position.__getitem__)
        images = len(values[sources[0]])
        dense = {(a, u): values[a].new_zeros(images, u.entries, a.entries) for u, some in starts.items() for a in some}
        together = self._together(path)
        for i, part in _parts(values, images, together):
            reached, added = disturbed(part, sources, path, list(starts))
            for u, some in starts.items():
                self._check_used(reached[u], [added[a] for a in some], u)
                for rows in torch.arange(u.entries, device=values[u].device).split(TOGETHER):
                    unit = _unit_vectors(rows, u.entries, len(part[u])).reshape(len(rows), len(part[u]), *u.shape)
                    moved = torch.autograd.grad(
                        reached[u], [added[a] for a in some], unit, retain_graph=True, is_grads_batched=True
                    )
                    for a, one in zip(some, moved, strict=True):
                        dense[a, u][i : i + together, rows] = one.flatten(2).movedim(0, 1)
        return dense

    @staticmethod
    def _check_used(target: Tensor, sources: Sequence[Tensor], u: Node) -> None:
        """Checks that autograd finds a path from each of the sources."""
        slopes: Sequence[Tensor | None] = [None]
        if target.requires_grad:
            slopes = torch.autograd.grad(
                target, sources, torch.zeros_like(target), retain_graph=True, allow_unused=True
            )
        if any(slope is None for slope in slopes):
            raise UnsupportedOperation([(f"{u.name} after a derivative that cannot be differentiated", u.path)])

    def groups_at(self, a: Node, u: Node, dense: Tensor) -> Groups | None:
        """The groups of the rows and columns of G(a → u), from the first of the matrices that was seen."""
        if (a, u) not in self.groups:
            rows, columns = dense[0].nonzero().unbind(1)
            self.groups[a, u] = groups_of(rows, columns, (dense.shape[1], dense.shape[2]))
        return self.groups[a, u]

    def bend(self, a: Node, u: Node) -> Node | None:
        """The only operation between a and u that is not affine, if it acts entry by entry; None without one.

        Then G(a → u) = G(v → u) diag(φ') G(a → z) + G₀ for this v = φ(z), with the Jacobian G₀ of u for a constant v.
        All but the slopes φ' is the same for all images.
        """
        if (a, u) not in self._bends:
            nonlinear = [node for node in self.network.replay.between(a, [u]) if node in self.network.rules]
            alone = len(nonlinear) == 1 and nonlinear[0] is not u and self._diagonal(nonlinear[0])
            small = alone and nonlinear[0].entries * max(a.entries, u.entries) <= ENTRIES
            self._bends[a, u] = nonlinear[0] if small else None
        return self._bends[a, u]

    def _diagonal(self, v: Node) -> bool:
        """Whether the Jacobian of v is a diagonal matrix for its only operand."""
        network, operands = self.network, [*v.operands]
        if len(operands) != 1 or operands[0].shape != v.shape or not network.rules[v].entrywise:
            return False
        return [link.operand for link in network.chains.links[v]] == operands

    def bends(self, pairs: Iterable[Pair]) -> dict[Pair, Node]:
        """The operations :meth:`bend` of the pairs whose matrices are computed with it."""
        starts = {(self.through(a, u) or a, u) for a, u in pairs if self.writes(a, u)}
        return {pair: v for pair in starts if (v := self.bend(*pair)) is not None}

    def beside(self, a: Node, u: Node, v: Node, values: Values) -> JacobianMatrix | None:
        """The Jacobian of u with respect to a while v is constant; None for 0."""
        path, moving = [node for node in self.network.replay.between(a, [u]) if node is not v], {a}
        for node in path:
            if moving & {*node.operands}:
                moving.add(node)
        if u not in moving:
            return None
        return JacobianMatrix.of(self._rows({u: [a]}, values, path)[a, u], None)

    def _columns(self, a: Node, targets: Sequence[Node], values: Values) -> list[Tensor]:
        """All columns of G(a → u), shape (N, entries of u, entries of a), for every u, in the same products."""
        images = len(values[a])
        dense = [values[a].new_empty(images, u.entries, a.entries) for u in targets]
        together = self._together(self.network.replay.between(a, targets))
        for i, part in _parts(values, images, together):
            product = self._products(a, targets, part)
            for columns in torch.arange(a.entries, device=values[a].device).split(TOGETHER):
                moved = product(_unit_vectors(columns, a.entries, len(part[a])))
                for whole, one in zip(dense, moved, strict=True):
                    if one is None:
                        whole[i : i + together, :, columns] = 0
                    else:
                        whole[i : i + together, :, columns] = one.flatten(2).movedim(0, 2)
        return dense

    def _products(self, a: Node, targets: Sequence[Node], values: Values) -> Callable[[Tensor], list[Tensor | None]]:
        """v ↦ G(a → u) v for every u, for several v at once; None for 0. As for :meth:`operator`."""
        source = values[a].detach().requires_grad_()
        with torch.enable_grad():
            reached = self.network.replay(a, source, targets, dict(values))
            weights = [torch.zeros_like(target, requires_grad=True) for target in reached]
            (pulled,) = torch.autograd.grad(reached, source, weights, create_graph=True)
        probe = torch.zeros_like(source)
        depends: tuple[Tensor | None, ...] = (None,) * len(weights)
        if pulled.requires_grad:
            depends = torch.autograd.grad(pulled, weights, probe, retain_graph=True, allow_unused=True)
        for u, target, moved in zip(targets, reached, depends, strict=True):
            if moved is None:
                self._check_zero(u, target, source)
        used = [weight for weight, moved in zip(weights, depends, strict=True) if moved is not None]

        def product(v: Tensor) -> list[Tensor | None]:
            v = v.reshape(*v.shape[:-1], *source.shape[1:])
            grads = torch.autograd.grad(pulled, used, v, retain_graph=True, is_grads_batched=True) if used else ()
            remaining = iter(grads)
            return [None if moved is None else next(remaining) for moved in depends]

        return product

    def _check_zero(self, b: Node, target: Tensor, source: Tensor) -> None:
        """Checks on a random vector that a derivative which autograd takes for 0 is 0."""
        chance = torch.randn(target.shape, generator=torch.Generator().manual_seed(self.seed), dtype=target.dtype)
        (gradient,) = torch.autograd.grad(target, source, chance.to(target), retain_graph=True, allow_unused=True)
        if gradient is not None and gradient.any():
            raise UnsupportedOperation([(f"{b.name} after a derivative that cannot be differentiated", b.path)])

    def norm(
        self,
        a: Node,
        b: Node,
        values: Values,
        draw: Draw | None,
        *,
        form: Form | None = None,
        path: Sequence[Node] | None = None,
    ) -> Tensor:
        """Upper bounds on ‖M G(a → b)‖, shape (N,), before rounding errors are added; in full without a ``draw``."""
        images, rows, columns = len(values[a]), rows_of(b, values, form), a.entries
        if not rows * columns:  # such as the tokens of a class where there are none
            return values[a].new_zeros(images, dtype=torch.float64)
        together = max(1, _MOST // (rows * columns)) if draw is None else images
        norms = []
        for i, part in _parts(values, images, min(images, together)):
            some = None if form is None else form.only(slice(i, i + together))
            if draw is not None:
                norms.append(self._by_lanczos(a, b, part, draw, rows, some, path))
                continue
            jacobian = self.operator(a, b, part, several=True, form=some, path=path)
            forth, size = (jacobian.product, columns) if columns <= rows else (jacobian.adjoint, rows)
            norms.append(explicit_norm(forth, len(part[a]), size, device=part[a].device))
        return torch.cat(norms)

    def _by_lanczos(
        self,
        a: Node,
        b: Node,
        values: Values,
        draw: Draw,
        rows: int,
        form: Form | None,
        path: Sequence[Node] | None,
    ) -> Tensor:
        images, device, columns = len(values[a]), values[a].device, a.entries
        inside = self.network.replay.between(a, [b]) if path is None else path
        size = min(rows, columns)
        copies = start_vectors(draw.delta, size)[0] if sum(math.prod(node.shape) for node in inside) <= _COPIED else 1
        if copies > 1:
            read = {a, *(operand for node in inside for operand in node.operands)} - {*inside}
            values = {u: values[u].repeat(copies, *[1] * len(u.shape)) for u in read}
            form = None if form is None else form.only(torch.arange(images, device=device).repeat(copies))
        jacobian = self.operator(a, b, values, several=False, form=form, path=path)
        forth, back = jacobian if columns <= rows else reversed(jacobian)
        return lanczos_norm(
            forth, back, images, size, draw=draw, tolerance=self.tolerance, together=copies > 1, device=device
        )

    def rows(self, a: Node, b: Node, values: Values, draw: Draw | None, block: int) -> Tensor:
        """Upper bounds on the norms of the blocks of ``block`` consecutive rows of G(a → b), shape (N, blocks)."""
        images, rows, columns = len(values[a]), b.entries, a.entries
        if not rows * columns:
            return values[a].new_zeros(images, max(1, rows // block), dtype=torch.float64)
        together = min(images, max(1, _MOST // (rows * columns))) if self.writes_out(a, rows) else images
        norms = []
        for _, part in _parts(values, images, max(1, min(together, GRAMS // (rows * block)))):
            jacobian = self.operator(a, b, part, several=True)
            count, device = len(part[a]), part[a].device
            if rows <= PROBES:
                norms.append(written_row_norms(jacobian.adjoint, count, rows, block=block, device=device))
            elif draw is None:
                norms.append(explicit_row_norms(jacobian.product, count, columns, block=block, device=device))
            else:
                norms.append(row_norms(jacobian.product, count, columns, draw=draw, block=block, device=device))
        return torch.cat(norms)

    def columns(self, a: Node, b: Node, values: Values, draw: Draw | None, form: Form | None = None) -> Tensor:
        """Upper bounds on the norms of the columns of M G(a → b), shape (N, entries of a); exact without a ``draw``."""
        jacobian, rows = self.operator(a, b, values, several=True, form=form), rows_of(b, values, form)
        images, device = len(values[b]), values[b].device
        if draw is None:
            return explicit_row_norms(jacobian.adjoint, images, rows, device=device)
        return row_norms(jacobian.adjoint, images, rows, draw=draw, probes=_COLUMN_PROBES, device=device)


def rows_of(b: Node, values: Values, form: Form | None) -> int:
    """The number of rows of M G(a → b), with M given by a form, the identity by default."""
    return b.entries if form is None else form(values[b])[0].numel()


def _unit_vectors(places: Tensor, entries: int, images: int) -> Tensor:
    """Unit vectors with the 1 at these places, shape (places, images, entries)."""
    unit = torch.zeros(len(places), entries, dtype=torch.float64, device=places.device)
    unit[torch.arange(len(places), device=places.device), places] = 1.0
    return unit[:, None].expand(-1, images, -1)


def _parts(values: Values, images: int, together: int) -> Iterator[tuple[int, dict[Node, Tensor]]]:
    """Splits the values into parts of ``together`` images; yields each part with the index of its first image."""
    for i in range(0, images, together):
        yield i, {node: value[i : i + together] for node, value in values.items()}
