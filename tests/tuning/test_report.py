"""The report says what was measured, in words, tables and curves that agree."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.tuning.simulated import BY_NAME, BiasedPlanner, SimulatedRunner
from vesuvius.errors import ConfigError
from vesuvius.report.content import RunReport
from vesuvius.report.markdown import render_markdown
from vesuvius.tuning.report import SLOWEST, block_line, build_options, build_page, headline, plan_lines, planned_line
from vesuvius.tuning.search.pairs import Comparison
from vesuvius.tuning.search.policy import recommend
from vesuvius.tuning.search.search import Recommendation, Search


def tuned(name: str) -> tuple[Recommendation, Search]:
    machine = BY_NAME[name]
    search = Search(SimulatedRunner(machine, 0), machine.space(budget_s=1800.0), BiasedPlanner(machine))
    return recommend(search), search


def page_of(name: str) -> tuple[RunReport, Search]:
    found, search = tuned(name)
    options = build_options(found, search, steps=1000)
    return build_page("exp|001", "runs/x", found, search, options, {"commit": "abc"}, "name: x"), search


@pytest.mark.parametrize("name", BY_NAME)
def test_the_options_stand_in_order_and_their_figures_agree(name: str) -> None:
    found, search = tuned(name)
    options = build_options(found, search, steps=1000)
    lean, best, fast = options
    assert lean.samples_s is not None
    assert best.samples_s is not None
    assert fast.samples_s is not None
    assert best.measured
    assert SLOWEST * best.samples_s <= lean.samples_s
    assert fast.samples_s >= best.samples_s
    assert lean.ram_bytes <= best.ram_bytes
    for option in options:
        assert option.ram_bytes <= search.space.ram_limit_bytes
        assert option.step_s is not None
        assert option.total_s == pytest.approx(1000 * option.step_s)
    assert best.step_s == pytest.approx(found.best.global_batch / best.samples_s)
    assert len(best.overrides) == len(found.best.changes(search.space.source))


def test_the_headline_gives_the_gain_with_its_interval_and_pairs() -> None:
    recommendation, search = tuned("data-bound on cores")
    assert recommendation.gain is not None
    found = re.fullmatch(
        r"B: ([\d.]+) times the samples/s \(95 %: ([\d.]+) to ([\d.]+), (\d+) pairs of blocks in turn\)",
        headline(recommendation, search.space),
    )
    assert found is not None
    gain, low, high, pairs = map(float, found.groups())
    assert low <= gain <= high
    assert pairs == recommendation.gain.pairs


def test_what_is_not_sure_is_not_said_as_if_it_were() -> None:
    found, search = tuned("data-bound on cores")
    space, source = search.space, search.space.source
    for change, said in (
        ({"verdict": "unchanged", "best": source}, "nothing to change: "),
        ({"verdict": "unchanged"}, "the config does not fit this machine; B is the nearest that does"),
        ({"verdict": "undecided", "reason": "the budget was spent"}, "undecided: the budget was spent"),
        ({"verdict": "none", "reason": "no memory"}, "no recommendation: no memory"),
        ({"gain": Comparison(1.0, None, None, 1)}, "B: 2.00 times the samples/s (from one block each: no interval)"),
    ):
        assert headline(replace(found, **change), space).startswith(said)  # type: ignore[arg-type]


def test_every_block_is_a_line_of_the_log_and_a_row_of_the_table() -> None:
    page, search = page_of("dies above a threshold")
    rows = {table.title: table.rows for table in page.tables}["All blocks"]
    assert [row[0] for row in rows] == [str(entry.planned.number) for entry in search.entries]
    for entry in search.entries:
        assert planned_line(entry.planned).startswith(f"Block {entry.planned.number} {entry.planned.stage}, ")
        ended = "ended by a kill: a reader was killed by signal 9" if entry.block.ended != "ok" else " samples/s"
        assert ended in block_line(entry)
    text = render_markdown([page], "made", "report.html")
    assert "ended by a kill: a reader was killed" in text
    assert "exp\\|001" in text, "no name breaks a table"


def test_curves_hold_what_was_measured_and_nothing_of_a_block_that_ended_badly() -> None:
    page, search = page_of("dies above a threshold")
    speed, ram, *_ = page.charts
    ok = {entry.planned.number: entry for entry in search.entries if entry.block.ended == "ok"}
    assert len(ok) < len(search.entries)
    drawn = {series.label: dict(zip(series.x, series.mid, strict=True)) for series in speed.series}
    for kind, words in (("run", "whole run"), ("readers", "readers alone"), ("step", "steps alone")):
        blocks = {number: entry.block.rate for number, entry in ok.items() if entry.planned.kind == kind}
        assert drawn[words] == pytest.approx(blocks)
        predicted = {n: ok[n].planned.rate for n in blocks if ok[n].planned.rate is not None}
        assert drawn.get(f"{words}, predicted", {}) == pytest.approx(predicted)
    for series in ram.series:
        assert list(series.x) == list(ok)
    assert ram.limits == (("limit", pytest.approx(search.space.ram_limit_bytes / 2**30)),)


def test_a_dry_run_names_what_may_be_tried_and_what_would_not_be_started() -> None:
    machine = BY_NAME["RAM-capped"]
    lines = plan_lines(machine.space(), BiasedPlanner(machine), "box")
    planned = {line.split(":")[0]: line for line in lines}
    assert "not started" not in planned["the config as it is"]
    assert "not started: up to " in planned["training.workers=16"]
    assert "training.train_batch_size=8 training.accumulate_steps=1" in planned
    with pytest.raises(ConfigError, match="a setting that fits this machine; got none: up to "):
        plan_lines(replace(machine.space(), ram_limit_bytes=2**30), BiasedPlanner(machine), "box")
