"""The tables and figures that are no training runs: single layers, parameters, hyper-parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import lipcert
from benchmarks.papers import lofast, trained
from benchmarks.papers.attention import AttentionLayer, attention_sensitivity
from benchmarks.papers.courses import local_lip as local_lip
from benchmarks.papers.courses import threats as threats
from benchmarks.papers.recipes import CIFAR, IMAGES, NO_DATA, SCALES, Given, Row, Table, preset_of
from benchmarks.papers.vits import layers as layers
from benchmarks.papers.vits import shapes as shapes
from lipcert.inputs.data import open_images
from lipcert.surgery import swap
from lipcert.training import LocalBound

Rows = list[dict[str, Any]]
_TOKENS, _DIM, _HEADS = 16, 64, 8
_MOST_STEPS = 1000  # of power iteration, for figures 4 and 5 of Local-Lip
_EPS = (0.01, 0.03, 0.05, 0.07, 0.09, 0.10)


def settings(table: Table, given: Given) -> Rows:
    """Hyper-parameters as the package has them."""
    return [dict(row) for row in table.settings]


def parameters(table: Table, given: Given) -> Rows:
    """Parameters in millions of each network as timm builds it and with L2 attention, and FLOPs on ImageNet.

    Adapting takes three forward passes an image and epoch of table 10. Constraining takes one pass over the images, and
    for each iteration, epoch of the projection and mini-batch the product of a layer's weights with its moments and
    back. Neither the paper's counting nor its number of images is said there.
    """
    rows: Rows = []
    for row in table.rows:
        with torch.device("meta"):
            net: Any = timm.create_model(str(row.model))
        before = _millions(net)
        swap(net, attention="l2", norm="keep", initialise=False)
        preset = preset_of(row)
        with FlopCounterMode(display=False) as counter:
            net(torch.zeros(1, 3, *net.patch_embed.img_size, device="meta"))
        forward = counter.get_total_flops() * IMAGES["imagenet"]
        weights = [m.weight.flatten(1) for m in net.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        once = sum(4 * len(w) * w.shape[1] ** 2 for w in weights)
        steps = preset.iterations * preset.projection_epochs * IMAGES["imagenet"] / preset.batch_size
        flops = {"adapting": 3 * forward * preset.epochs / 1e16, "constraining": (forward + steps * once) / 1e16}
        rows.append({"name": row.name, "dot-product": before, "L2": _millions(net), "flops 1e16": flops,
                     "paper": row.paper})  # fmt: skip
    return rows


def _millions(net: nn.Module) -> float:
    return sum(p.numel() for p in net.parameters()) / 1e6


def architectures(table: Table, given: Given) -> Rows:
    """What the networks have, beside the paper's figures."""
    rows: Rows = []
    for row in table.rows:
        with torch.device("meta"):
            net = timm.create_model(str(row.model))
        found = _sizes(net)
        paper = dict(zip(table.columns, row.paper, strict=True))
        rows.append({"name": row.name, "here": {key: found[key] for key in paper}, "paper": paper})
    return rows


def _sizes(net: Any) -> dict[str, float]:
    """Sizes of a ViT or a Swin, by the papers' names."""
    embed, stages = net.patch_embed, getattr(net, "layers", None)
    found = {"image": embed.img_size[0], "channels": embed.proj.in_channels, "patch": embed.patch_size[0],
             "width": net.embed_dim}  # fmt: skip
    if stages is None:
        first = net.blocks[0]
        ratio = first.mlp.fc1.out_features / net.embed_dim
        return {**found, "layers": len(net.blocks), "heads": first.attn.num_heads, "MLP ratio": ratio}
    for k, stage in enumerate(stages, 1):
        found |= {f"layers {k}": len(stage.blocks), f"heads {k}": stage.blocks[0].attn.num_heads}
    return {**found, "window": stages[0].blocks[0].window_size[0]}


