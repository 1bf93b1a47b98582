"""Records as TensorBoard's own reader sees them."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator

from tests.support.small_disk import fill, small_disk
from vesuvius.runlog.listeners.tensorboard import TensorBoard, tensorboard_thread

Record = dict[str, Any]

TAGS = [
    "events/nonfinite/text_summary",
    "memory/ram_gib",
    "memory/vram_gib",
    "memory/worker_max_gib",
    "preview/correlation_distance",
    "preview/histogram_distance",
    "preview/picture",
    "preview/spectrum_distance_db",
    "time/backward_s",
    "time/data_s",
    "time/forward_s",
    "time/gpu_s",
    "time/h2d_s",
    "time/optimizer_s",
    "time/other_s",
    "time/samples_per_s",
    "time/step_p95_s",
    "time/step_s",
    "train/grad_norm",
    "train/loss",
    "train/lr",
    "validation/ema_bin_0",
    "validation/ema_bin_1",
    "validation/loss_ema",
    "validation/loss_raw",
    "validation/raw_bin_0",
    "validation/raw_bin_1",
]


def step_record(step: int, **figures: Any) -> Record:
    record = {
        "kind": "step",
        "time": 1000.5 + step,
        "step": step,
        "loss": 0.5 / step,
        "grad_norm": 0.25,
        "lr": 1e-4,
        "samples": 4,
        "ram_used_bytes": 3 * 2**30,
        "vram_used_bytes": 2**40,
        "worker_max_bytes": 2**29,
        "step_s": 2.0,
        "step_p95_s": 2.5,
        "data_s": 0.5,
        "h2d_s": 0.25,
        "gpu_s": 1.0,
        "forward_s": 0.25,
        "backward_s": 0.625,
        "optimizer_s": 0.125,
        "other_s": 0.25,
    }
    return record | figures


VALIDATION: Record = {
    "kind": "validation",
    "time": 1020.0,
    "step": 8,
    "loss": 0.25,
    "bin_edges": [0, 500, 1000],
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
START: Record = {"kind": "run_start", "time": 1000.0, "step": 0}
END: Record = {"kind": "run_end", "time": 1030.0, "exit_code": 0}


@pytest.fixture(autouse=True)
def _captured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vesuvius")


def write(run: Path, *records: Record) -> None:
    """What one session of a run does."""
    board = TensorBoard(run / "tb", run)
    for record in records:
        board.write(record)
    board.close()


def read(directory: Path) -> EventAccumulator:
    return EventAccumulator(str(directory), size_guidance=STORE_EVERYTHING_SIZE_GUIDANCE).Reload()


def steps(directory: Path, tag: str = "train/loss") -> list[int]:
    return [event.step for event in read(directory).Scalars(tag)]


def write_picture(run: Path) -> None:
    path = run / PREVIEW["picture"]
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(path)


def test_the_tags_are_those_that_runs_are_compared_by(tmp_path: Path) -> None:
    write_picture(tmp_path)
    complete = VALIDATION | {"weights": {name: {"loss": 1.0, "bins": [1.0, 1.0]} for name in ("raw", "ema")}}
    write(tmp_path, START, step_record(1), complete, NONFINITE, PREVIEW, END)
    found = read(tmp_path / "tb").Tags()
    assert sorted(found["scalars"] + found["images"] + found["tensors"]) == TAGS
    assert found["images"] == ["preview/picture"]
    assert found["tensors"] == ["events/nonfinite/text_summary"]


def test_figures_stand_at_the_records_step_and_time(tmp_path: Path) -> None:
    write(tmp_path, step_record(4), VALIDATION)
    board = read(tmp_path / "tb")
    expected = {
        "train/loss": 0.125,
        "train/grad_norm": 0.25,
        "time/step_s": 2.0,
        "time/step_p95_s": 2.5,
        "time/samples_per_s": 2.0,
        "memory/ram_gib": 3.0,
        "memory/vram_gib": 1024.0,
        "memory/worker_max_gib": 0.5,
    }
    for tag, value in expected.items():
        (event,) = board.Scalars(tag)
        assert (event.wall_time, event.step, event.value) == (1004.5, 4, value), tag
    for tag, value in {"validation/loss_raw": 0.75, "validation/loss_ema": 0.25, "validation/raw_bin_1": 0.5}.items():
        (event,) = board.Scalars(tag)
        assert (event.wall_time, event.step, event.value) == (1020.0, 8, value), tag
    assert board.Scalars("train/lr")[0].value == pytest.approx(1e-4, rel=1e-7)  # float32


def test_what_is_not_known_is_not_there_and_not_0(tmp_path: Path) -> None:
    write(tmp_path, step_record(1, loss=None, vram_used_bytes=None, worker_max_bytes=None), step_record(2), VALIDATION)
    board = read(tmp_path / "tb")
    assert [event.step for event in board.Scalars("train/loss")] == [2]
    assert [event.step for event in board.Scalars("memory/vram_gib")] == [2]
    assert [event.step for event in board.Scalars("train/lr")] == [1, 2]
    assert "validation/ema_bin_1" not in board.Tags()["scalars"]


def test_a_preview_brings_its_picture_and_one_that_is_gone_is_missed_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_picture(tmp_path)
    write(tmp_path, PREVIEW, PREVIEW | {"picture": "samples/gone.png", "step": 11})
    board = read(tmp_path / "tb")
    (image,) = board.Images("preview/picture")
    assert (image.wall_time, image.step, image.width, image.height) == (1022.0, 10, 30, 20)
    assert [event.value for event in board.Scalars("preview/spectrum_distance_db")] == [1.5, 1.5]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "gone.png" in record.getMessage()


def test_an_event_is_a_text_with_all_its_fields(tmp_path: Path) -> None:
    write(tmp_path, NONFINITE)
    (event,) = read(tmp_path / "tb").Tensors("events/nonfinite/text_summary")
    assert event.step == 9
    assert event.tensor_proto.string_val == [b'    {"loss": null, "samples": [0, 8]}']


def test_a_session_hides_what_earlier_ones_did_beyond_the_step_it_goes_on_from(tmp_path: Path) -> None:
    write(tmp_path, START, *(step_record(step, lr=1.0) for step in range(1, 8)))
    write(tmp_path, START | {"step": 4}, *(step_record(step, lr=2.0) for step in range(5, 7)))
    write(tmp_path, START | {"step": 6}, *(step_record(step, lr=3.0) for step in range(7, 10)))
    board = read(tmp_path / "tb")
    assert [(event.step, event.value) for event in board.Scalars("train/lr")] == [
        *((step, 1.0) for step in range(1, 5)),
        *((step, 2.0) for step in range(5, 7)),
        *((step, 3.0) for step in range(7, 10)),
    ]


def test_a_file_torn_by_a_crash_does_not_hide_the_next(tmp_path: Path) -> None:
    write(tmp_path, START, *(step_record(step) for step in range(1, 5)))
    (first,) = (tmp_path / "tb").iterdir()
    first.write_bytes(first.read_bytes()[:-20])
    write(tmp_path, START | {"step": 2}, step_record(3), step_record(4))
    assert steps(tmp_path / "tb") == [1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the writer's own thread
def test_on_a_full_disk_it_says_once_where_the_figures_are_and_stops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path, kib=64) as disk:
        board = TensorBoard(disk / "tb", disk)
        board.write(START)
        board.write(step_record(1))
        ballast = fill(disk)
        for step in range(2, 1000):
            board.write(step_record(step))
        board.close()
        (record,) = caplog.records
        assert record.levelname == "ERROR"
        assert "No space left on device" in record.getMessage()
        assert "metrics.jsonl has all figures" in record.getMessage()
        ballast.unlink()
        write(disk, START | {"step": 1}, step_record(2))
        assert steps(disk / "tb")[-1] == 2, "the next session writes again"


def test_a_directory_that_cannot_be_made_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tb").write_text("in the way")
    write(tmp_path, START, step_record(1))
    (record,) = caplog.records
    assert record.levelname == "ERROR"


def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    goes_on = threading.Event()

    class Hanging(TensorBoard):
        def write(self, record: Record) -> None:
            assert goes_on.wait(60)

    with tensorboard_thread(Hanging(tmp_path / "tb", tmp_path), close_s=0.1) as take:
        for step in range(1, 100):
            take(step_record(step))
    goes_on.set()
    assert caplog.messages == ["TensorBoard's disk did not answer within 0 s; its last events are lost"]
