"""Checks that the computed logits of an image agree with those in real arithmetic.

Every method compares bounds with margins that were computed in float64. If large numbers cancel, such a margin can be
pure rounding error, and the certificate would be false. The anchored and the layer-by-layer certificate prove a bound
on this error (:mod:`lipcert.certifier.anchored.rounding`). A proof for any network would multiply norms along the
depth, and would be useless for deep networks. So before any method, the network runs again here with noise in every
operation, and the change of the margins is subtracted from them.

The noise is Gaussian. Its norm is ``_TIMES`` times the largest norm of the operation's rounding errors
(:class:`~lipcert.certifier.anchored.rounding.OperationRounding`), spread evenly over the entries. There are two runs
with opposite noise, because a kink may hide one sign, and four times the larger change is subtracted. This is a check,
not a proof. It assumes that rounding errors, a thousand times smaller in norm, change a margin by no more than this
noise does. It costs about ten forward passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lipcert.certifier.anchored.chains import Chains
from lipcert.certifier.anchored.rounding import OperationRounding
from lipcert.graph import Graph, Node, Replay, explicit_attention, needed, run

_TIMES = 1024
_COUNTED = 4
# Changes up to this fraction of a margin are ignored, because rounding itself is a thousand times smaller.
_NEGLIGIBLE = 1e-5


class NominalCheck:
    """The check for one network.

    Args:
        graph: the network, captured in float64.
        device: the device of the network; the CPU by default.
        seed: seed of the noise.
    """

    def __init__(self, graph: Graph, device: torch.device | None = None, seed: int = 0):
        self.rewritten = bool(graph.forms)
        self.graph = needed(explicit_attention(graph, device))
        self.local = OperationRounding(Chains(Replay(self.graph), self.graph.input))
        self.seed = seed

    @torch.no_grad()
    def sound(self, images: Tensor, predicted: Tensor, margins: Tensor) -> Tensor:
        """The margins, reduced by the possible effect of rounding.

        Args:
            images: pixels in [0, 1], float64, shape (N, C, H, W).
            predicted: classes y, shape (N,).
            margins: f_y − f_j, +inf at j = y, shape (N, classes).

        Returns:
            float64, of the shape of ``margins``.
        """
        if not len(images):
            return margins
        values = self._values(images[:, None])
        errors = self.local.errors(values)
        generator = torch.Generator().manual_seed(self.seed)
        noise: dict[Node, Tensor] = {}
        for node, error in errors.items():
            value = values[node]
            if value.is_floating_point() and value.numel():
                drawn = torch.randn(value.shape[1:], generator=generator, dtype=torch.float64).to(value)
                size = _TIMES * error / math.sqrt(drawn.numel())
                noise[node] = (size.reshape(-1, *[1] * drawn.dim()) * drawn).masked_fill_(value.isinf(), 0.0)
        if self.rewritten:  # rounding bounds refer to the operations of this graph
            logits = values[self.graph.output].reshape(margins.shape).double().cpu()
            margins = torch.minimum(margins, logits.gather(1, predicted[:, None]) - logits).scatter(
                1, predicted[:, None], math.inf
            )
        taken = torch.zeros_like(margins)
        for sign in (1, -1):
            disturbed = {node: sign * part for node, part in noise.items()}
            logits = self._values(images[:, None], disturbed)[self.graph.output].reshape(margins.shape).double().cpu()
            change = (logits.gather(1, predicted[:, None]) - logits - margins).abs()
            taken = torch.maximum(taken, change.nan_to_num(nan=math.inf, posinf=math.inf))
        taken = _COUNTED * taken.scatter(1, predicted[:, None], 0.0)
        return torch.where(taken > _NEGLIGIBLE * margins.abs(), margins - taken, margins)

    def _values(self, images: Tensor, noise: Mapping[Node, Tensor] = MappingProxyType({})) -> dict[Node, Tensor]:
        """Values of all nodes with one result, each of shape (N, *node.shape), with ``noise`` added to some nodes.

        Args:
            images: shape (N, 1, C, H, W).
            noise: each of shape (N, *node.shape).
        """
        single = [node for node in self.graph.nodes if node.single and node is not self.graph.input]

        def one(image: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
            known: dict[Node, Any] = {self.graph.input: image}
            added = dict(zip(noise, parts, strict=True))
            for node in self.graph.nodes:
                run((node,), known)
                if node in added:
                    known[node] = known[node] + added[node]
            return tuple(known[node] for node in single)

        found = torch.vmap(one)(images, *noise.values())
        return {self.graph.input: images, **dict(zip(single, found, strict=True))}
