"""Examples that ``--help`` ends with."""

_COMMANDS = {
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


def examples(command: str) -> str:
    """The epilog of a command's help; the sign \\b keeps its lines as they are."""
    lines = [line.removeprefix("        ") for line in _COMMANDS[command].strip("\n").splitlines()]
    return "\n".join(["\b", "Examples:", *(f"  {line}".rstrip() for line in lines)]).rstrip()
