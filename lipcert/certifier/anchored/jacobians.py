"""Gradients and products with the Jacobians of a network at nominal values, and norms computed from them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipcert.bounds import Form, Tag, arguments, per_image, tagged
from lipcert.certifier.anchored.network import Network, an_image
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.graph import Node, applied, evaluate_each
from lipcert.norms import (
    Draw,
    dot_error,
    explicit_norm,
    explicit_row_norms,
    factor,
    lanczos_error,
    lanczos_norm,
    row_norms,
    row_norms_by_adjoint,
    start_vectors,
)
from lipcert.numerics import l2_norm
from lipcert.roundoff import Pair

# A Jacobian with at most this many rows or columns is computed in full, which takes fewer products than Lanczos.
FEW = 64
# By default, a probabilistic bound on row norms takes this many products. Rows with at most so many entries are
# computed in full, and up to twice as many rows, each of which takes one backward pass where a product takes two.
PROBES = 256
# For affine paths, which are the same for all images: Jacobians with at most so many columns are computed in full.
LONG = 4096
# The largest number of entries of the Gram matrices of blocks of rows, per image; larger blocks are not bounded
# separately.
GRAMS = 2**25
# Norms of longer columns are bounded with this many products.
_COLUMN_PROBES = 512
# The largest number of entries of the Jacobians computed at once, 1 GiB.
_MOST = 2**27
# Lanczos runs from all start vectors at once if the values have at most this many entries for an image.
_COPIED = 2**19

Values = Mapping[Node, Tensor]


def perturbed(
    values: Values, sources: Sequence[Node], path: Sequence[Node], targets: Sequence[Node]
) -> tuple[dict[Node, Tensor], dict[Node, Tensor]]:
    """The targets as functions of perturbations that are added to the sources, and these perturbations, all 0."""
    read = [operand for node in path for operand in node.operands]
    inside = {*path}
    fixed = dict.fromkeys(u for u in (*sources, *targets, *read) if u not in inside)
    added = {a: torch.zeros_like(values[a], requires_grad=True) for a in sources}
    with torch.enable_grad():
        return evaluate_each(path, {u: values[u] for u in fixed}, targets, added), added


def margin_gradients(
    network: Network,
    values: Values,
    nodes: Sequence[Node],
    rivals: Tensor,
    predicted: Tensor,
    linear: Mapping[Node, Tensor] = MappingProxyType({}),
) -> tuple[Tensor, dict[Node, Tensor]]:
    """∇m with respect to the source, shape (N, entries), and to results of operations, for margins m = f_y − f_j.

    With ``linear``, Σ_u ⟨b_u, u⟩ is subtracted from m first.
    """
    output, source = network.graph.output, network.source
    path = network.graph.between(source, [output])
    targets = list(dict.fromkeys((output, *linear)))
    reached, added = perturbed(values, list(dict.fromkeys((source, *nodes))), path, targets)
    with torch.enable_grad():
        logits = reached[output].reshape(len(rivals), -1)
        margin = logits.gather(1, predicted[:, None]) - logits.gather(1, rivals[:, None])
        pulled = [torch.ones_like(margin), *(-slope for slope in linear.values())]
        gradients = torch.autograd.grad([margin, *(reached[u] for u in linear)], list(added.values()), pulled)
    slopes = dict(zip(added, gradients, strict=True))
    return per_image(slopes[source]), {node: slopes[node] for node in nodes}


def tangents(network: Network, values: Values, nodes: Sequence[Node], direction: Tensor) -> dict[Node, Tensor]:
    """G(source → u) p for every u of ``nodes`` for which autograd finds it, each of shape (N, *u.shape)."""
    source = values[network.source].detach().requires_grad_()
    start = direction.reshape(source.shape)
    with torch.enable_grad():
        targets = network.graph.forward(network.source, source, [u for u in nodes if u is not network.source], values)
        moving = [target for target in targets if target.requires_grad]
        weights = [torch.zeros_like(target, requires_grad=True) for target in moving]
        products: list[Tensor | None] = [None] * len(weights)
        if moving:
            (pulled,) = torch.autograd.grad(moving, source, weights, create_graph=True)
            if pulled.requires_grad:
                products = list(torch.autograd.grad(pulled, weights, start, allow_unused=True))
    remaining = iter(products)
    moved = {u: start for u in nodes if u is network.source}
    for u, target in zip([u for u in nodes if u is not network.source], targets, strict=True):
        one = next(remaining) if target.requires_grad else None
        if one is not None:
            moved[u] = one.detach()
    return moved


class LinearOperator(NamedTuple):
    """G as products: ``product`` is v ↦ Gv, ``adjoint`` u ↦ Gᵀu, on tensors of shape (..., N, entries)."""

    product: Callable[[Tensor], Tensor]
    adjoint: Callable[[Tensor], Tensor]


class Narrowing(NamedTuple):
    """A convolution z = A a + b through which alone a value a is read, and which has fewer entries than a.

    Its patches are disjoint, so that A is a diagonal of equal blocks W, one for each patch. With a square L such that
    W Wᵀ ⪯ L Lᵀ (:func:`lipcert.norms.factor`) for each of them, A Aᵀ ⪯ L Lᵀ for their diagonal, and for every matrix G

        ‖G A‖² = ‖G A Aᵀ Gᵀ‖ ≤ ‖G L Lᵀ Gᵀ‖ = ‖G L‖²;

    with G = eᵢᵀ G the same holds for norms of rows. So norms of Jacobians from a are bounded by those of matrices with
    as many columns as z has entries, and the convolution, which is most of the work, is not evaluated.

    A bound S on the rounding error of products with G A is, times 1 + 1e-6, one for G L, and callers multiply it by
    more than that: S is a sum of products of bounds on norms and errors of single operations, or of norms of G L
    themselves; ‖L‖ is at most (1 + 1e-6)‖A‖; and :meth:`of` compares the error of a product with L with that of one
    with A.

    Attributes:
        node: z.
        kernel: L, shape (channels, channels).
    """

    node: Node
    kernel: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        """L v, shape (N, *z.shape)."""
        return (self.kernel @ v.flatten(-2)).reshape(v.shape)

    @classmethod
    def of(cls, network: Network) -> Narrowing | None:
        """That of the source; None if there is none."""
        source = network.source
        after = network.graph.between(source, [network.graph.output])  # those of tuples too
        readers = [node for node in after if source in node.operands]
        if len(readers) != 1 or not tagged(readers[0], Tag.CONVOLVES) or readers[0].entries >= source.entries:
            return None
        (node,), call = readers, arguments(readers[0])
        weight = call["weight"]
        disjoint = isinstance(weight, Tensor) and call["input"] is source and call.get("padding", 0) in (0, (0, 0))
        if not disjoint or call.get("stride") != tuple(weight.shape[2:]) or weight.shape[1] != source.shape[1]:
            return None
        if weight.dim() != 4 or call.get("dilation", 1) not in (1, (1, 1)) or call.get("groups", 1) != 1:
            return None
        kernel = factor(weight.detach().double().flatten(1))
        if kernel is None:
            return None
        (link,) = network.chains.links[node]
        kappa = network.local(network.values(an_image(network.model)[:, None])).off[link]
        error = dot_error(len(kernel)) * l2_norm(kernel.flatten(), 0)
        return cls(node, kernel) if error <= kappa.min() else None


class Jacobians:
    """Norms of the Jacobians G(a → b) of a network.

    Attributes:
        narrow: how the source is read, if that is through a narrow convolution.
    """

    def __init__(
        self,
        network: Network,
        *,
        tolerance: float,
        probes: int = PROBES,
        deterministic: bool,
        seed: int,
        delta: float = 0.0,
    ):
        self.network, self.tolerance, self.deterministic, self.seed = network, tolerance, deterministic, seed
        self.probes, self.delta = probes, delta
        self.narrow = Narrowing.of(network)

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

    def _entry(self, a: Node, path: Sequence[Node] | None = None) -> Node:
        """The value that is perturbed in place of a; a itself on a path of its own."""
        narrow = self.narrow if a is self.network.source and path is None else None
        return a if narrow is None else narrow.node

    def explicit(self, a: Node, rows: int) -> bool:
        """Whether the norm of a G(a → b) with this many rows is computed from its entries, without start vectors."""
        return self.deterministic or min(self._entry(a).entries, rows) <= FEW

    def error_factor(self, a: Node, rows: int) -> float:
        """The error of :meth:`norm` for a matrix with these rows, in units of a bound S on that of products with it."""
        if self.explicit(a, rows):
            return explicit_error(a.entries, rows)
        return lanczos_error(part=start_vectors(self.delta, min(self._entry(a).entries, rows))[1])

    def explicit_rows(self, a: Node, b: Node) -> bool:
        """Whether the largest norm of a row is computed from the entries: of an affine path, once for all images."""
        columns = self._entry(a).entries
        few = columns <= PROBES or b.entries <= 2 * PROBES
        return self.deterministic or few or (columns <= LONG and self.network.affine_path(a, b))

    def operator(
        self,
        a: Node,
        b: Node,
        values: Values,
        *more: Node,
        several: bool,
        form: Form | None = None,
        path: Sequence[Node] | None = None,
    ) -> LinearOperator:
        """M G(a → b) by autograd; from a source that is read through a :class:`Narrowing`, M G(z → b) L.

        With ``more`` values, the rows of G to each of them follow. Only those to b are checked as described next.

        If b does not depend on a, for instance because the value is overwritten, then Gᵀw does not depend on w for
        autograd. A derivative that was detached looks the same. So G = 0 is checked on a random w.
        """
        start = self._entry(a, path)
        narrow, nominal = None if start is a else self.narrow, values[start].detach()
        source = nominal.requires_grad_() if narrow is None else torch.zeros_like(nominal, requires_grad=True)
        with torch.enable_grad():
            entered = source if narrow is None else nominal + narrow(source)
            target, *others = self.network.graph.forward(start, entered, [b, *more], values, path, _linear)
            target = target if form is None else form(target)
            target = torch.cat([per_image(one) for one in (target, *others)], 1) if others else target
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
        images, rows, columns = len(values[a]), rows_of(b, values, form), self._entry(a, path).entries
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
        images, device, start = len(values[a]), values[a].device, self._entry(a, path)
        inside, columns = self.network.graph.between(start, [b]) if path is None else path, start.entries
        size = min(rows, columns)
        copies = start_vectors(draw.delta, size)[0] if sum(math.prod(node.shape) for node in inside) <= _COPIED else 1
        if copies > 1:
            read = {start, *(operand for node in inside for operand in node.operands)} - {*inside}
            values = {u: values[u].repeat(copies, *[1] * len(u.shape)) for u in read}
            form = None if form is None else form.only(torch.arange(images, device=device).repeat(copies))
        jacobian = self.operator(a, b, values, several=False, form=form, path=path)
        forth, back = jacobian if columns <= rows else reversed(jacobian)
        return lanczos_norm(
            forth, back, images, size, draw=draw, tolerance=self.tolerance, together=copies > 1, device=device
        )

    def rows(self, a: Node, targets: Sequence[tuple[Node, int]], values: Values, draw: Draw | None) -> Tensor:
        """Upper bounds on the norms of blocks of consecutive rows of G(a → b), shape (N, all blocks).

        ``targets`` are the b and the rows of a block: one without a ``draw``. A product with a vector of a draw serves
        all of them; :meth:`norm` checks that autograd finds their derivatives.
        """
        nodes, blocks = zip(*targets, strict=True)
        images, columns, counts = len(values[a]), self._entry(a).entries, [b.entries for b in nodes]
        rows, grams = sum(counts), sum(count * block for count, block in zip(counts, blocks, strict=True))
        if not rows * columns:
            return values[a].new_zeros(images, max(1, rows // blocks[0]), dtype=torch.float64)
        together = images if draw is not None else min(images, max(1, _MOST // (rows * columns)))
        norms = []
        for _, part in _parts(values, images, max(1, min(together, GRAMS // grams))):
            jacobian = self.operator(a, nodes[0], part, *nodes[1:], several=True)
            product, device, each = jacobian.product, part[a].device, len(part[a])
            if draw is not None:
                products = _split(product, counts)
                found = row_norms(products, each, columns, blocks, draw=draw, probes=self.probes, device=device)
            elif rows <= 2 * min(PROBES, columns):
                found = row_norms_by_adjoint(jacobian.adjoint, each, rows, block=blocks[0], device=device)
            else:
                found = explicit_row_norms(product, each, columns, block=blocks[0], device=device)
            norms.append(found)
        return torch.cat(norms)

    def columns(self, a: Node, b: Node, values: Values, draw: Draw | None, form: Form | None = None) -> Tensor:
        """Upper bounds on the norms of the columns of M G(a → b), shape (N, entries of a); exact without a ``draw``."""
        jacobian, rows = self.operator(a, b, values, several=True, form=form), rows_of(b, values, form)
        images, device = len(values[b]), values[b].device
        if draw is None:
            return explicit_row_norms(jacobian.adjoint, images, rows, device=device)
        products = _split(jacobian.adjoint, [self._entry(a).entries])
        return row_norms(products, images, rows, draw=draw, probes=_COLUMN_PROBES, device=device)


def _linear(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation, linearised where torch would compute the slope again in each product.

    A product with a stored slope rounds once more, which the bounds on the errors of operations include.
    """
    if not tagged(node, Tag.ENTRYWISE) or not node.args or [node.args[0]] != [*node.operands]:
        return applied(node, args, kwargs)
    at = args[0].detach()
    result, slope = torch.func.jvp(lambda x: applied(node, (x, *args[1:]), kwargs), (at,), (torch.ones_like(at),))[:2]
    return result + slope * (args[0] - at) if result.shape == at.shape else applied(node, args, kwargs)


