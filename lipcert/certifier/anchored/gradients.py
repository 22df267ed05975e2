"""Gradients by autograd through a part of the network, at nominal values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lipcert.bounds import per_image
from lipcert.graph import Node, run

if TYPE_CHECKING:
    from lipcert.certifier.anchored.network import Network

Values = Mapping[Node, Tensor]


def disturbed(
    values: Values, sources: Sequence[Node], path: Sequence[Node], targets: Sequence[Node]
) -> tuple[dict[Node, Tensor], dict[Node, Tensor]]:
    """The targets as functions of what is added to the sources, for gradients by autograd."""
    inside = {*path}
    outside = [a for a in sources if a not in inside]
    read = [operand for node in path for operand in node.operands]
    fixed = list(dict.fromkeys(u for u in (*outside, *targets, *read) if u not in inside))

    def one(*nominal: Tensor) -> tuple[Tensor, ...]:
        computed: dict[Node, Any] = dict(zip(fixed, nominal, strict=False))
        extra = dict(zip(sources, nominal[len(fixed) :], strict=True))
        for a in outside:
            computed[a] = computed[a] + extra[a]
        for node in path:
            run((node,), computed)
            if node in extra:
                computed[node] = computed[node] + extra[node]
        return tuple(computed[u] for u in targets)

    added = {a: torch.zeros_like(values[a], requires_grad=True) for a in sources}
    with torch.enable_grad():
        reached = torch.vmap(one)(*(values[u] for u in fixed), *added.values())
    return dict(zip(targets, reached, strict=True)), added


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
    path = network.replay.between(source, [output])
    targets = list(dict.fromkeys((output, *linear)))
    reached, added = disturbed(values, list(dict.fromkeys((source, *nodes))), path, targets)
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
        targets = network.replay(network.source, source, [u for u in nodes if u is not network.source], dict(values))
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
