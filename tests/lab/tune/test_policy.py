"""The policy on simulated machines: near the best, in few trials, never beyond the memory, the same each time."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.tune.simulated import (
    BY_NAME,
    GIB,
    MACHINES,
    RUNG,
    SLOW,
    SOURCE,
    BiasedPlanner,
    Machine,
    best_rate,
    tune,
)
from vesuvius.errors import ConfigError
from vesuvius.lab.tune.policy.choice import choose, cost, rival
from vesuvius.lab.tune.policy.choice import stop as stop_of
from vesuvius.lab.tune.policy.climb import climb, fewer_workers, workers_ladder
from vesuvius.lab.tune.policy.policy import expected_trials, propose
from vesuvius.lab.tune.policy.search import check, search
from vesuvius.lab.tune.policy.state import MOST_TRIALS, Asking, EnoughError, State
from vesuvius.lab.tune.policy.switches import raise_compute
from vesuvius.lab.tune.terms.known import Known
from vesuvius.lab.tune.terms.setting import Knob, Setting
from vesuvius.lab.tune.terms.space import Space
from vesuvius.lab.tune.terms.trial import Entry, Outcome, Stop, Trial

T = TypeVar("T")
SEEDS = range(5)
DIES = BY_NAME["dies above a threshold"]


@cache
def tuned(name: str, seed: int = 0) -> tuple[tuple[Entry, ...], Stop]:
    ledger, stop = tune(BY_NAME[name], seed)
    return tuple(ledger), stop


every_machine = pytest.mark.parametrize("name", BY_NAME)


@every_machine
@pytest.mark.parametrize("seed", SEEDS)
def test_it_ends_within_5_percent_of_the_best_in_at_most_25_trials(name: str, seed: int) -> None:
    machine, (ledger, stop) = BY_NAME[name], tuned(name, seed)
    assert machine.rate(stop.best) >= 0.95 * best_rate(machine)
    assert len(ledger) <= MOST_TRIALS


@every_machine
@pytest.mark.parametrize("seed", SEEDS)
def test_no_trial_is_beyond_the_memory(name: str, seed: int) -> None:
    machine = BY_NAME[name]
    for entry in tuned(name, seed)[0]:
        assert machine.ram_bytes(entry.trial.setting) <= RUNG * machine.ram_limit_gib * GIB
        vram = machine.vram_bytes(entry.trial.setting)
        assert vram is None or vram <= RUNG * machine.vram_limit_gib * GIB


@every_machine
def test_four_of_five_tunes_recommend_the_same(name: str) -> None:
    picks = Counter(tuned(name, seed)[1].best for seed in SEEDS)
    assert picks.most_common(1)[0][1] >= 4


@pytest.mark.parametrize("seed", SEEDS)
def test_what_kills_unforeseen_kills_twice_at_most_and_never_the_same_setting(seed: int) -> None:
    died = [entry.trial.setting for entry in tuned(DIES.name, seed)[0] if entry.outcome.ended == "killed"]
    assert 1 <= len(died) == len(set(died)) <= 2


@every_machine
def test_each_prefix_of_a_ledger_gives_the_trial_that_was_recorded_next(name: str) -> None:
    machine, (ledger, stop) = BY_NAME[name], tuned(name)
    for count, entry in enumerate(ledger):
        assert propose(ledger[:count], machine.space(), BiasedPlanner(machine)) == entry.trial
    assert propose(ledger, machine.space(), BiasedPlanner(machine)) == stop


@every_machine
def test_a_trial_changes_one_knob_and_keeps_the_effective_batch(name: str) -> None:
    machine = BY_NAME[name]
    before: list[Setting] = []
    for entry in tuned(name)[0]:
        setting = entry.trial.setting
        if entry.trial.stage not in ("baseline", "check"):
            changes = [set(setting.changes(other)) - {"accumulate_steps"} for other in before]
            assert min(len(changed - {"checkpoint_levels"}) for changed in changes) <= 1
        assert machine.scale_batch or setting.global_batch == machine.source.global_batch
        before.append(setting)


@every_machine
def test_every_changed_knob_has_a_reason_with_figures(name: str) -> None:
    _, stop = tuned(name)
    assert set(stop.reasons) == set(stop.best.changes(BY_NAME[name].source))
    for reason in stop.reasons.values():
        assert any(character.isdigit() for character in reason)
        assert "\n" not in reason


@every_machine
def test_the_winner_is_measured_again_in_turn_with_its_rival(name: str) -> None:
    ledger, stop = tuned(name)
    check = [entry.trial.setting for entry in ledger if entry.trial.stage == "check"]
    assert stop.checked
    assert len(check) in (2, 4)
    assert all(a != b for a, b in zip(check[::2], check[1::2], strict=True))
    assert stop.best in check[-2:]


def test_the_knee_is_named_with_what_the_next_step_gave() -> None:
    _, stop = tuned("data-bound on cores")
    assert stop.ended["workers"].startswith("knee: ")
    assert stop.reasons["workers"].startswith("2 -> 6: 2.4 times the samples/s (")
    assert re.search(r"; 8 gave [+-][01]\.\d %, below 3%$", stop.reasons["workers"])


def test_a_memory_cap_is_named_with_its_figures() -> None:
    _, stop = tuned("RAM-capped")
    assert "of RAM predicted, limit 34.44 GiB" in stop.ended["workers"]


def test_a_death_is_named_as_the_cap() -> None:
    _, stop = tuned(DIES.name)
    assert stop.ended["workers"].startswith("cap: trial ")
    assert "was ended by a kill with workers 7" in stop.ended["workers"]


def test_a_fed_trainer_keeps_fewer_readers() -> None:
    assert tuned("compute-bound")[1].best.workers < BY_NAME["compute-bound"].source.workers


def test_latency_is_hidden_by_requests_and_readers() -> None:
    ledger, stop = tuned("data-bound on latency")
    assert stop.best.requests > SOURCE.requests
    assert "requests" in {entry.trial.stage for entry in ledger}


def test_requests_stay_as_they_are_on_a_disk() -> None:
    assert {entry.trial.setting.requests for entry in tuned("data-bound on cores")[0]} == {SOURCE.requests}


def test_a_buffer_that_runs_empty_grows_before_readers_do() -> None:
    ledger, _ = tuned("bursts")
    assert ledger[1].trial.stage == "prefetch"


def test_a_step_that_waits_for_data_is_not_made_faster() -> None:
    ledger, stop = tuned("data-bound on cores")
    assert {entry.trial.stage for entry in ledger} <= {"baseline", "workers", "prefetch", "check"}
    assert stop.ended["switches"].startswith("not entered: data-bound")


def test_a_cpu_tries_no_switch_of_a_gpu() -> None:
    tried = {knob for entry in tuned("CPU")[0] for knob in entry.trial.setting.changes(BY_NAME["CPU"].source)}
    assert tried.isdisjoint({"amp", "cudnn_benchmark", "cuda_allocator", "checkpoint_levels"})
    assert "compile" in tried


def test_cudnn_times_no_kernels_where_runs_are_to_repeat() -> None:
    machine = Machine("eager", sample_s=0.4, source=replace(SOURCE, cudnn_benchmark=False))
    free, _ = tune(machine, 0)
    bound, _ = tune(machine, 0, replace(machine.space(), deterministic=True))
    assert any(entry.trial.setting.cudnn_benchmark for entry in free)
    assert not any(entry.trial.setting.cudnn_benchmark for entry in bound)


def test_the_goal_cost_is_met_by_fewer_readers_within_10_percent() -> None:
    machine = Machine("shallow", cores=8, decode_s=0.06, sample_s=0.01, trainer_cores_s=0.0)
    _, fast = tune(machine, 0)
    _, cheap = tune(machine, 0, machine.space(goal="cost"))
    assert cheap.best.workers < fast.best.workers
    assert machine.rate(cheap.best) >= 0.89 * best_rate(machine)


def test_the_effective_batch_grows_only_where_it_may() -> None:
    machine = BY_NAME["larger batches"]
    _, free = tuned(machine.name)
    _, bound = tune(machine, 0, replace(machine.space(), scale_batch=False))
    assert free.best.global_batch > machine.source.global_batch
    assert bound.best.global_batch == machine.source.global_batch
    assert max(entry.trial.setting.train_batch_size for entry in tuned(machine.name)[0]) <= machine.space().most_batch


def test_a_budget_ends_it_before_it_is_overspent() -> None:
    machine = BY_NAME["VRAM-capped"]
    full = sum(entry.outcome.seconds for entry in tuned(machine.name)[0])
    ledger, stop = tune(machine, 0, machine.space(budget_s=full / 2))
    spent = sum(entry.outcome.seconds for entry in ledger)
    assert "budget: " in stop.reason
    assert spent <= 1.1 * full / 2  # the last trial may take longer than predicted
    assert 2 <= len(ledger) < len(tuned(machine.name)[0])
    assert machine.rate(stop.best) > machine.rate(machine.source)


def test_a_budget_for_nothing_takes_the_source() -> None:
    machine = MACHINES[0]
    stop = propose([], machine.space(budget_s=100.0), BiasedPlanner(machine))
    assert isinstance(stop, Stop)
    assert stop.best == machine.source
    assert stop.reason.startswith("budget: ")


def test_a_ledger_of_another_tune_is_refused() -> None:
    machine, (ledger, _) = BY_NAME["knee"], tuned("knee")
    other = replace(machine.space(), source=replace(SOURCE, workers=3))
    with pytest.raises(ConfigError, match=r"belongs to another tune: where its trial 0 stands, this one has workers"):
        propose(ledger, other, BiasedPlanner(machine))


def test_a_ledger_that_goes_on_after_the_end_is_refused() -> None:
    machine, (ledger, _) = BY_NAME["knee"], tuned("knee")
    with pytest.raises(ConfigError, match="this one has an end"):
        propose([*ledger, ledger[-1]], machine.space(), BiasedPlanner(machine))


def test_an_error_of_the_config_ends_it_at_once() -> None:
    machine = MACHINES[0]
    trial = propose([], machine.space(), BiasedPlanner(machine))
    assert isinstance(trial, Trial)
    failed = Entry(trial, Outcome("failed", "data.volumes[0].path must exist; got x.zarr", 4.0, None))
    stop = propose([failed], machine.space(), BiasedPlanner(machine))
    assert isinstance(stop, Stop)
    assert stop.best == machine.source
    assert "got x.zarr" in stop.reason
    assert not stop.checked


def test_a_source_that_does_not_fit_the_ram_begins_smaller() -> None:
    source = replace(SOURCE, workers=12, prefetch_factor=4)
    machine = replace(BY_NAME["RAM-capped"], name="too many readers", source=source)
    ledger, stop = tune(machine, 0)
    assert ledger[0].trial.setting.workers < 12
    assert "the config as it is does not fit" in ledger[0].trial.why
    assert all(entry.outcome.ended == "ok" for entry in ledger)
    assert stop.best.global_batch == source.global_batch


def test_a_source_that_does_not_fit_the_gpu_gets_smaller_pieces() -> None:
    source = replace(SOURCE, workers=4, train_batch_size=32, accumulate_steps=1)
    machine = replace(BY_NAME["VRAM-capped"], name="too large a batch", source=source, bias=(1.0, 0.8, 0.75, 1.2))
    ledger, _ = tune(machine, 0)
    first = ledger[0].trial.setting
    assert (first.train_batch_size, first.accumulate_steps) == (4, 8)
    assert (first.workers, first.prefetch_factor) == (source.workers, source.prefetch_factor)


def test_a_baseline_that_dies_is_followed_by_a_smaller_one() -> None:
    source = replace(SOURCE, workers=12)
    machine = replace(DIES, name="dies at once", source=source)
    ledger, stop = tune(machine, 0)
    assert [entry.outcome.ended for entry in ledger[:2]] == ["killed", "ok"]
    assert ledger[1].trial.setting.workers == 6
    assert ledger[1].trial.stage == "baseline"
    assert stop.best.workers == 6
    assert "trial 0 was ended by a kill" in stop.reasons["prefetch_factor"]


@pytest.mark.parametrize(("kept", "next_one"), [("workers", (12, 1)), ("prefetch_factor", (6, 2))])
def test_a_baseline_that_dies_is_made_smaller_by_the_knobs_that_may_be_turned(
    kept: Knob, next_one: tuple[int, int]
) -> None:
    machine = replace(DIES, name="dies at once", source=replace(SOURCE, workers=12), dies_at_workers=1)
    ledger, _ = tune(machine, 0, replace(machine.space(), kept=(kept,)))
    assert (ledger[1].trial.setting.workers, ledger[1].trial.setting.prefetch_factor) == next_one


@pytest.mark.parametrize("name", ["data-bound on cores", "switches matter", "VRAM-capped", "CPU", "bursts"])
@pytest.mark.parametrize("kept", [("workers",), ("prefetch_factor", "compile"), ("train_batch_size",)])
def test_knobs_that_are_to_be_kept_are_turned_by_no_trial(name: str, kept: tuple[Knob, ...]) -> None:
    machine = BY_NAME[name]
    ledger, stop = tune(machine, 0, replace(machine.space(), kept=kept))
    for setting in (stop.best, *(entry.trial.setting for entry in ledger)):
        assert not set(kept) & setting.changes(machine.source).keys()
    assert len(ledger) > 1, "the others are turned"


def test_a_stage_whose_knob_is_kept_says_so() -> None:
    machine = BY_NAME["data-bound on cores"]
    _, stop = tune(machine, 0, replace(machine.space(), kept=("workers",)))
    assert stop.ended["workers"] == "cap: workers 3: --keep workers"


def test_what_is_to_be_kept_is_named_where_nothing_else_fits() -> None:
    source = replace(SOURCE, workers=4, train_batch_size=32, accumulate_steps=1)
    machine = replace(BY_NAME["VRAM-capped"], name="too large a batch", source=source)
    ledger, stop = tune(machine, 0, replace(machine.space(), kept=("train_batch_size",)))
    assert ledger == []
    assert stop.reason.startswith("even the smallest setting does not fit with --keep train_batch_size: up to ")


def test_where_nothing_runs_the_source_stays() -> None:
    machine = replace(DIES, name="dies always", dies_at_workers=1)
    ledger, stop = tune(machine, 0)
    assert stop.best == machine.source
    assert 1 <= len(ledger) <= 5
    assert "was ended by a kill" in stop.reason


@pytest.mark.parametrize("name", [machine.name for machine in MACHINES if machine is not DIES])
def test_the_plan_lists_every_stage_that_there_will_be(name: str) -> None:
    machine = BY_NAME[name]
    plan = expected_trials([], machine.space(), BiasedPlanner(machine))
    assert 0 < len(plan) <= MOST_TRIALS
    assert plan[0].setting == machine.source
    assert all(trial.prediction.samples_s is None for trial in plan)
    assert [trial.number for trial in plan] == list(range(len(plan)))
    assert {entry.trial.stage for entry in tuned(name)[0]} <= {trial.stage for trial in plan}


def test_the_plan_goes_on_from_the_ledger_with_predictions() -> None:
    machine, (ledger, _) = BY_NAME["data-bound on cores"], tuned("data-bound on cores")
    plan = expected_trials(ledger[:2], machine.space(), BiasedPlanner(machine))
    assert plan[0].setting == ledger[2].trial.setting
    assert all(trial.prediction.samples_s is not None for trial in plan)
    assert expected_trials(ledger, machine.space(), BiasedPlanner(machine)) == []


def checked_with(
    machine: Machine, change: Mapping[int | Setting, Callable[[Outcome], Outcome]]
) -> tuple[list[Entry], Stop]:
    """A tune in which some trials of the check, by number from 1 on or by setting, end otherwise than they would."""
    rng, ledger, checks = np.random.default_rng(0), list[Entry](), 0
    while isinstance(step := propose(ledger, machine.space(), BiasedPlanner(machine)), Trial):
        checks += step.stage == "check"
        outcome = machine.run(step.setting, rng)
        if step.stage == "check":
            outcome = change.get(checks, change.get(step.setting, lambda same: same))(outcome)
        ledger.append(Entry(step, outcome))
    return ledger, step


def faster(times: float) -> Callable[[Outcome], Outcome]:
    def change(outcome: Outcome) -> Outcome:
        was = outcome.measured
        assert was is not None
        rates = {key: times * getattr(was, key) for key in ("samples_s", "low", "high")}
        return replace(outcome, measured=replace(was, **rates))

    return change


def pair_of(ledger: list[Entry]) -> tuple[Setting, Setting]:
    first, second = [entry.trial.setting for entry in ledger if entry.trial.stage == "check"][:2]
    return first, second


GUARD = Outcome("guard", "the memory guard ended it at 84 %", 30.0, None)


@pytest.mark.parametrize("change", [{1: lambda _: GUARD}, {1: faster(0.9), 3: lambda _: GUARD}])
def test_a_winner_that_dies_in_the_check_is_not_taken_and_that_is_said(
    change: dict[int, Callable[[Outcome], Outcome]],
) -> None:
    ledger, stop = checked_with(BY_NAME["data-bound on cores"], change)
    winner = next(entry.trial.setting for entry in ledger if entry.trial.stage == "check")
    assert stop.best != winner
    assert stop.best.workers < winner.workers  # what is larger than what died is no better
    assert not stop.checked
    assert f"was ended by the memory guard with workers {winner.workers}" in stop.ended["check"]
    assert f"; so another is taken: workers {winner.workers} -> {stop.best.workers}" in stop.ended["check"]


def test_a_check_that_was_cut_short_leaves_the_winner_unchecked() -> None:
    slow = Outcome("timeout", "got 2 steps", 600.0, None)
    ledger, stop = checked_with(BY_NAME["data-bound on cores"], {2: lambda _: slow})
    assert stop.best == pair_of(ledger)[0]
    assert not stop.checked


@pytest.mark.parametrize("name", ["noisy", "compute-bound", "switches matter", "CPU", "knee"])
def test_a_rival_that_is_faster_in_the_check_is_taken_though_it_was_not_accepted(name: str) -> None:
    winner, rival = pair_of(checked_with(BY_NAME[name], {})[0])
    _, stop = checked_with(BY_NAME[name], {winner: faster(1 / 1.2), rival: faster(1.2)})
    assert stop.best == rival
    assert stop.checked


def test_one_pair_does_where_the_winner_holds() -> None:
    ledger, stop = checked_with(BY_NAME["data-bound on cores"], {})
    checked = [entry.trial.setting.workers for entry in ledger if entry.trial.stage == "check"]
    assert checked == [6, 8]
    assert stop.best.workers == 6


def test_a_winner_that_loses_within_the_noise_is_checked_once_more() -> None:
    ledger, stop = checked_with(BY_NAME["data-bound on cores"], {1: faster(0.9)})
    checked = [entry.trial.setting.workers for entry in ledger if entry.trial.stage == "check"]
    assert checked == [6, 8, 6, 8]
    assert stop.best.workers == 8
    assert stop.checked


def test_a_winner_that_loses_gives_way_to_the_next_that_has_to_hold_as_well() -> None:
    """5 workers were luckily measured within 3 % of the best; the check says otherwise."""
    ledger, stop = tuned("data-bound on cores", seed=4)
    checked = [entry.trial.setting for entry in ledger if entry.trial.stage == "check"]
    assert [setting.workers for setting in checked] == [5, 8, 6, 8]
    assert stop.best == checked[2]
    assert stop.checked


def test_after_a_check_no_third_is_taken_though_the_winner_was_slower_in_it() -> None:
    """Both are: the machine has drifted, and what was measured before would win by that alone."""
    ledger, stop = checked_with(BY_NAME["data-bound on cores"], dict.fromkeys((1, 2, 3, 4), faster(0.1)))
    assert stop.best in pair_of(ledger)
    assert stop.checked


@pytest.mark.parametrize("name", BY_NAME)
def test_nothing_that_died_is_taken_where_other_settings_were_measured(name: str) -> None:
    ledger, stop = checked_with(BY_NAME[name], {1: lambda _: GUARD})
    winner = next(entry.trial.setting for entry in ledger if entry.trial.stage == "check")
    assert stop.best != winner
    assert stop.fastest != winner
    assert Known(ledger).good(stop.best)


def test_where_all_that_ran_has_died_as_well_the_source_stays_and_that_is_said() -> None:
    machine = replace(DIES, name="dies at once and later", source=replace(SOURCE, workers=12))
    ledger, _ = tune(machine, 0)
    died = [Entry(e.trial, GUARD) for e in ledger if e.outcome.ended == "ok"]
    state = State(machine.space(), BiasedPlanner(machine))
    for entry in [*ledger, *died]:
        state.known.add(entry)
    end = stop_of(state, "enough", choose(state), True)
    assert end.best == end.fastest == machine.source
    assert not end.checked
    assert "every setting that was measured died in another trial" in end.reason


def test_what_is_larger_than_what_died_is_no_rival() -> None:
    machine = MACHINES[0]
    state = State(machine.space(), BiasedPlanner(machine))
    for workers in (2, 4):
        driven(state.attempt(replace(SOURCE, workers=workers), "workers", ""), machine)
    assert rival(state, SOURCE) == replace(SOURCE, workers=4)
    driven(state.attempt(replace(SOURCE, workers=3), "workers", ""), machine, GUARD)
    assert rival(state, SOURCE) is None
    state.accept(replace(SOURCE, workers=4))
    assert choose(state) == SOURCE  # slower, but nothing speaks against it


def test_a_check_has_both_or_none() -> None:
    """With too little left for the pair, none of it is tried; with room for one pair, one is."""
    machine, (whole, _) = BY_NAME["data-bound on cores"], tuned("data-bound on cores")
    first = next(n for n, entry in enumerate(whole) if entry.trial.stage == "check")
    spent = sum(entry.outcome.seconds for entry in whole[:first])
    a, b = (entry.trial.prediction.seconds for entry in whole[first : first + 2])
    for room, count in ((a + 0.5 * b, 0), (1.2 * (a + b), 2)):
        space = replace(machine.space(), budget_s=spent + room)
        state = State(space, BiasedPlanner(machine))
        for entry in whole[:first]:
            state.known.add(entry)
            if entry.outcome.measured is not None:
                state.accept(entry.trial.setting)
        ran, (_, checked) = driven(check(state), machine)
        assert len(ran) == count
        assert checked == (count > 0)
        assert state.ended["check"].startswith("measured once more each" if count else "budget: ")


def driven(asking: Asking[T], machine: Machine, *outcomes: Outcome) -> tuple[list[Trial], T]:
    """Answer what is asked for: with these outcomes, then as the machine does."""
    rng, trials = np.random.default_rng(0), list[Trial]()
    try:
        trial = next(asking)
        while True:
            outcome = outcomes[len(trials)] if len(trials) < len(outcomes) else machine.run(trial.setting, rng)
            trials.append(trial)
            trial = asking.send(Entry(trial, outcome))
    except StopIteration as end:
        return trials, end.value


def wide(outcome: Outcome, half: float = 0.3) -> Outcome:
    """With an interval of a machine that is disturbed."""
    was = outcome.measured
    assert was is not None
    return replace(outcome, measured=replace(was, low=(1 - half) * was.samples_s, high=(1 + half) * was.samples_s))


def test_a_faster_step_that_waits_for_data_is_fed_however_wide_the_interval_of_its_rate() -> None:
    """Four readers feed 13 samples a second, and so does a trainer with single samples: neither alone gains."""
    machine, rng = BY_NAME["coupled"], np.random.default_rng(0)
    state = State(machine.space(), BiasedPlanner(machine))
    base = replace(machine.source, workers=4)
    larger = replace(base, train_batch_size=2, accumulate_steps=2)
    driven(state.attempt(base, "workers", ""), machine, wide(machine.run(base, rng)))
    state.accept(base)
    ran, kept = driven(raise_compute(state, larger, "batch", ""), machine, wide(machine.run(larger, rng)))
    assert replace(larger, workers=8) in [trial.setting for trial in ran]
    assert state.best.train_batch_size == (2 if kept else 1)


@pytest.mark.parametrize(("times", "trials"), [(1.02, 1), (1.06, 1), (1.09, 2), (1.27, 2), (1.3, 1)])
def test_a_gain_is_measured_once_more_from_half_of_the_noise_to_twice_it(times: float, trials: int) -> None:
    """The noise of two rates that are known to 10 % is 14 %; a gain of 6 % would be within it after a second trial."""
    machine, rng = BY_NAME["noisy"], np.random.default_rng(0)
    state = State(machine.space(), BiasedPlanner(machine))
    first = wide(machine.run(machine.source, rng), 0.1)
    driven(state.attempt(machine.source, "baseline", ""), machine, first)
    tried, _ = driven(
        state.compare(replace(machine.source, workers=4), "workers", ""), machine, faster(times)(first), GUARD
    )
    assert len(tried) == trials


@pytest.mark.parametrize(("half", "again"), [(0.2, 0), (0.1, 1), (0.05, 1)])
def test_whichever_is_less_well_known_is_measured_once_more(half: float, again: int) -> None:
    """The rate of the source to 20, 10 or 5 %, that of four readers, which gain 15 %, to 10 %."""
    machine, rng = BY_NAME["noisy"], np.random.default_rng(0)
    state = State(machine.space(), BiasedPlanner(machine))
    settings = machine.source, replace(machine.source, workers=4)
    base = wide(machine.run(machine.source, rng), half)
    driven(state.attempt(machine.source, "baseline", ""), machine, base)
    more = wide(faster(1.15)(base), 0.1)
    trials, rate = driven(state.compare(settings[1], "workers", ""), machine, more, (base, more)[again])
    assert [trial.setting for trial in trials] == [settings[1], settings[again]]
    assert rate == state.known.rate(settings[1])
    assert driven(state.compare(settings[1], "batch", ""), machine)[0] == [], "once, whatever stage asks"


def test_a_baseline_that_took_longer_than_other_trials_may_is_not_measured_again() -> None:
    machine, rng = BY_NAME["noisy"], np.random.default_rng(0)
    state = State(machine.space(), BiasedPlanner(machine))
    base, four = wide(machine.run(machine.source, rng), 0.2), replace(machine.source, workers=4)
    long = replace(base, seconds=state.space.trial_limit_s + 1)
    driven(state.attempt(machine.source, "baseline", ""), machine, long)
    trials, _ = driven(state.compare(four, "workers", ""), machine, wide(faster(1.15)(base), 0.1))
    assert [trial.setting for trial in trials] == [four, four]


@pytest.mark.parametrize(("times", "gains"), [(1.2, True), (1.1, False)])
def test_a_gain_beyond_the_noise_counts_though_nothing_is_left_to_measure_it_once_more(
    times: float, gains: bool
) -> None:
    """The noise is 14 %."""
    machine, rng = BY_NAME["noisy"], np.random.default_rng(0)
    state = State(replace(machine.space(), budget_s=400.0), BiasedPlanner(machine))
    base, four = wide(machine.run(machine.source, rng), 0.1), replace(machine.source, workers=4)
    driven(state.attempt(machine.source, "baseline", ""), machine, base)
    last = replace(faster(times)(base), seconds=400.0 - base.seconds - 10.0)
    if gains:
        trials, rate = driven(state.compare(four, "workers", ""), machine, last)
        assert (len(trials), rate) == (1, state.known.rate(four))
    else:
        with pytest.raises(EnoughError, match="of 6m40s are left"):
            driven(state.compare(four, "workers", ""), machine, last)


def test_a_second_trial_of_the_best_that_ends_badly_is_no_ceiling() -> None:
    """The reason why a stage was left is another's then."""
    machine, rng = BY_NAME["noisy"], np.random.default_rng(0)
    state = State(machine.space(), BiasedPlanner(machine))
    base = wide(machine.run(machine.source, rng), 0.2)
    driven(state.attempt(machine.source, "baseline", ""), machine, base)
    state.accept(machine.source)
    more, slow = wide(faster(1.3)(base), 0.1), Outcome("timeout", "got 2 steps", 300.0, None)
    trials, _ = driven(climb(state, workers_ladder(state), ""), machine, more, slow)
    assert trials[1].setting == machine.source
    assert "ended by its time limit" not in state.ended["workers"]


