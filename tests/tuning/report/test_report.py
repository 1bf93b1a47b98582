"""The report says what was measured, in words, tables and figures that agree."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tests.tuning.simulated import BY_NAME, BiasedPlanner, SimulatedLab
from vesuvius.errors import StorageError
from vesuvius.tuning.report.files import write_report
from vesuvius.tuning.report.options import SLOWEST, Horizon
from vesuvius.tuning.report.report import Report, build_report
from vesuvius.tuning.report.text import block_line, closing_lines, headline, render_markdown, step_line
from vesuvius.tuning.search.pairs import Comparison
from vesuvius.tuning.search.policy import recommend
from vesuvius.tuning.search.search import Search


def report_of(name: str, budget_s: float = 1800.0) -> tuple[Report, Search]:
    machine = BY_NAME[name]
    space = machine.space(budget_s=budget_s)
    search = Search(SimulatedLab(machine, 0), space, BiasedPlanner(machine))
    report = build_report(
        name="exp|001",
        source="configs/x.yaml",
        tuned="configs/x.tuned.yaml",
        command="vesuvius tune --config configs/x.yaml",
        train_command="vesuvius train --config configs/x.tuned.yaml",
        date="2026-11-23",
        versions={"torch": "2.13.0"},
        machine="box: 12 cores",
        space=space,
        found=recommend(search),
        search=search,
        horizon=Horizon(steps_per_epoch=100, steps=1000, global_batch=space.source.global_batch),
    )
    return report, search


@pytest.mark.parametrize("name", BY_NAME)
def test_the_options_stand_in_order_and_their_figures_agree(name: str) -> None:
    report, _ = report_of(name)
    lean, best, fast = report.options
    assert lean.samples_s is not None
    assert best.samples_s is not None
    assert fast.samples_s is not None
    assert best.measured
    assert SLOWEST * best.samples_s <= lean.samples_s
    assert fast.samples_s >= best.samples_s
    assert lean.ram_bytes <= best.ram_bytes
    for option in report.options:
        assert option.ram_bytes <= report.ram_limit_bytes
        assert option.step_s is not None
        assert option.total_s == pytest.approx(1000 * option.step_s)
    assert {override.partition("=")[0].rpartition(".")[2] for override in best.overrides} == {
        change.knob for change in report.changes
    }


def test_the_headline_gives_the_gain_with_its_interval_and_pairs() -> None:
    report, _ = report_of("data-bound on cores")
    assert report.gain is not None
    found = re.fullmatch(
        r"B: ([\d.]+) times the samples/s \(95 %: ([\d.]+) to ([\d.]+), (\d+) pairs of blocks in turn\)",
        headline(report),
    )
    assert found is not None
    gain, low, high, pairs = map(float, found.groups())
    assert low <= gain <= high
    assert pairs == report.gain.pairs


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"verdict": "unchanged", "changes": ()}, "nothing to change: "),
        ({"verdict": "unchanged"}, "the config does not fit this machine; B is the nearest that does"),
        ({"verdict": "undecided", "reason": "the budget was spent"}, "undecided: the budget was spent"),
        ({"gain": Comparison(1.0, None, None, 1)}, "B: 2.00 times the samples/s (from one block each: no interval)"),
    ],
)
def test_what_is_not_sure_is_not_said_as_if_it_were(change: dict[str, object], said: str) -> None:
    report, _ = report_of("data-bound on cores")
    assert headline(replace(report, **change)).startswith(said)  # type: ignore[arg-type]


def test_every_block_is_a_line_of_the_log_and_a_row_of_the_table() -> None:
    report, search = report_of("dies above a threshold")
    text = render_markdown(report)
    rows = re.findall(r"^\| (\d+) \|", text, re.MULTILINE)
    assert rows == [str(entry.step.number) for entry in search.entries]
    for entry in search.entries:
        assert step_line(entry.step).startswith(f"Block {entry.step.number} {entry.step.stage}, ")
        ended = "killed: a reader was killed by signal 9" if entry.block.ended != "ok" else " samples/s"
        assert ended in block_line(entry)
    assert "killed: a reader was killed" in text
    assert "exp\\|001" in text, "no name breaks a table"
    assert "-1d" not in text


def test_the_files_hold_the_same_figures_and_a_picture_of_all_blocks(tmp_path: Path) -> None:
    report, _ = report_of("VRAM-capped")
    write_report(tmp_path, report)
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["gain"]["gain"] == report.gain.gain if report.gain else False
    assert len(found["blocks"]) == len(report.blocks)
    assert (tmp_path / "report.md").read_text() == render_markdown(report)
    with Image.open(tmp_path / "curves.png") as picture:
        assert min(picture.size) > 300
        assert len(picture.convert("RGB").getcolors(2**24)) > 20
    assert closing_lines(report, tmp_path)[-1] == "run it: vesuvius train --config configs/x.tuned.yaml"


def test_a_folder_that_is_a_file_is_said_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="the report must be writable"):
        write_report(tmp_path / "file", report_of("knee")[0])
