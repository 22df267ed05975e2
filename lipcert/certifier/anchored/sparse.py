"""The entries of a sparse Jacobian that are not 0, from products with it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lipcert.graph import Node

# The number of unit vectors in one product.
_TOGETHER = 64


def nonzero_entries(
    product: Callable[[Tensor], Tensor], groups: Tensor, size: int, most: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The entries of a matrix that are not 0, from products with unit vectors.

    One product is for several rows if they read different columns, as those of distant pixels do. What a group of rows
    reads is seen from a product with NaN for all of them: sums and products with NaN are NaN, so an entry that is not
    NaN was computed without them.
    """
    apart = _reading_apart(product, groups, size, most)
    if apart is None:
        return None
    rows, columns, values, count = [], [], [], 0
    for together, owner, read in apart:
        for some in groups[together].mT.split(_TOGETHER):
            unit = torch.zeros(len(some), 1, size, dtype=torch.float64, device=groups.device)
            moved = product(unit.scatter_(2, some[:, None], 1.0))[:, 0, read]
            line, place = moved.nonzero().unbind(1)
            rows.append(some[line, owner[place]])
            columns.append(read[place])
            values.append(moved[line, place])
            count += len(line)
            if count > most:
                return None
    return torch.cat(rows), torch.cat(columns), torch.cat(values)


def pixels(node: Node, device: torch.device) -> Tensor:
    """The places of the entries of a value in groups, one for each pixel or token, shape (groups, channels)."""
    places = torch.arange(node.entries, device=device).reshape(node.shape)
    places = places.movedim(1, -1) if places.dim() == 4 else places
    return places.reshape(-1, places.shape[-1])


def _reading_apart(
    product: Callable[[Tensor], Tensor], groups: Tensor, size: int, most: int
) -> list[tuple[Tensor, Tensor, Tensor]] | None:
    """Splits groups of rows so that those of one part read different columns: groups, which of them reads, columns."""
    parts: list[tuple[Tensor, list[int], list[Tensor]]] = []  # with whether a column is read
    for some in torch.arange(len(groups), device=groups.device).split(_TOGETHER):
        marked = torch.zeros(len(some), 1, size, dtype=torch.float64, device=groups.device)
        marked.scatter_(2, groups[some][:, None], math.nan)
        for group, reads in zip(some.tolist(), product(marked)[:, 0].isnan(), strict=True):
            columns = reads.nonzero()[:, 0]
            most -= len(columns)
            if most < 0:
                return None
            part = next((part for part in parts if not bool(part[0][columns].any())), None)
            if part is None:
                parts.append(part := (torch.zeros_like(reads), [], []))
            part[0][columns] = True
            part[1].append(group)
            part[2].append(columns)
    return [
        (torch.tensor(members, device=groups.device), torch.cat(places), torch.cat(reads))
        for _, members, reads in parts
        for places in [[torch.full_like(columns, place) for place, columns in enumerate(reads)]]
    ]
