"""One process a run, and no run over another."""

from __future__ import annotations

from pathlib import Path

import pytest

from vesuvius.engine.run_dir import RunDir
from vesuvius.errors import ConfigError, StorageError


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
    directory.path.mkdir()
    with pytest.raises(ConfigError, match="--resume"), directory.locked(new=True):
        pass


def test_a_place_that_cannot_be_written_is_an_error_of_storage(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(StorageError, match="must be writable"), RunDir(tmp_path / "runs" / "x").locked(new=True):
        pass
