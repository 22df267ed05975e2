"""Sees whether code draws random numbers."""

from __future__ import annotations

import pickle
import random
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
_TRIES = 9
_LONGER = 0.1  # seconds in which another thread that draws while a function runs draws again
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
    """What a function returns, and what it draws; other threads may draw random numbers.

    Sees torch's kernels, Python's ``random`` and the system's generator on this thread, and generators of NumPy that
    functions called here refer to; none but the kernels while another profiler runs. Draws from NumPy's global
    generator, and those of the function's own threads from any global one, are seen by its state, which changes in each
    of several runs; if those of Python and torch also change between runs, another thread draws, and they show nothing.
    """
    rests = True
    for _ in range(_TRIES if threading.active_count() > 1 else 1):
        before, started = _global_states(), time.monotonic()
        with _Draws() as draws:
            result = run()
        after = _global_states()
        if draws.anew or after == before:
            return result, Drawn(draws.anew, tuple(draws.states))
        time.sleep(_LONGER + 3 * (time.monotonic() - started))
        rests = rests and after == _global_states()
        if not rests and after[0] == before[0]:
            break
    return result, Drawn(rests or after[0] != before[0], tuple(draws.states))


class _Draws(TorchDispatchMode):
    """Notes the draws of kernels and of generators of Python, NumPy and the system."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.anew = False
        self.states: list[int] = []
        self.seen: set[CodeType] = set()
        self.numpy: dict[int, tuple[Any, bytes]] = {}  # generators, and their states before the function that has them

    def __enter__(self) -> Any:
        self.profiles = sys.getprofile() is None
        if self.profiles:
            sys.setprofile(self._profile)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self.profiles:
            sys.setprofile(None)
        self.states += [hash(before) for one, before in self.numpy.values() if _state(one) != before]

    def _profile(self, frame: Any, event: str, called: Any) -> None:
        if event == "call":
            self._look_into(frame)
        generator = getattr(called, "__self__", None) if event == "c_call" else None
        self.anew |= getattr(called, "__name__", "") in ("urandom", "getrandom") and isinstance(generator, ModuleType)
        if isinstance(generator, random.Random) and called.__name__ in ("random", "getrandbits"):
            if generator is _PYTHONS or isinstance(generator, random.SystemRandom):
                self.anew = True
            else:
                self.states.append(hash(generator.getstate()))

    def _look_into(self, frame: FrameType) -> None:
        """Notes the generators of NumPy that a function has by its arguments, its closure, or names in its code.

        Also those one step from there: in attributes, in lists and mappings, and of bound methods.
        """
        if frame.f_code in self.seen:
            return
        self.seen.add(frame.f_code)
        names = frame.f_code.co_names
        values = [frame.f_globals.get(name) for name in names]
        values += [vars(one).get(name) for one in values if isinstance(one, ModuleType) for name in names]
        for one in (*values, *frame.f_locals.values()):
            for part in (one, *_parts(one)):
                part = part.__self__ if isinstance(part, MethodType) else part
                if isinstance(part, (np.random.Generator, np.random.RandomState)) and id(part) not in self.numpy:
                    self.numpy[id(part)] = part, _state(part)

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


def _parts(value: Any) -> list[Any]:
    """The objects to which an object other than a module of code refers, one step deep."""
    if isinstance(value, (dict, list, tuple)):
        return [*value.values()] if isinstance(value, dict) else [*value]
    try:  # without code of the object's own
        return [] if isinstance(value, ModuleType) else [*object.__getattribute__(value, "__dict__").values()]
    except AttributeError:
        return []


def _state(generator: Any) -> bytes:
    """The state of a generator of NumPy."""
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator._bit_generator
    return pickle.dumps(bits.state)


def _global_states() -> list[Any]:
    """The states of the global generators of NumPy, Python and torch."""
    numpys = np.random.get_state(legacy=False)
    return [pickle.dumps(numpys), random.getstate(), torch.default_generator.get_state().numpy().tobytes()]
