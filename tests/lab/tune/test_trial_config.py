from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.tune.trials import trial_of
from vesuvius.config import Config
from vesuvius.config_file import dump_config, parse_config, read_config
from vesuvius.lab.tune.terms.setting import Setting
from vesuvius.lab.tune.terms.trial import MOST_TIMES, steps_worth_a_start
from vesuvius.lab.tune.trials.config import Course, course_of, drain_steps, trial_config, validates

SOURCE = parse_config("name: exp\nseed: 7\ndata: {volumes: [{path: scroll.zarr}]}\ntraining: {accumulate_steps: 4}\n")
LENGTH = {"warmup_steps": 5, "least_steps": 50, "most_steps": 100}


def course(config: Config = SOURCE, samples_s: float | None = None, seconds: float = 300, **knobs: object) -> Course:
    return course_of(config, trial_of(config, samples_s=samples_s, **knobs), **LENGTH, seconds=seconds)


def test_the_config_of_a_trial_reads_back_and_has_the_setting_of_the_trial() -> None:
    trial = trial_of(SOURCE, 7, workers=6, requests=32, checkpoint_levels=(0, 1), amp="off", train_batch_size=2)
    config = trial_config(SOURCE, trial, course(), 300)
    assert parse_config(dump_config(config)) == config
    assert Setting.of(config) == trial.setting
    assert config.name == "007"


def test_a_trial_computes_and_reads_what_the_source_does_for_as_long_a_schedule() -> None:
    config = trial_config(SOURCE, trial_of(SOURCE), course(), 300)
    assert config.horizon_steps == SOURCE.horizon_steps
    assert config.training.warmup_steps == SOURCE.training.warmup_steps
    assert (config.data, config.model, config.diffusion) == (SOURCE.data, SOURCE.model, SOURCE.diffusion)


def test_no_trial_finds_what_another_one_has_read() -> None:
    seeds = [trial_config(SOURCE, trial_of(SOURCE, number), course(), 300).seed for number in range(25)]
    assert len(set(seeds)) == 25
    assert trial_config(SOURCE, trial_of(SOURCE, 3), course(), 300).seed == seeds[3], "the same when it is repeated"


def test_initial_weights_are_left_out_because_runs_are_looked_for_elsewhere() -> None:
    source = parse_config("name: exp\ndata: {volumes: [{path: s.zarr}]}\ntraining: {init_from: other}\n")
    assert trial_config(source, trial_of(source), course(), 300).training.init_from is None


def test_the_guard_ends_a_trial_where_it_would_make_the_run_smaller() -> None:
    source = parse_config(
        "name: exp\ndata: {volumes: [{path: s.zarr}]}\nmonitor: {guard: 'off', warn_at: 0.5, prefetch_at: 0.6}\n"
    )
    monitor = trial_config(source, trial_of(source), course(), 300).monitor
    assert monitor.guard == "act"
    assert monitor.prefetch_at == monitor.worker_at == monitor.exit_at == 0.6


def test_an_orphan_ends_by_itself_but_not_before_the_runner_ends_a_trial() -> None:
    max_hours = trial_config(SOURCE, trial_of(SOURCE), course(), 300).training.max_hours
    assert max_hours is not None
    assert 300 < 3600 * max_hours < 600


def test_the_pause_comes_once_behind_the_least_steps() -> None:
    found = course(samples_s=10.0)
    assert found.pause_every == 55
    assert sum(step % found.pause_every == 0 for step in range(1, LENGTH["most_steps"] + 1)) == 1
    assert all(found.is_measured(step) for step in range(6, 56))


def test_the_pause_comes_in_the_middle_of_the_short_steps_that_are_expected() -> None:
    # 4 samples a step and 40 samples a second; a trial is expected to take 60 s, half of them to start: 300 steps.
    found = course(samples_s=40.0)
    assert found.pause_every == 155


@pytest.mark.parametrize(("step_s", "steps"), [(18.0, 50), (0.2, 50), (0.1, 100), (0.05, 200), (1e-6, 1000)])
def test_short_steps_are_measured_for_as_long_as_the_start_took(step_s: float, steps: int) -> None:
    assert steps_worth_a_start(50, step_s, start_s=10.0) == steps


def test_the_pause_comes_soon_where_nothing_is_known_of_the_pace() -> None:
    assert course().pause_every == 16, "a third of the least steps"
    assert course(prefetch_factor=40, workers=1).pause_every == 2 * course(prefetch_factor=40, workers=1).drain_steps
    assert (
        course_of(SOURCE, trial_of(SOURCE), warmup_steps=5, least_steps=6, most_steps=9, seconds=300).pause_every == 8
    )


def test_the_pause_comes_within_half_of_the_time_where_steps_are_slow() -> None:
    # 4 samples a step and 1 sample a second: 300 s hold 75 steps.
    assert course(samples_s=1.0).pause_every == 37
    assert course(samples_s=0.01).pause_every == 8, "but not before anything can be said"


@pytest.mark.parametrize("samples_s", [None, 2.0, 1.0, 0.2, 0.01])
@pytest.mark.parametrize("prefetch", [1, 4, 64])
def test_twenty_times_the_steps_that_were_asked_for_can_be_measured_whatever_the_pauses(
    samples_s: float | None, prefetch: int
) -> None:
    source = parse_config("name: exp\ndata: {volumes: [{path: s.zarr}]}\ntraining: {steps_per_epoch: 100000}\n")
    found = course(source, samples_s=samples_s, prefetch_factor=prefetch)
    measured = sum(found.is_measured(step) for step in range(1, found.last_step + 1))
    assert measured == MOST_TIMES * LENGTH["most_steps"]


@given(st.integers(0, 64), st.integers(1, 64), st.integers(1, 64))
def test_what_is_left_out_behind_a_pause_holds_the_batches_ahead(workers: int, prefetch: int, accumulate: int) -> None:
    knobs = {"workers": workers, "prefetch_factor": prefetch, "accumulate_steps": accumulate}
    steps = drain_steps(trial_of(SOURCE, **knobs).setting)
    assert steps == 20 or (steps - 1) * accumulate >= max(workers, 1) * prefetch > (steps - 2) * accumulate


@pytest.mark.parametrize("horizon", [1, 4, 20, 60])
def test_a_trial_of_a_short_run_is_no_longer_than_the_run(horizon: int) -> None:
    source = parse_config(
        "name: exp\ndata: {volumes: [{path: s.zarr}]}\n"
        f"training: {{steps_per_epoch: {horizon}, epochs: 1, warmup_steps: 0}}\n"
    )
    found = course(source)
    assert found.last_step == horizon
    assert trial_config(source, trial_of(source), found, 300).stop_step == horizon


def test_a_trial_validates_where_the_run_does(tiny_config: Callable[..., Path]) -> None:
    never = read_config(tiny_config())
    often = read_config(tiny_config(), ["training.validate_every=7"])
    for source, expected in ((never, False), (often, True)):
        config = trial_config(source, trial_of(source, train_batch_size=4), course(source), 300)
        assert validates(config) is expected
        assert config.training.save_every == course(source).pause_every
        assert config.training.validate_patches == 4
