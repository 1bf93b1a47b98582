"""`vesuvius profile`: parts that add up, a real one, and one in place."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.test_verdict import GPU, hungry
from tests.support.recorded_runs import run_start, step, write_run
from tests.support.tiny import tiny_sections
from vesuvius.commands import profile as command
from vesuvius.config.load import parse_stored, read_config
from vesuvius.errors import EXIT_DATA, EXIT_OK, EXIT_STOPPED
from vesuvius.experiments import profile
from vesuvius.experiments.profile import Observed, build_profile, profiled
from vesuvius.monitor.verdict import diagnose
from vesuvius.report.charts import work_parts
from vesuvius.report.records import read_run
from vesuvius.runlog.records import read_records
from vesuvius.runlog.units import format_duration
from vesuvius.training.loop import TrainingLoop


def test_the_table_adds_up_to_the_steps_that_count(tmp_path: Path) -> None:
    steps = [step(n) for n in range(1, 9)]
    steps[0] |= {"step_s": 30.0, "data_s": 29.6}
    steps[4] |= {"step_s": 2.5, "other_s": 2.04, "pause_s": 2.0}
    run = write_run(tmp_path / "tiny", [run_start(), *steps, step(9, step_s=100.0)])
    config = parse_stored(tiny_sections("tiny", Path("x")) | {"training": {"workers": 2, "train_batch_size": 4}})
    observed = Observed(warm_steps=3, verdict=diagnose(hungry(), GPU), device="CPU", amp="off")
    report = build_profile(config, read_run(run), observed, 5, 1, "vesuvius tune --config x.yaml")
    assert math.fsum(part.total_s for part in report.parts) == pytest.approx(5 * 0.5)  # steps 4 to 8, without the pause
    assert 100 * math.fsum(part.share for part in report.parts) == pytest.approx(100, abs=0.1)
    assert (report.facts["step, p50"], report.facts["step, p95"]) == ("500 ms", "500 ms")
    assert report.facts["samples/s"] == "8.00"
    assert report.commands == ("vesuvius tune --config x.yaml",)


def test_a_cpu_that_computes_all_the_time_gets_one_sentence_and_no_command(tmp_path: Path) -> None:
    run = write_run(tmp_path / "tiny", [run_start(), *(step(n) for n in range(1, 9))])
    config = parse_stored(tiny_sections("tiny", Path("x")))
    verdict = replace(diagnose(hungry(), GPU), kind="compute-bound", cause=None, overrides=(), advice="")
    report = build_profile(config, read_run(run), Observed(3, verdict, device="CPU"), 5, 1, "vesuvius tune")
    assert report.headline == "Compute-bound on the CPU: no data-path setting will help."
    assert report.commands == ()
    assert not [label for label in report.facts if "GPU" in label or "VRAM" in label]


def test_a_profile_changes_nothing_that_affects_a_step() -> None:
    config = parse_stored(tiny_sections("tiny", Path("x")))
    changed = profiled(config, "p", steps=20)
    assert changed.data.model_copy(update={"resident": config.data.resident}) == config.data
    assert changed.model == config.model
    before, after = config.training.model_dump(), changed.training.model_dump()
    differ = {name for name in before if before[name] != after[name]}
    assert differ <= {"steps_per_epoch", "epochs", "max_steps", "save_every", "preview_every"}
    assert changed.stop_step >= 2 * 20
    stopped = config.with_training(epochs=1000, max_steps=2, warmup_steps=500)
    assert profiled(stopped, "p", steps=20).stop_step >= 2 * 20, "a long warm-up does not fit into it"


def assert_parts_are_all_of_the_time(run: Path, page: str, first: int, last: int) -> None:
    """Seconds against the steps' own clock: a part that is left out is seen, whatever the shares are divided by."""
    steps = [r for r in read_records(run / "metrics.jsonl") if r["kind"] == "step" and first <= r["step"] <= last]
    records = read_run(run)
    number_of = records.columns["step"]
    parts = work_parts(records, (number_of >= first) & (number_of <= last), 1.0)
    work_s = math.fsum(step["step_s"] - step["pause_s"] for step in steps)
    assert math.fsum(part.total_s for part in parts) == pytest.approx(work_s, rel=1e-6)
    table = page.partition("Time by part")[2].partition("\n\n")[0]
    rows = [re.split("  +", line) for line in table.splitlines() if " %  " in f"{line}  "]
    *shares, total = (float(row[2].removesuffix(" %")) for row in rows)
    assert (len(shares), total) == (6, 100.0)
    assert math.fsum(shares) == pytest.approx(100, abs=0.31), "each is rounded"
    assert rows[-1][1] == format_duration(work_s)


@pytest.mark.long
def test_a_real_profile_leaves_an_existing_run_alone(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_config()
    monkeypatch.chdir(path.parent)
    monkeypatch.delenv("VESUVIUS_RUNS", raising=False)
    run = path.parent / "runs" / "tiny"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("kept\n")
    assert command.main(["--config", str(path), "--steps", "6", "--trace"]) == EXIT_OK
    assert sorted(each.name for each in run.iterdir()) == ["metrics.jsonl", "profiles"]
    assert (run / "metrics.jsonl").read_text() == "kept\n"
    (folder,) = (run / "profiles").iterdir()
    assert not (folder / "checkpoints").exists()
    steps = [record for record in read_records(folder / "metrics.jsonl") if record["kind"] == "step"]
    text = capsys.readouterr().out
    page = (folder / "profile.html").read_text()
    warm = int(page.partition(" warm-up steps")[0].rpartition(" ")[2])
    assert len(steps) == warm + 6 + 2  # two traced
    log = (folder / "logs" / "train_full.log").read_text()
    assert f"ended after step {len(steps)}: the profile has its steps" in log
    assert "--resume" not in log
    assert_parts_are_all_of_the_time(folder, text, warm + 1, warm + 6)
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    assert any("conv" in str(event.get("name")) for event in trace["traceEvents"])
    assert "aten::" in (folder / "operators.txt").read_text()
    assert len(page) < 200_000


@pytest.mark.long
def test_a_run_that_is_stopped_has_no_page(tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path, observe = tiny_config(), profile.observe

    def stopped(loop: TrainingLoop, *arguments: Any) -> Iterator[None]:
        for number, _ in enumerate(observe(loop, *arguments), start=1):
            if number == 12:  # more than the run's own last verdict needs
                loop.run.stop.request(EXIT_STOPPED, "a signal came")
            yield

    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(profile, "observe", stopped)
    assert command.main(["--config", str(path), "--steps", "100"]) == EXIT_STOPPED
    assert not list(path.parent.rglob("profile.html"))


def test_a_run_that_cannot_begin_ends_as_train_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("name: tiny\ndata:\n  volumes:\n    - path: nowhere.zarr\n")
    assert read_config(tmp_path / "c.yaml").name == "tiny"
    assert command.main(["--config", "c.yaml"]) == EXIT_DATA
    with pytest.raises(SystemExit):
        command.main(["--config", "c.yaml", "--steps", "4"])
