"""Denoisers for networks that were not trained under noise: ``dct`` and ``natural``, or one of your own."""

from lipcert.denoisers._dct import DCT
from lipcert.denoisers._denoised import NAMES, Denoised, check_noise, denoiser_named, is_named
from lipcert.denoisers._natural import Natural, NaturalNet

__all__: list[str] = []
