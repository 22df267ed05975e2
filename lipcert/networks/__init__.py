"""Architectures for certified training, in timm's registry: importing this module registers them.

``import lipcert`` sees to that as soon as timm is imported, so ``timm.create_model("liresnet_l6w128")`` works as well
as ``lipcert finetune liresnet_l6w128``.
"""

from lipcert.networks import certvit, lip_convnet, liresnet, liresnet_vit

__all__ = ["certvit", "lip_convnet", "liresnet", "liresnet_vit"]
