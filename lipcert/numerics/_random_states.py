"""Sees whether code draws random numbers."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
_TRIES = 9
_PYTHONS = random.random.__self__  # type: ignore[attr-defined]


class Drawn(NamedTuple):
    """The random numbers that a function drew.

    Attributes:
        anew: whether from a global generator, or the system's.
        states: what other generators were in before each draw; those of a generator that is seeded in every call are
            the same in each.
    """

    anew: bool
    states: tuple[int, ...]


def watched(run: Callable[[], T]) -> tuple[T, Drawn]:
    """What a function returns, and what this thread draws in it; other threads may draw random numbers.

    Sees torch's kernels and Python's ``random``; Python's not while another profiler runs. NumPy's global generator is
    seen by its state, which other threads may change: the function is then run again, a few times.
    """
    for _ in range(_TRIES if threading.active_count() > 1 else 1):
        before = _numpy_state()
        with _Draws() as draws:
            result = run()
        changed = _numpy_state() != before
        if draws.anew or not changed:
            break
    return result, Drawn(draws.anew or changed, tuple(draws.states))


class _Draws(TorchDispatchMode):
    """Notes the draws of kernels and of Python's generators."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.anew = False
        self.states: list[int] = []

    def __enter__(self) -> Any:
        self.profiles = sys.getprofile() is None
        if self.profiles:
            sys.setprofile(self._profile)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self.profiles:
            sys.setprofile(None)

    def _profile(self, frame: Any, event: str, called: Any) -> None:
        generator = getattr(called, "__self__", None) if event == "c_call" else None
        if isinstance(generator, random.Random) and called.__name__ in ("random", "getrandbits"):
            if generator is _PYTHONS or isinstance(generator, random.SystemRandom):
                self.anew = True
            else:
                self.states.append(hash(generator.getstate()))

    def __torch_dispatch__(self, kernel: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(kernel, "tags", ()):
            given = {parameter.name: parameter.default_value for parameter in kernel._schema.arguments}
            given |= dict(zip(given, args, strict=False)) | kwargs
            generator = given.get("generator")
            if generator is not None and generator is not torch.default_generator:
                self.states.append(hash(generator.get_state().numpy().tobytes()))
            else:
                used = given.get("dropout_p", given.get("p")) != 0
                self.anew |= used and given.get("train", given.get("training", True))
        return kernel(*args, **kwargs)


def _numpy_state() -> list[Any]:
    _, words, *place = np.random.get_state()
    return [np.asarray(words).tobytes(), place]
