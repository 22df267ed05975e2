"""Files, without torch: checks that they exist, and atomic writes."""

from __future__ import annotations

import difflib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lipcert.errors import InputError, LoadError, shortened

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

File = str | os.PathLike[str]
# What files of weights are called.
WEIGHTS = frozenset({".safetensors", ".pth", ".pt", ".bin", ".tar", ".ckpt"})
# The end of the name of every file of rows, so that no two files share a summary.
ROWS = ".jsonl"
_SHOWN = 4  # names in a message
_LONGEST = 220  # bytes in the name of a file of rows: that of its summary is longer, and file systems take 255
# Kinds of data sets that timm opens by name, and the package that each needs besides timm's own.
KINDS = {"torch": None, "hfds": "datasets"}


def printable(name: str) -> str:
    """A file's name as one line that every output can hold; controls and bytes that are no UTF-8 become ``\\xe9``."""
    return re.sub("[\x00-\x1f\x7f-\x9f\udc80-\udcff]", lambda byte: f"\\x{ord(byte[0]) & 0xFF:02x}", name)


def listing(names: Sequence[str]) -> str:
    """The first few names."""
    return ", ".join(printable(shortened(name)) for name in names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


def no_file(path: File, more: str = "") -> LoadError:
    """The error of a file that does not exist, with what to do."""
    name = shortened(os.fspath(path))
    if re.match(r"\w{2,}:/", name):
        name = re.sub(":/+", "://", name, count=1)  # of a Path, which has one slash
        more = more or "; download it first, and give its path"
    elif os.path.islink(path):
        more = f": it is a link to {shortened(os.readlink(path))}, which does not exist; copy the file itself"
    elif os.path.exists(path):
        more = ": it is a pipe or a device; write what it gives to a file"
    elif not more:
        with suppress(OSError):
            folder, base = os.path.split(path)
            close = difflib.get_close_matches(base, os.listdir(folder or "."), 1)
            more = f"; the folder has {shortened(close[0])}" if close else ""
    return LoadError(f"there is no file {name}{more}")


@contextmanager
def reading(path: File) -> Iterator[None]:
    """A block that reads a file; the system's errors say nothing of its content."""
    try:
        yield
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror or error}") from error


def check_there(*files: Path | None) -> None:
    """Refuses files that do not exist; None passes."""
    for file in files:
        if file is not None and not os.path.lexists(file):
            raise no_file(file)


def occupied(path: Path) -> InputError:
    """The error of a file of results that another process writes."""
    return InputError(f"another process is writing {path}; wait for it, or give another file with --out")


def lock(file: int, path: Path, shared: bool = False) -> bool:
    """Locks an open file until it is closed; False without locks. Raises an InputError if another process has it."""
    try:
        if fcntl is None:
            return False
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise occupied(path) from error
    except OSError:  # the file system has no locks
        return False
    return True


def reserve(path: Path, stack: ExitStack) -> None:
    """Locks a path for this process until the stack ends, by a second file, because the first is replaced."""
    beside = path.with_name(f".{path.name}.lock")
    file = stack.enter_context(beside.open("w"))
    if lock(file.fileno(), path):
        stack.callback(beside.unlink, missing_ok=True)


def check_name(path: Path) -> None:
    """Raises InputError for a path that cannot hold rows."""
    if len(os.fsencode(path.name)) > _LONGEST:
        raise InputError(f"the name {shortened(path.name)} has more than {_LONGEST} bytes; give a shorter one")
    if path.is_dir():
        raise InputError(f"{path} is a folder; give a file in it, such as {path / 'r.jsonl'}")
    if path.suffix != ROWS or (path.exists() and not path.is_file()):
        raise InputError(f"{path} cannot hold the rows; give a file whose name ends in {ROWS}, such as results{ROWS}")
    above = next(one for one in path.absolute().parents if one.exists())
    if not above.is_dir():
        raise InputError(f"cannot write {path}: {above} is no folder")


def check_rows(path: Path) -> None:
    """Refuses a path that cannot hold rows, and a file of rows that another process writes."""
    check_name(path)
    if path.is_file():
        with suppress(OSError), path.open("rb") as file:  # of a file that cannot be read more is said later
            lock(file.fileno(), path, shared=True)


def is_named_data(spec: str | None) -> bool:
    """Whether images are those that come with lipcert, or a data set by name, such as ``torch/cifar10``."""
    return spec is None or ("/" in spec and spec.partition("/")[0].lower() in KINDS)


def place_of(spec: str) -> tuple[Path, str, str | None]:
    """The path of a data set, its name and the split after a colon: of ``images:val``, for example."""
    if os.path.exists(spec):
        return Path(spec), spec, None
    place, colon, split = spec.rpartition(":")
    if colon and split and os.path.exists(place):
        return Path(place), place, split
    if not spec.strip():
        raise InputError("the data set has an empty name; give a folder, or leave --data out for the bundled images")
    named = "" if os.path.islink(spec) or "://" in spec else f"; data sets by name start with {'/ and '.join(KINDS)}/"
    raise InputError(str(no_file(spec, named)).replace("there is no file", "there is no image, folder or .tar file"))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives an empty file in the folder of ``path`` that takes its place when the block ends without an error.

    The file is created with O_EXCL under a random name, so in a folder in which others may write, no link that waits
    under a known name is followed, and no file of theirs is written to. Where a file cannot be renamed over another, as
    on some mounts, its content is copied; where nothing can be created beside a file, it is written elsewhere first.
    """
    beside = not path.is_file() or os.access(path.parent, os.W_OK)
    handle, name = tempfile.mkstemp(".partial", f".{path.name[:40]}.", path.parent if beside else None)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        mask = os.umask(0)
        os.umask(mask)
        with suppress(OSError):  # mounts may have no mode bits
            partial.chmod(0o666 & ~mask)  # so far only their owner can read it
        try:
            os.replace(partial, path)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) or path.is_symlink():
                raise
            shutil.copyfile(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
