"""Attacks search for perturbations that change a prediction, and so give upper bounds on robust accuracy.

>>> found = lipcert.attacks.pgd(model, images, labels, eps=36 / 255)
>>> found.broken, found.distance, found.images
"""

from lipcert.attacks._autoattack import AutoAttack
from lipcert.attacks._found import Adversarial, project
from lipcert.attacks._pgd import PGD, pgd, smallest
from lipcert.attacks._registry import ATTACKS, Attack, attack_named

__all__ = ["Adversarial", "AutoAttack", "PGD", "pgd"]
