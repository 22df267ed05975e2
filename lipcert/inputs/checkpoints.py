"""The certified checkpoints that come with lipcert, by name.

Their table, ``assets/certified.json``, and their model cards are made by ``benchmarks/make_checkpoints.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "assets"
TABLE = ASSETS / "certified.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint and its certified figures.

    ``clean`` and ``certified`` are shares of ``images``, ``attacked`` is the share of ``attacked_images`` that are
    still classified correctly after PGD at ε, ``seconds`` are those to certify one image on one core, ``trained`` are
    the commands that made it, and ``command`` prints the certified share.
    """

    name: str
    file: str
    architecture: str
    parameters: int
    data: str
    images: int
    eps: str
    clean: float
    certified: float
    attacked: float | None
    attacked_images: int
    method: str
    rigor: str
    seconds: float
    trained: tuple[str, ...]
    command: str

    @property
    def path(self) -> Path:
        """Where the file is."""
        return ASSETS / self.file

    @property
    def card(self) -> Path:
        """Where its model card is."""
        return ASSETS / f"{self.name}.md"


@lru_cache(maxsize=1)
def checkpoints() -> tuple[Checkpoint, ...]:
    """All of them, by name."""
    if not TABLE.is_file():
        return ()
    return tuple(Checkpoint(**{**row, "trained": tuple(row["trained"])}) for row in json.loads(TABLE.read_text()))


def path_of(name: str) -> Path | None:
    """The file of the checkpoint of this name, if there is one."""
    return next((one.path for one in checkpoints() if one.name == name), None)
