"""The settings of certification, without torch. Command, library call, run identity and summary use this module.

To add an option to ``certify``, add a field to :class:`CertifySettings` and its type to :class:`CertifyOptions`, and
use ``settings.NAME`` in the certifier. A field with a help text becomes an option of the command, unless it has
``python=True``. Every field is an argument of :func:`lipcert.certify`, an entry of the summary, and part of the
identity that all rows of a file share.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from fractions import Fraction
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from lipcert.errors import InputError, as_given
from lipcert.settings._fields import COUNT, FAILURE, POSITIVE, Range, check, documented, option
from lipcert.settings._methods import LINEARISED, NAMES, SMOOTHING, STAGED, MethodName

if TYPE_CHECKING:
    from lipcert.attacks import Attack

Dtype = Literal["real", "float32", "float16", "bfloat16"]
RigorAsked = Literal["probabilistic", "deterministic"]

EPS = "l2 radius on pixels in [0, 1]: 36/255, 0.5 or 1e-3."
_NOISE = "Options of method smoothing"
_noise = partial(option, group=_NOISE)
_python = partial(option, python=True)
# In place of a standard deviation: choose one on other images.
AUTO = "auto"
_SIGMA = Range("above 0 and below 8", 0, 8)
SEED = Range("a whole number from 0 to 2^64 - 1", 0, 2**64, True, whole=True)
RIGORS = ("probabilistic", "deterministic")
DTYPES = ("real", "float32", "float16", "bfloat16")


class CertifyOptions(TypedDict, total=False):
    """The fields of :class:`CertifySettings` but ``eps`` as keywords, for editors and type checkers."""

    method: MethodName
    dtype: Dtype
    rigor: RigorAsked
    at: str | int | None
    time: float
    sigma: float | str | None
    samples: int
    alpha: float
    all_samples: bool
    seed: int
    futility: float
    delta: float
    further_eps: Sequence[float | str]
    attack: Literal["pgd", "pgd-100", "autoattack"] | Attack | None


@documented
@dataclass(frozen=True)
class CertifySettings:
    """The settings of a certificate; the constructor checks them.

    ε and radii are in ℓ2 on pixels in [0, 1], or with ``at`` on the value that it names: the output of a module, or,
    for an index, the start of that stage, which LoFAST uses for token embeddings. With several ε, staged
    certification computes radii instead of verdicts, and smoothing takes all samples. Deterministic certificates need
    explicit Jacobians. Noise draws stop as soon as a confidence sequence decides the
    verdict at ε; all of them give a bound by Clopper and Pearson. Choose the seed of the noise before looking at
    results.

    Attributes:
        futility: draws for an image end, as not certified, once the probability, given the draws so far, that its class
            is frequent enough is below this; 0 for never. Certificates do not depend on it.
        delta: failure probability, per image, of a probabilistic certificate.
        attack: one of ``lipcert.attacks.ATTACKS`` or an attack; None for no attack. Every certificate is tested against
            the attack. Staged certification computes only the global methods for images that the attack breaks within
            ε.
        further_eps: the larger ε of a run with several, as texts in ascending order; ``eps`` is then the smallest.
        eps_typed: ε as the user wrote it.

    Raises:
        InputError: a value is not valid.
    """

    eps: float = option(f"{EPS[:-1]}; 36/255,0.5 for several in one run.", typed=list[str])
    method: MethodName = option(
        f"staged: from the cheapest to the strongest method; {SMOOTHING}: certifies the smoothed classifier.",
        STAGED,
        choices=NAMES,
    )
    _: KW_ONLY
    dtype: Dtype = option(
        "Certify exact arithmetic (real), or a forward pass in this format.", DTYPES[0], choices=DTYPES
    )
    rigor: RigorAsked = _python(
        "deterministic: no random start vectors; for small networks.", RIGORS[0], choices=RIGORS
    )
    at: str | int | None = option("Perturb the output of a module, such as patch_embed, in place of the pixels.", None)
    sigma: float | str | None = _noise(
        "Standard deviation of the noise; 0.12,0.25: one run each; auto: chosen on images outside --limit.", None
    )
    samples: int = _noise(
        "Maximum number of noise draws per image, besides up to 100 that select the class.", 1_000, range=COUNT
    )
    alpha: float = _noise("Failure probability per image.", 1e-3, range=FAILURE)
    all_samples: bool = _noise("No early stopping: use all draws, for larger radii.", False)
    seed: int = _python("Seed of the noise.", 0, range=SEED, group=_NOISE)
    time: float = _python(
        "Staged: skip methods with an estimated CPU time per image above this many seconds.", 100.0, range=POSITIVE
    )
    futility: float = field(default=0.05, metadata={"range": Range("from 0 to below 1", 0, 1, True), "group": _NOISE})
    delta: float = field(default=1e-9, metadata={"range": FAILURE})
    further_eps: Sequence[float | str] = ()
    attack: str | Attack | None = None
    eps_typed: str = field(init=False, default="")

    def __post_init__(self) -> None:
        check(self)
        given = getattr(self.eps, "tolist", lambda: self.eps)()  # of arrays and tensors
        several = given if isinstance(given, (list, tuple)) else (given,)
        targets = dict(sorted(pair for one in (*several, *self.further_eps) for pair in _values(one)))
        if not targets:
            raise InputError("eps must be a positive number; for example eps=36/255")
        object.__setattr__(self, "eps", min(targets))
        object.__setattr__(self, "eps_typed", targets.pop(self.eps))
        object.__setattr__(self, "further_eps", tuple(targets.values()))
        linearised = self.method == STAGED or self.method in LINEARISED
        if self.at is not None and (not linearised or self.dtype != "real" or self.attack is not None):
            raise InputError("at needs method anchored, lofast or staged, in real arithmetic, and without an attack")
        if self.at == "":
            raise InputError("at names a module, such as patch_embed")
        self._check_smoothing()
        if isinstance(self.attack, str):
            from lipcert.attacks import attack_named  # imports torch

            object.__setattr__(self, "attack", attack_named(self.attack))

    @property
    def every_eps(self) -> list[tuple[float, str]]:
        """All ε of the run with their texts, ascending."""
        return [(self.eps, self.eps_typed), *((parse_eps(str(text)), str(text)) for text in self.further_eps)]

    @property
    def largest_eps(self) -> float:
        """The largest ε of the run."""
        return self.every_eps[-1][0]

    def _check_smoothing(self) -> None:
        """Refuses noise settings that are not valid, or that the method does not use; of staged, the model decides."""
        if self.method != SMOOTHING:
            if self.method != STAGED:
                self._refuse_noise()
            return
        if self.rigor != RIGORS[0] or self.attack is not None:
            setting = "an attack" if self.attack is not None else f"rigor {self.rigor}"
            raise InputError(f"{setting} is not for method {SMOOTHING}, which certifies by sampling; leave it out")
        if self.sigma not in (None, AUTO):
            try:
                sigma = float(self.sigma)
            except ValueError:
                sigma = math.nan
            if not _SIGMA.holds(sigma):
                kind = "a sigma below 8" if sigma > 1 else "a positive sigma"
                raise InputError(f"method {SMOOTHING} needs {kind}, such as 0.25, or {AUTO}, got {self.sigma}")
            object.__setattr__(self, "sigma", sigma)
        if self.further_eps:
            object.__setattr__(self, "all_samples", True)

    def _refuse_noise(self) -> None:
        """Refuses noise settings."""
        names = [one.name for one in noise_fields() if getattr(self, one.name) != one.default]
        if names:
            given = ", ".join(as_given(f"{name}=") for name in names)
            raise InputError(f"{given} is for method {SMOOTHING} only; choose it, or leave that out")

    def smoothed(self, sigma: float | None) -> CertifySettings:
        """These settings for a model of a smoothed classifier with noise of this σ, or for another model.

        Staged certification of a smoothed classifier is method smoothing, with its σ unless another is given.

        Raises:
            InputError: the method is smoothing and no σ is known, or noise is set for another model.
        """
        if self.method == SMOOTHING and self.sigma is None and sigma is None:
            raise InputError(f"method {SMOOTHING} needs a positive sigma, such as 0.25, or {AUTO}")
        if self.method == STAGED and sigma is None:
            self._refuse_noise()
        if sigma is None or self.method not in (STAGED, SMOOTHING):
            return self
        chosen = sigma if self.sigma is None else self.sigma
        changed: dict[str, Any] = {"eps": self.eps_typed, "method": SMOOTHING, "sigma": chosen}
        return dataclasses.replace(self, **changed)

    @property
    def rounded_as(self) -> Dtype:
        """The format whose rounding the certificates include; ``"real"`` for smoothing, which includes none."""
        return "real" if self.method == SMOOTHING else self.dtype

    @property
    def noise(self) -> dict[str, Any]:
        """The noise settings by name; empty for methods other than ``"smoothing"``."""
        return {one.name: getattr(self, one.name) for one in noise_fields()} if self.method == SMOOTHING else {}

    def described(self) -> dict[str, Any]:
        """All fields as JSON values, for the summary of a run."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        if (attack := values["attack"]) is not None:
            values["attack"] = {"name": attack.name, "version": attack.version, "settings": attack.settings}
        return values


