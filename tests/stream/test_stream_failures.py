"""A stream that fails says so: nothing of it looks like the end of the data, and it can be asked where it stands."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.conftest import textured, wait_until_gone, write_array
from tests.stream.test_stream import collect, make_job, open_stream
from tests.support import fork_server
from vesuvius.config import ClusterConfig
from vesuvius.errors import ConfigError, DataError
from vesuvius.stream import events, source
from vesuvius.stream import stream as stream_module
from vesuvius.stream.feeder import Cutter, Patch, StreamOrderError, WaitTime
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.ray import private, regions
from vesuvius.stream.ray import session as ray_session
from vesuvius.stream.reading import reading_log
from vesuvius.stream.reading.reader import Block, Reader, region_in
from vesuvius.stream.reading.reader_stats import BlockReport, Readers, ReaderTotals
from vesuvius.volumes.errors import ClosedError


def test_a_reconfigure_that_fails_does_not_look_like_the_end(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_stream(make_job(volume)) as stream:
        next(stream)
        with monkeypatch.context() as broken:
            broken.setattr(source, "LocalRegions", refuse)
            with pytest.raises(ConfigError, match="no readers today"):
                stream.reconfigure(prefetch_factor=3)
        for _ in range(2):
            with pytest.raises(ConfigError, match="no readers today"):
                next(stream)
        stream.reconfigure(prefetch_factor=4)
        assert next(stream).indices.tolist() == [4, 5, 6, 7], "it goes on where it was"


def refuse(*_: Any) -> None:
    raise ConfigError("no readers today")


def test_a_ray_that_survives_being_killed_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a cluster of others hangs, whose daemons are not ours to kill."""
    never, called = threading.Event(), []
    monkeypatch.setattr(ray_session, "_END_S", 0.05)
    monkeypatch.setattr(ray_session, "_KILLED_S", 0.05)
    monkeypatch.setattr(ray_session.private, "shut_down", lambda when_handlers_are_back: never.wait())
    monkeypatch.setattr(ray_session.private, "kill_daemons", lambda: called.append("kill"))
    monkeypatch.setattr(ray_session.private, "skip_shutdown_at_exit", lambda: called.append("leave"))
    monkeypatch.setattr(ray_session.Session, "_hangs", not ray_session._shut_down())
    never.set()
    assert called == ["kill", "leave"]
    assert "killing a Ray that this command started" in caplog.text
    assert "giving up on it" in caplog.text
    with pytest.raises(ConfigError, match="Cannot start Ray: an earlier Ray"):
        ray_session.Session(ClusterConfig(), workers=1, ranks=1, store_bytes=2**28)


