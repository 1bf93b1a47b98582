from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.tune.trials import step_record, trial_of
from vesuvius.config_file import parse_config
from vesuvius.lab.tune.terms.trial import Measured
from vesuvius.lab.tune.trials.config import Course
from vesuvius.lab.tune.trials.measure import (
    TaskSize,
    cores_used,
    measure,
    outruns_readers,
    reader_seconds,
    vram_peak_bytes,
)
from vesuvius.lab.tune.trials.rate import half_width_s, rate_of, stretches_of, student_t
from vesuvius.observe.recent import Moment

SOURCE = parse_config("name: exp\ndata: {volumes: [{path: s.zarr}]}\ntraining: {train_batch_size: 2, workers: 2}\n")
SETTING = trial_of(SOURCE).setting
ENDLESS = Course(warmup_steps=5, pause_every=10**6, drain_steps=2, last_step=10**6)
VERDICT = {
    "kind": "verdict",
    "time": 2000.0,
    "bound": "data-bound",
    "cause": "workers too few",
    "text": "data-bound (workers too few): ...",
    "overrides": ["training.workers=4"],
}
MIB = 2**20


def numbers_of(stretches: list[list[Any]]) -> list[list[int]]:
    return [[record["step"] for record in stretch] for stretch in stretches]


def covered(rng: np.random.Generator, correlation: float, steps: int) -> bool:
    """Whether the interval of such a series, whose values are correlated with those before, holds its true mean 1."""
    noise = rng.normal(0, 0.1, steps)
    series = [noise[0]]
    for each in noise[1:]:
        series.append(correlation * series[-1] + math.sqrt(1 - correlation**2) * each)
    values = [1 + each for each in series]
    return abs(np.mean(values) - 1) <= half_width_s([values])


@pytest.mark.parametrize(
    ("freedom", "quantile", "within"), [(2, 4.3027, 0.04), (4, 2.7764, 0.003), (9, 2.2622, 0.001), (30, 2.0423, 0.001)]
)
def test_student_t_is_that_of_the_tables(freedom: int, quantile: float, within: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, rel=within)


def test_the_interval_of_independent_steps_holds_the_mean_in_95_of_100_cases_or_a_few_more() -> None:
    rng = np.random.default_rng(0)
    share = np.mean([covered(rng, 0.0, 60) for _ in range(2000)])
    # The widest of two intervals is above 95 %; the share of 2000 cases is within 0.015 of its own (3 sigma).
    assert 0.94 <= share <= 0.99


def test_the_interval_of_bursts_holds_the_mean_where_that_of_single_steps_does_not() -> None:
    rng = np.random.default_rng(0)
    share = np.mean([covered(rng, 0.6, 100) for _ in range(2000)])
    assert share >= 0.90, "a correlation over a few steps costs some of the 95 %, as blocks are few"


def test_waits_that_come_together_widen_the_interval_and_the_same_waits_spread_out_do_not() -> None:
    bursts = ([3.0] * 8 + [1.0] * 8) * 5
    spread = [3.0, 1.0] * 40
    assert half_width_s([bursts]) > 5 * half_width_s([spread])


def test_no_block_reaches_over_a_gap() -> None:
    assert half_width_s([[1.0] * 20, [2.0] * 20]) == pytest.approx(
        student_t(9) * np.std([1.0] * 5 + [2.0] * 5, ddof=1) / math.sqrt(10)
    )


def bursts(period: int, steps: int, noise: float = 0.01) -> list[float]:
    """Steps of which the last of each period waits for what the others did not."""
    rng = np.random.default_rng(0)
    return [1 + 10 * (step % period >= period - 1) + float(noise * rng.normal()) for step in range(steps)]


@pytest.mark.parametrize("period", [3, 6, 10, 16, 20])
def test_blocks_of_whole_periods_are_not_widened_by_bursts(period: int) -> None:
    series = bursts(period, steps=100)
    assert half_width_s([series], period) < 0.01 * half_width_s([series])


@pytest.mark.parametrize("period", [6.4, 12.8, 64 / 3])
def test_a_step_that_two_periods_share_has_a_part_in_both(period: float) -> None:
    series = [1.0 + 3 * (step % period >= period / 2) for step in range(100)]
    assert half_width_s([series], period) < 0.5 * half_width_s([series])


