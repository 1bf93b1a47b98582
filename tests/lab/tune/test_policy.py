"""The policy on simulated machines: near the best, in few trials, never beyond the memory, the same each time."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.tune.simulated import (
    BY_NAME,
    GIB,
    MACHINES,
    RUNG,
    SOURCE,
    BiasedPlanner,
    Machine,
    best_rate,
    tune,
)
from vesuvius.errors import ConfigError
from vesuvius.lab.tune.policy import expected_trials, propose
from vesuvius.lab.tune.search import search
from vesuvius.lab.tune.setting import Setting
from vesuvius.lab.tune.state import MOST_TRIALS
from vesuvius.lab.tune.trial import Entry, Outcome, Stop, Trial

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
    assert check == check[:2] * 2
    assert check[0] != check[1]


def test_the_knee_is_named_with_what_the_next_step_gave() -> None:
    _, stop = tuned("data-bound on cores")
    assert stop.ended["workers"].startswith("knee: ")
    assert stop.reasons["workers"].startswith("2 -> 6: 2.4 times the samples/s (")
    assert re.search(r"; 8 gave [+-]0\.\d %, below 3%$", stop.reasons["workers"])


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


@given(st.lists(st.sampled_from(["ok", "guard", "gpu_memory", "killed", "timeout", "failed"]), max_size=30))
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
    if not any(entry.outcome.ended == "ok" for entry in ledger):
        assert trial.best == machine.source
