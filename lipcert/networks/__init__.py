"""Architectures for certified training. Importing this module adds them to timm's registry.

``import lipcert`` arranges that this happens when timm is imported. So ``timm.create_model("liresnet_l6w128")`` works
as well as ``lipcert finetune liresnet_l6w128``.
"""

from lipcert.networks import certvit, lip_convnet, liresnet, liresnet_vit, stem_vit

__all__ = ["certvit", "lip_convnet", "liresnet", "liresnet_vit", "stem_vit"]
