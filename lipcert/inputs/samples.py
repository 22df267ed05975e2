"""Images that lipcert draws, to try a model without images of one's own; they have no meaningful labels."""

from __future__ import annotations

import torch
from torch import Tensor

COUNT = 8


def sample_images(channels: int, height: int, width: int, count: int = COUNT) -> Tensor:
    """Images with the spectrum of natural ones: noise whose amplitude falls with frequency, and a few flat shapes."""
    generator = torch.Generator().manual_seed(0)
    frequency = torch.fft.fftfreq(height)[:, None].square() + torch.fft.rfftfreq(width)[None].square()
    amplitude = (frequency + 1 / max(height, width) ** 2).rsqrt()
    noise = torch.randn(count, 1 + channels, height, width, generator=generator)
    noise = torch.fft.irfft2(torch.fft.rfft2(noise) * amplitude, s=(height, width))
    noise = noise / noise.std(dim=(2, 3), keepdim=True)
    images = noise[:, :1] + 0.4 * noise[:, 1:]
    rows, columns = torch.arange(height)[:, None] / height, torch.arange(width)[None] / width
    for image in images:
        for _ in range(4):
            y, x, size, angle, *colour = torch.rand(4 + channels, generator=generator).tolist()
            u = (rows - y) * (1 + angle) + (columns - x) * angle
            v = (columns - x) * (1 + angle) - (rows - y) * angle
            inside = torch.maximum(u.abs(), v.abs()) < 0.05 + 0.2 * size
            image[:, inside] = 0.5 * image[:, inside] + 2 * torch.tensor(colour)[:, None] - 1
    return (127.5 + 60 * images).clamp(0, 255).to(torch.uint8)
