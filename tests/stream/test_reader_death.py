"""Why a reader died, by Ray's account: killed from outside, or by Ray's own memory monitor, in real streams."""

from __future__ import annotations

import itertools
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import textured
from tests.stream.test_stream import collect, make_job, open_stream
from tests.support.poison import poison, write_volume
from vesuvius.errors import DataError
from vesuvius.stream.ray import blocks as ray_stream
from vesuvius.stream.ray import watch
from vesuvius.stream.ray.private import WorkerExit
from vesuvius.stream.ray.watch import ReaderDeath
from vesuvius.stream.reading.notes import read_notes
from vesuvius.stream.stream import PatchStream


def killed_reader(stream: PatchStream) -> int:
    """Kills one and waits until another has taken over."""
    next(stream)
    victim = next(pid for pid in stream.readers if psutil.pid_exists(pid))
    os.kill(victim, signal.SIGKILL)
    for _ in itertools.islice(stream, 2000):
        if victim not in stream.readers and any(map(psutil.pid_exists, stream.readers)):
            return victim
    pytest.fail("no reader took the place of the one that died")


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    path = write_volume(tmp_path / "poisoned.zarr", textured((128, 128, 128)))
    poison(path, (1, 1, 1))
    return path


@pytest.mark.usefixtures("ray_cluster")
def test_the_count_of_readers_is_that_of_their_processes_also_once_all_is_read_and_batches_remain(volume: Path) -> None:
    with open_stream(make_job(volume), workers=2, stop=400) as stream:
        next(stream)
        for living in (2, 0):
            deadline = time.monotonic() + 120
            while stream.readers_alive != living and time.monotonic() < deadline:
                if stream.readers_with_work:
                    next(stream)
                time.sleep(0.05)
            assert stream.readers_alive == living
            while (found := sum(map(psutil.pid_exists, stream.readers))) != living and time.monotonic() < deadline:
                time.sleep(0.05)  # Ray's table is ahead of the end of a process
            assert found == living
        assert stream.options.workers == 2
        assert sum(1 for _ in stream) > 0, "batches that lay ready"
    assert stream.readers_alive == 0


def died(stream: PatchStream) -> list[dict[str, Any]]:
    return [event.fields for event in stream.events if event.kind == "reader_died"]


@pytest.mark.usefixtures("ray_cluster")
def test_a_region_that_ends_its_reader_is_replaced_and_the_stream_goes_on(poisoned: Path) -> None:
    job = make_job(poisoned)
    with open_stream(job, workers=2) as stream:
        patches, indices = collect(stream, 100)
        deaths, records = died(stream), stream.quarantined
    assert indices.tolist() == list(range(400))
    assert 2 <= len(deaths) <= 3, "each reader that has not heard of the first two once"
    for fields in deaths:
        assert (fields["signal"], fields["volume"]) == ("SIGABRT", str(poisoned))
        assert all(lo < 64 and hi > 32 for lo, hi in zip(*fields["box"], strict=True))
        assert fields["chunk"] == (1, 1, 1)
    assert records
    assert all(record["chunk"] == [1, 1, 1] and "killed two readers" in record["cause"] for record in records)
    with open_stream(job, quarantined=records) as stream:
        again, _ = collect(stream, 100)
        assert died(stream) == []
    assert again.tobytes() == patches.tobytes(), "a crash changes no voxel"


@pytest.mark.long
@pytest.mark.usefixtures("ray_cluster")
def test_readers_that_have_ended_leave_no_notes(volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # More than are read ahead: the reader that is killed has work left.
    monkeypatch.setattr(ray_stream, "TASKS_PER_SEGMENT", 24)
    job = replace(make_job(volume), notes_dir=str(tmp_path / "notes"))
    with open_stream(job, workers=1) as stream:
        victim, readers = killed_reader(stream), set[int]()
        for _ in itertools.islice(stream, 400):
            readers |= stream.readers.keys()
        assert len(readers) > 2, "those of several segments"
        deadline = time.monotonic() + 60
        while any(not note.is_alive() for note in read_notes(tmp_path / "notes")) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = read_notes(tmp_path / "notes")
        assert all(note.is_alive() for note in left)
        assert {path.stem for path in (tmp_path / "notes").iterdir()} == {note.path.stem for note in left}, "dumps too"
        (death,) = died(stream)
        assert death["pid"] == victim, "counted before its note was removed"


@pytest.mark.long
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("limit", [0, 1])
def test_more_deaths_than_allowed_end_the_stream_with_one_line(poisoned: Path, limit: int) -> None:
    for chunk in [(i, j, k) for i in range(4) for j in range(4) for k in range(4)]:
        poison(poisoned, chunk)
    with (
        open_stream(make_job(poisoned, max_reader_deaths=limit), workers=1 + limit) as stream,
        pytest.raises(DataError) as raised,
    ):
        collect(stream, 100)
    text = str(raised.value)
    assert f"at most data.max_reader_deaths={limit} readers may die in one session; got {limit + 1}" in text
    assert "poisoned.zarr, region z" in text
    assert "SIGABRT" in text
    assert "\n" not in text
    assert "\x1b" not in text


def test_without_ray_there_is_no_cause_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch.private, "worker_exits", lambda: 1 / 0)
    assert watch.exit_of(1, b"") is None


def test_ray_s_account_is_cut_to_what_it_knows_of_this_process() -> None:
    text = (
        "2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.2, ID: f00) was "
        "22.83GB used / 23.54GB limit (0.970000)\nOOM kill reason: Memory usage 24518215680B exceeded threshold of "
        "24012685312B (95.0% of 25276510208B limit)\nObject store memory usage: [- objects spillable: 0\n"
        "Selected to kill: (Actor(8b): job ID=01, pid=29987, actual memory used=9.99GB, worker ID=1), "
        "(Actor(8c): job ID=01, pid=29988, actual memory used=2.49GB, worker ID=fc)\nRefer to the documentation"
    )
    for detail, kept in (
        (text, "Memory usage 24518215680B exceeded threshold of 24012685312B (95.0% of 25276510208B limit)"),
        ("Worker exits.\nSome more. Some common causes include: the OOM killer", "Worker exits. Some more."),
    ):
        ended = WorkerExit(29988, b"", "NODE_OUT_OF_MEMORY", detail, 1000.0)
        assert ReaderDeath(29988, "node", ended, None).fields(None)["exit_detail"] == kept
