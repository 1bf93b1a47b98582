"""The cutter: each patch comes with its sample, and a lost, repeated or moved block is an error, never a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stream.test_stream import make_job, open_stream
from vesuvius.stream.cutter import Cutter, Patch, StreamOrderError, WaitTime
from vesuvius.stream.reading.reader import Block, Reader

Change = Callable[[list[Block]], list[Block]]


def cut(volume: Path, change: Change) -> list[Patch]:
    job = make_job(volume, regions_in_flight=8)
    reader = Reader(job, ring=2)
    blocks = [block.copy() for task in job.tasks(0, 96) for block in reader.blocks(task)]
    reader.close()
    return list(Cutter(job, iter(change(blocks)), lambda report: None, WaitTime(), 0, 96).patches())


@pytest.mark.parametrize(
    "change",
    [
        lambda blocks: [*blocks[:9], *blocks[10:]],
        lambda blocks: [*blocks[:9], blocks[8], *blocks[9:]],
        lambda blocks: [*blocks[:9], blocks[10], blocks[9], *blocks[11:]],
        lambda blocks: blocks[:9],
    ],
    ids=["lost", "repeated", "moved", "cut short"],
)
def test_blocks_out_of_order_are_refused(volume: Path, change: Change) -> None:
    assert len(cut(volume, lambda blocks: blocks)) == 96
    with pytest.raises(StreamOrderError, match="report this as a bug"):
        cut(volume, change)


def test_a_sample_travels_with_its_voxels_and_is_that_of_the_plan(volume: Path) -> None:
    job = make_job(volume)
    with open_stream(job, batch_size=6) as stream:
        samples = [sample for batch in itertools.islice(stream, 8) for sample in batch.samples]
    assert samples == [job.plan.sample(index) for index in range(48)]
