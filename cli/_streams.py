"""Standard streams whose errors never end a run: closed, full, or unable to encode some characters."""

import codecs
import contextlib
import io
import os
import sys
import unicodedata

_PLAIN = {"→": "->", "–": "-", "≤": "<=", "≥": ">=", "×": "x", "…": "...", "ℓ": "l", "∞": "infinity", "−": "-"}


def _plain(error: UnicodeError) -> tuple[str, int]:
    """A handler of characters that an encoding lacks: a similar text, the name of a Greek letter, or ``?``."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(map(_similar, missing)), error.end


def _similar(character: str) -> str:
    *greek, name = unicodedata.name(character, "?").split()
    if greek[:1] == ["GREEK"]:
        return name.lower()
    text = _PLAIN.get(character) or unicodedata.normalize("NFKD", character)
    return text if text.isascii() else "?"


codecs.register_error("lipcert.plain", _plain)


class _Stream(io.TextIOWrapper):
    """A standard stream that goes nowhere once it cannot be written, such as one on a full disk."""

    lost = False

    def write(self, text: str) -> int:
        with self._lost():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._lost():
            super().flush()

    @contextlib.contextmanager
    def _lost(self):  # type: ignore[no-untyped-def]
        try:
            yield
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # also for what is written when Python ends
            self.lost = not isinstance(error, BrokenPipeError)
            if self.lost and self is sys.stdout:
                print(f"lipcert: standard output cannot be written: {error.strerror}", file=sys.stderr, flush=True)


def open_streams() -> None:
    """Replaces standard output and standard error by streams that never raise."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:  # a closed one, whose number a file of rows would get
        pass
    os.close(handle)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8"))  # the null device from above
        elif type(stream) is io.TextIOWrapper:
            encoding, terminal = stream.encoding, stream.isatty()
            again = _Stream(stream.detach(), encoding, "lipcert.plain", line_buffering=terminal or name == "stderr")
            setattr(sys, name, again)
