"""The controller: what it does, says, or leaves alone between two steps, with decisions of the real policy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.monitor.test_steering import FEW_WORKERS, FULL, TOO_SMALL
from tests.training.stand_ins import run_context
from vesuvius.config.load import read_config
from vesuvius.errors import ConfigError
from vesuvius.monitor.memory.limits import RAY_NAME, Limits, MemoryLimit, left_bytes
from vesuvius.monitor.verdict import Verdict
from vesuvius.runlog.records import read_records
from vesuvius.stream.options import StreamOptions, batches_ahead, store_need_bytes
from vesuvius.stream.reading.reader_figures import ReaderFigures
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.training.autotune import Autotuner
from vesuvius.training.checkpoint.progress import Progress
from vesuvius.training.ranks.ranks import Ranks

WriteConfig = Callable[..., Path]
MIB, GIB = 2**20, 2**30
# So many batches of the tiny config (4 KiB) that half of them are worth freeing.
MANY = 16384


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
    short: bool = False
    restarts: int = 0

    @property
    def risk(self) -> Any:
        return SimpleNamespace(killers=(MemoryLimit("the machine", self.used_bytes, 64 * GIB, 64 * GIB),))

    def memory_is_short(self) -> bool:
        return self.short

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

    @property
    def ahead(self) -> int:
        return batches_ahead(self.job.patch_bytes, self.stream.options)


@pytest.fixture
def loop(tmp_path: Path, tiny_config: WriteConfig, caplog: pytest.LogCaptureFixture) -> Callable[..., Loop]:
    caplog.set_level(logging.INFO, "vesuvius")

    def make(mode: str = "act", cluster: dict[str, Any] | None = None, **training: Any) -> Loop:
        keys = {"autotune": mode, "workers": 2, "steps_per_epoch": 100} | training
        path = tiny_config(training=keys, monitor={"verdict_every": 10}, cluster=cluster or {})
        return Loop(path, tmp_path / "metrics.jsonl")

    return make


def test_off_is_silent(loop: Callable[..., Loop], caplog: pytest.LogCaptureFixture) -> None:
    run = loop("off")
    run.hears(TOO_SMALL, FEW_WORKERS)
    assert (run.events, run.feed.changes, caplog.messages) == ([], [], [])


def test_advise_says_each_advice_once_and_does_nothing(
    loop: Callable[..., Loop], caplog: pytest.LogCaptureFixture
) -> None:
    run = loop("advise")
    run.hears(TOO_SMALL, FEW_WORKERS, TOO_SMALL, FEW_WORKERS)
    assert run.feed.changes == []
    assert [(e["outcome"], e["override"]) for e in run.events] == [
        ("advised", "training.prefetch_factor=4"),
        ("advised", "training.workers=4"),
    ]
    assert caplog.messages == [
        "autotune advises training.prefetch_factor=4 (batches ahead 4 -> 8, 0.0156 MiB -> 0.0312 MiB): because of "
        "prefetch too small",
        "autotune advises training.workers=4 (readers 2 -> 4): because of workers too few",
    ]


def test_batches_ahead_grow_as_a_number_of_bytes_and_the_event_says_why(
    loop: Callable[..., Loop], caplog: pytest.LogCaptureFixture
) -> None:
    run = loop()
    run.hears(TOO_SMALL)
    assert run.feed.changes == [{"workers": 2, "prefetch_factor": 4, "prefetch_bytes": 8 * 4096}]
    assert run.ahead == 8
    (event,) = run.events
    assert (event["kind"], event["event"], event["step"], event["mode"]) == ("event", "autotune", 10, "act")
    assert (event["outcome"], event["action"], event["from"], event["to"]) == ("done", "more_prefetch", 16384, 32768)
    assert event["reason"] == "because of prefetch too small"
    assert event["text"] == caplog.messages[0]
    assert run.monitor.restarts == 1, "what memory did before the readers were started anew says nothing"


def test_a_verdict_is_acted_on_once(loop: Callable[..., Loop]) -> None:
    run = loop()
    run.act()
    run.hears(TOO_SMALL)
    run.act()
    run.act()
    assert len(run.feed.changes) == 1


def test_readers_come_go_back_at_the_knee_and_the_bytes_ahead_stay(loop: Callable[..., Loop]) -> None:
    run = loop()
    run.hears(TOO_SMALL, FEW_WORKERS, FEW_WORKERS, FEW_WORKERS)
    assert [change["workers"] for change in run.feed.changes] == [2, 4, 2]
    assert {change["prefetch_bytes"] for change in run.feed.changes} == {8 * 4096}
    assert run.ahead == 8
    assert [(e["action"], e["from"], e["to"]) for e in run.events[1:]] == [
        ("more_workers", 2, 4),
        ("fewer_workers", 4, 2),
    ]


def test_batches_ahead_that_stay_full_are_halved(loop: Callable[..., Loop]) -> None:
    run = loop(prefetch_factor=MANY // 2)
    run.hears(FULL, FULL)
    assert run.feed.changes == []
    run.hears(FULL)
    assert run.ahead == MANY // 2
    assert run.events[0]["action"] == "less_prefetch"


def test_what_would_pass_the_guards_first_rung_is_not_done_and_said_once(
    loop: Callable[..., Loop], caplog: pytest.LogCaptureFixture
) -> None:
    """A reader counts as the largest there is, twice, with its part of the object store."""
    run = loop()
    store = store_need_bytes(run.job, StreamOptions(2, 3)) - store_need_bytes(run.job, StreamOptions(2, 2))
    need = 2 * (300 * MIB + store)
    run.monitor.used_bytes = int(0.84 * 64 * GIB) - need + 10
    run.hears(FEW_WORKERS, FEW_WORKERS)
    assert run.feed.changes == []
    (event,) = run.events
    assert event["outcome"] == "refused"
    assert "one more reader would take" in event["refused"]
    assert "monitor.prefetch_at" in caplog.messages[0]
    run.monitor.used_bytes -= 20
    run.hears(FEW_WORKERS)
    assert run.stream.options.workers == 3, "as many as there is memory for, which is one"


def test_ranks_of_one_node_share_the_memory_that_is_left(loop: Callable[..., Loop]) -> None:
    run = loop()
    run.tuner._run = replace(run.tuner._run, ranks=Ranks(1, 8, local_rank=1, local_world=2))
    store = store_need_bytes(run.job, StreamOptions(2, 3)) - store_need_bytes(run.job, StreamOptions(2, 2))
    need = 2 * (300 * MIB + store)
    run.monitor.used_bytes = int(0.84 * 64 * GIB) - 2 * need + 10
    run.hears(FEW_WORKERS)
    assert run.feed.changes == [], "the other one may take as much"
    run.monitor.used_bytes -= 20
    run.hears(FEW_WORKERS)
    assert run.stream.options.workers == 3


def test_nothing_is_raised_once_the_memory_guard_has_acted(loop: Callable[..., Loop]) -> None:
    run = loop()
    run.hears(TOO_SMALL)
    run.monitor.short = True
    run.stream.options = replace(run.stream.options, prefetch_factor=2)
    run.hears(TOO_SMALL, FEW_WORKERS, TOO_SMALL)
    assert len(run.feed.changes) == 1
    assert [event["refused"] for event in run.events[1:]] == ["memory is short"] * 2
    assert run.ahead == 4


def test_the_limit_of_the_config_on_batches_ahead_is_kept(loop: Callable[..., Loop]) -> None:
    run = loop(prefetch_mib=1, prefetch_factor=200)
    assert run.ahead == 256
    run.hears(TOO_SMALL)
    assert run.feed.changes == []
    assert run.events[0]["refused"] == "training.prefetch_mib allows no more"


def test_a_change_that_cannot_be_had_is_said_and_not_tried_again(loop: Callable[..., Loop]) -> None:
    run = loop()
    run.stream.refuses = "the object store must fit in /dev/shm"
    run.hears(FEW_WORKERS, FEW_WORKERS)
    assert len(run.feed.changes) == 1
    (event,) = run.events
    assert (event["outcome"], event["refused"]) == ("refused", run.stream.refuses)
    assert run.monitor.restarts == 0
    run.stream.refuses = ""
    run.hears(FEW_WORKERS, TOO_SMALL)
    assert [change["workers"] for change in run.feed.changes] == [4, 2], "it may still do something else"


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
    needs = [store_need_bytes(run.job, options) / GIB for options in (run.stream.options, StreamOptions(2, 4))]
    assert needs[0] < 0.009 < needs[1], needs
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


@pytest.mark.parametrize("action", ["advise", "act"])
def test_no_line_alarms_who_greps_for_kills(
    loop: Callable[..., Loop], caplog: pytest.LogCaptureFixture, action: str
) -> None:
    run = loop(action)
    run.hears(TOO_SMALL, FEW_WORKERS, FEW_WORKERS)
    run.monitor.used_bytes = 60 * GIB
    run.hears(TOO_SMALL)
    for word in ("killed", "oom", "out of memory", "warn", "error"):
        assert not [text for text in caplog.messages if word in text.lower()]
    assert len(caplog.messages) >= 3


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
