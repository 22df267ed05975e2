"""The failure probability of a certificate: who may spend it, on which random vectors, and what has been spent.

A probabilistic norm is computed from a random start vector, and is too small with probability at most what was charged
for that vector. A certificate of an image is made of many such norms. Why it is wrong with probability at most the sum
of its charges, and what the ledger has to see to for that:

**Union bound.** Let k = 1, 2, … be the norms that the certificate of one image asks for, X_k the random vector of the
k-th, A_k its operator. If A_k is independent of X_k, P(norm k is too small) ≤ charge_k. The certificate is wrong only
if one of its norms is too small, so with probability at most Σ_k charge_k. Nothing is assumed about how these events
depend on each other: bounds on several operators may even start from one vector, if none of the operators depends on it
and each is charged.

**Adaptivity.** Some operators depend on earlier norms, by weights, by the widths of secants, by the radius that is
tried next; and so does whether a norm is asked for at all. Let F be everything that was drawn for other keys. X_k is
independent of F, and A_k and the choice to ask are functions of F. So P(norm k is asked for and too small) =
E[1{asked} P(too small | F)] ≤ charge_k. This needs a vector that no other operator of the image has met. Hence every
norm has a key of its own, (purpose, operations, round, …), and a key is given once for an image: to ask again raises
:class:`~lipcert.errors.LedgerError`.

**What was spent.** Which keys S are asked for can depend on the outcome. For every set S, P(wrong, and S was asked for)
≤ Σ_{k ∈ S} charge_k, and that sum is what a row states. It stays below the δ of the image, as the ledger refuses a
charge that would pass it.

**Images share vectors.** δ is a probability for each image, not for all. So a key has the same vector for every image,
which makes results independent of the batch. A norm that is the same for all images is computed once and charged to
each of them. The expected number of wrong certificates is at most the sum of what the rows state; how images fail
together is left open.

**The vectors.** The key is hashed to 128 bits, and these are the key of a Philox generator (Salmon, Moraes, Dror and
Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Its streams differ from key to key; they do not depend on
the device, on threads, or on what was drawn before. (torch's CPU generator keeps 32 bits of a seed.) Assumed is that
the streams behave like independent random numbers, and that nobody made the network or the image to meet them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal

import numpy as np
import torch
from torch import Tensor

from lipcert.errors import LedgerError


@dataclass(frozen=True)
class Draw:
    """Random vectors for one purpose, and what is charged for them.

    Attributes:
        delta: the probability, for each image, that what is made of the vectors may fail with.
        key: 128 bits that tell the vectors from all others.
    """

    delta: float
    key: bytes

    def normal(self, rows: int, size: int) -> Tensor:
        """Standard normal numbers, float64, shape (rows, size), on the CPU; the same in every call."""
        bits = np.random.Philox(key=int.from_bytes(self.key, "little"))
        return torch.from_numpy(np.random.Generator(bits).standard_normal((rows, size)))


class Ledger:
    """The failure probability of N images, and the keys that have been given for each.

    Args:
        delta: δ, what may be spent for each image; 0 where nothing may be random.
        images: N.
        seed: another one gives other vectors.
    """

    def __init__(self, delta: float, images: int = 1, seed: int = 0):
        self.delta = delta
        self._seed = seed
        self._purpose: tuple[str | int, ...] = ()
        self._rows = torch.arange(images)
        self._spent = torch.zeros(images, dtype=torch.float64)
        self._given: dict[bytes, Tensor] = {}

    @property
    def spent(self) -> Tensor:
        """What has been charged so far for each image, float64, shape (N,)."""
        return self._spent[self._rows]

    def only(self, index: Tensor) -> Ledger:
        """The same book for some of the images, given by their numbers."""
        return self._view(self._rows[index.cpu()], self._purpose)

    def part(self, *purpose: str | int) -> Ledger:
        """The same book for one purpose: its keys are told from those of other purposes."""
        return self._view(self._rows, (*self._purpose, *purpose))

    def _view(self, rows: Tensor, purpose: tuple[str | int, ...]) -> Ledger:
        other = object.__new__(Ledger)
        other.__dict__.update(self.__dict__, _rows=rows, _purpose=purpose)
        return other

    def draw(self, *key: str | int, delta: float) -> Draw:
        """Vectors that none of these images has met, charged with a failure probability.

        Raises:
            LedgerError: the key was given before for one of the images, or the charge is more than is left.
        """
        words = (*self._purpose, *key)
        bits = hashlib.blake2b(repr((self._seed, words)).encode(), digest_size=16).digest()
        given = self._given.setdefault(bits, torch.zeros(len(self._spent), dtype=torch.bool))
        if bool(given[self._rows].any()) or len(self._rows.unique()) < len(self._rows):
            raise LedgerError(f"the start vectors {words} were asked for twice")
        if bool((self.spent + delta > self.delta).any()):
            raise LedgerError(f"the start vectors {words} would take the failure probability above {self.delta:g}")
        given[self._rows] = True
        self._spent[self._rows] += delta
        return Draw(delta, bits)


def part_of(delta: float, count: int) -> float:
    """An equal part of δ for each of so many draws, rounded down so that their sum stays below δ."""
    return delta / max(1, count) * (1 - 1e-9)


def rigor_of(spent: float, delta: float) -> str:
    """``deterministic``, or ``probabilistic(…)`` with what was spent of δ, rounded up to three digits."""
    if not spent:
        return "deterministic"
    up = Context(prec=3, rounding=ROUND_CEILING).create_decimal(Decimal(spent))
    return f"probabilistic({min(float(up), delta)!r})"