@pytest.mark.parametrize(("reader_s", "cores", "tried"), [(0.1, 8, 7), (0.02, 8, 5), (0.1, 2, 5)])
def test_fewer_readers_are_tried_only_where_they_may_keep_up(reader_s: float, cores: int, tried: int) -> None:
    """80 samples a second with 8 readers.

    Where each takes 0.1 s to decode, 7 may do; where 0.02 s, 2 to 7: their middle.  Eight on two processors may have
    taken 0.1 s because of each other.
    """
    machine, rng = BY_NAME["data-bound on cores"], np.random.default_rng(0)
    state = State(replace(machine.space(), cores=cores), BiasedPlanner(machine))
    eight = replace(machine.source, workers=8)
    was = machine.run(eight, rng).measured
    assert was is not None
    figures = {"samples_s": 80.0, "low": 79.0, "high": 81.0, "reader_s": reader_s, "decode_s": reader_s}
    hungry = replace(was, bound="data-bound", data_share=0.2, **figures)
    driven(state.attempt(eight, "workers", ""), machine, Outcome("ok", "", 60.0, hungry))
    state.accept(eight)
    slower = Outcome("ok", "", 60.0, replace(hungry, samples_s=40.0, low=39.0, high=41.0))
    trials, _ = driven(fewer_workers(state), machine, slower)
    assert trials[0].setting.workers == tried


