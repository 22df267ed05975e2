"""AutoAttack from the Adversarial Robustness Toolbox, which the extra ``attack`` installs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import random
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from lipcert.attacks._found import Adversarial, check, project
from lipcert.errors import InputError

_PACKAGE = "adversarial-robustness-toolbox"
_SMALLEST_SIDE = 8


@dataclass(frozen=True)
class AutoAttack:
    """APGD on cross-entropy and on the difference of logits, then Square (Croce and Hein 2020, arXiv 2003.01690).

    Square needs images of at least 8 × 8 pixels, the second APGD at least three classes. The attack runs in float32 on
    a copy of the model. Its images are projected again and evaluated in the model's own dtype; only those that change
    the prediction there count.

    Args:
        steps: steps of each APGD.
        queries: maximum number of evaluations by Square.
        seed: seed of its random choices.

    Raises:
        InputError: the extra ``attack`` is not installed.
    """

    name: ClassVar[str] = "autoattack-l2"

    steps: int = 100
    queries: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        _version()

    @property
    def version(self) -> str:
        """Version of the toolbox."""
        return f"{_PACKAGE} {_version()}"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that, with name and version, identify a run of the attack."""
        return {"steps": self.steps, "queries": self.queries, "seed": self.seed}

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> Adversarial:
        """Attacks images of shape (N, C, H, W) in [0, 1] within ε; ``labels`` are the classes to change."""
        from art.attacks.evasion import AutoAttack as Ensemble
        from art.attacks.evasion import AutoProjectedGradientDescent as APGD
        from art.attacks.evasion import SquareAttack
        from art.estimators.classification import PyTorchClassifier

        with torch.no_grad():
            classes = model(images[:1]).shape[1]
        with _seeded(self.seed), np.errstate(all="ignore"):  # Square divides by norms that can be zero
            network = PyTorchClassifier(
                model=deepcopy(model).float(),
                loss=nn.CrossEntropyLoss(),
                input_shape=tuple(images.shape[1:]),
                nb_classes=classes,
                clip_values=(0.0, 1.0),
                device_type="gpu" if images.is_cuda else "cpu",
            )
            common: dict[str, Any] = {"norm": 2, "eps": eps}
            ascent = {**common, "eps_step": 2 * eps, "max_iter": self.steps, "nb_random_init": 1, "verbose": False}
            ascent["batch_size"] = len(images)
            losses = ("cross_entropy", *(("difference_logits_ratio",) if classes > 2 else ()))
            parts = [APGD(estimator=network, loss_type=loss, **ascent) for loss in losses]
            if min(images.shape[2:]) >= _SMALLEST_SIDE:
                square = {"max_iter": self.queries, "nb_restarts": 1, "verbose": False}
                parts.append(SquareAttack(estimator=network, **square, **common))
            ensemble = Ensemble(estimator=network, attacks=parts, batch_size=len(images), eps_step=2 * eps, **common)
            with torch.enable_grad():
                adversarial = ensemble.generate(images.float().cpu().numpy(), labels.cpu().numpy())
        sizes = torch.full((len(images),), eps, dtype=images.dtype, device=images.device)
        delta = project(torch.from_numpy(adversarial).to(images) - images, images, sizes)
        return check(model, images, labels, (images + delta).clamp(0, 1), sizes.double())


def _version() -> str:
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            "AutoAttack needs the Adversarial Robustness Toolbox: pip install 'lipcert[attack]'; or use --attack pgd"
        ) from None


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds the global random generators, which the toolbox uses, and restores them."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
