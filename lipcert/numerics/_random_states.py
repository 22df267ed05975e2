"""The states of the random number generators that a network's code may use."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states() -> list[Any]:
    """States of torch's, Python's and NumPy's generators, as values to compare."""
    _, words, *place = np.random.get_state()
    states: list[Any] = [torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(words).tobytes(), place]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    return states
