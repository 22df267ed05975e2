"""Which commands there are, and what ``--help`` says of them."""

import difflib
import importlib
from typing import Any

import typer
import typer.core
import typer.main

SETTINGS: dict[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": None}

COMMANDS = {
    "convert": "Swap modules for Lipschitz ones and write the model to one file.",
    "inspect": "Show the Lipschitz budget of a model, worst first.",
    "constrain": "Lower the norms of the layers while their outputs stay.",
    "finetune": "Train a model for larger certified radii.",
    "certify": "Certify images: nothing below the radius changes the class.",
    "report": "Show what results say, as tables, a page or a model card.",
    "verify": "Compute certificates again and say whether they stand.",
    "models": "Show which of timm's architectures are covered, and how.",
    "doctor": "Show what lipcert finds on this machine.",
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
        lipcert constrain --data images/ --error 0.02 --resume-dir layers/
    """,
    "finetune": """
        lipcert finetune model.lipcert.safetensors --data train/ --eps 36/255
        lipcert finetune --data torch/cifar10:train --eps 36/255 --epochs 20 --max-norm 1
    """,
    "certify": """
        lipcert certify --eps 36/255                               the bundled model and images
        lipcert certify m.safetensors --data val/ --eps 0.5 --out r.jsonl
        lipcert certify --eps 36/255 --attack --limit 100          bounds from both sides
        lipcert certify vit_base_patch16_224 --data val/ --eps 36/255 --method smoothing --sigma 0.25
                                                                   any checkpoint as it is, smoothed by noise
        lipcert certify --models zoo.txt --data val/ --eps 0.1 --out results/
        lipcert certify --eps 36/255 --fail-under 0.7 --json       for CI
        torchrun --nproc-per-node 4 -m lipcert certify --eps 36/255 --out r.jsonl
        lipcert certify --eps 36/255 --shard 1/3 --out r.jsonl     on the first of three machines;
                                                                   without --shard it puts the rows together
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
        lipcert models 'vit_tiny*'
        lipcert models --family swin_transformer_v2
        lipcert models --json
    """,
    "doctor": """
        lipcert doctor
    """,
}


class Commands(typer.core.TyperGroup):
    """The commands by name. A command's module is imported when it is asked for: torch and timm take seconds."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands:
            module = importlib.import_module(f"{__package__}._{cmd_name}")
            one = typer.Typer(**SETTINGS, add_completion=False)
            one.command(cmd_name, epilog=_epilog(cmd_name))(getattr(module, cmd_name))
            self.commands[cmd_name] = typer.main.get_command(one)
        return self.commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and (close := difflib.get_close_matches(args[0], COMMANDS)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(map(repr, close))}?")
        return super().resolve_command(ctx, args)


def _epilog(command: str) -> str:
    """Examples at the end of a command's help; the sign \\b keeps its lines as they are."""
    lines = [line.removeprefix("        ") for line in _EXAMPLES[command].strip("\n").splitlines()]
    return "\n".join(["\b", "Examples:", *(f"  {line}".rstrip() for line in lines)]).rstrip()
