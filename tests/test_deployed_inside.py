"""Inside deployed networks: what anchored bounds is compared with the values that a network in a half format has."""

import functools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from truth import Forward

import lipcert
from lipcert.certifier.anchored import deployed as anchored
from lipcert.certifier.anchored.network import whole_modules
from lipcert.graph import evaluate, unchecked
from lipcert.model import copy_of

SIZE = (1, 3, 4)


def _linear(x, weight, bias, draw):
    if draw.random() < 0.6:  # in float32
        return F.linear(x.float(), weight.float(), bias.float())
    return F.linear(x.to(weight.dtype), weight, bias)


def _cast(x, half, draw):
    return draw.choice([x, x.float(), x.to(half), x.float().to(half)])


STEPS = (
    torch.tanh, F.silu, F.gelu, torch.relu, torch.sin, F.logsigmoid, torch.square,
    lambda z: 4 * z.softmax(-1),
    lambda z: F.layer_norm(z, (8,)),
    lambda z: F.rms_norm(z, (8,), eps=1e-3),
    lambda z: F.normalize(z, dim=-1),
    lambda z: z.clamp(-0.7, 0.7),
    lambda z: torch.maximum(z, z.flip(-1)),
    lambda z: z.amax(-1, keepdim=True) + z,
    lambda z: z / (1 + z * z),
    lambda z: (z * z + 0.5).rsqrt(),
    lambda z: torch.cat([z[:, :4] * z[:, 4:], z[:, 4:]], 1),
    lambda z: z + 200.7,
    lambda z: z.reshape(-1, 2, 4).transpose(1, 2).reshape(-1, 8),
    lambda z: (z.reshape(-1, 2, 4) @ z.reshape(-1, 2, 4).mT).reshape(-1, 4).repeat(1, 2),
)  # fmt: skip


def _network(x: Tensor, first, second, last, bias, end, *, seed: int) -> Tensor:
    draw, half = random.Random(seed), x.dtype
    z = _linear(x.flatten(1), first, bias, draw)
    for _ in range(draw.randint(1, 4)):
        z = _cast(draw.choice(STEPS)(_cast(z, half, draw)), half, draw)
        if draw.random() < 0.3:
            z = _linear(z, second, bias, draw)
    return _cast(_linear(_cast(z, half, draw), last, end, draw), half, draw)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("seed", range(16))
def test_values_of_deployed_networks_deviate_by_no_more_than_their_bounds(seed, dtype, monkeypatch):
    # Weights and the image are numbers of the format, so that little but the casts rounds in front of an operation.
    half, draws = getattr(torch, dtype), torch.Generator().manual_seed(seed)
    sizes = {"first": (8, 12), "second": (8, 8), "last": (3, 8), "bias": (8,), "end": (3,)}
    scale = (1 + 3 * (seed % 3)) / 2
    tensors = {k: (scale * torch.randn(s, generator=draws)).to(half).float() for k, s in sizes.items()}
    net = Forward(functools.partial(_network, seed=seed), **tensors)
    model = lipcert.load(net.eval(), mean=(0.0,), std=(1.0,), input_size=SIZE)
    deployed, real = copy_of(model).to(half), copy_of(model).double()
    real.real = True
    graphs, captured = [], anchored.deployed_graph
    monkeypatch.setattr(anchored, "deployed_graph", lambda *of: graphs.append(captured(*of)) or graphs[-1])
    method = anchored.DeployedAnchored(real, dtype)
    image = torch.rand(1, *SIZE, generator=draws).to(half).double() * (seed % 4 == 0)
    found = method(image)
    at = found.linearization
    twin = unchecked(deployed, image.to(half), whole_modules)
    same = dict(zip(graphs[0][0].nodes, twin.nodes, strict=True))
    for eps in (1e-6, 3e-2):
        radius = torch.tensor([eps], dtype=torch.float64)
        found.measure(radius)
        bounds = at.propagate(radius)
        moved = torch.randn(image.shape, generator=draws, dtype=torch.float64)
        moved = (image + (eps > 1e-3) * 0.7 * eps / moved.norm() * moved).clamp(0, 1).to(half)
        assert (moved.double() - image).norm() <= eps
        values = evaluate(twin.nodes, {twin.input: moved})

        def off(node, values=values):
            return (values[same[node]].double() - at.values[node][0]).flatten()

        for node, rho in bounds.operands.items():
            for operand, bound in zip(node.operands, rho, strict=False):
                assert not off(operand).norm() > bound, node
            if len(rho) > len(node.operands):
                blocks = off(node.operands[0]).reshape(-1, at.network.rules[node].block(node))
                assert not (blocks.norm(dim=1) > rho[-1].flatten()).any(), node
        assert bounds.operands or bounds.features is not None
        assert not (values[twin.output].double() - at.logits).norm() > bounds.logits
        if bounds.features is not None:
            assert not off(at.network.head[0]).norm() > bounds.features
