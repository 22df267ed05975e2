"""Architectures for certified training. ``import lipcert.networks`` adds them to timm's registry."""

from lipcert.networks import certvit, lip_convnet, lipnext, liresnet, liresnet_vit, stem_vit
