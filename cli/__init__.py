"""The command ``lipcert``: reads arguments, calls the package, prints. It contains no mathematics."""

import importlib
import os
import signal
import sys
from typing import Annotated

import typer

from lipcert.errors import InputError, first_line
from lipcert.settings import version

from . import _print
from ._commands import SETTINGS, Commands
from ._errors import again_if_lost, one_line_errors
from ._streams import open_streams

app = typer.Typer(name="lipcert", cls=Commands, no_args_is_help=True, **SETTINGS)


def _show_version(show: bool) -> None:
    if show:
        typer.echo(f"lipcert {version()}")
        raise typer.Exit


@app.callback()
@one_line_errors
def options(
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            envvar="LIPCERT_IMPORT",
            help="A Python module to import first, from this folder or installed, which registers your own timm "
            "models or rules. May be repeated.",
        ),
    ] = None,
    _: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version and stop.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Certify timm image classifiers against l2 perturbations, and change them for larger certified radii."""
    _print.imported[:] = (name.removesuffix(".py") for name in modules or ())
    if modules:
        sys.path.append(os.getcwd())
    for name in _print.imported:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise InputError(f"--import {name} failed with {reason}; it must be importable from this folder") from error


def main() -> None:
    """Entry point of the installed command."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the core to other processes
    open_streams()
    sys.unraisablehook = again_if_lost
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # of schedulers and containers: ends as control-C does
    try:
        os.getcwd()
    except FileNotFoundError:  # torch, too, would not be imported
        print("lipcert: the working folder was deleted; change to another one", file=sys.stderr)
        sys.exit(2)
    try:
        app(prog_name="lipcert")
    except SystemExit as end:
        sys.stdout.flush()
        if not end.code and getattr(sys.stdout, "lost", False):
            sys.exit(2)
        raise
