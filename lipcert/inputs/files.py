"""Writes files in one step: a reader sees the old content or the new, never a part."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives an empty file in the folder of ``path`` that takes its place when the block ends without an error.

    The file is created with O_EXCL under a random name, so in a folder in which others may write, no link that waits
    under a known name is followed, and no file of theirs is written to.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        mask = os.umask(0)
        os.umask(mask)
        partial.chmod(0o666 & ~mask)  # so far only their owner can read it
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
