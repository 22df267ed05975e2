"""Architectures for certified training. Importing this module adds them to timm's registry.

The commands and :func:`lipcert.load` import it themselves; before ``timm.create_model("liresnet_l6w128")`` write
``import lipcert.networks``.
"""

from lipcert.networks import certvit, lip_convnet, lipnext, liresnet, liresnet_vit, stem_vit
