"""Three options: the leanest that is fast enough, the one to take, and the fastest or a step beyond."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from tests.lab.tune.made_up import (
    BEST,
    BIG,
    FASTEST,
    FOUR,
    HORIZON,
    LEDGER,
    SIX,
    SOURCE,
    SPACE,
    STOP,
    entry,
    make_options,
    measured,
    predict,
)
from vesuvius.lab.tune.report.options import Option, options
from vesuvius.lab.tune.terms.known import Known
from vesuvius.lab.tune.terms.setting import Setting
from vesuvius.lab.tune.terms.space import Space
from vesuvius.lab.tune.terms.trial import Ended, Entry, Prediction, Stop
from vesuvius.observe.units import GIB

SAME = replace(STOP, best=SIX, fastest=SIX)


def choose(
    ledger: list[Entry],
    stop: Stop = SAME,
    space: Space = SPACE,
    expected: Prediction | None = None,
    forbidden: Collection[Setting] = (),
) -> tuple[Option, Option, Option]:
    def obstacle(setting: Setting) -> str | None:
        return "no room" if setting in forbidden else None

    return options(Known(ledger), stop, space, lambda setting: expected or predict(setting), obstacle, HORIZON)


def ledger_of(**rates: float) -> list[Entry]:
    """Trials of four and six readers, samples/s by name; memory grows with the readers."""
    settings = {"four": (FOUR, 28.0), "six": (SIX, 34.0)}
    return [
        entry(i, settings[name][0], "workers", measured(rate, settings[name][1], 24.0), (rate, 30.0, 24.0))
        for i, (name, rate) in enumerate(rates.items())
    ]


def test_b_is_what_the_tune_recommends_with_all_its_trials_pooled() -> None:
    b = make_options()[1]
    assert b.setting == BEST
    assert b.measured
    assert b.samples_s == pytest.approx((41.2 + 41.3) / 2, rel=1e-4)  # equal intervals weigh alike, but for 0.2 %
    assert b.ram_bytes == int(35.7 * GIB)  # the higher of both peaks
    assert b.step_s == pytest.approx(8 / b.samples_s)
    assert b.epoch_s == pytest.approx(4000 * 8 / b.samples_s)
    assert b.total_s == pytest.approx(32 * 4000 * 8 / b.samples_s)
    assert b.overrides == tuple(BEST.overrides(SOURCE))
    assert b.words == "what to run: the cheapest setting within 3 % of the most samples/s"


@pytest.mark.parametrize(
    ("rate", "spread", "said"), [(44.0, 0.1, True), (44.0, 0.01, False), (41.0, 0.1, False), (40.0, 0.1, False)]
)
def test_b_says_where_the_gain_of_c_may_be_noise(rate: float, spread: float, said: bool) -> None:
    rates = {FOUR: 40.0, SIX: rate}
    ledger = [
        entry(i, setting, "workers", measured(samples_s, 30.0, 24.0, spread=spread), (40.0, 30.0, 24.0))
        for i, (setting, samples_s) in enumerate(rates.items())
    ]
    words = choose(ledger, replace(STOP, best=FOUR, fastest=SIX))[1].words
    doubt = "; the +10.0 % of C may be noise (±14.1 %)" if said else ""
    assert words == f"what to run: the cheapest setting within 3 % of the most samples/s{doubt}"


def test_a_takes_the_least_memory_of_those_that_reach_85_percent_of_b() -> None:
    assert choose(ledger_of(four=0.86 * 40, six=40.0))[0].setting == FOUR
    assert choose(ledger_of(four=0.84 * 40, six=40.0))[0].setting == SIX


def test_a_counts_gpu_memory_as_well() -> None:
    lean = replace(SIX, checkpoint_levels=(0,))
    ledger = [*ledger_of(four=36.0, six=40.0), entry(2, lean, "switches", measured(36.0, 34.0, 12.0), (None, 30, 20))]
    a = choose(ledger)[0]
    assert a.setting == lean
    assert "-10.0 % samples/s, +0 MiB of RAM, -12.00 GiB of VRAM" in a.words


def test_a_is_b_and_says_so_where_a_slower_run_would_save_next_to_nothing() -> None:
    almost = entry(2, FOUR, "workers", measured(39.0, 33.9, 24.0), (None, 30, 24))
    a, b, _ = choose([*ledger_of(six=40.0), almost])
    assert a.setting == b.setting
    assert a.words.startswith("the same as B")


def test_a_trial_that_ended_badly_is_no_option() -> None:
    dead = entry(1, FOUR, "workers", ("killed", "signal 9"), (40.0, 28, 24))
    assert choose([*ledger_of(six=40.0), dead])[0].setting == SIX


def test_c_is_the_fastest_that_was_measured() -> None:
    c = make_options()[2]
    assert c.setting == FASTEST
    assert c.measured
    assert c.words == "the fastest that was measured: +1.6 % samples/s, +6.60 GiB of RAM, +102 MiB of VRAM"


def test_c_goes_a_step_beyond_in_what_holds_b_up_and_says_that_it_is_predicted() -> None:
    c = choose(ledger_of(six=20.0))[2]
    assert c.setting == replace(SIX, workers=12)
    assert not c.measured
    assert c.samples_s == predict(c.setting).samples_s
    assert c.words == "a step beyond what was measured: workers 6 -> 12; its figures are predicted"


def test_c_of_a_run_that_computes_takes_a_larger_micro_batch_of_the_same_effective_batch() -> None:
    ledger = [entry(0, SIX, "workers", measured(33.0, 34.0, 24.0, "compute-bound"), (None, 30, 24))]
    assert choose(ledger)[2].setting == BIG
    single = replace(SIX, accumulate_steps=1)
    alone = [entry(0, single, "workers", measured(33.0, 34.0, 24.0, "compute-bound"), (None, 30, 24))]
    stop = replace(SAME, best=single, fastest=single)
    assert choose(alone, stop)[2].setting == single
    grown = choose(alone, stop, replace(SPACE, scale_batch=True))[2]
    assert grown.setting == replace(single, train_batch_size=4)


@pytest.mark.parametrize(
    "expected",
    [
        Prediction(20.1, 40 * GIB, 24 * GIB, 95, "low", 3),
        Prediction(None, 40 * GIB, 24 * GIB, 95, "low", 0),
    ],
    ids=["no gain", "unknown"],
)
def test_c_is_b_where_a_step_beyond_promises_nothing(expected: Prediction) -> None:
    c = choose(ledger_of(six=20.0), expected=expected)[2]
    assert c.setting == SIX
    assert c.measured
    assert c.words.startswith("the same as B")


def test_c_passes_the_same_admission_as_a_trial() -> None:
    fast = Prediction(60.0, 40 * GIB, 24 * GIB, 95, "low", 3)
    twelve, ahead = replace(SIX, workers=12), replace(SIX, prefetch_factor=4)
    assert choose(ledger_of(six=20.0), expected=fast)[2].setting == twelve
    assert choose(ledger_of(six=20.0), expected=fast, forbidden={twelve})[2].setting == ahead
    assert choose(ledger_of(six=20.0), expected=fast, forbidden={twelve, ahead})[2].setting == SIX


def test_c_goes_no_further_than_a_trial_would() -> None:
    """`training.prefetch_mib` allows no more batches ahead; one reader is as many as none."""
    fast = Prediction(60.0, 40 * GIB, 24 * GIB, 95, "low", 3)
    full = replace(SPACE, most_workers=6, most_ahead=12)
    assert choose(ledger_of(six=20.0), space=full, expected=fast)[2].setting == SIX
    alone = replace(SIX, workers=0)
    ledger = [entry(0, alone, "baseline", measured(3.0, 20.0, 24.0), (None, 20, 24))]
    assert choose(ledger, replace(STOP, best=alone, fastest=alone))[2].setting == replace(SIX, workers=2)


def test_c_asks_for_requests_only_of_a_remote_store() -> None:
    fast = Prediction(60.0, 40 * GIB, 24 * GIB, 95, "low", 3)
    remote = replace(SPACE, most_workers=6, remote=True)
    assert choose(ledger_of(six=20.0), space=remote, expected=fast)[2].setting == replace(SIX, requests=32)


def test_c_never_names_what_was_tried_and_failed() -> None:
    dead = entry(1, replace(SIX, workers=12), "workers", ("guard", "RAM"), (40.0, 60, 24))
    c = choose([*ledger_of(six=20.0), dead])[2]
    assert c.setting == replace(SIX, prefetch_factor=4)


@pytest.mark.parametrize("ended", ["guard", "gpu_memory", "killed"])
def test_a_setting_that_died_in_any_of_its_trials_is_neither_a_nor_c(ended: Ended) -> None:
    lucky = ledger_of(four=36.0, six=40.0)
    assert choose(lucky)[0].setting == FOUR
    assert choose([*lucky, entry(2, FOUR, "check", (ended, ""), (36.0, 28, 24))])[0].setting == SIX
    eight = replace(SIX, workers=8)
    fastest = replace(STOP, best=SIX, fastest=eight)
    fast = [*ledger_of(six=40.0), entry(1, eight, "workers", measured(41.0, 41.0, 24.0), (40.0, 41, 24))]
    assert choose(fast, fastest)[2].setting == eight
    died = [*fast, entry(2, eight, "check", (ended, ""), (41.0, 41, 24))]
    assert choose(died, fastest)[2].setting not in (eight,)


def test_a_run_that_ends_before_its_epochs_is_counted_to_its_end() -> None:
    short = replace(HORIZON, max_steps=1000)
    made = options(Known(LEDGER), STOP, SPACE, predict, lambda _: None, short)[1]
    assert made.step_s is not None
    assert made.total_s == pytest.approx(1000 * made.step_s)
    assert made.epoch_s == pytest.approx(4000 * made.step_s)
    assert replace(HORIZON, max_steps=10**9).steps == HORIZON.steps == 128_000


def test_where_nothing_was_measured_all_three_are_the_source_as_predicted() -> None:
    dead = [entry(0, SOURCE, "baseline", ("failed", "no such volume"), (None, 20, 24))]
    unknown = Prediction(None, 20 * GIB, 24 * GIB, 90, "medium", 0)
    chosen = choose(dead, replace(STOP, best=SOURCE, fastest=SOURCE), expected=unknown)
    for option in chosen:
        assert option.setting == SOURCE
        assert not option.measured
        assert (option.samples_s, option.step_s, option.epoch_s, option.total_s) == (None, None, None, None)
        assert option.risk == "medium"


def test_a_grown_batch_keeps_the_number_of_steps_and_says_what_a_step_holds() -> None:
    grown = replace(SOURCE, train_batch_size=4)
    ledger = [entry(0, grown, "batch", measured(32.0, 34.0, 24.0), (None, 30, 24))]
    ranks = replace(HORIZON, global_batch=16)  # two ranks of 8
    b = options(Known(ledger), replace(STOP, best=grown, fastest=grown), SPACE, predict, lambda _: None, ranks)[1]
    assert b.epoch_s == pytest.approx(4000 * 32 / 32.0)
    assert b.global_batch == 32
    assert "a step holds 32 samples instead of 16, and the number of steps stays; training.lr was chosen for" in b.words
