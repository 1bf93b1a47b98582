"""The metrics: one record, two places; and what of them still holds after interruptions."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator

from vesuvius.runlog.listeners.tensorboard import TensorBoard
from vesuvius.runlog.records import JsonLines, Record, current_records, iter_records, read_records, run_starts


def read(directory: Path) -> EventAccumulator:
    return EventAccumulator(str(directory), size_guidance=STORE_EVERYTHING_SIZE_GUIDANCE).Reload()


def start(step: int) -> dict[str, Any]:
    return {"kind": "run_start", "step": step}


def test_tensorboard_is_given_the_record_as_it_is_in_the_file(tmp_path: Path) -> None:
    tensorboard = TensorBoard(tmp_path / "tb", tmp_path)
    metrics = JsonLines(tmp_path / "metrics.jsonl", [tensorboard.write])
    metrics.write("step", step=3, loss=math.nan, lr=0.5)
    metrics.close()
    tensorboard.close()
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert (record["loss"], record["lr"]) == (None, 0.5)
    board = read(tmp_path / "tb")
    assert "train/loss" not in board.Tags()["scalars"]
    (event,) = board.Scalars("train/lr")
    assert (event.wall_time, event.step, event.value) == (record["time"], 3, 0.5)


def test_a_record_of_another_file_is_handed_on_and_not_written_again(tmp_path: Path) -> None:
    heard: list[Any] = []
    metrics = JsonLines(tmp_path / "metrics.jsonl", [heard.append, heard.append])
    metrics.share({"kind": "system", "step": 1})
    metrics.close()
    assert heard == [{"kind": "system", "step": 1}] * 2
    assert read_records(tmp_path / "metrics.jsonl") == []


def test_listeners_hear_of_a_record_that_the_disk_does_not_take(tmp_path: Path) -> None:
    """A full pipe nobody reads from hangs like a disk; a second thread is not held up by the first."""
    path, heard = tmp_path / "metrics.jsonl", queue.Queue[Any]()
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    metrics = JsonLines(path, [heard.put])
    filler = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(filler, bytes(4096))
    threads = [threading.Thread(target=metrics.write, args=("event",), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert [heard.get(timeout=30)["kind"] for _ in threads] == ["event", "event"]
    text = b""
    while text.count(b"\n") < 2:
        with contextlib.suppress(BlockingIOError):
            text += os.read(reader, 2**20)
    for thread in threads:
        thread.join(30)
    os.close(filler)
    os.close(reader)


def test_a_run_that_is_killed_and_goes_on_shows_each_step_once_in_both(tmp_path: Path) -> None:
    for first, last in ((0, 7), (4, 9), (8, 10)):
        board = TensorBoard(tmp_path / "tb", tmp_path)
        metrics = JsonLines(tmp_path / "metrics.jsonl", [board.write])  # never closed: each line is in the file at once
        metrics.write("run_start", step=first)
        for step in range(first + 1, last + 1):
            metrics.write("step", step=step, loss=1 / step)
        board.close()  # else its last events may be lost
    kept = [r for r in current(read_records(tmp_path / "metrics.jsonl")) if r["kind"] == "step"]
    assert [record["step"] for record in kept] == list(range(1, 11))
    shown = read(tmp_path / "tb").Scalars("train/loss")
    assert [(event.step, event.wall_time) for event in shown] == [(r["step"], r["time"]) for r in kept]


def current(records: Sequence[Record]) -> list[Record]:
    return list(current_records(records, [record for record in records if record["kind"] == "run_start"]))


def by_going_back(records: Sequence[Record]) -> list[Record]:
    """The definition: each beginning drops what was recorded beyond it."""
    kept: list[Record] = []
    for record in records:
        if record["kind"] == "run_start":
            step = record["step"]
            last = {"validation": record.get("validated_step", step), "preview": record.get("previewed_step", step)}
            kept = [each for each in kept if (each.get("step") or 0) <= last.get(each["kind"], step)]
        kept.append(record)
    return kept


@given(
    st.lists(
        st.one_of(
            st.builds(
                lambda step, behind: start(step) | ({"validated_step": max(step - behind, 0)} if behind else {}),
                st.integers(0, 9),
                st.integers(0, 3),
            ),
            st.builds(
                lambda kind, step: {"kind": kind} | ({} if step is None else {"step": step}),
                st.sampled_from(["step", "validation", "preview", "event", "run_end"]),
                st.none() | st.integers(0, 9),
            ),
        ),
        max_size=30,
    )
)
def test_records_are_current_in_one_pass_as_if_each_beginning_had_gone_back(records: list[Record]) -> None:
    assert current(records) == by_going_back(records)


def test_a_file_is_read_one_record_at_a_time_and_of_some_steps_those_alone(tmp_path: Path) -> None:
    """A run of 12,000 steps has 14 MB of records here; the peak stays below one of them."""
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for number in range(12_000):
            if number % 4_000 == 0:
                file.write(json.dumps({"kind": "run_start", "time": 1.0, "step": max(number - 10, 0)}) + "\n")
            file.write(json.dumps({"kind": "step", "time": 1.0, "step": number, "more": "x" * 1100}) + "\n")
    tracemalloc.start()
    try:
        count = sum(1 for _ in current_records(iter_records(path), run_starts(path)))
        some = list(current_records(iter_records(path, range(7_985, 8_003)), run_starts(path)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 12_000 - 2 * 9 + 3
    steps = [record["step"] for record in some if record["kind"] == "step"]
    assert steps == [*range(7_985, 7_991), *range(8_000, 8_003)], "what a session went back behind is left out"
    assert peak < 2**19


def test_a_validation_that_the_checkpoint_of_its_step_does_not_know_of_was_done_again() -> None:
    """The process was killed between the validation after step 2, made up for after a resume, and the next save."""
    begin = {"kind": "run_start", "step": 2, "validated_step": 0, "previewed_step": 2}
    validation, preview = ({"kind": kind, "step": 2} for kind in ("validation", "preview"))
    kept = [start(0), {"kind": "step", "step": 2}, preview, begin]
    assert current([start(0), {"kind": "step", "step": 2}, preview, begin, validation, begin, validation]) == [
        *kept,
        begin,
        validation,
    ]
