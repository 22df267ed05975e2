"""Options that several commands share. This module imports neither torch nor timm."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from lipcert.settings import option, settings_of

from ._commands import MODEL, OUTPUT
from ._parse import parse_model_args

MODEL_HELP = (
    "A timm name, an hf-hub: id, a path, or a name from lipcert models; by default the newest "
    "lipcert artifact in this folder, or the bundled checkpoint."
)


def choice(choices: Sequence[str]) -> dict[str, Any]:
    """The help of an option with choices; the settings check the value."""
    return {"metavar": f"[{'|'.join(choices)}]"} if choices else {}


def out(help: str) -> Any:
    """The option ``--out``."""
    return Annotated[Path | None, typer.Option("--out", "-o", help=help, show_default=False, rich_help_panel=OUTPUT)]


ModelName = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False),
]
ModelNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False),
]
Denoiser = Annotated[
    str | None,
    typer.Option(
        metavar="[dct|natural|MODULE:NAME]",
        help="Denoise images first: dct (no weights), natural (a network for natural images), or MODULE:NAME, a "
        "function or class in your Python module that returns a torch.nn.Module.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
TimeBudget = Annotated[
    str | None,
    typer.Option(help="Stop after about this time, such as 10m; the same command continues.", show_default=False),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the output file.", rich_help_panel=OUTPUT)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.", rich_help_panel=OUTPUT)]
Device = Annotated[
    str,
    typer.Option(
        help="Device; auto: a GPU if there is one.",
        metavar="[auto|cpu|cuda|cuda:N]",
    ),
]
Limit = Annotated[
    int | None, typer.Option(help="Use only this many images, drawn by a fixed shuffle.", show_default=False)
]
_DATA = "One image, or a folder or .tar of images (class folders give labels), or torch/NAME or hfds/NAME [:SPLIT]"
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        "--data-dir",
        help=f"{_DATA}; by default the bundled images, or drawn ones of the model's size.",
        show_default=False,
    ),
]
Classes = Annotated[
    Path | None,
    typer.Option(
        help="A file with the classes in the order of the model: a name a line, or JSON; JSON may give numbers.",
        show_default=False,
    ),
]
Labels = Annotated[
    Path | None,
    typer.Option(help="A CSV file with columns filename and label.", show_default=False),
]
LabelledData = Annotated[
    str,
    typer.Option(
        "--data",
        "--data-dir",
        help="A folder or .tar with class folders, or torch/NAME or hfds/NAME [:SPLIT].",
    ),
]


@dataclass(frozen=True)
class Weights:
    """Where the weights of a command's model come from."""

    checkpoint: Path | None = option(
        "Weights for the timm name: .safetensors, or a PyTorch file.", None, Path | None, group=MODEL
    )
    no_pretrained: bool = option("Use random weights; download nothing.", False, bool, group=MODEL)
    model_args: str | None = option(
        'timm model arguments, such as "img_size=32 patch_size=4 num_classes=10".',
        None,
        str | None,
        group=MODEL,
        alias="--model-kwargs",
    )

    def __post_init__(self) -> None:
        parse_model_args(self.model_args)

    @property
    def files(self) -> list[Path]:
        """The checkpoint, if there is one."""
        return [] if self.checkpoint is None else [self.checkpoint]


def _annotated(typed: Any, about: Any) -> Any:
    return Annotated[typed, about]


_CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def options_of(kind: type, name: str = "settings") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces one parameter of a command by an option for each field of a settings class that has a help text.

    For that parameter the command receives a function that creates the settings from the options that were given and
    from the remaining fields.
    """
    entries = [one for one in fields(kind) if "help" in one.metadata]

    def parameter(one: Field[Any]) -> inspect.Parameter:
        meta = one.metadata
        default = one.default if meta["given"] is None else meta["given"]
        required = default in (MISSING, ...)
        more = {} if meta["typed"] is bool else choice(meta["choices"])
        flag = f"--{one.name.replace('_', '-')}"
        flags = [flag, *meta["alias"]] if meta["typed"] is bool or meta["alias"] else []
        about = typer.Option(
            *flags,
            help=meta["help"],
            show_default=default is not None and meta["typed"] is not bool,
            rich_help_panel=meta["group"],
            **more,
        )
        default = inspect.Parameter.empty if required else default
        return inspect.Parameter(
            one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_annotated(meta["typed"], about)
        )

    options = [parameter(one) for one in entries]

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        nested = "context" in signature.parameters  # another class's options already ask for it

        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            values = {one.name: arguments.pop(one.name) for one in entries}
            source = (arguments["context"] if nested else arguments.pop("context")).get_parameter_source
            unset = ("DEFAULT", "None")
            given = {one: value for one, value in values.items() if getattr(source(one), "name", "None") not in unset}
            command(**{name: functools.partial(settings_of, kind, **given)}, **arguments)

        others = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.name != name]
        run.__signature__ = signature.replace(parameters=[*options, *others, *([] if nested else [_CONTEXT])])  # type: ignore[attr-defined]
        return run

    return decorated
