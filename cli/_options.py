"""Options that several commands share. This module imports neither torch nor timm."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from lipcert.errors import InputError
from lipcert.inputs.preprocessing import Preprocessing
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
    return Annotated[Path | None, typer.Option("--out", "-o", help=help, rich_help_panel=OUTPUT)]


ModelName = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
ModelNames = Annotated[list[str] | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Denoiser = Annotated[
    str | None,
    typer.Option(
        metavar="[dct|natural|MODULE:NAME]",
        help="Denoise images first: dct (no weights), natural (a network for natural images), or MODULE:NAME, a "
        "function or class in your Python module that returns a torch.nn.Module.",
        rich_help_panel=MODEL,
    ),
]
TimeBudget = Annotated[
    str | None,
    typer.Option(
        help="Stop after about this time, such as 10m, once running work is done; rerun the command to continue."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the output file.", rich_help_panel=OUTPUT)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.", rich_help_panel=OUTPUT)]
LIMIT = "Use only this many images, drawn by a fixed shuffle."
Limit = Annotated[int | None, typer.Option(help=LIMIT)]
_DATA = "One image, or a folder or .tar of images (class folders give labels), or torch/NAME or hfds/NAME [:SPLIT]"
Data = Annotated[
    str | None,
    typer.Option(help=f"{_DATA}; by default the bundled images, or sample images of the model's size."),
]
Classes = Annotated[
    Path | None,
    typer.Option(
        help="A file with the classes in the order of the model: one per line, with or without numbers, JSON or YAML."
    ),
]
Labels = Annotated[Path | None, typer.Option(help="A CSV file with columns filename and label.")]


@dataclass(frozen=True)
class Weights:
    """Where the weights of a command's model come from, and the device that it runs on."""

    checkpoint: Path | None = option(
        "Weights for the timm name: .safetensors, or a PyTorch file.", None, Path | None, group=MODEL
    )
    no_pretrained: bool = option("Use random weights; download nothing.", False, group=MODEL)
    model_args: str | None = option(
        'timm model arguments, such as "img_size=32 patch_size=4 num_classes=10".',
        None,
        group=MODEL,
    )
    device: str = option("cpu, cuda or cuda:N; auto: a GPU if there is one.", "auto")

    def __post_init__(self) -> None:
        parse_model_args(self.model_args)

    @property
    def files(self) -> list[Path]:
        """The checkpoint, if there is one."""
        return [] if self.checkpoint is None else [self.checkpoint]


@dataclass(frozen=True)
class ModelOptions(Preprocessing, Weights):
    """The options of a command's model, besides its name."""

    def __post_init__(self) -> None:
        Preprocessing.__post_init__(self)
        Weights.__post_init__(self)


_CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def _of_python(one: Field[Any]) -> Sequence[str]:
    """The choices of a field that only calls from Python have."""
    return () if one.metadata.get("python") in (None, False, True) else one.metadata["python"]


def _parameter(one: Field[Any]) -> inspect.Parameter:
    """The option of a field that has a help text, or whose type is that of a parameter of a command."""
    if "help" not in one.metadata:
        return inspect.Parameter(one.name, _CONTEXT.kind, default=one.default, annotation=one.type)
    kind: Any = one.metadata["typed"]
    default = one.default if one.metadata["given"] is None else one.metadata["given"]
    name = one.name.replace("_", "-")
    flag = "/".join(f"--{prefix}{name}" for prefix in (("", "no-") if default is True else ("",)))
    about = typer.Option(
        flag,
        help=one.metadata["help"],
        show_default=kind is not bool,
        rich_help_panel=one.metadata["group"],
        **choice([name for name in one.metadata["choices"] if name not in _of_python(one)]),
    )
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(one.name, _CONTEXT.kind, default=default, annotation=Annotated[kind, about])


def options_of(without: Sequence[str] = (), **kinds: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces parameters by options for the fields of settings; the command gets a function that creates these.

    Fields without a help text or an annotated type, those for Python alone and those named by ``without`` are no
    options. A caller in Python passes those for Python as the ``obj`` of click's context, a mapping.
    """
    described = {
        name: [one for one in fields(kind) if "help" in one.metadata or hasattr(one.type, "__metadata__")]
        for name, kind in kinds.items()
    }
    entries = {
        name: [one for one in some if one.metadata.get("python") is not True and one.name not in without]
        for name, some in described.items()
    }

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)

        @functools.wraps(command)
        def run(*, context: typer.Context, **arguments: Any) -> None:
            for name, kind in kinds.items():
                values = {one.name: arguments.pop(one.name) for one in entries[name]}
                sources = {one: getattr(context.get_parameter_source(one), "name", "None") for one in values}
                given = {one: value for one, value in values.items() if sources[one] not in ("DEFAULT", "None")}
                for one in entries[name]:
                    if given.get(one.name) in _of_python(one):
                        raise InputError(
                            f"{one.name} {given[one.name]} is for calls from Python alone; --help lists the others"
                        )
                python = [one.name for one in described[name] if one.metadata.get("python")]
                given |= {one: value for one, value in (context.obj or {}).items() if one in python}
                arguments[name] = functools.partial(settings_of, kind, **given)
            command(**arguments)

        options = [_parameter(one) for some in entries.values() for one in some]
        others = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.name not in kinds]
        run.__signature__ = signature.replace(parameters=[*options, *others, _CONTEXT])  # type: ignore[attr-defined]
        return run

    return decorated