def gelu(table: Table, given: Given) -> Rows:
    """Figure 2: lipcert's constant of GELU, which no slope passes, and the largest slope on a grid, which does 1.12."""
    grid = torch.linspace(-6, 6, 120_001, dtype=torch.float64).requires_grad_()
    (slopes,) = torch.autograd.grad(nn.functional.gelu(grid).sum(), grid)
    bound = lipcert.lipschitz(
        lipcert.load(nn.Sequential(nn.Flatten(), nn.GELU()), input_size=(1, 2, 2), mean=(0.0,), std=(1.0,))
    )
    return [
        {"name": "GELU", "slope found": float(slopes.max()), "lipcert": 10**bound.log10, "paper": table.rows[0].paper}
    ]


def _tokens(norm: float, seed: int = 0) -> Tensor:
    x = torch.randn(_TOKENS, _DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return norm * x / x.norm(dim=1, keepdim=True)


def one_attention(table: Table, given: Given) -> Rows:
    """Table 3 for orthogonal weights, W^V and W^O of norm 0.5, and tokens of norm 1: an attack and every bound."""
    layer, x = lofast.trained_like(_DIM, _HEADS, 0.5), _tokens(1.0)
    quoted = {row.name: row.paper for row in table.rows}
    return [
        {"eps": eps, **_bounds(x, layer, eps), "paper": {name: figures[k] for name, figures in quoted.items()}}
        for k, eps in enumerate(_EPS)
    ]


def _bounds(x: Tensor, layer: AttentionLayer, eps: float) -> dict[str, float]:
    theorem = lofast.theorem_1(x, layer, eps)
    ours = float(attention_sensitivity(x[None], layer, eps).change) + eps  # the residual branch by the triangle
    return {
        "attack": max(lofast.attack(x, layer, eps, seed=seed) for seed in range(2)),
        "LoFAST, Theorem 1": theorem.change,
        "LoFAST with ξ": theorem.loose,
        "LoFAST, equation 12": theorem.by_norms,
        "lipcert, attention, and the residual added": ours,
        "SpecFormer": lofast.specformer(x, layer, eps),
    }


def token_norms(table: Table, given: Given) -> Rows:
    """Figure 4: attention without its residual branch, where Theorem 1 and lipcert's bound can be compared."""
    layer = lofast.trained_like(_DIM, _HEADS, 0.5)
    rows: Rows = []
    for norm in (0.5, 1.0, 2.0, 4.0):
        x = _tokens(norm)
        for eps in (0.01, 0.1, 0.5, 1.0):
            theorem = lofast.theorem_1(x, layer, eps, residual=False)
            ours = attention_sensitivity(x[None], layer, eps)
            rows.append(
                {
                    "token norm": norm,
                    "eps": eps,
                    "attack": lofast.attack(x, layer, eps, residual=False),
                    "LoFAST, Theorem 1": theorem.change,
                    "LoFAST with ξ": theorem.loose,
                    "lipcert": float(ours.change),
                    "Theorem 1 over lipcert": theorem.change / float(ours.change),
                }
            )
    return rows


def parts(table: Table, given: Given) -> Rows:
    """Figure 1: the two factors of Δ₂ for one head, with the bounds of section 5.1 over what an attack reaches."""
    layer, x = lofast.trained_like(_DIM, 1, 0.5), _tokens(1.0)
    form, mixed = layer.wq @ layer.wk.T, layer.wv @ layer.wo if layer.wo is not None else layer.wv
    before = layer.weights(x)[0]
    rows: Rows = []
    for eps in (0.01, 0.05, 0.1, 0.5, 1.0):
        bent = eps * float(torch.linalg.matrix_norm(form, 2))
        weights = _climb(lambda y: layer.weights(y)[0] - before, x, eps)
        values = _climb(lambda y: torch.linalg.matrix_norm(y @ mixed, 2), x, eps)
        norm = float(torch.linalg.matrix_norm(mixed, 2))
        own = float(torch.linalg.matrix_norm(x @ mixed, 2))
        rows.append(
            {
                "eps": eps,
                "Δ₂₁ attack": weights,
                "Δ₂₁ with ‖M‖": layer.s * eps * (lofast.scores(x, form) + bent),
                "Δ₂₁ with ξ": layer.s * eps * (lofast.xi(x, form) + bent),
                "Δ₂₂ attack": values,
                "Δ₂₂ LoFAST": own + eps * norm,
                "Δ₂₂ naive": norm * (float(torch.linalg.matrix_norm(x, 2)) + eps),
            }
        )
    return rows


def _climb(value: Callable[[Tensor], Tensor], x: Tensor, eps: float, steps: int = 100) -> float:
    """The largest norm of a value that projected gradient ascent finds on ‖X' − X‖_F = ε."""
    delta, best = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 0.0
    for _ in range(steps):
        delta = (eps * delta / delta.norm()).requires_grad_()
        reached = value(x + delta).norm()
        best = max(best, float(reached.detach()))
        (delta,) = torch.autograd.grad(reached, delta)
    return best


def ablation(table: Table, given: Given) -> Rows:
    """Figure 3: the bound of Theorem 1 at ε = 0.1 when one weight, or the input, moves by a random matrix."""
    layer, x = lofast.trained_like(_DIM, _HEADS, 0.5), _tokens(1.0)
    rows: Rows = []
    for name in ("wq", "wk", "wv", "wo", "x"):
        for size in (0.0, 1.0, 2.0):
            found: list[float] = []
            for seed in range(2 if given.small else 10):
                base = x if name == "x" else getattr(layer, name)
                step = torch.randn(base.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
                moved = base + size * step / step.norm()
                weights = {key: getattr(layer, key) for key in ("wq", "wk", "wv", "wo")}
                other = AttentionLayer(**{**weights, **({} if name == "x" else {name: moved})}, heads=_HEADS)
                found.append(lofast.theorem_1(moved if name == "x" else x, other, 0.1).change)
            rows.append({"moved": name, "by": size, "bound, mean": sum(found) / len(found), "samples": len(found)})
    return rows


def perturbed(table: Table, given: Given) -> Iterator[dict[str, Any]]:
    """Figure 1 on CIFAR-10: the nearest perturbations that an attack finds, for the ViTs of table 1.

    The paper shows one ImageNet image, which ViT takes for another class under a perturbation that CertViT withstands.
    """
    if given.data is None:
        yield {"needs": NO_DATA}
        return
    scale, count = SCALES["small" if given.small else "full"], 8 if given.small else 100
    train, test = trained.splits(CIFAR, {CIFAR: given.data})
    for name, recipe in (("ViT", "standard"), ("CertViT", "certvit-l2, quantile"), ("lipcert", "lipcert-l2")):
        row = Row(name, (), CIFAR, "certvit_cifar10", recipe, training="CertViT, table 9")
        path, *_ = trained.Kept(given.kept).made("certvit_cifar10", trained.commands(row, scale, train))
        model = lipcert.load(str(path))
        batch = next(open_images(test, model, limit=count).batches(count))
        assert batch.labels is not None
        found = lipcert.attacks.pgd(model, batch.images.to(model.dtype), batch.labels, eps=36 / 255)
        found = lipcert.attacks.smallest(
            lipcert.attacks.PGD(), model, batch.images.to(model.dtype), batch.labels, found, 36 / 255
        )
        with torch.no_grad():
            right = model(batch.images.to(model.dtype)).argmax(1) == batch.labels
            became = model(found.images).argmax(1)
        moved = found.distance[right & found.broken]
        first = [int(i) for i in (right & found.broken).nonzero().flatten()[:1]]
        yield {
            "name": name, "images": count, "right": float(right.double().mean()),
            "median perturbation of those right": float(moved.median()) if len(moved) else None,
            "images shown": [{"class": int(batch.labels[i]), "becomes": int(became[i]), "at": float(found.distance[i])}
                             for i in first],
        }  # fmt: skip


def iterations(table: Table, given: Given) -> Iterator[dict[str, Any]]:
    """Figures 4 and 5 of Local-Lip: steps of power iteration until ‖u(t + 1) − u(t)‖ ≤ 1e-3, by layer of 6C2F."""
    if given.data is None:
        yield {"needs": NO_DATA}
        return
    scale, count = SCALES["small" if given.small else "full"], 1 if given.small else 1000
    train, test = trained.splits(CIFAR, {CIFAR: given.data})
    row = Row("6C2F", (), CIFAR, "lip_convnet_6c2f", "local-b", training="Local-Lip, table 3")
    path, *_ = trained.Kept(given.kept).made("lip_convnet_6c2f", trained.commands(row, scale, train))
    model = lipcert.load(str(path))
    images = next(open_images(test, model, limit=count).batches(count)).images.to(model.dtype)
    steps: dict[int, list[int]] = {}
    for image in images.split(1):
        bound, ended = LocalBound(model, steps=1), dict[int, int]()
        for step in range(1, _MOST_STEPS + 1):
            before = dict(bound.vectors)
            with torch.no_grad():
                bound._walk(image, 36 / 255)
            for place, vector in bound.vectors.items():
                if place in before and place not in ended and float((vector - before[place]).norm()) <= 1e-3:
                    ended[place] = step
            if len(ended) == len(bound.vectors):
                break
        for place in bound.vectors:
            steps.setdefault(place, []).append(ended.get(place, _MOST_STEPS))
    layers = list(enumerate(sorted(steps), 1))
    for number, place in layers if table.number == "figure 5" else layers[-1:]:
        counted = torch.tensor(steps[place], dtype=torch.float64)
        yield {
            "name": f"layer {number}", "images": len(counted), "mean": float(counted.mean()),
            "quartiles": [float(q) for q in counted.quantile(torch.tensor([0.25, 0.5, 0.75]).double())],
        }  # fmt: skip


def classes(table: Table, given: Given) -> Iterator[dict[str, Any]]:
    """Figure 4 of LiResNet with the first classes of CIFAR-10: accuracy and certified accuracy fall with their number.

    The paper takes 100 to 1000 classes of ImageNet and ε = 1, here ε = 36/255.
    """
    if given.data is None:
        yield {"needs": NO_DATA}
        return
    images, epochs, tested = (1000, 3, 500) if given.small else (50_000, 200, 10_000)
    sources = trained.splits(CIFAR, {CIFAR: given.data})
    size: dict[str, Any] = {"width": 16, "num_features": 128, "depth": 4} if given.small else {}
    reader = lipcert.load("liresnet_l12w256", pretrained=False, **size)  # of ten classes, as the data set
    for count in (2, 5, 10):
        for loss in ("emma", "ce"):
            torch.manual_seed(0)
            model = lipcert.load("liresnet_l12w256", pretrained=False, num_classes=count, **size)
            train, test = (
                [(b.images[b.labels < count], b.labels[b.labels < count])  # type: ignore[operator, index]
                 for b in open_images(source, reader, limit=limit * 10 // count).batches(32 * 10 // count)]
                for source, limit in zip(sources, (images, tested), strict=True)
            )  # fmt: skip
            full = [pair for pair in train if len(pair[0])]
            lipcert.finetune(model, full, 36 / 255, loss=loss, epochs=epochs, optimizer="muon", lr=1e-2)
            right = sure = seen = 0
            for x, y in (pair for pair in test if len(pair[0])):
                result = lipcert.certify(model, x, y, eps=36 / 255, method="gloro")
                good = result.predicted == y
                right, sure = right + int(good.sum()), sure + int((good & result.certified).sum())
                seen += len(y)
            yield {"name": f"{count} classes, {loss}", "training images": sum(len(y) for _, y in full),
                   "images": seen, "clean": right / seen, "certified": sure / seen}  # fmt: skip
