"""One process a run, and no run over another."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from vesuvius.config.load import read_config
from vesuvius.errors import ConfigError, StorageError
from vesuvius.runlog import run_dir as module
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


@pytest.mark.parametrize(
    "file",
    [
        "checkpoints/step_00000001/manifest.json",
        "checkpoints/.step_1.partial",
        "samples/a.png",
        "metrics.jsonl",
        "notes.txt",
    ],
)
def test_a_new_run_never_takes_the_directory_of_another(tmp_path: Path, file: str) -> None:
    """Of one that has made a step or saved, or with something that no run has written."""
    directory = RunDir(tmp_path / "x")
    path = directory.path / file
    path.parent.mkdir(parents=True)
    path.write_text('{"kind": "run_start", "step": 0}\n{"kind": "step", "step": 1}\n')
    with pytest.raises(ConfigError, match="--resume"), directory.locked(new=True):
        pass
    assert path.exists()


def test_a_start_that_came_to_nothing_is_no_run_and_is_cleared(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("what", ["tune", "benches", "profiles", "reports"])
def test_a_new_run_goes_where_another_command_was(tmp_path: Path, what: str) -> None:
    directory = RunDir(tmp_path / "x")
    (directory.path / what).mkdir(parents=True)
    with directory.locked(new=True):
        (directory.checkpoints / "step_00000001").mkdir(parents=True)
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


@pytest.fixture
def other_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A repository whose HEAD is not ours, and git in it; this package's module is installed in its `.venv`."""
    monkeypatch.chdir(tmp_path)

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(["git", *who, *words], capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    Path("theirs.txt").write_text("theirs")
    git("add", "theirs.txt")
    git("commit", "--quiet", "-m", "theirs")
    git("tag", "-a", "v7", "-m", "a name that is no commit")
    installed = tmp_path / ".venv/lib/vesuvius/runlog/run_dir.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("# ours")
    monkeypatch.setattr(module, "__file__", str(installed))
    return git


@pytest.mark.parametrize("ignored", [True, False])
def test_a_repository_around_the_environment_of_the_package_is_not_its_own(
    other_repository: Callable[..., str], ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(".gitignore").write_text(".venv\n" if ignored else "")
    assert module._commit() is None
    monkeypatch.setenv("GIT_DIR", str(Path(".git").absolute()))  # as in a hook of theirs
    monkeypatch.setenv("GIT_WORK_TREE", str(Path().absolute()))
    assert module._commit() is None


def test_a_repository_that_tracks_the_package_is_its_own(other_repository: Callable[..., str]) -> None:
    other_repository("add", "--force", ".venv")
    other_repository("commit", "--quiet", "-m", "ours")
    commit = other_repository("rev-parse", "HEAD")
    assert module._commit() == commit
    Path(".venv/lib/vesuvius/runlog/run_dir.py").write_text("# changed")
    assert module._commit() == f"{commit}+"


def test_without_a_repository_the_commit_is_that_which_pip_installed_if_it_did(
    other_repository: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    elsewhere = tmp_path.with_name(f"{tmp_path.name}_elsewhere")
    elsewhere.mkdir()
    monkeypatch.setattr(module, "__file__", str(elsewhere / "run_dir.py"))
    distribution = tmp_path / "site/vesuvius_diffusion-9.dist-info"
    distribution.mkdir(parents=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: vesuvius-diffusion\nVersion: 9\n")
    monkeypatch.syspath_prepend(distribution.parent)
    assert module._commit() is None
    (distribution / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {"editable": true}}')
    assert module._commit() is None
    (distribution / "direct_url.json").write_text(
        '{"url": "https://h/v.git", "vcs_info": {"vcs": "git", "commit_id": "abc123"}}'
    )
    assert module._commit() == "abc123"
