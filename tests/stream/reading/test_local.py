"""Regions that this process reads until Ray has started: all in the order of the plan, and none of them twice."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stream.test_stream import make_job
from tests.support.orphans import MARK, bearers_of
from vesuvius.errors import ConfigError
from vesuvius.plan.plan import Task
from vesuvius.stream.reading.local import LocalRegions, LocalThenRay, Regions
from vesuvius.stream.reading.reader import ReaderJob, Region

FIRST, STOP = 150, 1000  # of the samples; in the midst of a window


@pytest.fixture
def job(volume: Path) -> ReaderJob:
    return make_job(volume, regions_in_flight=8, regions_per_task=3)


def slots(regions: Iterator[Region]) -> list[int]:
    return [region.visit.slot for region in regions]


def opened(job: ReaderJob, stop: int, start: Callable[[Iterator[Task]], Regions]) -> LocalThenRay:
    return LocalThenRay(job, job.tasks(FIRST, stop), None, start)


def test_what_is_in_flight_at_first_needs_no_ray_and_the_rest_comes_in_order(job: ReaderJob) -> None:
    may_start = threading.Event()

    def start(tasks: Iterator[Task]) -> Regions:
        may_start.wait(30)
        return LocalRegions(job, tasks)

    regions = opened(job, STOP, start)
    first = slots(itertools.islice(regions, 8))
    assert regions.tasks_left > 100, "readers have work before they are there"
    may_start.set()
    assert first + slots(regions) == [slot for task in job.tasks(FIRST, STOP) for slot in task]
    regions.close()


def test_ray_is_not_started_where_nothing_is_left_for_it(job: ReaderJob) -> None:
    regions = opened(job, FIRST + 8, lambda tasks: pytest.fail("started"))
    assert slots(regions) == [slot for task in job.tasks(FIRST, FIRST + 8) for slot in task]
    assert regions.tasks_left == 0
    regions.close()


def test_a_start_that_fails_is_said_with_the_next_region(job: ReaderJob) -> None:
    failed = threading.Event()

    def start(tasks: Iterator[Task]) -> Regions:
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


_CLOSES_AT_ONCE = """
import sys
from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream

data = DataConfig(volumes=(VolumeConfig(path=sys.argv[1]),), patch_size=(8, 16, 16), regions_in_flight=8)
with PatchStream(prepare_data(0, data).job, StreamOptions(batch_size=4, workers=1)) as stream:
    print(next(stream).indices.tolist())
"""


def test_a_stream_may_be_closed_while_ray_starts(volume: Path) -> None:
    """Nothing of Ray is left, and the process ends."""
    mark = f"closes-{time.time_ns()}"
    command, environment = [sys.executable, "-c", _CLOSES_AT_ONCE, str(volume)], os.environ | {MARK: mark}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1, 2, 3]\n", "")
    assert not bearers_of(mark)
