"""The report says what was measured, in words, tables and curves that agree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.experiments.tune.simulated import BY_NAME, BiasedPlanner, tuned
from vesuvius.errors import ConfigError
from vesuvius.experiments.paired import Comparison
from vesuvius.experiments.tune.report import (
    SLOWEST,
    build_options,
    build_page,
    headline,
    plan_lines,
    trial_line,
)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_options_are_ordered_and_consistent(name: str) -> None:
    search, found = tuned(name)
    options = build_options(found, search, steps=1000)
    lean, best, fast = options
    assert lean.samples_s is not None
    assert best.samples_s is not None
    assert fast.samples_s is not None
    assert SLOWEST * best.samples_s <= lean.samples_s
    assert fast.samples_s >= best.samples_s
    assert lean.ram_bytes <= best.ram_bytes
    for option in options:
        assert option.ram_bytes <= search.space.ram_limit_bytes
        assert option.step_s is not None
        assert option.total_s == pytest.approx(1000 * option.step_s)
    assert best.step_s == pytest.approx(found.best.global_batch / best.samples_s)
    assert len(best.overrides) == len(found.best.changes(search.space.source))


def test_the_headline_states_the_gain_and_its_certainty() -> None:
    search, found = tuned("data-bound on cores")
    source = search.base
    for change, said in (
        ({"certainty": "unchanged", "best": source}, "Keep the config: "),
        ({"certainty": "unchanged", "complete": False, "reason": "spent"}, "No gain found yet: spent"),
        ({"certainty": "likely", "gain": None, "predicted": 0.5}, "1.50 times as fast, predicted from reading and "),
        ({"certainty": "none", "reason": "no memory"}, "No recommendation: no memory"),
        (
            {"gain": Comparison(0.2, 0.1, 0.31, 4)},
            "1.20 times as fast (95 %: 1.10 to 1.31, 4 pairs of trials): workers",
        ),
        (
            {"certainty": "likely", "gain": Comparison(1.0, None, None, 2)},
            "Likely 2.00 times as fast (2 pairs of trials, no int",
        ),
    ):
        assert headline(replace(found, **change), source).startswith(said)  # type: ignore[arg-type]
    page = build_page("exp", "runs/x", replace(found, written=source), search, [], {}, (), "")
    assert "no change yet" in page.facts["tuned config"]


def test_every_trial_is_a_line_of_the_log_and_a_row_of_the_table() -> None:
    search, found = tuned("dies above a threshold")
    options = build_options(found, search, steps=1000)
    page = build_page("exp|001", "runs/x", found, search, options, {"commit": "abc"}, (), "name: x")
    rows = {table.title: table.rows for table in page.tables}["All trials"]
    assert len(rows) == len(search.results)
    for number, result in enumerate(search.results):
        ended = "ended by a kill: a reader was killed by signal 9" if result.ended != "ok" else " samples/s"
        assert ended in trial_line(number, result)
    assert "ended by a kill: a reader was killed" in page.text


def test_a_dry_run_lists_settings_and_those_that_would_not_be_started() -> None:
    machine = replace(BY_NAME["RAM-capped"], remote=True)
    lines = plan_lines(machine.space(), BiasedPlanner(machine), "box")
    planned = {line.split(":")[0]: line for line in lines}
    assert "not started" not in planned["the unchanged config"]
    assert "not started: up to " in planned["training.workers=16"]
    assert "training.train_batch_size=8 training.accumulate_steps=1" in planned
    assert "data.store.requests=32" in planned
    with pytest.raises(ConfigError, match="the config does not fit this machine: up to "):
        plan_lines(replace(machine.space(), ram_limit_bytes=2**30), BiasedPlanner(machine), "box")
