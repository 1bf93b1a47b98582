"""Orders and intervals on a simulated machine that drifts, and what a killed bench goes on with."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from vesuvius.benchmark.grid import Cell
from vesuvius.benchmark.ledger import BenchLedger, Measurement
from vesuvius.benchmark.results import Result, results_of
from vesuvius.errors import ConfigError, StorageError
from vesuvius.trials.ended import TrialInterrupted

Measure = Callable[[int, int], Measurement]
CELLS = (Cell("a"), Cell("b"), Cell("c"))
Bench = Callable[[BenchLedger, int, int, Measure, Callable[[Measurement], None]], None]


class Machine:
    """Log rates with a drift over the whole bench, noise that each measurement passes on to the next one, and spikes.

    Args:
        gains: log of each cell's true speed.
        drift: of the log rate, from the first measurement to the last.
    """

    def __init__(self, seed: int, gains: list[float], drift: float, measurements: int) -> None:
        self._rng = np.random.default_rng((seed, 7))
        self._gains, self._drift, self._count, self._made, self._noise = gains, drift, measurements, 0, 0.0

    def measure(self, cell: int, round: int) -> Measurement:
        self._noise = 0.8 * self._noise + 0.02 * self._rng.standard_normal()
        spike = 0.3 if self._rng.random() < 0.03 else 0.0  # another program comes and goes
        drift = self._drift * self._made / (self._count - 1)
        self._made += 1
        log_rate = self._gains[cell] + drift + self._noise - spike
        return Measurement(cell, round, "ok", samples_s=10 * math.exp(log_rate), start_s=1.0)


def one_after_the_other(
    ledger: BenchLedger, cells: int, rounds: int, measure: Measure, on_done: Callable[[Measurement], None]
) -> None:
    """The wrong program: all repeats of a cell, then all of the next one."""
    for cell in range(cells):
        for round in range(rounds):
            ledger.measurements.append(measure(cell, round))


def results(path: Path, seed: int, gains: list[float], drift: float, rounds: int, bench: Bench) -> list[Result]:
    machine = Machine(seed, gains, drift, rounds * len(gains))
    with patch.object(BenchLedger, "_write", lambda self: None):  # thousands of them, each flushed to the disk
        ledger = BenchLedger(path / f"{seed}.json", {})
        bench(ledger, len(gains), rounds, machine.measure, lambda done: None)
    return results_of(CELLS[: len(gains)], ledger.measurements)


def rightly_ordered(tmp_path: Path, bench: Bench, faster: float) -> int:
    """Of ten benches of two settings, one of which is 10 % slower, while the machine becomes so much faster."""
    path = tmp_path / f"{faster}"
    found = [results(path, seed, [0.0, math.log(1 / 1.1)], math.log(faster), 6, bench)[1] for seed in range(10)]
    return sum(each.speed is not None and each.speed.mid < 1 for each in found)


def covered(tmp_path: Path, bench: Bench, gain: float = 0.05, drift: float = 0.1) -> tuple[float, float]:
    """How often the interval holds the truth, and how often it says that it does: 200 benches, the third cell."""
    found = [results(tmp_path, seed, [0.0, 0.02, gain], drift, 6, bench)[2].speed for seed in range(200)]
    speeds = [each for each in found if each is not None]
    assert len(speeds) == 200
    held = sum(each.low <= math.exp(gain) <= each.high for each in speeds)
    return held / 200, speeds[0].level


@pytest.mark.parametrize("faster", [1 / 1.1, 1.1, 1.3])
def test_two_settings_that_differ_by_a_tenth_are_ordered_rightly_in_ten_of_ten(tmp_path: Path, faster: float) -> None:
    assert rightly_ordered(tmp_path, BenchLedger.measure_rounds, faster) == 10


def test_one_setting_after_the_other_would_not_do(tmp_path: Path) -> None:
    """That the tests here can fail: the drift is taken for a gain."""
    assert rightly_ordered(tmp_path, one_after_the_other, 1.3) < 5
    assert covered(tmp_path / "more", one_after_the_other)[0] < 0.5


@pytest.mark.parametrize("drift", [0.1, -0.1, 0.0])
def test_intervals_hold_the_truth_about_as_often_as_they_say(tmp_path: Path, drift: float) -> None:
    held, level = covered(tmp_path, BenchLedger.measure_rounds, drift=drift)
    assert level == pytest.approx(1 - 2 / 2**6)
    assert held >= level - 0.045  # 200 benches: three standard errors are 0.037; noise that goes on is not independent


def test_every_other_round_is_reversed(tmp_path: Path) -> None:
    order = []
    ledger = BenchLedger(tmp_path / "l.json", {})
    ledger.measure_rounds(3, 3, lambda c, r: Measurement(c, r, "ok", samples_s=1.0), lambda m: order.append(m))
    assert [(m.round, m.cell) for m in order] == [
        *((0, 0), (0, 1), (0, 2)),
        *((1, 2), (1, 1), (1, 0)),
        *((2, 0), (2, 1), (2, 2)),
    ]


def measured(
    path: Path, seen: list[tuple[int, int]], end_at: tuple[int, int] | None, how: BaseException
) -> BenchLedger:
    """Run a bench of 2 cells and 3 rounds; `how` happens within one of its measurements."""

    def measure(cell: int, round: int) -> Measurement:
        if (cell, round) == end_at:
            raise how
        seen.append((cell, round))
        return Measurement(cell, round, "ok", samples_s=10.0 + cell)

    ledger = BenchLedger(path, {"seconds": 1.0})
    ledger.measure_rounds(2, 3, measure, lambda done: None)
    return ledger


class Killed(BaseException):
    """Nothing catches it, and nothing is written after it, as with SIGKILL."""


@pytest.mark.parametrize("how", [TrialInterrupted("Ctrl-C"), StorageError("full"), Killed()])
def test_a_resumed_bench_measures_only_what_is_missing(tmp_path: Path, how: BaseException) -> None:
    path, first, second = tmp_path / "ledger.json", list[tuple[int, int]](), list[tuple[int, int]]()
    with pytest.raises(type(how)):
        measured(path, first, (1, 1), how)
    assert first == [(0, 0), (1, 0)]
    ledger = measured(path, second, None, how)
    assert second == [(1, 1), (0, 1), (0, 2), (1, 2)]
    assert [each.session for each in ledger.measurements] == [1, 1, 2, 2, 2, 2]
    assert measured(path, nothing := [], None, how).measurements == ledger.measurements
    assert nothing == []


def test_rates_from_before_and_after_an_interruption_are_no_pair(tmp_path: Path) -> None:
    """The machine may have become twice as fast in between."""
    found = [
        Measurement(cell, round, "ok", session=session, samples_s=rate)
        for cell, round, session, rate in [(0, 0, 1, 10.0), (1, 0, 1, 11.0), (1, 1, 1, 11.0), (0, 1, 2, 20.0)]
    ]
    speed = results_of(CELLS[:2], found)[1].speed
    assert speed is not None
    assert (speed.mid, speed.count) == (pytest.approx(1.1), 1)


def test_a_measurement_that_kills_the_bench_twice_is_given_up(tmp_path: Path) -> None:
    path, seen = tmp_path / "ledger.json", list[tuple[int, int]]()
    for _ in range(2):
        with pytest.raises(Killed):
            measured(path, seen, (1, 0), Killed())
    ledger = measured(path, seen, (1, 0), Killed())
    assert [each.ended for each in ledger.measurements if each.cell == 1] == ["killed"]
    assert sum(each.cell == 0 for each in ledger.measurements) == 3


def test_an_interruption_is_no_kill_of_what_it_interrupts(tmp_path: Path) -> None:
    path, seen = tmp_path / "ledger.json", list[tuple[int, int]]()
    for how in (Killed(), TrialInterrupted("Ctrl-C"), StorageError("full")):
        with pytest.raises(type(how)):
            measured(path, seen, (1, 0), how)
    ledger = measured(path, seen, None, Killed())
    assert [each.ended for each in ledger.measurements if each.cell == 1] == ["ok"] * 3


def test_a_bench_of_something_else_is_not_gone_on_with(tmp_path: Path) -> None:
    measured(tmp_path / "ledger.json", [], None, Killed())
    with pytest.raises(ConfigError, match="a different seconds"):
        BenchLedger(tmp_path / "ledger.json", {"seconds": 2.0})


def test_what_failed_is_measured_again_where_that_is_asked_for_alone(tmp_path: Path) -> None:
    """A limit may have been too short, or another program have taken the memory."""
    path, seen = tmp_path / "ledger.json", list[tuple[int, int]]()

    def measure(cell: int, round: int) -> Measurement:
        seen.append((cell, round))
        is_late = cell == 1 and len(seen) < 4
        return Measurement(cell, round, "timeout" if is_late else "ok", samples_s=0.0 if is_late else 10.0)

    ends = []
    for retry in (False, False, True, False):
        ledger = BenchLedger(path, {}, retry_failed=retry)
        ledger.measure_rounds(2, 2, measure, lambda done: None)
        ends.append(len(seen))
    assert ends == [3, 3, 5, 5]
    assert sorted(seen) == [(0, 0), (0, 1), (1, 0), (1, 0), (1, 1)]
    assert results_of(CELLS[:2], ledger.measurements)[1].cause == ""


def test_a_cell_that_failed_is_left_out_and_keeps_its_cause(tmp_path: Path) -> None:
    def measure(cell: int, round: int) -> Measurement:
        if cell == 1 and round == 1:
            return Measurement(cell, round, "gpu_memory", "needs 90 GiB")
        return Measurement(cell, round, "ok", samples_s=10.0)

    ledger = BenchLedger(tmp_path / "ledger.json", {})
    ledger.measure_rounds(3, 4, measure, lambda done: None)
    a, b, c = results_of(CELLS, ledger.measurements)
    assert (len(a.rates), len(b.rates), len(c.rates)) == (4, 1, 4)
    assert (a.cause, b.cause, c.cause) == ("", "gpu_memory: needs 90 GiB", "")


@pytest.mark.parametrize(
    "text", ['{"asked": {}, "measure', "[]", '{"asked": {}, "measurements": [{"cell": 0}]}', "\xff"]
)
def test_a_ledger_that_cannot_be_read_is_named_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ledger.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"ledger\.json, which cannot be read; drop --resume"):
        BenchLedger(path, {})
    assert path.read_bytes() == text.encode("latin-1")
