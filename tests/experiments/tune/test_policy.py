"""The policy on simulated machines: near the best, within the memory and the budget, the same each time."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest

from tests.experiments.tune.simulated import (
    BUSY,
    BY_NAME,
    CROWDED,
    GIB,
    GUARD_SHARE,
    SLOW,
    SOURCE,
    BiasedPlanner,
    Disturbance,
    Machine,
    SimulatedRunner,
    best_rate,
    tune,
    tuned,
)
from vesuvius.experiments import Ended
from vesuvius.experiments.paired import ALPHA, MIN_PAIRS_TO_WRITE
from vesuvius.experiments.tune.measurement import Knob, PredictedMemory, Result, Setting, TrialKind
from vesuvius.experiments.tune.policy import conclude, policy
from vesuvius.experiments.tune.search import Search

DIES = BY_NAME["dies above a threshold"]
every_machine = pytest.mark.parametrize("name", BY_NAME)


def settings_of(search: Search) -> list[Setting]:
    return [result.setting for result in search.results]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("drift", "least", "seeds"), [(0.0, 0.97, 1), (0.05, 0.97, 2), (0.10, 0.95, 2)])
def test_a_tune_ends_near_the_optimum_despite_drift(drift: float, least: float, seeds: int) -> None:
    found = {  # mean share of the optimum
        name: fmean(machine.rate(tuned(name, seed, drift)[1].best) / best_rate(machine) for seed in range(seeds))
        for name, machine in BY_NAME.items()
    }
    assert fmean(found.values()) >= least, found
    assert min(found.values()) >= 0.88, found
    search, slow = tuned(SLOW.name, 0, drift)  # half an hour feeds a run of 18 s a step
    assert SLOW.rate(slow.best) >= 0.95 * best_rate(SLOW)
    assert {result.ended for result in search.results} == {"ok"}


@every_machine
def test_a_tune_stays_within_memory_and_budget_repeats_itself_and_shows_what_it_writes(name: str) -> None:
    machine, (search, found) = BY_NAME[name], tuned(name)
    for setting in settings_of(search):
        assert machine.ram_bytes(setting) <= GUARD_SHARE * machine.ram_limit_gib * GIB
        vram = machine.vram_bytes(setting)
        assert vram is None or vram <= GUARD_SHARE * machine.vram_limit_gib * GIB
        assert setting.global_batch == machine.source.global_batch
    assert sum(result.seconds for result in search.results) <= 1800.0
    assert {result.ended for result in search.results} <= ({"ok", "killed"} if machine is DIES else {"ok"})
    again = Search(machine.space(budget_s=1800.0), BiasedPlanner(machine), policy)
    for result in search.results:
        again.tell(result)
    assert again.trial is None, "the same trials give the same questions"
    assert (again.asked, conclude(again)) == (search.asked, found)
    assert set(found.reasons) == set(found.best.changes(machine.source))
    assert all(any(c.isdigit() for c in why) for why in found.reasons.values())
    assert found.written == found.best
    if found.best != machine.source:
        assert found.certainty == "sure"
        assert found.gain is not None
        assert found.gain.pairs >= MIN_PAIRS_TO_WRITE


def test_an_unpredicted_death_rules_out_all_settings_as_large() -> None:
    search, found = tuned(DIES.name)
    died = [result.setting.workers for result in search.results if result.ended == "killed"]
    assert 1 <= len(died) == len(set(died)) <= 2
    assert died == sorted(died, reverse=True)
    assert found.best.workers == 6


def test_a_setting_that_died_is_ruled_out_although_it_was_measured_before() -> None:
    measured = Result(SOURCE, "run", "ok", "", 20.0, samples=8, measured_s=10.0, ram_bytes=GIB)
    results = [measured]
    memory = PredictedMemory(DIES.space(), BiasedPlanner(DIES), results)
    assert memory.obstacle(SOURCE) is None
    results.append(Result(SOURCE, "run", "killed", "so", 20.0))
    assert "was ended by a kill" in str(memory.obstacle(SOURCE))


def test_requests_prefetch_and_batches_match_store_bursts_and_steps() -> None:
    best = tuned("data-bound on latency")[1].best
    assert best.requests > SOURCE.requests
    assert best.workers > 1
    search, found = tuned("bursts")
    assert found.best.prefetch_factor == 16
    deeper = {c.stage for c in search.asked if c.setting.prefetch_factor > 1}
    assert deeper <= {"delivery", "confirm"}, "the run waits though its readers could deliver"
    best = tuned("coupled")[1].best
    assert (best.workers, best.train_batch_size) == (8, 4), "neither gains alone"


def test_switches_are_tried_only_if_allowed() -> None:
    search, machine = tuned("CPU")[0], BY_NAME["CPU"]
    tried = {knob for setting in settings_of(search) for knob in setting.changes(machine.source)}
    assert tried.isdisjoint({"amp", "channels_last"})
    assert "compile" in tried
    by_itself = Machine("by itself", sample_s=0.4, source=replace(SOURCE, channels_last="auto"))
    assert {setting.channels_last for setting in settings_of(tune(by_itself, 0))} == {"auto"}, "it is on"
    short = tune(machine, 0, machine.space(budget_s=800.0))
    assert not any(setting.compile for setting in settings_of(short))
    assert ("steps", "compile not tried: it would take 15 % of the budget or more") in short.notes
    eager = Machine("eager", sample_s=0.4)
    for kept in ((), ("compile",)):
        found = tune(eager, 0, replace(eager.space(), kept=kept))
        assert any(setting.compile for setting in settings_of(found)) is not bool(kept)


@pytest.mark.parametrize("budget_s", [60.0, 120.0, 300.0])
@every_machine
def test_a_small_budget_writes_only_what_was_measured_in_pairs(name: str, budget_s: float) -> None:
    machine = BY_NAME[name]
    search = tune(machine, 0, machine.space(budget_s=budget_s))
    found = conclude(search)
    assert sum(result.seconds for result in search.results) <= budget_s
    assert machine.rate(found.best) >= 0.95 * machine.rate(machine.source)
    if found.written != machine.source:
        runs = Counter(result.setting for result in search.results if result.kind == "run")
        assert runs[found.written] >= MIN_PAIRS_TO_WRITE
    readers = {result.setting: result.rate for result in search.results if result.kind == "reading"}
    steps = max((result.rate for result in search.results if result.kind == "step"), default=0.0)
    if len(readers) > 1 and 1.5 * readers[machine.source] < min(max(readers.values()), steps):
        assert found.best != machine.source, "what doubles the readers is recommended"
        assert found.certainty in ("sure", "likely")


@pytest.mark.parametrize("budget_s", [480.0, 1200.0])
def test_a_busy_machine_with_a_slow_store_gets_a_faster_config(budget_s: float) -> None:
    """Its rates vary threefold by themselves, and switches make steps slower."""
    source = BUSY.rate(BUSY.source)
    tunes = [conclude(tune(BUSY, seed, BUSY.space(budget_s))) for seed in range(6)]
    for found in tunes:
        assert BUSY.rate(found.written) >= 0.97 * source
        assert BUSY.rate(found.best) >= min(5 * source, 0.97 * best_rate(BUSY))
        assert found.certainty != "none"
    assert fmean(BUSY.rate(found.written) for found in tunes) > 5 * source


COMPUTES = Machine("computes", sample_s=0.4)
MORE = replace(SOURCE, workers=4)
TIGHT, WIDE = (-0.01, 0.0, 0.01), (-0.3, 0.0, 0.3)


@pytest.mark.parametrize(
    ("gain", "spread", "certainty"),
    [
        (-0.10, TIGHT, "unchanged"),
        (0.01, TIGHT, "unchanged"),
        (0.10, TIGHT, "sure"),
        (0.10, WIDE, "likely"),
        (0.60, (-0.6, 0.0, 0.6), "likely"),
        (2.0, (0.0,), "likely"),  # two pairs are never sure
    ],
)
def test_a_recommendation_is_as_certain_as_its_interval(gain: float, spread: tuple[float, ...], certainty: str) -> None:
    search = tune(COMPUTES)
    search.best = MORE
    search.with_base[:] = [((1 + gain) * math.exp(off), 1.0) for off in (*spread, *spread)]
    found = conclude(search)
    assert found.certainty == certainty
    assert found.best == (SOURCE if certainty == "unchanged" else MORE)
    assert found.written == (MORE if certainty == "sure" else SOURCE)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "disturbance",
    [
        CROWDED,
        Disturbance(noise=0.3, correlated_steps=200, drift=0.2, drift_s=40.0),
        Disturbance(noise=0.1, drift=0.3, drift_s=20.0, stalls_s=60.0),
    ],
    ids=["crowded", "correlated", "drifting"],
)
def test_where_no_knob_matters_at_most_5_percent_of_tunes_change_the_config(disturbance: Disturbance) -> None:
    """More readers, larger pieces and all switches are tried, and none has an effect."""
    source = replace(SOURCE, workers=8)
    machine = Machine("null", decode_s=0.001, sample_s=0.3, source=source, disturbance=disturbance)
    tunes = [tune(machine, seed, machine.space(1800.0)) for seed in range(100)]
    tried = {knob for search in tunes for setting in settings_of(search) for knob in setting.changes(source)}
    assert len(tried) >= 4
    found = [conclude(search) for search in tunes]
    assert sum(each.certainty == "likely" for each in found) >= 5, "so noisy that some look faster"
    assert sum(each.written != source for each in found) <= ALPHA * 100


def test_the_trial_that_chose_a_setting_is_not_taken_to_confirm_it() -> None:
    machine = BY_NAME["bursts"]
    search = tune(machine)
    confirming = [
        i for i, trial in enumerate(search.asked) if trial.stage == "confirm" and trial.why.startswith("pair")
    ]
    fresh = [search.results[i].rate for i in confirming]
    assert {rate for pair in search.with_base for rate in pair} == {*fresh}


def test_a_source_that_does_not_fit_or_dies_ends_the_tune_and_says_why() -> None:
    source = replace(SOURCE, workers=12, prefetch_factor=4)
    search = tune(replace(BY_NAME["RAM-capped"], name="too many readers", source=source))
    found = conclude(search)
    assert (search.results, found.certainty, found.best) == ([], "none", source)
    assert "of RAM predicted, limit 34.44 GiB" in found.reason
    search = tune(replace(DIES, name="dies at once", source=replace(SOURCE, workers=12), dies_at_workers=1))
    found = conclude(search)
    assert (len(search.results), found.certainty, found.written) == (1, "none", search.base)
    assert "was ended by a kill" in found.reason


@pytest.mark.parametrize("name", ["data-bound on cores", "switches matter", "VRAM-capped", "CPU", "bursts"])
@pytest.mark.parametrize("kept", [("workers",), ("prefetch_factor", "compile"), ("train_batch_size",)])
def test_no_trial_changes_a_kept_knob(name: str, kept: tuple[Knob, ...]) -> None:
    machine = BY_NAME[name]
    search = tune(machine, 0, replace(machine.space(), kept=kept))
    for setting in (conclude(search).best, *settings_of(search)):
        assert not set(kept) & setting.changes(machine.source).keys()


@pytest.mark.parametrize("ended", ["guard", "timeout", "failed"])
def test_a_setting_that_fails_to_confirm_is_not_taken(ended: Ended) -> None:
    machine = BY_NAME["switches matter"]

    class EndsBadly(SimulatedRunner):
        def measure(self, setting: Setting, kind: TrialKind, seconds: float, limit_s: float) -> Result:
            result = super().measure(setting, kind, seconds, limit_s)
            is_bad = kind == "run" and setting != machine.source
            return Result(setting, kind, ended, "so", 20.0) if is_bad else result

    search = tune(machine, lab=EndsBadly(machine, 0))
    found = conclude(search)
    assert found.best == found.written == machine.source
    assert found.certainty == "unchanged"
    assert any("was ended by" in words for _, words in search.notes)


@pytest.mark.parametrize(("sample_s", "workers"), [(0.05, 1), (5.0, 0)])
def test_a_trainer_without_readers_gets_one_if_alternating_costs_time(sample_s: float, workers: int) -> None:
    """One reader is no faster than the trainer that reads, and yet it reads while that computes."""
    machine = Machine("takes turns", decode_s=0.04, sample_s=sample_s, source=replace(SOURCE, workers=0))
    search = tune(machine)
    assert (conclude(search).best.workers > 0) == (workers > 0)
    assert (max(setting.workers for setting in settings_of(search)) == 0) == (workers == 0)


@pytest.mark.parametrize(("contention", "workers"), [(2.0, 0), (0.0, 1)])
def test_readers_are_dropped_if_they_cost_more_than_they_gain(contention: float, workers: int) -> None:
    machine = Machine("small", decode_s=0.04, sample_s=0.2, contention=contention, source=replace(SOURCE, workers=1))
    assert conclude(tune(machine)).best.workers == workers