LEFT_OPEN = """
import sys, time
from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream

path, workers, streams, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
job = prepare_data(0, DataConfig(volumes=(VolumeConfig(path=path),), patch_size=(8, 16, 16))).job
left = [PatchStream(job, StreamOptions(4, workers, processes=workers > 0)) for _ in range(streams)]
for stream in left:
    next(stream)
import psutil
print(time.time(), *(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
if end == "error":
    raise RuntimeError("the loop broke")
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("workers", "streams", "end"), [(0, 1, "exit"), pytest.param(1, 3, "error", marks=pytest.mark.long)]
)
def test_an_unclosed_stream_does_not_block_interpreter_exit(
    tmp_path: Path, workers: int, streams: int, end: str
) -> None:
    path = write_array(tmp_path / "v.zarr", textured((96, 128, 128)))
    command = [sys.executable, "-c", LEFT_OPEN, str(path), str(workers), str(streams), end]
    done = fork_server.run(command, capture_output=True, text=True, timeout=200, check=False)
    ended = time.time()
    assert done.returncode == {"exit": 3, "error": 1}[end], done.stderr
    began, *children = done.stdout.split()
    assert ended - float(began) < 30, "two seconds where nobody else computes; it was 30 to 40, or for ever"
    assert wait_until_gone([psutil.Process(pid) for pid in map(int, children) if psutil.pid_exists(pid)], 30) == []


@pytest.mark.long
@pytest.mark.usefixtures("ray_cluster")
def test_too_many_deaths_during_a_segment_change_end_the_stream(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch interrupts the executions while the next one is being made: the old one then ends without an error, and
    the new one, where it is missed, goes on with other blocks than the next."""
    segments: list[regions.Segment] = []
    while_the_second_is_made: list[Callable[[], None]] = []

    class Segment(regions.Segment):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            segments.append(self)
            if len(segments) == 2:
                watch = threading.Thread(target=while_the_second_is_made[0])
                watch.start()
                watch.join()

        def next_block(self) -> Block | None:
            return None if self._handle.closed and self is segments[0] else super().next_block()

    monkeypatch.setattr(regions, "Segment", Segment)
    monkeypatch.setattr(regions, "TASKS_PER_SEGMENT", 6)
    monkeypatch.setattr(events, "DEATHS_MAX", 0)
    with open_stream(make_job(volume), processes=1) as stream:
        assert stream._source
        source: Any = stream._source._ray
        source = source.result()
        while_the_second_is_made.append(lambda: source._worker_died("a death", {"pid": 1, "node": "here"}))
        with pytest.raises(DataError, match=r"1 workers died in one session \(limit 0\)"):
            collect(stream, 2000)
        assert len(segments) == 2
        assert segments[1]._handle.closed, "the new one was not missed"


def test_an_invalid_state_is_refused(volume: Path) -> None:
    job = replace(make_job(volume, max_quarantined=5), world_size=2)
    record = {"volume": "v", "number": 0, "box": [[0, 0, 0], [8, 8, 8]], "chunk": [0, 0, 0], "cause": "torn"}
    bad_records: list[Any] = [
        {},
        "x",
        None,
        record | {"box": [[0, 0], [8, 8]]},
        record | {"box": [["0", 0, 0], [8, 8, 8]]},
        record | {"box": 3},
        record | {"number": 1},
        record | {"number": "?"},
    ]
    with open_stream(job) as stream:
        state: Any = stream.state_dict()
        for none in ({}, None, [], {"seed": 0}, state | {"quarantined": None}):
            with pytest.raises(ConfigError, match="was not returned by state_dict"):
                stream.load_state_dict(none)
        for wrong in [True, 3, -2, "0"]:
            with pytest.raises(
                ConfigError, match=r"was not returned by state_dict|multiple of the number of ranks"
            ) as raised:
                stream.load_state_dict(state | {"sample_index": wrong})
            assert "\n" not in str(raised.value)
        for bad in bad_records:
            with pytest.raises(ConfigError, match="is not a quarantine record of these 1 volumes") as raised:
                stream.load_state_dict(state | {"quarantined": [bad]})
            assert "\n" not in str(raised.value)
            with pytest.raises(ConfigError, match="is not a quarantine record of these 1 volumes"):
                open_stream(job, quarantined=[bad])
        assert next(stream).indices.tolist() == [0, 2, 4, 6], "the stream stays as it was"
        stream.load_state_dict(state | {"sample_index": 4, "quarantined": [record]})
        assert next(stream).indices.tolist() == [4, 6, 8, 10]


def test_a_closed_stream_cannot_be_reopened(volume: Path) -> None:
    with open_stream(make_job(volume)) as stream:
        state = stream.state_dict()
    with pytest.raises(ConfigError, match="The stream is closed"):
        stream.reconfigure(prefetch_factor=3)
    with pytest.raises(ConfigError, match="The stream is closed"):
        stream.load_state_dict(state)
    with pytest.raises(ClosedError, match="closed"):  # an end would look like that of the samples
        next(stream)
    assert stream not in stream_module._open


# ---- what a library user gets wrong

