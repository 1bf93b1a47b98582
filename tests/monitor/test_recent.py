"""The ring of moments: what it keeps, and what it outlives."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.small_disk import fill, small_disk
from vesuvius.monitor.recent import SLOT_BYTES, MemorySample, RecentFile, read_recent

WRITE_AND_WAIT = """
import sys, time
from pathlib import Path
from vesuvius.monitor.recent import MemorySample, RecentFile
ring = RecentFile(Path(sys.argv[1]))
for step in range(5):
    ring.write(MemorySample(float(step), step, 10, 1, 4, {7: 5}))
print("written", flush=True)
time.sleep(600)
"""


def moment(step: int, **figures: object) -> MemorySample:
    return MemorySample(1000.0 + step, step, 100 + step, 10, 40, {7: 30, 8: 20 + step}, **figures)  # type: ignore[arg-type]


def write(path: Path, steps: range, slots: int = 4) -> None:
    ring = RecentFile(path, slots)
    for step in steps:
        ring.write(moment(step))
    ring.close()


def test_moments_come_back_as_they_were_oldest_first(tmp_path: Path) -> None:
    path = tmp_path / "recent.jsonl"
    full = moment(
        1, killer="the machine", killer_used_bytes=5, kills_at_bytes=9, level="WARN", vram_used_bytes=3,
        vram_limit_bytes=8, cgroup_oom_kills=0, machine_oom_kills=2,
    )  # fmt: skip
    ring = RecentFile(path)
    ring.write(moment(0))
    ring.write(full)
    assert read_recent(path) == [moment(0), full]
    ring.close()
    ring.close()


def test_the_ring_keeps_the_last_ones_and_never_grows(tmp_path: Path) -> None:
    path = tmp_path / "recent.jsonl"
    for count in (1, 4, 5, 11):
        path.unlink(missing_ok=True)
        write(path, range(count))
        assert [m.step for m in read_recent(path)] == list(range(max(count - 4, 0), count))
        assert path.stat().st_size == 4 * SLOT_BYTES


def test_a_new_session_goes_on_behind_the_last_one_whatever_the_clock_says(tmp_path: Path) -> None:
    path = tmp_path / "recent.jsonl"
    write(path, range(100, 106))
    write(path, range(2))  # the clock was set back
    assert [m.step for m in read_recent(path)] == [104, 105, 0, 1]


def test_a_ring_of_another_size_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "recent.jsonl"
    write(path, range(20), slots=8)
    write(path, range(20, 26), slots=4)
    assert [m.step for m in read_recent(path)] == [22, 23, 24, 25]
    write(path, range(26, 34), slots=8)
    assert [m.step for m in read_recent(path)] == list(range(26, 34))


def test_a_torn_slot_costs_one_moment(tmp_path: Path) -> None:
    path = tmp_path / "recent.jsonl"
    write(path, range(4))
    with path.open("r+b") as file:
        file.seek(2 * SLOT_BYTES + 20)
        file.write(b"\0" * 40)
    assert [m.step for m in read_recent(path)] == [0, 1, 3]
    assert read_recent(tmp_path / "nowhere") == []


def test_all_that_was_written_outlives_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "recent.jsonl"
    command = [sys.executable, "-c", WRITE_AND_WAIT, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    assert [m.step for m in read_recent(path)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("readers", [60, 100, 1000])
def test_where_a_slot_is_too_small_the_largest_readers_are_kept(tmp_path: Path, readers: int) -> None:
    path = tmp_path / "recent.jsonl"
    sizes = {100_000 + i: 2**33 + (i * 7919) % readers for i in range(readers)}
    ring = RecentFile(path, 2)
    ring.write(MemorySample(1e9, 10**6, 2**40, 2**33, 2**35, sizes, killer="x" * 5000, kills_at_bytes=2**40))
    ring.close()
    (kept,) = read_recent(path)
    assert path.stat().st_size == 2 * SLOT_BYTES
    assert len(kept.reader_bytes) >= 50
    assert sorted(kept.reader_bytes.values()) == sorted(sizes.values())[-len(kept.reader_bytes) :]
    assert kept.killer == "x" * 200


def test_a_disk_that_fills_up_later_takes_moments_still(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path, kib=64) as disk:
        ring = RecentFile(disk / "recent.jsonl", 8)
        fill(disk)
        for step in range(20):
            ring.write(moment(step))
        ring.close()
        assert [m.step for m in read_recent(disk / "recent.jsonl")] == list(range(12, 20))
    assert caplog.records == []


def test_a_failing_disk_is_said_once_and_a_working_one_is_used_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = RecentFile(tmp_path / "recent.jsonl", 4)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", broken)
        ring.write(moment(0))
        ring.write(moment(1))
    ring.write(moment(2))
    ring.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "must be writable; got [Errno 5]" in caplog.text
    assert [m.step for m in read_recent(tmp_path / "recent.jsonl")] == [2]


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        RecentFile(tmp_path / "nowhere" / "recent.jsonl")
