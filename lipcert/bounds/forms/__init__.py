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
* K x max(αS, low)^(−½) = f·x/max(‖x‖, R), f² = K²/α, R² = low/α: a normalisation, and for f = R the projection onto a
  ball;
* x(1 + erf(x/√2))/2 and its tanh form, x·sigmoid(x), and exp(z)/Σ exp(z), where shifts of z that are
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
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._registry import rule_for
from lipcert.bounds.forms._finder import Finder
from lipcert.bounds.forms._patterns import Match
from lipcert.graph import Emit, Graph, Node, close, needed, rewritten

_ROUNDS = 4  # one match can be an operation of another


def canonical_forms(graph: Graph, question: str, images: Sequence[Tensor]) -> Graph:
    """The network with every recognised group of operations replaced by one; the same network if there is none."""
    graph = found = needed(graph)
    names: list[str] = []
    for _ in range(_ROUNDS):
        found, added = _matched(found, question, images[0].device if images else torch.device("cpu"))
        if not added:
            break
        names += added
    tolerance = 1e-10 if graph.input.dtype == torch.float64 else 1e-4
    with torch.no_grad():
        if not names or not all(close(found.replay(image), graph.replay(image), tolerance) for image in images):
            return graph
    return replace(found, forms=tuple(names))


def _matched(graph: Graph, question: str, device: torch.device) -> tuple[Graph, list[str]]:
    """Replaces the matches whose intermediate values are not read elsewhere; returns the graph and their names."""
    choices: dict[Node, list[Match]] = {}
    for match in Finder(graph, device).matches():
        if getattr(rule_for(match.name), question, None) is not None:
            choices.setdefault(match.node, []).append(match)
    while choices:
        replaced, new = rewritten(graph, partial(_built, choices))
        replaced = needed(replaced)
        remaining = set(replaced.nodes)
        open_ = [node for node, matches in choices.items() if any(new(part) in remaining for part in matches[0].inside)]
        if not open_:
            return replaced, [f"{_name(matches[0].name)} at {node.path}" for node, matches in choices.items()]
        for node in open_:
            choices[node].pop(0)
        choices = {node: matches for node, matches in choices.items() if matches}
    return graph, []


def _name(key: Any) -> str:
    return key if isinstance(key, str) else key.__name__


def _built(choices: dict[Node, list[Match]], node: Node, emit: Emit, new: Callable[[Node], Node]) -> Node | None:
    """The single operation in place of a node's first match."""
    match = choices[node][0] if node in choices else None
    return None if match is None else match.build(emit, [new(read) for read in match.reads])
