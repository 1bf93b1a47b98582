"""The report says first what held the run up, what to run, what it gives and how sure that is; then everything else."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.lab.tune.made_up import (
    HORIZON,
    LEDGER,
    SIX,
    SOURCE,
    SPACE,
    STOP,
    entry,
    make_report,
    measured,
    obstacle,
    predict,
)
from vesuvius.errors import StorageError
from vesuvius.lab.tune.report.files import write_report
from vesuvius.lab.tune.report.options import Horizon, options
from vesuvius.lab.tune.report.report import Report, build_report
from vesuvius.lab.tune.report.tables import number, options_table, quality_table, trials_table
from vesuvius.lab.tune.report.text import option_line, render_markdown, summary, times_note, yaml_header
from vesuvius.lab.tune.terms.known import Known
from vesuvius.lab.tune.terms.space import Space
from vesuvius.lab.tune.terms.trial import Entry, Stop

ON_CPU = replace(SPACE, on_gpu=False, vram_limit_bytes=None)
ALL_FILES = {"report.json", "report.md", "report.html", "curves.png"}


def report_of(
    ledger: list[Entry], stop: Stop, space: Space = SPACE, tuned: str | None = None, horizon: Horizon = HORIZON
) -> Report:
    return build_report(
        name="x",
        source="x.yaml",
        tuned=tuned,
        command="vesuvius tune --config x.yaml",
        train_command=f"vesuvius train --config {tuned or 'x.yaml'} --resume",
        date="2026-11-22 09:01:02",
        versions={"vesuvius": "0.1.0"},
        machine=["box"],
        space=space,
        known=Known(ledger),
        stop=stop,
        options=options(Known(ledger), stop, space, predict, obstacle, horizon),
        horizon=horizon,
    )


def markdown_tables(text: str) -> dict[str, list[list[str]]]:
    """Cells of the tables by their headings; the rule below the header is left out."""
    tables: dict[str, list[list[str]]] = {}
    for title, body in re.findall(r"^## (.+)\n\n((?:\|.*\n)+)", text, re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in body.splitlines()]
        tables[title] = [[cell.strip() for cell in row] for i, row in enumerate(rows) if i != 1]
    return tables


def test_it_begins_with_cause_command_gain_and_sureness() -> None:
    lines = render_markdown(make_report()).splitlines()
    assert lines[2] == "**B: 3.10 times the baseline's samples/s.**"
    assert [re.sub(r"\*\*(.*?):\*\*.*", r"\1", line) for line in lines[4:9]] == [
        "- What held it up",
        "- What to run now",
        "- What it gives",
        "- How sure",
        "- What limits it now",
    ]
    assert lines[11] == "vesuvius train --config configs/exp001_full.tuned.yaml"


def test_the_summary_gives_figures_as_people_say_them() -> None:
    held, run, gives, sure, limits = (sentence for _, sentence in summary(make_report()))
    assert held == "data-bound (workers too few): the baseline waited for data 62.0 % of the time (good: below 15 %)"
    assert run.startswith("configs/exp001_full.tuned.yaml: workers 2 -> 6, ")
    assert gives == (
        "3.10 times the samples/s: 41.2 instead of 13.3; a step in 0.194 s instead of 0.601 s; 6h53m for the whole run "
        "instead of 21h22m"
    )
    assert "known to ±1.1 % (95 %), from 120 steps in 2 trials; measured again beside its runner-up" in sure
    within = (
        "predictions were within 15 % in 7 of 7 (samples/s), 8 of 8 (RAM), 8 of 8 (VRAM) trials that were the first"
    )
    assert within in sure
    assert sure.endswith("settings whose gain was within the noise were not taken")
    assert limits == "batch: trial 5 ran out of GPU memory"


def test_every_table_of_the_markdown_has_as_many_cells_in_each_row() -> None:
    hostile = [replace_cause(done, "a | b `c` <i>d</i>\n# e") for done in LEDGER]
    tables = markdown_tables(render_markdown(report_of(hostile, STOP, tuned="x.tuned.yaml")))
    titles = ["Options", "Why each value", "Where each stage stopped", "All trials", "How good the predictions were"]
    assert list(tables) == titles
    for rows in tables.values():
        assert {len(row) for row in rows} == {len(rows[0])}
    assert len(tables["All trials"]) == 1 + len(LEDGER)
    assert tables["All trials"][6][-1] == r"GPU out of memory: a \| b \`c\` &lt;i>d&lt;/i> # e"


def replace_cause(done: Entry, cause: str) -> Entry:
    return done if done.outcome.ended == "ok" else replace(done, outcome=replace(done.outcome, cause=cause))


def test_a_trial_shows_what_was_predicted_and_by_how_much_that_was_off() -> None:
    row = dict(zip(*(trials_table(make_report()).columns, trials_table(make_report()).rows[1]), strict=True))
    assert row["samples/s"] == "25.9 ±1.5 %"
    assert row["stage"] == "workers"
    assert trials_table(make_report()).rows[2][4] == "38.0 (+15 %)"
    assert trials_table(make_report()).rows[0][6:8] == ("21.40 GiB", "19.50 GiB (-9 %)")


def test_on_a_cpu_no_column_speaks_of_gpu_memory() -> None:
    ledger = [
        entry(0, SOURCE, "baseline", measured(13.0, 2.0, None), (None, 2.0, None)),
        entry(1, SIX, "workers", measured(30.0, 3.0, None), (28.0, 3.1, None)),
    ]
    report = report_of(ledger, replace(STOP, best=SIX, fastest=SIX, reasons={}), ON_CPU, "x.tuned.yaml")
    assert "VRAM" not in render_markdown(report).replace("samples/s, RAM and VRAM per knob", "")


def test_an_option_is_told_in_one_line() -> None:
    assert option_line(make_report().options[2]) == (
        "C aggressive: 41.9 samples/s, a step in 0.191 s, 6h47m for the whole run, 42.30 GiB of RAM, 38.10 GiB of "
        "VRAM, memory risk low (the fastest that was measured: +1.6 % samples/s, +6.60 GiB of RAM, +102 MiB of VRAM)"
    )


def test_predicted_options_are_marked() -> None:
    ledger = [
        entry(0, SOURCE, "baseline", measured(13.0, 20.0, 24.0), (None, 20.0, 24.0)),
        entry(1, SIX, "workers", measured(20.0, 30.0, 24.0), (28.0, 31.0, 24.0)),
    ]
    rows = options_table(report_of(ledger, replace(STOP, best=SIX, fastest=SIX), tuned="x.tuned.yaml")).rows
    assert not any(cell.startswith("~") for cell in rows[1])
    assert [cell.startswith("~") for cell in rows[2]] == [False, *[True] * 7, False, False]


def test_how_good_predictions_were_counts_only_trials_that_ended_well_and_were_predicted() -> None:
    samples, ram, vram = make_report().quality
    assert (samples.trials, samples.within, samples.share) == (7, 7, 1.0)  # 12 less 2 deaths, baseline, 2 repeats
    assert (ram.trials, vram.trials) == (8, 8)
    assert quality_table(make_report()).columns[1] == "first trials of a setting"
    assert quality_table(make_report()).rows[1][1:3] == ("8", "8 of 8")


def test_a_trial_that_was_predicted_by_its_own_measurement_says_nothing_about_predictions() -> None:
    ledger = [
        entry(0, SOURCE, "baseline", measured(10.0, 20.0, 24.0), (None, 10.0, 24.0)),
        *(entry(i, SOURCE, "check", measured(10.0, 20.0, 24.0), (10.0, 20.0, 24.0)) for i in range(1, 9)),
    ]
    report = report_of(ledger, replace(STOP, best=SOURCE, fastest=SOURCE))
    samples, ram, _ = report.quality
    assert (samples.trials, ram.trials, ram.within) == (0, 1, 0)
    assert [row.first for row in report.trials] == [True] + [False] * 8


def test_a_prediction_that_is_off_by_more_than_15_percent_is_counted_as_such() -> None:
    ledger = [
        entry(0, SOURCE, "baseline", measured(10.0, 20.0, 24.0), (11.6, 16.9, 24.0)),
        entry(1, SIX, "workers", measured(20.0, 20.0, 24.0), (23.0, 22.0, 24.0)),
    ]
    samples, ram, _ = report_of(ledger, replace(STOP, best=SIX, fastest=SIX), tuned="y").quality
    assert (samples.within, samples.median_error) == (1, pytest.approx(0.155))
    assert (ram.within, ram.share) == (1, 0.5)


def test_where_nothing_is_worth_a_change_it_says_so_and_runs_the_source() -> None:
    ledger = [entry(0, SOURCE, "baseline", measured(13.0, 20.0, 24.0, "compute-bound"), (None, 20.0, 24.0))]
    report = report_of(ledger, replace(STOP, best=SOURCE, fastest=SOURCE, reasons={}, checked=False))
    text = render_markdown(report)
    assert "the config is as it should be" in text
    assert "```\nvesuvius train --config x.yaml --resume\n```" in text
    assert "13.0 samples/s, a step in 0.615 s, 21h52m for the whole run" in text
    assert "Why each value" not in text


def test_where_no_trial_ended_well_it_gives_no_figures_and_the_cause() -> None:
    ledger = [entry(0, SOURCE, "baseline", ("failed", "no such volume"), (None, 20.0, 24.0))]
    stop = replace(STOP, best=SOURCE, fastest=SOURCE, reason="the baseline failed: no such volume", reasons={})
    report = report_of(ledger, stop)
    assert (report.gain, report.baseline, report.sureness) == (None, None, None)
    text = render_markdown(report)
    assert "no recommendation" in text
    assert "not known: no trial of the baseline ended well (the baseline failed: no such volume)" in text
    assert "failed: no such volume" in markdown_tables(text)["All trials"][1]


def test_a_baseline_that_had_to_be_made_smaller_is_called_so() -> None:
    ledger = [
        entry(0, SIX, "baseline", ("guard", "RAM"), (None, 200.0, 24.0)),
        entry(1, replace(SIX, workers=1), "baseline", measured(7.0, 20.0, 24.0), (None, 20.0, 24.0)),
    ]
    smaller = replace(SIX, workers=1)
    report = report_of(ledger, replace(STOP, best=smaller, fastest=smaller), tuned="y")
    assert report.gain == pytest.approx(1.0)
    assert "the baseline (the config made smaller until it fitted) waited for data" in summary(report)[0][1]


def held_up(verdict: str, **changes: Any) -> str:
    figures = replace(measured(13.0, 20.0, 24.0), verdict=verdict, **changes)
    ledger = [entry(0, SOURCE, "baseline", figures, (None, 20.0, 24.0))]
    return summary(report_of(ledger, replace(STOP, best=SOURCE, fastest=SOURCE)))[0][1]


def test_any_text_may_stand_for_the_verdict_of_the_baseline() -> None:
    lived = "lived on what readers had read ahead: they give 3 samples/s, it consumed 9"
    assert held_up(f"data-bound: {lived}", cause=None) == f"data-bound: the baseline {lived}"
    assert held_up(f"data-bound: {lived}") == f"data-bound (workers too few): the baseline {lived}"
    assert held_up(lived) == f"data-bound (workers too few), says the baseline: {lived}"
    assert held_up("", cause=None) == "data-bound, says the baseline"


def test_overrides_without_changes_are_what_to_run() -> None:
    ledger = [entry(0, SOURCE, "baseline", measured(13.0, 20.0, 24.0), (None, 20.0, 24.0))]
    report = report_of(ledger, replace(STOP, best=SOURCE, fastest=SOURCE, reasons={}), tuned="x.tuned.yaml")
    assert dict(summary(report))["What to run now"] == (
        "x.tuned.yaml: x.yaml with the overrides of the tune's command line, and nothing else changed"
    )


def test_a_grown_batch_is_told_with_the_learning_rate() -> None:
    grown = replace(SOURCE, train_batch_size=4)
    ledger = [
        entry(0, SOURCE, "baseline", measured(13.0, 20.0, 24.0), (None, 20.0, 24.0)),
        entry(1, grown, "batch", measured(32.0, 34.0, 24.0), (None, 30, 24)),
    ]
    report = report_of(ledger, replace(STOP, best=grown, fastest=grown), replace(SPACE, scale_batch=True), tuned="y")
    words = dict(summary(report))["What to mind"]
    assert words.startswith("a step holds 16 samples instead of 8, and the number of steps stays; training.lr was")
    assert yaml_header(report)[-1] == f"What to mind: {words}"
    assert "What to mind" not in dict(summary(make_report()))


def test_what_a_stage_asks_of_the_user_is_told_in_the_summary() -> None:
    asked = "the effective batch is 1: `--scale-batch` lets larger micro-batches be tried"
    ended = {"workers": "knee: 8 gave +0.9 %", "batch": f"cap: {asked}"}
    stages = "; ".join(f"{stage}: {why}" for stage, why in ended.items())
    spent = "budget: 12s of 30m00s are left, the next trial would take 90s"
    report = report_of(LEDGER, replace(STOP, ended=ended, reason=f"{spent}: {stages}"), tuned="y")
    assert dict(summary(report))["What limits it now"] == f"batch: {asked}; {spent}; a larger --budget tries more"
    assert f"The tune ended: {spent}.\n" in render_markdown(report)
    free = replace(STOP, ended={"workers": "knee: 8 gave +0.9 %"})
    assert "What limits it now" not in dict(summary(report_of(LEDGER, free, tuned="y")))


def test_a_run_with_a_last_step_is_counted_to_it() -> None:
    short = replace(HORIZON, max_steps=1000)
    report = report_of(LEDGER, STOP, tuned="y", horizon=short)
    assert report.baseline is not None
    assert report.baseline.total_s == pytest.approx(1000 * 8 / 13.31)
    assert "the whole run 1000 steps, where training.max_steps ends it" in times_note(report)
    assert "the whole run 32 of them" in times_note(make_report())


def test_the_json_holds_unrounded_figures_and_null_for_what_is_not_known(tmp_path: Path) -> None:
    report = make_report()
    write_report(tmp_path, report, LEDGER, SPACE)
    stored: dict[str, Any] = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert stored == json.loads(json.dumps(asdict(report)))
    assert stored["gain"] == report.gain
    assert stored["trials"][0]["predicted_samples_s"] is None
    assert stored["trials"][5]["samples_s"] is None
    assert stored["options"][1]["setting"]["workers"] == 6


def test_all_files_are_written_and_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    directory = tmp_path / "tune"
    for _ in range(2):
        write_report(directory, make_report(), LEDGER, SPACE)
        assert {path.name for path in directory.iterdir()} == ALL_FILES


def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "tune").write_text("in the way")
    with pytest.raises(StorageError, match=r"tune: the report must be writable; got .*; make room"):
        write_report(tmp_path / "tune", make_report(), LEDGER, SPACE)


def test_the_header_of_the_tuned_config_says_when_what_and_where() -> None:
    assert yaml_header(make_report()) == [
        "2026-11-22 09:01:02: B: 3.10 times the baseline's samples/s, after 12 trials in 16m46s.",
        "Command: vesuvius tune --config configs/exp001_full.yaml --budget 30m",
        "Measured on: box: 12 cores, 170 GiB of RAM, NVIDIA A100-SXM4-80GB (80 GiB)",
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1234.5, "1234"), (99.96, "100"), (41.25, "41.2"), (3.0, "3.00"), (0.04567, "0.0457"), (None, "-")],
)
def test_numbers_have_three_significant_digits(value: float | None, shown: str) -> None:
    assert number(value) == shown
