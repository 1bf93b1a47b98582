"""Which region takes the place of a damaged one depends on the bytes of the volume alone: not on who reads it, on what
that reader has met before, or on where a run begins."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec

from tests.conftest import textured, write_array
from tests.stream.test_stream import collect, open_stream
from vesuvius.config import ArrayConfig, DataConfig, ValidationConfig, VolumeConfig
from vesuvius.plan.plan import Task
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.reading.quarantine import parse_damaged_box
from vesuvius.stream.reading.reader import Reader, ReaderJob, region_in
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream
from vesuvius.volumes.box import intersects

SHAPE, SHARD, CHUNK = (96, 96, 96), 48, 16


def write_damaged(path: Path) -> Path:
    """A NaN, a flipped bit, a shard that is cut, and one whose index is broken."""
    codecs = [BytesCodec(), BloscCodec(cname="lz4", clevel=1), Crc32cCodec()]
    codec = ShardingCodec(chunk_shape=(CHUNK,) * 3, codecs=codecs, index_location="start")
    voxels = textured(SHAPE, dtype="float32")
    voxels[20, 20, 20] = np.nan
    array = zarr.create(
        store=str(path), shape=SHAPE, dtype="float32", chunk_shape=(SHARD,) * 3, codecs=[codec], zarr_format=3
    )
    array[...] = voxels
    flipped, cut, index = (path / "c" / key for key in ("0/0/1", "1/1/0", "1/1/1"))
    data = bytearray(flipped.read_bytes())
    data[-3] ^= 1
    flipped.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    data = bytearray(index.read_bytes())
    data[3] ^= 1
    index.write_bytes(data)
    return path


@pytest.fixture
def job(tmp_path: Path) -> ReaderJob:
    condition = write_array(tmp_path / "labels.zarr", textured((48, 48, 48)), chunk=16)
    (condition / "1/2/0").write_bytes(b"torn")
    spec = VolumeConfig(path=str(write_damaged(tmp_path / "v.zarr")), condition=ArrayConfig(path=str(condition)))
    config = DataConfig(
        volumes=(spec,),
        patch_size=(8, 12, 12),
        patches_per_region=2,
        regions_in_flight=8,
        validation=ValidationConfig(fraction=0),
        nan="error",
        max_quarantined=100,
    )
    return prepare_data(0, config).job


Slots = dict[int, tuple[Any, bytes]]


def read(reader: Reader, job: ReaderJob, task: Task) -> tuple[Slots, list[dict[str, Any]]]:
    """What comes for each slot of a task: the visit and its voxels; and the damage that is reported."""
    found: Slots = {}
    records = []
    for slot, block in zip(task, reader.blocks(task), strict=True):
        region = region_in(block, job)
        assert region.report is not None
        found[slot] = region.visit, b"".join(part.tobytes() for part in region.voxels)
        records += region.report.quarantined
    return found, records


def alone(job: ReaderJob, tasks: Iterable[Task]) -> Slots:
    """Each slot read by a reader that knows of no damage."""
    found: Slots = {}
    for task in tasks:
        for slot in task:
            reader = Reader(job, ring=2)
            found |= read(reader, job, (slot,))[0]
            reader.close()
    return found


@pytest.mark.long
def test_slots_do_not_depend_on_their_reader_or_on_known_damage(job: ReaderJob) -> None:
    tasks = list(job.tasks(0, 240))
    expected = alone(job, tasks)
    replaced = sum(visit.attempt > 0 for visit, _ in expected.values())
    assert 0.2 < replaced / len(expected) < 0.9
    rng = random.Random(0)
    for readers in (1, 4):
        at_work, records = [Reader(job, ring=3) for _ in range(readers)], list[dict[str, Any]]()
        for task in tasks:
            found, new = read(rng.choice(at_work), job, task)
            records += new
            assert found == {slot: expected[slot] for slot in task}, f"{readers} readers"
        for reader in at_work:
            reader.close()
    boxes = [parse_damaged_box(record, 1)[1] for record in records]
    readable = ((48, 48, 0), (64, 64, 16))  # the first chunk of the shard that is cut
    assert not any(intersects(box, readable) for box in boxes), "only what fails for every region that touches it"
    for slot, (visit, _) in expected.items():
        touches = [any(intersects(box, job.plan.visit(slot, n).region) for box in boxes) for n in range(visit.attempt)]
        assert all(touches), "a region is replaced if it touches what is quarantined"
        assert not any(intersects(box, visit.region) for box in boxes), "and only if"
    causes = " ".join(record["cause"] for record in records)
    assert all(words in causes for words in ("NaN", "checksum do not match", "outside an object of", "index"))
    for first in range(0, len(tasks), 17):  # resumed, with all or some of the damage known
        known = frozenset(parse_damaged_box(one, 1) for one in rng.sample(records, rng.randrange(len(records) + 1)))
        resumed = Reader(replace(job, quarantined=known), ring=3)
        for task in tasks[first : first + 6]:
            assert read(resumed, job, task)[0] == {slot: expected[slot] for slot in task}
        resumed.close()


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2])
def test_streams_and_ranks_deliver_the_same_samples_from_any_start(job: ReaderJob, world: int) -> None:
    with open_stream(job, batch_size=1, stop=96) as stream:
        expected, _ = collect(stream, 96)
    for first, threads in ((6, 1), (34, 3), (70, 16)):
        for rank in range(world):
            part = replace(job, rank=rank, world_size=world)
            with PatchStream(part, StreamOptions(1, threads), first=first) as stream:
                patches, indices = collect(stream, 6)
            np.testing.assert_array_equal(patches, expected[indices])


@pytest.mark.long
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_ray_readers_deliver_the_same_samples(job: ReaderJob, workers: int) -> None:
    with open_stream(job, batch_size=8) as stream:
        expected, _ = collect(stream, 150)
    with open_stream(job, batch_size=8, processes=workers) as stream:
        patches, _ = collect(stream, 150)
    assert patches.tobytes() == expected.tobytes()
