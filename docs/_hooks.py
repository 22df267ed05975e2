"""What MkDocs does besides: the page of commands, made from the commands, and the roles of docstrings."""

import html
import re
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from lipcert import __version__
from lipcert.cli import app

# As in :class:`~lipcert.model.Model`; on a page the name alone stands.
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>~?(?:[\w.]+\.)?(\w+)</code>")


def on_config(config: MkDocsConfig) -> None:
    """The site says of which version it is."""
    config.copyright = f"lipcert {__version__}"


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the page of commands."""
    files.append(File.generated(config, "reference/commands.md", content=commands()))


def on_page_content(content: str, **_: Any) -> str:
    """Called by MkDocs for every page."""
    return _ROLE.sub(r"<code>\1</code>", content)


def commands() -> str:
    """Every command with its arguments and options, as ``--help`` tells them."""
    group: Any = typer.main.get_command(app)
    context = group.context_class(group, info_name="lipcert")
    parts = ["# Commands", "Made from the commands themselves: `lipcert COMMAND --help` says the same."]
    parts.append(_options(group, context))
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        own = command.context_class(command, info_name=name, parent=context)
        usage = " ".join(f"lipcert {name} {' '.join(command.collect_usage_pieces(own))}".split())
        parts += [f"## lipcert {name}", _plain(command.help), f"```text\n{usage}\n```", _options(command, own)]
    return "\n\n".join(parts) + "\n"


def _options(command: Any, context: Any) -> str:
    rows = []
    for one in command.params:
        record = one.get_help_record(context) or (one.make_metavar(ctx=context), getattr(one, "help", ""))
        if getattr(one, "hidden", False) or one.name == "help":
            continue
        names, text = record
        rows.append(f"| `{names.replace('|', ' or ')}` | {_plain(text).replace('|', chr(92) + '|')} |")
    return "\n".join(["| argument or option | what it is |", "| --- | --- |", *rows])


def _plain(text: str | None) -> str:
    """Text of a help page; what looks like a tag or a link is none."""
    return re.sub(r"([\\*_\[\]])", r"\\\1", html.escape(" ".join((text or "").split()), quote=False))