def test_a_second_trial_that_dies_leaves_nothing_to_compare() -> None:
    machine = BY_NAME["noisy"]
    state = State(machine.space(), BiasedPlanner(machine))
    _, first = driven(state.attempt(machine.source, "baseline", ""), machine)
    assert first is not None
    good = machine.run(machine.source, np.random.default_rng(0))
    assert good.measured is not None
    rate = first.samples_s * 1.09  # a gain within the noise
    doubtful = replace(good, measured=replace(good.measured, samples_s=rate, low=0.9 * rate, high=1.1 * rate))
    more = replace(machine.source, workers=4)
    trials, compared = driven(state.compare(more, "workers", ""), machine, doubtful, GUARD)
    assert [trial.setting for trial in trials] == [more, more]
    assert compared is None
    assert driven(state.attempt(more, "workers", ""), machine) == ([], None)


def test_a_baseline_too_slow_to_measure_is_tried_with_twice_the_readers() -> None:
    """Five minutes hold too few steps with two readers and with four, but not with eight."""
    machine = replace(SLOW, name="slower", decode_s=160.0, source=replace(SLOW.source, workers=2))
    ledger, stop = tune(machine, 0, replace(machine.space(budget_s=3600.0), trial_limit_s=150.0))
    assert [entry.trial.setting.workers for entry in ledger[:3]] == [2, 4, 8]
    assert [entry.outcome.ended for entry in ledger[:3]] == ["timeout", "timeout", "ok"]
    assert stop.best.workers >= 8
    assert "trial 1 was ended by its time limit" in ledger[2].trial.why


