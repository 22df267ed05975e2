"""``lipcert models``: the coverage of timm's architectures, and the certified checkpoints of lipcert."""

import dataclasses
import sys
from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from lipcert.errors import InputError
from lipcert.inputs.checkpoints import Checkpoint, checkpoints
from lipcert.inputs.zoo import Architecture, architectures, matches

from ._errors import one_line_errors
from ._options import AsJson
from ._print import busy, command, percent, print_json, print_table, say

_CERTIFIED = ("checkpoint", "parameters", "eps", "clean", "certified", "95 % CI", "images", "method", "s/image")
_COLUMNS = ("architecture", "family", "parameters", "global bound", "convert", "methods with rules")


@one_line_errors
def models(
    pattern: Annotated[
        str | None, typer.Argument(metavar="PATTERN", help="Part of a name, or a pattern with *.", show_default=False)
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(help="A file of timm, such as vision_transformer.", show_default=False),
    ] = None,
    certified: Annotated[
        bool, typer.Option("--certified", help="Show the certified checkpoints that come with lipcert.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List timm architectures: rules for a global bound, what convert replaces, and which methods have rules."""
    if certified:
        _show_certified(pattern, family, as_json)
        return
    with busy("importing timm"):
        entries = architectures(pattern, family)
    if not entries:
        named = " and ".join(text for text in (pattern, family and f"family {family}") if text)
        import timm

        raise InputError(f"timm {timm.__version__} has no architecture that matches {named}; see lipcert models")
    if as_json:
        print_json([_record(one) for one in entries])
        return
    rows = [_row(one) for one in entries]
    print_table(_COLUMNS, rows, optional=("family",))
    further = f"next: {command('models', '--certified')}, for networks with certified accuracy and their commands"
    if pattern or family:
        further = _next(entries)
    if not sys.stdout.isatty():
        say(summary(entries))
        say(further)
        return
    for line in (*_reasons(entries), summary(entries), further):
        print(line)


def _show_certified(pattern: str | None, family: str | None, as_json: bool) -> None:
    """Shows the checkpoints of lipcert; for a single one also its training and the command that certifies it."""
    if family is not None:
        raise InputError("--family is for architectures of timm, and --certified for checkpoints; use only one of them")
    entries = [one for one in checkpoints() if pattern is None or matches(one.name, pattern)]
    if not entries:
        raise InputError(f"no checkpoint that comes with lipcert matches {pattern}; see lipcert models --certified")
    if as_json:
        print_json([{**dataclasses.asdict(one), "path": str(one.path), "card": str(one.card)} for one in entries])
        return
    with busy("importing torch"):
        from lipcert.results import interval, share
    print_table(
        _CERTIFIED, [_certified_row(one, interval) for one in entries], optional=("95 % CI", "parameters", "images")
    )
    for one in entries:
        attack = ""
        if one.attacked is not None and one.attacked_images >= one.images:  # a share of the same images
            attack = f"; accuracy under PGD {share(round(one.attacked * one.attacked_images), one.attacked_images)}"
        say(f"{one.name}: {one.data}; {one.rigor}{attack}; reproduce: {one.command}")
    if len(entries) == 1:
        say(f"model card: {entries[0].card}")
        for line in entries[0].trained:
            say(f"training: {line}")


def _certified_row(one: Checkpoint, interval: Callable[[int, int], str]) -> tuple[str, ...]:
    certified = round(one.certified * one.images)
    figures = (percent(one.clean), percent(one.certified), interval(certified, one.images), str(one.images))
    return (one.name, _short(one.parameters), one.eps, *figures, one.method, f"{one.seconds:.2g}")


def summary(entries: list[Architecture]) -> str:
    """One line with the numbers of covered architectures."""
    unknown = sum(not one.checked for one in entries)
    linearised = sum("anchored" in one.certificates for one in entries)
    line = f"{sum(one.covered for one in entries)} of {len(entries)} architectures have rules for a global bound, "
    line += f"{linearised} for every method"
    line += f", {unknown} not checked yet" if unknown else ""
    return f"{line}; this says that methods run, not that they certify: lipcert certify MODEL shows that"


def _next(entries: list[Architecture]) -> str:
    """A suggestion for the next command."""
    best = max(entries, key=lambda one: (len(one.certificates), bool(one.attention), -(one.parameters or 0)))
    if best.attention:
        return f"next: {command('convert', best.name)}, which replaces its attention"
    return f"next: {command('inspect', best.name)}"


def _row(one: Architecture) -> tuple[str, ...]:
    if not one.checked:
        return (one.name, one.family, "", "not checked yet", "", "")
    return (
        one.name,
        one.family,
        _short(one.parameters or 0),
        "no rule" if one.reason else "has rules" if one.log10 is None else f"10^{one.log10:g}",
        _surgery(one),
        _certificates(one),
    )


def _surgery(one: Architecture) -> str:
    """What ``convert`` replaces: all or some classes of attention, and norms."""
    unchanged = len({was for was, _ in one.kept if not was.lower().endswith(("norm", "norm1", "norm2d"))})
    parts = [f"l2 ({unchanged} unchanged)" if unchanged else "l2"] if one.attention else []
    return ", ".join([*parts, *(["norm"] if one.norms else [])]) or "nothing"


def _certificates(one: Architecture) -> str:
    if not one.certificates:
        return "none"
    return "all" if "anchored" in one.certificates else ", ".join(one.certificates)


def _short(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _reasons(entries: list[Architecture]) -> list[str]:
    """Each reason once, with the number of architectures that it applies to."""
    return [
        *_grouped("no global bound", ((one.name, one.reason) for one in entries)),
        *_grouped("not linearised", ((one.name, one.linearised_reason) for one in entries)),
        *_grouped("unchanged by convert", ((one.name, f"{was}: {why}") for one in entries for was, why in one.kept)),
    ]


def _grouped(what: str, reasons: Iterable[tuple[str, str]]) -> list[str]:
    names: dict[str, list[str]] = {}
    for name, reason in reasons:
        if reason:
            names.setdefault(reason, []).append(name)
    ordered = sorted(names.items(), key=lambda item: -len(item[1]))
    return [f"{what}: {reason} ({len(of)}: {of[0]}{', …' if of[1:] else ''})" for reason, of in ordered]


def _record(one: Architecture) -> dict[str, object]:
    return {**dataclasses.asdict(one), "covered": one.covered, "certificates": one.certificates}
