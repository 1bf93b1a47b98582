"""What is predicted of a setting passes through what was measured, and errs on the safe side where it must."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.tune.simulated import BY_NAME, GIB, RUNG, SOURCE, BiasedPlanner, tune
from vesuvius.lab.tune.policy.memory_line import Point, Size, predict_size
from vesuvius.lab.tune.policy.prediction import Forecast
from vesuvius.lab.tune.terms.known import Known
from vesuvius.lab.tune.terms.setting import Setting
from vesuvius.lab.tune.terms.trial import Entry, Measured, Outcome, Trial

MACHINE = BY_NAME["data-bound on cores"]


def with_workers(workers: int) -> Setting:
    return replace(SOURCE, workers=workers)


def points(*sizes: tuple[int, int, int]) -> list[Point]:
    """Of (workers, planned, measured)."""
    return [Point(with_workers(workers), planned, measured) for workers, planned, measured in sizes]


def measured(
    samples_s: float = 20.0, half_width: float = 0.01, ram_bytes: int = 10 * GIB, **others: object
) -> Measured:
    figures: dict[str, object] = {
        "steps": 50,
        "samples_s": samples_s,
        "low": samples_s * (1 - half_width),
        "high": samples_s * (1 + half_width),
        "narrow": True,
        "step_p50_s": 8 / samples_s,
        "data_share": 0.5,
        "h2d_share": 0.0,
        "compute_share": 0.5,
        "host_share": 0.0,
        "bound": "data-bound",
        "cause": None,
        "verdict": "",
        "overrides": (),
        "trainer_s": 0.01,
        "reader_s": 0.1,
        "decode_s": 0.1,
        "buffer_full_share": 0.0,
        "ran_empty_share": 1.0,
        "cores_used": None,
        "ram_bytes": ram_bytes,
        "vram_bytes": 12 * GIB,
    }
    return Measured(**figures | others)  # type: ignore[arg-type]


def forecast(*tried: tuple[Setting, Outcome]) -> Forecast:
    known, planner = Known(), BiasedPlanner(MACHINE)
    found = Forecast(MACHINE.space(), planner, known)
    for number, (setting, outcome) in enumerate(tried):
        known.add(Entry(Trial(number, setting, "workers", "", "", found.predict(setting)), outcome))
    return found


def ok(figures: Measured, seconds: float = 60.0) -> Outcome:
    return Outcome("ok", "", seconds, figures)


def test_without_a_trial_it_is_the_plan_alone() -> None:
    assert predict_size(with_workers(4), 7 * GIB, []) == Size(7 * GIB, 7 * GIB, 0)


def test_a_measured_setting_takes_the_most_that_it_took() -> None:
    size = predict_size(with_workers(2), 5000, points((2, 5000, 6000), (2, 5000, 6100), (4, 7000, 9000)))
    assert (size.expected_bytes, size.most_bytes) == (6100, 6100)


def test_from_one_size_growth_counts_one_and_a_half_times() -> None:
    size = predict_size(with_workers(4), 8000, points((2, 5000, 5000)))
    assert size == Size(8000, int(1.01 * (5000 + 4500)), 1)


def test_a_plan_that_was_too_low_is_scaled() -> None:
    size = predict_size(with_workers(4), 8000, points((2, 5000, 6000)))
    assert size.expected_bytes == 6000 + 3000 * 6 // 5


def test_less_than_was_measured_is_predicted_as_less_but_more_than_nothing() -> None:
    for taken in (1000, 5000, 9000):
        size = predict_size(with_workers(1), 1000, points((4, 5000, taken)))
        assert 0 < size.expected_bytes < taken
        assert size.expected_bytes <= size.most_bytes <= 1.01 * taken


def test_two_sizes_give_their_slope_and_at_least_that_of_the_plan() -> None:
    steep = predict_size(with_workers(8), 11000, points((2, 5000, 6000), (4, 7000, 9000)))
    flat = predict_size(with_workers(8), 11000, points((2, 5000, 6000), (4, 7000, 6200)))
    assert (steep.expected_bytes, steep.sizes) == (15000, 2)
    assert flat.expected_bytes == 6200 + 4000


def test_three_sizes_give_a_line_with_the_largest_residual_on_top() -> None:
    # least squares through (0, 0), (1, 1.2), (2, 1.8) thousand: 0.9 x + 0.1, residuals -0.1, 0.2, -0.1
    line = points((1, 1000, 1000), (2, 2000, 2200), (3, 3000, 2800))
    size = predict_size(with_workers(4), 4000, line)
    assert size.expected_bytes == pytest.approx(1000 + 0.9 * 3000 + 100 + 200, abs=1)
    assert size.sizes == 3


def test_beyond_three_sizes_the_bound_leaves_a_tenth_of_the_growth_and_beyond_four_none() -> None:
    three = predict_size(with_workers(8), 8000, points(*((n, 1000 * n, 1000 * n) for n in (1, 2, 3))))
    four = predict_size(with_workers(8), 8000, points(*((n, 1000 * n, 1000 * n) for n in (1, 2, 3, 4))))
    within = predict_size(with_workers(2), 2000, points(*((n, 1000 * n, 1000 * n) for n in (1, 3, 4))))
    assert (three.expected_bytes, three.most_bytes) == (8000, int(1.01 * (8000 + 500)))
    assert (four.expected_bytes, four.most_bytes) == (8000, int(1.01 * 8000))
    assert within.most_bytes == int(1.01 * 2000)


def test_a_larger_plan_never_is_predicted_below_what_a_smaller_one_took() -> None:
    falling = points((1, 1000, 3000), (2, 2000, 2500), (3, 3000, 2000))
    assert predict_size(with_workers(4), 4000, falling).expected_bytes >= 3000


def test_sizes_that_hardly_differ_give_no_slope() -> None:
    size = predict_size(with_workers(4), 8000, points((1, 5000, 5000), (2, 5010, 5400)))
    assert size.sizes == 1
    assert size.expected_bytes < 5400 * 1.5 + 3000


def test_the_line_of_another_knob_says_nothing_about_this_one() -> None:
    readers = points((1, 1000, 1000), (2, 2000, 2000), (4, 4000, 4000))
    size = predict_size(replace(with_workers(4), train_batch_size=2, accumulate_steps=4), 5000, readers)
    assert size == Size(5000, int(1.01 * (4000 + 1500)), 1)


@given(
    slope=st.floats(0.5, 1.5),
    offset=st.integers(0, 10**9),
    workers=st.lists(st.integers(1, 16), min_size=1, max_size=4, unique=True),
    more=st.integers(1, 16),
)
def test_the_safe_side_is_safe_up_to_one_and_a_half_times_the_plan(
    slope: float, offset: int, workers: list[int], more: int
) -> None:
    def plan(count: int) -> int:
        return 10**9 + 10**8 * count

    def truth(count: int) -> int:
        return int(10**9 + offset + slope * 10**8 * count)

    wanted = max(workers) + more
    size = predict_size(with_workers(wanted), plan(wanted), points(*((w, plan(w), truth(w)) for w in workers)))
    assert size.most_bytes >= truth(wanted) - 10
    assert size.most_bytes >= size.expected_bytes


def test_a_prediction_passes_through_what_was_measured() -> None:
    found = forecast((SOURCE, ok(measured(21.5))), (with_workers(4), ok(measured(30.0))))
    assert found.predict(SOURCE).samples_s == pytest.approx(21.5)
    assert found.predict(with_workers(3)).samples_s == pytest.approx((21.5 + 30.0) / 2)


def test_readers_are_predicted_to_scale_until_the_trainer_or_the_processors_hold() -> None:
    free = forecast((SOURCE, ok(measured(20.0))))
    trainer = forecast((SOURCE, ok(measured(20.0, trainer_s=1 / 30))))
    processors = forecast((SOURCE, ok(measured(20.0, cores_used=MACHINE.cores / 1.25))))
    assert free.predict(with_workers(4)).samples_s == pytest.approx(40.0)
    assert trainer.predict(with_workers(4)).samples_s == pytest.approx(30.0)
    assert processors.predict(with_workers(4)).samples_s == pytest.approx(25.0)


def test_requests_shorten_the_waiting_of_a_reader_but_not_its_decoding() -> None:
    found = forecast((SOURCE, ok(measured(20.0, decode_s=0.02))))
    assert found.predict(replace(SOURCE, requests=16)).samples_s == pytest.approx(20.0 * 0.1 / 0.06)


def test_larger_micro_batches_follow_the_two_that_were_measured() -> None:
    """A sample takes 0.01 s, and each micro-batch 0.1 s."""
    two = replace(SOURCE, train_batch_size=2, accumulate_steps=4)
    four = replace(SOURCE, train_batch_size=4, accumulate_steps=2)
    found = forecast(
        (SOURCE, ok(measured(1 / 0.11, trainer_s=0.11, reader_s=0.001))),
        (two, ok(measured(1 / 0.06, trainer_s=0.06, reader_s=0.001))),
    )
    assert found.predict(four).samples_s == pytest.approx(1 / 0.035)


def test_seconds_are_the_start_and_the_steps() -> None:
    found = forecast((SOURCE, ok(measured(20.0), seconds=50 * 8 / 20.0 + 15.0)))
    assert found.predict(with_workers(4)).seconds == pytest.approx(15.0 + 100 * 8 / 40.0)
    assert forecast().predict(SOURCE).seconds == MACHINE.space().trial_s


def test_short_steps_are_predicted_to_take_as_long_as_the_start() -> None:
    found = forecast((SOURCE, ok(measured(20.0, start_s=80.0), seconds=50 * 8 / 20.0 + 90.0)))
    assert found.predict(with_workers(4)).seconds == pytest.approx(90.0 + 80.0)


def test_a_trial_that_lived_on_what_was_read_before_took_its_start_all_the_same() -> None:
    """100 steps of 8 samples in 30 s behind a start of 20 s, which its readers keep up at 8 samples a second."""
    found = forecast((SOURCE, ok(measured(8.0, steps=100, reader_s=0.25, start_s=20.0), seconds=50.0)))
    assert found.predict(with_workers(6)).seconds == pytest.approx(20.0 + 100 * 8 / 24.0)


def test_slow_steps_are_as_many_as_a_trial_has_room_for_and_no_longer_than_its_limit() -> None:
    """Of 600 s: 15 s, then steps of 8 samples; 78 fit with four readers, 29 with two, though 50 are wanted."""
    found = forecast((with_workers(2), ok(measured(0.5495, steps=5, reader_s=3.64), seconds=15.0 + 5 * 8 / 0.5495)))
    assert found.predict(with_workers(4)).seconds == pytest.approx(15.0 + 80 * 8 / 1.099, rel=0.01)
    assert found.predict(with_workers(2)).seconds == MACHINE.space().trial_limit_s == 600.0


def test_the_first_compiled_trial_starts_later() -> None:
    compiled = replace(SOURCE, compile=True)
    before = forecast((SOURCE, ok(measured(20.0)))).predict(SOURCE).seconds
    found = forecast((SOURCE, ok(measured(20.0))))
    again = forecast((SOURCE, ok(measured(20.0))), (compiled, ok(measured(20.0), seconds=100.0)))
    assert found.predict(compiled).seconds == pytest.approx(before + 90.0)
    slow = forecast((SOURCE, ok(measured(0.8))))
    assert slow.predict(SOURCE).seconds == MACHINE.space().trial_limit_s
    assert slow.predict(compiled).seconds == pytest.approx(90.0 + 100 * 8 / 0.8)
    assert again.predict(replace(compiled, workers=3)).seconds < 100.0 + 20.0


@pytest.mark.parametrize(("share", "risk"), [(0.69, "low"), (0.71, "medium"), (0.89, "medium"), (0.91, "high")])
def test_risk_is_the_share_of_the_limit_at_which_trials_end(share: float, risk: str) -> None:
    space = MACHINE.space()
    ram = forecast((SOURCE, ok(measured(ram_bytes=int(share * space.ram_limit_bytes)))))
    vram = forecast((SOURCE, ok(measured(vram_bytes=int(share * (space.vram_limit_bytes or 0))))))
    assert ram.predict(SOURCE).risk == risk
    assert vram.predict(SOURCE).risk == risk


@pytest.mark.parametrize("ended", ["failed", "timeout"])
def test_an_error_or_slowness_bars_its_own_setting_only(ended: str) -> None:
    found = forecast((SOURCE, ok(measured())), (with_workers(8), Outcome(ended, "made up", 30.0, None)))  # type: ignore[arg-type]
    assert found.obstacle(with_workers(8)) is not None
    assert found.obstacle(with_workers(9)) is None


def test_a_trainer_that_takes_no_time_breaks_no_prediction() -> None:
    two = replace(SOURCE, train_batch_size=2, accumulate_steps=4)
    four = replace(SOURCE, train_batch_size=4, accumulate_steps=2)
    found = forecast((SOURCE, ok(measured(20.0, trainer_s=0.0))), (two, ok(measured(22.0, trainer_s=0.0))))
    assert found.predict(four).samples_s == pytest.approx(22.0)


def test_a_death_by_memory_is_predicted_beyond_the_limit_and_bars_what_is_larger() -> None:
    found = forecast((SOURCE, ok(measured())), (with_workers(8), Outcome("guard", "ended at 84 %", 30.0, None)))
    limit = MACHINE.space().ram_limit_bytes
    assert found.predict(with_workers(8)).ram_bytes > limit
    assert found.predict(with_workers(12)).ram_bytes > limit
    assert found.predict(with_workers(6)).ram_bytes < limit
    obstacle = found.obstacle(with_workers(9)) or ""
    assert obstacle.startswith("trial 1 was ended by the memory guard with workers 8")
    assert found.obstacle(with_workers(6)) is None


def test_a_death_on_the_gpu_bars_the_gpu_only() -> None:
    larger = replace(SOURCE, train_batch_size=4, accumulate_steps=2)
    found = forecast((SOURCE, ok(measured())), (larger, Outcome("gpu_memory", "out of memory", 30.0, None)))
    vram_bytes = found.predict(larger).vram_bytes
    limit = MACHINE.space().vram_limit_bytes
    assert vram_bytes is not None
    assert limit is not None
    assert vram_bytes > limit
    assert found.predict(larger).ram_bytes < MACHINE.space().ram_limit_bytes
    assert found.obstacle(with_workers(4)) is None


def pooled(*rates: tuple[float, float]) -> Known:
    """Trials of the source, of (samples_s, half width in samples a second)."""
    tried = [(SOURCE, ok(measured(rate, half / rate))) for rate, half in rates]
    trials = [Trial(n, SOURCE, "workers", "", "", forecast().predict(SOURCE)) for n in range(len(tried))]
    return Known(Entry(trial, outcome) for trial, (_, outcome) in zip(trials, tried, strict=True))


def test_trials_that_agree_are_pooled_by_the_inverse_of_their_variance() -> None:
    rate = pooled((20.0, 0.2), (20.1, 0.6)).rate(SOURCE)
    assert rate.samples_s == pytest.approx((9 * 20.0 + 20.1) / 10)
    assert (rate.high - rate.low) / 2 == pytest.approx((1 / 0.2**2 + 1 / 0.6**2) ** -0.5)


def test_trials_that_differ_widen_the_interval_until_it_holds_them() -> None:
    rate = pooled((10.0, 0.1), (12.0, 0.1)).rate(SOURCE)
    assert rate.samples_s == pytest.approx(11.0)
    assert rate.low == pytest.approx(11.0 - 1.96)
    assert rate.high == pytest.approx(11.0 + 1.96)
    assert pooled((1.0, 0.1), (21.0, 0.1)).rate(SOURCE).low == 0.0


def test_what_died_once_died_and_is_not_the_fastest() -> None:
    four = with_workers(4)
    entries = pooled((20.0, 0.1)).entries
    trial = replace(entries[0].trial, setting=four)
    known = Known([*entries, Entry(trial, ok(measured(40.0))), Entry(trial, Outcome("guard", "at 84 %", 9.0, None))])
    assert known.died(four)
    assert not known.died(SOURCE)
    assert known.fastest() == SOURCE


# Where nothing happens that nobody could foresee: a knob is moved whose effect the roofline knows.
@pytest.mark.parametrize(
    "name", ["data-bound on cores", "data-bound on latency", "RAM-capped", "dies above a threshold"]
)
def test_rates_of_more_readers_are_within_15_percent(name: str) -> None:
    ledger, _ = tune(BY_NAME[name], 1)
    pairs = [
        (entry.trial.prediction.samples_s, entry.outcome.measured.samples_s)
        for entry in ledger
        if entry.trial.stage in ("workers", "requests") and entry.outcome.measured
    ]
    assert pairs
    for predicted, was in pairs:
        assert predicted == pytest.approx(was, rel=0.15)


@pytest.mark.parametrize("name", BY_NAME)
def test_memory_of_trials_is_within_15_percent_once_one_was_measured(name: str) -> None:
    machine = BY_NAME[name]
    for entry in tune(machine, 1)[0][1:]:
        if entry.outcome.measured is not None:
            assert entry.trial.prediction.ram_bytes == pytest.approx(entry.outcome.measured.ram_bytes, rel=0.15)
            if entry.outcome.measured.vram_bytes is not None:
                assert entry.trial.prediction.vram_bytes == pytest.approx(entry.outcome.measured.vram_bytes, rel=0.15)
            assert entry.outcome.measured.ram_bytes <= RUNG * machine.ram_limit_gib * GIB
