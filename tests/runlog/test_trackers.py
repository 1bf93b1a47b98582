"""Records as received by TensorBoard, Weights & Biases and MLflow; their failures do not end a run.

A package of a few lines stands for W&B, which is large (60 MB and its dependencies); the test against the real MLflow
runs where that is installed.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support import recorded_runs
from tests.support.recorded_runs import current_records
from tests.support.small_disk import fill, small_disk
from vesuvius.errors import ConfigError
from vesuvius.runlog import trackers
from vesuvius.runlog.records import JsonLines, Record, read_records
from vesuvius.runlog.trackers import TRACKERS, TensorBoard, Tracker, check_trackers, known_figures

TAGS = {
    "events": "nonfinite/text_summary",
    "memory": "ram_gib vram_gib worker_max_gib",
    "preview": "correlation_distance histogram_distance picture spectrum_distance_db",
    "system": "cores_busy gpu_0_busy ram_gib store_gib trainer_gib worker_max_gib",
    "time": "backward_s data_s forward_s gpu_s h2d_s optimizer_s other_s samples_per_s step_p95_s step_s",
    "train": "grad_norm loss lr",
    "validation": "ema_bin_0 loss_ema loss_raw raw_bin_0 raw_bin_1",
}
START: Record = {"kind": "run_start", "time": 1000.0, "step": 0}
STEP = recorded_runs.step(
    4, time=1004.5, loss=0.125, grad_norm=0.25, step_p95_s=2.5,
    ram_used_bytes=3 * 2**30, vram_used_bytes=2**40, worker_max_bytes=2**29,
)  # fmt: skip
READERS, GPUS = {"11": 2**29, "12": 2**28}, [{"index": 0, "busy": [0.0, 0.5, 1.0]}]
SYSTEM = recorded_runs.system(7, time=1010.0, used_bytes=[1, 2, 2**30], readers=READERS, gpus=GPUS)
VALIDATION: Record = {
    "kind": "validation",
    "time": 1020.0,
    "step": 8,
    "loss": 0.25,
    "weights": {"raw": {"loss": 0.75, "bins": [1.0, 0.5]}, "ema": {"loss": 0.25, "bins": [0.25, None]}},
}
NONFINITE: Record = {"kind": "event", "time": 1021.0, "event": "nonfinite", "step": 9, "loss": None, "samples": [0, 8]}
PREVIEW: Record = {
    "kind": "preview",
    "time": 1022.0,
    "step": 10,
    "picture": "samples/step_00000010.png",
    "histogram_distance": 0.125,
    "spectrum_distance_db": 1.5,
    "correlation_distance": 0.25,
}
END = {"kind": "run_end", "time": 1030.0, "step": 10, "exit_code": 0}
SCALARS = {  # of the records above: figure, step and time
    "train/loss": (0.125, 4, 1004.5),
    "train/grad_norm": (0.25, 4, 1004.5),
    "time/step_s": (0.5, 4, 1004.5),
    "time/step_p95_s": (2.5, 4, 1004.5),
    "time/samples_per_s": (8.0, 4, 1004.5),
    "memory/ram_gib": (3.0, 4, 1004.5),
    "memory/vram_gib": (1024.0, 4, 1004.5),
    "memory/worker_max_gib": (0.5, 4, 1004.5),
    "system/ram_gib": (1.0, 7, 1010.0),
    "system/worker_max_gib": (0.5, 7, 1010.0),
    "system/gpu_0_busy": (0.5, 7, 1010.0),
    "validation/loss_raw": (0.75, 8, 1020.0),
    "validation/raw_bin_1": (0.5, 8, 1020.0),
    "preview/spectrum_distance_db": (1.5, 10, 1022.0),
}


def step_record(step: int, **figures: Any) -> Record:
    return STEP | {"step": step, "time": 1000.5 + step} | figures


def write(run: Path, *records: Record) -> None:
    """Run one session with the trackers."""
    board = TensorBoard(run / "tb", run)
    for record in records:
        board.write(record, known_figures(record))
    board.close()


def read(directory: Path) -> Any:
    """An `EventAccumulator`, whose import takes a second."""
    from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator

    return EventAccumulator(str(directory), size_guidance=STORE_EVERYTHING_SIZE_GUIDANCE).Reload()


def test_tags_are_stable_with_step_and_time_of_the_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "samples").mkdir()
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(tmp_path / PREVIEW["picture"])
    gone = {"kind": "preview", "time": 1023.0, "step": 11, "picture": "samples/gone.png"}
    write(tmp_path, START, STEP, SYSTEM, VALIDATION, NONFINITE, PREVIEW, gone, END)
    board = read(tmp_path / "tb")
    found = board.Tags()
    tags = [f"{group}/{name}" for group, names in TAGS.items() for name in names.split()]
    assert sorted(found["scalars"] + found["images"] + found["tensors"]) == tags, "what is not known has no tag"
    for tag, expected in SCALARS.items():
        (event,) = board.Scalars(tag)
        assert (event.value, event.step, event.wall_time) == expected, tag
    (image,) = board.Images("preview/picture")
    assert (image.wall_time, image.step, image.width, image.height) == (1022.0, 10, 30, 20)
    (line,) = caplog.messages
    assert "gone.png" in line
    (text,) = board.Tensors("events/nonfinite/text_summary")
    assert (text.step, text.tensor_proto.string_val) == (9, [b'    {"loss": null, "samples": [0, 8]}'])


def test_a_resumed_run_shows_each_step_once(tmp_path: Path) -> None:
    for first, last in ((0, 7), (4, 9), (8, 10)):
        board = TensorBoard(tmp_path / "tb", tmp_path)
        show = partial(lambda board, record: board.write(record, known_figures(record)), board)
        metrics = JsonLines(tmp_path / "metrics.jsonl", [show])  # never closed: each line is in the file at once
        metrics.write("run_start", step=first)
        for step in range(first + 1, last + 1):
            metrics.write("step", step=step, loss=1 / step)
        board.close()  # otherwise its last events may be lost
        if first == 0:  # torn by a crash: loses the last event, but hides none of the next session
            (torn,) = (tmp_path / "tb").iterdir()
            torn.write_bytes(torn.read_bytes()[:-20])
    path = tmp_path / "metrics.jsonl"
    kept = [r for r in current_records(read_records(path)) if r["kind"] == "step"]
    assert [record["step"] for record in kept] == list(range(1, 11))
    shown = read(tmp_path / "tb").Scalars("train/loss")
    assert [(event.step, event.wall_time) for event in shown] == [(r["step"], r["time"]) for r in kept]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the writer's own thread
def test_unwritable_events_cause_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path, kib=64) as disk:
        with Tracker("TensorBoard", partial(TensorBoard, disk / "tb", disk)) as tracker:
            tracker.take(START)
            tracker.take(step_record(1))
            while not list(disk.glob("tb/*")):
                time.sleep(0.01)
            ballast = fill(disk)
            for step in range(2, 600):
                tracker.take(step_record(step))
        (line,) = warnings(caplog)
        assert "TensorBoard rejects the metrics of this run: OSError: [Errno 28] No space left on device" in line
        assert line.endswith("metrics.jsonl has all metrics")
        ballast.unlink()
        write(disk, START | {"step": 1}, step_record(2))
        assert read(disk / "tb").Scalars("train/loss")[-1].step == 2, "the next session writes again"


# Writes each call to the file `calls` in its folder, after executing the file `fault` there.
FAKE_WANDB = """
import json, os, sys, time
from pathlib import Path
HERE = Path(__file__).parent
def note(*call):
    fault = HERE / "fault"
    exec(fault.read_text() if fault.exists() else "")
    with open(HERE / "calls", "a") as out:
        out.write(json.dumps(call) + "\\n")
