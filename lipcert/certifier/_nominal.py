"""Bounds on the rounding errors of the computed margins of an image: proved where possible, otherwise checked.

Every method compares bounds with margins that were computed in float64. If large numbers cancel, such a margin can be
pure rounding error, and the certificate would be false.

**Proof.** :class:`~lipcert.roundoff.Roundoff` for float64 itself bounds the rounding error of every operation and
multiplies it by the Lipschitz constants of all operations after it, for the whole image box or, where that is not
far below a margin, at the image. This bound is subtracted from the margins. It is tiny for networks with small
constants, the only ones that ``global`` and ``gloro`` certify at a visible ε; for others the product of norms along the
depth is useless. Constants that the network computes from its weights count as float64 has them;
:func:`lipcert.graph.examine` refuses those in which large numbers cancel. The anchored and the layer-by-layer
certificate have a proof of their own (:mod:`lipcert.roundoff`).

**Check.** Without a proof the network runs again with noise in every operation, and the change of the margins is
subtracted from them. The noise is Gaussian. Its norm is ``_TIMES`` times the largest norm of the operation's rounding
errors (:class:`~lipcert.roundoff.OperationRounding`), spread evenly over the entries. There are two runs with opposite
noise, because a breakpoint may hide one sign, and four times the larger change is subtracted. This assumes that
rounding errors, a thousand times smaller in norm, change a margin by no more than this noise does. It costs about ten
forward passes.
"""

from __future__ import annotations

import math
from contextlib import suppress
from functools import cached_property

import torch
from torch import Tensor

from lipcert.bounds import Analysis, explicit_attention
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.graph import Node, evaluate_each, needed
from lipcert.model import Model
from lipcert.roundoff import ENTRIES_AT_ONCE, REAL, Chains, OperationRounding, Roundoff

_TIMES = 1024
_COUNTED = 4
# Changes up to this fraction of a margin are ignored, because rounding itself is a thousand times smaller.
_NEGLIGIBLE = 1e-5
# A proof that takes more than this fraction of a margin is replaced by the check.
_TAKEN = 1e-3
# There is no proof for margins that the global bound exceeds by more than this factor.
_LARGEST_RATIO = 1e10


class NominalMargins:
    """The margins of one network, reduced by bounds on their rounding errors."""

    def __init__(self, model: Model, analysis: Analysis, prove: bool = True):
        graph = analysis.graph
        self.model, self.prove, self.constant = model, prove, float(analysis.output.lip)
        self.rewritten = bool(graph.forms)
        self.graph = needed(explicit_attention(graph, model.device))

    @cached_property
    def local(self) -> OperationRounding:
        """Bounds on the rounding of single operations."""
        return OperationRounding(Chains(self.graph, self.graph.input))

    @cached_property
    def proof(self) -> Roundoff | None:
        """Bounds on rounding in float64; None if there are none."""
        with suppress(UnsupportedOperation, InputError):
            return Roundoff(self.model, REAL)
        return None

    def bounded(self) -> bool:
        """Whether the rounding of every operation has a bound, forwards and backwards."""
        return all(self.local.bounded(link) for links in self.local.chains.links.values() for link in links)

    @torch.no_grad()
    def sound(self, images: Tensor, predicted: Tensor, margins: Tensor) -> tuple[Tensor, Tensor]:
        """The margins, reduced by the possible effect of rounding, and whether that is proved."""
        proved = torch.zeros(len(images), dtype=torch.bool)
        reduced = margins.clone()
        worthwhile = (self.constant <= _LARGEST_RATIO * margins.amin(1)).nonzero()[:, 0]
        if self.prove and len(worthwhile) and self.proof is not None:
            some = images[worthwhile.to(images.device)]
            zero = torch.zeros(len(some), device=images.device)
            lost = self.proof.lost(some, predicted[worthwhile], zero, margins[worthwhile]).to(margins)
            small = (lost <= _TAKEN * margins[worthwhile]).all(dim=1)
            proved[worthwhile] = small
            reduced[worthwhile[small]] -= lost[small]
        size = max(1, ENTRIES_AT_ONCE // sum(node.entries for node in self.graph.nodes))
        for some in (~proved).nonzero()[:, 0].split(size) if not proved.all() else ():
            reduced[some] = self._checked(images[some.to(images.device)], predicted[some], margins[some])
        return reduced, proved

    def _checked(self, images: Tensor, predicted: Tensor, margins: Tensor) -> Tensor:
        """The margins, reduced by four times their change under noise."""
        values = self.graph.values(images[:, None])
        errors = self.local.errors(values)
        generator = torch.Generator().manual_seed(0)
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
        largest = torch.zeros_like(margins)
        for sign in (1, -1):
            disturbed = {node: sign * part for node, part in noise.items()}
            given, output = {self.graph.input: images[:, None]}, self.graph.output
            found = evaluate_each(self.graph.nodes, given, [output], disturbed)[output]
            logits = found.reshape(margins.shape).double().cpu()
            change = (logits.gather(1, predicted[:, None]) - logits - margins).abs()
            largest = torch.maximum(largest, change.nan_to_num(nan=math.inf, posinf=math.inf))
        largest = _COUNTED * largest.scatter(1, predicted[:, None], 0.0)
        return torch.where(largest > _NEGLIGIBLE * margins.abs(), margins - largest, margins)