@pytest.mark.parametrize("period", [5, 8, 16])
def test_the_interval_of_bursts_of_a_known_period_is_that_of_their_noise(period: int) -> None:
    series = bursts(period, steps=8 * period, noise=0.1)
    # 0.1 / sqrt(40) at least, times Student's t; the widest of some lengths is up to twice as wide.
    assert 0.1 / math.sqrt(len(series)) < half_width_s([series], period) < 5 * 0.1 / math.sqrt(len(series))


def test_three_periods_are_enough_and_two_are_not() -> None:
    drift = [1 + number / 100 for number in range(30)]
    means = [np.mean(drift[begin : begin + 10]) for begin in (0, 10, 20)]
    assert half_width_s([drift], 10) == pytest.approx(student_t(2) * np.std(means, ddof=1) / math.sqrt(3))
    assert half_width_s([drift], 11) == half_width_s([drift])


def test_no_interval_is_wider_than_tenfold() -> None:
    steps = [step_record(step, step_s=0.001 if step % 20 else 100.0) for step in range(60)]
    rate = rate_of([steps], 4)
    assert rate is not None
    assert rate.high == pytest.approx(10 * rate.samples_s)


@given(st.lists(st.floats(0.01, 100), min_size=3, max_size=80))
def test_the_rate_is_samples_by_the_mean_step_and_lies_in_its_interval(work_s: list[float]) -> None:
    stretch = [step_record(number, step_s=each + 1, pause_s=1.0) for number, each in enumerate(work_s)]
    rate = rate_of([stretch], samples=4)
    assert rate is not None
    assert rate.samples_s == pytest.approx(4 / np.mean(work_s))
    assert 0 < rate.low <= rate.samples_s <= rate.high * (1 + 1e-9) < math.inf


def test_two_steps_say_nothing_and_nineteen_are_never_enough() -> None:
    assert rate_of([[step_record(1), step_record(2)]], 4) is None
    same = [step_record(step) for step in range(19)]
    rate = rate_of([same], 4)
    assert rate is not None
    assert rate.low == rate.high == 4.0
    assert not rate.is_narrow(0.02)


def test_warm_up_and_what_comes_right_behind_a_pause_are_left_out() -> None:
    course = Course(warmup_steps=3, pause_every=8, drain_steps=2, last_step=20)
    steps = [step_record(step) for step in range(1, 21)]
    assert numbers_of(stretches_of(steps, course)) == [[4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16], [19, 20]]


def test_slow_computing_behind_the_warm_up_is_left_out_and_waiting_for_data_is_not() -> None:
    def steps(first: dict[str, float]) -> list[Any]:
        return [step_record(step, **(first if step <= 8 else {})) for step in range(1, 40)]

    few = stretches_of(steps({"step_s": 4.0, "data_s": 0.3})[:8], ENDLESS)
    cold = stretches_of(steps({"step_s": 4.0, "data_s": 0.3}), ENDLESS)
    waits = stretches_of(steps({"step_s": 4.0, "data_s": 3.3}), ENDLESS)
    assert cold[0][0]["step"] == 9
    assert waits[0][0]["step"] == 6
    assert numbers_of(few) == [[6, 7, 8]], "three are left, whatever they are like"


def tasks(steps: int, samples: int, batch: int, decode_s: float, first: int = 1, ahead: int = 1) -> list[Any]:
    """Steps of one batch each, from tasks of `samples`, read in four blocks that take `decode_s` together.

    Each is counted with its first sample, or `ahead` - 1 tasks before that.
    """

    def readers(step: int) -> dict[str, Any]:
        counted = math.ceil(step * batch / samples) + ahead - 1
        return {"blocks": 4 * counted, "decode_s": decode_s * counted, "read_s": None}

    return [
        step_record(step, readers=readers(step), feeder={"full_s": 0.0, "batches": step, "ran_empty": 0})
        for step in range(first, first + steps)
    ]


def four_blocks(samples: int) -> TaskSize:
    return TaskSize(samples, 4)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 30))
def test_a_sample_costs_its_share_of_a_task_wherever_the_window_lies(steps_a_task: int, batch: int, first: int) -> None:
    samples = steps_a_task * batch
    window = tasks(100, samples, batch, decode_s=0.5 * samples, first=first)
    found = reader_seconds(window, window, four_blocks(samples))
    assert found is not None
    assert found == pytest.approx((0.5, 0.5))


