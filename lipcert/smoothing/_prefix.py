"""Noise inside a network: the first layers have a Lipschitz constant, and the rest is smoothed."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds import analyze
from lipcert.errors import InputError
from lipcert.graph import Node, cuts, run
from lipcert.model import Model

# Tolerance between the module's output and the value in the graph, relative to the largest entry; both are float64.
_SAME = 1e-9


class Prefix:
    """A network f = rest ∘ prefix at the output of a module, and the Lipschitz constant K of the prefix.

    The certified function is g(x) = the class that rest gives most often at prefix(x) + N(0, σ²I). Smoothing certifies
    that it is constant on a ball of radius r around prefix(x), for any function rest. The prefix moves by at most K
    ‖x′ − x‖, so g is constant for ‖x′ − x‖ < r/K. K holds in real arithmetic. As for the noise, we assume that rounding
    in the prefix changes the probabilities by no more than the slack of the bound.

    Source: Zhong and Tandon, "SPLITZ: certifiable robustness via split Lipschitz randomized smoothing", 2024 (arXiv
    2407.02811), theorem 1.

    Attributes:
        constant: K, rounded up; where it is infinite, no radius is above 0.
        shape: shape of the value for one image.
    """

    def __init__(self, model: Model, path: str):
        self._model = model
        modules = dict(model.net.named_modules())
        if not path or path.removeprefix("net.") not in modules:
            names = ", ".join(name for name in modules if name and name.count(".") < 2)
            raise InputError(f"there is no module smooth_at={path!r}; the network has {names}")
        self._path = path.removeprefix("net.")
        real = copy.deepcopy(model).double()
        real.real = True
        analysis = analyze(real)
        node = self._node(real, analysis.graph, path)
        self.constant = max(float(analysis.values[node].lip), torch.finfo(torch.float64).tiny)
        self.shape = node.shape[1:]

    def _node(self, real: Model, graph: Any, path: str) -> Node:
        """The node of the module's output, through which all later values depend on the image."""
        results: list[Any] = []
        images = torch.rand(2, *real.input_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        handle = real.net.get_submodule(self._path).register_forward_hook(lambda _, __, output: results.append(output))
        with handle, torch.no_grad():
            real(images.to(real.device))
            alone = [run(graph.nodes, {graph.input: image[None].to(real.device)}) for image in images]
        if len(results) != 1 or not isinstance(results[0], Tensor):
            raise InputError(f"smooth_at={path!r} must be a module that runs once and returns one tensor")
        inside = [n for n in graph.nodes if f"{n.path.removeprefix('net.')}.".startswith(f"{self._path}.") and n.single]
        if inside and inside[-1] in cuts(graph) and inside[-1].shape[:1] == (1,):
            value = torch.cat([values[inside[-1]] for values in alone])
            if value.shape == results[0].shape and (value - results[0]).abs().max() <= _SAME * results[0].abs().max():
                return inside[-1]
        raise InputError(
            f"what follows smooth_at={path!r} depends on the image in other ways than through its output; take a "
            "module such as blocks.0, after which nothing passes it by"
        )

    def under(self, noise: Tensor, images: Tensor) -> Tensor:
        """Logits with noise added to the module's output."""
        module = self._model.net.get_submodule(self._path)
        with module.register_forward_hook(lambda _, __, output: (output.float() + noise).to(output.dtype)):
            logits: Tensor = self._model(images)
        return logits
