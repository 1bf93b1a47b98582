"""`vesuvius report`: figures against records whose sums are known; the page is read back by an HTML parser."""

from __future__ import annotations

import json
import os
import re
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.recorded_runs import (
    BEGAN,
    GIB,
    current_records,
    run_end,
    run_start,
    session_file,
    step,
    system,
    validation,
    verdict,
    write_preview,
    write_run,
)  # fmt: skip
from vesuvius.commands import runs as command
from vesuvius.errors import EXIT_NO_RUN, EXIT_OK, ConfigError, VesuviusError
from vesuvius.monitor.post_mortem import Death, append_death, deaths_of, headline
from vesuvius.report import records as records_module
from vesuvius.report.curves import COLORS, Chart, banded, draw, thinned
from vesuvius.report.model import build, comparison, page_of, write_report
from vesuvius.report.model import read_report as reported
from vesuvius.report.page import NOT_KNOWN, RunReport, Table, new_folder
from vesuvius.report.records import RunRecords, read_run

VOID = {"meta", "img", "br", "circle", "path"}


class Page(HTMLParser):
    """The text of the page; asserts that every element is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def shown(*reports: RunReport) -> Page:
    return Page(page_of(reports, "vesuvius report"))


def test_parts_of_the_time_add_up_and_the_first_step_is_separate(tmp_path: Path) -> None:
    start = step(1, step_s=31.0, data_s=30.5)
    paused = step(3, step_s=10.5, other_s=10.04, pause_s=10.0)
    report = reported(write_run(tmp_path / "tiny", [run_start(), start, step(2), paused, step(4)]))
    seconds = {part.name: part.total_s for part in report.parts}
    work = {"data wait": 0.3, "transfer": 0.03, "forward": 0.3, "backward": 0.6}
    work |= {"optimizer": 0.15, "host": 0.12}
    assert seconds == pytest.approx(work | {"first step of each session": 31.0, "pauses": 10.0})
    assert sum(part.share for part in report.parts) == pytest.approx(1.0)
    text = shown(report).text
    assert "total42 s100.0 %" in text
    assert report.facts["samples/s"] == "8.00"


def test_a_missing_part_lowers_the_total_share(tmp_path: Path) -> None:
    """Shares are of the recorded time: were they of their own sum, they would add up whatever is left out."""
    lost = step(2, step_s=0.6)  # 0.1 s in no part
    report = reported(write_run(tmp_path / "tiny", [run_start(), step(1, step_s=0.5), lost, lost | {"step": 3}]))
    assert sum(part.share for part in report.parts) == pytest.approx(1.5 / 1.7)
    assert report.all_tables[0].rows[-1][2] == "88.2 %"


SESSION = st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 3))
MORE = st.lists(st.sampled_from(["validation", "preview", "event", "system"]), max_size=3)


@given(st.lists(st.tuples(SESSION, MORE), max_size=6))
def test_the_records_of_several_sessions_are_those_of_an_uninterrupted_run(
    sessions: list[tuple[tuple[int, int, int], list[str]]],
) -> None:
    """Each session begins at or before the last step; some know of validations up to an earlier step."""
    records: list[dict[str, Any]] = []
    reached = 0
    kinds = {"validation", "preview", "event"}
    for (begin, count, behind), more in sessions:
        begin = min(begin, reached)
        records.append(run_start(begin) | ({"validated_step": max(begin - behind, 0)} if behind else {}))
        for reached in range(begin + 1, begin + count + 1):
            records += [{"kind": kind, "step": reached} for kind in ("step", *more)]
        reached = begin + count
    records = [record | {"time": float(time)} for time, record in enumerate(records)]
    expected = [(record["kind"], record["step"]) for record in current_records(records)]
    with TemporaryDirectory() as folder:
        for name in ("metrics", "system"):
            text = "".join(json.dumps(r) + "\n" for r in records if (r["kind"] == "system") == (name == "system"))
            (Path(folder) / f"{name}.jsonl").write_text(text)
        found = read_run(Path(folder))
    assert found.columns["step"].tolist() == [step for kind, step in expected if kind == "step"]
    assert [(each["kind"], each["step"]) for each in found.others] == [each for each in expected if each[0] in kinds]
    assert [each.step for each in found.system] == [step for kind, step in expected if kind == "system"]
    assert len(found.sessions) == len(sessions)


def test_a_spike_of_one_step_stays_visible_among_thousands() -> None:
    values = np.ones(50_000)
    values[31_415] = 1000.0
    series = banded("loss", np.arange(50_000), values)
    assert series is not None
    assert len(series.x) <= 240
    assert (series.low.min(), series.high.max()) == (1.0, 1000.0)
    assert series.mid.mean() == pytest.approx(values.mean(), rel=1e-3)
    figure = draw(Chart("loss", "Loss", "loss", (series,)))
    assert figure.note == "beyond the axis: up to 1000 loss"
    assert max(ticks_of(figure.svg)) < 20  # else the other 49,999 are a flat line
    assert figure.svg.count('id="spikes"') == 1
    assert len(figure.svg) < 20_000


def ticks_of(svg: str) -> dict[float, float]:
    """Values of the vertical axis and their heights in the drawing."""
    found = re.findall(r'text-anchor: end;[^>]*y="([\d.]+)"[^>]*>([\d.]+)</text>', svg)
    return {float(value): float(y) for y, value in found}


def test_curves_lie_where_their_values_are() -> None:
    series = banded("$x_{$", [0, 10], [0.0, 4.0])
    assert series is not None
    svg = draw(Chart("x", "X", "s", (series,), x_label="$a_{$")).svg
    assert "$a_{$</text>" in svg  # no mathematics is read into a text
    (path,) = re.findall(r'd="M ([\d. L]+)" [^>]*stroke: var\(--c2\)', svg)
    x0, y0, x1, y1 = map(float, path.replace("L", "").split())
    ticks = ticks_of(svg)
    assert x0 < 60 < 330 < x1
    assert y0 - y1 == pytest.approx(ticks[0.0] - ticks[4.0], abs=0.1)


def test_a_resume_hides_nothing_of_why_the_session_before_died(tmp_path: Path) -> None:
    names = ("guard", "hung", "nonfinite", "save_failed", "worker_died")
    events = [{"kind": "event", "time": BEGAN + 8, "step": 8, "event": n, "text": f"why {n}"} for n in names]
    more = {"ram_used_bytes": 7 * GIB, "vram_used_bytes": 6 * GIB, "worker_max_bytes": 5 * GIB}
    died = [run_start(), *(step(n, **(more if n == 8 else {})) for n in range(1, 9)), *events]
    again = [run_start(2, 2, BEGAN + 20), *(step(n, time=BEGAN + 18 + n) for n in range(3, 6))]
    samples = [system(7, used_gib=7.2), system(0, time=BEGAN + 21, used_gib=2.0)]
    run = write_run(tmp_path / "tiny", [*died, *again], samples)
    environment = json.loads((run / "env.json").read_text()) | {"gpus": ["A100"]}
    (run / "env.json").write_text(json.dumps(environment))
    report = reported(run)
    assert report.facts["steps"] == "5 of 100000"
    assert report.facts["peak RAM"] == "7.92 GiB of 8.00 GiB"
    assert report.facts["peak VRAM"] == "6.00 GiB"
    assert report.facts["largest worker"] == "5.00 GiB"
    assert report.facts["non-finite steps"] == "1"
    text = shown(report).text
    assert all(f"why {name}" in text for name in names)


def test_the_last_checkpoint_is_not_one_that_the_resume_could_not_use(tmp_path: Path) -> None:
    saved = [{"kind": "checkpoint", "time": BEGAN + n, "step": n, "saved_time": BEGAN + n} for n in (4, 8)]
    begun = [run_start(), *(step(n) for n in range(1, 9)), *saved, run_start(4, 2, BEGAN + 20)]
    facts = reported(write_run(tmp_path / "tiny", begun)).facts
    assert facts["last checkpoint"].startswith("step 4, ")
    later = {"kind": "checkpoint", "time": BEGAN + 30, "step": 8, "saved_time": BEGAN + 30}
    facts = reported(write_run(tmp_path / "again", [*begun, step(5, time=BEGAN + 25), later])).facts
    assert facts["last checkpoint"].startswith("step 8, ")


@pytest.mark.long
def test_memory_of_a_report_hardly_grows_with_ranks_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each rank and step 8 bytes are kept, of samples beyond a number nothing: an eighth of what the files grow by,
    where records in memory take more than the files."""
    monkeypatch.setattr(records_module, "_MOST_SYSTEM", 100)
    times = {"node": "gpu-7", "step_s": 2.0, "comm_s": 0.5, "pause_s": 0.0, "trainer_bytes": 3 * GIB, "data_s": 0.123}
    readers = {str(pid): GIB for pid in range(8)}

    def read(num_ranks: int, num_samples: int) -> tuple[RunRecords, int, int]:
        """The records, bytes of the files, and most bytes in use while they were read."""
        of_all = [times | {"step_s": 2.0 + rank / 10} for rank in range(num_ranks)]

        def records() -> Iterator[dict[str, Any]]:
            yield run_start()
            for n in range(1, 501):
                yield step(n)
                yield {"kind": "ranks", "time": BEGAN + n, "step": n, "slowest": num_ranks - 1, "times": of_all}

        used = (7.0 if n == 777 else 2.0 for n in range(num_samples))
        samples = (system(n, time=BEGAN + n / 3, readers=readers, used_gib=each) for n, each in enumerate(used))
        run = write_run(tmp_path / f"{num_ranks}" / "tiny", records(), samples)
        read_run(run)  # imports
        tracemalloc.start()
        try:
            return read_run(run), sum(f.stat().st_size for f in run.glob("*.jsonl")), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    found, size, peak_bytes = read(32, 1_500)
    _, more_size, more_bytes = read(64, 3_000)
    assert more_bytes - peak_bytes < (more_size - size) / 8
    report = build(found)
    (ranks,) = [table for table in report.tables if table.title == "Ranks"]
    assert ranks.rows[31] == ("31", "gpu-7", "3.00 GiB", "4.6 s", "0.500", "500 of 500")
    (ram,) = [chart.series[0] for chart in report.charts if chart.key == "ram"]
    assert (ram.high.max(), ram.last) == (pytest.approx(7.7), 2.0), "a spike of one sample stays"
    assert ram.mid.mean() == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(
    "record",
    [{"kind": "ranks", "step": 1, "times": [1]}, {"kind": "run_start", "step": None}, system(1) | {"gpus": [1]}],
)
def test_a_wrong_value_of_a_record_is_an_error_in_one_line(tmp_path: Path, record: dict[str, Any]) -> None:
    run = write_run(tmp_path / "tiny", [run_start(), step(1), {"time": BEGAN + 9} | record])
    with pytest.raises(VesuviusError, match=rf"^cannot read the records of {run}: a line of .* remove that line$"):
        reported(run)


