"""What memcheck says of a run by its records, and by what can be seen from outside."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.monitor.test_verdict import CPU, window
from tests.support.memory_samples import memory_samples
from vesuvius.errors import EXIT_MEMORY_CRITICAL, EXIT_OK, VesuviusError
from vesuvius.monitor.memcheck.inspection import Inspection, Part, RunFiles, inspect_run, silence
from vesuvius.monitor.memory.limits import MemoryPolicy
from vesuvius.monitor.memory.risk import Level
from vesuvius.monitor.post_mortem import append_death, death_of_this_run
from vesuvius.monitor.samples import MemorySample, RecentFile
from vesuvius.monitor.session import SessionRecord, begin_session, end_session
from vesuvius.monitor.verdict import diagnose
from vesuvius.runlog.records import JsonLines
from vesuvius.runlog.units import GIB


def sizes(found: Inspection) -> dict[str, int]:
    return {part.part: part.now_bytes for part in found.parts() if part.part != "worker"}


def part(found: Inspection, name: str) -> Part:
    (one,) = [each for each in found.parts() if name in (each.part, each.name)]
    return one


def write_records(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def keep(directory: Path, kept: Iterable[MemorySample]) -> None:
    with closing(RecentFile(directory / "recent.jsonl")) as recent:
        for sample in kept:
            recent.write(sample)


def begin(directory: Path, workers: int = 2, ago_s: float = 0.0) -> SessionRecord:
    session = begin_session(directory / "session.json", "tiny", workers, MemoryPolicy())
    session = replace(session, begin_time=session.begin_time - ago_s)
    (directory / "session.json").write_text(json.dumps(asdict(session)))
    return session


@pytest.mark.parametrize(
    ("readers", "used_gib", "expected"),
    [
        ({11: 2, 12: 1}, 9, {"root": 4, "workers": 3, "others": 1, "store": 1, "total": 9}),
        ({}, 9, {"root": 4, "others": 4, "store": 1, "total": 9}),
        ({}, 5, {"root": 4, "store": 1, "total": 5}),  # what is not there has no row
        ({11: 50}, 5, {"root": 4, "workers": 50, "store": 1, "total": 55}),  # on another machine
    ],
)
def test_parts_add_up_to_the_total_and_the_store_counts_once(
    readers: dict[int, int], used_gib: int, expected: dict[str, int]
) -> None:
    """Leaving out Ray's processes, or counting shared memory in each process, would give another total."""
    held = {pid: size * GIB for pid, size in readers.items()}
    (sample,) = memory_samples(0.0, count=1, used_bytes=used_gib * GIB, readers=held)
    found = Inspection(0.0, "run", "run x", sample=sample, peaks={"trainer_bytes": 12 * GIB, "worker 12": 7 * GIB})
    assert sizes(found) == {name: size * GIB for name, size in expected.items()}
    assert sum(each.now_bytes for each in found.parts() if each.part == "worker") == sum(held.values())
    assert [each.pid for each in found.parts() if each.pid] == list(readers), "the largest first"
    assert part(found, "root").peak_bytes == 12 * GIB
    if 12 in readers:
        assert (part(found, "worker 11").peak_bytes, part(found, "worker 12").peak_bytes) == (2 * GIB, 7 * GIB)


def test_the_figures_of_a_living_run_are_those_of_its_own_session(tmp_path: Path) -> None:
    """Its monitor has seen the growth, which a single sample cannot show."""
    session = begin(tmp_path)
    before, after = session.begin_time - 5, session.begin_time
    steps = [{"kind": "step", "time": at, "step": n, "step_s": s} for at, n, s in ((before, 70, 9.0), (after, 71, 1.0))]
    write_records(tmp_path / "metrics.jsonl", steps[0], {"kind": "verdict", "time": before, "text": "old"}, steps[1])
    system = [{"kind": "system", "time": at, "used_bytes": [1, 2, n]} for at, n in ((before, 2**50), (after, 2**45))]
    write_records(tmp_path / "system.jsonl", *system)
    kept = [MemorySample(at, 70, 2**48, 0, 800, risk="WARN", reason="growing 50 MB/s") for at in (before, after)]
    keep(tmp_path, [kept[0], replace(kept[1], used_bytes=2**44)])
    found = inspect_run(tmp_path)
    assert (found.state, found.level, found.reason, found.exit_code) == ("running", Level.WARN, "growing 50 MB/s", 10)
    assert found.steps is not None
    assert (found.steps["step"], found.steps["step_s_p95"], found.steps["verdict"]) == (71, 1.0, None)
    assert (part(found, "total").now_bytes, part(found, "total").peak_bytes) == (2**44, 2**45)
    assert found.peaks_since == after


def test_a_run_whose_monitor_is_silent_is_sampled_from_outside(tmp_path: Path) -> None:
    session = begin(tmp_path, ago_s=100.0)
    keep(tmp_path, [MemorySample(session.begin_time + 50, 7, 10, 0, 10, risk="CRITICAL", reason="old")])
    found = inspect_run(tmp_path)
    assert found.remarks[0].startswith("the run's own monitor has been silent for 5")
    assert found.reason != "old"
    assert part(found, "root").now_bytes > 2**20
    assert session.pid == os.getpid()


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
    found = inspect_run(tmp_path)
    assert (found.exit_code, found.level, found.kills) == (exit_code, level, ())
    if cause:
        assert found.state_text.endswith("with exit code 4: ended by the memory guard")
        assert (found.reason, found.remarks[0]) == (reason, "continue with --resume")
        end_session(tmp_path / "session.json", begin(tmp_path), 0)
        assert inspect_run(tmp_path).exit_code == EXIT_OK


def test_a_run_that_ended_early_shows_its_cause(tmp_path: Path) -> None:
    """Only that of its last session, and only if that ended early."""
    for cause, code in (("step 7 was not applied: loss nan", 5), ("done", 0)):
        session = begin(tmp_path)
        with closing(JsonLines(tmp_path / "metrics.jsonl")) as metrics:
            metrics.write("run_end", exit_code=code, cause=cause, step=6)
        end_session(tmp_path / "session.json", session, code)
        text = inspect_run(tmp_path).state_text
        assert text.endswith(f"with exit code {code}" + (f": {cause}" if code else ""))


def test_the_last_step_and_verdict_are_shown_and_pauses_excluded(tmp_path: Path) -> None:
    """Otherwise a validation every third step would make a hung run look slow."""
    pauses = [60.0 if i % 3 else None for i in range(100)]
    steps: list[dict[str, Any]] = [
        {"kind": "step", "time": 10.0 + i, "step": i, "step_s": 0.5 + (pause or 0.0), "pause_s": pause}
        for i, pause in enumerate(pauses)
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
    peaks = {"used_bytes": 400, "shared_bytes": 5, "trainer_bytes": 60, "vram": 6, "worker 7": 90, "worker 8": 10}
    assert run.peaks() == peaks | {"worker x": 1, "workers": 90, "others": 247}


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
        inspect_run(tmp_path)
