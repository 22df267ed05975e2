"""Resolves the name of a model, once and without torch."""

from __future__ import annotations

import difflib
import functools
import mimetypes
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import safetensors

from lipcert.errors import LoadError, shortened
from lipcert.inputs.checkpoints import ASSETS, path_of
from lipcert.inputs.files import WEIGHTS, no_file

BUNDLED = "digits-vit"
HUB = ("hf-hub:", "hf_hub:")
FOLDER = "local-dir:"


@dataclass(frozen=True)
class Source:
    """A model by name.

    Attributes:
        name: the path of a file, a timm name with or without a tag, an ``hf-hub:`` id, or a ``local-dir:``.
        word: how a command names the model: what was typed, or the file that was chosen.
        file: whether it is a file, of weights or an artifact.
        shipped: whether it is a checkpoint that comes with lipcert.
        chosen: whether nothing was typed: it is the newest artifact in the folder, or the bundled checkpoint.
    """

    name: str
    word: str
    file: bool = False
    shipped: bool = False
    chosen: bool = False

    @staticmethod
    def of(given: str | os.PathLike[str] | None) -> Source:
        """The model that a text or a path names; for None the newest artifact in the folder, or the bundled one.

        A text that ends like a file of weights, contains a folder, or names an existing file is a file, whatever timm
        makes of it: timm takes everything after the first dot for a tag.

        Raises:
            LoadError: there is no such file or architecture, or nothing to choose.
        """
        if given is None:
            return _chosen()
        text = os.fspath(given)
        name = BUNDLED if text == "bundled" else text
        if (shipped := path_of(name)) is not None:
            return Source(str(shipped), name, file=True, shipped=True)
        if text.startswith((*HUB, FOLDER)):
            return Source(text, text)
        if (mimetypes.guess_type(text)[0] or "").startswith("image/"):
            raise LoadError(f"{text} is an image, and stands where a model is named; --data takes one, or their folder")
        suffix, folder = Path(text).suffix.lower() in WEIGHTS, os.path.isdir(text) and text not in architectures()
        if not (suffix or folder or isinstance(given, Path) or os.sep in text or os.path.isfile(text)):
            named = Source(text, text)
            named._check_name()
            return named
        if not os.path.lexists(text):
            hub = None if suffix else re.fullmatch(r"(?:https?:/+huggingface\.co/)?([\w-]+/[\w.-]+)", text)
            raise no_file(text, f"; a model of the hub is given as hf-hub:{hub[1]}" if hub else "")
        return Source(text, text, file=True)

    @property
    def architecture(self) -> str | None:
        """The timm name without its tag; None of files and of models of the hub."""
        return None if self.file or self.name.startswith((*HUB, FOLDER)) else self.name.partition(".")[0]

    @property
    def stem(self) -> str:
        """The start of the names of files that are written for the model."""
        name = Path(self.name).name if self.file and not self.shipped else self.word
        stem = name.removesuffix(".safetensors").removesuffix(".lipcert")
        return "".join(c if c.isalnum() or c in "._-" else "_" for c in stem)

    @property
    def label(self) -> str:
        """The model in words, for results."""
        return f"{BUNDLED}, bundled" if self.shipped and self.word == BUNDLED else self.word

    @property
    def reason(self) -> str:
        """Why the model was chosen, after its label."""
        if self.shipped:
            return ": this folder holds no artifact"
        age = timedelta(seconds=int(max(0.0, time.time() - Path(self.name).stat().st_mtime)))
        return f", the newest artifact in this folder, written {age} ago"

    def _check_name(self) -> None:
        """Refuses a name that occurs nowhere in timm, without importing it; modules of the user may add names."""
        name = self.architecture
        if name is not None and "timm" not in sys.modules and not re.search(rf"\b{re.escape(name)}\b", _code()):
            raise LoadError(unknown(self.name, architectures()))


def _chosen() -> Source:
    artifacts = [path for path in Path().glob("*.safetensors") if is_artifact(path)]
    if artifacts:
        newest = max(artifacts, key=lambda path: (path.stat().st_mtime_ns, path.name))
        return Source(str(newest), str(newest), file=True, chosen=True)
    bundled = path_of(BUNDLED)
    if bundled is None or not bundled.is_file():
        raise LoadError("no model named, and no artifact in this folder; name one, such as vit_tiny_patch16_224")
    return Source(str(bundled), BUNDLED, file=True, shipped=True, chosen=True)


def is_artifact(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a safetensors file with lipcert's metadata; nothing else is checked."""
    if not os.path.isfile(path):  # reading a pipe would block
        return False
    try:
        with safetensors.safe_open(path, framework="np") as file:
            return "lipcert" in (file.metadata() or {})
    except (safetensors.SafetensorError, OSError, ValueError):
        return False


def unknown(name: str, names: Iterable[str]) -> str:
    """The message on a name that timm does not have, with similar ones."""
    if re.fullmatch(r"-?\d*\.?\d+", name):
        return f"{name} is in the place of a model; separate several numbers of one option by commas: 0.5,0.5,0.5"
    files: list[str] = []
    with suppress(OSError):  # a file without the end of its name
        files = [file for file in sorted(os.listdir()) if name.strip() and Path(file).suffix.lower() in WEIGHTS]
    close = similar(name.partition(".")[0], names, [file for file in files if file.startswith(name)][:1])
    remedy = "a file is given by its path, a hub model as hf-hub:OWNER/NAME"
    return f"timm has no model {shortened(name)!r}{close}; {remedy}"


def similar(name: str, names: Iterable[str], first: Sequence[str] = ()) -> str:
    """The names that may have been meant, for a message; "" without any."""
    close = [*first, *difflib.get_close_matches(name.lower(), list(names), n=3)]
    return f" (did you mean {' or '.join(close)}?)" if close else ""


@functools.lru_cache(maxsize=1)
def _code() -> str:
    """The code of timm's models and of lipcert's networks, in which a registered name must occur."""
    timm = find_spec("timm")
    folders = [Path(place) / "models" for place in (timm and timm.submodule_search_locations) or ()]
    files = [file for folder in (*folders, ASSETS.with_name("networks")) for file in folder.glob("*.py")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@functools.lru_cache(maxsize=1)
def architectures() -> frozenset[str]:
    """The names that timm and lipcert register, read from the code."""
    rows = r'@register_model\s+def (\w+)\(|^    \(\s*"(\w+)",\s*(?:"|_ABOUT)'
    return frozenset(a or b for a, b in re.findall(rows, _code(), re.MULTILINE))
