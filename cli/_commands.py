"""The list of commands, their help, and the errors of command lines that cannot be parsed.

The module of a command is imported when the command is called, and it imports torch and timm when the command runs. So
help, completion and errors in options do not wait for them.
"""

import difflib
import functools
import importlib
import inspect
import itertools
import os
import re
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from . import _print
from ._errors import one_line_errors

SETTINGS: dict[str, Any] = {
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 100},
}
# The headings of options in the help of a command, in this order; others come before the last two.
OPTIONS, MODEL, OUTPUT = "Options", "Model", "Output"

COMMANDS = {
    "convert": "Replace modules by Lipschitz ones; writes an artifact.",
    "inspect": "Show the Lipschitz constants of the layers, largest first.",
    "constrain": "Lower the norms of the layers and preserve their outputs.",
    "finetune": "Train a model for larger certified radii.",
    "certify": "Certify images against l2 perturbations.",
    "predict": "Predict images with a smoothed classifier: class, share, radius.",
    "report": "Show results as tables, an HTML page or a model card.",
    "verify": "Recompute rows of a result file and compare.",
    "models": "List the certified checkpoints that come with lipcert.",
}

_EXAMPLES = {
    "convert": """
        lipcert convert vit_tiny_patch16_224
        lipcert convert vit_tiny_patch16_224 --attention keep --norm smooth --data images/
        lipcert convert vit_base_patch16_224 --checkpoint mine.safetensors --model-args "num_classes=10"
    """,
    "inspect": """
        lipcert inspect                       the newest artifact here, or the bundled model
        lipcert inspect resnet18 --all
    """,
    "constrain": """
        lipcert constrain model.lipcert.safetensors --data images/
        lipcert constrain --data images/ --error 0.02 --workers 4
    """,
    "finetune": """
        lipcert finetune model.lipcert.safetensors --data train/ --eps 36/255
        lipcert finetune liresnet_l6w64 --no-pretrained --data torch/cifar10:train --recipe liresnet
    """,
    "certify": """
        lipcert certify --eps 36/255                               the bundled model and images
        lipcert certify m.safetensors --data val/ --eps 36/255,0.5 --out r.jsonl
        lipcert certify --eps 36/255 --attack --limit 100          with a PGD attack, for an upper bound
        lipcert certify vit_base_patch16_224 --data val/ --eps 36/255 --method smoothing --sigma 0.25
                                                                   randomized smoothing, for any checkpoint
        lipcert certify resnet18 resnet34 --data val/ --eps 0.1 --out results/
        lipcert certify --eps 36/255 --fail-under 0.7 --json       for CI
        torchrun --nproc-per-node 4 -m lipcert certify --eps 36/255 --out r.jsonl
        lipcert certify --eps 36/255 --shard 1/3 --out r.jsonl     on the first of three machines;
                                                                   without --shard it merges the rows
    """,
    "predict": """
        lipcert predict smoothed.safetensors photos/*.jpg
        lipcert predict vit_base_patch16_224 images/ --sigma 0.25 --denoiser natural
    """,
    "report": """
        lipcert report r.jsonl
        lipcert report results/ --html page.html --card README.md
    """,
    "verify": """
        lipcert verify model.safetensors r.jsonl
        lipcert verify bundled r.jsonl --all
    """,
    "models": """
        lipcert models
        lipcert models cifar10-vit --json
    """,
}


class Commands(typer.core.TyperGroup):
    """The commands by name. The module of a command is imported on demand."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands:
            module = importlib.import_module(f"{__package__}._{cmd_name}")
            one = typer.Typer(**SETTINGS, add_completion=False)
            function = _with_quiet(one_line_errors(getattr(module, cmd_name)))
            one.command(cmd_name, cls=_Command, epilog=_epilog(cmd_name))(function)
            self.commands[cmd_name] = typer.main.get_command(one)
        return self.commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and (close := difflib.get_close_matches(args[0], COMMANDS)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(map(repr, close))}?")
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Runs a command line; errors in it are one line, like all errors."""
        try:
            code = super().main(*args, standalone_mode=False, **extra)  # type: ignore[misc]
        except _UsageError as error:
            if not standalone_mode:
                raise
            if len(error.format_message().splitlines()) > 2:  # no command at all: the help
                error.show()
                sys.exit(error.exit_code)
            _print.complain(f"lipcert: {_one_line(error)}")
            code = 2
        except typer.Abort:
            code = 130
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


# The option whose value may be several arguments, as timm's scripts take them, and that may be repeated.
_PAIRS = "--model-args"


def _joined(args: Sequence[str]) -> list[str]:
    """Arguments with all KEY=VALUE pairs after the option ``_PAIRS`` in one text."""
    pairs: list[str] = []
    others: list[str] = []
    rest = list(args)
    while rest and rest[0] != "--":
        one = rest.pop(0)
        option, equals, value = one.partition("=")
        if option != _PAIRS or not (equals or rest):
            others.append(one)
            continue
        pairs.append(value if equals else rest.pop(0))
        while rest and re.match(r"[A-Za-z_]\w*=", rest[0]):
            pairs.append(rest.pop(0))
    return [*([_PAIRS, " ".join(pairs)] if pairs else []), *others, *rest]


