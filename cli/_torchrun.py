"""Connects the processes of a command started by ``torchrun``."""

import contextlib
import os
from collections.abc import Iterator

from lipcert.inputs.processes import Processes


@contextlib.contextmanager
def torchrun() -> Iterator[Processes]:
    """The processes of this run, usually one, connected during the block; only the first one prints."""
    processes = Processes.of_torchrun()
    processes.connect()
    with contextlib.ExitStack() as stack:
        stack.callback(processes.close)
        if not processes.first:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield processes
