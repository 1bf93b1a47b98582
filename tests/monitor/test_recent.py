"""Recent samples: which are kept, and that they survive crashes and full disks."""

from __future__ import annotations

from pathlib import Path

from tests.support.small_disk import fill, small_disk
from vesuvius.monitor.recent import MemorySample, RecentFile, read_recent


def moment(step: int, **figures: object) -> MemorySample:
    return MemorySample(1000.0 + step, step, 100 + step, 10, 40, {7: 30, 8: 20 + step}, **figures)  # type: ignore[arg-type]


def write(path: Path, steps: range, kept: int = 4) -> None:
    recent = RecentFile(path, kept)
    for step in steps:
        recent.write(moment(step))
    recent.close()


def test_samples_are_read_back_in_order_before_the_file_is_closed(tmp_path: Path) -> None:
    """Each line is handed to the system at once, so it survives SIGKILL."""
    path = tmp_path / "recent.jsonl"
    full = moment(
        1, binding_limit="the machine", binding_used_bytes=5, limit_bytes=9, level="WARN", reason="near",
        vram_used_bytes=3, vram_limit_bytes=8, cgroup_oom_kills=0, machine_oom_kills=2,
    )  # fmt: skip
    ring = RecentFile(path)
    ring.write(moment(0))
    ring.write(full)
    assert read_recent(path) == [moment(0), full]
    ring.close()


def test_only_the_last_samples_are_kept_in_two_bounded_files(tmp_path: Path) -> None:
    path = tmp_path / "recent.jsonl"
    for count in (1, 4, 5, 11):
        for file in tmp_path.iterdir():
            file.unlink()
        write(path, range(count))
        assert [m.step for m in read_recent(path, 4)] == list(range(max(count - 4, 0), count))
        assert len(list(tmp_path.iterdir())) <= 2
        assert all(len(file.read_text().splitlines()) <= 4 for file in tmp_path.iterdir())


def test_a_new_session_appends_and_drops_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "recent.jsonl"
    write(path, range(100, 103))
    path.write_bytes(path.read_bytes()[:-20])  # torn by a crash
    write(path, range(1))  # the clock was set back
    assert [m.step for m in read_recent(path)] == [100, 101, 0]
    assert read_recent(tmp_path / "nowhere") == []


def test_rotation_frees_space_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path, kib=64) as disk:
        recent = RecentFile(disk / "recent.jsonl", 30)  # of 10 KiB
        for step in range(60):
            recent.write(moment(step))
        fill(disk)
        for step in range(60, 100):
            recent.write(moment(step))
        assert [m.step for m in read_recent(disk / "recent.jsonl", 10)] == list(range(90, 100))
        recent.close()
