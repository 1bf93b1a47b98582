"""Regions that threads of this process read, all or until Ray has started: in the order of the plan, none twice."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.stream.test_stream import collect, make_job
from tests.support import fork_server
from tests.support.orphans import MARK, bearers_of
from vesuvius.errors import ConfigError, DataError
from vesuvius.plan.plan import Task
from vesuvius.stream import options as stream_options
from vesuvius.stream.options import StreamOptions, auto_threads
from vesuvius.stream.reading.local import LocalRegions
from vesuvius.stream.reading.reader import Block, Reader, ReaderJob, Region
from vesuvius.stream.source import RayOfStream, RegionSource
from vesuvius.stream.stream import PatchStream
from vesuvius.threads import on_thread

FIRST, STOP = 150, 1000  # of the samples; in the midst of a window


@pytest.fixture
def job(volume: Path) -> ReaderJob:
    return make_job(volume, regions_in_flight=8)


def slots(regions: Iterator[Region]) -> list[int]:
    return [region.visit.slot for region in regions]


def opened(job: ReaderJob, stop: int, start: Callable[[Iterator[Task]], Any]) -> RegionSource:
    return RegionSource(job, job.tasks(FIRST, stop), None, None, start, job.plan.regions_in_flight)


@pytest.mark.sample(3)
@pytest.mark.parametrize("threads", [1, 2, 3, 11])
def test_regions_in_use_stay_as_they_were_read_however_far_the_readers_are(job: ReaderJob, threads: int) -> None:
    """A block too few, or a reader a region too far, overwrites the oldest region before the cutter drops it."""
    in_use = deque[tuple[Region, bytes]](maxlen=job.plan.regions_in_flight)
    regions, read = LocalRegions(job, job.tasks(FIRST, STOP), threads=threads), list[int]()
    for region in regions:
        read.append(region.visit.slot)
        in_use.append((region, region.voxels[0].tobytes()))
        assert len(regions._reading) <= 2 * threads
        wait(regions._reading)
        assert all(region.voxels[0].tobytes() == voxels for region, voxels in in_use)
    assert read == [slot for task in job.tasks(FIRST, STOP) for slot in task]
    regions.close()


def test_threads_change_no_byte_and_are_one_process_whose_work_adds_up(job: ReaderJob) -> None:
    streams = [PatchStream(job, StreamOptions(4, threads), stop=320) for threads in (1, 3)]
    with streams[0] as one, streams[1] as three:
        expected, _ = collect(one, 80)
        parts = [collect(three, 50)[0]]
        assert set(three.readers) == {os.getpid()}, "its memory once, not for each thread"
        assert not three.events, "two readers of a process are not a dead one and its replacement"
        three.reconfigure(num_workers=5)
        parts.append(collect(three, 30)[0])
        assert b"".join(part.tobytes() for part in parts) == expected.tobytes()
        assert one.reader_totals.blocks == len({job.plan.mixing.slot_of(index) for index in range(320)})
        assert three.reader_totals.bytes_read >= one.reader_totals.bytes_read


def test_an_error_is_raised_at_its_region_though_others_are_read_before(
    job: ReaderJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, wanted = Reader.blocks, [slot for task in job.tasks(FIRST, STOP) for slot in task]

    def broken(self: Reader, task: Task, ahead: Task = ()) -> Iterator[Block]:
        if task == (wanted[5],):
            raise DataError("broken")
        return blocks(self, task, ahead)

    monkeypatch.setattr(Reader, "blocks", broken)
    regions = LocalRegions(job, job.tasks(FIRST, STOP), threads=4)
    assert slots(itertools.islice(regions, 5)) == wanted[:5]
    with pytest.raises(DataError, match="broken"):
        next(regions)
    regions.close()


@pytest.mark.parametrize(
    ("cores", "local_ranks", "threads"),
    [(2.0, 1, 2), (3.5, 1, 3), (0.5, 1, 1), (64.0, 1, 16), (64.0, 8, 8), (4.0, 8, 1)],
)
def test_without_a_number_there_is_a_thread_for_each_core_of_the_rank(
    monkeypatch: pytest.MonkeyPatch, cores: float, local_ranks: int, threads: int
) -> None:
    monkeypatch.setattr(stream_options, "usable_cores", lambda pid: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
    assert auto_threads(local_ranks) == StreamOptions(1, 0).num_threads == threads
    assert StreamOptions(1, 4, processes=True).num_threads == threads, "until Ray has started"
    assert StreamOptions(1, 20).num_threads == 20
    for text in ("0", "-1", "two"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
        with pytest.raises(ConfigError, match=f"LOCAL_WORLD_SIZE={text} is not a number of ranks"):
            _ = StreamOptions(1, 0).num_threads


def test_the_first_window_is_read_without_ray_and_the_rest_follows_in_order(job: ReaderJob) -> None:
    may_start, replaced = threading.Event(), list[int]()

    class Started(LocalRegions):
        def report_replaced(self, actor: str, pid: int, node: str) -> None:
            replaced.append(pid)

    def start(tasks: Iterator[Task]) -> Any:
        may_start.wait(30)
        return Started(job, tasks)

    regions = opened(job, STOP, start)
    first = slots(itertools.islice(regions, 8))
    assert regions.tasks_left > 100, "readers have work before they are there"
    may_start.set()
    assert first + slots(regions) == [slot for task in job.tasks(FIRST, STOP) for slot in task]
    regions.report_replaced("actor", 1, "here")
    assert replaced == [1], "deaths of readers are reported to Ray's regions"
    regions.close()


def test_after_a_trainer_died_reading_the_workers_read_everything(
    job: ReaderJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that crashes who decodes it would end each session in turn; of workers it ends two."""
    job, given = replace(job, reading_log_dir=str(tmp_path)), list[Task]()

    def start(self: RayOfStream, job: ReaderJob, options: StreamOptions, tasks: Iterator[Task]) -> Any:
        given[:] = tasks
        return LocalRegions(job, given)

    monkeypatch.setattr(RayOfStream, "start", start)
    for died in (False, True):
        if died:
            (tmp_path / "trainer-reads").touch()
        with PatchStream(job, StreamOptions(4, 1, processes=True), stop=1000) as stream:
            next(stream)
            assert (tmp_path / "trainer-reads").exists() != died, "as long as it reads"
            for _ in stream:
                pass
        assert ((0,) in {task[:1] for task in given}) == died
        assert not (tmp_path / "trainer-reads").exists()


