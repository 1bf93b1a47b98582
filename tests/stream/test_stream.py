"""The stream: the same batches whoever reads them, at any batch size, from any place, and after a reader has died."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.conftest import textured, write_array
from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.errors import ConfigError, DataError
from vesuvius.stream.events import StreamEvent
from vesuvius.stream.options import (
    StreamOptions,
    batches_ahead,
    check_store,
)
from vesuvius.stream.ray import private
from vesuvius.stream.ray import regions as ray_stream
from vesuvius.stream.reading.reader import Reader, ReaderJob
from vesuvius.stream.reading.reading_log import exit_of
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream

Stack = np.ndarray[Any, Any]


def make_job(path: Path, **data: Any) -> ReaderJob:
    settings: dict[str, Any] = {"patch_size": (8, 16, 16), "patches_per_region": 4} | data
    return prepare_data(0, DataConfig(volumes=(VolumeConfig(path=str(path)),), **settings)).job


def open_stream(job: ReaderJob, batch_size: int = 4, processes: int = 0, **options: Any) -> PatchStream:
    return PatchStream(job, StreamOptions(batch_size, processes, processes=processes > 0), **options)


def collect(stream: PatchStream, batches: int) -> tuple[Stack, Stack]:
    """The patches and sample indices of the next batches, copied."""
    taken = [next(stream) for _ in range(batches)]
    return np.concatenate([b.patches for b in taken]), np.concatenate([b.indices for b in taken])


@pytest.fixture
def job(volume: Path) -> ReaderJob:
    return make_job(volume)


def test_patches_are_the_voxels_of_the_plan(volume: Path, job: ReaderJob) -> None:
    voxels = textured((96, 128, 128))
    with open_stream(job) as stream:
        patches, indices = collect(stream, 12)
    assert indices.tolist() == list(range(48))
    assert patches.dtype == np.uint8, "stored dtype to the end"
    for patch, index in zip(patches, indices, strict=True):
        z, y, x = job.plan.sample(int(index)).start_zyx
        np.testing.assert_array_equal(patch, voxels[z : z + 8, y : y + 16, x : x + 16])


@pytest.mark.parametrize("batch_size", [3, 40])
def test_the_batch_size_does_not_change_the_order(job: ReaderJob, batch_size: int) -> None:
    with open_stream(job, batch_size=4) as stream:
        expected, _ = collect(stream, 30)
    with open_stream(job, batch_size=batch_size, stop=122) as stream:
        patches, indices = collect(stream, 120 // batch_size)
        assert sum(len(batch.indices) for batch in stream) == 2, "the last batch may be short"
    assert indices.tolist() == list(range(120))
    np.testing.assert_array_equal(patches, expected)


@pytest.mark.parametrize("first", [1, 37])
def test_a_stream_can_start_at_any_sample(job: ReaderJob, first: int) -> None:
    with open_stream(job, batch_size=1) as stream:
        expected, _ = collect(stream, 61)
    with open_stream(job, batch_size=1, first=first, stop=61) as stream:
        patches, indices = collect(stream, 61 - first)
        with pytest.raises(StopIteration):
            next(stream)
    assert indices.tolist() == list(range(first, 61))
    np.testing.assert_array_equal(patches, expected[first:])


def ragged_job(tmp_path: Path) -> ReaderJob:
    """Of regions of different sizes: Ray would merge short blocks and split long ones."""
    array = write_array(tmp_path / "ragged.zarr", textured((70, 90, 101)))
    job = make_job(array, patches_per_region=5, regions_in_flight=16)
    sizes = {tuple(b - a for a, b in zip(*job.plan.visit(slot).region, strict=True)) for slot in range(50)}
    assert len(sizes) > 3
    return job


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", [16, 3])
def test_ranks_together_deliver_the_samples_of_one_rank(job: ReaderJob, world: int) -> None:
    """By the hashes of indices and voxels of each global batch: none is missing, none there twice.

    Long enough for a rank to reuse the buffers of the few regions that it holds.
    """

    def hashes(rank: int, world: int) -> list[list[str]]:
        with open_stream(replace(job, rank=rank, world_size=world), batch_size=48 // world) as stream:
            batches = [next(stream) for _ in range(10)]
            return [[_hash(*one) for one in zip(batch.indices, batch.patches, strict=True)] for batch in batches]

    expected = [sorted(batch) for batch in hashes(0, 1)]
    steps = zip(*(hashes(rank, world) for rank in range(world)), strict=True)
    assert [sorted(one for part in parts for one in part) for parts in steps] == expected


def _hash(index: int, patch: Stack) -> str:
    return hashlib.sha256(str(index).encode() + patch.tobytes()).hexdigest()


def test_a_refused_change_does_not_stop_the_stream(job: ReaderJob) -> None:
    with open_stream(job) as stream:
        before = stream.options
        with pytest.raises(TypeError, match="Cannot change batch_size of a running stream"):
            stream.reconfigure(batch_size=3)  # type: ignore[call-arg]
        assert stream.options is before
        assert next(stream).indices.tolist() == [0, 1, 2, 3]


@pytest.mark.usefixtures("ray_cluster")
def test_a_chain_of_executions_is_one_sequence_with_correct_reader_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any sample, with regions of different sizes.  Readers end once all is read, though batches remain."""
    job = ragged_job(tmp_path)
    monkeypatch.setattr(ray_stream, "TASKS_PER_SEGMENT", 3)
    with open_stream(job, first=7) as stream:
        expected, _ = collect(stream, 25)
    with open_stream(job, processes=1, first=7, stop=107) as stream:
        patches, indices = collect(stream, 5)
        assert stream.num_readers_alive == 1
        deadline = time.monotonic() + 60
        while stream.num_readers_alive and time.monotonic() < deadline:
            more, numbers = collect(stream, 1)
            patches, indices = np.concatenate([patches, more]), np.concatenate([indices, numbers])
        assert (stream.num_readers_alive, stream.num_readers_with_work) == (0, 0), "never 0 while one reads"
        rest = list(stream)
        assert rest, "batches that lay ready"
        assert stream.reader_deaths == 0, "those of an execution that is over have not died"
    indices = np.concatenate([indices, *(batch.indices for batch in rest)])
    assert indices.tolist() == list(range(7, 107))
    np.testing.assert_array_equal(np.concatenate([patches, *(batch.patches for batch in rest)]), expected)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("kills", "readers"), [(1, 1), pytest.param(20, 2, marks=pytest.mark.long)])
