"""The states of the random number generators that a network's code may use."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
_TRIES = 9


def watched(run: Callable[[], T]) -> tuple[T, bool]:
    """What a function returns, and whether it draws random numbers: in all of several tries, if other threads may."""
    for _ in range(_TRIES if threading.active_count() > 1 else 1):
        before = _random_states()
        result = run()
        if _random_states() == before:
            return result, False
    return result, True


def _random_states() -> list[Any]:
    """States of torch's, Python's and NumPy's generators, as values to compare."""
    _, words, *place = np.random.get_state()
    states: list[Any] = [torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(words).tobytes(), place]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    return states