@pytest.mark.parametrize(("workers", "tried"), [(1, [1, 2, 4]), (5, [5, 10, 12]), (12, [12]), (0, [0])])
def test_where_more_readers_are_too_slow_as_well_the_budget_is_named(workers: int, tried: list[int]) -> None:
    machine = replace(SLOW, name="too slow", decode_s=1e5, source=replace(SLOW.source, workers=workers))
    ledger, stop = tune(machine, 0, replace(machine.space(budget_s=3 * 3600.0), trial_limit_s=300.0))
    assert [entry.trial.setting.workers for entry in ledger] == tried
    assert stop.best == machine.source
    assert stop.reason.endswith("; a larger --budget gives each trial more time")


@pytest.mark.parametrize("seed", SEEDS)
def test_half_an_hour_feeds_a_run_of_18_s_a_step(seed: int) -> None:
    """Trials end at five minutes, with a few dozen steps and wide intervals."""
    space = SLOW.space(budget_s=1800.0)
    ledger, stop = tune(SLOW, seed, space)
    fed = [replace(SLOW.source, workers=w, prefetch_factor=p) for w in range(1, 13) for p in (1, 2, 4, 8, 16)]
    assert SLOW.rate(stop.best) >= 0.9 * max(map(SLOW.rate, fed))
    assert {entry.outcome.ended for entry in ledger} == {"ok"}
    assert sum(entry.outcome.seconds for entry in ledger) <= 1800.0
    assert all(entry.outcome.seconds <= space.trial_limit_s for entry in ledger[1:])
    for entry in ledger:
        assert SLOW.ram_bytes(entry.trial.setting) <= space.ram_limit_bytes
        assert (SLOW.vram_bytes(entry.trial.setting) or 0) <= (space.vram_limit_bytes or 0)


