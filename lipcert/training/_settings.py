"""What a fine-tuning is asked for, and what of it cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from lipcert.bounds import check_weights
from lipcert.errors import InputError
from lipcert.model import Model
from lipcert.training._matrices import MaxNorm, held_at

Loss = Literal["anchored", "ce", "emma", "gloro", "trades", "fixed", "lmt", "local-b", "local-g", "noise"]
Amp = Literal["bfloat16"]
OPTIMIZERS = ("adamw", "muon", "nadam")
SCHEDULES = ("cosine", "multistep", "exponential")
LOSSES: tuple[Loss, ...] = ("anchored", "ce", "emma", "gloro", "trades", "fixed", "lmt", "local-b", "local-g", "noise")
# Losses with the global bound.
GLOBAL: tuple[Loss, ...] = ("emma", "gloro", "trades", "fixed", "lmt")
# Losses with local bounds.
LOCAL: tuple[Loss, ...] = ("local-b", "local-g")

_LARGEST = 1e30
# ε in the course of a run, see FinetuneSettings.ramp.
_RAMPS: dict[str, tuple[float, float, float]] = {
    "emma": (0.1, 2.0, 0.5),
    "local-b": (0.0, 1.1, 0.5),
    "local-g": (0.0, 1.1, 0.5),
}
_RAMP = (0.0, 1.0, 1 / 3)


@dataclass(frozen=True)
class FinetuneSettings:
    """The arguments of :func:`lipcert.finetune` that decide what is trained; they are described there.

    A checkpoint remembers them all, and the model's recipe, too.
    """

    loss: Loss = "anchored"
    eps: float = 36 / 255
    epochs: int = 10
    lr: float = 3e-4
    temperature: float | tuple[float, float] = 1.0
    ramp: tuple[float, float, float] | None = None
    weight: float = 1.0
    sparsity: float = 0.0
    sigma: float | None = None
    consistency: float = 0.0
    max_norm: MaxNorm | None = None
    optimizer: str = "adamw"
    schedule: str = "cosine"
    accumulate: int = 1
    ema: float | None = None
    amp: Amp | None = None
    channels_last: bool = False

    def described(self) -> dict[str, Any]:
        """As plain lists, dicts and numbers."""
        plain = asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}

    def eps_at(self, done: float) -> float:
        """ε when the share ``done`` of the run is over."""
        first, last, share = self.ramp or _RAMPS.get(self.loss, _RAMP)
        return self.eps * (first + (last - first) * (min(done / share, 1.0) if share else 1.0))

    def mixture_at(self, done: float) -> float:
        """λ of the losses with local bounds, which rises from 0 to 1 as ε does (Huang et al. 2021, equation 29)."""
        share = (self.ramp or _RAMPS.get(self.loss, _RAMP))[2]
        return min(done / share, 1.0) if share else 1.0

    def check(self, model: Model) -> None:
        """Refuses what :func:`lipcert.finetune` cannot train with.

        Raises:
            InputError: saying which argument, or what about the model.
        """
        if not isinstance(model, Model):
            raise InputError("finetune takes a lipcert.Model; make one with lipcert.load")
        if self.loss not in LOSSES:
            raise InputError(f"there is no loss {self.loss!r}; choose one of {', '.join(LOSSES)}")
        for name, least in (("epochs", self.epochs), ("accumulate", self.accumulate)):
            if least < 1:
                raise InputError(f"{name} must be at least 1, got {least}")
        self._check_numbers()
        if self.max_norm is not None:
            held_at(model, self.max_norm)
        for name, value, choices in (
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("schedule", self.schedule, SCHEDULES),
        ):
            if value not in choices:
                raise InputError(f"there is no {name} {value!r}; choose {', '.join(choices[:-1])} or {choices[-1]}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise InputError(f"ema is a decay between 0 and 1, such as 0.999, got {self.ema}")
        if self.amp not in (None, "bfloat16"):
            raise InputError(f"amp is bfloat16 or left out, got {self.amp!r}")
        if self.amp is not None and self.loss == "anchored":
            raise InputError("the loss anchored needs second derivatives, which bfloat16 loses; leave amp out")
        if self.loss in LOCAL and (self.amp is not None or self.temperature != 1.0):
            raise InputError(f"the loss {self.loss} propagates boxes: leave amp and temperature out")
        if model.dtype not in (torch.float32, torch.float64):
            raise InputError(f"the weights are {model.dtype}; train them in float32: model.float()")
        check_weights(model)
        if not any(p.requires_grad for p in model.parameters()):
            raise InputError("all parameters are frozen (requires_grad is False), so there is nothing to train")

    def _check_numbers(self) -> None:
        temperatures = self.temperature if isinstance(self.temperature, (tuple, list)) else (self.temperature,) * 2
        if len(temperatures) != 2:
            raise InputError(f"temperature is one number, or the first and the last one, got {self.temperature}")
        norms = self.max_norm.values() if isinstance(self.max_norm, Mapping) else [self.max_norm]
        positive = {"eps": [self.eps], "lr": [self.lr], "temperature": temperatures, "max_norm": norms}
        positive["sigma"] = [self.sigma]
        for name, values in positive.items():
            for value in values:
                if value is not None and not 0 < value < _LARGEST:
                    raise InputError(f"{name} must be a positive number below {_LARGEST:g}, got {value}")
        for name, value in (("weight", self.weight), ("consistency", self.consistency)):
            if not 0 <= value < _LARGEST:
                raise InputError(f"{name} must be a number from 0 to {_LARGEST:g}, got {value}")
        if (self.loss == "noise") is (self.sigma is None):
            need = "needs" if self.sigma is None else "has no use for"
            raise InputError(f"the loss {self.loss} {need} sigma, the standard deviation of the noise, such as 0.25")
        if self.consistency and self.loss != "noise":
            raise InputError(f"consistency is a part of the loss noise, and not of {self.loss}")
        if self.ramp is not None:
            ramp = tuple(self.ramp)
            if len(ramp) != 3 or not all(0 <= value < _LARGEST for value in ramp) or ramp[2] > 1 or ramp[1] == 0:
                raise InputError(
                    "ramp is three numbers: the factor of eps at first, at last, and the share of the run in between, "
                    f"such as (0.1, 2, 0.5), got {self.ramp}"
                )
