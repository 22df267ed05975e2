"""Architectures for certified training. Importing this module adds them to timm's registry.

``import lipcert`` does so as soon as timm is imported, so that ``timm.create_model("liresnet_l6w128")`` works.
"""

from lipcert.networks import certvit, lip_convnet, lipnext, liresnet, liresnet_vit, stem_vit
