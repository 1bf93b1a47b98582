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


class NotedFeed:
    """Stream and feed in one; notes how it is to change."""

    def __init__(self, options: StreamOptions) -> None:
        self.options = options
        self.changes: list[dict[str, int]] = []

    @property
    def stream(self) -> NotedFeed:
        return self

    def reconfigure(self, **changes: Any) -> None:
        self.changes.append(changes)
        self.options = replace(self.options, **changes)

    def reader_memory(self) -> dict[int, int]:
        return {41: 7}

    def readers_here(self) -> frozenset[int]:
        return frozenset({41})


class Loop:
    """Acts of a run, and what is around them."""

    def __init__(self, config_file: Path, metrics: Path) -> None:
        self.stop = StopRequest(None)
        self.metrics = metrics
        config, progress = read_config(config_file, ()), Progress(step=3, sample_index=12)
        self.acts = GuardActions(run_context(config, metrics.parent, progress, self.stop), 2048)
        self.monitor: Any = NotedMonitor()
        self.feed: Any = NotedFeed(StreamOptions.from_config(config.training, config.cluster))

    def step(self, order: Order | None = None) -> bool:
        self.monitor.order = order
        return self.acts.obey(self.feed, self.monitor, 0.5)

    def events(self) -> list[tuple[str, int]]:
        return [(r["rung"], r["step"]) for r in read_records(self.metrics) if r["event"] == "guard"]


@pytest.fixture
def loop(tmp_path: Path, tiny_config: WriteConfig) -> Callable[..., Loop]:
    def make(**training: Any) -> Loop:
        return Loop(tiny_config(training=training), tmp_path / "metrics.jsonl")

    return make


@pytest.mark.parametrize(
    ("training", "changes"),
    [
        ({"workers": 3, "prefetch_factor": 5}, {"workers": 2, "prefetch_factor": 2}),
        ({"workers": 1, "prefetch_factor": 8}, {"workers": 1, "prefetch_factor": 4}),
        # 2 MiB are 4 batches of 256 samples for 2 readers, though 16 are asked for: one for each is half.
        (
            {"workers": 2, "prefetch_factor": 8, "prefetch_mib": 2, "train_batch_size": 256},
            {"workers": 1, "prefetch_factor": 1},
        ),
        ({"workers": 1, "prefetch_factor": 1}, None),
        ({"workers": 0, "prefetch_factor": 1}, None),
    ],
)
def test_shrinking_is_half_the_prefetch_and_a_reader_fewer_but_never_the_last(
    loop: Callable[..., Loop], training: dict[str, int], changes: dict[str, int] | None
) -> None:
    run = loop(**training)
    run.step()
    assert run.monitor.told.can_shrink == (changes is not None)
    assert run.monitor.told.readers == ({41: 7} if training["workers"] else {})
    if changes is not None:
        assert not run.step(Order("shrink", "near out of memory"))
        assert run.feed.changes == [changes]
        assert (run.monitor.obeyed, run.acts.workers) == (1, changes["workers"])
        assert run.events() == [("shrink", 3)]
        assert not run.stop.wanted()


@pytest.mark.parametrize(("workers", "prefetch", "advised"), [(3, 2, 2), (2, 1, 1), (1, 2, 1), (0, 2, 0)])
def test_the_advice_after_an_exit_takes_no_last_reader(
    loop: Callable[..., Loop], workers: int, prefetch: int, advised: int
) -> None:
    """The trainer would read then, and leak what the reader did."""
    run = loop(workers=workers, prefetch_factor=prefetch)
    run.step()
    expected = f"continue with --resume training.workers={advised} training.prefetch_factor=1"
    assert run.acts.remedy("the machine") == expected
    assert "raise monitor.ram_limit_gib" in run.acts.remedy("monitor.ram_limit_gib")


def test_readers_that_leak_are_started_anew_as_they_are(loop: Callable[..., Loop]) -> None:
    run = loop(workers=1, prefetch_factor=1)
    assert not run.step(Order("restart", "near out of memory"))
    assert run.feed.changes == [{"workers": 1, "prefetch_factor": 1}]
    assert run.events() == [("restart", 3)]
    assert "training.workers=1 and training.prefetch_factor=1 are already the least" in run.acts.remedy("the machine")


def test_for_the_growth_of_others_a_checkpoint_is_saved_and_nothing_else_is_done(loop: Callable[..., Loop]) -> None:
    run = loop(workers=2, prefetch_factor=2)
    assert run.step(Order("save", "near out of memory"))
    assert not run.step()
    assert (run.feed.changes, run.monitor.obeyed, run.monitor.saves) == ([], 0, 1)
    assert run.events() == [("save", 3)]
    assert not run.stop.wanted()


@pytest.mark.parametrize("signal_first", [None, True, False])
def test_an_exit_order_stops_at_once_and_who_asked_first_says_how_the_run_ends(
    loop: Callable[..., Loop], signal_first: bool | None
) -> None:
    run = loop(workers=0)
    order = Order("exit", "near out of memory")
    with run.stop:
        if signal_first:
            signal.raise_signal(signal.SIGTERM)
        run.acts.exit(order)
        assert run.stop.wanted(), "a validation looks at it"
        if signal_first is False:
            signal.raise_signal(signal.SIGTERM)
    assert run.stop.exit_code == (EXIT_STOPPED if signal_first else EXIT_GUARD)
    assert run.stop.reason == ("SIGTERM" if signal_first else "memory guard: near out of memory")
    run.step(order)
    assert run.feed.changes == []
    run.acts.record_exit()
    assert run.events() == [("exit", 3)]


def test_a_real_stream_that_is_made_smaller_delivers_the_same_batches(tmp_path: Path, tiny_config: WriteConfig) -> None:
    """The guard's orders through a real monitor: memory stands above shrink_at, and later above exit_at."""
    config = read_config(tiny_config(training={"prefetch_factor": 4}), ())
    job, options = prepare_data(0, config.data).job, StreamOptions.from_config(config.training, config.cluster)
    stop = StopRequest(None)
    run = run_context(config, tmp_path, stop=stop)
    acts = GuardActions(run, job.patch_bytes)
    run.directory.make_folders()
    watcher = Full(limit_bytes=100 * GIB)
    with (
        PatchStream(job, options) as plain,
        PatchStream(job, options) as shrunk,
        Monitor(
            run.directory, Limits(configured_bytes=100 * GIB), watcher, sample_every_s=0.01, on_exit=acts.exit
        ) as monitor,
    ):
        feed: Any = StreamAsFeed(shrunk)
        deadline = time.monotonic() + 60
        while not stop.wanted():
            acts.obey(feed, monitor, 0.0)
            expected, batch = next(plain), next(shrunk)
            assert (batch.indices == expected.indices).all()
            assert (batch.patches == expected.patches).all()
            assert time.monotonic() < deadline
            if shrunk.options.prefetch_factor == 2:
                watcher.share = 0.97
        assert stop.exit_code == EXIT_GUARD
    assert [record["prefetch_factor"] for record in read_records(tmp_path / "metrics.jsonl")] == [2]
    assert "97%" in str(acts.reason)


class StreamAsFeed:
    """Without a device."""

    def __init__(self, stream: PatchStream) -> None:
        self.stream = stream

    def reconfigure(self, **changes: Any) -> None:
        self.stream.reconfigure(**changes)


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
