"""Checkpoints are written completely or not at all, and the previous and the best one stay intact.

Kills during a save are in `test_writer.py`, kills of whole runs in `tests/runs/test_kills.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.forked import in_child
from tests.training.checkpoint.test_format import CONFIG, as_nobody, save, small_files, state_of, steps_in
from vesuvius.config import TrainingConfig
from vesuvius.errors import StorageError
from vesuvius.runlog.run_dir import RunDir
from vesuvius.training.checkpoint.format import find_damage, load_checkpoint, newest_checkpoint
from vesuvius.training.checkpoint.save import save_checkpoint


def test_averages_are_stored_once_together_with_the_config(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    names = ["config.yaml", "manifest.json", "model.safetensors", "model_ema_0.999.safetensors", "state.pt"]
    assert sorted(file.name for file in path.iterdir()) == names
    assert load_file(path / "model.safetensors")["conv.weight"][0] == 7.5
    assert load_file(path / "model_ema_0.999.safetensors")["conv.weight"][0] == 7.25
    stored = torch.load(path / "state.pt", weights_only=True)["averages"]
    assert {name: list(average) for name, average in stored.items()} == {"ema": ["updates"], "ema_0.999": ["updates"]}
    assert (path / "config.yaml").read_text() == CONFIG
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1, "who may read one may read all"
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], sorted(manifest["files"])) == (
        3,
        7,
        [n for n in names if n[:2] != "ma"],
    )


@pytest.mark.parametrize(
    ("keep", "steps"),
    [
        ({"keep_last": 2}, [50, 60]),
        ({"keep_last": 9}, [10, 20, 30, 40, 50, 60]),
        ({"keep_last": 1, "keep_every": 20}, [20, 40, 60]),
        ({"keep_last": 1, "best_step": 10}, [10, 60]),
        ({"keep_last": 1, "best_step": 15}, [60]),
        ({"keep_last": 2, "keep_every": 40, "best_step": 20}, [20, 40, 50, 60]),
    ],
)
def test_newest_best_and_multiples_are_kept(tmp_path: Path, keep: dict[str, int], steps: list[int]) -> None:
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step, keep_last=9)
    save(tmp_path, 60, **keep)
    assert steps_in(tmp_path) == steps
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("seed", range(4))
def test_once_a_best_checkpoint_was_saved_best_points_to_an_intact_one(tmp_path: Path, seed: int) -> None:
    """For any sequence of better, worse, forgotten, failed and repeated saves."""
    rng, step, best, linked = np.random.default_rng(seed), 1, None, None
    for _ in range(15):
        step += int(rng.integers(2))  # or the same one again
        match rng.choice(["better", "worse", "forgotten"], p=[0.4, 0.5, 0.1]):
            case "better":
                best = step
            case "forgotten":
                best = None
        before = set(steps_in(tmp_path))
        if fails := bool(rng.random() < 0.3):
            with small_files(1000), pytest.raises(StorageError):
                save(tmp_path, step, keep_last=1, best_step=best)
            assert set(steps_in(tmp_path)) == before
        else:
            save(tmp_path, step, keep_last=1, best_step=best)
            linked = best if best in {*before, step} else linked
            assert set(steps_in(tmp_path)) == {step, linked, best} & {*before, step}, "and no more than that stays"
        if linked is not None:
            assert (tmp_path / "best").readlink() == Path(f"step_{linked:08d}"), (step, best, fails)
            assert find_damage(tmp_path / "best") is None


def killed_before(number: int, directory: Path) -> bool:
    """Whether saving an existing step dies before the `number`-th call that changes a name on disk."""
    count = 0

    def die(event: str, _: Any) -> None:
        nonlocal count
        if event in {"os.rename", "os.remove", "os.rmdir", "os.symlink", "os.mkdir"}:
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    def act() -> None:
        sys.addaudithook(die)
        save_checkpoint(directory, 2, state_of(9) | {"best_judged": {"step": 2}}, CONFIG, TrainingConfig(keep_last=1))

    code = in_child(act)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def another_run(path: Path) -> dict[Path, str]:
    """A run that has and saves the same steps; returns its files."""
    files = [path / f"checkpoints/{name}/state.pt" for name in ("step_00000001", "step_00000002", STARTED)]
    for file in [path / ".lock", *files]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("another run's")
    return {file: file.read_text() for file in path.rglob("*") if file.is_file()}


STARTED = ".partial-step_00000002"
NAMED = {"open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree"}


@pytest.mark.long
def test_a_run_that_is_moved_at_any_point_of_a_save_keeps_it_and_its_successor_its_own(tmp_path: Path) -> None:
    for number in range(3, 100, 2):  # before, the folder is opened
        run, moved = RunDir(tmp_path / f"{number}/x"), tmp_path / f"{number}/old"
        with run.locked(new=True):
            run.make_folders()
            save(run.checkpoints, 1, best_step=1)

        def act(number: int = number, run: RunDir = run, moved: Path = moved) -> None:
            events = itertools.count(1)

            def replace(event: str, _: Any) -> None:
                if event in NAMED and next(events) == number:
                    run.path.rename(moved)
                    another_run(run.path)

            with run.locked(new=False):
                sys.addaudithook(replace)
                save(run.checkpoints, 2, keep_last=1, best_step=2)

        assert in_child(act) == 0
        if not moved.exists():
            break
        assert steps_in(moved / "checkpoints") == [2]
        assert find_damage(moved / "checkpoints/best") is None
        assert {file: file.read_text() for file in run.path.rglob("*") if file.is_file()} == another_run(run.path)
    assert number > 20


def test_a_step_is_saved_again_intact_after_a_kill_at_any_point(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[int] = []
    for number in range(1, 100):
        directory = tmp_path / str(number)
        save(directory, 1)
        save(directory, 2, best_step=2)
        if not killed_before(number, directory):
            break
        newest = newest_checkpoint(directory)
        assert newest is not None
        found.append(load_checkpoint(newest)["step"])
        if newest.name == ".replaced-step_00000002":
            with small_files(1000), pytest.raises(StorageError):
                save(directory, 3)
            assert load_checkpoint(directory / "best")["step"] == 2, "the next save has put it back"
        save(directory, 3)
        assert find_damage(directory / "best") is None
        assert {path.name for path in directory.iterdir()} >= {"best", "step_00000002", "step_00000003"}
        assert not list(directory.glob(".*"))
    assert found == sorted(found)
    assert set(found) == {2, 9}, "kills have fallen before and behind the moment that counts"
    assert newest_checkpoint(directory) == directory / "step_00000002"
    assert load_checkpoint(directory / "best")["step"] == 9
    assert caplog.text == ""


def test_without_symlinks_a_save_succeeds_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A directory in place of the link has the same effect as missing symlink support."""
    (tmp_path / "best" / "mine").mkdir(parents=True)
    for step in (1, 2):
        assert find_damage(save(tmp_path, step, best_step=step)) is None
    assert caplog.text.count("to the best checkpoint: ") == 2
    assert (tmp_path / "best" / "mine").is_dir()


