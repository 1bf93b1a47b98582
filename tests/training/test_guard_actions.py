"""What the run does on the guard's orders: smaller readers between two steps, or the end with exit code 4."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import records_of, vesuvius_train
from tests.training.stand_ins import run_context
from vesuvius.config.load import read_config
from vesuvius.errors import EXIT_GUARD, EXIT_OK, EXIT_STOPPED
from vesuvius.monitor.memory import guard
from vesuvius.monitor.memory.guard import Order
from vesuvius.monitor.memory.limits import Limits
from vesuvius.monitor.monitor import LoopStatus, Monitor
from vesuvius.monitor.probes.system_sample import SystemSample, Watcher
from vesuvius.runlog.records import read_records
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream
from vesuvius.training.checkpoint.progress import Progress
from vesuvius.training.guard_actions import GuardActions
from vesuvius.training.stop import StopRequest

WriteConfig = Callable[..., Path]

GIB = 2**30


class NotedMonitor:
    """Orders what the test says, and notes what it is told."""

    def __init__(self) -> None:
        self.told = LoopStatus()
        self.order: Order | None = None
        self.obeyed = self.saves = 0

    def carried_out(self) -> None:
        self.obeyed += 1
        self.order = None

    def saved(self) -> None:
        self.saves += 1
        self.order = None


class NotedStream:
    """Notes how it is to change."""

    def __init__(self, options: StreamOptions) -> None:
        self.options = options
        self.changes: list[dict[str, int]] = []

    def reconfigure(self, **changes: Any) -> None:
        self.changes.append(changes)
        self.options = replace(self.options, **changes)

    def reader_memory(self) -> dict[int, int]:
        return {41: 7}

    def readers_here(self) -> frozenset[int]:
        return frozenset({41})


class Loop:
    """Acts of a run, and what is around them."""

    def __init__(self, config_file: Path, metrics: Path, pinned: bool = False) -> None:
        self.stop = StopRequest(None)
        self.metrics = metrics
        config, progress = read_config(config_file, ()), Progress(step=3, sample_index=12)
        run = run_context(config, metrics.parent, progress, self.stop, "cuda" if pinned else "cpu")
        self.acts = GuardActions(run, 2048)
        self.monitor: Any = NotedMonitor()
        self.stream: Any = NotedStream(StreamOptions.from_config(config.training, config.cluster))

    def step(self, order: Order | None = None) -> bool:
        self.monitor.order = order
        return self.acts.obey(self.stream, self.monitor, 0.5)

    def events(self) -> list[dict[str, Any]]:
        return [record for record in read_records(self.metrics) if record["event"] == "guard"]


@pytest.fixture
def loop(tmp_path: Path, tiny_config: WriteConfig) -> Callable[..., Loop]:
    def make(pinned: bool = False, **training: Any) -> Loop:
        return Loop(tiny_config(training=training), tmp_path / "metrics.jsonl", pinned)

    return make


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
    assert "training.workers=1 and training.prefetch_factor=1 are already the least" in run.acts.remedy("the machine")
    assert "raise monitor.ram_limit_gib" in run.acts.remedy("monitor.ram_limit_gib")


@pytest.mark.parametrize(("workers", "prefetch", "advised"), [(3, 2, 2), (2, 1, 1), (1, 2, 1), (0, 2, 0)])
def test_the_advice_after_an_exit_takes_no_last_reader(
    loop: Callable[..., Loop], workers: int, prefetch: int, advised: int
) -> None:
    """The trainer would read then, and leak what the reader did."""
    run = loop(workers=workers, prefetch_factor=prefetch)
    run.step()
    expected = f"continue with --resume training.workers={advised} training.prefetch_factor=1"
    assert run.acts.remedy("the machine") == expected


def test_readers_that_leak_are_started_anew_as_they_are(loop: Callable[..., Loop]) -> None:
    run = loop(workers=1, prefetch_factor=1)
    assert not run.step(Order("restart", "near out of memory"))
    assert run.stream.changes == [{"workers": 1}]
    assert (run.monitor.obeyed, run.acts.workers) == (1, 1)
    assert [event["rung"] for event in run.events()] == ["restart"]


def test_for_the_growth_of_others_a_checkpoint_is_saved_and_nothing_else_is_done(loop: Callable[..., Loop]) -> None:
    run = loop(workers=2, prefetch_factor=2)
    assert run.step(Order("save", "near out of memory"))
    assert not run.step()
    assert (run.stream.changes, run.monitor.obeyed, run.monitor.saves) == ([], 0, 1)
    assert [event["rung"] for event in run.events()] == ["save"]
    assert not run.stop.wanted()


def test_what_others_have_changed_is_where_the_guard_begins(loop: Callable[..., Loop]) -> None:
    """Autotune has taken another reader, and 48 batches of 4 KiB ahead as a limit in bytes."""
    run = loop(workers=2, prefetch_factor=1)
    run.stream.options = replace(run.stream.options, workers=3, prefetch_factor=16, prefetch_bytes=48 * 4096)
    run.step()
    assert (run.acts.workers, run.monitor.told.workers, run.monitor.told.prefetch_left) == (3, 3, True)
    for rung in ("prefetch", "worker"):
        run.step(Order(rung, "near out of memory"))
    assert run.stream.changes == [{"prefetch_factor": 8}, {"workers": 2}]
    assert run.acts.workers == 2


def test_batches_ahead_that_bytes_limit_are_halved_from_what_they_are(loop: Callable[..., Loop]) -> None:
    """2 MiB are 4 batches of 256 samples for 2 readers, though 16 are asked for: one for each is half."""
    run = loop(workers=2, prefetch_factor=8, prefetch_mib=2, train_batch_size=256)
    run.step()
    assert run.monitor.told.prefetch_left
    run.step(Order("prefetch", "near out of memory"))
    assert run.stream.changes == [{"prefetch_factor": 1}]
    assert not run.monitor.told.prefetch_left


def test_a_step_without_an_order_changes_nothing(loop: Callable[..., Loop]) -> None:
    run = loop(workers=2)
    run.step()
    run.step()
    assert run.stream.changes == []
    assert run.monitor.obeyed == 0
    assert run.events() == []


def test_an_exit_order_is_a_wish_to_stop_at_once_not_only_behind_the_step(loop: Callable[..., Loop]) -> None:
    run = loop(workers=0)
    order = Order("exit", "near out of memory")
    run.acts.exit(order)
    assert run.stop.wanted(), "a validation looks at it"
    assert run.stop.exit_code == EXIT_GUARD
    run.step(order)
    assert run.stream.changes == []
    run.acts.record_exit()
    assert [(event["rung"], event["text"]) for event in run.events()] == [("exit", "near out of memory")]


@pytest.mark.parametrize("signal_first", [True, False])
def test_who_asked_first_says_how_the_run_ends(loop: Callable[..., Loop], signal_first: bool) -> None:
    run = loop()
    with run.stop:
        if signal_first:
            signal.raise_signal(signal.SIGTERM)
        run.acts.exit(Order("exit", "near out of memory"))
        if not signal_first:
            signal.raise_signal(signal.SIGTERM)
    assert run.stop.exit_code == (EXIT_STOPPED if signal_first else EXIT_GUARD)
    assert run.stop.reason == ("SIGTERM" if signal_first else "memory guard: near out of memory")


@pytest.mark.parametrize(
    "keys", [{"prefetch_factor": 1}, {"prefetch_factor": 8, "prefetch_mib": 1, "train_batch_size": 256}]
)
def test_a_prefetch_that_would_not_get_smaller_is_not_offered(loop: Callable[..., Loop], keys: dict[str, int]) -> None:
    run = loop(workers=2, **keys)
    run.step()
    assert not run.monitor.told.prefetch_left


def test_a_ring_of_pinned_buffers_is_not_offered_as_its_memory_stays(loop: Callable[..., Loop]) -> None:
    run = loop(workers=2, prefetch_factor=8, pinned=True)
    run.step()
    assert not run.monitor.told.prefetch_left
    assert run.monitor.told.workers_left


def test_without_readers_the_monitor_is_told_of_none(loop: Callable[..., Loop]) -> None:
    run = loop(workers=0, prefetch_factor=1)
    run.step()
    assert run.monitor.told.readers == {}
    assert not run.monitor.told.workers_left
    assert "more memory" in run.acts.remedy("the machine")


def test_a_real_stream_that_is_made_smaller_delivers_the_same_batches(
    tmp_path: Path, tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard's orders through a real monitor: memory stands above prefetch_at, so it is halved until 1 is left."""
    monkeypatch.setattr(guard, "_SETTLE_S", 0.1)
    config = read_config(tiny_config(training={"prefetch_factor": 4}), ())
    job, options = prepare_data(0, config.data).job, StreamOptions.from_config(config.training, config.cluster)
    stop = StopRequest(None)
    run = run_context(config, tmp_path, stop=stop)
    acts = GuardActions(run, job.patch_bytes)
    run.directory.make_folders()
    watcher = Growing(limit_bytes=100 * GIB)
    with (
        PatchStream(job, options) as plain,
        PatchStream(job, options) as shrunk,
        Monitor(
            run.directory, Limits(configured_bytes=100 * GIB), watcher, sample_every_s=0.01, on_exit=acts.exit
        ) as monitor,
    ):
        deadline = time.monotonic() + 60
        for _ in range(100_000):
            acts.obey(shrunk, monitor, 0.0)
            expected, batch = next(plain), next(shrunk)
            assert (batch.indices == expected.indices).all()
            assert (batch.patches == expected.patches).all()
            if stop.wanted():
                break
            assert time.monotonic() < deadline
            if shrunk.options.prefetch_factor == 1:
                watcher.share = 0.97
        assert shrunk.options.prefetch_factor == 1
        assert stop.exit_code == EXIT_GUARD
    changed = [record["prefetch_factor"] for record in read_records(tmp_path / "metrics.jsonl")]
    assert changed == [2, 1]
    assert "97%" in str(acts.reason)


