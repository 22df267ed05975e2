"""``lipcert report``: shows result files as tables, a page and a model card."""

from pathlib import Path
from typing import Annotated

import typer

from lipcert.errors import InputError

from ._options import AsJson
from ._print import busy, command, print_facts, print_json, print_table, say, start


def report(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULTS", help="Files that certify --out wrote, or folders of them.")
    ],
    html: Annotated[Path | None, typer.Option(help="Write one self-contained HTML page.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the report as Markdown, with separate figures.")] = None,
    card: Annotated[Path | None, typer.Option(help="Write a model card for a hub.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a CSV table, one line per eps and result.")] = None,
    license: Annotated[str | None, typer.Option(help="Licence of the model for its card, such as apache-2.0.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the base model, for the card.")] = None,
    eps: Annotated[
        list[str] | None, typer.Option(help="Show results at this radius, or at several. Default: the eps of the runs.")
    ] = None,
    linf: Annotated[
        bool, typer.Option("--linf", help="Also show radii in the max norm, r/√d; they are small.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show results: certified accuracy over ε, radii, methods; compares several results."""
    for option, given in (("--license", license), ("--base-model", base_model)):
        if given is not None and card is None:
            raise InputError(f"{option} is for a model card; add --card README.md, or leave it out")
    start(*results)
    from lipcert.report import (
        OVERVIEW,
        available,
        facts,
        overview,
        publishing,
        radii_of_interest,
        read_runs,
        record,
        remarks,
        write,
    )
    from lipcert.settings import parse_eps

    runs = read_runs(results)
    named = [(parse_eps(text), text) for texts in eps or () for text in texts.split(",")]
    at = radii_of_interest(runs, named)
    for remark in remarks(runs):
        say(f"note: {remark}")
    if (html or markdown) and not available():
        say("note: without matplotlib, tables replace figures; pip install 'lipcert[plot]'")
    with busy("writing the report"):
        written = write(
            runs, html=html, markdown=markdown, card=card, csv=csv, eps=named, license=license, base_model=base_model
        )
    if as_json:
        print_json([record(run, at) for run in runs])
        return
    if len(runs) == 1:
        print_facts(facts(runs[0], at, in_linf=linf))
    else:
        columns, rows = overview(runs, at, in_linf=linf)
        names = [row[:-1] for row in rows]  # the page shows the name of the model
        print_table(columns[:-1], names, optional=("δ", "images", "95 % CI"))
        say(OVERVIEW)
    print_facts([("written", str(path)) for path in written])
    if card:
        say("to publish:")
        for line in publishing(card, runs):
            say(f"  {line}")
    elif not html:
        inside = any(run.inside for run in runs)  # cards are about pixels
        card_too = () if inside else ("--card", "README.md")
        print_facts([("next", command("report", *results, "--html", "report.html", *card_too))])