def test_a_batch_of_one_says_how_larger_ones_can_be_tried() -> None:
    _, stop = tune(SLOW, 0)
    assert stop.ended["batch"] == (
        "cap: the effective batch is 1: `--scale-batch`, or a larger training.accumulate_steps in the config, lets "
        "larger micro-batches be tried"
    )


@every_machine
def test_the_default_budget_never_ends_worse_than_it_began(name: str) -> None:
    machine = BY_NAME[name]
    ledger, stop = tune(machine, 0, machine.space(budget_s=1800.0))
    assert machine.rate(stop.best) >= 0.97 * machine.rate(machine.source)
    assert sum(entry.outcome.seconds for entry in ledger) <= 1.1 * 1800.0
    assert {entry.outcome.ended for entry in ledger} <= ({"ok", "killed"} if machine is DIES else {"ok"})


def test_levels_are_named_from_those_that_the_network_has() -> None:
    """Two samples do not fit unless levels are computed twice, and there are no blocks at full resolution."""
    machine = Machine("one fits", sample_s=0.05, launch_s=0.4, vram=(8.0, 36.0), bias=(1.0,) * 4)
    for levels in ((0, 1, 2), (1, 2), (2,)):
        ledger, stop = tune(machine, 0, replace(machine.space(), levels=levels))
        named = {entry.trial.setting.checkpoint_levels for entry in ledger} - {()}
        assert named == {levels[:1]}
        assert stop.best.checkpoint_levels == levels[:1]
    ledger, _ = tune(machine, 0, replace(machine.space(), levels=()))
    assert {entry.trial.setting.checkpoint_levels for entry in ledger} == {()}


