"""Canonical forms: replaces groups of operations by the single operation that they implement.

Rules bound LayerNorm, RMSNorm, softmax and GELU far better as single operations than as the sums, squares and roots
that implement them. This package searches a captured network for such implementations. Every replacement is an identity
over the real numbers, composed of identities of single operations. Let S = Σ x² over some axes, of x itself or of x
minus its mean over them (*centred*). The facts that the search derives about a value are that it equals

* Σ_k c_k xᵏ, entry by entry (:class:`Polynomial`),
* the mean of x, or x minus it (:class:`Mean`, :class:`MinusMean`),
* k·max(αS + β, low)^e (:class:`Energy`): variances, norms and their roots, with constants added or clamped before the
  root,
* a + b·g(Σ_k c_k xᵏ) for g = exp, erf, tanh, sigmoid (:class:`Function`).

Each operation maps facts about its operands to facts about its result. Products and quotients of these are

* K x (αS + β)^(−½) = c·x/√(S/n + eps) with eps = β/(αn), c² = K²/(αn), n entries: RMSNorm with the weight c, LayerNorm
  if centred, and with c ≠ 1 the smooth projections of lipcert.surgery;
* K x max(αS, low)^(−½) = f·x/max(‖x‖, R), f² = K²/α, R² = low/α: a normalisation, or the projection onto a ball if
  f = R;
* x(1 + erf(x/√2))/2 and its tanh form, x·sigmoid(x), exp(z)/Σ exp(z) and log Σ exp(z), where shifts of z that are
  constant along the axis of the sum cancel, b + relu(a − b) = max(a, b) and a − relu(a − b) = min(a, b), MaxMin, and
  attention.

Constants are exact fractions. The constants of an operation (eps, R) are rounded down and its factors up, which can
only enlarge Lipschitz constants and ranges. √½ and √(2/π) may be off by 2⁻⁵⁰, about their rounding error. Similar
operations that are not equal are left as they are: eps outside the root, an uncentred x over its standard deviation, a
sum along another axis. A factor that is detached from the gradient counts in full, because it depends on the image.

A group is replaced only if no other operation reads its intermediate values, if all of them have one floating-point
type, and if the network then gives the same result on several images. The identities hold for real numbers: bounds on
rounding in a deployed type use the original operations (:mod:`lipcert.roundoff`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._registry import rule_for
from lipcert.bounds.forms._finder import Finder
from lipcert.bounds.forms._patterns import Match
from lipcert.graph import Graph, Node, close, map_nodes, needed

_ROUNDS = 4  # one match can be an operation of another


def canonical_forms(graph: Graph, question: str, images: Sequence[Tensor]) -> Graph:
    """The network with every recognised group of operations replaced by one; the same network if there is none."""
    graph = rewritten = needed(graph)
    names: list[str] = []
    for _ in range(_ROUNDS):
        rewritten, added = _rewritten(rewritten, question, images[0].device if images else torch.device("cpu"))
        if not added:
            break
        names += added
    tolerance = 1e-10 if graph.input.dtype == torch.float64 else 1e-4
    with torch.no_grad():
        if not names or not all(close(rewritten.replay(image), graph.replay(image), tolerance) for image in images):
            return graph
    return replace(rewritten, forms=tuple(names))


def _rewritten(graph: Graph, question: str, device: torch.device) -> tuple[Graph, list[str]]:
    """Replaces the matches whose intermediate values are not read elsewhere; returns the graph and their names."""
    choices: dict[Node, list[Match]] = {}
    for match in Finder(graph, device).matches():
        if getattr(rule_for(match.name), question, None) is not None:
            choices.setdefault(match.node, []).append(match)
    while choices:
        rewritten, replacement = _replaced(graph, {node: matches[0] for node, matches in choices.items()})
        remaining = set(rewritten.nodes)
        open_ = [
            node
            for node, matches in choices.items()
            if any(replacement(part) in remaining for part in matches[0].inside)
        ]
        if not open_:
            return rewritten, [f"{_name(matches[0].name)} at {node.path}" for node, matches in choices.items()]
        for node in open_:
            choices[node].pop(0)
        choices = {node: matches for node, matches in choices.items() if matches}
    return graph, []


def _name(key: Any) -> str:
    return key if isinstance(key, str) else key.__name__


def _replaced(graph: Graph, matches: dict[Node, Match]) -> tuple[Graph, Callable[[Node], Node]]:
    """The network with the single operation in place of each match, and the map from old nodes to new ones."""
    stands_for: dict[Node, Node] = {}
    nodes: list[Node] = []

    def replacement(node: Node) -> Node:
        return stands_for.get(node, node)

    for node in graph.nodes:
        if node in matches:

            def emit(op: Any, function: Any, args: Any, kwargs: Any, shape: Any, like: Node = node) -> Node:
                nodes.append(Node(op, function, args, kwargs, like.path, tuple(shape), dtype=like.dtype))
                return nodes[-1]

            stands_for[node] = matches[node].build(emit, [replacement(read) for read in matches[node].reads])
        elif any(operand in stands_for for operand in node.operands):
            args, kwargs = map_nodes(replacement, (node.args, dict(node.kwargs)))
            stands_for[node] = Node(
                node.op, node.function, args, kwargs, node.path, node.shape, node.inner, node.result, node.dtype
            )
            nodes.append(stands_for[node])
        else:
            nodes.append(node)
    return needed(Graph(graph.input, replacement(graph.output), tuple(nodes))), replacement
