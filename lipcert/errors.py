"""The exceptions that lipcert raises intentionally.

Each message is one line that says what is wrong and what to do. The command line prints that line and exits with code
2. In Python, the classes distinguish, for example, a bad file from a bad argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class LipcertError(Exception):
    """The base class of all exceptions that lipcert raises intentionally."""

    in_command: ClassVar[bool] = False  # whether a command runs, whose messages name options

    def __str__(self) -> str:
        """The message, with non-printable characters escaped, so that names from files cannot break its line."""
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in super().__str__())


class InputError(LipcertError, ValueError):
    """An argument, an image or a weight is not valid."""


class LoadError(LipcertError):
    """A model, checkpoint or artifact cannot be loaded."""


class ConvertError(LipcertError):
    """The requested surgery is not possible."""


class UnsupportedOperation(LipcertError):
    """Some operations have no rule. They are never assumed to be 1-Lipschitz.

    Attributes:
        operations: one ``(operation, module path)`` pair for every place in the model.
        question: the missing rule: "lipschitz", "remainder" or "rounding".
    """

    def __init__(self, operations: Sequence[tuple[str, str]], question: str = "lipschitz"):
        self.operations = tuple(operations)
        self.question = question
        super().__init__(self._message(*self._listed()))

    def _listed(self) -> tuple[int, str]:
        """The number of different problems, and a list of them with their places."""
        places: dict[str, list[str]] = {}
        for name, path in self.operations:
            places.setdefault(name, []).append(path or "(model)")
        listed = "; ".join(
            f"{name} at {', '.join(dict.fromkeys(paths[:3]))}"
            + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
            for name, paths in places.items()
        )
        return len(places), listed

    def _message(self, count: int, listed: str) -> str:
        missing = "" if self.question == "lipschitz" else f"{self.question} "
        if {name for name, _ in self.operations} == {"log_softmax"}:
            return f"no rule for {listed}; leave it out at the end of a network, where it changes no prediction"
        return (
            f"no {missing}rule for {counted(count, 'operation')}: {listed}; "
            f"add one with @lipcert.bounds.{missing.strip() or 'rule'}, convert the modules, or certify with "
            "--method smoothing, which needs no rules; docs/how-to/write-a-rule.md shows how"
        )


class WrongDerivative(UnsupportedOperation):
    """Torch's derivatives of the network under ``vmap`` differ from those without it, so none of them is used."""

    def __init__(self) -> None:
        super().__init__([("a derivative that differs under vmap", "")])

    def _message(self, count: int, listed: str) -> str:
        return (
            "torch's derivatives of this network under vmap differ from those without vmap; "
            "use --method gloro, or another version of torch"
        )


class LedgerError(LipcertError):
    """A random vector was requested twice, or a charge exceeds an image's failure probability: a defect of lipcert."""


class UnsupportedCode(UnsupportedOperation):
    """The forward code is not a fixed sequence of operations on tensors, so it cannot be represented as a graph.

    Attributes:
        operations: one ``(problem, module path)`` pair for every place in the model.
    """

    def _message(self, count: int, listed: str) -> str:
        remedy = "rewrite it so that every image and dtype takes the same tensor operations"
        if "changes its module" in listed:
            remedy = (
                "remove counters and stored values from forward. If torch.nn.utils.parametrize recomputes a weight in "
                f"every call, {as_given('freeze=True', '--model-args freeze=True')} keeps it; if forward does, store "
                "the computed weight once"
            )
        return f"the network's code cannot be certified: {listed}; {remedy}"


class Interrupted(LipcertError):
    """A run stopped before its end. Written rows stay valid, and the same command continues the run."""


class BrokenCertificate(LipcertError):
    """An attack changes a prediction inside its certified radius: a defect of lipcert. The command exits with code 3.

    Attributes:
        position: index of the image in its batch.
        distance: ℓ2 distance of the perturbed image.
        radius: the certified radius.
        method: the method of the false certificate.
    """

    def __init__(self, position: int, distance: float, radius: float, method: str):
        self.position, self.distance, self.radius, self.method = position, distance, radius, method
        super().__init__(f"image {position} of the batch: {self.contradiction}")

    @property
    def contradiction(self) -> str:
        """A description of the contradiction."""
        return (
            f"an attack changes the prediction at distance {self.distance:.9g}, inside the radius {self.radius:.9g} "
            f"that {self.method} certified; this is a defect of lipcert, no certificate of this run can be relied on"
        )


def as_given(argument: str, option: str = "") -> str:
    """How the user gives an argument: ``checkpoint=`` in Python, ``--checkpoint`` in a command."""
    if not LipcertError.in_command:
        return argument
    return option or f"--{argument.partition('=')[0].replace('_', '-')}"


def counted(number: int, noun: str) -> str:
    """``1 image``, ``2 images``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, with the next one where it ends in a colon."""
    lines = str(error).strip().splitlines()
    if lines and isinstance(error, KeyError):
        return f"no entry {lines[0]}"
    if not lines:
        return type(error).__name__
    text = " ".join(line.strip() for line in lines[: 2 if lines[0].rstrip().endswith(":") else 1])
    return text.removesuffix(".")


def shortened(text: str, longest: int = 100) -> str:
    """Text from a file, shortened for a message."""
    return text if len(text) <= longest else f"{text[:longest]}…"
