"""Rows that are trained: the commands of their recipes, networks kept by their commands, and what the last one reaches.

Commands run in this process, as ``lipcert`` would run them in its own; their CPU seconds leave out its start.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import lipcert
from benchmarks import command as with_python
from benchmarks.papers.recipes import IMAGES, RECIPES, TRAININGS, Row, Scale, Table, values_of
from benchmarks.papers.shown import NO_BOUND
from lipcert.attacks import attack_named
from lipcert.cli import app
from lipcert.inputs.data import Batch, open_images
from lipcert.networks.lip_convnet import LipConvNet
from lipcert.settings import MethodName, parse_eps
from lipcert.surgery import L2Attention
from lipcert.training import LocalBound

NAMED = ("mnist", "cifar10", "cifar100")  # of torchvision, which commands take by name
_ATTACK = attack_named("pgd-100")  # Local-Lip, section 4
_TRAINING = 3  # a step forward and backward, in passes forward
_WITH_LOCAL = 100  # images whose local bounds are measured


class Failed(Exception):
    """A command ended with an exit code; the text is its last line."""


@dataclass(frozen=True)
class Kept:
    """A folder of trained networks, by the commands that made them, so that no two rows train the same one."""

    folder: Path

    def made(self, model: str, steps: list[list[str]]) -> tuple[Path, list[str], list[float]]:
        """The file of the last network, the commands as typed, and the CPU seconds of each."""
        commands, seconds = [], []
        for number, (command, _, *options) in enumerate(steps):
            out = self._file(steps[: number + 1])
            note = out.with_suffix(".json")
            commands.append(with_python.shown([command, Path(model).name, *options, "--out", out.name]))
            if not note.exists():
                started = time.process_time()
                run([command, model, *options, "--out", str(out), "--force"])
                note.write_text(json.dumps({"command": commands[-1], "cpu": time.process_time() - started}))
            seconds.append(json.loads(note.read_text())["cpu"])
            model = str(out)
        return Path(model), commands, seconds

    def figures(self, steps: list[list[str]], asked: dict[str, Any]) -> Path:
        """Where the figures of a network under these settings are kept."""
        key = hashlib.sha256(json.dumps([steps, asked]).encode()).hexdigest()[:12]
        return self.folder / f"{key}.figures.json"

    def _file(self, steps: list[list[str]]) -> Path:
        key = hashlib.sha256(json.dumps(steps).encode()).hexdigest()[:12]
        return self.folder / f"{key}.lipcert.safetensors"


def run(arguments: list[str]) -> None:
    """A command of ``lipcert``, with settings for Python among its arguments.

    Raises:
        Failed: it ended with another code than 0.
    """
    typed, settings = with_python.split(arguments)
    ended = CliRunner().invoke(app, typed, obj=settings)
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    if ended.exit_code:
        raise Failed(ended.output.strip().splitlines()[-1])


def row(
    one: Row, of: Table, scale: Scale, folders: dict[str, str], kept: Kept, *, wanted: bool = True
) -> dict[str, Any]:
    """One line: the commands of its recipe, and what the last model reaches if they are run."""
    known: dict[str, Any] = {"name": one.name, "paper": dict(zip(of.columns, one.paper, strict=True))}
    if one.recipe is None or one.model is None:
        return {**known, "here": "quoted: lipcert has no such method or network"}
    train, test = splits(str(one.data), folders)
    steps = commands(one, scale, train)
    places = {train: Path(train).name} if one.data in folders else {}
    places |= {one.checkpoint: Path(one.checkpoint).name} if one.checkpoint is not None else {}
    asked = [_without(places, with_python.shown(step)) for step in steps]
    if one.data not in folders and (of.needs or scale.data is not None or one.data not in NAMED):
        full = "" if of.needs or one.data not in NAMED else ", or --scale full"
        here = f"needs the data set {one.data}: --data {one.data}=FOLDER{full}"
        return {**known, "here": here, "commands": asked}
    if not wanted:
        return {**known, "here": "not run", "commands": asked}
    print(one.name, flush=True)
    try:
        path, typed, seconds = kept.made(str(steps[0][1]), steps)
    except Failed as error:
        return {**known, "here": str(error), "commands": asked}
    measured = {
        "eps": one.eps,
        "tested": tested(one, scale),
        "attacked": scale.attacked,
        "test": Path(test).name,
        "attack": "pgd-100",
    }
    note = kept.figures(steps, measured)
    if not note.exists():
        found = {**certified(str(path), test, one, scale), **facts(one, str(path), steps, scale, train)}
        note.write_text(json.dumps(found))
    epochs = int(str(values_of(one, scale, train)["epochs"]))
    tuned = [spent for spent, step in zip(seconds, steps, strict=True) if step[0] == "finetune"]
    return {
        **known, "data": one.data, "images": scale.passes(one.model)[0] or IMAGES[str(one.data)], "epochs": epochs,
        "here": {**json.loads(note.read_text()), "seconds an epoch": tuned[-1] / epochs, "cpu seconds": sum(seconds)},
        "source": sources(one), "commands": [_without(places, text) for text in typed],
        "cpu seconds of each": seconds,
    }  # fmt: skip


def _without(places: dict[str, str], text: str) -> str:
    """A command with the names of files in place of their paths."""
    for path, name in places.items():
        text = text.replace(path, name)
    return text


def commands(one: Row, scale: Scale, train: str) -> list[list[str]]:
    """The arguments of each command; the model of all but the first is written MODEL."""
    assert one.recipe is not None
    assert one.model is not None
    recipe, values, made = RECIPES[one.recipe], values_of(one, scale, train), []
    for number, step in enumerate(recipe.steps):
        command, *options = shlex.split(step.format(**values))
        arguments = thinned(one, scale)
        fresh = [] if recipe.pretrained or number else ["--no-pretrained"]
        fresh += [] if number or not arguments else ["--model-args", arguments]
        fresh += [] if number or one.checkpoint is None else ["--checkpoint", one.checkpoint]
        made.append([command, "MODEL" if number else one.model, *fresh, *options])
    return made


def thinned(one: Row, scale: Scale) -> str:
    """The arguments of the network; the widths of a LiResNet are divided, the 2048 of its dense layer as well."""
    name = one.model or ""
    parts = dict(part.split("=") for part in one.model_args.split())
    if "width" in parts and scale.thinner > 1:
        parts |= {"width": str(int(parts["width"]) // scale.thinner), "num_features": str(2048 // scale.thinner)}
    fitting = [start for start in scale.sizes if name.startswith(start)]
    parts |= scale.sizes[max(fitting, key=len)] if fitting else {}
    return " ".join(f"{key}={value}" for key, value in parts.items())


def sources(one: Row) -> str:
    """Equations and tables that the commands are from."""
    assert one.recipe is not None
    stated = TRAININGS[one.training][str(one.data)].source if one.training else "CertViT, table 10"
    return f"{RECIPES[one.recipe].source}; {stated}"


def splits(data: str, folders: dict[str, str]) -> tuple[str, str]:
    """Training and test images of a data set by name, or in its folder."""
    if data not in folders:
        return (f"torch/{data}:train", f"torch/{data}") if data in NAMED else ("FOLDER/train", "FOLDER/test")
    folder = Path(folders[data])
    train, test = (folder / f"{name}.tar" for name in ("train", "test"))
    return (str(train), str(test)) if train.exists() else (str(folder / "train"), str(folder / "test"))


def tested(one: Row, scale: Scale) -> dict[MethodName, int]:
    """Images by certificate; ``local`` equals ``gloro`` for MaxMin, none of whose units becomes constant."""
    methods = RECIPES[str(one.recipe)].methods
    return {method: scale.tested[method] for method in methods if method != "local" or "=maxmin" not in one.model_args}


def certified(model: str, data: str, one: Row, scale: Scale) -> dict[str, Any]:
    """Shares of the test images: right, right under attack, and certified by each method.

    A method that is tried on fewer images has beside it what ``gloro`` certifies of these.
    """
    loaded = lipcert.load(model)
    counts = tested(one, scale)
    batch = _first(data, loaded, max(*counts.values(), scale.attacked))
    assert batch.labels is not None
    attacked, labels = batch.images[: scale.attacked], batch.labels[: scale.attacked]
    assert _ATTACK is not None
    broken = _ATTACK(loaded, attacked.to(loaded.dtype), labels, parse_eps(one.eps)).broken
    with torch.no_grad():
        right = loaded(batch.images.to(loaded.dtype)).argmax(1) == batch.labels
    stands = right[: len(attacked)] & ~broken
    shares: dict[str, Any] = {}
    sure: dict[str, torch.Tensor] = {}
    for method, count in counts.items():
        labels = batch.labels[:count]
        if method == "local":  # for the verdict alone, and where it is open
            verdict = sure["gloro"][:count]
            open_ = right[:count] & ~verdict
            open_[: len(stands)] &= stands[:count]
            sure[method] = verdict | _locally(loaded, batch.images[:count], open_, parse_eps(one.eps))
            shares[method] = {"certified": _mean(sure[method]), "images": count, "rigor": ["probabilistic"]}
        else:
            result = lipcert.certify(loaded, batch.images[:count], labels, eps=one.eps, method=method)
            sure[method] = (result.predicted == labels) & result.certified
            shares[method] = {"certified": _mean(sure[method]), "images": count, "rigor": sorted(set(result.rigor))}
        both = min(count, len(broken))
        assert not (sure[method][:both] & broken[:both]).any(), f"PGD changed what {method} certified"
        if method != "gloro":
            shares[method]["gloro on these"] = _mean(sure["gloro"][:count])
    found = {
        "clean": _mean(right[: counts["gloro"]]),
        "pgd": _mean(stands),
        "attacked": len(attacked),
        "certified": shares,
    }
    if isinstance(loaded.net, LipConvNet):
        constant, bound = LocalBound(loaded).measured(batch.images[:_WITH_LOCAL], parse_eps(one.eps))
        found |= {"constant units": constant, "local bound, estimated": bound}
    return found


def _locally(loaded: lipcert.Model, images: torch.Tensor, which: torch.Tensor, eps: float) -> torch.Tensor:
    """Which of the images ``which`` the local bound certifies at ε; others are False."""
    found = torch.zeros(len(images), dtype=torch.bool)
    if which.any():
        found[which] = lipcert.certify(loaded, images[which], eps=eps, method="local").certified
    return found


def _first(data: str, loaded: lipcert.Model, count: int) -> Batch:
    return next(open_images(data, loaded, limit=count).batches(count))


def _mean(which: torch.Tensor) -> float:
    return float(which.double().mean())


def facts(one: Row, model: str, steps: list[list[str]], scale: Scale, train: str) -> dict[str, Any]:
    """Size, sparsity and bound of a network, and what its training took."""
    loaded = lipcert.load(model)
    weights = [m.weight for m in loaded.net.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        loaded(torch.zeros(1, *loaded.input_size, dtype=loaded.dtype))
    images = scale.passes(one.model)[0] or IMAGES[str(one.data)]
    epochs = int(str(values_of(one, scale, train)["epochs"])) * sum(step[0] == "finetune" for step in steps)
    return {
        "parameters": sum(p.numel() for p in loaded.net.parameters()),
        "sparsity": sum(int((p == 0).sum()) for p in weights) / sum(p.numel() for p in weights),
        "log10 bound": lipcert.lipschitz(loaded).log10,
        **(printed_lip(loaded) if str(one.recipe).startswith(("certvit", "lipcert")) else {}),
        "training flops": _TRAINING * counter.get_total_flops() * epochs * images,
    }


def printed_lip(model: lipcert.Model) -> dict[str, float]:
    """The number "Lip." of CertViT's section 3.6 for a ViT with L2 attention: no bound; nothing for other networks.

    It multiplies Kim et al.'s constants of the attentions, the spectral norms of patch embedding, MLPs and head, and
    1.12 for each GELU. Residual branches, normalisations and the scale of the pixels are left out, and 1.12 is below
    the largest slope of GELU.
    """
    net: Any = model.net
    inside = [name for name, module in net.named_modules() if isinstance(module, L2Attention)]
    if not inside:
        return {}
    tokens = net.patch_embed.num_patches
    log10 = 0.0
    for name, module in net.named_modules():
        if isinstance(module, L2Attention):
            log10 += module.lipschitz((tokens, module.dim)).log10
        elif isinstance(module, nn.GELU):
            log10 += math.log10(1.12)
        elif isinstance(module, (nn.Linear, nn.Conv2d)) and not name.startswith(tuple(f"{path}." for path in inside)):
            norm = float(torch.linalg.matrix_norm(module.weight.detach().flatten(1), 2))
            log10 += math.log10(norm) if norm else -math.inf
    return {NO_BOUND: log10}
