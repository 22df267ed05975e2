"""Certifying batches of images with one model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lipcert.bounds import Analysis, Bound, analyze
from lipcert.certifier._anchored import Anchored
from lipcert.certifier._certificates import Certificates
from lipcert.certifier._local import Local
from lipcert.certifier._lofast import LoFAST
from lipcert.certifier._margins import MarginBounds, bottom_logit, margins, radii
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.model import Model
from lipcert.surgery import ClippedMaxMin, ClippedReLU, MaxMin

# From the cheapest to the strongest.
_SINGLE = ("global", "gloro", "local", "lofast", "anchored")
METHODS = ("staged", *_SINGLE)
# Staged certification goes through these on what is still open. It leaves out lofast, which anchored contains.
_STAGES = ("global", "gloro", "local", "anchored")

# Staged certification does not start what takes more floating-point operations an image than this, some ten seconds on
# a core. A Jacobian norm is counted as 100 forward passes; the search of the local certificate as 64 trials with 4
# passes for each operation.
_WORK_LIMIT = 1e12
_PASSES_A_NORM = 100
_PASSES_AN_OPERATION = 256
_TOO_LARGE = "it would take very long for a network of this size; ask for it with method {}"

Stage = Callable[[Tensor, Tensor, Tensor], Tensor]


class Certifier:
    """Certificates for one model at one ε: the bounds are computed once, here, and then every batch is cheap.

    The logits are evaluated in float64 on a copy of the model, so that rounding in the nominal forward pass is far
    below any margin that matters. The certificate holds for the network in real arithmetic.

    Attributes:
        bound: the global Lipschitz bound.
        skipped: methods that staged certification leaves out for this model, and why.

    Args:
        model: the model; it is not changed, and later changes to it do not reach the certifier.
        eps: ε in ℓ2 on pixels in [0, 1], positive.
        method: one of ``METHODS``.
        delta: probability, for each image, that a certificate is wrong where it is probabilistic.
        progress: called with (operations done, operations in all) while the bound is computed.

    Raises:
        InputError: an ε that is not a positive number, an unknown method, weights that are NaN.
        UnsupportedOperation: the model has operations without a rule.
    """

    def __init__(
        self,
        model: Model,
        eps: float,
        method: str = "staged",
        *,
        delta: float = 1e-9,
        progress: Callable[[int, int], None] | None = None,
    ):
        if not (isinstance(eps, (int, float)) and math.isfinite(eps) and eps > 0):
            raise InputError(f"eps must be a positive number, got {eps}; for example eps=36/255")
        if method not in METHODS:
            raise InputError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
        self.eps = float(eps)
        self.method = method
        self.model = copy.deepcopy(model).double()
        self.analysis = analyze(self.model, progress=progress)
        if len(self.analysis.output.shape) != 2:
            raise InputError(
                f"the model must return logits (N, classes), it returns shape {self.analysis.output.shape}"
            )
        self.margin_bounds = MarginBounds(self.analysis)
        self.skipped: dict[str, str] = {}
        # The methods of an image that are probabilistic share its failure probability.
        self.share = delta / 2 if method == "staged" else delta
        self.stages: dict[str, Stage] = {}
        for name in _STAGES if method == "staged" else (method,):
            self._prepare(name)

    def _prepare(self, name: str) -> None:
        """Makes one method ready, or notes why staged certification does without it."""
        staged = self.method == "staged"
        if name in ("global", "gloro"):
            bounds = self.margin_bounds if name == "gloro" else MarginBounds(self.analysis, rows=False)
            self.stages[name] = lambda images, predicted, gaps: radii(gaps, bounds.of(predicted))
        elif name == "local":
            if staged and not _piecewise_linear(self.analysis):
                return  # nothing that boxes could hold constant: local is global here
            if staged and self._work(_PASSES_AN_OPERATION * len(self.analysis.graph.nodes)) > _WORK_LIMIT:
                self.skipped[name] = _TOO_LARGE.format(name)
                return
            self.local = Local(self.model, analysis=self.analysis, delta=self.share)
            self.stages[name] = self.local.radius
        else:
            try:
                method = (LoFAST if name == "lofast" else Anchored)(self.model, delta=self.share)
            except UnsupportedOperation as error:
                if not staged:
                    raise
                self.skipped[name] = str(error)
                return
            if staged and self._work(_PASSES_A_NORM * len(method.pairs)) > _WORK_LIMIT:
                self.skipped[name] = _TOO_LARGE.format(name)
                return
            self.stages[name] = lambda images, predicted, gaps: method(images).radius(predicted, gaps)

    def _work(self, passes: int) -> float:
        """Floating-point operations of so many forward passes of one image."""
        image = torch.zeros(1, *self.model.input_size, dtype=torch.float64, device=self.model.device)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            self.model(image)
        return float(passes) * counter.get_total_flops()

    def _rigor(self, name: str) -> str:
        if name in ("global", "gloro"):
            delta = 0.0
        else:
            delta = self.local.delta if name == "local" else self.share
        return f"probabilistic({delta:g})" if delta else "deterministic"

    @property
    def bound(self) -> Bound:
        """The global Lipschitz bound from pixels to logits."""
        return self.analysis.bound()

    @torch.no_grad()
    def run(self, images: Tensor, labels: Tensor | None = None) -> Certificates:
        """Certifies a batch.

        Args:
            images: pixels in [0, 1], shape (N, C, H, W).
            labels: true classes, shape (N,), or None.

        Raises:
            InputError: images of a wrong shape or outside [0, 1]; labels of a wrong shape.
        """
        self.model.check_images(images)
        if labels is not None and tuple(labels.shape) != (len(images),):
            raise InputError(f"labels must have shape ({len(images)},), got {tuple(labels.shape)}")
        images = images.to(self.model.device, torch.float64)
        predicted, gaps = margins(self.model(images).cpu())
        radius = torch.zeros(len(images), dtype=torch.float64)
        decided = [next(iter(self.stages))] * len(images)
        for name, stage in self.stages.items():
            wanted = (radius <= self.eps).nonzero()[:, 0]
            if not len(wanted):
                break
            found = stage(images[wanted], predicted[wanted], gaps[wanted])
            for place, value in zip(wanted.tolist(), found.tolist(), strict=True):
                if value >= radius[place]:
                    radius[place] = value
                    decided[place] = name
        return Certificates(
            predicted,
            gaps.amin(dim=1),
            radius,
            radius > self.eps,
            tuple(decided),
            tuple(self._rigor(name) for name in decided),
            None if labels is None else labels.cpu(),
            self.eps,
        )

    @torch.no_grad()
    def bottom(self, images: Tensor) -> Tensor:
        """Logits with the ⊥ logit of GloRo at the certifier's ε appended, float64, shape (N, classes + 1)."""
        self.model.check_images(images)
        logits = self.model(images.to(self.model.device, torch.float64)).cpu()
        return bottom_logit(logits, self.margin_bounds, self.eps)


