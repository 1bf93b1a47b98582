"""A start that fails is told by its own cause, and the corrected command begins the run."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import WriteConfig
from vesuvius.commands import train
from vesuvius.errors import EXIT_CONFIG, EXIT_DATA, EXIT_ERROR, EXIT_OK, ConfigError
from vesuvius.runlog.run_dir import RunDir
from vesuvius.training import run


def ends(config: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code, and the last line on stderr."""
    code = train.main(["--config", str(config), *arguments])
    return code, (capsys.readouterr().err.strip().splitlines() or [""])[-1]


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "RUN/metrics.jsonl"),
            EXIT_DATA,
            "the run directory must be",
        ),
        (
            OSError("AF_UNIX path length cannot exceed 107 bytes"),
            EXIT_ERROR,
            "The system refused .*AF_UNIX path.*py:[0-9]+",
        ),
    ],
)
def test_an_error_of_the_system_is_one_of_the_run_directory_only_there(
    error: OSError,
    code: int,
    says: str,
    tiny_config: WriteConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each is raised while the session is built; the same command works afterwards."""

    def fails(*_: Any, **__: Any) -> None:
        raise error

    if str(error.filename).startswith("RUN/"):
        error.filename = f"runs/tiny/{error.filename[4:]}"
    config = tiny_config(training={"max_steps": 1})
    with monkeypatch.context() as patch:
        patch.setattr(run, "build_step", fails)
        found, line = ends(config, capsys)
    assert found == code
    assert not (tmp_path / "runs/tiny").exists(), "a run that never began leaves nothing behind"
    assert re.search(says, line), line
    assert ("free some space" in line) == (code == EXIT_DATA)
    assert ends(config, capsys)[0] == EXIT_OK
    assert '"exit_code": 0' in RunDir(tmp_path / "runs/tiny").metrics.read_text()
    assert ends(config, capsys)[0] == EXIT_CONFIG, "now it is a run, which nothing overwrites"


def test_kernels_that_are_wrong_on_this_machine_are_refused_before_there_is_a_run_directory(
    tiny_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a run that is there is left as it was."""

    def refuses(*_: Any) -> None:
        raise ConfigError("Conv3d is wrong on this machine: weight gradient off by 0.3 of its norm")

    config = tiny_config(training={"max_steps": 1})
    with monkeypatch.context() as patch:
        patch.setattr(run, "_check_kernels", refuses)
        code, line = ends(config, capsys)
        assert (code, "Conv3d is wrong on this machine" in line) == (EXIT_CONFIG, True)
        assert not (tmp_path / "runs").exists()
    assert ends(config, capsys)[0] == EXIT_OK
    monkeypatch.setattr(run, "_check_kernels", refuses)
    assert ends(config, capsys, "--resume", "training.max_steps=2")[0] == EXIT_CONFIG
    monkeypatch.undo()
    assert len(list((tmp_path / "runs/tiny/checkpoints").iterdir())) == 1


@pytest.mark.long
def test_a_ray_that_cannot_start_here_leaves_no_run_behind(
    tiny_config: WriteConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a temporary folder whose path is too long for a socket, in a process of its own, where no Ray runs."""
    config = tiny_config(training={"workers": 1, "max_steps": 1})
    environment = os.environ | {"RAY_TMPDIR": str(tmp_path / ("long" * 30))}
    command = [sys.executable, "-m", "vesuvius.train", "--config", str(config)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == EXIT_CONFIG, ended.stderr
    assert "Ray did not start: validate_socket_filename failed: AF_UNIX path length" in ended.stderr
    assert "let RAY_TMPDIR name a folder with a short path" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ends(config, capsys, "training.workers=0")[0] == EXIT_OK


def test_a_run_of_one_step_that_was_killed_before_it_saved_is_kept(
    tiny_config: WriteConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(training={"max_steps": 1})
    assert ends(config, capsys)[0] == EXIT_OK
    checkpoints = RunDir(tmp_path / "runs/tiny").checkpoints
    for path in checkpoints.iterdir():
        path.rename(tmp_path / path.name)
    code, line = ends(config, capsys)
    assert code == EXIT_CONFIG
    assert "continue it with --resume" in line