class Run:
    def log(self, figures): note("log", figures)
    def define_metric(self, *of, **by): note("define_metric", of, by)
    def finish(self, exit_code): note("finish", exit_code)
def init(**how): note("init", how); return Run()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "packages" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_WANDB)
    (tmp_path / "run").mkdir()
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    return package


def tracked(tmp_path: Path, *records: dict[str, Any], name: str = "wandb") -> None:
    begin = partial(TRACKERS[name], "exp", tmp_path / "run", {"training.lr": 1e-4})
    with Tracker(f"monitor.trackers {name}", begin) as tracker:
        for record in records:
            tracker.take(record)


def calls(fake: Path) -> list[Any]:
    return [json.loads(line) for line in (fake / "calls").read_text().splitlines()]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_trackers_get_tensorboard_s_tags_and_continue_their_run(
    fake: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    busy = {"kind": "system", "time": 13.0, "step": 3, "cores_busy": 2.0}
    step = {"kind": "step", "time": 12.5, "step": 3, "loss": 0.5, "grad_norm": None, "lr": 1e-4}
    tracked(tmp_path, step, busy, {"kind": "event", "time": 1.0, "event": "x"}, END)
    tracked(tmp_path, step | {"step": 1})
    first, second = calls(fake)[:5], calls(fake)[5:]
    assert [call[0] for call in first] == ["init", "define_metric", "log", "log", "finish"]
    how = first[0][1]
    assert (how["name"], how["resume"], how["config"]) == ("exp", "allow", {"training.lr": 1e-4})
    assert first[2][1] == {"step": 3, "train/loss": 0.5, "train/lr": 1e-4}, "what is not known is left out"
    assert first[3][1] == {"step": 3, "system/cores_busy": 2.0}
    assert [first[-1], second[-1]] == [["finish", 0], ["finish", 1]], "the second was killed before its end"
    assert second[0][1]["id"] == how["id"]
    assert second[2][1]["step"] == 1
    assert warnings(caplog) == []


@pytest.mark.parametrize("left", ["", "\n"])
def test_an_id_that_a_full_disk_left_empty_is_replaced(fake: Path, tmp_path: Path, left: str) -> None:
    kept = tmp_path / "run/wandb_id"
    kept.write_text(left)
    tracked(tmp_path, END)
    given = calls(fake)[0][1]["id"]
    assert len(given) == 12
    assert kept.read_text() == given


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("raise RuntimeError('no network')", "RuntimeError: no network"),
        ("call[0] == 'log' and 1 / 0", "ZeroDivisionError: division by zero"),
        ("time.sleep(20)", "no response in time"),
    ],
)
def test_a_failing_tracker_causes_one_warning(
    fake: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    cause: str,
) -> None:
    (fake / "fault").write_text(fault)
    if "sleep" in fault:
        monkeypatch.setattr(trackers, "_CLOSE_S", 0.5)
    tracked(tmp_path, *(STEP | {"step": step} for step in range(40)), END)
    assert warnings(caplog) == [
        f"monitor.trackers wandb rejects the metrics of this run: {cause}; the run continues, and metrics.jsonl has "
        "all metrics"
    ]


