"""Verdicts on real steps: figures, timing, and the right bottleneck for a slowed part."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.fakes import FixedMachine, Session, StillStream, run_context
from vesuvius.config import Config
from vesuvius.config.load import read_config
from vesuvius.monitor.clock import StepTimes
from vesuvius.monitor.probes.cores import CpuQuota
from vesuvius.monitor.probes.system_sample import Rates
from vesuvius.runlog.records import read_records
from vesuvius.stream.feeder import FeederStats
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.reading.reader_stats import ReaderStats
from vesuvius.training.ranks.ranks import SINGLE, Ranks
from vesuvius.training.reporting.verdicts import Verdicts

CPU = torch.device("cpu")
QUOTAS = "vesuvius.training.reporting.verdicts.cpu_quotas"
WriteConfig = Callable[..., Path]
SOME = StepTimes(step_s=1.0, data_s=0.05, h2d_s=0.0, forward_s=0.3, backward_s=0.5, optimizer_s=0.1)


@pytest.fixture(autouse=True)
def _captured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vesuvius")


def test_a_computing_run_is_compute_bound_and_its_records_account_for_every_second(
    tmp_path: Path, tiny_config: WriteConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """The network is heavy for its patches: reading 16 of them takes milliseconds."""
    model = {"channels": [32, 64], "full_res_channels": 16}
    path = tiny_config(monitor={"verdict_every": 6}, model=model)
    records = Session(read_config(path, ()), tmp_path).run(12)
    steps = [record for record in records if record["kind"] == "step"]
    for record in steps:
        parts = [record[f"{name}_s"] for name in ("data", "h2d", "forward", "backward", "optimizer", "other")]
        assert math.fsum(parts) == pytest.approx(record["step_s"], rel=1e-12)
        assert record["gpu_s"] == record["forward_s"] + record["backward_s"] + record["optimizer_s"]
        assert min(parts[2:5]) > 0
        assert record["pause_s"] == 0
    first, second = [record for record in records if record["kind"] == "verdict"]
    assert (first["step"], first["steps"]) == (6, 5), "the first step holds the start of the readers"
    assert (second["step"], second["steps"]) == (12, 6)
    assert (second["bound"], second["cause"], second["overrides"]) == ("compute-bound", None, [])
    assert second["advice"] == "the CPU is the bottleneck: no data-path setting will help"
    for name in ("step_s", "data_s", "forward_s", "backward_s", "optimizer_s", "other_s"):
        assert second[name] == pytest.approx(math.fsum(record[name] for record in steps[6:]), rel=1e-12)
    (line,) = [text for text in caplog.messages if text.startswith("Verdict step 12/20")]
    assert re.search(
        r"compute-bound: computed [\d.]+ % of the time .*; step p50 [\d.]+ s, p95 [\d.]+ s over \d+ steps; the CPU",
        line,
    )


class WorkingPath(StillStream):
    """A stream with activity set by the test."""

    blocks_a_step = 1.0
    has_resident = False
    runs_empty = True
    _blocks = 0.0

    def work(self, **figures: Any) -> None:
        """One second of decoding and cutting."""
        decode_s = self.reader_totals.decode_s + 0.95 * self.options.num_processes
        self._blocks += self.blocks_a_step
        self.reader_totals = replace(self.reader_totals, decode_s=decode_s, blocks=int(self._blocks))
        more = FeederStats(0.01, 0.97, 0.0, 2, 2 * self.runs_empty, 4000)
        self.feeder_stats = FeederStats(
            *(a + b for a, b in zip(astuple(self.feeder_stats), astuple(more), strict=True))
        )


@dataclass
class Judged:
    """Verdicts over a fake stream with two readers."""

    config: Config
    directory: Path
    rates: Rates | None = None
    short: bool = False
    ranks: Ranks = SINGLE

    def __post_init__(self) -> None:
        self.path = WorkingPath(StreamOptions(2, num_workers=2, processes=True))
        run = replace(run_context(self.config, self.directory), ranks=self.ranks)
        self.machine = FixedMachine(self.rates, self.short)
        self.verdicts = Verdicts(run, self.path, self.machine)

    def steps(self, first: int, last: int, times: StepTimes = SOME) -> None:
        for step in range(first, last + 1):
            self.path.work()
            self.verdicts.add(step, times, None)

    @property
    def records(self) -> list[dict[str, Any]]:
        return read_records(self.directory / "metrics.jsonl")

    @property
    def windows(self) -> list[tuple[int, int]]:
        """Step and number of steps of each verdict."""
        return [(record["step"], record["steps"]) for record in self.records]


@pytest.fixture
def judged(tmp_path: Path, tiny_config: WriteConfig) -> Callable[..., Judged]:
    def make(rates: Rates | None = None, **monitor: Any) -> Judged:
        return Judged(read_config(tiny_config(monitor=monitor), ()), tmp_path, rates)

    return make


@pytest.mark.parametrize(
    ("every", "first", "last", "windows"),
    [
        (10, 1, 25, [(10, 9), (20, 10), (25, 5)]),
        (10, 1, 24, [(10, 9), (20, 10)]),  # a few steps at the end say nothing
        (10, 8, 20, [(20, 12)]),  # a session that begins just before a multiple waits for the next
        (2, 1, 6, [(4, 3), (6, 2)]),
        (0, 1, 60, []),
    ],
)
def test_a_verdict_comes_at_every_multiple_and_at_the_end_if_enough_steps_are_left(
    judged: Callable[..., Judged], every: int, first: int, last: int, windows: list[tuple[int, int]]
) -> None:
    one = judged(verdict_every=every)
    one.steps(first, last)
    one.verdicts.finish()
    assert one.windows == windows


def test_a_window_counts_only_its_own_work(judged: Callable[..., Judged]) -> None:
    one = judged(verdict_every=10)
    one.steps(1, 20)
    record = one.records[1]
    assert record["decode_s"] == pytest.approx(19.0)
    assert (record["batches"], record["empty_queue_hits"], record["delivered_bytes"]) == (20, 20, 40000)
    assert record["read_s"] is None


@pytest.mark.parametrize(("cores", "cause"), [(8.0, "workers too few"), (3.0, "decoding")])
def test_idle_cores_and_reader_cores_are_considered(
    judged: Callable[..., Judged], monkeypatch: pytest.MonkeyPatch, cores: float, cause: str
) -> None:
    monkeypatch.setattr("vesuvius.training.reporting.verdicts.bound_cores", lambda: {0, 1, 2, 3})
    monkeypatch.setattr("vesuvius.training.reporting.verdicts.usable_cores", lambda pid: cores)
    counts = iter([(100, 1), (100, 1), (200, 3), (200, 3)])
    monkeypatch.setattr(QUOTAS, lambda pid: [CpuQuota("/job", 8.0, *next(counts))])
    rates = Rates((0.5, 0.9, 0.0, 0.1, 0.0), {41: 0.9, 42: 0.95, 99: 1.0})
    one = judged(rates, verdict_every=10)
    one.path.readers = {41: ReaderStats(), 42: ReaderStats(), 43: ReaderStats()}
    one.steps(1, 10, replace(SOME, data_s=0.6, forward_s=0.1, backward_s=0.2))
    (record,) = one.records
    assert record["idle_cores"] == pytest.approx(2.5)
    assert record["reader_cores"] == pytest.approx(1.85), "of the readers that were seen, and of nobody else"
    assert record["own_cores"] == pytest.approx(2.85)
    assert record["throttled_share"] == pytest.approx(0.02)
    assert (record["bound"], record["cause"]) == ("data-bound", cause)


def test_ranks_of_one_node_share_its_idle_cores(
    tmp_path: Path, tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All four ranks follow the advice of their verdicts."""
    monkeypatch.setattr("vesuvius.training.reporting.verdicts.bound_cores", lambda: set(range(32)))
    monkeypatch.setattr("vesuvius.training.reporting.verdicts.usable_cores", lambda pid: 32.0)
    readers = range(41, 47)  # with its trainer a rank uses 3.5 cores, four of them 14 of 32
    rates = Rates((0.0,) * 18 + (1.0,) * 14, dict.fromkeys(readers, 0.5) | {99: 0.5})
    overrides = []
    for world in (1, 4, 20):
        (directory := tmp_path / str(world)).mkdir()
        ranks = Ranks(0, 64, local_world=world)
        one = Judged(read_config(tiny_config(monitor={"verdict_every": 10}), ()), directory, rates, ranks=ranks)
        one.path.options = replace(one.path.options, num_workers=len(readers))
        one.path.readers = {pid: ReaderStats() for pid in readers}
        one.steps(1, 20, replace(SOME, data_s=0.6, forward_s=0.1, backward_s=0.2))
        overrides.append(one.records[-1]["overrides"])
    assert overrides[:2] == [["training.workers=12"], ["training.workers=10"]], "18 idle ones, and 4.5"
    assert "training.workers=7" not in overrides[2], "0.9"


