"""A denoiser without training: discrete cosine transforms of overlapping blocks with a hard threshold."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.denoisers._denoiser import Denoiser
from lipcert.errors import InputError

_SIDE, _STRIDE = 8, 2
# The threshold in standard deviations. Lower ones keep more noise and more of what a classifier looks at.
_THRESHOLD = 2.3
# Images at once: on a CPU their coefficients stay in its cache, on a GPU they fit into memory.
_AT_ONCE = {"cpu": 1, "cuda": 256}


class DCT(Denoiser):
    """Overlapping 8×8 blocks of decorrelated colours, in which small coefficients of the cosine transform become 0.

    The transforms are orthonormal, so that noise of standard deviation σ has the same in each coefficient. Coefficients
    below 2.3 σ become 0, but for the mean of a block. Each pixel is the average over the 16 blocks that cover it, on a
    grid of stride 2; the weight of a block is 1 over its number of coefficients that are not 0.

    Source: Yu and Sapiro, "DCT image denoising: a simple and effective image denoising algorithm", IPOL 2011; weights
        as in Guleryuz, "Weighted averaging for denoising with overcomplete dictionaries", 2007.
    """

    name = "dct"
    kernels: Tensor
    colours: Tensor

    def __init__(self, input_size: tuple[int, ...]):
        super().__init__()
        channels, height, width = input_size
        if min(height, width) < _SIDE:
            raise InputError(f"the denoiser dct takes images of at least {_SIDE} × {_SIDE} pixels, not {input_size}")
        rows = _cosines(_SIDE)
        blocks = torch.einsum("ki,lj->klij", rows, rows).reshape(_SIDE**2, 1, _SIDE, _SIDE)
        # Pixels are unshuffled by the stride, which makes the transform a convolution of stride 1 with 4 channels.
        self.register_buffer("kernels", F.pixel_unshuffle(blocks, _STRIDE).float())
        self.register_buffer("colours", (_cosines(3) if channels == 3 else torch.eye(channels)).float())

    def forward(self, images: Tensor) -> Tensor:
        """Denoised images, shape (N, C, H, W), which may leave [0, 1] a little."""
        threshold = _THRESHOLD * self.sigma
        parts = images.split(_AT_ONCE.get(images.device.type, 1))
        return torch.cat([self._denoised(part, threshold) for part in parts])

    def _denoised(self, images: Tensor, threshold: float) -> Tensor:
        count, channels, height, width = images.shape
        kernels = self.kernels.contiguous(memory_format=torch.channels_last)
        planes = torch.einsum("kc,nchw->nkhw", self.colours, images).reshape(-1, 1, height, width)
        # Every pixel lies in the same number of blocks; an odd side gets one more.
        edge = _SIDE - _STRIDE
        planes = F.pad(planes, (edge, edge + width % _STRIDE, edge, edge + height % _STRIDE), mode="reflect")
        phases = F.pixel_unshuffle(planes, _STRIDE).contiguous(memory_format=torch.channels_last)
        coefficients = F.conv2d(phases, kernels)
        thresholded = F.hardshrink(coefficients, threshold)
        thresholded[:, 0] = coefficients[:, 0]  # the mean
        number = F.conv2d((thresholded != 0).to(thresholded.dtype), thresholded.new_ones(1, _SIDE**2, 1, 1))
        weights = number.clamp_(min=1).reciprocal_()
        # The transform is orthonormal, so its inverse is the adjoint: flipped kernels with in- and outputs exchanged.
        sums = F.conv2d(thresholded.mul_(weights), kernels.flip(2, 3).transpose(0, 1))
        reach = _SIDE // _STRIDE
        # An average times its number of terms: the sum of the weights of all blocks that cover a pixel.
        total = F.avg_pool2d(weights, reach, 1).mul_(reach**2)
        planes = F.pixel_shuffle(sums / total, _STRIDE)[..., :height, :width]
        return torch.einsum("kc,nkhw->nchw", self.colours, planes.reshape(count, channels, height, width))


def _cosines(side: int) -> Tensor:
    """The orthonormal discrete cosine transform as a matrix, float64, shape (side, side)."""
    number = torch.arange(side, dtype=torch.float64)
    rows = torch.cos(math.pi * (number + 0.5) * number[:, None] / side) * math.sqrt(2 / side)
    rows[0] /= math.sqrt(2)
    return rows
