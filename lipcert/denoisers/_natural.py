"""A small denoising network for natural images, whose weights come with lipcert."""

from __future__ import annotations

from pathlib import Path

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipcert.denoisers._denoiser import Denoiser
from lipcert.errors import InputError, first_line

WEIGHTS = Path(__file__).parents[1] / "assets" / "natural_denoiser.safetensors"

# Channels at half, a quarter and an eighth of the resolution: multiples of 32, which processors multiply fastest.
_WIDTHS = (32, 96, 160)
# Residual blocks at each of them, on the way down and on the way up; the last level has them once.
_BLOCKS = 2
_COLOURS = 3
# The network halves the resolution three times.
_STEP = 8


class _Residual(nn.Module):
    """x + conv(relu(conv(x))), 3×3."""

    def __init__(self, width: int):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(x)))


def _blocks(width: int) -> nn.Sequential:
    return nn.Sequential(*(_Residual(width) for _ in range(_BLOCKS)))


class NaturalNet(nn.Module):
    """A U-shaped network that is told σ and returns its estimate of the noise.

    The pixels are unshuffled by 2, so that the first level works at half the resolution, and a plane that holds σ
    is added, as in FFDNet (Zhang, Zuo and Zhang 2018). There are no normalisation layers: each image is
    treated alone.
    """

    def __init__(self) -> None:
        super().__init__()
        wide, wider, widest = _WIDTHS
        planes = 4 * _COLOURS
        self.head = nn.Conv2d(planes + 1, wide, 3, padding=1)
        self.down_half = _blocks(wide)
        self.to_quarter = nn.Conv2d(wide, wider, 2, 2)
        self.down_quarter = _blocks(wider)
        self.to_eighth = nn.Conv2d(wider, widest, 2, 2)
        self.eighth = _blocks(widest)
        self.from_eighth = nn.Conv2d(widest, 4 * wider, 1)
        self.up_quarter = _blocks(wider)
        self.from_quarter = nn.Conv2d(wider, 4 * wide, 1)
        self.up_half = _blocks(wide)
        self.tail = nn.Conv2d(wide, planes, 3, padding=1)

    def forward(self, images: Tensor, sigma: Tensor) -> Tensor:
        """The noise in images."""
        planes = F.pixel_unshuffle(images, 2)
        level = sigma.view(-1, 1, 1, 1).expand(len(planes), 1, *planes.shape[2:])
        half = self.down_half(self.head(torch.cat([planes, level.to(planes.dtype)], 1)))
        quarter = self.down_quarter(self.to_quarter(half))
        eighth = self.eighth(self.to_eighth(quarter))
        quarter = self.up_quarter(quarter + F.pixel_shuffle(self.from_eighth(eighth), 2))
        half = self.up_half(half + F.pixel_shuffle(self.from_quarter(quarter), 2))
        noise: Tensor = F.pixel_shuffle(self.tail(half), 2)
        return noise


class Natural(Denoiser):
    """:class:`NaturalNet` with the weights that come with lipcert, for images of any size.

    ``python -m benchmarks.train_denoiser`` made the weights: it says on which images, under which noise, and for which
    classifier's decision.
    """

    name = "natural"

    def __init__(self, input_size: tuple[int, ...]):
        super().__init__()
        channels, *sides = input_size
        if channels != _COLOURS or min(sides) < _STEP:
            raise InputError(
                f"the denoiser natural takes images of 3 colours, at least {_STEP} × {_STEP} pixels, not {input_size}"
            )
        self.net = NaturalNet()
        try:
            self.net.load_state_dict(safetensors.torch.load_file(WEIGHTS))
        except (OSError, safetensors.SafetensorError, RuntimeError) as error:
            raise InputError(
                f"the weights of the denoiser natural cannot be read ({first_line(error)}); install lipcert again"
            ) from error

    def forward(self, images: Tensor) -> Tensor:
        """Denoised images, shape (N, 3, H, W), which may leave [0, 1] a little."""
        height, width = images.shape[2:]
        below, right = -height % _STEP, -width % _STEP
        padded = F.pad(images, (0, right, 0, below), mode="reflect") if below or right else images
        noise = self.net(padded, torch.tensor([self.sigma], device=images.device))
        return images - noise[..., :height, :width]