WRONG: list[dict[str, Any]] = [
    {"batch_size": 0},
    {"batch_size": 2.5},
    {"batch_size": True},
    {"batch_size": 4, "num_workers": -1},
    {"batch_size": 4, "prefetch_factor": 0},
    {"batch_size": 4, "requests": 0},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    assert StreamOptions(np.int64(4), np.int32(0)).batch_size == 4  # type: ignore[arg-type]
    *_, (name, value) = options.items()
    with pytest.raises(
        ConfigError, match=rf"^{name} {re.escape(repr(value))} is not an integer of at least \d; change it$"
    ):
        StreamOptions(**options)


def test_processes_without_a_number_are_refused_and_a_running_stream_keeps_its_readers(volume: Path) -> None:
    with pytest.raises(ConfigError, match="processes=True with num_workers=0 starts no reader"):
        StreamOptions(4, 0, processes=True)
    for no_bool in (4, "no", None):  # not a number of processes either
        with pytest.raises(ConfigError, match=f"processes {no_bool!r} is not valid; set it to True or False"):
            StreamOptions(4, processes=no_bool)  # type: ignore[arg-type]
    assert StreamOptions(4, processes=np.bool_(False)).processes is False  # type: ignore[arg-type]
    with open_stream(make_job(volume)) as stream:
        with pytest.raises(ConfigError, match="starts no reader"):
            stream.reconfigure(processes=True)
        assert next(stream).indices.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("first", "stop"), [(-1, None), (1, None), (8, 6)])
def test_an_invalid_sample_range_is_refused(volume: Path, first: int, stop: int | None) -> None:
    job = make_job(volume)
    two_ranks = replace(job, world_size=2)
    with pytest.raises(ConfigError, match=f"first={first}, stop={stop} is not a valid"):
        open_stream(two_ranks, first=first, stop=stop)


# ---- blocks

Change = Callable[[list[Block]], list[Block]]


def cut(volume: Path, change: Change) -> list[Patch]:
    job = make_job(volume, regions_in_flight=8)
    reader = Reader(job, ring=2)
    blocks = [block.copy() for task in job.tasks(0, 96) for block in reader.blocks(task)]
    reader.close()
    regions = (region_in(block, job) for block in change(blocks))
    return list(Cutter(job, regions, lambda report: None, WaitTime(), 0, 96).patches())


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


# ---- why a reader died, by Ray's account


def test_a_reader_counts_as_dead_once_its_replacement_reports() -> None:
    """A task that was retried may come before one that the process before had done."""
    readers = Readers()

    def died(pid: int, actor: str = "a") -> tuple[int, str] | None:
        return readers.add(BlockReport(pid, "n", actor, float(pid), 1, ReaderTotals(blocks=1)), 2)

    assert [died(pid) for pid in (1, 1, 3, 2, 3)] == [None, None, (1, "n"), (2, "n"), None]
    assert (set(readers.living), readers.totals.blocks) == ({3}, 5)
    assert [died(9, "b"), died(8, "c")] == [None, None], "another execution's"
    assert set(readers.living) == {9, 8}


def test_rays_exit_detail_is_shortened_to_facts_about_the_process() -> None:
    text = (
        "2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.2, ID: f00) was "
        "22.83GB used / 23.54GB limit (0.970000)\nOOM kill reason: Memory usage 24518215680B exceeded threshold of "
        "24012685312B (95.0% of 25276510208B limit)\nObject store memory usage: [- objects spillable: 0\n"
        "Selected to kill: (Actor(8b): job ID=01, pid=29987, actual memory used=9.99GB, worker ID=1), "
    )
    kept = "Memory usage 24518215680B exceeded threshold of 24012685312B (95.0% of 25276510208B limit)"
    assert private._detail(text) == kept
    assert private._detail("Worker exits.\nMore. Some common causes include: the OOM killer") == "Worker exits. More."
    assert reading_log.exit_of(lambda *_: 1 / 0, 1, "") == {}, "no cause, and no error"  # type: ignore[return-value,arg-type]
    assert reading_log.describe_death(1, "here", {}, None)[0].endswith("killed or died (Ray reports no cause)")