def test_a_damaged_newer_checkpoint_does_not_displace_intact_ones(tmp_path: Path) -> None:
    save(tmp_path, 20)
    (save(tmp_path, 30) / "manifest.json").unlink()
    save(tmp_path, 25, keep_last=2)
    assert steps_in(tmp_path) == [20, 25, 30]
    assert newest_checkpoint(tmp_path) == tmp_path / "step_00000025"
    save(tmp_path, 30, keep_last=2)
    assert newest_checkpoint(tmp_path) == tmp_path / "step_00000030"


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step_00000001.txt").touch()
    (tmp_path / "step_00000002.bak").mkdir()
    (tmp_path / "step_00000003").touch()
    for step in (4, 5):
        save(tmp_path, step, keep_last=1)
    assert steps_in(tmp_path) == [5]
    assert len(list(tmp_path.iterdir())) == 4


def test_an_undeletable_checkpoint_costs_a_warning_but_no_save(caplog: pytest.LogCaptureFixture) -> None:
    with as_nobody() as directory:
        save(directory, 1).chmod(0o500)
        assert find_damage(save(directory, 2, keep_last=1)) is None
        assert "cannot delete" in caplog.text
        assert "step_00000001; delete it manually" in caplog.text
        assert steps_in(directory) == [2]
        assert find_damage(save(directory, 3, keep_last=1)) is None
        assert ".pruned-step_00000001; delete it manually" in caplog.text
        (directory / ".pruned-step_00000001").chmod(0o700)


def test_every_file_is_flushed_before_the_rename_and_the_directory_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after a save loses nothing."""
    done: list[tuple[str, int]] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        done.append(("flushed", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        done.append(("renamed", path.stat().st_ino))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    checkpoint = save(tmp_path / "checkpoints", 1)
    named = done.index(("renamed", checkpoint.stat().st_ino))
    files = [path for path in checkpoint.iterdir() if path.is_file()]
    assert len(files) == 5
    for path in [*files, checkpoint]:
        assert ("flushed", path.stat().st_ino) in done[:named], path.name
    for directory in (checkpoint.parent, tmp_path):
        assert ("flushed", directory.stat().st_ino) in done[named:], "the name itself"


def test_without_enough_space_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    size = sum(file.stat().st_size for file in save(tmp_path / "elsewhere", 2, size=10**6).iterdir())
    shutil.rmtree(tmp_path / "elsewhere")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size))
    with pytest.raises(
        StorageError, match=r"Cannot write checkpoint .*step_0\d+: OSError: 13 MiB needed and 11 MiB free"
    ):
        save(tmp_path, 2, keep_last=1, size=10**6)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size + 2 * 2**20))
    save(tmp_path, 2, size=10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(total=0, free=0))  # FUSE without statfs
    save(tmp_path, 3, size=10**6)


@pytest.mark.parametrize(("large", "kind"), [("model", "OSError: .*too large"), ("ema", "SafetensorError")])
def test_a_full_disk_is_an_error_and_leaves_the_older_checkpoint_intact(tmp_path: Path, large: str, kind: str) -> None:
    """Whichever file does not fit."""
    old = save(tmp_path, 1)
    state = state_of(2)
    weights = state["model"] if large == "model" else state["averages"]["ema"]["weights"]
    weights["large"] = torch.zeros(10**6)
    with small_files(100_000), pytest.raises(
        StorageError, match=rf"Cannot write checkpoint .*step_00000002: {kind}.*--resume"
    ):  # fmt: skip
        save_checkpoint(tmp_path, 2, state, CONFIG, TrainingConfig(keep_last=1))
    assert find_damage(old) is None
    assert [path.name for path in tmp_path.iterdir()] == [old.name], "nothing half-written is left"
