"""The states of the random number generators that a network's code may use."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
_TRIES = 9


def watched(run: Callable[[], T]) -> tuple[T, bool]:
    """What a function returns, and whether it draws random numbers.

    A change of torch's generators alone, without a kernel of this thread that draws, may come from another thread; the
    function is then run again a few times, and draws if the generators change each time.
    """
    for _ in range(_TRIES if threading.active_count() > 1 else 1):
        others, torchs = _python_states(), _torch_states()
        with _Draws() as draws:
            result = run()
        changed = _torch_states() != torchs
        if _python_states() != others or (changed and draws.seen):
            return result, True
        if not changed:
            return result, False
    return result, True


class _Draws(TorchDispatchMode):
    """Sees whether this thread runs a kernel that may draw random numbers."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, kernel: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(kernel, "tags", ()):
            given = {parameter.name: parameter.default_value for parameter in kernel._schema.arguments}
            given |= dict(zip(given, args, strict=False)) | kwargs
            self.seen |= given.get("dropout_p") != 0 and given.get("train", True)
        return kernel(*args, **kwargs)


def _python_states() -> list[Any]:
    """States of Python's and NumPy's generators, as values to compare."""
    _, words, *place = np.random.get_state()
    return [random.getstate(), np.asarray(words).tobytes(), place]


def _torch_states() -> list[bytes]:
    """States of torch's default generators, as values to compare."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return [state.numpy().tobytes() for state in states]