def test_a_verdict_includes_cpu_throttling_in_its_window(
    judged: Callable[..., Judged], monkeypatch: pytest.MonkeyPatch
) -> None:
    used_up = [0, 0, 4, 4, 10, 10, 16, 16, 16, 16, 30, 30]  # asked at the end of each window of 100 and anew behind it
    counts = ((100 * (number // 2), throttled) for number, throttled in enumerate(used_up))
    monkeypatch.setattr(QUOTAS, lambda pid: [CpuQuota("/job", 3.5, *next(counts))])
    one = judged(verdict_every=10)
    one.steps(1, 50)
    assert [record["throttled_share"] for record in one.records] == pytest.approx([0.04, 0.06, 0.06, 0.0, 0.14])


def test_pauses_are_excluded_from_the_percentiles(judged: Callable[..., Judged]) -> None:
    one = judged(verdict_every=10)
    one.steps(1, 9)
    one.steps(10, 10, replace(SOME, step_s=31.0, pause_s=30.0))
    (record,) = one.records
    assert (record["step_p50_s"], record["step_p95_s"]) == (1.0, 1.0)
    assert record["bound"] == "compute-bound"


def test_the_steps_around_a_readers_death_are_excluded(judged: Callable[..., Judged]) -> None:
    one = judged(verdict_every=10)
    one.steps(1, 15)
    one.path.reader_deaths = 1
    one.steps(16, 30)
    assert one.windows == [(10, 9), (30, 12)]


SLOW = replace(SOME, step_s=20.0, data_s=1.0, forward_s=6.0, backward_s=10.0, optimizer_s=2.0)


@pytest.mark.parametrize(("step_s", "first"), [(1.0, 50), (20.0, 4), (300.0, 3)])
def test_the_first_verdict_comes_after_a_minute_for_any_step_time(
    judged: Callable[..., Judged], step_s: float, first: int
) -> None:
    """Long steps: after two of them; later verdicts at most ten minutes apart."""
    one = judged(verdict_every=50)
    one.steps(1, first - 1, replace(SLOW, step_s=step_s))
    assert one.windows == []
    one.steps(first, first, replace(SLOW, step_s=step_s))
    assert one.windows == [(first, first - 1)]


def test_further_verdicts_come_within_ten_minutes_or_at_the_multiple(judged: Callable[..., Judged]) -> None:
    one = judged(verdict_every=50)
    one.steps(1, 60, SLOW)
    assert one.windows == [(4, 3), (34, 30), (50, 16)]
    one.steps(61, 80, SLOW)
    assert one.windows[-1] == (80, 30)


def test_no_elapsed_time_triggers_a_verdict_that_was_deferred(judged: Callable[..., Judged]) -> None:
    held = judged(verdict_every=10)
    held.verdicts.restart(0)
    held.steps(1, 60, SLOW)
    assert held.windows == []


@pytest.mark.parametrize(
    ("blocks_a_step", "empty", "step_s", "windows"),
    [
        # Six blocks, one more than lie ahead, have come by step 12, and again 12 steps after the third of the restart.
        (0.5, False, 1.0, [(20, 8), (40, 6)]),
        (0.5, True, 1.0, [(20, 18), (40, 16)]),  # the batches ahead ran out in the first step that counts
        # After a minute they count whatever feeds them.
        (0.0, False, 2.0, []),
        (0.0, False, 10.0, [(13, 6), (20, 7), (40, 11)]),
    ],
)
def test_steps_fed_by_read_ahead_are_excluded_after_a_start_and_a_restart_of_readers(
    judged: Callable[..., Judged], blocks_a_step: float, empty: bool, step_s: float, windows: list[tuple[int, int]]
) -> None:
    one = judged(verdict_every=20)
    one.path.max_blocks_ahead, one.path.blocks_a_step, one.path.runs_empty = 5, blocks_a_step, empty
    one.steps(1, 20, replace(SOME, step_s=step_s))
    one.path.options = replace(one.path.options)
    one.steps(21, 40, replace(SOME, step_s=step_s))
    assert one.windows == windows
