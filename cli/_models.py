"""``lipcert models``: the checkpoints that come with lipcert, and what is covered of an architecture of timm."""

import dataclasses
import difflib
from typing import Annotated

import typer

from lipcert.errors import InputError
from lipcert.inputs.checkpoints import Checkpoint, checkpoints
from lipcert.inputs.zoo import Architecture, architectures, roundings

from ._options import AsJson
from ._print import busy, command, percent, print_facts, print_json, print_table, say

_COLUMNS = ("checkpoint", "parameters", "eps", "clean", "certified", "95 % CI", "images", "method")


def models(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="An architecture of timm, or a checkpoint that comes with lipcert; by default all of these.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the certified checkpoints that come with lipcert, or show what works on one architecture of timm."""
    entries = [one for one in checkpoints() if name in (None, one.name)]
    if entries:
        _show_checkpoints(entries, as_json)
        return
    known, name = architectures(), str(name).partition(".")[0]
    if name not in known:
        names = [*known, *(one.name for one in checkpoints())]
        close = [one for one in names if one.startswith(name)][:3] or difflib.get_close_matches(name, names)
        more = f"; did you mean {' or '.join(close)}?" if close else "; lipcert inspect MODEL looks at any model"
        raise InputError(f"no architecture or checkpoint is called {name}{more}")
    one = known[name]
    if as_json:
        print_json({**dataclasses.asdict(one), "covered": one.covered, "certificates": one.certificates})
    else:
        print_facts(_facts(one))


def _show_checkpoints(entries: list[Checkpoint], as_json: bool) -> None:
    """Shows checkpoints; for a single one also its training."""
    if as_json:
        print_json([{**dataclasses.asdict(one), "path": str(one.path), "card": str(one.card)} for one in entries])
        return
    with busy("importing torch"):
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


def _facts(one: Architecture) -> list[tuple[str, str]]:
    changed = [("convert replaces", f"{was} by {new}") for was, new in (*one.attention, *one.norms)]
    return [
        ("architecture", one.name),
        ("family", one.family),
        ("parameters", _short(one.parameters)),
        ("global bound", f"none: {one.reason}" if one.reason else "has rules"),
        ("methods with rules", ", ".join(one.certificates) or "none"),
        *([("not linearised", one.linearised_reason)] if one.linearised_reason else []),
        *_formats(one.family),
        *changed,
        *(("convert keeps", f"{was}: {why}") for was, why in one.kept),
        ("next", command("convert" if one.attention else "inspect", one.name)),
    ]


def _formats(family: str) -> list[tuple[str, str]]:
    """In which formats the smallest architecture of a file of timm has bounds on rounding, and why not in others."""
    name, reasons = roundings().get(family, ("", {}))
    works = ", ".join(dtype for dtype, reason in reasons.items() if not reason)
    return [
        *([("--dtype", f"{works} (seen on {name})")] if works else []),
        *((f"--dtype {dtype}", f"none: {reason} (seen on {name})") for dtype, reason in reasons.items() if reason),
    ]


def _short(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
