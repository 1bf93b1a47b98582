"""What a run changes on a verdict between two steps, refuses, or leaves alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.monitor.test_verdict import window
from tests.training.stand_ins import run_context
from vesuvius.config.load import read_config
from vesuvius.errors import ConfigError
from vesuvius.monitor.memory.limits import RAY_NAME, Limits, MemoryLimit, left_bytes
from vesuvius.monitor.verdict import Cause, Verdict
from vesuvius.runlog.records import read_records
from vesuvius.stream.options import StreamOptions, store_need_bytes
from vesuvius.stream.reading.reader_figures import ReaderFigures
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.training.autotune import Autotuner, changes_of
from vesuvius.training.checkpoint.progress import Progress
from vesuvius.training.ranks.ranks import Ranks

WriteConfig = Callable[..., Path]
MIB, GIB = 2**20, 2**30


def says(cause: Cause | None, *overrides: str) -> Verdict:
    return Verdict("data-bound" if cause else "compute-bound", cause, f"because of {cause}", overrides, "", window())


TOO_SMALL = says("prefetch too small", "training.prefetch_factor=4")
FEW_WORKERS = says("workers too few", "training.workers=4")


@dataclass
class NotedStream:
    """Its readers have never taken more than 300 MiB."""

    options: StreamOptions
    refuses: str = ""
    readers: dict[int, ReaderFigures] = field(
        default_factory=lambda: {pid: ReaderFigures(rss_anon_peak_bytes=100 * MIB * pid) for pid in (1, 2, 3)}
    )


@dataclass
class NotedFeed:
    """Notes how the stream is to change, or refuses."""

    stream: NotedStream
    changes: list[dict[str, int]] = field(default_factory=list)
    memory_of_batch: int = 4096

    def reconfigure(self, **changes: Any) -> None:
        self.changes.append(changes)
        if self.stream.refuses:
            raise ConfigError(self.stream.refuses)
        self.stream.options = replace(self.stream.options, **changes)


@dataclass
class NotedMonitor:
    """A machine of 64 GiB."""

    used_bytes: int = 10 * GIB
    restarts: int = 0

    @property
    def risk(self) -> Any:
        return SimpleNamespace(killers=(MemoryLimit("the machine", self.used_bytes, 64 * GIB, 64 * GIB),))

    def readers_changed(self) -> None:
        self.restarts += 1


class Loop:
    """A session in which the test gives the verdicts."""

    def __init__(self, config_file: Path, metrics: Path) -> None:
        self.config, self._metrics = read_config(config_file, ()), metrics
        self.job = prepare_data(0, self.config.data).job
        self.progress = Progress(step=10)
        self.tuner = Autotuner(run_context(self.config, metrics.parent, self.progress), self.job)
        self.stream = NotedStream(StreamOptions.from_config(self.config.training, self.config.cluster))
        self.feed, self.monitor = NotedFeed(self.stream), NotedMonitor()

    def hears(self, *verdicts: Verdict) -> None:
        for verdict in verdicts:
            self.tuner.take(verdict)
            self.act()

    def act(self) -> None:
        self.tuner.act(self.stream, self.feed, self.monitor)  # type: ignore[arg-type]

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_records(self._metrics)


@pytest.fixture
def loop(tmp_path: Path, tiny_config: WriteConfig, caplog: pytest.LogCaptureFixture) -> Callable[..., Loop]:
    caplog.set_level(logging.INFO, "vesuvius")

    def make(mode: str = "act", cluster: dict[str, Any] | None = None, **training: Any) -> Loop:
        keys = {"autotune": mode, "workers": 2, "steps_per_epoch": 100} | training
        path = tiny_config(training=keys, monitor={"verdict_every": 10}, cluster=cluster or {})
        return Loop(path, tmp_path / "metrics.jsonl")

    return make


def test_off_does_nothing_and_advise_of_earlier_configs_is_off(loop: Callable[..., Loop]) -> None:
    run = loop("advise")
    assert run.config.training.autotune == "off"
    run.hears(TOO_SMALL, FEW_WORKERS)
    assert (run.events, run.feed.changes) == ([], [])


def test_a_verdict_is_applied_once_and_the_event_says_why(
    loop: Callable[..., Loop], caplog: pytest.LogCaptureFixture
) -> None:
    run = loop()
    run.act()
    run.hears(TOO_SMALL)
    run.act()
    assert run.feed.changes == [{"prefetch_factor": 4}]
    (event,) = run.events
    assert (event["kind"], event["event"], event["step"]) == ("event", "autotune", 10)
    assert (event["override"], event["refused"]) == ("training.prefetch_factor=4", None)
    assert event["text"] == caplog.messages[0] == "autotune: training.prefetch_factor=4: because of prefetch too small"
    assert run.monitor.restarts == 1, "what memory did before the readers were started anew says nothing"
    run.hears(says(None), says("store latency", "data.store.requests=32"), FEW_WORKERS)
    assert run.feed.changes[1:] == [{"requests": 32}, {"workers": 4}]


def test_what_a_running_stream_cannot_change_is_left_alone() -> None:
    two, none = StreamOptions(2, 2), StreamOptions(2, 0)
    assert changes_of(("training.workers=2",), none) == {}, "Ray is not started while a run trains"
    assert changes_of(("training.prefetch_mib=64",), two) == {}, "it is the user's own limit"
    assert changes_of(("training.train_batch_size=2", "training.accumulate_steps=1"), two) == {}


def test_what_would_bring_the_guard_in_is_refused_and_said_once(
    loop: Callable[..., Loop], caplog: pytest.LogCaptureFixture
) -> None:
    """A reader counts as the largest there is, twice, with its part of the object store; ranks of a node share."""
    run = loop()
    store = store_need_bytes(run.job, StreamOptions(2, 4)) - store_need_bytes(run.job, StreamOptions(2, 2))
    need = 2 * (2 * 300 * MIB + store) + 4 * 4096
    run.monitor.used_bytes = int(0.84 * 64 * GIB) - need + 10
    run.hears(FEW_WORKERS, FEW_WORKERS)
    assert run.feed.changes == []
    (event,) = run.events
    assert "it would take 1.18 GiB more" in event["refused"]
    assert "autotune skipped training.workers=4" in caplog.messages[0]
    for word in ("killed", "oom", "out of memory", "warn", "error"):
        assert word not in caplog.text.lower().replace("info", "")
    other = loop()
    other.tuner._run = replace(other.tuner._run, ranks=Ranks(1, 8, local_rank=1, local_world=2))
    other.monitor.used_bytes = run.monitor.used_bytes - need
    other.hears(FEW_WORKERS)
    assert other.feed.changes == [], "the other rank may take as much"
    third = loop()
    third.monitor.used_bytes = run.monitor.used_bytes - 20
    third.hears(FEW_WORKERS)
    assert third.feed.changes == [{"workers": 4}]


def test_a_change_that_cannot_be_had_is_said_and_not_tried_again(loop: Callable[..., Loop]) -> None:
    run = loop()
    run.stream.refuses = "the object store must fit in /dev/shm"
    run.hears(FEW_WORKERS, FEW_WORKERS)
    assert len(run.feed.changes) == 1
    (event,) = run.events
    assert event["refused"] == run.stream.refuses
    assert run.monitor.restarts == 0
    run.stream.refuses = ""
    run.hears(FEW_WORKERS, TOO_SMALL)
    assert run.feed.changes[1:] == [{"prefetch_factor": 4}], "it may still do something else"


def test_an_error_behind_which_the_stream_is_not_as_it_was_is_not_passed_over(loop: Callable[..., Loop]) -> None:
    run = loop()

    def half_done(**changes: Any) -> None:
        run.stream.options = replace(run.stream.options, **changes)
        raise ConfigError("the cluster must answer")

    run.feed.reconfigure = half_done  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="must answer"):
        run.hears(FEW_WORKERS)


def test_readers_that_an_object_store_of_the_config_is_too_small_for_are_not_added(loop: Callable[..., Loop]) -> None:
    run = loop(cluster={"object_store_gib": 0.009})
    run.hears(FEW_WORKERS)
    assert run.feed.changes == []
    assert "cluster.object_store_gib must hold" in run.events[0]["refused"]


def test_nothing_changes_when_no_window_is_left_to_gain_by_it(loop: Callable[..., Loop]) -> None:
    run = loop(max_steps=40)
    run.progress.step = 31
    run.hears(TOO_SMALL)
    assert run.feed.changes == []
    run.progress.step = 30
    run.hears(TOO_SMALL)
    assert len(run.feed.changes) == 1


def test_what_is_left_is_counted_by_the_tightest_killer_as_the_guard_does() -> None:
    machine = MemoryLimit("the machine", 30 * GIB, 64 * GIB, 64 * GIB)
    cgroup = MemoryLimit("memory.max of cgroup /x", 2 * GIB, 16 * GIB, 16 * GIB)
    early = MemoryLimit(RAY_NAME, 30 * GIB, 64 * GIB, 32 * GIB)  # kills at half of it

    def left(*killers: MemoryLimit) -> int:
        return left_bytes(killers, Limits())

    assert left(machine) == pytest.approx(0.84 * 64 * GIB - 30 * GIB, abs=1)
    assert left(machine, cgroup) == pytest.approx(0.84 * 16 * GIB - 2 * GIB, abs=1)
    assert left(early) == pytest.approx(0.84 / (0.95 / 0.5) * 64 * GIB - 30 * GIB, abs=1)
    assert left(early) < 0
