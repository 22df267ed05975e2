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
    """A checkpoint and what is certified of it.

    Attributes:
        name: as ``lipcert.load`` takes it.
        file: its file among the package's assets.
        architecture: the name that timm builds it by.
        parameters: number of parameters.
        data: what the images are.
        images: how many of them were certified.
        eps: ε in ℓ2 on pixels in [0, 1], as it was typed.
        clean: share of them that are classified right.
        certified: share of them that are classified right with a certified radius above ε.
        attacked: share of ``attacked_images`` images that are still right after PGD at ε; None where none was.
        attacked_images: how many images were attacked.
        method: the certificate.
        rigor: what it promises, see :class:`lipcert.Rigor`.
        seconds: to certify one image on one core, without the start of the process.
        trained: how it was made, a command a line.
        command: what prints the certified share.
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