def test_a_space_survives_its_record() -> None:
    space = replace(SLOW.space(), levels=(1, 2), trial_steps=(10, 20), most_ahead=3, kept=("workers",))
    assert Space.from_record(json.loads(json.dumps(space.record()))) == space


@pytest.mark.parametrize(("source_amp", "tried"), [("off", True), ("auto", False), ("bf16", False), ("fp16", False)])
def test_a_number_format_that_the_config_names_stays(source_amp: str, tried: bool) -> None:
    machine = replace(BY_NAME["switches matter"], name=f"amp {source_amp}", source=replace(SOURCE, amp=source_amp))
    ledger, _ = tune(machine, 0)
    whys = [entry.trial.why for entry in ledger if entry.trial.changed.startswith("amp")]
    assert {entry.trial.setting.amp for entry in ledger} == ({"off", "auto"} if tried else {source_amp})
    assert all("numerics change" in why for why in whys if why.startswith("amp"))


def test_a_switch_that_was_not_tried_stays_named_when_the_next_one_was() -> None:
    """Without autocast two thirds of the room is taken, and computing nothing twice would need more than all."""
    machine = Machine("tight", sample_s=0.4, vram=(6.0, 20.0), source=replace(SOURCE, checkpoint_levels=(0,)))
    _, stop = tune(replace(machine, source=replace(machine.source, train_batch_size=4, accumulate_steps=2)), 0)
    refused = stop.ended["switches"].index("checkpoint_levels not tried: up to ")
    assert stop.ended["switches"].index("cuda_allocator") > refused
    assert "each was tried once" not in stop.ended["switches"]


