"""Trials, rounds, speeds and bands: closed forms and properties, on a simulated machine that drifts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from vesuvius.errors import ConfigError
from vesuvius.experiments.bench.results import (
    Measurement,
    Result,
    Trial,
    build_page,
    headline,
    make_trials,
    parse_axis,
    results_of,
    table_of,
)
from vesuvius.experiments.bench.session import measure_rounds
from vesuvius.training.stop import StoppedError

Measure = Callable[[int, int], Measurement]
TRIALS = (Trial("a"), Trial("b"), Trial("c"))


def test_sweeps_are_crossed_and_compared_keys_change_alone() -> None:
    trials = make_trials(
        [("training.workers", ("0", "1")), ("training.prefetch_factor", ("2", "4"))],
        [("training.amp", ("off", "bf16", "fp16"))],
    )
    assert len(trials) == 2 * 2 + 2
    base = dict(each.split("=") for each in trials[0].overrides)
    assert base == {"training.workers": "0", "training.prefetch_factor": "2", "training.amp": "off"}
    assert [trial.label for trial in trials[-2:]] == ["training.amp=bf16", "training.amp=fp16"]
    assert trials[0].label == make_trials([], [])[0].label == "baseline"
    assert make_trials([("a", ("1", "2"))], [])[0].label == "a=1"
    differ = [sum(dict(o.split("=") for o in trial.overrides)[key] != base[key] for key in base) for trial in trials]
    assert differ == [0, 1, 1, 2, 1, 1]
    assert make_trials([], [])[0].overrides == ()


def test_values_may_hold_commas_in_brackets_and_quotes() -> None:
    assert parse_axis("model.channels=[8,16],[8, 32]") == ("model.channels", ("[8,16]", "[8, 32]"))
    assert parse_axis("""a.b={x: 1, y: [2,3]},'p,q'""") == ("a.b", ("{x: 1, y: [2,3]}", "'p,q'"))
    for wrong in ("training.workers", "=1", "a=1,,2", "a=1,1", "a="):
        with pytest.raises(ConfigError):
            parse_axis(wrong)
    with pytest.raises(ConfigError, match="more than one axis"):
        make_trials([("a", ("1",))], [("a", ("2",))])


class Machine:
    """Log rates with a drift over the whole bench, noise that each measurement passes on to the next one, and spikes.

    Args:
        gains: log of each trial's true speed.
        drift: of the log rate, from the first measurement to the last.
    """

    def __init__(self, seed: int, gains: list[float], drift: float, measurements: int) -> None:
        self._rng = np.random.default_rng((seed, 7))
        self._gains, self._drift, self._count, self._made, self._noise = gains, drift, measurements, 0, 0.0

    def measure(self, trial: int, round: int) -> Measurement:
        self._noise = 0.8 * self._noise + 0.02 * self._rng.standard_normal()
        spike = 0.3 if self._rng.random() < 0.03 else 0.0  # another program comes and goes
        drift = self._drift * self._made / (self._count - 1)
        self._made += 1
        log_rate = self._gains[trial] + drift + self._noise - spike
        return Measurement(trial, round, "ok", samples_s=10 * math.exp(log_rate), start_s=1.0)


def results(seed: int, gains: list[float], drift: float) -> list[Result]:
    """Of six rounds."""
    machine, done = Machine(seed, gains, drift, 6 * len(gains)), list[Measurement]()
    measure_rounds(done, len(gains), 6, machine.measure)
    return results_of(TRIALS[: len(gains)], done)


@pytest.mark.parametrize("drift", [0.1, -0.1, 0.0])
def test_intervals_cover_the_truth_about_as_often_as_stated(drift: float) -> None:
    found = [results(seed, [0.0, 0.02, 0.05], drift)[2].speed for seed in range(200)]
    ends = [each.ends for each in found if each is not None]
    covered = sum(low <= math.expm1(0.05) <= high for low, high in ends) / 200
    assert covered >= 0.975 - 0.033  # of two trials; three standard errors of 200 benches


def test_every_other_round_is_reversed_and_failed_trials_are_left_out() -> None:
    done = list[Measurement]()

    def measure(trial: int, round: int) -> Measurement:
        if (trial, round) == (2, 2):
            raise StoppedError("Ctrl-C")
        return Measurement(trial, round, "timeout" if (trial, round) == (1, 1) else "ok", samples_s=10.0 + trial)

    with pytest.raises(StoppedError):
        measure_rounds(done, 3, 3, measure)
    assert [(m.trial, m.round) for m in done] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1), (0, 2)]
    base, failed, other = results_of(TRIALS[:3], done)
    assert (len(base.rates), len(failed.rates), failed.cause) == (3, 1, "timeout: ")
    assert other.speed is not None
    assert other.speed.pairs == 2, "rounds that have both"


RANKED = [Trial(f"training.ranks={n}", (f"training.ranks={n}",)) for n in (1, 2, 4)]


def ranked(failed: int | None = None) -> list[Measurement]:
    rates = {0: 10.0, 1: 19.0, 2: 22.0}
    return [
        Measurement(trial, round, "ok", samples_s=rate * (1 + 0.01 * round), figures={"comm_s": 0.1, "batch": 4.0})
        if trial != failed
        else Measurement(trial, round, "gpu_memory", "needs 90 GiB")
        for round in range(6)
        for trial, rate in rates.items()
    ]


def test_a_bench_of_ranks_has_efficiency_and_band() -> None:
    found = results_of(RANKED, ranked())
    assert [each.efficiency for each in found] == [1.0, pytest.approx(0.95), pytest.approx(0.55)]
    words = "training.ranks=4 is fastest: 2.20 times as fast as training.ranks=1 (2.20 to 2.20 times as fast)."
    assert headline(found) == words
    assert {"efficiency", "comm, s"} <= set(table_of(found).columns)
    (scaling,) = build_page("n", "d", {}, found, "", "vesuvius train").charts
    measured, ideal = scaling.series
    assert ideal.mid.tolist() == [measured.mid[0] * count for count in (1, 2, 4)]
    assert [row[0] for row in table_of(found).rows] == [trial.label for trial in RANKED]


def test_a_trial_that_fails_keeps_its_cause_and_so_does_the_baseline() -> None:
    found = results_of(RANKED, ranked(failed=2))
    assert found[2].cause == "gpu_memory: needs 90 GiB"
    assert headline(found).endswith("Failed: training.ranks=4.")
    found = results_of(RANKED, ranked(failed=0))
    assert [each.speed for each in found] == [None, None, None]
    assert headline(found).startswith("Nothing could be compared: training.ranks=1 could not be measured")
    page = build_page("n", "d", {}, found, "", "vesuvius train")
    assert ("training.ranks=1", "gpu_memory: needs 90 GiB") in page.tables[1].rows
    assert "VRAM, GiB" not in page.tables[0].columns, "no empty column"


def headlines(gains: list[float], benches: int) -> list[str]:
    """Of benches of trials with these true speeds: rounds differ by 20 %, measurements of a round by 4 %."""
    trials = [Trial("baseline"), *(Trial(f"trial {number}", ("a=b",)) for number in range(1, len(gains)))]
    rng, found = np.random.default_rng(len(gains)), []
    for _ in range(benches):
        common, own = rng.standard_normal((6, 1)), rng.standard_normal((6, len(gains)))
        rates = np.exp(np.log1p(gains) + 0.2 * common + 0.04 * own).tolist()
        done = [Measurement(c, r, "ok", samples_s=each) for r, row in enumerate(rates) for c, each in enumerate(row)]
        found.append(headline(results_of(trials, done)))
    return found


@pytest.mark.parametrize("trials", [2, 3, 8])
def test_of_equal_trials_one_is_called_faster_in_at_most_5_percent(trials: int) -> None:
    found = headlines([0.0] * trials, 800)
    assert sum(not words.startswith("No trial is measurably faster") for words in found) <= 0.05 * 800


@pytest.mark.parametrize("rivals", [2, 5])
def test_of_equally_fast_trials_none_is_called_the_fastest(rivals: int) -> None:
    found = headlines([0.0, *[0.3] * rivals], 400)
    assert sum("is fastest" in words for words in found) <= 0.05 * 400
    faster = [words for words in found if "is measurably faster" in words]
    assert len(faster) >= 0.9 * 400
    assert sum("; not measurably faster than trial" in words for words in faster) == len(faster)


def test_the_fastest_trial_is_named_if_it_was_tested_against_the_next() -> None:
    found = headlines([0.0, 0.1, 0.5], 200)
    assert sum(words.startswith("trial 2 is fastest: ") for words in found) >= 0.9 * 200
    assert not any("trial 1 is fastest" in words for words in found)


def test_a_trial_measured_once_neither_wins_nor_hides_one_that_did() -> None:
    done = [Measurement(0, r, "ok", samples_s=10.0 + r) for r in range(6)]
    done += [Measurement(1, r, "ok", samples_s=(1.2 + 0.004 * (-1) ** r) * (10.0 + r)) for r in range(6)]
    done += [Measurement(2, 0, "ok", samples_s=20.0), Measurement(2, 1, "gpu_memory", "needs 90 GiB")]
    found = results_of(TRIALS[:3], done)
    label = found[1].label
    assert headline(found).startswith(f"{label} is measurably faster: 20 % faster than ")
    assert f"; not measurably faster than {found[2].label}.  Failed: " in headline(found)
    page = build_page("n", "d", {}, found, "", "vesuvius train")
    assert page.tone == "good"
    (command,) = page.commands
    assert all(override in command for override in TRIALS[1].overrides)
    alone = results_of([TRIALS[0], TRIALS[2]], [replace(m, trial=m.trial // 2) for m in done if m.trial != 1])
    assert headline(alone).startswith("No trial is measurably faster than ")
    assert "2.00 times as fast as the a (too few rounds to test)" in headline(alone)