def noise_fields() -> list[dataclasses.Field[Any]]:
    """The fields that only the method smoothing uses."""
    return [one for one in fields(CertifySettings) if one.metadata.get("group") == _NOISE]


def _values(eps: object) -> list[tuple[float, str]]:
    """One ε, or several with commas between: values and texts."""
    if isinstance(eps, str):
        return [(parse_eps(part), part.strip()) for part in eps.split(",")]
    if not (isinstance(eps, Real) and not isinstance(eps, bool) and 0 < float(eps) < math.inf):
        raise InputError(f"eps must be a positive number, got {eps}; for example eps=36/255")
    text = eps_text(float(eps))
    return [(parse_eps(text) if "/" in text else float(eps), text)]


def eps_text(eps: float) -> str:
    """ε as a text that :func:`parse_eps` reads back, up to an ulp: 36/255 for a whole number of 8-bit steps."""
    short = f"{eps:.9g}"
    if not math.isclose(float(short), eps, rel_tol=1e-12):
        steps = f"{round(255 * eps)}/255"
        return steps if round(255 * eps) and math.isclose(parse_eps(steps), eps, rel_tol=1e-15) else repr(eps)
    return short


def parse_eps(text: str) -> float:
    """The smallest float64 that is not below the written number, which may be a fraction such as 36/255."""
    error = InputError(f"eps must be a positive number, got {text!r}; for example 36/255, 0.5 or 1e-3")
    parts = text.split("/")
    try:
        # Check as floats first: an exact 1e-999999999 would have a billion digits.
        if len(parts) > 2 or not all(0 < float(part) < math.inf for part in parts):
            raise error
        numerator, denominator = Fraction(parts[0]), Fraction(parts[1] if len(parts) == 2 else 1)
        exact = numerator / denominator
        nearest = float(exact)
    except (ValueError, OverflowError):
        raise error from None
    return nearest if Fraction(nearest) >= exact else math.nextafter(nearest, math.inf)
