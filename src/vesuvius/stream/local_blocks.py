"""Blocks read in this process (`workers: 0`), and what they share with those that Ray actors read (`ray/blocks.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from vesuvius.plan.plan import Task
from vesuvius.stream.reading.reader import Block, Reader, ReaderJob
from vesuvius.volumes.store.retry import Outage


class BlockSource(Iterator[Block], Protocol):
    """Blocks of consecutive tasks.  Iterated on one thread; the methods are called from another."""

    @property
    def outages(self) -> list[Outage]:
        """Of the stores that readers wait for at the moment."""

    def interrupt(self) -> None:
        """Make a waiting `next` end soon, with any error."""

    def close(self) -> None:
        """End the readers, once nobody iterates any more."""


class LocalBlocks(Iterator[Block]):
    """Blocks read in this process."""

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
        return self._reader.outages

    def interrupt(self) -> None:
        self._reader.close()

    def close(self) -> None:
        self._reader.close()
