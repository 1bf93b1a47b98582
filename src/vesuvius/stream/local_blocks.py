"""Blocks of consecutive tasks, from wherever they are read; here in this process, in `ray/blocks.py` by Ray workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from vesuvius.plan.plan import Task
from vesuvius.stream.reader import Block, Reader, ReaderJob
from vesuvius.volumes.retry import Outage


class BlockSource(Iterator[Block], Protocol):
    """Blocks of consecutive tasks, from wherever they are read.

    Iterated on one thread; the rest is called from another.
    """

    @property
    def outages(self) -> list[Outage]:
        """Of the stores that are waited for at the moment."""

    def interrupt(self) -> None:
        """Have a `next` that is waiting end soon, with whatever error."""

    def close(self) -> None:
        """End what reads, once nobody iterates any more."""


class LocalBlocks(Iterator[Block]):
    """Blocks that are read in this process."""

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
