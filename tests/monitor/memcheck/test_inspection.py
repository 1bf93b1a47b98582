"""Inspection of living, ended and remote runs: parts, peaks, risk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.monitor.memory.simulated import process, sample
from tests.monitor.test_verdict import CPU, window
from tests.support.memory_samples import memory_samples
from vesuvius.errors import EXIT_MEMORY_CRITICAL, EXIT_OK, VesuviusError
from vesuvius.monitor.memcheck.inspection import (
    Inspection,
    Row,
    RunFiles,
    RunInspector,
    Watch,
    rows_of,
    silence,
    sizes_in,
)  # fmt: skip
from vesuvius.monitor.memory.limits import MemoryPolicy
from vesuvius.monitor.memory.risk import Level
from vesuvius.monitor.post_mortem import append_death, death_of_this_run
from vesuvius.monitor.probes.gpus import Gpus
from vesuvius.monitor.probes.system_sample import SystemSample
from vesuvius.monitor.recent import MemorySample, RecentFile
from vesuvius.monitor.session import SessionRecord, begin_session, end_session
from vesuvius.monitor.verdict import diagnose
from vesuvius.runlog.records import JsonLines
from vesuvius.runlog.units import GIB

TOTAL = 100 * GIB
READER = "ray::MapWorker(MapBatches(_RayReader)).submit"
NOTHING = Inspection(0.0, "run", "run x")
NO_LIMITS = MemoryPolicy()


def seen(time: float, trainer: float = 10, readers: Iterable[float] = (5, 6), ray: float = 2) -> SystemSample:
    """Sample a run with sizes in GiB, of which 4 GiB are shared; its readers have the pids 101, 102, ..."""
    sizes = list(readers)
    processes = [process(100, trainer * GIB), *(process(101 + i, x * GIB, name=READER) for i, x in enumerate(sizes))]
    processes += [process(200, ray * GIB, name="/somewhere/raylet --head")] if ray else []
    used = trainer + sum(sizes) + ray + 4
    return replace(sample(time, TOTAL, (used + 3) * GIB, processes), shared_bytes=4 * GIB)


def looked(
    at: SystemSample, found: Inspection = NOTHING, limits: MemoryPolicy = NO_LIMITS, **known: float
) -> Inspection:
    """`known`: recorded peaks, for readers as `r101`."""
    peaks = {int(name[1:]) if name[1:].isdecimal() else name: size for name, size in known.items()}
    rows = rows_of(sizes_in(at), peaks, "Ray's own")
    return Watch(limits, Gpus(), 100).add_to(replace(found, rows=rows), at)


def row(found: Inspection, part: str, pid: int | None = None) -> Row:
    (one,) = [row for row in found.rows if row.part == part and (pid is None or row.pid == pid)]
    return one


def test_parts_add_up_to_the_total_and_the_store_counts_once() -> None:
    one_look = seen(1.0)
    found = looked(one_look)
    assert [(r.part, r.pid, r.now_bytes) for r in found.rows] == [
        ("root", None, 10 * GIB),
        ("readers", None, 11 * GIB),
        ("reader", 102, 6 * GIB),
        ("reader", 101, 5 * GIB),
        ("others", None, 2 * GIB),
        ("store", None, 4 * GIB),
        ("total", None, 27 * GIB),
    ]
    assert row(found, "total").now_bytes == one_look.used_bytes
    assert found.limit_bytes == TOTAL
    found = looked(seen(1.0, readers=(), ray=0))
    assert [r.part for r in found.rows] == ["root", "store", "total"], "what is not there has no row"


def test_peaks_are_the_recorded_ones_or_the_present_size() -> None:
    found = looked(seen(11.0, readers=(5, 9)), root=12 * GIB, r101=7 * GIB, r102=3 * GIB, r103=99 * GIB)
    assert row(found, "root").peak_bytes == 12 * GIB
    assert [(r.pid, r.peak_bytes) for r in found.rows if r.part == "reader"] == [(102, 9 * GIB), (101, 7 * GIB)]
    assert row(found, "readers").peak_bytes == 14 * GIB
    assert found.rates is None, "no time has passed by the monotonic clock"


def write_records(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def keep(directory: Path, kept: Iterable[MemorySample]) -> None:
    with closing(RecentFile(directory / "recent.jsonl")) as recent:
        for moment in kept:
            recent.write(moment)


def begin(directory: Path, workers: int = 2) -> SessionRecord:
    return begin_session(directory / "session.json", "tiny", workers, MemoryPolicy())


def test_the_risk_of_a_living_run_comes_from_its_own_session(tmp_path: Path) -> None:
    """It has seen the growth, which a single sample cannot show."""
    session = begin(tmp_path)
    before, after = session.begin_time - 5, session.begin_time
    steps = [{"kind": "step", "time": at, "step": n, "step_s": s} for at, n, s in ((before, 70, 9.0), (after, 71, 1.0))]
    write_records(tmp_path / "metrics.jsonl", steps[0], {"kind": "verdict", "time": before, "text": "old"}, steps[1])
    records = [
        {"kind": "system", "time": at, "used_bytes": [1, 2, most]} for at, most in ((before, 2**50), (after, 2**45))
    ]
    write_records(tmp_path / "system.jsonl", *records)
    kept = [MemorySample(at, 70, 2**48, 0, 800, level="WARN", reason="growing 50 MB/s") for at in (before, after)]
    keep(tmp_path, [kept[0], replace(kept[1], used_bytes=2**44)])
    found = RunInspector(tmp_path, Gpus()).inspect()
    assert (found.state, found.level, found.reason, found.exit_code) == ("running", Level.WARN, "growing 50 MB/s", 10)
    assert found.steps is not None
    assert (found.steps["step"], found.steps["step_s_p95"], found.steps["verdict"]) == (71, 1.0, None)
    assert row(found, "total").peak_bytes == 2**45
    assert found.peaks_since == after
    assert session.pid == os.getpid() == found.sample.processes[0].pid  # type: ignore[union-attr]


def test_a_silent_monitor_is_reported_and_the_risk_judged_again(tmp_path: Path) -> None:
    session = begin(tmp_path)
    (tmp_path / "session.json").write_text(json.dumps(asdict(session) | {"begin_time": session.begin_time - 100}))
    keep(tmp_path, [MemorySample(session.begin_time - 50, 7, 10, 0, 10, level="CRITICAL", reason="old")])
    found = RunInspector(tmp_path, Gpus()).inspect()
    assert found.reason != "old"
    assert "its own monitor has been silent for 5" in found.remarks[0].replace("the run's own", "its own")


@pytest.mark.parametrize("workers", [2, 0])
def test_the_rows_of_an_ended_run_add_up_to_its_total(tmp_path: Path, workers: int) -> None:
    """Readers, trainer, others, and shared memory once.  Leaving out Ray's processes, or counting shared memory in each
    process, would give another total."""
    session = begin(tmp_path, workers)
    uncounted = {"cgroup_oom_kills": None, "machine_oom_kills": None}
    readers = {11: 2 * GIB, 12: GIB} if workers else {}
    kept = memory_samples(session.begin_time + 90, growth=0, used_bytes=9 * GIB, reader_bytes=readers, **uncounted)
    keep(tmp_path, kept)
    end_session(tmp_path / "session.json", session, 75)
    found = RunInspector(tmp_path, Gpus()).inspect()
    rows = {row.part: row for row in found.rows}
    assert (found.state, found.exit_code) == ("ended", 0)
    sizes = {part: rows[part].now_bytes for part in ("root", "readers", "others", "store") if part in rows}
    expected = {"root": 4 * GIB, "readers": 3 * GIB, "others": GIB, "store": GIB}
    if not workers:
        expected = {"root": 4 * GIB, "others": 4 * GIB, "store": GIB}
    assert sizes == expected
    assert rows["total"].now_bytes == sum(expected.values()) == 9 * GIB
    assert sum(row.now_bytes or 0 for row in found.rows if row.part == "reader") == (3 * GIB if workers else 0)


def test_stalled_sampling_alone_is_not_silence_of_the_run() -> None:
    """The last sample was ten minutes ago, the last step one second ago."""
    stalled = MemorySample(400.0, 1, 0, 0, 0, awaits="batch", silent_s=0.5)
    assert silence(stalled, 999.0, 1000.0) == ("batch", 1.0)
    assert silence(replace(stalled, time=999.5, silent_s=699.0), 300.0, 1000.0) == ("batch", 699.5)
    assert silence(None, 300.0, 1000.0) == ("step", 700.0)


@pytest.mark.parametrize(
    ("cause", "exit_code", "level"), [("guard", EXIT_MEMORY_CRITICAL, Level.CRITICAL), (None, EXIT_OK, None)]
)
def test_a_run_stopped_by_the_guard_shows_the_reason(
    tmp_path: Path, cause: Literal["guard"] | None, exit_code: int, level: Level | None
) -> None:
    """Unless the next session has ended properly: the latest session counts."""
    session = begin(tmp_path)
    reason = "close to running out of memory: the machine: 23 of 24 GiB in use"
    if cause:
        append_death(tmp_path / "post_mortem.jsonl", death_of_this_run(cause, 7, reason, (), "continue with --resume"))
    end_session(tmp_path / "session.json", session, 4)
    found = RunInspector(tmp_path, Gpus()).inspect()
    assert (found.exit_code, found.level, found.kills) == (exit_code, level, ())
    if cause:
        assert found.state_text.endswith("with exit code 4: ended by the memory guard")
        assert (found.reason, found.remarks[0]) == (reason, "continue with --resume")
        end_session(tmp_path / "session.json", begin(tmp_path), 0)
        assert RunInspector(tmp_path, Gpus()).inspect().exit_code == EXIT_OK


def test_a_run_that_ended_early_shows_its_cause(tmp_path: Path) -> None:
    """Only that of its last session, and only if that ended early."""
    for cause, code in (("step 7 was not applied: loss nan", 5), ("done", 0)):
        session = begin(tmp_path)
        with closing(JsonLines(tmp_path / "metrics.jsonl")) as metrics:
            metrics.write("run_end", exit_code=code, cause=cause, step=6)
        end_session(tmp_path / "session.json", session, code)
        text = RunInspector(tmp_path, Gpus()).inspect().state_text
        assert text.endswith(f"with exit code {code}" + (f": {cause}" if code else ""))


def test_the_last_step_and_verdict_are_shown_and_pauses_excluded(tmp_path: Path) -> None:
    """Otherwise a validation every third step would make a hung run look slow."""
    steps: list[dict[str, Any]] = [
        {
            "kind": "step",
            "time": 10.0 + i,
            "step": i,
            "step_s": 60.5 if i % 3 else 0.5,
            "pause_s": 60.0 if i % 3 else None,
        }
        for i in range(100)
    ]
    verdicts = [{"kind": "verdict", "time": 110.0} | diagnose(window(data_s=s), CPU).record() for s in (60.0, 0.0)]
    last = {"kind": "validation", "time": 150.0, "step": 99}
    write_records(tmp_path / "metrics.jsonl", *steps, *verdicts, last)
    run = RunFiles(tmp_path)
    assert run.steps_at(119.0) == {"step": 99, "age_s": 10.0, "step_s_p95": 0.5, "verdict": verdicts[1]["text"]}


def test_peaks_come_from_records_and_samples_and_missing_figures_are_not_zero(tmp_path: Path) -> None:
    write_records(
        tmp_path / "system.jsonl",
        {"kind": "system", "time": 1.0, "trainer_bytes": [1, 2, 50], "readers": {"7": 90, "x": 1}, "vram": None},
        {"kind": "system", "time": 11.0, "shared_bytes": [5, 5, 5], "vram": {"reserved_bytes": [3, 4, 6]}},
    )
    keep(tmp_path, [MemorySample(20.0, 5, 400, 3, 60, {7: 80, 8: 10})])
    run = RunFiles(tmp_path)
    peaks = {"total": 400, "store": 5, "root": 60, "vram": 6, 7: 90, 8: 10, "readers": 90, "others": 247}
    assert run.peaks() == peaks
    assert run.since == 1.0


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "system", "time": 2.0, "vram": [1]},
        {"kind": "system", "time": 2.0, "readers": 7},
        {"kind": "step", "time": 1e300, "step": 1, "step_s": 1.0, "pause_s": "long"},
    ],
)
def test_a_wrong_record_is_reported_in_one_line(tmp_path: Path, record: dict[str, Any]) -> None:
    for name in ("system", "metrics"):
        write_records(tmp_path / f"{name}.jsonl", record)
    with pytest.raises(VesuviusError, match=rf"cannot read the records of {tmp_path}: a line of its .jsonl files"):
        RunInspector(tmp_path, Gpus()).inspect()
