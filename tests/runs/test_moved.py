"""A run whose directory is moved, replaced or deleted while it trains: it stops, and touches nobody else's files."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.support.kill_harness import Session
from tests.support.rank_runs import ends_of, output_of, started_ranks
from tests.support.runs import WriteConfig
from vesuvius.errors import EXIT_DATA
from vesuvius.runlog.records import read_records
from vesuvius.training.checkpoint.format import find_damage, list_checkpoints, step_of

# A checkpoint at each step, of which the older ones are pruned.
LONG = {"epochs": 10_000, "save_every": 1, "keep_last": 2, "validate_every": 0}


def tree(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def another_run(folder: Path, of: Path) -> dict[Path, bytes]:
    """A run that another process owns, with checkpoints of the same names; returns its files."""
    shutil.copytree(of, folder, symlinks=True)
    for name in (".lock", "metrics.jsonl", "logs/train_full.log"):
        (folder / name).write_text("another run's")
    for step in range(1, 100):
        (folder / f"checkpoints/step_{step:08d}").mkdir(exist_ok=True)
    return tree(folder)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_moved_run_saves_where_it_is_now_and_leaves_its_successor_alone(
    tiny_config: WriteConfig, tmp_path: Path, ranks: int
) -> None:
    config = tiny_config(training=LONG | {"ranks": ranks}, monitor={"sample_every_s": 0.5, "tensorboard": True})
    run, moved = tmp_path / "runs/tiny", tmp_path / "runs/old"
    with started_ranks(config, tmp_path, ranks) as processes:
        while len(list_checkpoints(run / "checkpoints")) < 2:
            assert processes[0].poll() is None, output_of(tmp_path, ranks)
            time.sleep(0.02)
        run.rename(moved)
        others = another_run(run, moved)
        assert ends_of(processes) == [EXIT_DATA] * ranks, output_of(tmp_path, ranks)
        said = (tmp_path / "rank_0.txt").read_text()
    assert f"{run} was moved to {moved}; continue there with --resume name=old" in said
    assert tree(run) == others
    records = read_records(moved / "metrics.jsonl")
    end = records[-1]
    assert (end["kind"], end["exit_code"]) == ("run_end", EXIT_DATA)
    saved = list_checkpoints(moved / "checkpoints")
    assert [find_damage(path) for path in saved] == [None] * len(saved)
    assert step_of(saved[-1]) == end["step"], "no step is lost"
    assert "ended after step" in (moved / "logs/train_full.log").read_text()
    assert f'"exit_code": {EXIT_DATA}' in (moved / "session.json").read_text()
    with Session(config, tmp_path, "--resume", "name=old", f"training.max_steps={end['step'] + 1}") as session:
        assert session.end() == 0, session.text()


@pytest.mark.parametrize("at", ["between two saves", pytest.param("before the last save", marks=pytest.mark.long)])
def test_a_run_without_a_directory_ends_with_an_error_and_does_not_create_it_again(
    tiny_config: WriteConfig, tmp_path: Path, at: str
) -> None:
    steps = {"epochs": 1, "steps_per_epoch": 30, "save_every": 1000} if at == "before the last save" else LONG
    config = tiny_config(training=steps, monitor={"sample_every_s": 0.5})
    run = tmp_path / "runs/tiny"
    with Session(config, tmp_path) as session:
        session.wait_for("Train step", 2)
        while run.exists():  # the run may write between the listing of a folder and its removal
            shutil.rmtree(run, ignore_errors=True)
        assert session.end() == EXIT_DATA, session.text()
        assert f"The run directory {run} was deleted or replaced" in session.text()
    assert not run.exists()