@given(st.integers(1, 200), st.integers(3, 60), st.integers(1, 4))
def test_what_was_read_ahead_changes_nothing(samples: int, steps: int, ahead: int) -> None:
    found = tasks(steps, samples, 2, decode_s=0.5 * samples, ahead=ahead)
    assert reader_seconds(found, found[2:], four_blocks(samples)) == pytest.approx((0.5, 0.5))


def test_one_task_for_the_whole_trial_says_how_long_a_sample_takes() -> None:
    steps = tasks(40, samples=100, batch=2, decode_s=50.0)
    assert reader_seconds(steps, steps[5:], four_blocks(100)) == pytest.approx((0.5, 0.5))


def test_a_part_of_a_task_counts_as_a_part() -> None:
    steps = [step_record(step, readers={"blocks": 3, "decode_s": 30.0, "read_s": None}) for step in range(1, 9)]
    assert reader_seconds(steps, steps, four_blocks(100)) == pytest.approx((0.4, 0.4)), "30 s for 75 samples"
    assert reader_seconds([step_record(1)], [step_record(1)], four_blocks(100)) is None


def test_the_first_task_is_cold_and_counts_only_where_it_is_alone() -> None:
    def cold(steps: int) -> list[Any]:
        records = tasks(steps, samples=100, batch=2, decode_s=50.0)
        for record in records:
            record["readers"]["decode_s"] += 200.0
        return records

    assert reader_seconds(cold(60), cold(60)[20:40], four_blocks(100)) == pytest.approx((0.5, 0.5))
    assert reader_seconds(cold(40), cold(40)[20:], four_blocks(100)) == pytest.approx((2.5, 2.5))


def test_waiting_for_a_remote_store_takes_a_reader_but_no_processor() -> None:
    steps = tasks(50, samples=10, batch=2, decode_s=2.0)
    for step in steps:
        step["readers"]["read_s"] = 3 * step["readers"]["decode_s"]
    assert reader_seconds(steps, steps, four_blocks(10)) == pytest.approx((0.8, 0.2))


def test_samples_that_come_faster_than_readers_read_were_read_before() -> None:
    assert outruns_readers(10.0, reader_s=0.5, workers=2)
    assert not outruns_readers(10.0, reader_s=0.5, workers=6)
    assert not outruns_readers(10.0, reader_s=None, workers=2)
    assert not outruns_readers(10.0, reader_s=0.5, workers=0), "the trainer reads by itself"


def measured(
    records: list[Any],
    system: list[Any] | None = None,
    moments: list[Any] | None = None,
    task: TaskSize | None = None,
) -> Measured | None:
    return measure(records, system or [], moments or [], SETTING, ENDLESS, 0.02, task)


