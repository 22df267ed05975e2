"""The attacks that can be asked for by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from lipcert.attacks._autoattack import AutoAttack
from lipcert.attacks._found import Adversarial
from lipcert.attacks._pgd import PGD
from lipcert.errors import InputError


class Attack(Protocol):
    """An attack at one ε; its name, version and settings stand in every result."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def settings(self) -> dict[str, Any]: ...

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> Adversarial: ...


ATTACKS: dict[str, Callable[[], Attack]] = {"pgd": PGD, "autoattack": AutoAttack}


def attack_named(attack: str | Attack | None) -> Attack | None:
    """The attack that a name stands for; attacks and None are returned as they are.

    Raises:
        InputError: there is no such attack, or the package that it needs is not installed.
    """
    if not isinstance(attack, str):
        return attack
    if attack not in ATTACKS:
        raise InputError(f"there is no attack {attack!r}; choose one of {', '.join(ATTACKS)}")
    return ATTACKS[attack]()


def identity(attack: Attack | None) -> dict[str, Any] | None:
    """Name, version and settings, as values that JSON can hold."""
    return None if attack is None else {"name": attack.name, "version": attack.version, "settings": attack.settings}
