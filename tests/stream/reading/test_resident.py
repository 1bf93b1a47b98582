"""Volumes kept in memory: the same batches and the same damage as without, and nothing is read once all is there."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.conftest import textured, write_array
from tests.stream.test_stream import make_job
from vesuvius.config import ArrayConfig, ConditionConfig, DataConfig, VolumeConfig
from vesuvius.plan import plan
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.reading.local import LocalRegions
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.stream.reading.resident import Resident
from vesuvius.stream.source import RayOfStream
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream
from vesuvius.volumes.box import Box, box_along, slices
from vesuvius.volumes.volume import Volume

SMALL: Any = {"patch_size": (16, 32, 32), "patches_per_region": 8, "regions_in_flight": 8}
Seen = list[tuple[int, bytes]]


def take(stream: PatchStream, batches: int) -> Seen:
    """Indices, patches and conditions of the next batches."""
    taken = [next(stream) for _ in range(batches)]
    return [
        (b.indices[0], b.patches.tobytes() + (b.condition.tobytes() if b.condition is not None else b"")) for b in taken
    ]


def batches_of_passes(job: ReaderJob, passes: int, batch: int = 4) -> int:
    return passes * job.plan.slots_per_pass * job.plan.patches_per_region // batch


def plain(folder: Path) -> ReaderJob:
    return make_job(write_array(folder / "v.zarr", textured((70, 90, 101))), **SMALL)


def torn(folder: Path) -> ReaderJob:
    array = write_array(folder / "v.zarr", textured((70, 96, 96)))
    (array / "1/1/1").write_bytes(b"torn")
    (array / "2/2/0").write_bytes(b"torn")
    return make_job(array, **SMALL)


def foreground(folder: Path) -> ReaderJob:
    voxels = textured((96, 128, 128))
    voxels[:, :64, :64] = 0
    array = write_array(folder / "v.zarr", voxels)
    return make_job(array, **SMALL, min_foreground=0.5)


def nan_and_coarse_condition(folder: Path) -> ReaderJob:
    voxels = textured((96, 128, 128), dtype="float32")
    voxels[20:50, 10:90, 60:] = np.nan
    one = write_array(folder / "v.zarr", voxels)
    labels = write_array(folder / "l.zarr", textured((48, 64, 64), seed=1), chunk=20)
    (labels / "1/1/2").write_bytes(b"torn")
    spec = VolumeConfig(path=str(one), condition=ArrayConfig(path=str(labels)))
    data = DataConfig(volumes=(spec,), **SMALL)
    return prepare_data(0, data).job


def context(folder: Path) -> ReaderJob:
    one = write_array(folder / "v.zarr", textured((96, 128, 128)))
    coarse = write_array(folder / "c.zarr", textured((48, 64, 64), seed=1), chunk=20)
    (coarse / "2/1/2").write_bytes(b"torn")
    spec = VolumeConfig(path=str(one), condition=ConditionConfig(path=str(coarse), context=2))
    return prepare_data(0, DataConfig(volumes=(spec,), **SMALL)).job


def two_volumes(folder: Path) -> ReaderJob:
    paths = [write_array(folder / f"{n}.zarr", textured((60, 70 + 20 * n, 80), seed=n)) for n in range(2)]
    volumes = tuple(VolumeConfig(path=str(path), weight=1 + n) for n, path in enumerate(paths))
    data = DataConfig(volumes=volumes, **SMALL)
    return prepare_data(0, data).job


CASES = [plain, torn, nan_and_coarse_condition, context]
CASES += [pytest.param(case, marks=pytest.mark.long) for case in (foreground, two_volumes)]  # type: ignore[list-item]


@pytest.mark.sample(3)
@pytest.mark.parametrize("make", CASES)
def test_batches_and_quarantine_equal_those_of_a_reading_stream(
    make: Callable[[Path], ReaderJob], tmp_path: Path
) -> None:
    job = make(tmp_path)
    count = batches_of_passes(job, 2)
    with PatchStream(job, StreamOptions(4, 0)) as reading:
        expected, places = take(reading, count), reading.quarantined
    with PatchStream(job, StreamOptions(4, 0), resident=Resident(job)) as stream:
        assert take(stream, count) == expected
        assert stream.quarantined == places
        assert stream.reader_totals.bytes_read < reading.reader_totals.bytes_read * 0.75
        state = stream.state_dict()
    with (
        PatchStream(job, StreamOptions(4, 0)) as reading,
        PatchStream(job, StreamOptions(4, 0), resident=Resident(job)) as stream,
    ):
        reading.load_state_dict(state)
        stream.load_state_dict(state)
        assert take(stream, 30) == take(reading, 30), "also from there on, with the damage that is known"


def test_a_full_copy_needs_no_reads(tmp_path: Path) -> None:
    job = plain(tmp_path)
    with PatchStream(job, StreamOptions(4, 0)) as reading:
        expected = take(reading, batches_of_passes(job, 8))
    with PatchStream(job, StreamOptions(4, 0), resident=Resident(job)) as stream:
        seen = take(stream, batches_of_passes(job, 6))
        shutil.rmtree(job.data.volumes[0].path)
        assert seen + take(stream, batches_of_passes(job, 2)) == expected


@pytest.fixture
def large_volumes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers are started however small a volume is."""
    monkeypatch.setattr(plan, "_WINDOWS_OF_SMALL", 0)


