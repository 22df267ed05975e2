"""The same network at other scales: radii must not grow, although every value and derivative inside changes.

A network of layers and functions f with f(tx) = t^d f(x), t > 0, is drawn by seed. Its layers are multiplied by powers
of two whose product along the network is 1, so that the logits stay the same to the last bit, unless numbers leave
float64. Its radii by each method, without random vectors, are compared with those of the network as it was drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lipcert
from lipcert.certifier import METHODS, Certifier, _certifier
from lipcert.errors import LipcertError

# The largest exponents of the scales at which each network is seen.
EXPONENTS = (40, 190, 500)
# The largest exponents of a layer and of a value, at which weights and values are still exact in float64.
_MOST = 900
_GROWN = 1 + 1e-6
_SIZE = (1, 4, 4)


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, 1)
    return first, second


# Functions of an even number of features, with their degree.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "relu": (F.relu, 1),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.1), 1),
    "abs": (torch.abs, 1),
    "square": (torch.square, 2),
    "maximum": (lambda x: torch.maximum(*_pairs(x)), 1),
    "product": (lambda x: torch.mul(*_pairs(x)), 2),
    "norm": (lambda x: torch.stack(_pairs(x), 2).norm(dim=2), 1),
    "amax": (lambda x: torch.stack(_pairs(x), 2).amax(2), 1),
    "matmul": (lambda x: (x[:, None, ::2].mT @ x[:, None, 1::2]).flatten(1), 2),
    "identity": (lambda x: x, 1),
}


class Homogeneous(nn.Module):
    """Layers with functions between them, the layers drawn by ``seed``, and values scaled by 2^e behind each of them.

    Args:
        seed: of the network.
        scales: gives e for a layer that is not the last.
    """

    def __init__(self, seed: int, scales: Callable[[], int]):
        super().__init__()
        r, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        depth = r.choice((2, 2, 3, 4, 6, 10))
        self.names = [r.choice(tuple(FUNCTIONS)) for _ in range(depth - 1)]
        self.layers = nn.ModuleList()
        entries, before = 16, 0
        with torch.no_grad():
            for place in range(depth):
                last = place == depth - 1
                conv = place == 0 and r.random() < 0.3
                layer: Any = (
                    nn.Conv2d(1, 2, 3, padding=1) if conv else nn.Linear(entries, 3 if last else r.choice((4, 6, 8)))
                )
                most = _MOST // (1 if last else FUNCTIONS[self.names[place]][1])
                after = 0 if last else max(-most, before - _MOST, min(scales(), most, before + _MOST))
                for parameter, power in ((layer.weight, after - before), (layer.bias, after)):
                    drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    drawn *= parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.3
                    drawn[torch.rand(drawn.shape, generator=generator) < 0.1] = 0.0
                    parameter.data = drawn * 2.0 ** (power // 2) * 2.0 ** (power - power // 2)
                self.layers.append(layer)
                if not last:
                    function, degree = FUNCTIONS[self.names[place]]
                    out = torch.zeros(1, 32 if conv else layer.out_features, dtype=torch.float64)
                    entries, before = function(out).shape[1], degree * after

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x if isinstance(layer, nn.Conv2d) else x.flatten(1)).flatten(1)
            if place < len(self.names):
                x = FUNCTIONS[self.names[place]][0](x)
        return x


def radii(
    network: nn.Module, images: Tensor, methods: Sequence[str] = METHODS
) -> dict[str, tuple[list[int], list[float]] | str]:
    """Classes and radii by method, or why it refuses."""
    model = lipcert.load(network.eval(), mean=(0.0,), std=(1.0,), input_size=_SIZE).double()
    found: dict[str, tuple[list[int], list[float]] | str] = {}
    deployed, analyze = cache(_certifier._as_deployed), cache(_certifier.analyze)  # once for all methods
    with mock.patch.object(_certifier, "_as_deployed", deployed), mock.patch.object(_certifier, "analyze", analyze):
        for method in methods:
            try:
                result = Certifier(model, 1e-3, method, rigor="deterministic").run(images)
                found[method] = result.predicted.tolist(), result.radius.tolist()
            except LipcertError as refusal:
                found[method] = f"{type(refusal).__name__}: {refusal}"
    return found


def look(seed: int) -> dict[str, Any]:
    """A row for one network, at each of ``EXPONENTS``."""
    images = torch.rand(2, *_SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    r = random.Random(seed)
    plain = Homogeneous(seed, lambda: 0)
    row: dict[str, Any] = {
        "seed": seed,
        "kind": "scale",
        "by": {},
        "defects": [],
        "family": "+".join(sorted({*plain.names})),
    }
    before = radii(plain, images)
    # Staged certification stops at the first method that certifies ε, which may be another one at another scale.
    answers = [answer for answer in before.values() if not isinstance(answer, str)]
    if "staged" in before and answers and not isinstance(before["staged"], str):
        best = [max(each) for each in zip(*(found for _, found in answers), strict=True)]
        before["staged"] = before["staged"][0], best
    outcomes = set()
    for most in EXPONENTS:
        now = radii(Homogeneous(seed, partial(r.randint, -most, most)), images)
        for method, answer in now.items():
            known = before[method]
            if isinstance(answer, str) or isinstance(known, str):
                outcome, row["why"] = "refused", answer if isinstance(answer, str) else known
            else:
                pairs = zip(*known, *answer, strict=True)
                grown = [new > 0 and (new > old * _GROWN or y != z) for y, old, z, new in pairs]
                outcome = "false" if any(grown) else "held" if any(answer[1]) else "zero"
                if any(grown):
                    row["defects"].append({"method": method, "exponent": most, "before": known, "now": answer})
            row["by"][f"{method} 2^{most}"] = outcome
            outcomes.add(outcome)
    row["outcome"] = next(name for name in ("false", "held", "zero", "refused") if name in outcomes)
    return row
