"""A run of which there are only files: it has ended, or runs elsewhere."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from tests.support.moments import moments
from vesuvius.errors import EXIT_MEMORY_CRITICAL, EXIT_OK
from vesuvius.monitor.memcheck.run_inspector import RunInspector, _silence
from vesuvius.monitor.memory.limits import Limits
from vesuvius.monitor.memory.risk import Level
from vesuvius.monitor.postmortem.death import append_death
from vesuvius.monitor.postmortem.post_mortem import ended_run
from vesuvius.monitor.probes.gpus import Gpus
from vesuvius.monitor.recent import RecentFile
from vesuvius.monitor.session import begin_session, end_session
from vesuvius.runlog.records import JsonLines
from vesuvius.runlog.units import GIB


@pytest.mark.parametrize("workers", [2, 0])
def test_the_rows_of_a_run_that_has_ended_add_up_to_its_total(tmp_path: Path, workers: int) -> None:
    """Readers, the trainer, what neither is, and shared memory once.  A program that leaves the processes of Ray out,
    or counts all shared memory in each, shows a total that is another sum."""
    session = begin_session(tmp_path / "session.json", "tiny", workers, Limits())
    uncounted = {"cgroup_oom_kills": None, "machine_oom_kills": None}
    readers = {11: 2 * GIB, 12: GIB} if workers else {}
    kept = moments(session.begin_time + 90, growth=0, used_bytes=9 * GIB, reader_bytes=readers, **uncounted)
    with closing(RecentFile(tmp_path / "recent.jsonl")) as recent:
        for moment in kept:
            recent.write(moment)
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


def test_a_run_whose_sampling_alone_has_stalled_is_as_silent_as_its_records() -> None:
    """Ten minutes without a sample, and a step a second ago."""
    sampled = SimpleNamespace(awaits="batch", silent_s=0.5, time=400.0)
    stalled: Any = SimpleNamespace(sign_time=999.0, moments=[sampled])
    assert _silence(stalled, 1000.0) == ("batch", 1.0)
    hung: Any = SimpleNamespace(sign_time=300.0, moments=[SimpleNamespace(awaits="batch", silent_s=699.0, time=999.5)])
    assert _silence(hung, 1000.0) == ("batch", 699.5)


@pytest.mark.parametrize(("after_s", "known"), [(60, False), (400, True)])
def test_growth_of_start_up_minutes_is_none_of_a_run_that_has_ended(tmp_path: Path, after_s: int, known: bool) -> None:
    session = begin_session(tmp_path / "session.json", "tiny", 2, Limits())
    uncounted = {"cgroup_oom_kills": None, "machine_oom_kills": None}
    with closing(RecentFile(tmp_path / "recent.jsonl")) as recent:
        for moment in moments(session.begin_time + after_s, count=50, **uncounted):
            recent.write(moment)
    end_session(tmp_path / "session.json", session, 75)
    rows = {row.part: row for row in RunInspector(tmp_path, Gpus()).inspect().rows}
    assert (rows["total"].trend is not None) == known


@pytest.mark.parametrize(
    ("cause", "exit_code", "level"), [("guard", EXIT_MEMORY_CRITICAL, Level.CRITICAL), (None, EXIT_OK, None)]
)
def test_a_run_that_the_guard_ended_says_so_and_why(
    tmp_path: Path, cause: Literal["guard"] | None, exit_code: int, level: Level | None
) -> None:
    """Also after the next session has ended as it should: that one is looked at."""
    session = begin_session(tmp_path / "session.json", "tiny", 1, Limits())
    if cause:
        death = ended_run(
            cause, 7, "near out of memory: the machine: 23 of 24 GiB in use", (), "continue with --resume"
        )
        append_death(tmp_path / "post_mortem.jsonl", death)
    end_session(tmp_path / "session.json", session, 4)
    found = RunInspector(tmp_path, Gpus()).inspect()
    assert (found.exit_code, found.level, found.kills) == (exit_code, level, ())
    if cause:
        assert found.state_text.endswith("with exit code 4: the memory guard ended it")
        assert found.reason == "near out of memory: the machine: 23 of 24 GiB in use"
        assert found.remarks[0] == "continue with --resume"
        end_session(tmp_path / "session.json", begin_session(tmp_path / "session.json", "tiny", 1, Limits()), 0)
        assert RunInspector(tmp_path, Gpus()).inspect().exit_code == EXIT_OK


def test_a_run_that_has_ended_early_shows_its_cause(tmp_path: Path) -> None:
    """Of its last session alone, and not where it has ended as it should."""
    for cause, code in (("step 7 was not applied: loss nan", 5), ("done", 0)):
        session = begin_session(tmp_path / "session.json", "tiny", 1, Limits())
        with closing(JsonLines(tmp_path / "metrics.jsonl")) as metrics:
            metrics.write("run_end", exit_code=code, cause=cause, step=6)
        end_session(tmp_path / "session.json", session, code)
        text = RunInspector(tmp_path, Gpus()).inspect().state_text
        assert text.endswith(f"with exit code {code}" + (f": {cause}" if code else ""))