def _split(product: Callable[[Tensor], Tensor], counts: list[int]) -> Callable[[Tensor], Sequence[Tensor]]:
    """Products with matrices that have these numbers of rows, from one with all their rows."""
    return lambda v: product(v).split(counts, -1)


def rows_of(b: Node, values: Values, form: Form | None) -> int:
    """The number of rows of M G(a → b), with M given by a form, the identity by default."""
    return b.entries if form is None else form(values[b])[0].numel()


def explicit_error(columns: int, rows: int) -> float:
    """The error of norms that are not computed by Lanczos, in units of a bound S on that of a product.

    With n the larger number of entries, each column or row of a matrix computed in full has an error of at most S, and
    the matrix one of at most √n S. For k Gaussian vectors g_t, the root of a sum of squares over t has an error of at
    most S(Σ_t ‖g_t‖²)^½ and is divided by √(ck). With c > 1/8 and Σ_t ‖g_t‖² < 2kn, whose failure probability is below
    e^(−5000) for k ≥ 128 and n ≥ 256, that is at most 4√n S. 16 + 4√n covers both, and one more S.
    """
    return 16 + 4 * math.sqrt(max(columns, rows))


def _parts(values: Values, images: int, together: int) -> Iterator[tuple[int, dict[Node, Tensor]]]:
    """Splits the values into parts of ``together`` images; yields each part with the index of its first image."""
    for i in range(0, images, together):
        yield i, {node: value[i : i + together] for node, value in values.items()}
