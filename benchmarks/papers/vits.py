"""LoFAST's table 1 and figure 2: ViTs with its projections, trained by commands.

Certified shares are by the package's ``lofast``, ``anchored`` and ``lofast-paper``, which is Theorem 1 as published.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

import lipcert
from benchmarks.papers import trained
from benchmarks.papers.recipes import NO_DATA, Given, Table
from lipcert.inputs.data import open_images

EPS = ("0.02", "0.05", "0.1")
THEOREM, OURS = "LoFAST, Theorem 1", ("lofast", "anchored")
_LAYERS = (3, 4, 5)  # of table 1
Verdicts = dict[str, Any]  # by ε, which of the images hold, and under "seconds", by ε, the CPU seconds of each


@dataclass(frozen=True)
class Vit:
    """A ViT whose LayerNorms are projections, with limits on the norms of its matrices.

    They are ``norm`` in attention, ½ in the MLPs and 1 elsewhere. The paper's MLPs are 1-Lipschitz with their residual
    branch; here one multiplies the bound by up to 1.29.

    Attributes:
        layers: blocks.
        heads: heads of each.
        norm: limit on the norms of W^O and of W^Q, W^K and W^V side by side.
        width: channels.
        patch: side of a patch.
        images: for training.
        epochs: passes over these.
    """

    layers: int
    heads: int
    norm: float
    width: int
    patch: int
    images: int
    epochs: int

    def commands(self, train: str) -> list[list[str]]:
        """``convert`` and ``finetune``, as :meth:`trained.Kept.made` takes them."""
        size = (
            f"img_size=32 patch_size={self.patch} embed_dim={self.width} depth={self.layers} num_heads={self.heads} "
            "mlp_ratio=2 class_token=False global_pool=avg final_norm=False num_classes=10 qkv_bias=False"
        )
        convert = "--no-pretrained --attention keep --norm lofast --mean 0.5 --std 0.5 --crop-pct 1 --model-args"
        tune = f"--limit {self.images} --epochs {self.epochs} --loss ce --temperature 0.05 --crop flip --max-norm 1"
        limit = f"--max-norm *.mlp.*=0.5 --max-norm *.attn.*={self.norm} --optimizer muon --lr 1e-2"
        return [
            ["convert", "vit_tiny_patch16_224", *convert.split(), size],
            ["finetune", "MODEL", "--data", train, *tune.split(), *limit.split()],
        ]


class Trained:
    """A network and what verifiers found about it, kept beside it.

    Args:
        vit: what is trained.
        data: the folder of CIFAR-10.
        kept: for networks and figures.
        tested: test images.
    """

    def __init__(self, vit: Vit, data: str, kept: Path, tested: int):
        self.train, self.test = trained.splits("cifar10", {"cifar10": data})
        self.kept, self.tested, self.steps = trained.Kept(kept), tested, vit.commands(self.train)
        path, self.typed, self.seconds = self.kept.made(self.steps[0][1], self.steps)
        self.model = lipcert.load(path)
        batch = next(open_images(self.test, self.model, limit=tested).batches(tested))
        with torch.no_grad():
            right = self.model(batch.images).argmax(1) == batch.labels
        assert batch.labels is not None
        self.images, self.labels = batch.images[right], batch.labels[right]

    def facts(self) -> dict[str, Any]:
        """Clean accuracy, that under PGD by ε, and how the network was made."""
        return {
            "images": self.tested, "clean": len(self.images) / self.tested, "pgd": self.shares(self._attacked()),
            "parameters": sum(p.numel() for p in self.model.parameters()), "cpu seconds of training": sum(self.seconds),
            "commands": [text.replace(self.train, Path(self.train).name) for text in self.typed],
        }  # fmt: skip

    def verdicts(self, verifier: str) -> Verdicts:
        """Which of the images predicted right hold, by ε, and the CPU seconds of each."""
        method = "lofast-paper" if verifier == THEOREM else verifier
        found = self._kept(verifier, lambda: self._radii(method))
        stands = self._attacked()
        for eps in EPS:
            false = [b and not a for a, b in zip(stands[eps], found[eps], strict=True)]
            assert not any(false), f"PGD changed what {verifier} held"
        return found

    def shares(self, verdicts: Verdicts) -> dict[str, float]:
        """Of all test images, by ε."""
        return {eps: sum(verdicts[eps]) / self.tested for eps in EPS}

    def _kept(self, name: str, make: Callable[[], Verdicts]) -> Verdicts:
        note = self.kept.figures(self.steps, {"by": name, "tested": self.tested, "test": Path(self.test).name})
        if not note.exists():
            note.write_text(json.dumps(make()))
        found: Verdicts = json.loads(note.read_text())
        return found

    def _attacked(self) -> Verdicts:
        def stands(eps: str) -> list[bool]:
            broken = lipcert.attacks.pgd(self.model, self.images, self.labels, eps=float(eps)).broken
            return [not one for one in broken.tolist()]

        return self._kept("pgd", lambda: {eps: stands(eps) for eps in EPS})

    def _radii(self, method: Any) -> Verdicts:
        started = time.process_time()
        radii = lipcert.certify(self.model, self.images, self.labels, eps=EPS[-1], method=method).radius
        each = (time.process_time() - started) / max(1, len(self.images))
        seconds = dict.fromkeys(EPS, [each] * len(self.images))
        return {"seconds": seconds, **{eps: (radii > float(eps)).tolist() for eps in EPS}}


def layers(table: Table, given: Given) -> Iterator[dict[str, Any]]:
    """Table 1: each method on ViTs of 3, 4 and 5 layers; at the scale small on that of 3."""
    quoted = {row.name: dict(zip(table.columns, row.paper, strict=True)) for row in table.rows}
    if given.data is None:
        yield {"needs": NO_DATA, "paper": quoted}
        return
    for count in _LAYERS[: 1 if given.small else None]:
        name = f"ViT of {count} layers"
        network = Trained(_vit(count, given.small), str(given.data), given.kept, 20 if given.small else 1000)
        yield {"name": name, **network.facts()}
        for verifier in (THEOREM, *OURS):
            row = _verified(network, verifier)
            paper = quoted.get(f"{name}, {verifier}")
            yield {"name": f"{name}, {verifier}", **row, **({"paper": paper} if paper else {})}
    if given.small:
        others = {name: paper for name, paper in quoted.items() if f"of {_LAYERS[0]} " not in name}
        yield {"needs": "--scale full for the other ViTs", "paper": others}


def shapes(table: Table, given: Given) -> Iterator[dict[str, Any]]:
    """Figure 2: clean and certified accuracy by ``lofast`` over layers, heads and the norm of attention's matrices.

    The paper shows two data sets, and names layers, norms and numbers of heads with figure 5.
    """
    if given.data is None:
        yield {"needs": NO_DATA}
        return
    heads_of = (2, 4) if given.small else (4, 8)
    for layers, heads, norm in product((3, 6), heads_of, (0.25, 0.5, 0.75)):
        vit = Vit(layers, heads, norm, 16, 8, 6000, 3) if given.small else Vit(layers, heads, norm, 384, 4, 50_000, 100)
        network = Trained(vit, given.data, given.kept, 30 if given.small else 10_000)
        name = f"{layers} layers, {heads} heads, norm {norm}"
        yield {"name": name, **network.facts(), **_verified(network, OURS[0])}


def _vit(layers: int, small: bool) -> Vit:
    return Vit(layers, 2, 0.25, 16, 8, 8000, 4) if small else Vit(layers, 4, 0.25, 128, 4, 50_000, 100)


def _verified(network: Trained, verifier: str) -> dict[str, Any]:
    """Certified shares by ε, and the seconds of an image."""
    found = network.verdicts(verifier)
    seconds = [spent for eps in EPS for spent in found["seconds"][eps]]
    return {"certified": network.shares(found), "cpu seconds an image": sum(seconds) / max(1, len(seconds))}
