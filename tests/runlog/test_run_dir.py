"""One process a run, and no run over another."""

from __future__ import annotations

import errno
import fcntl
import os
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