def test_readers_killed_at_random_times_change_no_byte_and_are_reported(
    job: ReaderJob, kills: int, readers: int
) -> None:
    rng = np.random.default_rng(kills)
    expected = hashlib.sha256()
    with open_stream(job) as stream:
        for batch in itertools.islice(stream, 40 * (kills + 1) + 160):
            expected.update(batch.patches)
    got, victims = hashlib.sha256(), list[int]()
    with open_stream(job, processes=readers) as stream:
        for kill in range(kills + 1):
            for batch in itertools.islice(stream, 40):
                got.update(batch.patches)
            time.sleep(rng.uniform(0, 0.5))
            alive = [pid for pid in stream.readers if psutil.pid_exists(pid)]
            if kill < kills and alive:  # else all are dead, and nothing has come from their replacements yet
                victims.append(int(rng.choice(alive)))
                os.kill(victims[-1], signal.SIGKILL)
        for batch in itertools.islice(stream, 160):  # what the new reader repeats was ahead of the trainer
            got.update(batch.patches)
        deadline, died = time.monotonic() + 60, list[StreamEvent]()
        while not died:  # said once another process has taken over
            assert time.monotonic() < deadline
            time.sleep(0.05)  # no need to read at full speed until then
            next(stream)
            died = [event for event in tuple(stream.events) if event.kind == "worker_died"]
    assert got.hexdigest() == expected.hexdigest()
    for ended in died:
        assert ended.fields["pid"] in victims
        assert ended.fields["exit_type"] == "SYSTEM_ERROR"
        assert "\n" not in ended.fields["exit_detail"]
        assert "oom" not in ended.fields["exit_detail"].lower(), "Ray's guesses are left out"
        assert abs(ended.fields["exit_time"] - time.time()) < 600
        said = f"Worker {ended.fields['pid']} on {socket.gethostname()} was killed or died (SYSTEM_ERROR: Worker"
        assert said in ended.text
        assert exit_of(private.worker_exits, ended.fields["pid"], "another machine") == {}


