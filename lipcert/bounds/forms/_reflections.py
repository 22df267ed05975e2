"""Householder activations (Singla, Singla and Feizi, "Improved deterministic l2 robustness", ICLR 2022, section 4).

z ↦ z where s = ⟨v, z⟩ ≤ 0, else (I − 2vvᵀ)z, for the pairs z = (x, y) of two halves of the channels and unit vectors
v = (p, q), mostly (sin ½θ, −cos ½θ). With w = (−q, p) that is −|⟨v, z⟩| v + ⟨w, z⟩ w: an orthogonal map, the absolute
value of half of the entries, and an orthogonal map. So it is 1-Lipschitz, as no bound on its operations one by one is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.bounds.forms._choices import COMPARED, parts_of_choice
from lipcert.bounds.forms._facts import number_of
from lipcert.bounds.forms._patterns import Match, half_of, plain
from lipcert.graph import Emit, Node

# By how many roundings of their type sines and cosines may miss the identities between them.
_ROUNDINGS = 16
_LONGEST = 40  # operations between the halves and the result
_COMPLEMENTS = ({"gt", "le"}, {"ge", "lt"})
_MIXED = {2: ("linear", F.linear), 3: ("conv1d", F.conv1d), 4: ("conv2d", F.conv2d)}
# Coefficients of the halves (value, 0) and (value, 1), to broadcast along all axes but that of the channels.
Terms = dict[tuple[Node, int], Tensor]


def reflected(node: Node, device: torch.device) -> Iterator[Match]:
    """A Householder activation of the channels, axis 1, whose last operation is ``cat``."""
    parts, dim = (*node.args, 0)[:2] if node.args else (None, 0)
    if not isinstance(parts, (tuple, list)) or len(parts) != 2 or len(node.shape) not in _MIXED:
        return
    one, two = (_choice(part) for part in parts)
    if one is None or two is None or node.kwargs.get("dim", dim) not in (1, 1 - len(node.shape)):
        return
    combinations: dict[Node, Terms | None] = {}
    terms = [_terms(value, combinations) for value in (one[0], *one[1:3], *two[1:3])]
    x = next((whole for whole, _ in terms[0] or ()), node)
    if one[0] is not two[0] or x.shape != node.shape or x.dtype != node.dtype or x.dtype is None:
        return
    zero = torch.zeros(x.shape[1] // 2, dtype=torch.float64)
    pairs = []
    for term in terms:
        if term is None or not term.keys() <= {(x, 0), (x, 1)}:
            return
        pairs += [zero + term.get((x, half), zero).flatten().cpu() for half in (0, 1)]
    p, q, *branches = pairs
    right = (1 - 2 * p * p, -2 * p * q, zero + 1, zero, -2 * p * q, 1 - 2 * q * q, zero, zero + 1)
    missed = [a - b for a, b in zip((p * p + q * q, *branches), (zero + 1, *right), strict=True)]
    if not bool((torch.stack(missed).abs() <= _ROUNDINGS * torch.finfo(x.dtype).eps).all()):
        return
    v, w = (torch.cat([a.diag(), b.diag()], 1) for a, b in ((p, q), (-q, p)))
    into, back = (
        matrix.reshape(*matrix.shape, *[1] * (len(node.shape) - 2)).to(device, node.dtype)
        for matrix in (torch.cat([v, w]), torch.cat([-v, w]).T)
    )
    slopes = torch.cat([zero - 1, zero + 1]).to(device, node.dtype)
    name, function = _MIXED[len(node.shape)]

    def build(emit: Emit, reads: Sequence[Node]) -> Node:
        turned = emit(name, function, (reads[0], into), {}, node.shape)
        sizes = emit("prelu", F.prelu, (turned, slopes), {}, node.shape)
        return emit(name, function, (sizes, back), {}, node.shape)

    yield Match("prelu", node, (x,), frozenset({*parts, *one[3], *two[3], *combinations}), build)


def _choice(value: Any) -> tuple[Node, Any, Any, set[Node]] | None:
    """(s, value where s > 0, value elsewhere, operations between); both values must agree where s = 0."""
    if not isinstance(value, Node) or value.kwargs:  # such as alpha
        return None
    terms = [value] if value.op == "where" else value.args if value.op == "add" else ()
    choices = [choice for term in terms if isinstance(term, Node) and (choice := parts_of_choice(term)) is not None]
    if not choices or len(choices) != len(terms) or (len(terms) == 2 and {term.op for term in terms} != {"mul"}):
        return None
    masks = [choice[0] for choice in choices]
    if any(mask.args[0] is not masks[0].args[0] or number_of(mask.args[1]) != 0 for mask in masks):
        return None
    between = {*masks}.union(*(choice[3] for choice in choices))
    (_, true, false, _), last = choices[0], choices[-1]
    if len(choices) == 2:  # a product with each of two masks that complement one another
        if {str(mask.op) for mask in masks} not in _COMPLEMENTS:
            return None
        false = last[1]
        between |= {*terms}
    above, below = (true, false) if COMPARED[str(masks[0].op)] > 0 else (false, true)
    return masks[0].args[0], above, below, between


def _terms(value: Any, combinations: dict[Node, Terms | None]) -> Terms | None:
    """A value as a combination of halves with constant coefficients; ``combinations`` holds those of its operations."""
    if not isinstance(value, Node):
        return None
    if (half := half_of(value, 1)) is not None:
        return {half: torch.ones(1, dtype=torch.float64)}
    if value not in combinations:
        combinations[value] = None
        if plain(value) and not value.kwargs and len(value.args) == 2 and len(combinations) <= _LONGEST:
            combinations[value] = _combined(value.op, *value.args, value.shape, combinations)
    return combinations[value]


def _combined(
    op: Any, one: Any, two: Any, shape: tuple[int, ...], combinations: dict[Node, Terms | None]
) -> Terms | None:
    if op == "mul":
        factor, part = (two, one) if isinstance(one, Node) else (one, two)
        scale, terms = _of_channels(factor, shape), _terms(part, combinations)
        return None if scale is None or terms is None else {half: scale * a for half, a in terms.items()}
    if op not in ("add", "sub"):
        return None
    first, second = _terms(one, combinations), _terms(two, combinations)
    if first is None or second is None:
        return None
    sign, none = (1 if op == "add" else -1), torch.zeros(1, dtype=torch.float64)
    return {half: first.get(half, none) + sign * second.get(half, none) for half in (*first, *second)}


def _of_channels(factor: Any, shape: tuple[int, ...]) -> Tensor | None:
    """A constant factor for each channel, float64; None for one that differs within a channel."""
    if (number := number_of(factor)) is not None:
        return torch.full((1,), float(number), dtype=torch.float64)
    if not isinstance(factor, Tensor) or factor.dim() > len(shape):
        return None
    padded = (*[1] * (len(shape) - factor.dim()), *factor.shape)
    if factor.numel() != padded[1] or padded[1] not in (1, shape[1]):
        return None
    return factor.detach().double().cpu().flatten()
