"""Changes between two steps by the guard's orders."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training.fakes import run_context
from vesuvius.config import Config
from vesuvius.config.load import read_config
from vesuvius.errors import EXIT_GUARD, EXIT_STOPPED
from vesuvius.monitor.memory.guard import LoopStatus, Order
from vesuvius.monitor.memory.limits import MemoryPolicy
from vesuvius.monitor.monitor import Monitor
from vesuvius.monitor.probes.system_sample import SystemSample, Watcher
from vesuvius.runlog.records import read_records
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream
from vesuvius.training.between_steps import GuardActions
from vesuvius.training.checkpoint.progress import Progress
from vesuvius.training.stop import StopRequest

WriteConfig = Callable[..., Path]
GIB = 2**30


@dataclass
class Noted:
    """Monitor, stream and feed in one: gives the test's orders and records what it receives."""

    options: StreamOptions
    order: Order | None = None
    loop_status: LoopStatus = field(default_factory=LoopStatus)
    obeyed: int = 0
    changes: list[dict[str, int]] = field(default_factory=list)
    has_resident: bool = False
    resident_frees_memory: bool = False
    ended_readers: int = 0

    @property
    def stream(self) -> Noted:
        return self

    def carried_out(self) -> None:
        self.obeyed += 1
        self.order = None

    @property
    def num_readers_without_resident(self) -> int:
        return self.options.num_processes or self.ended_readers

    def reconfigure(self, **changes: Any) -> None:
        self.changes.append(changes)
        self.options = replace(self.options, **changes)

    def reader_memory(self) -> dict[int, int]:
        return {41: 7}

    def local_readers(self) -> frozenset[int]:
        return frozenset({41})


class Loop:
    """Guard actions of a session with orders from the test."""

    def __init__(self, config: Config, directory: Path) -> None:
        self.metrics, self.stop = directory / "metrics.jsonl", StopRequest(None)
        self.guard = GuardActions(run_context(config, directory, Progress(step=10), self.stop))
        self.feed: Any = Noted(StreamOptions.from_config(config.training, config.cluster))
        self.monitor = self.feed

    def step(self, order: Order | None = None) -> None:
        self.monitor.order = order
        self.guard.execute(self.feed, self.monitor, 0.5)

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_records(self.metrics)


@pytest.fixture
def loop(tmp_path: Path, tiny_config: WriteConfig) -> Callable[..., Loop]:
    return lambda **training: Loop(read_config(tiny_config(training={"workers": 2} | training)), tmp_path)


@pytest.mark.parametrize(
    ("training", "changes"),
    [
        ({"workers": 3, "prefetch_factor": 5}, {"num_workers": 2, "prefetch_factor": 2}),
        ({"workers": 1, "prefetch_factor": 8}, {"num_workers": 1, "prefetch_factor": 4}),
        ({"workers": 1, "prefetch_factor": 1}, None),
        ({"workers": 0, "prefetch_factor": 1}, None),
    ],
)
def test_shrinking_halves_the_prefetch_and_stops_a_reader_but_never_the_last(
    loop: Callable[..., Loop], training: dict[str, int], changes: dict[str, int] | None
) -> None:
    run = loop(**training)
    run.step()
    assert run.monitor.loop_status.can_shrink == (changes is not None)
    assert run.monitor.loop_status.readers == ({41: 7} if training["workers"] else {})
    if changes is not None:
        run.step(Order("shrink", "close to running out of memory"))
        assert run.feed.changes == [changes]
        assert (run.monitor.obeyed, run.monitor.loop_status.workers) == (1, changes["num_workers"])
        assert [(event["action"], event["step"]) for event in run.events] == [("shrink", 10)]
        assert not run.stop.is_requested()


@pytest.mark.parametrize(("workers", "prefetch", "advised"), [(3, 2, 2), (2, 1, 1), (1, 2, 1), (0, 2, 0)])
def test_the_advice_after_an_exit_keeps_the_last_reader(
    loop: Callable[..., Loop], workers: int, prefetch: int, advised: int
) -> None:
    """Otherwise the trainer would read, with the same leak."""
    run = loop(workers=workers, prefetch_factor=prefetch)
    run.step()
    run.guard.exit(Order("exit", "close to running out of memory"))
    remedy = f"continue with --resume training.workers={advised} training.prefetch_factor=1"
    assert run.guard.record_exit("the machine") == ("close to running out of memory", remedy)
    assert "raise monitor.ram_limit_gib" in run.guard.record_exit("monitor.ram_limit_gib")[1]