def test_a_missing_package_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"monitor.trackers: mlflow is not installed.*`pip install mlflow-skinny`"):
        check_trackers(["mlflow"])
    check_trackers([])


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed, as it is large")
def test_real_mlflow_continues_a_run_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "run").mkdir()
    for steps in (range(3), range(2, 5)):
        tracked(tmp_path, *(STEP | {"step": s} for s in steps), END, name="mlflow")
    assert warnings(caplog) == []
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracking = importlib.import_module("mlflow.tracking")
    client = tracking.MlflowClient((tmp_path / "run" / "mlruns").as_uri())
    run = client.get_run((tmp_path / "run" / "mlflow_id").read_text().strip())
    assert run.info.status == "FINISHED"
    assert run.data.params == {"training.lr": "0.0001"}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(metric.step for metric in history) == [0, 1, 2, 2, 3, 4]
    assert time.time() > history[0].timestamp / 1000 == 1004.5


def test_a_short_server_failure_loses_only_its_figures(fake: Path, tmp_path: Path) -> None:
    (fake / "fault").write_text("if call[0] == 'log' and call[1]['step'] in (1, 2): raise OSError('away')")
    tracked(tmp_path, *(STEP | {"step": step} for step in range(5)), END)
    assert [call[1]["step"] for call in calls(fake) if call[0] == "log"] == [0, 3, 4]
    assert calls(fake)[-1] == ["finish", 0]
