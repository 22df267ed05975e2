"""Are the logits at an image what the network computes in real arithmetic? A check of the nominal forward pass.

Every method compares bounds with margins that float64 has computed. Where large numbers cancel, such a margin can be
noise, and with it the certificate. The anchored and the layer-by-layer certificate prove how far it is off
(:mod:`lipcert.certifier._rounding`). A proof for any network would multiply norms along the depth, and leave nothing of
deep ones. So here, before any method, the network is run again with noise in every operation, and what the margins
change by is taken off them.

The noise is Gaussian, of ``_TIMES`` times the norm that rounding errors of the operation have at most
(:class:`~lipcert.certifier._rounding.Local`), spread evenly over the entries; two runs with opposite noise, as a kink
may hide one side, and four times the larger change. This is a check and no proof. It assumes that rounding errors, a
thousand times smaller in norm, move a margin by no more than this noise does. It takes some ten forward passes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lipcert.certifier._chains import Chains
from lipcert.certifier._rounding import Local
from lipcert.graph import Graph, Node, Replay, needed
from lipcert.graph._graph import run

_TIMES = 1024
_COUNTED = 4
# Of a margin: changes up to here are left out, as rounding itself is a thousand times less.
_NEGLIGIBLE = 1e-5


class Nominal:
    """The check for one network.

    Args:
        graph: the network, captured in float64.
        seed: of the noise.
    """

    def __init__(self, graph: Graph, seed: int = 0):
        self.graph = needed(graph)
        self.local = Local(Chains(Replay(self.graph), self.graph.input))
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
        lost = [self._lost(images[i : i + 1], predicted[i], gaps[i]) for i in range(len(images))]
        taken = torch.stack(lost) if lost else torch.zeros_like(gaps)
        return torch.where(taken > _NEGLIGIBLE * gaps.abs(), gaps - taken, gaps)

    def _lost(self, image: Tensor, predicted: Tensor, gaps: Tensor) -> Tensor:
        values = run(self.graph.nodes, {self.graph.input: image})
        errors = self.local.errors({node: value[None] for node, value in values.items() if node.shape})
        generator = torch.Generator().manual_seed(self.seed)
        largest = torch.zeros_like(gaps)
        noise: dict[Node, Tensor] = {}
        for node, error in errors.items():
            value = values[node]
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                size = _TIMES * error.item() / math.sqrt(value.numel())
                drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
                noise[node] = (size * drawn).masked_fill_(value.isinf(), 0.0)
        for sign in (1, -1):
            logits = self._disturbed(image, noise, sign)[0].double().cpu()
            change = (logits[predicted] - logits - gaps).abs()
            largest = torch.maximum(largest, change.nan_to_num(nan=math.inf, posinf=math.inf))
        largest[predicted] = 0.0
        return _COUNTED * largest

    def _disturbed(self, image: Tensor, noise: dict[Node, Tensor], sign: int) -> Tensor:
        known: dict[Node, Any] = {self.graph.input: image}
        for node in self.graph.nodes:
            run([node], known)
            if node in noise:
                known[node] = known[node] + sign * noise[node]
        result: Tensor = known[self.graph.output]
        return result