def test_a_report_replaces_reports_but_no_other_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "tiny", [run_start(), step(1)])
    page = write_report([run], tmp_path / "out", "vesuvius report") / "report.html"
    write_report([run], tmp_path / "out", "vesuvius report")
    page.write_text("<html>a thesis</html>")
    with pytest.raises(ConfigError, match="was not written by vesuvius"):
        write_report([run], tmp_path / "out", "vesuvius report")
    assert page.read_text() == "<html>a thesis</html>"


def test_a_page_embeds_no_file_from_outside_of_the_run(tmp_path: Path) -> None:
    outside = write_run(tmp_path / "outside", [])
    write_preview(outside, 1, (16, 9))
    run = write_run(tmp_path / "tiny", [run_start(), step(1)])
    ours = write_preview(run, 1, (16, 9))
    picture = outside / "samples/step_00000001.png"
    (run / "linked.png").symlink_to(picture)
    (run / "folder").symlink_to(outside / "samples")
    os.mkfifo(run / "pipe.png")
    names = ("../outside/samples/step_00000001.png", str(picture), "linked.png", "folder/step_00000001.png", "pipe.png")
    for group in (names, ("samples", "a\0b", "x" * 5000)):  # a page shows six previews
        records = [run_start(), step(1), ours, *(ours | {"picture": name} for name in group)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        assert shown(reported(run)).text.count("the picture cannot be read") == len(group)
    (run / "config.resolved.yaml").unlink()
    (run / "config.resolved.yaml").symlink_to(outside / "config.resolved.yaml")
    assert reported(run).config_text == ""


def test_a_terminal_table_fits_100_columns_and_keeps_its_words() -> None:
    text = " ".join(f"word{n}" for n in range(40))
    table = Table("Title", ("figure", "why"), (("1.5", text), ("2.5", "short")))
    _, *rows = table.text.splitlines()
    assert max(map(len, rows)) <= 100
    assert " ".join(" ".join(row.split()) for row in rows) == f"figure why 1.5 {text} 2.5 short"


def test_unknown_values_are_neither_zero_nor_drawn(tmp_path: Path) -> None:
    report = reported(write_run(tmp_path / "tiny", [run_start(), step(1, loss=None), step(2, loss=0.5)]))
    assert "peak VRAM" not in report.facts, "the machine has no GPU"
    assert report.facts["best validation error"] == NOT_KNOWN
    charts = {chart.key: chart for chart in report.charts}
    assert charts["loss"].series[0].x.tolist() == [2.0]
    assert "vram" not in charts
    assert "ram" not in charts  # the monitor has written nothing


@pytest.mark.parametrize("metrics", ["", '{"kind": "step", "st', "[1]\n7\n{}\n", '{"kind": "step", "step": null}\n'])
def test_a_run_without_a_complete_record_has_a_page(tmp_path: Path, metrics: str) -> None:
    run = write_run(tmp_path / "tiny", [])
    (run / "metrics.jsonl").write_text(metrics)
    report = reported(run)
    assert report.parts == ()
    assert report.facts["steps"] == NOT_KNOWN
    assert "No verdict yet" in shown(report).text


def test_the_first_facts_are_state_progress_time_left_and_checkpoint(tmp_path: Path) -> None:
    begun = [run_start(), step(1), step(2, eta_s=7200.0)]
    run = write_run(tmp_path / "tiny", [*begun, step(3)])
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text()[:-40])
    assert reported(run).facts["steps"] == "2 of 100000", "a torn last line costs that line alone"
    assert reported(run).facts["time left"] == "2h00m"
    saved = {"kind": "checkpoint", "time": BEGAN, "step": 2, "saved_time": BEGAN}
    facts = reported(write_run(tmp_path / "other", [*begun, saved, step(3, steps=3, eta_s=None)])).facts
    assert list(facts)[:4] == ["state", "steps", "time left", "last checkpoint"]
    assert facts["time left"] == "none"
    assert facts["last checkpoint"].startswith("step 2, 20")
    bare = reported(write_run(tmp_path / "bare", [run_start()])).facts
    assert (bare["time left"], bare["last checkpoint"]) == (NOT_KNOWN, "none was recorded")


