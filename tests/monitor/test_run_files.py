"""What the files of a run say of its last session, read from their ends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.monitor.test_verdict import CPU, window
from vesuvius.monitor.memory.limits import Limits
from vesuvius.monitor.recent import MemorySample, RecentFile
from vesuvius.monitor.run_files import RunFiles, Tail, notes_of
from vesuvius.monitor.session import begin_session
from vesuvius.monitor.verdict import judge


def line(time: float, kind: str = "step", **figures: Any) -> str:
    return json.dumps({"kind": kind, "time": time, **figures}) + "\n"


def times(records: list[dict[str, Any]]) -> list[float]:
    return [record["time"] for record in records]


def test_a_tail_reads_the_end_first_and_then_what_is_new_and_whole(tmp_path: Path) -> None:
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


def test_a_tail_follows_a_file_that_is_begun_anew_or_cut(tmp_path: Path) -> None:
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


def test_only_what_this_session_wrote_counts(tmp_path: Path) -> None:
    session = begin_session(tmp_path / "session.json", "tiny", 0, Limits())
    before, after = session.begin_time - 5, session.begin_time + 5
    (tmp_path / "metrics.jsonl").write_text(
        line(before, step=70, step_s=9.0)
        + line(before, "verdict", **judge(window(), CPU).record())
        + line(after, step=71, step_s=1.0)
    )
    (tmp_path / "system.jsonl").write_text(
        line(before, "system", used_bytes=[1, 2, 900]) + line(after, "system", used_bytes=[1, 2, 300])
    )
    ring = RecentFile(tmp_path / "recent.jsonl")
    ring.write(MemorySample(before, 70, 800, 0, 800))
    ring.write(MemorySample(after + 1, 71, 310, 0, 200))
    ring.close()
    notes = RunFiles(tmp_path).read()
    assert notes.session == session
    assert (notes.step, notes.step_time, notes.step_s_p95, notes.verdict) == (71, after, 1.0, None)
    assert [moment.used_bytes for moment in notes.moments] == [310]
    assert (notes.peaks["used"], notes.peaks_since) == (310, after)


def test_steps_verdicts_and_signs_of_life_are_the_last_ones() -> None:
    metrics = [
        {"kind": "step", "time": 10.0 + i, "step": i, "step_s": 5.0 if i in {30, 60, 90} else 0.1} for i in range(100)
    ]
    verdicts = [judge(window(data_s=waited), CPU) for waited in (60.0, 0.0)]
    metrics += [{"kind": "verdict", "time": 110.0} | verdict.record() for verdict in verdicts]
    metrics += [{"kind": "validation", "time": 150.0, "step": 99}]
    notes = notes_of(None, (), metrics, ())
    assert (notes.step, notes.step_time, notes.sign_time) == (99, 109.0, 150.0)
    assert notes.verdict == verdicts[1].text
    assert notes.step_s_p95 == 0.1  # 3 % of them took longer


def test_ranks_are_those_of_the_last_step_that_all_told_of() -> None:
    times = [{"step_s": 1.0, "comm_s": 0.25, "node": "a", "trainer_bytes": 2**30}, {"step_s": 1.0, "comm_s": 0.0}]
    metrics = [{"kind": "ranks", "time": 10.0 + i, "step": i, "slowest": 1, "times": times[: 1 + i]} for i in range(2)]
    first, second = notes_of(None, (), metrics, ()).ranks
    assert first == "rank 0 on a: trainer 1.00 GiB private, step 1.000 s, of which 0.250 s waiting for others"
    assert second.startswith("rank 1 on a node not known: trainer not known private")  # of an earlier version
    assert second.endswith("the slowest")
    assert notes_of(None, (), metrics[:0], ()).ranks == ()


def test_pauses_are_no_part_of_the_steps() -> None:
    """A validation every third step would make a run that hangs look like one that is slow."""
    metrics = [
        {"kind": "step", "time": 10.0 + i, "step": i, "step_s": 60.5, "pause_s": 60.0}
        if i % 3 == 0
        else {"kind": "step", "time": 10.0 + i, "step": i, "step_s": 0.5, "pause_s": None}
        for i in range(100)
    ]
    assert notes_of(None, (), metrics, ()).step_s_p95 == 0.5


def test_peaks_come_from_records_and_moments_and_absent_figures_are_no_zeros() -> None:
    system = [
        {"kind": "system", "time": 1.0, "trainer_bytes": [1, 2, 50], "readers": {"7": 90, "x": 1}, "vram": None},
        {"kind": "system", "time": 11.0, "shared_bytes": [5, 5, 5], "vram": {"reserved_bytes": [3, 4, 6]}},
    ]
    moments = [MemorySample(20.0, 5, 400, 3, 60, {7: 80, 8: 10})]
    notes = notes_of(None, moments, (), system)
    assert notes.peaks == {"used": 400, "shared": 5, "root": 60, "vram": 6, 7: 90, 8: 10}
    assert notes.peaks_since == 1.0