def test_leaking_readers_are_restarted_unchanged(loop: Callable[..., Loop]) -> None:
    run = loop(workers=1, prefetch_factor=1)
    assert not run.step(Order("restart", "close to running out of memory"))
    assert run.feed.changes == [{"num_workers": 1, "prefetch_factor": 1}]
    run.guard.exit(Order("exit", "close to running out of memory"))
    remedy = run.guard.record_exit("the machine")[1]
    assert "training.workers=1 and training.prefetch_factor=1 are already minimal" in remedy
    assert [event["action"] for event in run.events] == ["restart", "exit"]


def test_resident_volumes_are_dropped_and_readers_restarted(loop: Callable[..., Loop]) -> None:
    """Also in the session after an exit, which would otherwise fill the memory again."""
    run = loop(workers=3, prefetch_factor=4)
    run.feed.options, run.feed.ended_readers = (
        replace(run.feed.options, num_workers=0, processes=False),
        3,
    )  # as it was full
    run.feed.has_resident = run.feed.resident_frees_memory = True
    run.step()
    assert run.monitor.loop_status.can_drop
    assert not run.step(Order("drop", "close to running out of memory"))
    assert run.feed.changes == [{"num_workers": 3, "processes": True, "cache_in_memory": False}]
    assert [(event["action"], event["cache_in_memory"]) for event in run.events] == [("drop", False)]
    assert (run.monitor.obeyed, run.monitor.loop_status.workers) == (1, 3)
    run.guard.exit(Order("exit", "close to running out of memory"))
    remedy = "continue with --resume data.resident=0 training.workers=2 training.prefetch_factor=1"
    assert run.guard.record_exit("the machine") == ("close to running out of memory", remedy)


def test_resident_volumes_smaller_than_their_readers_are_not_dropped(loop: Callable[..., Loop]) -> None:
    run = loop(workers=3)
    run.feed.has_resident = True
    run.step()
    assert not run.monitor.loop_status.can_drop


@pytest.mark.parametrize("signal_first", [True, False])
def test_an_exit_order_stops_at_once_and_the_first_request_sets_the_exit_code(
    loop: Callable[..., Loop], signal_first: bool
) -> None:
    run = loop(workers=0)
    order = Order("exit", "close to running out of memory")
    with run.stop:
        if signal_first:
            signal.raise_signal(signal.SIGTERM)
        run.guard.exit(order)
        assert run.stop.is_requested(), "a validation looks at it"
        if not signal_first:
            signal.raise_signal(signal.SIGTERM)
    assert run.stop.exit_code == (EXIT_STOPPED if signal_first else EXIT_GUARD)
    assert run.stop.reason == ("SIGTERM" if signal_first else "memory guard: close to running out of memory")
    run.step(order)
    assert run.feed.changes == []


def test_a_shrunk_real_stream_delivers_the_same_batches(tmp_path: Path, tiny_config: WriteConfig) -> None:
    """The guard's orders through a real monitor: memory is above shrink_at, later above exit_at."""
    config = read_config(tiny_config(training={"prefetch_factor": 4}), ())
    job, options = prepare_data(0, config.data).job, StreamOptions.from_config(config.training, config.cluster)
    stop = StopRequest(None)
    run = run_context(config, tmp_path, stop=stop)
    acts = GuardActions(run)
    run.directory.make_folders()
    watcher = Full(limit_bytes=100 * GIB)
    with (
        PatchStream(job, options) as plain,
        PatchStream(job, options) as shrunk,
        Monitor(
            run.directory, MemoryPolicy(configured_bytes=100 * GIB), watcher, sample_every_s=0.01, on_exit=acts.exit
        ) as monitor,
    ):
        feed: Any = SimpleNamespace(stream=shrunk)
        deadline = time.monotonic() + 60
        while not stop.is_requested():
            acts.execute(feed, monitor, 0.0)
            expected, batch = next(plain), next(shrunk)
            assert (batch.indices == expected.indices).all()
            assert (batch.patches == expected.patches).all()
            assert time.monotonic() < deadline
            if shrunk.options.prefetch_factor == 2:
                watcher.share = 0.97
        assert stop.exit_code == EXIT_GUARD
    assert [record["prefetch_factor"] for record in read_records(tmp_path / "metrics.jsonl")] == [2]
    assert "97 %" in str(acts.reason)


class Full(Watcher):
    """This process, as if it used a share of a limit."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(os.getpid())
        self._limit_bytes = limit_bytes
        self.share = 0.86

    def sample(self) -> SystemSample:
        real = super().sample()
        root = replace(real.processes[0], anon_bytes=int(self.share * self._limit_bytes))
        return replace(real, processes=(root,), shared_bytes=0)
