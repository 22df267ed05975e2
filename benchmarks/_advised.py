"""Runs a command, and then each command that it advises, until none advises another."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Words = Sequence[str]
Runner = Callable[[Words, Path], tuple[int, str, str]]


@dataclass(frozen=True)
class Step:
    """A command that was run; ``end`` is the last line that it printed."""

    words: tuple[str, ...]
    code: int
    seconds: float
    out: str
    err: str

    @property
    def end(self) -> str:
        """The last line of the result, or of the errors where there is none."""
        return ([*self.err.strip().splitlines(), *self.out.strip().splitlines()] or [""])[-1]

    @property
    def advised(self) -> list[list[str]]:
        """The words of the commands printed after ``next`` and ``or``."""
        lines = re.findall(r"^(?:next|or)(?:\t|: )lipcert (.*)$", f"{self.out}\n{self.err}", re.M)
        return [shlex.split(line) for line in lines]


@dataclass
class Journey:
    """Commands typed one after the other in a folder, and those that they advise.

    Attributes:
        names: what stands for the names in capitals in advice, such as ``TRAIN``.
        sizes: options by command, which replace those of advice, so that it takes little time.
        follow: whether to run what is advised.
    """

    folder: Path
    run: Runner
    names: Mapping[str, str]
    sizes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    follow: bool = True
    steps: list[Step] = field(default_factory=list)
    seen: set[tuple[str, ...]] = field(default_factory=set)

    def go(self, *words: str) -> Step:
        """Runs a command, and what it advises.

        Raises:
            AssertionError: one of them fails, or ends in a traceback.
        """
        typed = self._sized(words)
        started = time.perf_counter()
        step = Step(tuple(typed), *_timed(self.run(typed, self.folder), started))
        self.steps.append(step)
        assert step.code == 0, (shlex.join(["lipcert", *typed]), step.err[-2000:])
        assert "Traceback" not in step.err, step.err[-2000:]
        for advised in step.advised if self.follow else ():
            filled = [self._filled(word) for word in advised]
            kind = _kind(filled)
            if kind not in self.seen:
                self.seen.add(kind)
                self.go(*filled)
        return step

    def _filled(self, word: str) -> str:
        """A word of advice with a name of this folder for the one in capitals."""
        key, equals, value = word.rpartition("=")
        return f"{key}{equals}{self.names.get(value, value)}"

    def _sized(self, words: Words) -> list[str]:
        """The words with the small sizes of this journey."""
        kept, rest = list[str](), list(words)
        sizes = self.sizes.get(words[0], {}) if words else {}
        noise = "smoothing" in words
        while rest:
            word = rest.pop(0)
            if word in sizes:
                rest.pop(0)
            else:
                kept.append(word)
        return kept + [w for name, size in sizes.items() if noise or name != "--samples" for w in (name, size)]


def _timed(outcome: tuple[int, str, str], started: float) -> tuple[int, float, str, str]:
    code, out, err = outcome
    return code, time.perf_counter() - started, out, err


def _kind(words: Words) -> tuple[str, ...]:
    """The command, its first argument and the names of its options: advice of one kind is followed once."""
    return (*words[:2], *sorted(word for word in words[2:] if word.startswith("--")))


def in_a_process(words: Words, folder: Path) -> tuple[int, str, str]:
    """Runs a command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "lipcert", *words], cwd=folder, capture_output=True, text=True, errors="replace"
    )
    return done.returncode, done.stdout, done.stderr


def here(words: Words, folder: Path) -> tuple[int, str, str]:
    """Runs a command in this process, with the arguments, folder and streams of one of its own."""
    from lipcert.cli import main

    before, argv, streams = os.getcwd(), sys.argv, (sys.stdout, sys.stderr)
    files, saved = [folder / f".{name}" for name in ("out", "err")], [os.dup(number) for number in (1, 2)]
    code: object = 0
    try:
        for stream in streams:
            stream.flush()
        for number, file in zip((1, 2), files, strict=True):
            handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, number)
            os.close(handle)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
        sys.argv = ["lipcert", *words]
        os.chdir(folder)
        try:
            main()
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os.chdir(before)
        sys.argv, (sys.stdout, sys.stderr) = argv, streams
        for number, handle in zip((1, 2), saved, strict=True):
            os.dup2(handle, number)
            os.close(handle)
    out, err = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    return code if isinstance(code, int) else int(bool(code)), out, err
