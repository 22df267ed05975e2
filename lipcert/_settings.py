"""What can be asked of a run, without torch: command, library call, run identity and summary are made from it.

To add an option to ``certify``, add a field to :class:`CertifySettings` and use ``settings.NAME`` in the certifier. A
field with a help text is an option of the command; each field is an argument of :func:`lipcert.certify`, an entry of
the summary, and a part of the identity that rows of one file must share.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from fractions import Fraction
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

from lipcert.errors import InputError

if TYPE_CHECKING:
    from lipcert.attacks import Attack

S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])

# Methods of a certificate, from the cheapest to the strongest, and what they can state about themselves.
SINGLE = ("global", "gloro", "local", "lofast", "anchored")
METHODS = ("staged", *SINGLE)
# These take norms of Jacobians.
LINEARISED = ("lofast", "anchored")
# These draw no start vectors: their certificates are deterministic.
DETERMINISTIC = ("global", "gloro")
RIGORS = ("probabilistic", "deterministic")
DTYPES = ("real", "float32", "float16", "bfloat16")


def option(help: str, default: Any = dataclasses.MISSING, typed: Any = str) -> Any:
    """A field of settings that is an option of the command too.

    Args:
        help: what ``--help`` says.
        default: of the field and of the option; the option is required without one.
        typed: the type of the option.
    """
    return field(default=default, metadata={"help": help, "typed": typed})


def settings_of(kind: Callable[..., S], *arguments: Any, **given: Any) -> S:
    """Makes settings, and says in one line which argument there is not.

    Raises:
        InputError: an argument that is unknown, missing or out of range.
    """
    signature = inspect.signature(kind)
    try:
        signature.bind(*arguments, **given)
    except TypeError as error:
        close = [name for wrong in given for name in difflib.get_close_matches(wrong, signature.parameters, 1)]
        meant = [name for name in close if name not in given]
        hint = f"did you mean {meant[0]}?" if meant else f"the arguments are {', '.join(signature.parameters)}"
        raise InputError(f"{error}; {hint}") from error
    return kind(*arguments, **given)


def takes(kind: type) -> Callable[[F], F]:
    """Shows the fields of settings in the signature of a function that takes them as keywords, for help and editors."""

    def shown(function: F) -> F:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [
            p.replace(kind=p.KEYWORD_ONLY)
            for p in inspect.signature(kind).parameters.values()
            if p.name not in signature.parameters
        ]
        function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return function

    return shown


@dataclass(frozen=True)
class CertifySettings:
    """What is asked of a certificate; checked when it is made.

    Attributes:
        eps: ε in ℓ2 on pixels in [0, 1], positive: a number, or a text such as ``"36/255"``, which is rounded up.
        method: one of ``METHODS``; ``"staged"`` goes from the cheapest to the strongest on what is still open.
        dtype: ``"real"`` for real arithmetic, or the format of the deployed forward pass: ``"float32"``, ``"float16"``
            or ``"bfloat16"``.
        rigor: ``"deterministic"`` for certificates without random start vectors, which needs Jacobians written out and
            is for small networks; else ``"probabilistic"``.
        at: what is perturbed: None for the pixels; the path of a module, such as ``"patch_embed"``, for its output, or
            the index of a stage for its start, as LoFAST does for token embeddings. ε and radii are measured there.
            Methods lofast and anchored only, and staged then is anchored.
        passes: find no more norms of Jacobians than about this many forward passes per image allow, and take products
            of norms for the others; None for all of them, or, in staged certification, for what takes a reasonable
            time. Methods lofast, anchored and staged.
        delta: probability, per image, that a certificate is wrong where it is probabilistic.
        attack: one of ``lipcert.attacks.ATTACKS`` or an attack; None for none. Staged certification spends no more than
            the global constants on images that it breaks within ε, and each certificate is put to the test.
        eps_typed: ε as it was written.

    Raises:
        InputError: a value that cannot be used.
    """

    eps: float = option("l2 radius on pixels in [0, 1]: 36/255, 0.5, 1e-3.")
    method: str = option(f"One of {', '.join(METHODS)}.", METHODS[0])
    _: KW_ONLY
    dtype: str = option(
        f"What certificates hold for: real arithmetic, or a forward pass in {', '.join(DTYPES[1:])}.", DTYPES[0]
    )
    rigor: str = option("probabilistic, or deterministic: no random start vectors, for small networks.", RIGORS[0])
    at: str | int | None = option(
        "Perturb a module's output, not the pixels: patch_embed, blocks.0.", None, typed=str | None
    )
    passes: float | None = option(
        "Spend at most about this many forward passes per image on norms of Jacobians; products replace the others.",
        None,
        typed=float | None,
    )
    delta: float = 1e-9
    attack: str | Attack | None = None
    eps_typed: str = field(init=False, default="")

    def __post_init__(self) -> None:
        given, eps = self.eps, parse_eps(self.eps) if isinstance(self.eps, str) else self.eps
        if not (isinstance(eps, Real) and math.isfinite(eps) and eps > 0):
            raise InputError(f"eps must be a positive number, got {eps}; for example eps=36/255")
        if self.method not in METHODS:
            raise InputError(f"unknown method {self.method!r}; choose one of {', '.join(METHODS)}")
        if self.dtype not in DTYPES:
            raise InputError(f"unknown dtype {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        if self.rigor not in RIGORS:
            raise InputError(f"unknown rigor {self.rigor!r}; choose one of {', '.join(RIGORS)}")
        linearised = self.method == "staged" or self.method in LINEARISED
        if self.at is not None and (not linearised or self.dtype != "real" or self.attack is not None):
            raise InputError("at asks for method anchored, lofast or staged, in real arithmetic, and without an attack")
        if self.passes is not None and not (isinstance(self.passes, Real) and 0 <= self.passes < math.inf):
            raise InputError(f"passes must be a number of forward passes, 0 or more, got {self.passes}")
        if self.passes is not None and not linearised:
            raise InputError(
                f"passes asks for method anchored, lofast or staged; {self.method} takes no norms of Jacobians"
            )
        if not (isinstance(self.delta, Real) and 0 < self.delta < 1):
            raise InputError(f"delta must be a probability between 0 and 1, got {self.delta}")
        object.__setattr__(self, "eps_typed", given if isinstance(given, str) else f"{float(eps):.9g}")
        object.__setattr__(self, "eps", float(eps))
        if isinstance(self.attack, str):
            from lipcert.attacks import attack_named  # imports torch

            object.__setattr__(self, "attack", attack_named(self.attack))

    def described(self) -> dict[str, Any]:
        """All fields as values that JSON can hold: what stands in the summary of a run."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        if self.attack is not None:
            from lipcert.attacks import identity

            values["attack"] = identity(values["attack"])
        return values


def parse_eps(text: str) -> float:
    """The smallest float64 that is not below the number written, which may be a fraction such as 36/255.

    Raises:
        InputError: if it is not a positive number.
    """
    error = InputError(f"eps must be a positive number, got {text!r}; for example 36/255, 0.5 or 1e-3")
    parts = text.split("/")
    try:
        # As floats first: an exact 1e-999999999 would have a billion digits.
        if len(parts) > 2 or not all(0 < float(part) < math.inf for part in parts):
            raise error
        numerator, denominator = Fraction(parts[0]), Fraction(parts[1] if len(parts) == 2 else 1)
        exact = numerator / denominator
        nearest = float(exact)
    except (ValueError, OverflowError):
        raise error from None
    return nearest if Fraction(nearest) >= exact else math.nextafter(nearest, math.inf)
