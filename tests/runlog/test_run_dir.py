"""One process per run, and no run overwrites another."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from vesuvius.config.load import read_config
from vesuvius.errors import ConfigError, StorageError
from vesuvius.runlog import run_dir as environment
from vesuvius.runlog.files import nearest_existing
from vesuvius.runlog.run_dir import RunDir, run_dir


def test_a_second_process_is_refused_or_waits_for_the_lock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory, caplog_at = RunDir(tmp_path / "runs/x"), caplog.at_level(logging.INFO)
    held = directory.locked(new=True)
    held.__enter__()
    for wait_s, message in ((0.0, r"runs/x is in use by process"), (0.3, rf"process {os.getpid()} on")):
        with pytest.raises(ConfigError, match=message), directory.locked(False, wait_s):
            pass
    first = directory.lock_owner()
    threading.Timer(0.3, lambda: held.__exit__(None, None, None)).start()
    with caplog_at, directory.locked(new=False, wait_s=60):
        assert directory.lock_owner() not in ("", first)
    assert f"is locked by {first}; waiting up to 60 s" in caplog.text


def test_an_unshared_run_directory_is_refused_and_a_late_one_is_not(tmp_path: Path) -> None:
    ours, theirs = RunDir(tmp_path / "a/x"), RunDir(tmp_path / "b/x")
    with ours.locked(new=True), theirs.locked(new=True):
        ours.refuse_other_path(ours.lock_owner(), within_s=0)
        with pytest.raises(ConfigError, match=r"/b/x is not shared: .*VESUVIUS_RUNS"):
            theirs.refuse_other_path(ours.lock_owner(), within_s=0.3)
    mark, lock = ours.lock_owner(), ours.path / ".lock"
    lock.write_text("of the session before")
    threading.Timer(0.5, lambda: lock.write_text(mark)).start()
    ours.refuse_other_path(mark)


def test_a_new_run_refuses_the_directory_of_a_run_but_not_of_other_commands(tmp_path: Path) -> None:
    """A run that has made a step or saved, or a directory with other files."""
    files = ("checkpoints/.step_1.partial", "samples/a.png", "metrics.jsonl", "notes.txt", "logs/diary.txt")
    for number, file in enumerate(files):
        directory = RunDir(tmp_path / str(number))
        path = directory.path / file
        path.parent.mkdir(parents=True)
        path.write_text('{"kind": "run_start", "step": 0}\n{"kind": "step", "step": 1}\n')
        with pytest.raises(ConfigError, match="--resume"), directory.locked(new=True):
            pass
        assert path.exists()
    for what in ("tune", "benches", "profiles", "reports"):
        directory = RunDir(tmp_path / what)
        (directory.path / what).mkdir(parents=True)
        with directory.locked(new=True):
            (directory.checkpoints / "step_00000001").mkdir(parents=True)
        with pytest.raises(ConfigError, match="already contains a run"), directory.locked(new=True):
            pass


def test_files_of_a_failed_start_are_no_run_and_are_removed(tmp_path: Path) -> None:
    directory, elsewhere = RunDir(tmp_path / "x"), tmp_path / "large disk"
    directory.make_folders()
    elsewhere.mkdir()
    (directory.path / "tb").symlink_to(elsewhere)
    (directory.path / "tune").mkdir()
    for name in ("config.resolved.yaml", "env.json", "session.json", "logs/train_full.log", "ranks/1/logs/a.log"):
        (directory.path / name).parent.mkdir(parents=True, exist_ok=True)
        (directory.path / name).write_text("x")
    directory.metrics.write_text('{"kind": "run_start", "step": 0}\n{"kind": "run_end", "exit_code": 2, "step": 0}\n')
    assert not directory.exists()
    with directory.locked(new=False):  # as --resume does
        assert directory.log.exists()
    with directory.locked(new=True):
        assert {path.name for path in directory.path.iterdir()} == {".lock", "tune", "tb"}
        assert (directory.path / "tb").readlink() == elsewhere


def test_run_directories_follow_the_environment(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_config(tiny_config())
    assert run_dir(config).path == Path.cwd() / "runs/tiny"
    monkeypatch.setenv("VESUVIUS_RUNS", "/scratch/runs")
    assert run_dir(config).path == Path("/scratch/runs/tiny")


def test_an_unwritable_or_unlockable_place_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").write_text("a file")
    (tmp_path / "y/.lock").mkdir(parents=True)  # as root, a folder instead of a file without permission
    long = "z" * 300  # that a path exists cannot be asked, as below a folder without permission
    assert nearest_existing(tmp_path / long / "x") == tmp_path
    for name, new in (("runs/x", True), ("y", True), ("y", False), (long, True)):
        expected = pytest.raises(StorageError, match="Cannot write the run directory")
        with expected, RunDir(tmp_path / name).locked(new):
            pass

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    expected = pytest.raises(StorageError, match=r"does not support flock; .*VESUVIUS_RUNS")
    with expected as refused, RunDir(tmp_path / "x").locked(new=True):
        pass
    assert "\n" not in str(refused.value)


def test_a_session_that_finds_no_space_leaves_the_config_of_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "describe_environment", dict)
    source, directory = tmp_path / "a.yaml", RunDir(tmp_path / "runs/a")
    source.write_text("name: a\ndata: {volumes: [v.zarr]}\n")
    config = read_config(source)
    directory.begin(config, source, {})
    before = {path: path.read_bytes() for path in directory.path.iterdir() if path.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(StorageError, match="File too large"):
            directory.begin(config.with_training(lr=1.0), source, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_bytes() for path in directory.path.iterdir() if path.is_file()} == before
    assert len(before) == 4


def test_the_commit_is_that_of_the_package_s_own_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a repository around the environment nor that of a git hook counts."""
    ours = tmp_path / "ours/src/vesuvius/runlog/run_dir.py"
    ours.parent.mkdir(parents=True)
    ours.write_text("# ours")

    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path / "ours"), "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    git("add", "src")
    git("commit", "--quiet", "-m", "ours")
    commit = git("rev-parse", "HEAD")
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "ours/.venv/lib/python3.11/vesuvius/runlog/x.py"))
    assert environment._commit.__wrapped__() is None
    monkeypatch.setattr(environment, "__file__", str(ours))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert environment._commit.__wrapped__() == commit
    ours.write_text("# changed")
    assert environment._commit.__wrapped__() == f"{commit}+"