def check_that_readers_fill_the_copy_and_end(job: ReaderJob) -> None:
    count = batches_of_passes(job, 6)
    with PatchStream(job, StreamOptions(4, 0)) as reading:
        expected, places = take(reading, count), reading.quarantined
    with PatchStream(job, StreamOptions(4, 2, processes=True), resident=Resident(job)) as stream:
        assert take(stream, 1) == expected[:1]
        assert stream.options.num_workers == 2
        assert take(stream, count - 1) == expected[1:]
        assert stream.options.num_processes == stream.num_readers_with_work == stream.max_blocks_ahead == 0
        assert [event.kind for event in stream.events if event.kind != "quarantine"] == ["resident"]
        assert sorted(map(str, stream.quarantined)) == sorted(map(str, places))


@pytest.fixture
def readers_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of Ray's, each of which takes two seconds of CPU to start."""
    monkeypatch.setattr(RayOfStream, "start", lambda self, job, options, tasks: LocalRegions(job, tasks))


@pytest.mark.usefixtures("large_volumes", "readers_in_this_process")
def test_readers_fill_the_copy_and_end(tmp_path: Path) -> None:
    check_that_readers_fill_the_copy_and_end(torn(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("make", [torn, nan_and_coarse_condition, context])
@pytest.mark.usefixtures("ray_cluster", "large_volumes")
def test_rays_readers_fill_the_copy_and_end(make: Callable[[Path], ReaderJob], tmp_path: Path) -> None:
    check_that_readers_fill_the_copy_and_end(make(tmp_path))


def test_a_rank_reads_nothing_that_another_rank_of_its_machine_has_read(tmp_path: Path) -> None:
    job = two_volumes(tmp_path)
    ranks = [replace(job, rank=rank, world_size=2) for rank in range(2)]
    count = batches_of_passes(job, 2, batch=8)
    expected = list[Seen]()
    for one in ranks:
        with PatchStream(one, StreamOptions(4, 0), resident=Resident(one)) as stream:
            expected.append(take(stream, count))
            assert stream.reader_totals.bytes_read > 0
    first = Resident(ranks[0])
    with PatchStream(ranks[1], StreamOptions(4, 0), resident=Resident(ranks[1], first.address)) as stream:
        assert take(stream, count) == expected[1]
    with PatchStream(ranks[0], StreamOptions(4, 0), resident=first) as stream:
        assert take(stream, count) == expected[0]
        assert stream.reader_totals.bytes_read == 0


def test_the_address_of_a_dead_process_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="/proc/1234567/fd/3"):
        Resident(plain(tmp_path), "/proc/1234567/fd/3")


def in_use() -> Iterator[str]:
    return (line for line in Path("/proc/self/maps").read_text().splitlines() if "vesuvius-resident" in line)


def test_the_copy_can_be_dropped_between_two_batches(tmp_path: Path) -> None:
    job = plain(tmp_path)
    with PatchStream(job, StreamOptions(4, 0)) as reading:
        expected = take(reading, 60)
    with PatchStream(job, StreamOptions(4, 0), resident=Resident(job)) as stream:
        seen = take(stream, 30)
        assert stream.has_resident
        assert any(in_use())
        stream.reconfigure(cache_in_memory=False)
        assert not stream.has_resident
        assert not any(in_use())
        assert seen + take(stream, 30) == expected
    with PatchStream(job, StreamOptions(4, 0), resident=Resident(job)) as stream:
        take(stream, 1)
    assert not any(in_use())


def test_every_brick_lies_completely_in_some_region(tmp_path: Path) -> None:
    """Also where patches are smaller than bricks, and where a volume ends within one: else it would never be full."""
    for patch in ((1, 16, 16), (5, 31, 31), (8, 40, 40)):
        job: Any = make_job(write_array(tmp_path / f"{patch[1]}.zarr", textured((70, 90, 101))), patch_size=patch)
        resident, volume = Resident(job), job.plan.volumes[0]
        voxels = [np.zeros(1, np.uint8)]
        for cell in itertools.product(*(axis.cells(axis.phases[0]) for axis in volume.cells.axes)):
            ends = zip(cell, patch, strict=True)
            resident.volumes[0].keep(box_along((lo, hi - 1 + size) for (lo, hi), size in ends), voxels)
        assert resident.volumes[0]._is_present.all()


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.usefixtures("large_volumes", "readers_in_this_process")
def test_readers_end_after_a_pass(world: int, tmp_path: Path) -> None:
    """Of three ranks each reads nearly all regions: they do not share a pass, though they share the copy."""
    job, asked = replace(plain(tmp_path), world_size=world), list[int]()
    resident = Resident(job, sharers=world)
    with PatchStream(job, StreamOptions(4, 2, processes=True), resident=resident) as stream:
        for _ in range(batches_of_passes(job, 4, 4 * world)):
            next(stream)
            asked.append(stream.options.num_processes)
        assert stream.num_readers_without_resident == 2
    before = (job.plan.slots_per_pass - job.plan.regions_in_flight) * job.plan.patches_per_region // (4 * world)
    assert 0.7 * before < asked.count(2) <= 1.1 * batches_of_passes(job, 1, 4 * world)
    assert asked[-1] == 0


def test_errors_outside_a_region_do_not_affect_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be known damage, which may crash who decodes it, or labels that no patch holds."""
    voxels = textured((70, 90, 101))
    write_array(tmp_path / "v.zarr", voxels)
    write_array(tmp_path / "l.zarr", np.ones_like(voxels))
    spec = VolumeConfig(path=str(tmp_path / "v.zarr"), condition=ArrayConfig(path=str(tmp_path / "l.zarr")))
    job = prepare_data(0, DataConfig(volumes=(spec,), condition_classes=2, **SMALL)).job
    resident = Resident(job)
    visits = ((visit, resident.volumes[0].missing(visit.region)) for visit in map(job.plan.visit, itertools.count()))
    visit, read_for_it = next((v, missing) for v, missing in visits if missing and missing[1][0] > v.region[1][0])
    stop = read_for_it[1][0]
    labels: Any = zarr.open_array(str(tmp_path / "l.zarr"))
    labels[stop - 1] = 9  # of no class
    seen, read = list[int](), Volume.read

    def noted(self: Volume, box: Box, *rest: Any, **more: Any) -> Any:
        seen.append(box[1][0])
        return read(self, box, *rest, **more)

    monkeypatch.setattr(Volume, "read", noted)
    for known in (frozenset[Any](), frozenset({(0, ((stop - 1, 0, 0), (stop, 90, 101)))})):
        seen.clear()
        one = replace(job, quarantined=known)
        regions = LocalRegions(one, [(visit.slot,)], Resident(one))
        (region,) = regions
        regions.interrupt()
        assert region.visit == visit
        assert np.array_equal(region.voxels[0], voxels[slices(visit.region)])
        assert (region.voxels[1] == 1).all()
        assert (stop in seen) == (not known)
