"""Error messages and exit codes of the commands."""

import _thread
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import typer

from lipcert.errors import BrokenCertificate, Interrupted, LipcertError, first_line

from ._print import complain

P = ParamSpec("P")
R = TypeVar("R")


def again_if_lost(lost: Any) -> None:
    """In place of ``sys.unraisablehook``: interrupts again where Python drops exceptions, as in weakref callbacks."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        return sys.__unraisablehook__(lost)
    while True:
        try:
            threading.Timer(0.01, _thread.interrupt_main).start()  # here it would be dropped, too
            return
        except KeyboardInterrupt:  # on a busy machine it comes before the timer's thread is known to run
            pass


def one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Prints errors in one line and exits with 2, with 130 if the user stopped the run, 3 if a certificate is false."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        LipcertError.in_command = True
        try:
            return command(*args, **kwargs)
        except Interrupted as error:
            complain(f"lipcert: {error}")
            raise typer.Exit(130) from error
        except BrokenCertificate as error:
            complain(f"lipcert: A CERTIFICATE IS FALSE: {error}")
            complain("lipcert: the run was stopped; please report this with the model and the command")
            raise typer.Exit(3) from error
        except LipcertError as error:
            complain(f"lipcert: {error}")
            raise typer.Exit(2) from error
        except (MemoryError, RuntimeError) as error:
            from lipcert.numerics import is_out_of_memory  # imports torch

            if not is_out_of_memory(error):
                raise
            complain(f"lipcert: out of memory ({first_line(error)}); use a smaller model or a larger machine")
            raise typer.Exit(2) from error
        except ImportError as error:  # of torch and timm, whose files may not fit into memory
            complain(f"lipcert: cannot import: {first_line(error)}; raise the memory limit (ulimit -v), or reinstall")
            raise typer.Exit(2) from error
        except OSError as error:  # torch's import needs a folder for temporary files, for example
            complain(f"lipcert: {first_line(error)}; check the free space and permissions, or set another TMPDIR")
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            complain("lipcert: interrupted")
            raise typer.Exit(130) from error
        finally:
            LipcertError.in_command = False

    return wrapped