def test_a_curve_keeps_the_color_of_its_name_and_no_two_share_one() -> None:
    names = ("compute", "data wait", *(f"run {number}" for number in range(12)))
    series = [banded(name, [0, 1], [0, 1]) for name in names]
    colors = [color for color, *_ in draw(Chart("x", "X", "s", tuple(each for each in series if each))).legend]
    assert colors[:2] == [COLORS["compute"], COLORS["data wait"]]
    assert len({*colors}) == len(names)


def test_validation_by_noise_level_and_its_best_step(tmp_path: Path) -> None:
    validations = [validation(1, 0.9), validation(2, 0.6), validation(3, 0.7)]
    report = before = reported(write_run(tmp_path / "tiny", [run_start(), step(1), step(2), step(3), *validations]))
    (bins,) = [chart for chart in report.charts if chart.key == "bins"]
    assert [(s.label, s.mid.tolist()) for s in bins.series] == [
        ("t 0 to 499", [0.9, 0.6, 0.7]), ("t 500 to 999", [0.45, 0.3, 0.35])
    ]  # fmt: skip
    assert report.facts["best validation error"] == "0.600 of the stationary Wiener filter's (step 2)"
    validations.append(validation(4, 0.8, bin_sigmas=[0.25, 60]))  # after a resume by a version with another headline
    report = reported(write_run(tmp_path / "later", [run_start(), step(1), *validations]))
    (bins,) = [chart for chart in report.charts if chart.key == "bins"]
    assert [(s.label, s.mid.tolist()) for s in bins.series] == [("sigma 0.25", [0.8]), ("sigma 60", [0.4])]
    assert report.facts["best validation error"] == "0.800 of the stationary Wiener filter's (step 4)"
    keys = [[c.key for c in each.charts if c.key.startswith("relative")] for each in (before, report)]
    assert keys == [["relative_error_all"], ["relative_error"]], "reports do not overlay the two"


