"""The nearest image with another prediction, exactly: for affine networks and for small ReLU networks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from torch import Tensor, nn

from lipcert.model import Model

Array = NDArray[np.float64]


def affine_distances(model: Model, images: Tensor) -> Tensor:
    """Distances to the nearest tie of an affine network in all of space, shape (N,), for images (N, C, H, W)."""
    rows = torch.autograd.functional.jacobian(lambda x: model(x)[0], images[:1]).flatten(1)
    with torch.no_grad():
        logits = model(images)
    predicted = logits.argmax(1)
    gaps = logits.gather(1, predicted[:, None]) - logits
    distances = gaps / (rows[predicted][:, None] - rows).norm(dim=2)
    return distances.scatter(1, predicted[:, None], math.inf).nan_to_num(nan=math.inf).amin(1)


def nearest_change(model: Model, image: Tensor) -> tuple[float, Tensor]:
    """The nearest image of the box at which another logit reaches the predicted one's.

    Every pattern of the units that are on makes the network affine on a polytope, and there each rival's question is
    min ‖δ‖ subject to Gδ ≥ h. That is solved by non-negative least squares (Lawson and Hanson, "Solving Least Squares
    Problems", 1974, chapter 23, algorithm LDP). All 2^units patterns are tried.

    Args:
        model: Flatten, then Linear layers with ReLU or LeakyReLU between them; in float64.
        image: shape (C, H, W), in [0, 1].

    Returns:
        The distance, ∞ where there is no such image, and the image.
    """
    x = image.flatten().numpy()
    with torch.no_grad():
        predicted = int(model(image[None]).argmax())
    best, where = math.inf, image
    box = np.concatenate([np.eye(len(x)), -np.eye(len(x))])
    box_limits = np.concatenate([-x, x - 1])
    for weight, bias, rows, limits in _regions(model, x):
        for rival in range(len(bias)):
            if rival == predicted:
                continue
            gain = (weight[rival] - weight[predicted])[None]
            needed = np.array([bias[predicted] - bias[rival]])
            delta = _shortest(np.concatenate([rows, gain, box]), np.concatenate([limits, needed, box_limits]))
            if delta is not None and np.linalg.norm(delta) < best:
                best = float(np.linalg.norm(delta))
                where = torch.from_numpy(np.clip(x + delta, 0, 1)).reshape(image.shape)
    return best, where


def _regions(model: Model, x: Array) -> Iterator[tuple[Array, Array, Array, Array]]:
    """For every pattern of units: logits as weight·δ + bias, on the δ with rows·δ ≥ limits."""
    assert isinstance(model.net, nn.Sequential)
    layers = [module for module in model.net if isinstance(module, nn.Linear)]
    slopes = [
        getattr(module, "negative_slope", 0.0) for module in model.net if isinstance(module, (nn.ReLU, nn.LeakyReLU))
    ]
    std = model.std.expand(model.input_size).flatten().double().numpy()
    mean = model.mean.expand(model.input_size).flatten().double().numpy()
    matrices = [layer.weight.detach().numpy() for layer in layers]
    biases = [layer.bias.detach().numpy() for layer in layers]
    units = [len(bias) for bias in biases[:-1]]
    for pattern in product((False, True), repeat=sum(units)):
        on = np.split(np.array(pattern, dtype=bool), np.cumsum(units)[:-1]) if units else []
        weight, bias = np.diag(1 / std), (x - mean) / std
        rows, limits = [np.zeros((0, len(x)))], [np.zeros(0)]
        for matrix, offset, active, slope in zip(matrices, biases, on, slopes, strict=False):
            weight, bias = matrix @ weight, matrix @ bias + offset
            sign = np.where(active, 1.0, -1.0)
            rows.append(sign[:, None] * weight)
            limits.append(-sign * bias)
            scale = np.where(active, 1.0, slope)
            weight, bias = scale[:, None] * weight, scale * bias
        weight, bias = matrices[-1] @ weight, matrices[-1] @ bias + biases[-1]
        yield weight, bias, np.concatenate(rows), np.concatenate(limits)


def _shortest(rows: Array, limits: Array) -> Array | None:
    """The shortest δ with rows·δ ≥ limits; None if there is none."""
    lengths = np.linalg.norm(rows, axis=1)
    if (limits[lengths == 0] > 0).any():
        return None
    rows, limits = rows[lengths > 0], limits[lengths > 0]
    lengths = lengths[lengths > 0]
    system = np.concatenate([(rows / lengths[:, None]).T, (limits / lengths)[None]])
    target = np.zeros(len(system))
    target[-1] = 1.0
    residual = system @ nnls(system, target)[0] - target
    if np.linalg.norm(residual) < 1e-7:
        return None
    return np.asarray(-residual[:-1] / residual[-1])
