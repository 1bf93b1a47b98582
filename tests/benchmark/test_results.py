"""Cells, intervals, bands, break-even steps and the steady pace: closed forms and properties."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vesuvius.benchmark.grid import make_cells, parse_axis
from vesuvius.benchmark.ledger import Measurement
from vesuvius.benchmark.pace import Demand, Pace
from vesuvius.benchmark.page import build_page, table_of
from vesuvius.benchmark.paired import BANDS, band, bands, break_even_step, median_interval
from vesuvius.benchmark.pictures import draw_comparison, draw_table
from vesuvius.benchmark.results import Cell, results_of, verdict
from vesuvius.errors import ConfigError


def test_sweeps_are_crossed_and_comparisons_stand_alone() -> None:
    cells = make_cells(
        [("training.workers", ("0", "1")), ("training.prefetch_factor", ("2", "4"))],
        [("training.amp", ("off", "bf16", "fp16"))],
    )
    assert len(cells) == 2 * 2 + 2
    base = dict(each.split("=") for each in cells[0].overrides)
    assert base == {"training.workers": "0", "training.prefetch_factor": "2", "training.amp": "off"}
    assert [cell.label for cell in cells[-2:]] == ["training.amp=bf16", "training.amp=fp16"]
    assert cells[0].label == make_cells([], [])[0].label == "baseline"
    assert make_cells([("a", ("1", "2"))], [])[0].label == "a=1"
    differ = [sum(dict(o.split("=") for o in cell.overrides)[key] != base[key] for key in base) for cell in cells]
    assert differ == [0, 1, 1, 2, 1, 1]
    assert make_cells([], [])[0].overrides == ()


def test_values_may_hold_commas_in_brackets_and_quotes() -> None:
    assert parse_axis("model.channels=[8,16],[8, 32]") == ("model.channels", ("[8,16]", "[8, 32]"))
    assert parse_axis("""a.b={x: 1, y: [2,3]},'p,q'""") == ("a.b", ("{x: 1, y: [2,3]}", "'p,q'"))
    for wrong in ("training.workers", "=1", "a=1,,2", "a=1,1", "a="):
        with pytest.raises(ConfigError):
            parse_axis(wrong)
    with pytest.raises(ConfigError, match="one axis"):
        make_cells([("a", ("1",))], [("a", ("2",))])


@given(st.floats(allow_nan=False))
def test_bands_have_no_gaps(efficiency: float) -> None:
    """Those of the seed left 87 to 100 % without a name."""
    name = band(efficiency)
    expected = "near-linear" if efficiency >= 0.9 else "good" if efficiency >= 0.75 else "acceptable"
    assert name == (expected if efficiency >= 0.5 else "poor")


def test_bands_are_named_in_order_and_take_numbers_alone() -> None:
    assert all(above > below for (above, _), (below, _) in pairwise(BANDS))
    with pytest.raises(ValueError, match="NaN"):
        band(math.nan)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 8, 9, 12])
def test_an_interval_of_order_statistics_covers_as_often_as_it_says(count: int) -> None:
    """Of a distribution with a long tail, where an interval of the mean would not."""
    rng, trials = np.random.default_rng(count), 4000
    found = [median_interval(values) for values in rng.lognormal(0.0, 1.5, (trials, count)).tolist()]
    level = found[0].level if found[0] else -1.0
    held = sum(each is not None and each.low <= 1.0 <= each.high for each in found) / trials
    assert held == pytest.approx(level, abs=4 * math.sqrt(0.25 / trials))
    assert level >= 0.95 or count < 6
    assert median_interval([]) is None


@given(
    st.floats(0.1, 1e3), st.floats(0.1, 1e3), st.floats(1, 1e3), st.floats(1, 1e3), st.integers(1, 64)
)  # starts, rates, batch
def test_at_the_break_even_step_both_have_taken_as_long(
    start: float, base_start: float, rate: float, base_rate: float, batch: int
) -> None:
    step = break_even_step(start, rate, base_start, base_rate, batch)
    if 0 < step < math.inf:
        ours, others = start + step * batch / rate, base_start + step * batch / base_rate
        assert ours == pytest.approx(others, rel=1e-6)
    for at in (0.5, 2.0):
        later = at * step if 0 < step < math.inf else 1e9
        ahead = start + later * batch / rate <= base_start + later * batch / base_rate
        assert ahead == (later >= step) or math.isclose(rate, base_rate, rel_tol=1e-6)


def step(number: int, **changed: Any) -> dict[str, Any]:
    usual = {"kind": "step", "time": 100.0 + number, "step_s": 0.5, "pause_s": 0.0, "gpu_s": 0.4, "backward_s": 0.2}
    usual |= {"comm_s": 0.05, "data_s": 0.1, "ram_used_bytes": 10, "vram_used_bytes": None}
    return usual | {"readers": {"blocks": 0, "decode_s": 0.0, "read_s": None}} | changed


DEMAND = Demand(
    seconds=2.0, batch=4, warm_steps=3, warm_samples=16, cycle=8, workers=0, patches_per_region=4
)  # 16 samples: four steps


def test_warm_steps_do_not_count_and_a_pause_is_no_step() -> None:
    pace = Pace(DEMAND)
    slow = [step(n, step_s=9.0 if n == 0 else 0.5) for n in range(4)]
    assert not any(pace.add(each) for each in slow)
    taken = 0
    while not pace.add(step(4 + taken, step_s=5.5, pause_s=5.0)):
        taken += 1
        assert taken < 20
    assert pace.samples_s == pytest.approx(4 / 0.5)
    assert pace.figures()["data_share"] == pytest.approx(0.1 / 0.5)
    assert pace.figures()["comm_share"] == pytest.approx(0.05 / 0.5)
    assert "vram_bytes" not in pace.figures()
    assert pace.start_s(launched_s=90.0) == pytest.approx(13.0 - 4 * 0.5)  # the last warm step came at 103


@pytest.mark.parametrize(("compiles", "expected"), [(True, 8.0), (False, None)])
def test_compilation_is_what_the_first_step_computes_beyond_a_usual_one(compiles: bool, expected: float | None) -> None:
    """Not its wait for readers to start, and not its pause."""
    pace = Pace(replace(DEMAND, compiles=compiles))
    pace.add(step(0, step_s=20.4, data_s=8.0, pause_s=4.0))
    while not pace.add(step(1, step_s=0.5, data_s=0.1)):
        pass
    assert pace.figures().get("compile_s") == (expected and pytest.approx(expected))


def test_what_readers_had_read_ahead_is_no_pace() -> None:
    """Two readers of 1 s a sample cannot keep up with 8 samples/s, however many lie ready."""
    pace = Pace(Demand(2.0, 4, 3, 16, 8, workers=2, patches_per_region=4))
    number = 0
    while not pace.add(step(number, readers={"blocks": number, "decode_s": 4.0 * number, "read_s": None})):
        number += 1
    assert pace.samples_s == pytest.approx(2.0)


RANKED = [Cell(f"training.ranks={n}", (f"training.ranks={n}",)) for n in (1, 2, 4)]


def ranked() -> list[Measurement]:
    figures = {"batch": 8, "comm_s": 0.1, "comm_share": 0.1, "ram_bytes": 2.0**30, "step_s": 0.8}
    speeds = {0: 10.0, 1: 19.0, 2: 18.0}
    return [
        Measurement(cell, round, "ok", samples_s=rate * (1 + 0.1 * round), start_s=5.0 + cell, figures=figures)
        for round in range(6)
        for cell, rate in speeds.items()
    ]


def test_efficiency_is_the_speed_per_rank() -> None:
    one, two, four = results_of(RANKED, ranked())
    assert (one.efficiency, one.band) == (1.0, "near-linear")
    assert two.efficiency == pytest.approx(0.95)
    assert (four.efficiency, four.band) == (pytest.approx(0.45), "poor")
    assert [bands(low, high) for low, high in ((0.5, 0.7), (0.41, 0.74), (0.3, 0.95))] == [
        "acceptable", "poor to acceptable", "poor to near-linear"
    ]  # fmt: skip
    assert two.even_step == pytest.approx((1 / (1 / 12.5 - 1 / 23.75)) / 8)
    assert "training.ranks=4 is 1.80 times as fast" in verdict([one, two, four])


def test_nothing_is_said_of_a_cell_that_is_not_told_apart() -> None:
    noisy = [replace(m, samples_s=m.samples_s * ((0.4, 1.5)[m.round % 2] if m.cell else 1)) for m in ranked()]
    _, two, four = results_of(RANKED, noisy)
    assert two.speed
    assert two.speed.low < 1 < two.speed.high
    assert two.even_step is None
    assert (two.band, four.band) == ("poor to near-linear", "poor to acceptable")
    assert "break-even step" not in table_of(results_of(RANKED, noisy)).columns


def test_the_baseline_may_fail_and_the_report_says_so() -> None:
    found = [each for each in ranked() if each.cell] + [Measurement(0, 0, "timeout", "no result within 9 s")]
    results = results_of(RANKED, found)
    assert [each.speed for each in results] == [None, None, None]
    assert "training.ranks=1 was not measured, so nothing" in verdict(results)
    page = build_page("n", "d", {}, results, {}, "")
    assert ("training.ranks=1", "timeout: no result within 9 s") in page.tables[1].rows
    for picture in (draw_comparison("n", results, {}), draw_table("n", results)):
        assert picture.startswith(b"\x89PNG")


def test_the_table_has_a_row_for_each_cell_and_no_empty_column() -> None:
    table = table_of(results_of(RANKED, ranked()))
    assert [row[0] for row in table.rows] == [cell.label for cell in RANKED]
    assert "VRAM" not in table.columns
    assert {"efficiency", "band", "exchange"} <= set(table.columns)
    workers = [Cell("w=0", ("w=0",)), Cell("w=1", ("w=1",))]
    plain = table_of(results_of(workers, [each for each in ranked() if each.cell < 2]))
    assert "efficiency" not in plain.columns


def test_each_loader_has_a_curve_of_its_own_in_order_of_the_axis() -> None:
    cells = [
        Cell(f"{loader}, w={n}", (f"training.workers={n}",), (loader,), loader) for n in (2, 0, 1) for loader in "ab"
    ]
    found = [
        Measurement(number, round, "ok", samples_s=10.0 + number) for number in range(len(cells)) for round in range(2)
    ]
    page = build_page("n", "d", {}, results_of(cells, found), {}, "")
    (chart,) = [each for each in page.charts if each.key == "axis"]
    curves = {series.label: (series.x.tolist(), series.mid.tolist()) for series in chart.series}
    assert curves == {"a": ([0, 1, 2], [12, 14, 10]), "b": ([0, 1, 2], [13, 15, 11])}