def test_each_reader_has_a_curve_and_many_have_a_band(tmp_path: Path) -> None:
    two = reported(write_run(tmp_path / "two", [run_start(), step(1)], [system(1), system(2)]))
    sizes = {str(pid): pid * GIB for pid in range(1, 21)}
    many = reported(write_run(tmp_path / "many", [run_start(), step(1)], [system(1, readers=sizes)]))
    (curves,), (band,) = ([c for c in report.charts if c.key == "workers"] for report in (two, many))
    assert [series.mid.tolist() for series in curves.series] == [[0.25, 0.25], [0.5, 0.5]]
    assert [(s.low[0], s.mid[0], s.high[0]) for s in band.series] == [(1.0, 10.5, 20.0)]


def test_the_page_shows_text_as_text_and_loads_nothing(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'&\x00"
    event = {"kind": "event", "time": BEGAN, "event": evil, "step": 1, "text": evil}
    records = [run_start(), step(1), event, verdict(1, evidence=evil)]
    report = reported(write_run(tmp_path / "tiny", records, name="n" * 60))
    page = shown(report)
    assert "script" not in [tag for tag, _ in page.tags]
    assert page.text.count("<script>alert(1)</script>\"'&?") == 3
    for _, attributes in page.tags:
        assert not any(str(value).startswith(("http", "//", "file")) for value in attributes.values())
        assert not any(name.startswith("on") for name in attributes)


def test_each_rank_has_a_row_and_its_records_are_not_events(tmp_path: Path) -> None:
    def ranks(number: int, slowest: int, comm_s: tuple[float, float]) -> dict[str, object]:
        times = [
            {
                "step": number,
                "step_s": 1.0,
                "comm_s": wait,
                "pause_s": 0.0,
                "node": f"n{rank}",
                "trainer_bytes": rank * GIB,
            }
            for rank, wait in enumerate(comm_s)
        ]
        return {"kind": "ranks", "time": BEGAN + number, "step": number, "slowest": slowest, "times": times}

    records = [run_start(), step(1), ranks(1, 1, (0.4, 0.0)), step(2), ranks(2, 1, (0.2, 0.0)), step(3)]
    tables = {table.title: table for table in reported(write_run(tmp_path / "tiny", records)).tables}
    assert "Events" not in tables
    rows = tables["Ranks"].rows
    assert [row[:2] for row in rows] == [("0", "n0"), ("1", "n1")]
    assert rows[1][2] == "1.00 GiB"
    assert [row[4:] for row in rows] == [("0.300", "0 of 2"), ("0.00", "2 of 2")]
    assert "Ranks" not in {
        table.title for table in reported(write_run(tmp_path / "one", [run_start(), step(1)])).tables
    }


def test_a_comparison_shows_only_the_differences_of_two_runs(tmp_path: Path) -> None:
    for name, rate in (("a", 4), ("b", 8)):
        keys = {"seed": rate, "name": "same"}
        write_run(tmp_path / name, [run_start(), *(step(n, samples=rate) for n in range(1, 4))], **keys)
    reports = [reported(tmp_path / name) for name in "ab"]
    compared = comparison([replace(report, name=name) for report, name in zip(reports, "ab", strict=True)])
    assert compared.headline == "2 runs; 8.00 to 16.0 samples/s", "which is faster was not tested"
    results, config = compared.tables
    assert ("samples/s", "8.00", "16.0") in results.rows
    assert "sessions" not in [row[0] for row in results.rows]
    assert config.rows == (("seed", "4", "8"),)
    overlaid = {chart.key: chart for chart in compared.charts}
    assert [len(series.x) for series in overlaid["step_s"].series] == [3, 3]
    page = shown(*reports)
    assert all(f"same ({tmp_path / name})" in page.text for name in "ab")
    assert "Training loss, over step" in [attributes.get("aria-label") for tag, attributes in page.tags if tag == "svg"]


def test_commands_in_one_second_have_their_own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that only looks first has one folder for all who look before the first of them writes."""
    monkeypatch.setattr(time, "strftime", lambda *_: "now")
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda _: new_folder(tmp_path / "reports", create=True), range(32))]
    assert sorted(found) == sorted((tmp_path / "reports").iterdir())
    assert len(set(found)) == 32


@pytest.mark.long
def test_the_command_writes_a_new_folder_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "tiny"
    previews = [write_preview(run, n) for n in (1, 2)]
    (run / previews[0]["picture"]).write_bytes(b"no picture")
    write_run(run, [run_start(), step(1), step(2), *previews])
    assert [command.report(["tiny"]), command.report(["tiny"])] == [EXIT_OK, EXIT_OK]
    pages = sorted(run.glob("reports/*/report.html"))
    assert len(pages) == 2
    assert str(pages[0]) in capsys.readouterr().out
    page = Page(pages[0].read_text())
    (image,) = [attributes for tag, attributes in page.tags if tag == "img"]
    assert str(image["src"]).startswith("data:image/jpeg;base64,")
    assert page.text.count("the picture cannot be read") == 1
    assert page.text.count("Pictures") == 1
    assert "2 of 100000" in page.text
    assert command.report(["other"]) == EXIT_NO_RUN


def _long_run(count: int) -> Iterator[dict[str, object]]:
    noise = np.random.default_rng(0).lognormal(size=(count, 4)).tolist()
    yield run_start()
    for number, (a, b, c, d) in enumerate(noise, 1):
        yield step(number, loss=a, grad_norm=b, data_s=c / 10, step_s=0.4 + c / 10, lr=d)
        if number % 100 == 0:
            yield verdict(number)
        if number % 1000 == 0:
            yield validation(number, 1 + a)


@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_a_long_run_fits_a_small_page(tmp_path: Path, count: int) -> None:
    """Below 2 MB, with every step and the largest loss."""
    run = tmp_path / "tiny"
    metrics = [*_long_run(count), *(write_preview(run, n, (700, 400)) for n in range(1, 6))]
    write_run(run, metrics, (system(n, used_gib=1 + n % 7) for n in range(1, count, 5)))
    assert command.report([str(run), "--out", str(tmp_path / "out")]) == EXIT_OK
    html = (tmp_path / "out" / "report.html").read_bytes()
    assert len(html) < 2_000_000
    page = Page(html.decode())
    losses = [record["loss"] for record in metrics if record["kind"] == "step"]
    assert f"{count} of 100000" in page.text
    assert f"to {max(losses):#.3g}".removesuffix(".") in page.text


@pytest.mark.parametrize(
    ("exit_code", "cause", "words"),
    [
        (
            4,
            "memory guard: 92 % of 8 GiB",
            "Failed at step 2 of 10 (ended with exit code 4: memory guard: 92 % of 8 GiB).",
        ),
        (5, "8 steps", "Failed at step 2 of 10 (ended with exit code 5: 8 steps)."),
        (75, "SIGHUP", "Stopped early at step 2 of 10 (ended with exit code 75: SIGHUP)."),
        (50, "a wrapper", "Failed at step 2 of 10 (ended with exit code 50: a wrapper)."),
        (None, "", "Died at step 2 of 10 (the run (pid 4194305) was killed"),  # the cause is what the kernel tells
    ],
)
def test_the_page_of_a_run_that_is_over_begins_with_the_cause(
    tmp_path: Path, exit_code: int | None, cause: str, words: str
) -> None:
    records = [run_start(), step(1), step(2, steps=10, eta_s=12_900.0), verdict(2)]
    records += [] if exit_code is None else [run_end(2, BEGAN + 9, exit_code, cause)]
    run = write_run(tmp_path / "tiny", records)
    session_file(run, exit_code)
    for of in ("guard", "ray"):
        append_death(run / "post_mortem.jsonl", Death(BEGAN, "run", 1, 1, of, (), (), ""))  # type: ignore[arg-type]
    report = reported(run)
    assert report.facts["processes that died"] == ("2" if exit_code is None else "1"), "an end by the guard is none"
    assert report.headline.startswith(words)
    assert "). Last verdict: Data-bound" in report.headline
    assert [text.split()[-1] for text in report.commands] == ([] if exit_code == 5 else ["--resume"])
    assert report.facts["time left"] == "none: the run is over, 8 steps early"
    for page in (shown(report).text, report.text):
        assert page.index(words[:20]) < page.index("Data-bound")


def test_report_and_memcheck_name_the_same_cause_of_a_death(tmp_path: Path) -> None:
    """What a later session recorded counts, too."""
    run = write_run(tmp_path / "tiny", [run_start(), step(1)])
    session_file(run, None)
    pid = json.loads((run / "session.json").read_text())["pid"]
    append_death(run / "post_mortem.jsonl", Death(time.time(), "run", pid, 1, "kernel", (), (), ""))
    cause = headline(deaths_of(run)[-1])
    assert "out of memory" in cause
    report = reported(run)
    assert report.facts["state"] == f"died: {cause}"
    assert report.headline.startswith(f"Died at step 1 of 100000 ({cause}).")
    assert [row[3] for table in report.tables if table.title == "Events" for row in table.rows] == [cause]


def test_a_run_that_may_have_died_elsewhere_is_not_called_running(tmp_path: Path) -> None:
    run = write_run(tmp_path / "tiny", [run_start(), step(1)])
    session_file(run, "running")
    assert reported(run).headline.startswith("Running: step 1 of 100000")
    record = json.loads((run / "session.json").read_text())
    (run / "session.json").write_text(json.dumps(record | {"boot_id": "another", "host": "far"}))
    assert reported(run).headline.startswith("Running on far, or died there: step 1 of 100000")
    (run / "session.json").unlink()
    assert reported(run).headline.startswith("State unknown: step 1 of 100000")


@pytest.mark.parametrize(
    ("lines", "mixed"),
    [
        (("training.workers: was 2, is 4",), False),
        (("training.max_steps: was 20, is 40", 'training.amp: was "off", is "bf16"'), False),
        (("training.max_steps: was 20, is 40", "learning rate: 0.1 in step 20, 0.2 in step 21, where it was"), True),
        ((), True),
    ],
)
def test_times_are_taken_from_the_steps_with_the_latest_settings(
    tmp_path: Path, lines: Sequence[str], mixed: bool
) -> None:
    """20 steps of 0.5 s, then 20 of 2 s in a session of its own."""
    slow = {"step_s": 2.0, "data_s": 1.6}
    again = run_start(20, 2, BEGAN + 20.5) | {"drift": list(lines)}
    records = [run_start(), *(step(n) for n in range(1, 21)), again]
    records += [step(n, time=BEGAN + n + 1, **slow) for n in range(21, 41)]
    report = reported(write_run(tmp_path / "tiny", records))
    window = report.facts["times are from"]
    if mixed:
        assert window.startswith("steps 1 to 40; ")
        assert report.facts["step, p50"] == "1.25 s"
    else:
        key = next(line.partition(":")[0] for line in lines if "max_steps" not in line)
        assert window.startswith(f"steps 21 to 40, since {key} changed; ")
        assert (report.facts["step, p50"], report.facts["samples/s"]) == ("2 s", "2.00")
        assert sum(part.total_s for part in report.parts) == pytest.approx(40.0)
        assert key in report.parts_note


def test_the_legend_names_the_last_value(tmp_path: Path) -> None:
    """Of 2,400 steps, a point is the mean of ten."""
    count = 2_400
    decay = [step(n, lr=1e-3 * (1 - n / count), loss=5.0 if n == count else 1.0) for n in range(1, count + 1)]
    report = reported(write_run(tmp_path / "tiny", [run_start(), *decay]))
    for charts in (report.charts, [thinned(each, 30) for each in report.charts]):
        legends = {each.key: draw(each).legend[0][2] for each in charts}
        assert legends["loss"].startswith("last 5.00, ")
        assert legends["lr"].startswith("last 0.00, ")
