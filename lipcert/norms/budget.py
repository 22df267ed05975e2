"""The failure probability δ of a certificate: how it is split, what is spent, and the random vectors that it pays for.

A probabilistic norm is computed from a random start vector. It is too small with probability at most the charge for
that vector. The certificate of an image consists of many such norms. This module ensures that the certificate is wrong
with probability at most the sum of the charges, for the following reasons.

**Union bound.** Let k = 1, 2, … be the norms that the certificate of one image requests, X_k the random vector of the
k-th, A_k its operator. If A_k is independent of X_k, P(norm k is too small) ≤ charge_k. The certificate is wrong only
if one of its norms is too small, so with probability at most Σ_k charge_k. These events may depend on each other:
several operators may even share one vector, if none of them depends on it and each is charged.

**Adaptivity.** Some operators depend on earlier norms, through weights or the next radius to try.
Whether a norm is requested at all can depend on them too. Let F be everything that was drawn for other keys. X_k is
independent of F, and A_k and the decision to request norm k are functions of F. So P(norm k is requested and too
small) = E[1{requested} P(too small | F)] ≤ charge_k. This needs a vector that no other operator of the image depends
on. Hence every norm has its own key, (purpose, operations, round, …), and a key is issued once per image: a second
request raises :class:`~lipcert.errors.LedgerError`.

**Spent probability.** The set S of requested keys can depend on the outcome. For every set S, P(wrong, and S was
requested) ≤ Σ_{k ∈ S} charge_k, and a row states that sum. It stays at most the δ of the image, because the ledger
refuses a charge that would exceed it.

**Images share vectors.** δ is a probability for each image, not for all. So a key has the same vector for every image,
which makes results independent of the batch. A norm that is the same for all images is computed once and charged to
each of them. The expected number of wrong certificates is at most the sum of the rows' failure probabilities. Nothing
is claimed about the joint distribution of failures.

**The vectors.** The key and the hash of the network's weights are hashed to 128 bits, which are the key of a Philox
generator (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Its streams differ
from key to key; they do not depend on the device, on threads, or on earlier draws. (torch's CPU generator keeps 32 bits
of a seed.) We assume that the streams behave like independent random numbers. Nobody can construct weights for
given vectors: each change of a weight draws all vectors anew, so a search for a network with a wrong certificate takes
about 1/δ tries. Constants in a network's code are not hashed, because some of them are computed, and
round differently from machine to machine. We assume that they and the image were not constructed from the vectors.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipcert.errors import LedgerError


@dataclass(frozen=True)
class Draw:
    """Random vectors for one purpose, and their charge.

    Attributes:
        delta: the charge: the largest probability, for each image, that the bound from these vectors fails.
        key: 128 bits that identify the vectors.
    """

    delta: float
    key: bytes

    def normal(self, rows: int, size: int) -> Tensor:
        """Standard normal numbers, float64, shape (rows, size), on the CPU; the same in every call."""
        bits = np.random.Philox(key=int.from_bytes(self.key, "little"))
        return torch.from_numpy(np.random.Generator(bits).standard_normal((rows, size)))


@dataclass(frozen=True)
class Budget:
    """A failure probability that may be spent on the certificate of an image, or on a part of it.

    This is the only type that divides δ. The certifier splits it between methods, a method between its variants, and
    each of these between its norms; whatever is spent is charged to a :class:`Ledger`.

    Attributes:
        delta: the largest failure probability; 0 allows no random vectors.
    """

    delta: float

    def split(self, parts: int) -> Budget:
        """One of some equal parts, rounded down: together they are at most the whole."""
        return Budget(self.delta / max(1, parts) * (1 - 1e-9))

    def ledger(self, images: int, seed: int | tuple[int, str] = 0) -> Ledger:
        """A ledger for new images that may spend all of it."""
        return Ledger(self.delta, images, seed)


class Ledger:
    """The failure probability of N images, and the keys issued for each."""

    def __init__(self, delta: float, images: int = 1, seed: int | tuple[int, str] = 0):
        self.delta = delta
        self._seed = seed
        self._purpose: tuple[str | int, ...] = ()
        self._rows = torch.arange(images)
        self._spent = torch.zeros(images, dtype=torch.float64)
        self._issued: dict[bytes, Tensor] = {}

    @property
    def spent(self) -> Tensor:
        """The sum of the charges so far for each image, float64, shape (N,)."""
        return self._spent[self._rows]

    def only(self, index: Tensor) -> Ledger:
        """A view of the same ledger for the images with the given indices."""
        return self._view(self._rows[index.cpu()], self._purpose)

    def part(self, *purpose: str | int) -> Ledger:
        """A view of the same ledger for one purpose, whose keys differ from those of other purposes."""
        return self._view(self._rows, (*self._purpose, *purpose))

    def _view(self, rows: Tensor, purpose: tuple[str | int, ...]) -> Ledger:
        other = object.__new__(Ledger)
        other.__dict__.update(self.__dict__, _rows=rows, _purpose=purpose)
        return other

    def draw(self, *key: str | int, delta: float) -> Draw:
        """Issues new vectors to all these images and charges each with a failure probability."""
        words = (*self._purpose, *key)
        bits = hashlib.blake2b(repr((self._seed, words)).encode(), digest_size=16).digest()
        issued = self._issued.setdefault(bits, torch.zeros(len(self._spent), dtype=torch.bool))
        if bool(issued[self._rows].any()) or len(self._rows.unique()) < len(self._rows):
            raise LedgerError(f"the start vectors {words} were requested twice")
        if bool((self.spent + delta > self.delta).any()):
            raise LedgerError(f"the start vectors {words} would raise the failure probability above {self.delta:g}")
        issued[self._rows] = True
        self._spent[self._rows] += delta
        return Draw(delta, bits)


class Rigor(str):
    """The guarantee of a certificate, as rows state it.

    Attributes:
        delta: the failure probability; 0 if the certificate is deterministic.
    """

    delta: float

    def __new__(cls, delta: float, most: float = math.inf) -> Rigor:
        """The guarantee of a certificate that fails with at most this probability."""
        rounded = Context(prec=3, rounding=ROUND_CEILING).create_decimal(Decimal(delta))
        value = min(float(rounded), most) if delta else 0.0
        text = super().__new__(cls, f"probabilistic({value!r})" if value else "deterministic")
        text.delta = value
        return text

    @classmethod
    def parse(cls, text: str) -> Rigor | None:
        """The guarantee that a row of a file states; None if the text is not one."""
        form = re.fullmatch(r"deterministic|probabilistic\((?P<delta>\d+(\.\d+)?(e[+-]?\d+)?)\)", text)
        if form is None:
            return None
        rigor = super().__new__(cls, text)
        rigor.delta = float(form["delta"] or 0)
        return rigor

    def __reduce__(self) -> tuple[Any, ...]:
        return Rigor.parse, (str(self),)  # from the text: rounding δ up again might raise it