def _piecewise_linear(analysis: Analysis) -> bool:
    """Whether the network has units that can be constant in a ball."""
    kinds = {"relu", "leaky_relu", "hardtanh", "clamp", "max_pool2d", ClippedReLU, MaxMin, ClippedMaxMin}
    return any(node.op in kinds for node in analysis.graph.nodes)


def certify(
    model: Model,
    images: Tensor,
    labels: Tensor | None = None,
    *,
    eps: float,
    method: str = "staged",
    batch_size: int = 64,
) -> Certificates:
    """Certifies images: which predictions does no ℓ2 perturbation of the pixels up to ε change?

    Args:
        model: from :func:`lipcert.load`.
        images: pixels in [0, 1], shape (N, C, H, W).
        labels: true classes, shape (N,), or None.
        eps: ε in ℓ2 on pixels in [0, 1], such as ``36 / 255``.
        method: one of ``lipcert.certifier.METHODS``.
        batch_size: how many images run at once.

    Returns:
        :class:`Certificates` with ``predicted``, ``radius``, ``certified``, ``margin``, ``method``, ``rigor``, each of
        length N.

    Raises:
        InputError: images, labels, ε or method that cannot be used.
        UnsupportedOperation: the model has operations without a rule.
    """
    if isinstance(model, nn.Module) and not isinstance(model, Model):
        raise InputError(
            "model is a plain module; wrap it first: lipcert.load(module, mean=..., std=..., input_size=...)"
        )
    certifier = Certifier(model, eps, method)
    starts = range(0, max(1, len(images)), batch_size)
    parts = [
        certifier.run(images[i : i + batch_size], None if labels is None else labels[i : i + batch_size])
        for i in starts
    ]
    return Certificates.join(parts)
