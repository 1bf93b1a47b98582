"""What the run does on the guard's orders: smaller readers between two steps, or the end with exit code 4."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vesuvius.config_file import read_config
from vesuvius.data.prepare import prepare_data
from vesuvius.data.stream import PatchStream
from vesuvius.data.stream_options import StreamOptions
from vesuvius.engine.memory_acts import MemoryActs
from vesuvius.engine.progress import Progress
from vesuvius.engine.stop import StopRequest
from vesuvius.errors import EXIT_GUARD, EXIT_STOPPED
from vesuvius.observe.metrics import Metrics
from vesuvius.observe.monitor import Told
from vesuvius.observe.records import read_records
from vesuvius.observe.risk.guard import Order

WriteConfig = Callable[..., Path]


class NotedMonitor:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told = Told()
        self.obeyed = 0

    def carried_out(self) -> None:
        self.obeyed += 1


class NotedStream:
    """Notes how it is to change."""

    def __init__(self) -> None:
        self.changes: list[dict[str, int]] = []

    def reconfigure(self, **changes: int) -> None:
        self.changes.append(changes)

    def reader_memory(self) -> dict[int, int]:
        return {41: 7}


class Loop:
    """Acts of a run with so many workers, and what is around them."""

    def __init__(self, config_file: Path, metrics: Path) -> None:
        self.stop = StopRequest(None)
        self.progress = Progress(step=3, sample_index=12)
        self.metrics = metrics
        self.acts = MemoryActs(read_config(config_file, ()), self.stop, Metrics(metrics), self.progress)
        self.monitor: Any = NotedMonitor()
        self.stream: Any = NotedStream()

    def step(self, *orders: Order) -> None:
        for order in orders:
            self.acts.take(order)
        self.acts.obey(self.stream, self.monitor)

    def events(self) -> list[dict[str, Any]]:
        return [record for record in read_records(self.metrics) if record["event"] == "guard"]


@pytest.fixture
def loop(tmp_path: Path, tiny_config: WriteConfig) -> Callable[..., Loop]:
    return lambda **training: Loop(tiny_config(training=training), tmp_path / "metrics.jsonl")


def test_the_ladder_goes_down_to_one_batch_and_one_reader(loop: Callable[..., Loop]) -> None:
    run = loop(workers=3, prefetch_factor=5)
    run.step()
    assert (run.monitor.told.prefetch_left, run.monitor.told.workers_left) == (True, True)
    assert run.monitor.told.readers == {41: 7}
    for rung in ("prefetch", "prefetch", "worker", "worker"):
        run.step(Order(rung, "near out of memory"))
    assert run.stream.changes == [{"prefetch_factor": 2}, {"prefetch_factor": 1}, {"workers": 2}, {"workers": 1}]
    assert (run.monitor.told.prefetch_left, run.monitor.told.workers_left) == (False, False)
    assert run.monitor.obeyed == 4
    assert [(event["rung"], event["step"]) for event in run.events()][::3] == [("prefetch", 3), ("worker", 3)]
    assert not run.stop.wanted()
    assert run.acts.remedy() == "go on with --resume training.workers=0 training.prefetch_factor=1"


def test_a_step_without_an_order_changes_nothing(loop: Callable[..., Loop]) -> None:
    run = loop(workers=2)
    run.step()
    run.step()
    assert run.stream.changes == []
    assert run.monitor.obeyed == 0
    assert run.events() == []


def test_an_exit_order_is_a_wish_to_stop_at_once_not_only_behind_the_step(loop: Callable[..., Loop]) -> None:
    run = loop(workers=0)
    run.acts.take(Order("exit", "near out of memory"))
    assert run.stop.wanted(), "a validation looks at it"
    assert run.stop.exit_code == EXIT_GUARD
    run.step()
    assert run.stream.changes == []
    assert [event["rung"] for event in run.events()] == ["exit"]
    assert run.acts.reason == "near out of memory"


def test_who_asked_first_says_how_the_run_ends(loop: Callable[..., Loop]) -> None:
    run = loop()
    with run.stop:
        signal.raise_signal(signal.SIGTERM)
    run.step(Order("exit", "near out of memory"))
    assert run.stop.exit_code == EXIT_STOPPED


def test_without_readers_the_monitor_is_told_of_none(loop: Callable[..., Loop]) -> None:
    run = loop(workers=0, prefetch_factor=1)
    run.step()
    assert run.monitor.told.readers == {}
    assert not run.monitor.told.workers_left
    assert "more memory" in run.acts.remedy()


def test_a_real_stream_that_is_made_smaller_delivers_the_same_batches(
    tmp_path: Path, tiny_config: WriteConfig
) -> None:
    config = read_config(tiny_config(training={"prefetch_factor": 4}), ())
    job, options = prepare_data(0, config.data).job, StreamOptions.from_config(config.training, config.cluster)
    acts = MemoryActs(config, StopRequest(None), Metrics(tmp_path / "metrics.jsonl"), Progress())
    monitor: Any = NotedMonitor()
    with PatchStream(job, options) as plain, PatchStream(job, options) as shrunk:
        for number in range(12):
            if number in (3, 7):
                acts.take(Order("prefetch", "near out of memory"))
            acts.obey(shrunk, monitor)
            expected, batch = next(plain), next(shrunk)
            assert (batch.indices == expected.indices).all()
            assert (batch.patches == expected.patches).all()
        assert shrunk.options.prefetch_factor == 1