@pytest.mark.long
def test_reconfiguring_changes_no_byte_and_keeps_the_totals(
    job: ReaderJob, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ray that is up keeps the memory that it has once used, so /dev/shm may have no room for a second store."""
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    with open_stream(job) as stream:
        expected, expected_indices = collect(stream, 23)
    with open_stream(job) as stream:
        parts = [collect(stream, 5)]
        stream.reconfigure(num_workers=2, processes=True)
        parts.append(collect(stream, 7))
        assert len(stream.readers) >= 1
        assert os.getpid() not in stream.readers
        niceness = psutil.Process().nice()
        assert all(psutil.Process(pid).nice() == niceness for pid in stream.readers), (
            "no reader starves on a busy machine"
        )
        with pytest.raises(ConfigError, match=r"The object store needs .* /dev/shm has"):
            stream.reconfigure(num_workers=1000)
        before = stream.reader_totals
        assert before.decode_s > 0
        assert before.read_s is None, "null, not 0: on disk nobody can tell reading from decoding"
        stream.reconfigure(num_workers=0, processes=False, prefetch_factor=4)
        assert stream.readers == {}
        assert stream.reader_totals.bytes_read >= before.bytes_read > 0, "what was read ahead may still have come"
        parts.append(collect(stream, 11))
        assert stream.reader_totals.bytes_read > before.bytes_read
        assert [event.kind for event in stream.events] == ["reconfigured"] * 2
    np.testing.assert_array_equal(np.concatenate([indices for _, indices in parts]), expected_indices)
    assert b"".join(patches.tobytes() for patches, _ in parts) == expected.tobytes()


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("workers", "batches"), [(0, 5), pytest.param(2, 11, marks=pytest.mark.long)])
def test_a_state_continues_with_other_readers_and_rereads_only_regions_in_flight(
    volume: Path, job: ReaderJob, workers: int, batches: int
) -> None:
    with open_stream(job) as stream:
        expected, _ = collect(stream, 20)
    with open_stream(job, processes=workers) as stream:
        collect(stream, batches)
        state = json.loads(json.dumps(stream.state_dict()))
    assert {"seed", "sample_index", "plan_hash"} <= state.keys()
    assert state["sample_index"] == 4 * batches
    with open_stream(job) as stream:
        stream.load_state_dict(state)
        rest, indices = collect(stream, 20 - batches)
    assert indices[0] == 4 * batches
    assert rest.tobytes() == expected[4 * batches :].tobytes()
    stop = 4 * batches + 12
    with open_stream(job, first=4 * batches, stop=stop) as stream:
        assert sum(len(batch.indices) for batch in stream) == 12
        read = stream.reader_totals.blocks
    assert read == len({job.plan.mixing.slot_of(index) for index in range(4 * batches, stop)}), "and no other region"
    other = make_job(volume, patches_per_region=8)
    with (
        open_stream(other) as stream,
        pytest.raises(ConfigError, match=r"The state belongs to plan .*, but the stream has"),
    ):
        stream.load_state_dict(state)


def test_prefetch_limits_reading_ahead(job: ReaderJob) -> None:
    free = StreamOptions(4, num_workers=2, prefetch_factor=100)
    assert batches_ahead(free) == 200
    with open_stream(job, stop=400) as stream:
        next(stream)
        assert stream._feeder is not None
        ready, until = stream._feeder._ready, time.monotonic() + 30
        while ready.qsize() < batches_ahead(stream.options) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.5)
        assert ready.qsize() == batches_ahead(stream.options) == 2
        read_by_default = stream.reader_totals.bytes_read
    with PatchStream(job, replace(free, num_workers=0), stop=400) as stream:
        next(stream)
        until = time.monotonic() + 30
        while stream.reader_totals.bytes_read <= 4 * read_by_default and time.monotonic() < until:
            time.sleep(0.01)
        assert stream.reader_totals.bytes_read > 4 * read_by_default


def test_feeder_stats_show_a_slow_trainer_and_slow_readers(job: ReaderJob, monkeypatch: pytest.MonkeyPatch) -> None:
    read, slow_s = Reader.blocks, 0.03

    def slowly(self: Reader, *arguments: Any) -> Iterator[Any]:
        for block in read(self, *arguments):
            time.sleep(slow_s)
            yield block

    with open_stream(job) as stream:
        next(stream)
        before, deadline = stream.feeder_stats, time.monotonic() + 60
        # It waits for ever, so only a wait that goes on can be what grows.
        while stream.feeder_stats.idle_s < before.idle_s + 0.2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stream.feeder_stats.idle_s >= before.idle_s + 0.2
        next(stream)
        assert stream.feeder_stats.empty_queue_hits == before.empty_queue_hits
    monkeypatch.setattr(Reader, "blocks", slowly)
    started = time.perf_counter()
    with PatchStream(job, StreamOptions(4, 1)) as stream:
        collect(stream, 8)
        hungry = stream.feeder_stats
    elapsed_s = time.perf_counter() - started
    assert hungry.empty_queue_hits >= 2, "at least where a task begins, its four blocks are waited for"
    assert hungry.wait_for_readers_s >= 7 * slow_s, "of two tasks at least, but for the last block of the second"
    assert hungry.cut_s + hungry.wait_for_readers_s + hungry.idle_s <= elapsed_s, "no second is counted twice"


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_an_unreadable_chunk_ends_the_stream_naming_volume_and_region(tmp_path: Path, workers: int) -> None:
    path = write_array(tmp_path / "torn.zarr", textured((96, 128, 128)))
    job = make_job(path)
    for chunk in path.glob("[0-9]/*/*"):
        chunk.write_bytes(b"torn")
    with (
        open_stream(job, processes=workers) as stream,
        pytest.raises(DataError, match=r"region z \d+:\d+.* of volume .*torn\.zarr") as e,
    ):
        collect(stream, 40)
    assert "\n" not in str(e.value)


def test_an_object_store_larger_than_shared_memory_is_refused(job: ReaderJob) -> None:
    with pytest.raises(ConfigError, match=r"/dev/shm has .*--shm-size"):
        check_store(job, StreamOptions(4, 10**6, processes=True))
    check_store(job, StreamOptions(4, num_workers=0), ranks=10**6)
    check_store(job, StreamOptions(4, 1, processes=True), ranks=2)
    with pytest.raises(ConfigError, match=r"object store of 1000000 ranks needs"):
        check_store(job, StreamOptions(4, 1, processes=True), ranks=10**6)


@pytest.fixture(autouse=True)
def _no_leftover_ray(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that did not ask for Ray must not have started one."""
    running = ray_stream.ray.is_initialized()
    yield
    if "ray_cluster" not in request.fixturenames:
        assert ray_stream.ray.is_initialized() == running
