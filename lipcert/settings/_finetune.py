"""The settings of fine-tuning, without torch. Command, library call and checkpoint use this class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from lipcert.errors import InputError
from lipcert.settings._certify import AUTO, EPS, parse_eps
from lipcert.settings._fields import COUNT, INSIDE, POSITIVE, SHARE, WEIGHT, check, documented, option

Amp = Literal["bfloat16"]
MaxNorm = float | Mapping[str, float]
OPTIMIZERS = ("adamw", "adam", "muon", "nadam")
SCHEDULES = ("cosine", "multistep", "exponential")
VECTORS = ("saved", "random")


class LossFacts(NamedTuple):
    """What a loss is for, the bound that it uses ("pairs" of classes, "constant", "cut", "local"), and its ramp."""

    method: str
    bound: str = ""
    ramp: tuple[float, float, float] = (0.0, 1.0, 1 / 3)


# ``lipcert.training`` computes them.
LOSSES = {
    "adversarial": LossFacts("for method anchored"),
    "cut": LossFacts("for anchored after a Lipschitz prefix", "cut", (0.1, 2.0, 0.5)),
    "cut-annealed": LossFacts("for anchored after a Lipschitz prefix", "cut", (0.1, 3.0, 0.5)),
    "emma": LossFacts("for gloro", "pairs", (0.1, 2.0, 0.5)),
    "annealed": LossFacts("for gloro", "pairs", (0.1, 3.0, 0.5)),
    "gloro": LossFacts("for gloro", "pairs"),
    "trades": LossFacts("for gloro", "pairs"),
    "fixed": LossFacts("for gloro", "pairs"),
    "lmt": LossFacts("for global", "constant"),
    "local-b": LossFacts("for local", "local", (0.0, 1.1, 0.5)),
    "local-g": LossFacts("for local", "local", (0.0, 1.1, 0.5)),
    "noise": LossFacts("for smoothing"),
    "ce": LossFacts("cross-entropy"),
}
# Those that are there for the tables of their papers, and no choices of the command.
_OF_PAPERS = ("fixed", "lmt", "local-b", "local-g")


def _losses_by_method() -> str:
    """The help of ``--loss``: for which method of certify each loss is."""
    names: dict[str, list[str]] = {}
    for name, facts in LOSSES.items():
        if name not in _OF_PAPERS:
            names.setdefault(facts.method, []).append(name)
    return "; ".join(f"{', '.join(some)}: {method}" for method, some in names.items()) + "."


# Losses with the global bound.
GLOBAL = tuple(name for name, facts in LOSSES.items() if facts.bound in ("pairs", "constant"))

_MILESTONES = (0.5, 0.6, 0.7, 0.8)  # Gupta and Verma 2023 (arXiv 2302.10287), table 9
_STEP_DOWN = 0.2
# The last learning rate over the largest one; that of exponential is from 1e-3 to 1e-6 in Huang et al. 2021, table 3.
_LAST = {"cosine": 1e-4, "exponential": 1e-3}
_loss = partial(option, group="Options of the loss")
_update = partial(option, group="Options of the updates")
_python = partial(option, python=True)


@documented
@dataclass(frozen=True)
class FinetuneSettings:
    """The arguments of :func:`lipcert.finetune` that determine the training; its docstring describes the losses.

    The constructor checks them. Checkpoints and the model's recipe record all of them.

    Models with small norms have small margins and need a small temperature, 0.1 to 0.25. Of two numbers the temperature
    changes from the first to the last during 80 % of the run; ``"auto"`` is 2, at last 0.2 times the median margin of
    the first update's images.
    ``upper_weight`` is λ_θ, ``vectors`` is about :class:`lipcert.training.LocalBound`, ``max_norm`` about
    :class:`lipcert.training.NormLimits`, the optimizer ``"muon"`` about :class:`lipcert.training.Muon`. The schedule
    ``"multistep"`` divides the learning rate by 5 at 0.5, 0.6, 0.7 and 0.8 of the run. ``only="*.attn.*"`` with the
    loss ``"ce"`` is the L2 adaptation of Gupta and Verma 2023 (arXiv 2302.10287, figure 3a), and ``keep_zeros`` the
    retraining after pruning in section 3.5 of that paper.

    Raises:
        InputError: a value is not valid.
    """

    loss: str = option(
        _losses_by_method(),
        "adversarial",
        choices=tuple(LOSSES),
        python=_OF_PAPERS,
    )
    eps: float = option(EPS, 36 / 255, given="36/255")
    epochs: int = option("Number of passes over the images.", 10, range=COUNT)
    lr: float = option("The largest learning rate.", 3e-4, range=POSITIVE)
    temperature: float | tuple[float, float] | Literal["auto"] = _python(
        "Divides the logits in the loss: a number; FIRST,LAST; or auto, from the margins of the first update.",
        1.0,
        given="1",
    )
    ramp: tuple[float, float, float] | None = _python(
        "A,B,S: eps in the loss goes from A to B times ``eps`` in the first fraction S of the run; "
        "0.1,2,0.5 for emma and cut, 0.1,3,0.5 if annealed, 0,1.1,0.5 for local-b and -g, else 0,1,0.333.",
        None,
    )
    weight: float = _python("Weight of the divergence in the loss trades.", 1.0, range=WEIGHT)
    sparsity: float = _python("Weight of the sparsity loss in local-b and local-g.", 0.0, range=WEIGHT)
    upper_weight: float = _python("Weight of upper thresholds in the sparsity loss.", 0.1, range=WEIGHT)
    power_iterations: int = _python("Per update, for norms in losses with a bound.", 2, range=COUNT)
    vectors: str = _python(
        "Start of power iteration in local-b and -g: the mean of the last update, or random vectors.",
        VECTORS[0],
        choices=VECTORS,
    )
    sigma: float | None = _loss(
        "Standard deviation of the noise in the loss noise, such as 0.25.", None, float | None, range=POSITIVE
    )
    denoiser: str | None = _loss("Denoise the images of the loss noise first.", None, choices=("dct", "natural"))
    consistency: float = _python(
        "Weight of the agreement of two draws in the loss noise, such as 10.", 0.0, range=WEIGHT
    )
    teacher_weight: float = _python("Weight of the divergence from the predictions of the teacher.", 1.0, range=WEIGHT)
    max_norm: MaxNorm | None = _python(
        "Limit the spectral norm of each layer to this value; '*.fc1=1.2' for the layers of a pattern.",
        None,
        list[str] | None,
    )
    optimizer: str = _update("nadam: with Lookahead; muon: with --lr 0.01.", "adamw", choices=OPTIMIZERS)
    schedule: str = _python("Schedule of the learning rate.", "cosine", choices=SCHEDULES)
    warmup: float = _python("Fraction of the run in which the learning rate rises.", 0.1, range=SHARE)
    decay_from: float = _python("Fraction of the run after which the schedule exponential falls.", 0.5, range=SHARE)
    last_lr: float | None = _python(
        "Learning rate at the end; 1e-4 times ``lr`` for cosine, 1e-3 times for exponential.",
        None,
        float | None,
        range=POSITIVE,
    )
    accumulate: int = _python("Batches per update.", 1, range=COUNT)
    ema: float | None = _python(
        "Moving average of the weights with this decay, such as 0.999.", None, float | None, range=INSIDE
    )
    amp: Amp | None = _python("Compute the network's matrix products in this type.", None, choices=("bfloat16",))
    channels_last: bool = _python("Keep kernels and images in the channels-last memory format.", False)
    only: str | None = _update(
        "Train only parameters or modules that match these comma-separated patterns: '*.attn.*'; head: the classifier.",
        None,
    )
    keep_zeros: bool = _python("Keep zero weights at zero, as constrain produces them.", False)

    def __post_init__(self) -> None:
        check(self)
        self._read_texts()
        if (self.loss == "noise") is (self.sigma is None):
            need = "needs" if self.sigma is None else "has no use for"
            raise InputError(f"the loss {self.loss} {need} sigma, the standard deviation of the noise, such as 0.25")
        for name in ("consistency", "denoiser"):
            if getattr(self, name) and self.loss != "noise":
                raise InputError(f"{name} is for the loss noise, and not for {self.loss}; leave it out")
        if self.schedule == "multistep" and self.last_lr is not None:
            raise InputError("the schedule multistep divides the learning rate by 5 four times; leave last_lr out")
        if LOSSES[self.loss].bound == "local" and (self.amp is not None or self.temperature != 1.0):
            raise InputError(f"the loss {self.loss} propagates boxes: leave amp and temperature out")

    def _read_texts(self) -> None:
        """Replaces texts by numbers, and refuses numbers that mean nothing."""
        if isinstance(self.eps, str):
            object.__setattr__(self, "eps", parse_eps(self.eps))
        elif not POSITIVE.holds(self.eps):
            raise InputError(f"eps must be {POSITIVE.words}, got {self.eps}")
        if self.temperature != AUTO:
            ends = _numbers(self.temperature)
            if not (1 <= len(ends) <= 2 and all(map(POSITIVE.holds, ends))):
                what = f"{POSITIVE.words}, or the first and the last such as 0.2,0.02"
                raise InputError(f"temperature must be {what}, got {self.temperature!r}")
            object.__setattr__(self, "temperature", ends[0] if len(ends) == 1 else ends)
        if self.ramp is not None:
            ramp = _numbers(self.ramp)
            if len(ramp) != 3 or not all(map(WEIGHT.holds, ramp)) or ramp[2] > 1 or ramp[1] == 0:
                raise InputError(
                    "ramp is three numbers: the factor of eps at first, at last, and the share of the run in between, "
                    f"such as 0.1,2,0.5, got {self.ramp!r}"
                )
            object.__setattr__(self, "ramp", ramp)
        if isinstance(self.max_norm, (str, list)):
            object.__setattr__(self, "max_norm", _norms(self.max_norm))
        norms = self.max_norm.values() if isinstance(self.max_norm, Mapping) else [self.max_norm]
        for norm in norms:
            if norm is not None and not POSITIVE.holds(norm):
                raise InputError(f"max_norm must be {POSITIVE.words}, got {norm}")

    def described(self) -> dict[str, Any]:
        """The settings as lists, dicts and numbers."""
        plain = asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}

    def eps_at(self, done: float) -> float:
        """ε at the fraction ``done`` of the run (Huang et al. 2021, equation 28)."""
        first, last, _ = self.ramp or LOSSES[self.loss].ramp
        return self.eps * (first + (last - first) * self.mixture_at(done))

    def mixture_at(self, done: float) -> float:
        """λ of the losses with local bounds, which rises from 0 to 1 with ε (Huang et al. 2021, equation 29)."""
        share = (self.ramp or LOSSES[self.loss].ramp)[2]
        return min(done / share, 1.0) if share else 1.0

    def lr_at(self, done: float) -> float:
        """The learning rate at the fraction ``done`` of the run; exponential is equation 27 of Huang et al. 2021."""
        if done < self.warmup:
            return self.lr * (0.04 + 0.96 * done / self.warmup)
        if self.schedule == "multistep":
            return self.lr * _STEP_DOWN ** sum(done >= milestone for milestone in _MILESTONES)
        last = self.last_lr or self.lr * _LAST[self.schedule]
        if self.schedule == "exponential":
            return self.lr * (last / self.lr) ** (max(0.0, done - self.decay_from) / (1 - self.decay_from))
        return last + (self.lr - last) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def _numbers(value: Any) -> tuple[float, ...]:
    """The numbers of a text with commas between or of a sequence, or one alone; () where they are none."""
    try:
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, Sequence) else (value,)
        return tuple(float(part) for part in parts)
    except (TypeError, ValueError):
        return ()


def _norms(texts: str | Sequence[str]) -> MaxNorm | None:
    """One number for all layers, or numbers by pattern; a number without pattern applies to the remaining layers."""
    norms: dict[str, float] = {}
    for text in [texts] if isinstance(texts, str) else texts:
        pattern, _, number = text.rpartition("=")
        try:
            norms[pattern or "*"] = float(number)
        except ValueError as error:
            raise InputError(f"max_norm takes a number, or PATTERN=number such as '*.fc1=1.2', got {text!r}") from error
    if "*" in norms:
        norms = {"*": norms["*"], **norms}
    return norms.get("*") if len(norms) <= 1 and "*" in norms else norms or None
