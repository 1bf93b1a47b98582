"""A locked directory is followed when it moves, and nothing is ever written where it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from vesuvius.errors import EXIT_DATA, RunMovedError
from vesuvius.runlog.files import AppendFile, write_atomically
from vesuvius.runlog.held import problem, where
from vesuvius.runlog.run_dir import RunDir


def move(run: Path) -> Path:
    return run.rename(run.with_name("new place é"))


def move_and_replace(run: Path) -> Path:
    moved = move(run)
    (run / "logs").mkdir(parents=True)
    (run / ".lock").write_text("another process")
    return moved


def move_the_parent(run: Path) -> Path:
    return run.parent.rename(run.parent.with_name("archive")) / run.name


def move_and_link_elsewhere(run: Path) -> Path:
    moved = move(run)
    shutil.copytree(moved, run.with_name("copy"))  # its `.lock` reads the same
    run.symlink_to("copy")
    return moved


def delete(run: Path) -> None:
    shutil.rmtree(run)


def delete_and_replace(run: Path) -> None:
    shutil.rmtree(run)
    RunDir(run).make_folders()
    (run / ".lock").touch()


def delete_the_lock(run: Path) -> None:
    (run / ".lock").unlink()


def copy_and_replace(run: Path) -> None:
    shutil.copytree(run, run.with_name("copy"))
    shutil.rmtree(run)
    run.with_name("copy").rename(run)


LOST = [delete, delete_and_replace, delete_the_lock, copy_and_replace]


@pytest.mark.parametrize("change", [move, move_and_replace, move_the_parent, move_and_link_elsewhere, *LOST])
@pytest.mark.parametrize("given", ["absolute", "relative"])
def test_what_is_written_after_a_move_follows_the_directory_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], Path | None], given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs/x"
    run = RunDir(path if given == "absolute" else Path("runs/x"))
    with run.locked(new=True):
        run.make_folders()
        log = AppendFile(run.log)
        log.write_line("before")
        assert (problem(run.path), where(run.session)) == ("", run.session)
        moved = change(path)
        strangers = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
        log.write_line("after")
        with suppress(RunMovedError):
            write_atomically(run.session, b"{}")
        if moved is None:
            with pytest.raises(RunMovedError, match="was deleted or replaced") as raised:
                where(run.checkpoints)
            assert raised.value.exit_code == EXIT_DATA
            assert "deleted or replaced" in problem(run.path)
        else:
            assert where(run.checkpoints) == moved / "checkpoints"
            assert f"{path} was moved to {moved}; continue there with --resume name={moved.name}" in problem(run.path)
            assert (f"VESUVIUS_RUNS={moved.parent}" in problem(run.path)) == (moved.parent != path.parent)
            assert (moved / "session.json").read_bytes() == b"{}"
            assert (moved / "logs/train_full.log").read_text() == "before\nafter\n"
        log.close()
        for stranger, content in strangers.items():
            own = moved or (run.log.parent.absolute() if change is delete_the_lock else tmp_path / "none")
            if not stranger.is_relative_to(own):
                assert stranger.read_bytes() == content, "what lies there now is another's"
        new = {each for each in tmp_path.rglob("*") if each.is_file()} - strangers.keys()
        assert new == ({moved / "session.json"} if moved else set())
    assert where(run.session) == run.session, "an ended session follows nothing"


def test_a_directory_reached_through_a_new_link_is_the_same(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "x")
    with run.locked(new=True):
        run.path.rename(tmp_path / "larger disk")
        run.path.symlink_to("larger disk")
        assert problem(run.path) == ""
        assert where(run.session) == run.session


def test_a_deleted_inode_is_not_taken_for_its_successor(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "x")
    with run.locked(new=True):
        for _ in range(50):  # file systems use the numbers of deleted files again
            (run.path / ".lock").unlink(missing_ok=True)
            os.rmdir(run.path)
            run.path.mkdir()
            (run.path / ".lock").touch()
            assert problem(run.path)
