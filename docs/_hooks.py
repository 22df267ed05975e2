"""What MkDocs does besides: the page of commands, made from the commands, and the roles of docstrings."""

import dataclasses
import html
import re
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from lipcert import __version__, settings
from lipcert.cli import app
from lipcert.cli._commands import COMMANDS

# As in :class:`~lipcert.model.Model`; on a page the name alone stands.
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>~?(?:[\w.]+\.)?(\w+)</code>")


# A class of settings on a page of the reference, with its options.
_SETTINGS = re.compile(r"^::: lipcert\.[\w.]+\.(\w+Settings)\n(?: +.*\n)*", re.MULTILINE)
# The first and the last headings of a command's options.
_ENDS = ("Arguments", "Options", "Model", "Output")


def on_config(config: MkDocsConfig) -> None:
    """The site says of which version it is."""
    config.copyright = f"lipcert {__version__}"


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the page of commands."""
    files.append(File.generated(config, "reference/commands.md", content=commands()))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Adds a table of the fields below each class of settings: their defaults, and what the commands say of them."""
    return _SETTINGS.sub(lambda found: f"{found[0].rstrip()}\n\n{_fields(found[1])}\n\n", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Called by MkDocs for every page."""
    return _ROLE.sub(r"<code>\1</code>", content)


def _fields(name: str) -> str:
    known = [one for one in dataclasses.fields(getattr(settings, name)) if "help" in one.metadata]
    rows = []
    for one in known:
        default = "required" if one.default is dataclasses.MISSING else f"`{one.default!r}`"
        rows.append(f"| `{one.name}` | {default} | {html.escape(one.metadata['help'])} |".replace("*", "\\*"))
    return "\n".join(["| field | default | meaning |", "| --- | --- | --- |", *rows])


def commands() -> str:
    """Every command with its examples, and its options under the headings of ``--help``."""
    group: Any = typer.main.get_command(app)
    context = group.context_class(group, info_name="lipcert")
    parts = ["# Commands", "The commands in the order of use. `lipcert COMMAND --help` prints the same."]
    parts += ["| command | what it does |", "| --- | --- |"]
    parts[2:] = [
        "\n".join(parts[2:] + [f"| [`{name}`](#lipcert-{name}) | {text} |" for name, text in COMMANDS.items()])
    ]
    parts += ["## Options of all commands", _table(group.params, context)]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        of_command = command.context_class(command, info_name=name, parent=context)
        usage = " ".join(f"lipcert {name} {' '.join(command.collect_usage_pieces(of_command))}".split())
        examples = "\n".join(
            line.strip() for line in command.epilog.partition("Examples:")[2].splitlines() if line.strip()
        )
        parts += [f"## lipcert {name}", _plain(command.help), f"```text\n{usage}\n```"]
        parts += [f"```text\n{examples}\n```"] if examples else []
        groups: dict[str, list[Any]] = {}
        for one in command.get_params(of_command):
            heading = "Arguments" if one.param_type_name == "argument" else getattr(one, "rich_help_panel", None)
            groups.setdefault(heading or "Options", []).append(one)
        order = ["Arguments", "Options", *(name for name in groups if name not in _ENDS), "Model", "Output"]
        for heading in (name for name in order if name in groups):
            members = groups[heading]
            parts += [
                f"### {heading} {{: #{name}-{heading.split()[0].lower()}-{len(heading)} }}",
                _table(members, of_command),
            ]
    return "\n\n".join(parts) + "\n"


def _table(params: Any, context: Any) -> str:
    rows = []
    for one in params:
        if getattr(one, "hidden", False) or one.name == "help":
            continue
        names, text = one.get_help_record(context) or (one.make_metavar(ctx=context), getattr(one, "help", ""))
        names = names.replace("<list[str]>", "<str>").replace("|", " or ")
        rows.append(f"| `{names}` | {_plain(text).replace('|', chr(92) + '|')} |")
    return "\n".join(["| argument or option | what it is |", "| --- | --- |", *rows])


def _plain(text: str | None) -> str:
    """Text of a help page; what looks like a tag or a link is none."""
    return re.sub(r"([\\*_\[\]])", r"\\\1", html.escape(" ".join((text or "").split()), quote=False))