class Growing(Watcher):
    """This process, as if it used a share of a limit that grows with every look."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(os.getpid())
        self._limit_bytes = limit_bytes
        self.share = 0.85

    def sample(self) -> SystemSample:
        real = super().sample()
        self.share += 0.0001 if self.share < 0.9 else 0.0
        root = replace(real.processes[0], anon_bytes=int(self.share * self._limit_bytes))
        return replace(real, processes=(root,), shared_bytes=0)


def test_a_run_that_saves_for_the_growth_of_others_goes_on_to_its_end(
    tiny_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard orders it after the third step; no other checkpoint is due but the last."""
    monkeypatch.chdir(tmp_path)
    orders = [Order("save", "near out of memory: the machine")]
    order = property(lambda self: orders[0] if orders and self.told.step >= 3 else None, lambda self, order: None)
    monkeypatch.setattr(Monitor, "order", order, raising=False)
    monkeypatch.setattr(Monitor, "saved", lambda self: orders.clear())
    config = tiny_config(training={"max_steps": 8, "save_every": 100})
    assert vesuvius_train(config) == EXIT_OK
    assert [record["step"] for record in records_of("checkpoint")] == [4, 8]
    (event,) = [record for record in records_of("event") if record["event"] == "guard"]
    assert (event["rung"], event["step"]) == ("save", 4)
