"""A failed start reports its own cause, and the corrected command begins the run."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import WriteConfig
from vesuvius.commands import train
from vesuvius.errors import EXIT_CONFIG, EXIT_DATA, EXIT_ERROR, EXIT_OK, ConfigError, VesuviusError
from vesuvius.report.model import read_report
from vesuvius.runlog.run_dir import RunDir
from vesuvius.training import run


def ends(config: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and last line on stderr."""
    code = train.main(["--config", str(config), *arguments])
    return code, (capsys.readouterr().err.strip().splitlines() or [""])[-1]


FAILURES = [
    (
        PermissionError(errno.EACCES, "Permission denied", "runs/tiny/metrics.jsonl"),
        EXIT_DATA,
        "Cannot write .*; correct the permissions and continue with --resume",
    ),
    (
        OSError("AF_UNIX path length cannot exceed 107 bytes"),
        EXIT_ERROR,
        "System error: .*AF_UNIX path.*py:[0-9]+",
    ),
    (ConfigError("Conv3d is wrong on this machine: weight gradient off by 0.3"), EXIT_CONFIG, "Conv3d is wrong"),
]


def test_a_failed_start_leaves_nothing_and_does_not_change_an_existing_run(
    tiny_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An OSError counts as one of the run directory only there.  The same command works afterwards."""
    config, directory = tiny_config(training={"max_steps": 1}), tmp_path / "runs/tiny"
    for error, code, says in FAILURES:

        def fails(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(run, "build_network" if isinstance(error, OSError) else "_check_kernels", fails)
            found, line = ends(config, capsys)
        assert (found, bool(re.search(says, line))) == (code, True), line
        assert not directory.exists(), "a run that never began leaves nothing behind"
    assert ends(config, capsys)[0] == EXIT_OK
    assert '"exit_code": 0' in RunDir(directory).metrics.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(run, "_check_kernels", fails)
        assert ends(config, capsys, "--resume", "training.max_steps=2")[0] == EXIT_CONFIG
    assert len(list((directory / "checkpoints").iterdir())) == 1
    for path in RunDir(directory).checkpoints.iterdir():
        path.rename(tmp_path / path.name)
    code, line = ends(config, capsys)
    assert code == EXIT_CONFIG, "one that was killed before it saved is a run, too, which nothing overwrites"
    assert "continue it with --resume" in line


def test_damaged_records_of_a_death_do_not_keep_a_run_from_its_resume(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "runs/tiny")
    session = json.loads(run.session.read_text())
    run.session.write_text(json.dumps(session | {"end_time": None, "pid": 2**22 + 1}))
    samples = [json.loads(line) for line in run.recent.read_text().splitlines()]
    for sample in samples:
        sample["limits"][0]["limit_bytes"] = 0
    run.recent.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    code, line = ends(trained, capsys, "--resume", "training.max_steps=3")
    assert (code, "cannot explain how the last session ended: ZeroDivisionError" in line) == (EXIT_OK, True), line


def test_records_that_cannot_be_written_or_mean_nothing_are_named_in_one_line(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "runs/tiny")
    resume = "--resume", "training.max_steps=3"
    run.quarantine.write_text('{"kind": "region"}\n')
    code, line = ends(trained, capsys, *resume)
    assert code == EXIT_ERROR
    assert f"cannot read the records of {run.path}: a line of its .jsonl files has a wrong value" in line
    run.quarantine.unlink()
    run.metrics.rename(tmp_path / "metrics.jsonl")
    run.metrics.mkdir()  # as root, a folder instead of a file without permission
    code, line = ends(trained, capsys, *resume)
    assert code == EXIT_DATA
    assert re.search(r"Cannot write the run directory .*metrics\.jsonl'; move away what is in its place", line)
    with pytest.raises(VesuviusError, match=r"cannot read the records .*metrics\.jsonl"):
        read_report(run.path)
    run.metrics.rmdir()
    (tmp_path / "metrics.jsonl").rename(run.metrics)
    assert ends(trained, capsys, *resume)[0] == EXIT_OK


@pytest.mark.long
def test_a_failing_start_of_ray_leaves_no_run_directory(
    tiny_config: WriteConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uses a temporary folder whose path is too long for a socket, in a separate process without Ray."""
    config = tiny_config(training={"workers": 1, "train_batch_size": 66, "max_steps": 1})
    environment = os.environ | {"RAY_TMPDIR": str(tmp_path / ("long" * 30))}
    command = [sys.executable, "-m", "vesuvius.train", "--config", str(config)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == EXIT_CONFIG, ended.stderr
    assert "Ray did not start: validate_socket_filename failed: AF_UNIX path length" in ended.stderr
    assert "set RAY_TMPDIR to a folder with a short path" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ends(config, capsys, "training.workers=0")[0] == EXIT_OK
