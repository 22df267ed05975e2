"""Are the logits at an image what the network computes in real arithmetic? A check of the nominal forward pass.

Every method compares bounds with margins that float64 has computed. Where large numbers cancel, such a margin can be
noise, and with it the certificate. The anchored and the layer-by-layer certificate prove how far it is off
(:mod:`lipcert.certifier.anchored.rounding`). A proof for any network would multiply norms along the depth, and leave
nothing of deep ones. So before any method the network is run again here with noise in every operation, and what the
margins change by is taken off them.

The noise is Gaussian, of ``_TIMES`` times the norm that rounding errors of the operation have at most
(:class:`~lipcert.certifier.anchored.rounding.OperationRounding`), spread evenly over the entries. There are two runs
with opposite noise, as a kink may hide one side, and four times the larger change is taken. This is a check and no
proof. It assumes that rounding errors, a thousand times smaller in norm, move a margin by no more than this noise does.
It takes some ten forward passes.
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
# Of a margin: changes up to here are left out, as rounding itself is a thousand times less.
_NEGLIGIBLE = 1e-5


class NominalCheck:
    """The check for one network.

    Args:
        graph: the network, captured in float64.
        device: where the network is; the CPU by default.
        seed: of the noise.
    """

    def __init__(self, graph: Graph, device: torch.device | None = None, seed: int = 0):
        self.rewritten = bool(graph.forms)
        self.graph = needed(explicit_attention(graph, device))
        self.local = OperationRounding(Chains(Replay(self.graph), self.graph.input))
        self.seed = seed

    @torch.no_grad()
    def sound(self, images: Tensor, predicted: Tensor, gaps: Tensor) -> Tensor:
        """The margins, less what rounding may have added to them.

        Args:
            images: pixels in [0, 1], float64, shape (N, C, H, W).
            predicted: classes y, shape (N,).
            gaps: f_y − f_j, +inf at j = y, shape (N, classes).

        Returns:
            float64, of the shape of ``gaps``.
        """
        if not len(images):
            return gaps
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
        if self.rewritten:  # bounds on rounding are about the operations that are evaluated here
            logits = values[self.graph.output].reshape(gaps.shape).double().cpu()
            gaps = torch.minimum(gaps, logits.gather(1, predicted[:, None]) - logits).scatter(
                1, predicted[:, None], math.inf
            )
        taken = torch.zeros_like(gaps)
        for sign in (1, -1):
            disturbed = {node: sign * part for node, part in noise.items()}
            logits = self._values(images[:, None], disturbed)[self.graph.output].reshape(gaps.shape).double().cpu()
            change = (logits.gather(1, predicted[:, None]) - logits - gaps).abs()
            taken = torch.maximum(taken, change.nan_to_num(nan=math.inf, posinf=math.inf))
        taken = _COUNTED * taken.scatter(1, predicted[:, None], 0.0)
        return torch.where(taken > _NEGLIGIBLE * gaps.abs(), gaps - taken, gaps)

    def _values(self, images: Tensor, noise: Mapping[Node, Tensor] = MappingProxyType({})) -> dict[Node, Tensor]:
        """Values of all nodes with one result, each of shape (N, *node.shape), with ``noise`` added to some of them.

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
