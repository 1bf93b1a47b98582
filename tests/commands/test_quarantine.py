"""`vesuvius quarantine`: what a run could not read is listed, cleared, and the next resume goes by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vesuvius.commands import train
from vesuvius.commands.runs import quarantine
from vesuvius.runlog.records import JsonLines
from vesuvius.training.checkpoint.format import list_checkpoints, load_checkpoint
from vesuvius.training.checkpoint.progress import box_of, clear_quarantine, read_quarantine, without_cleared

BOX = ((0, 0, 0), (32, 32, 32))
OTHER_BOX = ((32, 0, 0), (64, 32, 32))


def record(box: Any, **fields: Any) -> dict[str, Any]:
    return {"volume": "v.zarr", "number": 0, "box": [list(corner) for corner in box], "chunk": [0, 0, 0]} | fields


def write(path: Path, *records: dict[str, Any]) -> None:
    lines = JsonLines(path)
    for each in records:
        lines.write("region", **each)
    lines.close()


def test_chunks_cleared_are_retried_and_later_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    assert read_quarantine(path) == []
    assert without_cleared([record(BOX)], path) == [record(BOX)]
    write(path, record(BOX, cause="torn"), record(OTHER_BOX, cause="torn"), record(BOX, cause="torn"))
    assert [box_of(found) for found in read_quarantine(path)] == [BOX, OTHER_BOX]
    clear_quarantine(path)
    assert read_quarantine(path) == []
    of_checkpoint = [record(BOX), record(OTHER_BOX), record(BOX, number=1)]
    assert without_cleared(of_checkpoint, path) == of_checkpoint[2:], "of the last this file never knew"
    write(path, record(OTHER_BOX, cause="torn still"))
    assert [found["cause"] for found in read_quarantine(path)] == ["torn still"]
    assert without_cleared(of_checkpoint, path) == of_checkpoint[1:]


@pytest.fixture
def run(
    tiny_config: Callable[..., Path], volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Any]]:
    """Trains the run `tiny` up to a step, over a chunk that is torn at first; returns what its checkpoint has kept."""
    monkeypatch.chdir(tmp_path)
    config = tiny_config()
    (volume / "1/1/1").rename(tmp_path / "whole")
    (volume / "1/1/1").write_bytes(b"torn")

    def train_to(step: int, *options: str) -> list[Any]:
        assert train.main(["--config", str(config), f"training.max_steps={step}", *options]) == 0
        (*_, newest) = list_checkpoints(tmp_path / "runs" / "tiny" / "checkpoints")
        kept: list[Any] = load_checkpoint(newest)["quarantined"]
        return kept

    return train_to


def test_cleared_chunks_are_read_again_by_the_next_resume(
    run: Callable[..., list[Any]], volume: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = run(8)
    assert kept
    capsys.readouterr()
    assert quarantine(["tiny"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[0] == f"run tiny: {len(kept)} damaged region{'s' * (len(kept) > 1)} in quarantine"
    assert len(listed) == 1 + len(kept)
    assert all(str(volume) in line and "chunk [1, 1, 1]: " in line for line in listed[1:])

    assert quarantine(["tiny", "--clear"]) == 0
    assert "cleared; the next --resume reads them again" in capsys.readouterr().out
    again = run(12, "--resume")
    assert f"retrying {len(kept)} of {len(kept)} unreadable regions" in capsys.readouterr().out
    assert {str(each["chunk"]) for each in again} == {"[1, 1, 1]"}, "the resume has met the chunk again"
    assert run(13, "--resume")[: len(again)] == again, "a later resume does not try it once more"

    (tmp_path / "whole").rename(volume / "1/1/1")
    assert quarantine(["tiny", "--clear"]) == 0
    assert quarantine(["tiny"]) == 0
    assert "run tiny: 0 damaged regions in quarantine" in capsys.readouterr().out
    assert run(14, "--resume") == []


def test_a_missing_run_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert quarantine(["nothing"]) == 13
    assert "no run 'nothing' in " in capsys.readouterr().err
