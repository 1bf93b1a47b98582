"""Following files that grow."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vesuvius.runlog.records import Tail


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