def test_the_figures_of_a_trial_are_those_of_its_measured_steps() -> None:
    steps = [step_record(step, step_s=100.0 if step <= 5 else 1.0) for step in range(1, 56)]
    for step in steps:
        number = step["step"]
        step["feeder"] = {"full_s": 0.25 * number, "batches": number, "ran_empty": number // 5}
    steps[30]["ram_used_bytes"] = 3 * 10**9
    figures = measured([*steps, VERDICT])
    assert figures is not None
    assert figures.steps == 50
    assert figures.samples_s == figures.low == figures.high == 2.0
    assert figures.narrow
    assert (figures.data_share, figures.h2d_share, figures.compute_share) == pytest.approx((0.3, 0.1, 0.5))
    assert figures.host_share == pytest.approx(0.1)
    assert figures.trainer_s == pytest.approx(0.35), "0.7 s of a step of two samples"
    assert figures.buffer_full_share == pytest.approx(0.25)
    assert figures.ran_empty_share == pytest.approx(10 / 49)
    assert (figures.bound, figures.cause) == ("data-bound", "workers too few")
    assert figures.overrides == ("training.workers=4",)
    assert figures.ram_bytes == 3 * 10**9
    assert figures.vram_bytes is None
    assert figures.reader_s is None
    assert Measured.from_record(vars(figures)) == figures


def test_a_rate_that_the_readers_cannot_keep_up_is_taken_for_theirs() -> None:
    figures = measured([*tasks(100, samples=20, batch=2, decode_s=60.0), VERDICT], task=four_blocks(20))
    assert figures is not None
    assert figures.reader_s == pytest.approx(3.0), "two readers give 0.67 samples a second"
    assert figures.samples_s == pytest.approx(2 / 3), "though 2 were consumed, of those read ahead"
    assert figures.trainer_s == pytest.approx(0.35)
    assert not figures.narrow


def test_a_task_larger_than_the_trial_does_not_hide_slow_readers() -> None:
    says = VERDICT | {"bound": "compute-bound", "cause": None, "text": "compute-bound: 99 %", "overrides": ["a.b=1"]}
    steps = tasks(60, samples=128, batch=2, decode_s=384.0)
    assert len({step["readers"]["blocks"] for step in steps}) == 1, "one task for all of it"
    figures = measured([*steps, says], task=TaskSize(128, 4))
    assert figures is not None
    assert figures.samples_s == pytest.approx(2 / 3)
    assert (figures.bound, figures.cause, figures.overrides) == ("data-bound", None, ())
    assert figures.verdict == (
        "data-bound: lived on what readers had read ahead: they give 0.667 samples/s, it consumed 2"
    )


def test_the_shares_of_a_rate_that_is_the_readers_are_those_of_its_longer_steps() -> None:
    figures = measured([*tasks(100, samples=20, batch=2, decode_s=60.0), VERDICT], task=four_blocks(20))
    assert figures is not None
    shares = (figures.data_share, figures.h2d_share, figures.compute_share, figures.host_share)
    assert shares == pytest.approx((1 - 0.7 / 3, 0.1 / 3, 0.5 / 3, 0.1 / 3)), "a step of 1 s takes 3"
    assert figures.cause == "workers too few"
    assert figures.overrides == ("training.workers=4",)
    assert figures.verdict.startswith("data-bound (workers too few): lived on what")


def test_without_a_verdict_or_with_two_measured_steps_there_are_no_figures() -> None:
    steps = [step_record(step) for step in range(1, 30)]
    assert measured(steps) is None
    assert measured([*steps[:7], VERDICT]) is None
    assert measured([*steps[:8], VERDICT]) is not None


def test_memory_is_the_most_that_anybody_saw() -> None:
    steps = [step_record(step) for step in range(1, 30)]
    moment = Moment(time=1010.0, step=9, used_bytes=5 * 10**9, shared_bytes=0, trainer_bytes=0)
    system = [{"kind": "system", "time": 1010.0, "used_bytes": [1, 2, 4 * 10**9], "vram": None}]
    by_moment, by_system = measured([*steps, VERDICT], system, [moment]), measured([*steps, VERDICT], system)
    assert by_moment is not None
    assert by_system is not None
    assert (by_moment.ram_bytes, by_system.ram_bytes) == (5 * 10**9, 4 * 10**9)


def test_memory_of_a_gpu_holds_cudas_own_and_not_that_of_others() -> None:
    def peak(foreign_mib: int) -> int | None:
        vram = {
            "reserved_bytes": [MIB, MIB, 8000 * MIB],
            "total_bytes": 80_000 * MIB,
            "free_bytes": (80_000 - 8000 - foreign_mib) * MIB,
        }
        steps = [step_record(1, vram_used_bytes=7000 * MIB)]
        return vram_peak_bytes(steps, [{"kind": "system", "time": 0.0, "vram": vram}], [])

    assert peak(400) == 8400 * MIB
    assert peak(40_000) == 8000 * MIB + int(0.6 * 1024 * MIB)


def test_processors_are_counted_within_the_window_only() -> None:
    def look(time: float, trainer: float, reader: float) -> dict[str, Any]:
        return {"kind": "system", "time": time, "trainer_cores": trainer, "reader_cores": {"7": reader}}

    looks = [look(90, 9.0, 9.0), look(105, 3.0, 1.0), look(111, 1.0, 0.5), look(115, 1.0, 1.5), look(130, 9.0, 9.0)]
    assert cores_used(looks, 100, 120) == pytest.approx(2.0), "that of 105 s looks back to before the window"
    assert cores_used(looks, 100, 108) == pytest.approx(4.0), "where there is no other"
    assert cores_used([{"kind": "system", "time": 105.0}], 100, 120) is None