# A home folder after an equals sign, or in quotes, which shells leave as it is.
_HOME = re.compile(r"^(--[\w-]+=)?(~/.*)", re.DOTALL)


class _Command(typer.core.TyperCommand):
    """A command whose help shows options under headings. An option that is given twice combines, or is refused."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        args = [_HOME.sub(lambda found: (found[1] or "") + os.path.expanduser(found[2]), one) for one in _joined(args)]
        if long := next((one for one in args if one.startswith(("–", "—"))), None):
            ctx.fail(f"{long} begins with a long dash; type --{long.lstrip('–—-')}")
        if any(map(str.isspace, args)):
            ctx.fail("an argument is blank; a backslash continues a line only as its last character")
        for first, second in itertools.pairwise(re.sub(r"^--[\w-]+=", "", one) for one in args):
            path = f"{first} {second}"
            whole = any(len(end) > len(first) and os.path.exists(end) for end in (path, os.path.dirname(path)))
            if whole and not (os.path.exists(first) and os.path.exists(second)):
                ctx.fail(f"a path with a blank stands in quotes: {shlex.quote(path)}")
        if not ctx.resilient_parsing:
            values, _, order = self.make_parser(ctx).parse_args(list(args))
            one: Any
            named = {name for one in self.get_params(ctx) for name in one.opts if name.startswith("-")}
            for one in order:
                given: Any = values.get(one.name)
                for value in given if one.multiple else [given]:
                    following = str(value).partition("=")[0]  # the next option, in place of a value
                    if one.param_type_name == "option" and following in ("", *named):
                        no = f"no value before {following}" if following else "an empty value"
                        ctx.fail(f"{one.opts[0]} has {no}, as of a variable that is not set; give one, or leave it out")
            for one, times in Counter(order).items():
                combines = one.param_type_name == "argument" or one.multiple or (one.is_flag and not one.secondary_opts)
                if times > 1 and not combines:
                    ctx.fail(f"{one.opts[0]} is given {times} times, and takes one value")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], OPTIONS: []}
        for one in self.get_params(ctx):
            usage, text = one.get_help_record(ctx) or ("", "")
            if not usage:
                continue
            if one.param_type_name == "argument":
                groups["Arguments"].append((usage.partition(" <")[0], text))
            else:
                usage = usage.replace("<list[str]>", "<str>")  # repeatable
                groups.setdefault(getattr(one, "rich_help_panel", None) or OPTIONS, []).append((usage, text))
        last = {name: groups.pop(name) for name in (MODEL, OUTPUT) if name in groups}
        for name, records in {**groups, **last}.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


# Options of timm's scripts, and what lipcert has in their place.
_OF_TIMM = {
    "--num-classes": "give --model-args num_classes=N",
    "--img-size": "give --model-args img_size=N",
    "--in-chans": "give --model-args in_chans=N",
    "--batch-size": "leave it out; the batch size is chosen by memory",
    "--norm": "radii are l2 distances; norms of layers are replaced by convert",
    "--pretrained": "leave it out; weights are loaded unless --no-pretrained is given",
}
_UsageError: Any = typer.BadParameter.__mro__[1]


def _one_line(error: Any) -> str:
    """An error in a command line and a hint, in one line."""
    message = " ".join(error.format_message().split()).rstrip(".")
    about = getattr(getattr(error, "param", None), "help", None)
    if message.startswith("Missing") and about:
        message = f"{message}: {about.rstrip('.')}"
        arguments = [one.metavar for one in error.ctx.command.params if one.param_type_name == "argument"]
        if message.startswith("Missing argument") and len(arguments) > 1:  # the one given may be the one missed
            message += f"; the arguments are {' '.join(arguments)}"
    if hint := _OF_TIMM.get(getattr(error, "option_name", "").replace("_", "-")):
        message = f"No such option: {error.option_name}; {hint}"
    where = error.ctx.command_path if error.ctx is not None else "lipcert"
    return f"{message[:1].lower()}{message[1:]}{'' if message.endswith('?') else ';'} {where} --help says more"


def _with_quiet(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the option ``--quiet``."""

    @functools.wraps(command)
    def run(*args: Any, quiet: bool, **arguments: Any) -> None:
        _print.quiet = quiet
        try:
            with warnings.catch_warnings():
                if quiet:
                    warnings.simplefilter("ignore")
                command(*args, **arguments)
        finally:
            _print.quiet = False

    about = typer.Option("--quiet", "-q", help="Print only results and errors.", rich_help_panel=OUTPUT)
    option = inspect.Parameter(
        "quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, about]
    )
    signature = inspect.signature(command)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
    return run


def _epilog(command: str) -> str:
    """The examples at the end of the help of a command; \\b keeps their line breaks."""
    lines = [line.removeprefix("        ") for line in _EXAMPLES[command].strip("\n").splitlines()]
    return "\n".join(["\b", "Examples:", *(f"  {line}".rstrip() for line in lines)]).rstrip()
