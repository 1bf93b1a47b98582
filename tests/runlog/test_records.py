"""Records: appending and interruptions."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vesuvius.monitor.clock import StepTimes
from vesuvius.runlog.logfile import step_line
from vesuvius.runlog.records import JsonLines, Tail, read_records
from vesuvius.runlog.units import GIB

TIMES = StepTimes(step_s=2.914, data_s=0.412, h2d_s=0.003, forward_s=0.771, backward_s=1.5, optimizer_s=0.2)
STEP = {
    "step": 1200,
    "steps": 128000,
    "epoch": 1,
    "epochs": 32,
    "loss": 0.0312,
    "lr": 1e-4,
    "samples": 4,
    "vram_used_bytes": 41.2 * GIB,
    "vram_limit_bytes": 79.3 * GIB,
    "ram_used_bytes": 38.4 * GIB,
    "ram_limit_bytes": 170 * GIB,
    "workers": 4,
    "working": None,
    "worker_max_bytes": 6.9 * GIB,
    "mfu": None,
    "ranks": 1,
    "slowest_rank": None,
    "eta_s": 4 * 86400 + 7 * 3600,
    **asdict(TIMES),
    "gpu_s": TIMES.gpu_s,
    "other_s": TIMES.other_s,
}


def test_the_step_line_has_its_stable_form() -> None:
    assert step_line(STEP) == (
        "Train step 1200/128000 epoch 1/32 loss 0.03120 lr 1.0e-04 step_s 2.914 data_s 0.412 h2d_s 0.003 gpu_s 2.471 "
        "other_s 0.028 data_pct 14.1 samples_s 1.37 vram_gib 41.2/79.3 ram_gib 38.4/170.0 workers 4 worker_max_gib 6.9 "
        "eta 4d07h"
    )
    assert " workers 4 (1 with work) worker_max_gib 6.9 " in step_line(STEP | {"working": 1})
    assert " workers 4 worker_max_gib 6.9 " in step_line(STEP | {"working": 4})
    assert " samples_s 1.37 mfu_pct 41.3 vram_gib " in step_line(STEP | {"mfu": 0.4126})
    unknown = dict.fromkeys(("vram_used_bytes", "worker_max_bytes", "eta_s"))
    assert " vram_gib - ram_gib 38.4/170.0 workers 4 worker_max_gib - eta -" in step_line(STEP | unknown)
    several = STEP | {"ranks": 2, "slowest_rank": 1, "pause_s": 0.01}
    assert step_line(several).endswith(" eta 4d07h comm_s 0.000 ranks 2 slowest 1 pause_s 0.010")


def test_records_are_appended_torn_lines_skipped_and_listeners_called(
    tmp_path: Path,
) -> None:
    path, heard = tmp_path / "metrics.jsonl", list[Any]()
    first = JsonLines(path)
    first.write("step", step=1, loss=0.5)
    first.close()
    with path.open("a") as file:
        file.write('{"kind": "step", "st')
    second = JsonLines(path, [heard.append])
    written = second.write("step", step=2, loss=math.nan, parts=(math.inf, 0.1 + 0.2))
    second.share({"kind": "system"})
    second.close()
    records = read_records(path)
    assert [r["step"] for r in records] == [1, 2]
    assert heard == [records[1], {"kind": "system"}]
    assert records[1] == written
    assert (written["loss"], written["parts"]) == (None, [None, 0.1 + 0.2])
    for line in path.read_text().splitlines()[2:]:
        json.loads(line)


def test_listeners_get_a_record_even_if_the_disk_hangs(tmp_path: Path) -> None:
    """A full pipe without a reader hangs like a disk; the first thread does not block the second."""
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


def line(time: float, kind: str = "step", **figures: Any) -> str:
    return json.dumps({"kind": kind, "time": time, **figures}) + "\n"


def times(records: list[dict[str, Any]]) -> list[float]:
    return [record["time"] for record in records]


def test_a_tail_reads_the_end_first_and_then_complete_new_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path, first_bytes=75)
    assert tail.new() == []
    path.write_text("".join(line(i) for i in range(1000)))
    assert times(tail.new()) == [998.0, 999.0]  # 75 bytes are two lines and a half
    assert tail.new() == []
    with path.open("a") as file:
        file.write("{torn\n" + line(1000) + line(1001)[:10])
    assert times(tail.new()) == [1000.0]
    with path.open("a") as file:
        file.write(line(1001)[10:])
    assert times(tail.new()) == [1001.0]


def test_a_tail_follows_a_replaced_or_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "system.jsonl"
    tail = Tail(path, first_bytes=1000)
    path.write_text(line(1) + line(2))
    assert times(tail.new()) == [1.0, 2.0]
    os.rename(path, tmp_path / "system.000001.jsonl")
    path.write_text(line(3))
    assert times(tail.new()) == [3.0]
    path.write_text("")
    assert tail.new() == []
    path.write_text(line(4))
    assert times(tail.new()) == [4.0]
