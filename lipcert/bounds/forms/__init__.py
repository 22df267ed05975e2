"""Canonical forms: what a network writes out in several operations, as the one operation that it amounts to.

Rules know LayerNorm, RMSNorm, softmax, GELU as one operation each, and bound them far better than they bound the sums,
squares and roots that these are made of. Here a captured network is searched for such operations written out. What is
found is an identity over the real numbers, put together from identities of single operations. With S = Σ x² over some
axes, of x itself or of x minus its mean there (*centred*), a value may be known to be

* Σ_k c_k xᵏ, entry by entry (:class:`Polynomial`),
* the mean of x, or x minus it (:class:`Mean`, :class:`Centred`),
* k·max(αS + β, low)^e (:class:`Energy`): variances, norms, roots, whatever is added or clamped before the root,
* a + b·g(Σ_k c_k xᵏ) for g = exp, erf, tanh, sigmoid (:class:`Function`).

Each operation maps what is known of its operands to what is known of its result. Products and quotients of these are

* K x (αS + β)^(−½) = c·x/√(S/n + eps) with eps = β/(αn), c² = K²/(αn), n entries: RMSNorm with the weight c, LayerNorm
  if centred, and with c ≠ 1 the smooth projections of lipcert.surgery;
* K x max(αS, low)^(−½) = f·x/max(‖x‖, R), f² = K²/α, R² = low/α: a normalisation, or the projection onto a ball if
  f = R;
* x(1 + erf(x/√2))/2 and its tanh form, x·sigmoid(x), exp(z)/Σ exp(z) and log Σ exp(z), where what z is shifted by along
  the axis of the sum falls out, b + relu(a − b) = max(a, b) and a − relu(a − b) = min(a, b), MaxMin, and attention.

Constants are exact fractions; those of an operation (eps, R) are rounded down and its factors up, which makes every
Lipschitz constant and range larger. √½ and √(2/π) may be off by 2⁻⁵⁰, as much as their rounding. Nothing is taken for
what it is not: eps outside the root, an uncentred x over its standard deviation, or a sum along another axis stay as
they are. A factor that is detached from the gradient counts in full, as it moves with the image all the same.

A form is put in place only if nothing else reads what it replaces, if all of it has one floating-point type, and if the
network then gives the same on several images. The identities hold for real numbers: bounds on rounding in a deployed
type are taken from the network as it is written (:mod:`lipcert.roundoff`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._registry import rule_for
from lipcert.bounds.forms._finder import Finder
from lipcert.bounds.forms._patterns import Form
from lipcert.graph import Graph, Node, close, map_nodes, needed

_ROUNDS = 4  # forms made of forms


def canonical_forms(graph: Graph, question: str, images: Sequence[Tensor]) -> Graph:
    """The same network with operations that are written out as one each; the network itself where there are none.

    Args:
        graph: what was captured, without casts.
        question: "lipschitz" or "remainder": what rules must answer for the named operation.
        images: what the two networks are compared on, each of shape (1, C, H, W).
    """
    graph = found = needed(graph)
    names: list[str] = []
    for _ in range(_ROUNDS):
        found, new = _rewritten(found, question, images[0].device if images else torch.device("cpu"))
        if not new:
            break
        names += new
    tolerance = 1e-10 if graph.input.dtype == torch.float64 else 1e-4
    with torch.no_grad():
        if not names or not all(close(found.replay(image), graph.replay(image), tolerance) for image in images):
            return graph
    return replace(found, forms=tuple(names))


def _rewritten(graph: Graph, question: str, device: torch.device) -> tuple[Graph, list[str]]:
    """Puts the forms in place that are complete, and says where."""
    choices: dict[Node, list[Form]] = {}
    for form in Finder(graph, device).forms():
        if getattr(rule_for(form.name), question, None) is not None:
            choices.setdefault(form.node, []).append(form)
    while choices:
        found, now = _replaced(graph, {node: forms[0] for node, forms in choices.items()})
        left = set(found.nodes)
        open_ = [node for node, forms in choices.items() if any(now(part) in left for part in forms[0].inside)]
        if not open_:
            return found, [f"{_name(forms[0].name)} at {node.path}" for node, forms in choices.items()]
        for node in open_:
            choices[node].pop(0)
        choices = {node: forms for node, forms in choices.items() if forms}
    return graph, []


def _name(key: Any) -> str:
    return key if isinstance(key, str) else key.__name__


def _replaced(graph: Graph, forms: dict[Node, Form]) -> tuple[Graph, Callable[[Node], Node]]:
    """The network with forms in the place of their last operations, and what stands for every node there."""
    stands_for: dict[Node, Node] = {}
    nodes: list[Node] = []

    def now(node: Node) -> Node:
        return stands_for.get(node, node)

    for node in graph.nodes:
        if node in forms:

            def emit(op: Any, function: Any, args: Any, kwargs: Any, shape: Any, like: Node = node) -> Node:
                nodes.append(Node(op, function, args, kwargs, like.path, tuple(shape), dtype=like.dtype))
                return nodes[-1]

            stands_for[node] = forms[node].build(emit, [now(read) for read in forms[node].reads])
        elif any(operand in stands_for for operand in node.operands):
            args, kwargs = map_nodes(now, (node.args, dict(node.kwargs)))
            stands_for[node] = Node(
                node.op, node.function, args, kwargs, node.path, node.shape, node.inner, node.result, node.dtype
            )
            nodes.append(stands_for[node])
        else:
            nodes.append(node)
    return needed(Graph(graph.input, now(graph.output), tuple(nodes))), now
