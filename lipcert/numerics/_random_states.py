"""Sees whether code draws random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")


def watched(run: Callable[[], T]) -> tuple[T, bool]:
    """What a function returns, and whether this thread draws random numbers in it; other threads may draw them.

    Sees torch's kernels and Python's ``random``, whatever generator they use, and the state of NumPy's global
    generator. Python's are not seen while another profiler runs.
    """
    before = _numpy_state()
    with _Draws() as draws:
        result = run()
    return result, draws.seen or _numpy_state() != before


class _Draws(TorchDispatchMode):
    """Sees whether a kernel, or a generator of Python, may draw a random number."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

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
        self.seen |= event == "c_call" and isinstance(getattr(called, "__self__", None), random.Random)

    def __torch_dispatch__(self, kernel: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(kernel, "tags", ()):
            given = {parameter.name: parameter.default_value for parameter in kernel._schema.arguments}
            given |= dict(zip(given, args, strict=False)) | kwargs
            self.seen |= given.get("dropout_p") != 0 and given.get("train", given.get("training", True))
        return kernel(*args, **kwargs)


def _numpy_state() -> list[Any]:
    _, words, *place = np.random.get_state()
    return [np.asarray(words).tobytes(), place]
