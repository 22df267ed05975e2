"""Certifying batches of images with one model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lipcert.bounds import Analysis, Bound, analyze
from lipcert.certifier._anchored import Anchored
from lipcert.certifier._certificates import Certificates
from lipcert.certifier._margins import MarginBounds, bottom_logit, margins, radii
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.model import Model

# From the cheapest to the strongest; "staged" runs them in this order on what is still open.
STAGES = ("global", "gloro", "anchored")
METHODS = ("staged", *STAGES)

# Staged certification leaves the anchored certificate out where it would take hours: entries of all values of the network
# times the number of Jacobian norms that it needs for an image.
_WORK_LIMIT = 2e9


class Certifier:
    """Certificates for one model at one ε: the bounds are computed once, here, and then every batch is cheap.

    The logits are evaluated in float64 on a copy of the model, so that rounding in the nominal forward pass is far below
    any margin that matters. The certificate holds for the network in real arithmetic.

    Args:
        model: the model; it is not changed, and later changes to it do not reach the certifier.
        eps: ε in ℓ2 on pixels in [0, 1], positive.
        method: one of ``METHODS``.
        analysis: the global analysis, where it is already known.
        dtype: the type in which logits are evaluated.
        delta: probability, for each image, that a probabilistic certificate is wrong.
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
        analysis: Analysis | None = None,
        dtype: torch.dtype = torch.float64,
        delta: float = 1e-9,
        progress: Callable[[int, int], None] | None = None,
    ):
        if not (isinstance(eps, (int, float)) and math.isfinite(eps) and eps > 0):
            raise InputError(f"eps must be a positive number, got {eps}; for example eps=36/255")
        if method not in METHODS:
            raise InputError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
        self.eps = float(eps)
        self.method = method
        self.dtype = dtype
        self.delta = delta
        self.analysis = analyze(model, progress=progress) if analysis is None else analysis
        if len(self.analysis.output.shape) != 2:
            raise InputError(
                f"the model must return logits (N, classes), it returns shape {self.analysis.output.shape}"
            )
        self.model = model if model.dtype == dtype else copy.deepcopy(model).to(dtype)
        self.margin_bounds = {name: MarginBounds(self.analysis, rows=name == "gloro") for name in ("global", "gloro")}
        self.skipped: dict[str, str] = {}
        self.anchored = self._anchored(delta) if method in ("staged", "anchored") else None

    def _anchored(self, delta: float) -> Anchored | None:
        try:
            anchored = Anchored(self.model, delta=delta)
        except UnsupportedOperation as error:
            if self.method == "anchored":
                raise
            self.skipped["anchored"] = str(error)
            return None
        if self.method == "staged" and _work(anchored) > _WORK_LIMIT:
            self.skipped["anchored"] = "it would take very long for a network of this size; ask for it with method anchored"
            return None
        return anchored

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
        logits = self.model(images.to(self.model.device, self.dtype)).cpu()
        predicted, gaps = margins(logits)
        radius = torch.zeros(len(images), dtype=torch.float64)
        method, rigor = [self.method] * len(images), ["deterministic"] * len(images)
        for stage in STAGES if self.method == "staged" else (self.method,):
            wanted = torch.arange(len(images)) if self.method != "staged" else (radius <= self.eps).nonzero()[:, 0]
            if stage in self.skipped or not len(wanted):
                continue
            found = self._radii(stage, images[wanted], predicted[wanted], gaps[wanted])
            for place, value in zip(wanted.tolist(), found.tolist(), strict=True):
                if value >= radius[place]:
                    radius[place] = value
                    method[place] = stage
                    rigor[place] = f"probabilistic({self.delta:g})" if stage == "anchored" else "deterministic"
        return Certificates(
            predicted,
            gaps.amin(dim=1),
            radius,
            radius > self.eps,
            tuple(method),
            tuple(rigor),
            None if labels is None else labels.cpu(),
            self.eps,
        )

    def _radii(self, stage: str, images: Tensor, predicted: Tensor, gaps: Tensor) -> Tensor:
        """Certified radii of one method, float64, shape (N,)."""
        if stage in self.margin_bounds:
            return radii(gaps, self.margin_bounds[stage].of(predicted))
        assert self.anchored is not None
        return self.anchored(images).radius(predicted, gaps)

    @torch.no_grad()
    def bottom(self, images: Tensor) -> Tensor:
        """Logits with the ⊥ logit of GloRo at the certifier's ε appended, float64, shape (N, classes + 1)."""
        self.model.check_images(images)
        return bottom_logit(
            self.model(images.to(self.model.device, self.dtype)).cpu(), self.margin_bounds["gloro"], self.eps
        )


def _work(method: Anchored) -> float:
    """How much an image costs, in numbers read: entries of all values, times the number of Jacobian norms."""
    return float(len(method.pairs)) * sum(math.prod(node.shape) for node in method.graph.nodes if node.shape)


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
        :class:`Certificates` with ``predicted``, ``radius``, ``certified``, ``margin``, ``method``, ``rigor``, each of length N.

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
