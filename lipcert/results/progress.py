"""Certifies a data set in blocks, which processes can share, and continues an interrupted run.

The blocks of a data set are the same in every run: consecutive images in the run's order. So an image is always
computed in the same batch. Rounding depends on the batch; with fixed blocks neither an interruption nor the number of
processes changes a radius. The first blocks are small, so that the first rows appear early. No block holds more than
a sixth of the images, or half of those that remain, so that processes end at about the same time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipcert.errors import InputError, Interrupted, counted
from lipcert.inputs.data import Batch, Images
from lipcert.inputs.processes import Processes
from lipcert.results._files import ResultFile, check_images, shard_path, shards_of
from lipcert.results._parallel import certified, workers_for
from lipcert.results._reading import read_rows, summary_path
from lipcert.results._rows import rows
from lipcert.results._statistics import Tally
from lipcert.smoothing import Smoothing

if TYPE_CHECKING:
    from lipcert.certifier import Certifier

Progress = Callable[[int, "int | None"], None]

# A block holds at most 1/_BLOCKS of the images.
_BLOCKS = 6


def blocks_of(order: Sequence[int], certifier: Certifier | Smoothing) -> list[Sequence[int]]:
    """The batches of images in which a run computes: from the least worthwhile size on, each four times the last.

    They have at most ``certifier.together`` images, and fewer at the end.
    """
    blocks: list[Sequence[int]] = []
    least = getattr(certifier, "least", 1)
    left, size, largest = len(order), least, min(certifier.together, max(least, -(-len(order) // _BLOCKS)))
    while left:
        size = min(size, largest, left if left <= least else -(-left // 2))
        blocks.append(order[len(order) - left :][:size])
        left, size = left - size, 4 * size
    return blocks


class Remaining:
    """The images without a row, for one of several processes.

    Attributes:
        pace: seconds for an image, from those before; for smoothing, with all draws that it may take.
        left: the number of images in the block that did not fit before the deadline; 0 if there was none.
    """

    def __init__(
        self,
        certifier: Certifier | Smoothing,
        images: Images,
        done: Collection[int] = (),
        part: int = 0,
        parts: int = 1,
        workers: int | None = 0,
        deadline: float = math.inf,
        ahead: Sequence[ProcessPoolExecutor] = (),
    ):
        self.deadline, self.ahead = deadline, ahead
        self.pace: float | None = None
        self.left = 0
        self.workers = workers_for(certifier, workers)
        self.certifier = certifier
        self.images = images
        self.done = frozenset(done)
        self.divisible = isinstance(certifier, Smoothing)  # whose rows do not depend on the batch
        mine = blocks_of(images.order, certifier)[part::parts]
        if self.divisible:
            mine = [[index for index in block if index not in self.done] for block in mine]
        self.blocks = [block for block in mine if not self.done.issuperset(block)]
        self.length = sum(index not in self.done for block in self.blocks for index in block)

    def __iter__(self) -> Generator[dict[str, Any], None, None]:
        """Certifies block after block and yields the rows of images that had none."""
        found = certified(self.certifier, self._blocks(), self.workers, self.length, self.ahead)
        for batch, certificates, seconds in found:
            self.pace = seconds.wall / len(batch)
            if isinstance(self.certifier, Smoothing):
                self.pace = self.certifier.longest
            for row in rows(batch, certificates, seconds.cpu):
                if row["index"] not in self.done:
                    yield row

    def _blocks(self) -> Iterator[Batch]:
        # These batches are exactly the blocks that remain.
        remaining = frozenset(index for block in self.blocks for index in block)
        for batch in self.images.batches([len(block) for block in self.blocks], only=remaining):
            while len(batch):
                if not (count := self._fitting(len(batch))):
                    self.left = len(batch)
                    return
                part, batch = batch.split(count)
                yield part

    def _fitting(self, count: int) -> int:
        """The number of the next images of a block to begin: those that end before the deadline, at least the first.

        Smoothing assumes all draws for each: whether an image has a row then does not depend on how many it needs.
        """
        if self.deadline == math.inf:
            return count
        if self.pace is None:
            return 1 if self.divisible else count
        fitting = max(0, int((self.deadline - time.monotonic()) / self.pace))
        return min(count, fitting) if self.divisible or fitting >= count else 0


def certify_in_memory(
    certifier: Certifier | Smoothing,
    images: Images,
    progress: Progress | None = None,
    workers: int | None = 0,
    deadline: float = math.inf,
    ahead: Sequence[ProcessPoolExecutor] = (),
) -> Tally:
    """Certifies all images and returns only the counts and rows in memory."""
    tally, started = Tally(), time.monotonic()
    try:
        run = Remaining(certifier, images, workers=workers, deadline=deadline, ahead=ahead)
        _collect(run, tally.add, progress)
    except KeyboardInterrupt as error:
        done = counted(len(tally), "image")
        raise Interrupted(f"interrupted after {done}; nothing is kept with --no-out") from error
    tally.seconds, tally.pace, tally.left = time.monotonic() - started, run.pace, run.left
    return tally


def certify_to_file(
    certifier: Certifier | Smoothing,
    images: Images,
    description: Mapping[str, Any],
    out: Path,
    *,
    part: int = 0,
    parts: int = 1,
    processes: Processes | None = None,
    started: Callable[[int], None] | None = None,
    progress: Progress | None = None,
    workers: int | None = 0,
    deadline: float = math.inf,
    ahead: Sequence[ProcessPoolExecutor] = (),
) -> Tally:
    """Certifies the images that have no row yet, in this file or in a shard's file, and writes their rows.

    Images with fewer draws than ``samples`` and without a verdict are certified again. After the first ones, no image
    begins that may end after the deadline, by the monotonic clock.

    Each part of a run writes its own file. A run in one part first absorbs the rows of shard files in the same folder.
    Processes of torchrun merge their rows at the end, in the order of the data set.
    """
    processes = processes or Processes()
    shard = shard_path(out, part, parts)
    with ResultFile(shard, description, images if parts == 1 else None) as file:
        elsewhere = [row for path in (out, *shards_of(out)) if path != shard for row in read_rows(path, description)]
        # The process that merges the rows compares those of other shards with the images.
        compared = [*([] if parts == 1 else file.tally.rows), *(elsewhere if parts == 1 or processes.first else ())]
        if changed := check_images(compared, images, out):
            raise InputError(f"{out} has parts with rows about other images ({len(changed)}); give another --out")
        if parts == 1:
            file.absorb(elsewhere, images.order)
        undecided: set[int] = set()
        if isinstance(certifier, Smoothing):
            undecided = {row["index"] for row in file.tally.rows if certifier.undecided(row)}
        finished = processes.gather({*file.done, *(row["index"] for row in elsewhere)})
        done = frozenset().union(*finished) - undecided
        if started is not None:
            started(len(done))
        before = len(file.tally)
        try:
            remaining = Remaining(certifier, images, done, part, parts, workers, deadline, ahead)
            _collect(remaining, file.append, progress)
            file.unfinished |= bool(remaining.left)
            file.tally.pace, file.tally.left = remaining.pace, remaining.left
        except KeyboardInterrupt as error:
            new = len(file.tally) - before
            raise Interrupted(
                f"interrupted after {counted(new, 'image')}; {shard} keeps {counted(len(file.tally), 'row')}, "
                "and the same command continues from there"
            ) from error
    if processes.count == 1:
        return file.tally
    together = _put_together(out, shard, description, images, processes, file.tally.seconds)
    return file.tally if together is None else together


def _collect(run: Remaining, write: Callable[[dict[str, Any]], None], progress: Progress | None) -> None:
    if progress is not None:
        progress(0, run.length)
    with closing(iter(run)) as found:  # workers end where writing is interrupted
        for count, row in enumerate(found, 1):
            write(row)
            if progress is not None:
                progress(count, run.length)


def _put_together(
    out: Path, shard: Path, description: Mapping[str, Any], images: Images, processes: Processes, seconds: float | None
) -> Tally | None:
    """The first process writes the rows of all processes; then each process removes its own file."""
    local = [row for path in shards_of(out) for row in read_rows(path, description)]
    everything = processes.gather(local)
    tally = None
    if processes.first:
        with ResultFile(out, description) as file:
            file.absorb([row for part in everything for row in part], images.order, seconds)
        tally = file.tally
    processes.gather(None)  # a barrier: no process removes its file before the rows are written
    shard.unlink()
    summary_path(shard).unlink()
    return tally
