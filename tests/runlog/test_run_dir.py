"""One process a run, and no run over another."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from vesuvius.config.load import read_config
from vesuvius.errors import ConfigError, StorageError
from vesuvius.runlog.run_dir import RunDir, run_dir


def test_a_second_process_is_kept_out_while_the_first_is_at_work(tmp_path: Path) -> None:
    directory = RunDir(tmp_path / "runs" / "x")
    with (
        directory.locked(new=True),
        pytest.raises(ConfigError, match=r"one process may work on a run; got .*runs/x"),
        directory.locked(new=False),
    ):
        pass
    with directory.locked(new=False):
        pass


def test_a_process_that_may_wait_gets_the_lock_once_the_one_before_has_let_go_and_no_later_than_it_may(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, caplog_at = RunDir(tmp_path / "x"), caplog.at_level(logging.INFO)
    held = directory.locked(new=True)
    held.__enter__()
    with pytest.raises(ConfigError, match=rf"after 0.3 s: process {os.getpid()} on "), directory.locked(False, 0.3):
        pass
    first = directory.mark()
    threading.Timer(0.5, lambda: held.__exit__(None, None, None)).start()
    with caplog_at, directory.locked(new=False, wait_s=60):
        assert directory.mark() not in ("", first)
    assert f"is locked by {first}; waiting up to 60 s" in caplog.text


def test_a_path_that_is_another_folder_on_this_node_is_refused_and_a_late_one_is_not(tmp_path: Path) -> None:
    ours, theirs = RunDir(tmp_path / "a/x"), RunDir(tmp_path / "b/x")
    with ours.locked(new=True), theirs.locked(new=True):
        ours.refuse_other_path(ours.mark(), within_s=0)
        with pytest.raises(ConfigError, match=r"a path that all nodes share; got .*/b/x.*VESUVIUS_RUNS"):
            theirs.refuse_other_path(ours.mark(), within_s=0.3)
    mark, lock = ours.mark(), ours.path / ".lock"
    lock.write_text("of the session before")
    threading.Timer(0.5, lambda: lock.write_text(mark)).start()
    ours.refuse_other_path(mark)


def test_a_new_run_never_takes_an_existing_directory(tmp_path: Path) -> None:
    directory = RunDir(tmp_path / "x")
    (directory.path / "logs").mkdir(parents=True)
    with pytest.raises(ConfigError, match="--resume"), directory.locked(new=True):
        pass


@pytest.mark.parametrize("what", ["tune", "benches", "profiles", "reports"])
def test_a_new_run_goes_where_another_command_was(tmp_path: Path, what: str) -> None:
    directory = RunDir(tmp_path / "x")
    (directory.path / what).mkdir(parents=True)
    with directory.locked(new=True):
        (directory.path / "logs").mkdir()
    with pytest.raises(ConfigError, match="which exists"), directory.locked(new=True):
        pass


def test_run_directories_lie_where_the_environment_says(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_config(tiny_config())
    assert run_dir(config).path == Path("runs/tiny")
    monkeypatch.setenv("VESUVIUS_RUNS", "/scratch/runs")
    assert run_dir(config).path == Path("/scratch/runs/tiny")


def test_a_place_that_cannot_be_written_is_an_error_of_storage(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(StorageError, match="must be writable"), RunDir(tmp_path / "runs" / "x").locked(new=True):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_without_locks_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    expected = pytest.raises(StorageError, match=r"needs a file system with flock; got .*VESUVIUS_RUNS")
    with expected as refused, RunDir(tmp_path / "x").locked(new=True):
        pass
    assert "\n" not in str(refused.value)
