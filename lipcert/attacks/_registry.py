"""The attacks by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from lipcert.attacks._autoattack import AutoAttack
from lipcert.attacks._found import Adversarial
from lipcert.attacks._pgd import PGD
from lipcert.errors import InputError


class Attack(Protocol):
    """An attack at one ε; every result records its name, version and settings."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def settings(self) -> dict[str, Any]: ...

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> Adversarial: ...


ATTACKS: dict[str, Callable[[], Attack]] = {
    "pgd": PGD,
    # 100 steps of ε/4: Huang et al., NeurIPS 2021 (arXiv 2111.01395), section 4
    "pgd-100": partial(PGD, 100, 1, step=0.25),
    "autoattack": AutoAttack,
}


def attack_named(name: str) -> Attack:
    """The attack of this name."""
    if name not in ATTACKS:
        raise InputError(f"there is no attack {name!r}; choose one of {', '.join(ATTACKS)}")
    return ATTACKS[name]()
