"""The anchored certificate against CROWN on the CIFAR-10 networks of train_cifar_vit.py, image by image, in one run.

    python -m benchmarks.crown_radii --model t3.safetensors --data ../shared/data/cifar10/test.tar --eps 0.05 36/255

CROWN is auto_LiRPA's backward bound in ℓ2, in float32 as it comes, with its tighter relaxations of softmax (``lse``)
and of products (``middle``); projections are written with square, square root, reciprocal and ReLU, which it knows. It
is asked about every ε in turn until it cannot verify one; with ``--factor 1`` about one ε, the anchored radius, which
says whose reaches further. auto_LiRPA must be installed; this project does not need it.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lipcert
from benchmarks._env import environment
from lipcert.bounds import margins
from lipcert.certifier import Anchored, Certifier
from lipcert.data import open_images
from lipcert.surgery import LayerProject


def affine(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer


class Projection(nn.Module):
    """A projection in place of LayerNorm, in operations that auto_LiRPA bounds."""

    def __init__(self, module: Any):
        super().__init__()
        self.kinked, self.centred = isinstance(module, LayerProject), module.centred
        self.radius = float(module.radius)
        bias = torch.zeros_like(module.weight) if module.bias is None else module.bias
        self.weight, self.bias = nn.Parameter(module.weight.detach()), nn.Parameter(bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        square = (x * x).sum(-1, keepdim=True)
        if self.kinked:
            ratio = (torch.relu(torch.sqrt(square) - self.radius) + self.radius) / self.radius
        else:
            ratio = torch.sqrt(square / self.radius**2 + 1.0)
        return x * torch.reciprocal(ratio) * self.weight + self.bias


class Block(nn.Module):
    """A transformer block with its attention written out, for a batch of one or more images."""

    def __init__(self, block: Any, tokens: int, gelu: type[nn.Module]):
        super().__init__()
        attention = block.attn
        self.tokens, self.heads = tokens, attention.num_heads
        self.norm1, self.norm2 = Projection(block.norm1), Projection(block.norm2)
        qkv = attention.qkv
        biases = (None,) * 3 if qkv.bias is None else qkv.bias.chunk(3)
        self.q, self.k, self.v = (affine(*part) for part in zip(qkv.weight.chunk(3), biases, strict=True))
        self.out = affine(attention.proj.weight, attention.proj.bias)
        self.fc1 = affine(block.mlp.fc1.weight, block.mlp.fc1.bias)
        self.fc2 = affine(block.mlp.fc2.weight, block.mlp.fc2.bias)
        self.act = gelu()

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.tokens, self.heads, x.shape[-1] // self.heads)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm1(x)
        q = self.split(self.q(tokens)).permute(0, 2, 1, 3)
        k = self.split(self.k(tokens)).permute(0, 2, 3, 1)
        v = self.split(self.v(tokens)).permute(0, 2, 1, 3)
        weights = torch.softmax(torch.matmul(q, k) * (1 / math.sqrt(q.shape[-1])), -1)
        mixed = torch.matmul(weights, v).permute(0, 2, 1, 3).reshape(-1, self.tokens, x.shape[-1])
        x = x + self.out(mixed)
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class Network(nn.Module):
    """A transformer of train_cifar_vit.py, on pixels."""

    def __init__(self, model: lipcert.Model, gelu: type[nn.Module]):
        super().__init__()
        net: Any = model.net
        mean, std = (torch.as_tensor(value).float().view(1, -1, 1, 1) for value in (model.mean, model.std))
        weight, bias = net.patch_embed.proj.weight.detach().float(), net.patch_embed.proj.bias.detach().float()
        self.width, size = weight.shape[0], weight.shape[-1]
        self.tokens = (model.input_size[-1] // size) ** 2
        self.embed = nn.Conv2d(3, self.width, size, size)
        self.embed.weight = nn.Parameter(weight / std)
        self.embed.bias = nn.Parameter(bias - (mean / std * weight).sum((1, 2, 3)))
        self.position = nn.Parameter(net.pos_embed.detach().float())
        self.blocks = nn.ModuleList([Block(block, self.tokens, gelu) for block in net.blocks])
        self.head = affine(net.head.weight, net.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).reshape(-1, self.width, self.tokens).permute(0, 2, 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Crown:
    """CROWN's lower bound on the margins of one image, in float32 as auto_LiRPA computes it: an estimate.

    Args:
        model: a transformer of train_cifar_vit.py, or one like it.

    Raises:
        ImportError: auto_LiRPA is not installed, or cannot be imported beside this version of torch.
    """

    def __init__(self, model: lipcert.Model):
        from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm, __version__
        from auto_LiRPA.operators.gelu import GELU

        def ball(image: Tensor, eps: float) -> Any:
            return BoundedTensor(image, PerturbationLpNorm(norm=2, eps=eps))

        self.version, self.ball, self.network = __version__, ball, Network(model, GELU).eval()
        options = {"softmax": "lse", "mul": {"middle": True}, "conv_mode": "matrix"}
        self.bounded = BoundedModule(self.network, torch.zeros(1, *model.input_size), bound_opts=options)

    def __call__(self, image: Tensor, label: int, eps: float) -> float:
        """The bound on the least f_label − f_j over the ball of radius ε around an image of shape (1, C, H, W)."""
        classes = self.network.head.out_features
        others = [j for j in range(classes) if j != label]
        wanted = torch.zeros(1, len(others), classes)
        wanted[0, :, label] = 1
        wanted[0, range(len(others)), others] = -1
        ball = (self.ball(image, eps),)
        with torch.no_grad():
            return float(self.bounded.compute_bounds(x=ball, C=wanted, method="backward", bound_upper=False)[0].min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--images", type=int, default=100, help="how many are looked at")
    parser.add_argument("--verified", type=int, default=10, help="how many of those predicted right are taken")
    parser.add_argument("--eps", nargs="+", default=["0.02", "0.05", "0.1", "36/255"])
    parser.add_argument("--factor", type=float, help="ask about this multiple of the anchored radius instead")
    parser.add_argument("--name", default="crown_radii", help="of the file in benchmarks/results")
    args = parser.parse_args()
    sizes = sorted(float(Fraction(text)) for text in args.eps)
    model = lipcert.load(args.model)
    try:
        crown = Crown(model)
    except ImportError as error:
        raise SystemExit(f"this needs auto_LiRPA, and cannot import it: {error}") from error
    exact = lipcert.load(args.model).double()
    method = Anchored(exact)
    rows: list[dict[str, Any]] = []
    path = Path(__file__).parent / "results" / f"{args.name}.json"

    chosen: list[tuple[int, Tensor, int]] = []
    for batch in open_images(args.data, model, limit=args.images).batches(1):
        with torch.no_grad():
            assert (crown.network(batch.images) - model(batch.images)).abs().max() < 1e-4
            predicted = int(model(batch.images).argmax())
        if batch.labels is not None and predicted == int(batch.labels) and len(chosen) < args.verified:
            chosen.append((batch.indices[0], batch.images, predicted))
    # As it is used: several images at once.
    images = torch.cat([image for _, image, _ in chosen]).double()
    started = time.process_time()
    with torch.no_grad():
        classes, gaps = margins(exact(images))
    radii = method(images).radius(classes, gaps).tolist()
    seconds = (time.process_time() - started) / len(chosen)
    verdicts = {}
    for eps in sizes if args.factor is None else ():
        certifier = Certifier(exact, eps)
        certifier.run(images[:1])  # what is done once for a network
        started = time.process_time()
        certifier.run(images)
        verdicts[eps] = (time.process_time() - started) / len(chosen)
    for (index, image, predicted), ours, margin in zip(chosen, radii, gaps.amin(1).tolist(), strict=True):
        row: dict[str, Any] = {"image": index, "margin": margin, "anchored_radius": ours, "crown": []}
        for eps in sizes if args.factor is None else [args.factor * ours]:
            started = time.process_time()
            bound = crown(image, predicted, eps)
            row["crown"].append({"eps": eps, "margin_at_least": bound, "cpu_seconds": time.process_time() - started})
            if not bound > 0:
                break
        rows.append(row)
        print(json.dumps(row), flush=True)
        asked = [one for r in rows for one in r["crown"]]
        pairs = [(r["anchored_radius"], one) for r in rows for one in r["crown"]]
        compared = [(radius >= one["eps"], one["margin_at_least"] > 0) for radius, one in pairs]
        summary = {
            "model": Path(args.model).stem,
            "images": len(rows),
            "verdicts": len(asked),
            "both_verify": sum(a and b for a, b in compared),
            "anchored_alone": sum(a and not b for a, b in compared),
            "crown_alone": sum(b and not a for a, b in compared),
            "cpu_seconds_a_crown_verdict": sum(one["cpu_seconds"] for one in asked) / len(asked),
            "cpu_seconds_an_anchored_radius": seconds,
            "cpu_seconds_a_staged_verdict": verdicts,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "rows": rows,
            "environment": environment(),
        }
        path.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({key: value for key, value in summary.items() if key != "rows"}, indent=1))


if __name__ == "__main__":
    main()
