"""A checkpoint that will not fit on the disk is said before the save that fails."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from tests.support.small_disk import fill, small_disk
from vesuvius.monitor.alerts.notices import DiskWatch


class Clock:
    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def test_a_slow_disk_is_not_walked_more_than_once_a_minute_whether_it_answers_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, asked = Clock(), []

    def usage(path: Path) -> object:
        asked.append(path)
        if len(asked) == 2:
            raise OSError
        return namedtuple("Usage", "free")(2**30)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    watch = DiskWatch(tmp_path, tmp_path, clock)
    known = []
    for clock.s in range(0, 121, 10):
        watch.look()
        known.append(watch.use is not None)
    assert len(asked) == 3
    assert known == [True] * 6 + [False] * 6 + [True]


def test_on_a_real_disk_a_checkpoint_that_will_not_fit_is_said_before_the_save_that_fails(tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    with small_disk(tmp_path / "mount", kib=1024) as disk:
        clock, checkpoint = Clock(), disk / "checkpoints" / "step_00000100"
        (disk / "checkpoints" / "step_00000090").mkdir(parents=True)
        checkpoint.mkdir()
        (checkpoint / "state.pt").write_bytes(bytes(400_000))
        (disk / "checkpoints" / "best").symlink_to(checkpoint.name)  # counted once
        watch = DiskWatch(disk, disk / "checkpoints", clock)
        assert watch.look() == []
        assert watch.use is not None
        assert 400_000 <= watch.use["run_bytes"] < 401_000
        ballast = fill(disk)
        clock.s += 60
        (notice,) = watch.look()
        assert (notice.event, notice.fields) == ("disk_no_room", {"needed": 400_000, "free_bytes": 0})
        clock.s += 60
        assert watch.look() == [], "once"
        ballast.unlink()
        clock.s += 60
        assert watch.look() == []


def test_a_directory_that_is_gone_is_no_error(tmp_path: Path) -> None:
    watch = DiskWatch(tmp_path / "gone", tmp_path / "gone" / "checkpoints")
    assert watch.look() == []
    assert watch.use is None
