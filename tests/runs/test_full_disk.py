"""A run on a disk that fills up continues and loses nothing already written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kill_harness import Session
from tests.support.runs import WriteConfig
from tests.support.small_disk import fill, small_disk
from vesuvius.runlog.records import read_records
from vesuvius.training.checkpoint.format import find_damage, list_checkpoints, step_of

SAVING = {"save_every": 2, "keep_last": 2}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """12 MiB for the runs: room for a few checkpoints."""
    directory = tmp_path / "disk"
    directory.mkdir()
    with small_disk(directory, kib=12 * 1024) as disk:
        (tmp_path / "runs").symlink_to(disk)
        yield disk


def newest_of(run: Path) -> Path:
    """The newest checkpoint; all visible ones must be intact."""
    paths = list_checkpoints(run / "checkpoints")
    assert [find_damage(path) for path in paths] == [None] * len(paths)
    return paths[-1]


def test_a_full_disk_loses_saves_but_no_step_record_or_older_checkpoint(
    tiny_config: WriteConfig, tmp_path: Path, disk: Path
) -> None:
    config = tiny_config(
        training=SAVING | {"epochs": 1000},
        monitor={"tensorboard": True, "sample_every_s": 0.5},
    )
    run = disk / "tiny"
    with Session(config, tmp_path) as session:
        session.wait_until(lambda: bool(list_checkpoints(run / "checkpoints")), "it saved")
        ballast = fill(disk)
        session.wait_for("ERROR Cannot write checkpoint", count=3)
        session.wait_for("metrics.jsonl: ")
        older = newest_of(run)
        ballast.unlink()
        session.wait_until(lambda: list_checkpoints(run / "checkpoints")[-1] != older, "it saved again")
        session.process.terminate()
        assert session.end() == 75, session.text()
        assert "Traceback" not in session.text()
        assert len(re.findall("cannot write .*metrics.jsonl: ", session.text())) == 1
        assert session.text().count("metrics.jsonl is writable again; 0 lines were lost") == 1
    last = step_of(newest_of(run))
    every_step = list(range(1, last + 1))
    records = read_records(run / "metrics.jsonl")
    assert [record["step"] for record in records if record["kind"] == "step"] == every_step
    assert len([record for record in records if record.get("event") == "save_failed"]) >= 3
    log = (run / "logs/train_full.log").read_text()
    assert [int(step) for step in re.findall(r"Train step (\d+)/", log)] == every_step
