"""``lipcert models``: the checkpoints that come with lipcert."""

import dataclasses
import difflib
from typing import Annotated

import typer

from lipcert.errors import InputError
from lipcert.inputs.checkpoints import Checkpoint, checkpoints
from lipcert.inputs.sources import architectures

from ._options import AsJson
from ._print import command, percent, print_json, print_table, say, start

_COLUMNS = ("checkpoint", "parameters", "eps", "clean", "certified", "95 % CI", "images", "method")


def models(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A checkpoint that comes with lipcert; by default all of them.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the certified checkpoints that come with lipcert; for a single one, show its training too."""
    entries = [one for one in checkpoints() if name in (None, one.name)]
    if not entries:
        close = difflib.get_close_matches(str(name), [one.name for one in checkpoints()])
        other = next(iter(difflib.get_close_matches(str(name), architectures())), "MODEL")
        more = f"did you mean {' or '.join(close)}?" if close else f"{command('inspect', other)} shows this model"
        raise InputError(f"no checkpoint that comes with lipcert is called {name}; {more}")
    if as_json:
        print_json([{**dataclasses.asdict(one), "path": str(one.path), "card": str(one.card)} for one in entries])
        return
    start()
    from lipcert.results import interval, share

    def row(one: Checkpoint) -> tuple[str, ...]:
        certified = round(one.certified * one.images)
        figures = (percent(one.clean), percent(one.certified), interval(certified, one.images), str(one.images))
        return (one.name, _short(one.parameters), one.eps, *figures, one.method)

    print_table(_COLUMNS, [row(one) for one in entries], optional=("95 % CI", "parameters", "images"))
    for one in entries:
        attack = ""
        if one.attacked is not None and one.attacked_images >= one.images:  # a share of the same images
            attack = f"; accuracy under PGD {share(round(one.attacked * one.attacked_images), one.attacked_images)}"
        say(f"{one.name}: {one.data}; {one.rigor}{attack}; reproduce: {one.command}")
    if len(entries) == 1:
        say(f"model card: {entries[0].card}")
        for line in entries[0].trained:
            say(f"training: {line}")


def _short(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
