"""The command ``lipcert``: reads arguments, calls the package, prints. No mathematics lives here."""

from typing import Annotated

import typer

from lipcert._version import version

from ._certify import certify
from ._constrain import constrain
from ._convert import convert
from ._finetune import finetune
from ._inspect import inspect

app = typer.Typer(
    name="lipcert",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(convert)
app.command()(inspect)
app.command()(constrain)
app.command()(finetune)
app.command()(certify)


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
    app()