def test_ray_is_not_started_if_nothing_is_left_to_read(job: ReaderJob) -> None:
    regions = opened(job, FIRST + 8, lambda tasks: pytest.fail("started"))
    assert slots(regions) == [slot for task in job.tasks(FIRST, FIRST + 8) for slot in task]
    assert regions.tasks_left == 0
    regions.close()


def test_a_failed_start_is_raised_at_the_next_region(job: ReaderJob) -> None:
    failed = threading.Event()

    def start(tasks: Iterator[Task]) -> Any:
        failed.wait(30)
        raise ConfigError("Ray did not start: no room")

    regions = opened(job, STOP, start)
    next(regions)
    failed.set()
    with pytest.raises(ConfigError, match="no room"):
        list(regions)
    with pytest.raises(ConfigError, match="no room"):
        next(regions)
    regions.close()


def test_ray_that_starts_after_the_end_of_a_stream_reads_nothing(job: ReaderJob) -> None:
    """Nor is it asked for regions: it may be ending."""
    may_start, given, asked = threading.Event(), list[Task](), list[int]()

    class Started(LocalRegions):
        def __next__(self) -> Region:
            asked.append(1)
            return super().__next__()

    def start(tasks: Iterator[Task]) -> Any:
        may_start.wait(30)
        given.extend(tasks)
        return Started(job, iter([(0,)]))

    regions = opened(job, STOP, start)
    waiting = on_thread(slots, regions, name="batches")
    while regions._local is not None:
        time.sleep(0.01)
    regions.interrupt()
    may_start.set()
    assert len(waiting.result(30)) == 10, "those of the first window, in whole tasks"
    assert (given, asked) == ([], [])
    regions.close()


_CLOSES = """
import sys, time
from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.stream.feeder import StreamInterrupted
from vesuvius.stream.options import StreamOptions
from vesuvius.stream import source
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream

said = []

def interrupted():
    if said or stream._source._local is None and stream._clock.starved.waiting:
        said.append(stream.waiting_for())
    return bool(said)

when, source._RAY_START_TIMEOUT_S = sys.argv[2], float(sys.argv[3])
data = DataConfig(volumes=(VolumeConfig(path=sys.argv[1]),), patch_size=(8, 16, 16), regions_in_flight=8)
with PatchStream(
    prepare_data(0, data).job, StreamOptions(4, 1, processes=True), interrupted=interrupted
) as stream:
    print(next(stream).indices.tolist())
    try:
        while when == "waiting":
            next(stream)
    except StreamInterrupted:
        print(said[0].partition("(")[2])
"""


@pytest.mark.parametrize(
    ("when", "waits_s", "says"),
    [
        pytest.param("at once", 100, "", marks=pytest.mark.long),
        pytest.param("waiting", 100, "", marks=pytest.mark.long),
        pytest.param("waiting", 0.1, "Ray has not started within 0.1 s", marks=pytest.mark.long),
    ],
)
def test_a_stream_may_be_closed_while_ray_starts(when: str, waits_s: float, says: str, volume: Path) -> None:
    """Nothing of Ray is left, and the process ends, also where it goes on before Ray has started, or while a batch is
    waited for."""
    mark = f"closes-{time.time_ns()}"
    command = [sys.executable, "-c", _CLOSES, str(volume), when, str(waits_s)]
    environment = os.environ | {MARK: mark}
    done = fork_server.run(command, env=environment, capture_output=True, text=True, timeout=100)
    waiting = "Ray is starting 1 worker)\n" if when == "waiting" else ""
    assert (done.returncode, done.stdout) == (0, f"[0, 1, 2, 3]\n{waiting}")
    assert done.stderr.startswith(says)
    assert says or not done.stderr
    until = time.monotonic() + 90
    while bearers_of(mark) and time.monotonic() < until:  # workers of Ray notice the end of its daemons late
        time.sleep(0.5)
    assert not bearers_of(mark)