def test_batches_ahead_end_where_their_memory_does() -> None:
    """`training.prefetch_mib` holds 6 batches: 2 workers have them with a factor of 3, and more changes nothing."""
    machine = replace(BY_NAME["bursts"], name="bursts, few places", most_workers=2, most_ahead=6)
    ledger, stop = tune(machine, 0)
    assert {entry.trial.setting.prefetch_factor for entry in ledger} == {1, 2, 3}
    assert stop.ended["prefetch"] == "cap: training.prefetch_mib allows no more"


def test_places_that_are_never_filled_cost_nothing() -> None:
    space = replace(MACHINES[0].space(), most_ahead=4)
    costs = [cost(replace(SOURCE, prefetch_factor=factor), space, "default") for factor in (1, 2, 4)]
    assert costs[0] < costs[1] == costs[2]
    larger = replace(SOURCE, prefetch_factor=4, train_batch_size=2, accumulate_steps=4)
    assert space.batches_ahead(larger) == 2  # places are counted in batches of the source's size


def machines() -> st.SearchStrategy[Machine]:
    """Of any kind, with planners that have two thirds to one and a half of the truth of each part."""
    share = st.floats(0.67, 1.5)
    return st.builds(
        lambda seed, workers, batch, decode, sample, launch, ram, vram, bias, off: Machine(
            f"any {seed}",
            source=replace(SOURCE, workers=workers, train_batch_size=batch, accumulate_steps=16 // batch, amp=off),
            decode_s=decode,
            sample_s=sample,
            launch_s=launch,
            ram=(2.0, *ram),
            vram=(4.0, vram),
            ram_limit_gib=48.0,
            bias=bias,
            unplanned_gib=0.0,
            ram_noise=0.0,
        ),
        st.integers(0, 2**32),
        st.integers(1, 4),
        st.sampled_from([1, 2]),
        st.floats(0.01, 0.5),
        st.floats(0.01, 0.5),
        st.floats(0.0, 0.2),
        st.tuples(st.floats(0.1, 4.0), st.floats(0.001, 0.2), st.floats(0.0, 0.5)),
        st.floats(0.5, 12.0),
        st.tuples(st.just(1.0), share, share, share),
        st.sampled_from(["auto", "off"]),
    )


@given(machine=machines(), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_no_proposal_is_beyond_a_limit_however_wrong_the_planner(machine: Machine, seed: int) -> None:
    space, planner, rng = machine.space(), BiasedPlanner(machine), np.random.default_rng(seed)
    assert space.vram_limit_bytes is not None
    plan = search(space, planner)
    try:
        trial = next(plan)
        while True:
            prediction = trial.prediction
            assert prediction.ram_bytes <= space.ram_limit_bytes
            assert prediction.vram_bytes is not None
            assert prediction.vram_bytes <= space.vram_limit_bytes
            outcome = machine.run(trial.setting, rng)
            # nothing measured: the plan alone must do
            assert trial.stage == "baseline" or outcome.ended == "ok", (trial, outcome)
            trial = plan.send(Entry(trial, outcome))
    except StopIteration:
        return


BAD = ["guard", "gpu_memory", "killed", "timeout", "failed"]


@given(st.lists(st.sampled_from([*["ok"] * 3 * len(BAD), *BAD]), max_size=30))
@settings(max_examples=60, deadline=None)
def test_whatever_happens_it_ends_and_tries_nothing_as_large_as_what_died(fates: list[str]) -> None:
    machine = BY_NAME["switches matter"]
    rng, ledger = np.random.default_rng(0), list[Entry]()
    coming = iter(fates)
    while isinstance(trial := propose(ledger, machine.space(), BiasedPlanner(machine)), Trial):
        fate = next(coming, "ok")
        died = [entry.trial.setting for entry in ledger if entry.outcome.ended != "ok"]
        assert trial.setting not in died
        outcome = machine.run(trial.setting, rng)
        ledger.append(Entry(trial, outcome if fate == "ok" else Outcome(fate, "made up", 10.0, None)))  # type: ignore[arg-type]
    assert len(ledger) <= MOST_TRIALS
    known = Known(ledger)
    if not any(not known.died(setting) for setting in known.settings):
        assert trial.best == machine.source
    else:
        assert known.good(trial.best)
        assert not known.died(trial.best)
        assert not known.died(trial.fastest)
    if trial.checked:
        assert trial.best in [entry.trial.setting for entry in ledger if entry.trial.stage == "check"]
