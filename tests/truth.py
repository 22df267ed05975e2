"""The assertion behind every test of a false certificate: the network is refused, or its radii hold."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lipcert
from lipcert.certifier import METHODS, Anchored, Certifier
from lipcert.errors import LipcertError
from lipcert.roundoff import Link

# Radii are attacked this far inside, for the rounding of the attack's own steps.
_INSIDE = 1 - 1e-6


class Forward(nn.Module):
    """A forward function as a module, with the tensors and modules it reads registered under it."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Tensor | nn.Module):
        super().__init__()
        self.function = forward
        self.parts = tuple(parts)
        self.marker = nn.Parameter(torch.zeros(()))
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **{name: getattr(self, name) for name in self.parts})


def gains_hold(method: Anchored, image: Tensor) -> dict[Link, tuple[float, float]]:
    """Compares bounds on the norms of a network's single operations at an image with the norms, by all columns.

    Args:
        method: the certificate of the network.
        image: shape (1, C, H, W).

    Returns:
        The norm and the bound of each operation that is not empty.

    Raises:
        AssertionError: a bound is smaller than the norm.
    """
    found = {}
    values = method.network.values(image[:, None])
    for link, gain in method.network.local(values).gains.items():
        columns = math.prod(link.operand.shape)
        if not columns * values[link.node].numel():
            continue
        way = method.finder.jacobians.operator(link.operand, link.node, values, several=True, path=link.path)
        jacobian = way.product(torch.eye(columns, dtype=torch.float64)[:, None]).reshape(columns, -1)
        found[link] = torch.linalg.matrix_norm(jacobian, 2).item(), gain.item()
        assert found[link][0] <= found[link][1] * (1 + 1e-9), link.node
    return found


def holds_or_refused(
    network: nn.Module | Callable[[Tensor], Tensor],
    size: tuple[int, ...],
    *,
    methods: Sequence[str] = METHODS,
    dtype: str = "real",
    images: Tensor | None = None,
    witnesses: Sequence[Tensor] = (),
    starts: int = 2,
) -> dict[str, Tensor | str]:
    """Certifies a network by each method and attacks what comes out, with real tensors and the network's own code.

    Args:
        network: a module or a forward function on images of shape (N, *size) with entries in [0, 1].
        size: (C, H, W).
        methods: of :data:`lipcert.certifier.METHODS`.
        dtype: as for :func:`lipcert.certify`; the network is attacked in that type.
        images: shape (N, *size); random ones, the black and the white one by default.
        witnesses: images near the first ones that are known to be predicted otherwise, each of shape (N, *size).
        starts: of the attack, for every image.

    Returns:
        The radii by method, shape (N,), or the one line of the refusal.

    Raises:
        AssertionError: an image within its certified radius is predicted otherwise; the first image alone has another
            radius than among the others; or the refusal is no clear line.
    """
    module = network if isinstance(network, nn.Module) else Forward(network)
    module = module.double().eval()
    if images is None:
        generator = torch.Generator().manual_seed(1)
        inner = torch.rand(2, *size, generator=generator, dtype=torch.float64)
        images = torch.cat([inner, torch.zeros(1, *size).double(), torch.ones(1, *size).double()])
    images = images.double()
    shown = copy.deepcopy(module)
    deployed = copy.deepcopy(module).to(torch.float64 if dtype == "real" else getattr(torch, dtype))

    def logits(x: Tensor) -> Tensor:
        return _classes(deployed, x.to(next(deployed.parameters()).dtype)).double()

    found: dict[str, Tensor | str] = {}
    model = None
    for method in methods:
        try:
            if model is None:
                model = lipcert.load(shown, mean=(0.0,) * size[0], std=(1.0,) * size[0], input_size=size)
            certifier = Certifier(model, eps=1e-3, method=method, dtype=dtype)
            result = certifier.run(images)
        except LipcertError as refusal:
            line = str(refusal)
            assert line.isprintable(), line
            assert len(line) > 10, line
            found[method] = line
            continue
        if method == "anchored":
            with contextlib.suppress(LipcertError):
                gains_hold(Anchored(model), images[:1])
        alone = certifier.run(images[:1]).radius
        torch.testing.assert_close(alone, result.radius[:1], rtol=1e-3, atol=1e-12)
        for index in range(len(images)):
            radius, predicted = result.radius[index].item(), result.predicted[index].item()
            image = images[index : index + 1]
            reach = min(radius, math.sqrt(image.numel())) * _INSIDE
            if not reach > 0:
                continue
            for x in (*near(module, image, predicted, reach, starts), *(w[index : index + 1] for w in witnesses)):
                distance = (x - image).norm().item()
                if distance <= reach:
                    now = logits(x).argmax(1).item()
                    assert now == predicted, f"{method} certifies {radius:.6g}, and {distance:.6g} away it is {now}"
        found[method] = result.radius
    return found


def near(network: nn.Module, image: Tensor, predicted: int, radius: float, starts: int) -> list[Tensor]:
    """Images of the box within the radius, shape (1, *size) each: those that gradients, corners and chance suggest."""
    generator = torch.Generator().manual_seed(2)

    def within(delta: Tensor) -> Tensor:
        delta = delta * (radius / max(delta.norm().item(), 1e-300))
        for _ in range(3):  # what the box cuts off is given to the other pixels
            delta = (image + delta).clamp(0, 1) - image
            delta = delta * min(1.0, radius / max(delta.norm().item(), 1e-300))
        return (image + delta).clamp(0, 1)

    found = [image, *(within(target - image) for target in (torch.zeros_like(image), torch.ones_like(image)))]
    found += [within(sign * torch.eye(image.numel()).double()[i].reshape(image.shape))
              for i in range(min(image.numel(), 8)) for sign in (1, -1)]  # fmt: skip
    found += [within(torch.randn(image.shape, generator=generator).double()) for _ in range(8)]
    for start in range(starts):
        x = image if not start else within(torch.randn(image.shape, generator=generator).double())
        for _ in range(15):
            slope = _slope(network, x, predicted)
            if slope is None or not slope.isfinite().all() or not slope.norm() > 0:
                break
            x = within(x - image - radius * (0.1 if start % 2 else 1.0) * slope / slope.norm())
            found.append(x)
    return found


def _classes(network: nn.Module, x: Tensor) -> Tensor:
    """Logits; one logit z stands for [0, z]."""
    found: Tensor = network(x)
    return F.pad(found, (1, 0)) if tuple(found.shape[1:]) == (1,) else found


def _slope(network: nn.Module, x: Tensor, predicted: int) -> Tensor | None:
    """The gradient of the margin over the nearest other class; None where there is none."""
    x = x.clone().requires_grad_()
    try:
        with torch.enable_grad():
            out = _classes(network, x)
            others = out.scatter(1, torch.tensor([[predicted]]), -math.inf)
            (slope,) = torch.autograd.grad((out[:, predicted] - others.amax(1)).sum(), x)
    except RuntimeError:
        return None
    return slope.detach()
