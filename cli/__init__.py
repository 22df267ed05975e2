"""The command ``lipcert``: reads arguments, calls the package, prints. No mathematics lives here."""

from typing import Annotated

import typer

from lipcert._version import version

from ._certify import certify
from ._constrain import constrain
from ._convert import convert
from ._doctor import doctor
from ._examples import examples
from ._finetune import finetune
from ._inspect import inspect
from ._models import models
from ._report import report
from ._verify import verify

app = typer.Typer(
    name="lipcert",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (convert, inspect, constrain, finetune, certify, report, verify, models, doctor):
    app.command(epilog=examples(command.__name__))(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lipcert {version()}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Certifies timm image classifiers against l2 perturbations, and changes them so that more predictions hold."""


def main() -> None:
    """Entry point of the installed command."""
    app(prog_name="lipcert")
