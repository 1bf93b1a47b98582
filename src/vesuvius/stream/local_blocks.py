"""Blocks read in this process (`workers: 0`), with what `ray/blocks.py` offers of those that Ray actors read."""

from __future__ import annotations

from collections.abc import Iterator

from vesuvius.plan.plan import Task
from vesuvius.stream.reading.reader import Block, Reader, ReaderJob
from vesuvius.volumes.store.retry import Outage


class LocalBlocks(Iterator[Block]):
    """Blocks of consecutive tasks.  Iterated on one thread; the methods are called from another."""

    tasks_left = 0
    readers_alive = 0

    def __init__(self, job: ReaderJob, first: int, stop: int) -> None:
        self._reader = Reader(job, ring=job.plan.regions_in_flight + 1)  # the cutter holds those in flight
        self._blocks = self._read(job.tasks(first, stop))

    def _read(self, tasks: Iterator[Task]) -> Iterator[Block]:
        task = next(tasks, None)
        while task is not None:
            ahead = next(tasks, None)
            yield from self._reader.blocks(task, ahead)
            task = ahead

    def __next__(self) -> Block:
        return next(self._blocks)

    @property
    def outages(self) -> list[Outage]:
        """Of the stores that do not answer at the moment."""
        return self._reader.outages

    def interrupt(self) -> None:
        """Make a waiting `next` end soon, with any error."""
        self._reader.close()

    def close(self) -> None:
        """Nothing more to end once nobody iterates."""
