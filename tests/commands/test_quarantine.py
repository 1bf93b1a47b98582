"""`vesuvius quarantine`: what a run could not read is listed, tried again, cleared, and the next resume goes by it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import textured, write_array
from vesuvius.commands import quarantine, train
from vesuvius.runlog.records import JsonLines
from vesuvius.training.checkpoint.format import list_checkpoints, load_checkpoint
from vesuvius.training.quarantine import box_of, clear, read_quarantine, still_quarantined

BOX = ((0, 0, 0), (32, 32, 32))
OTHER_BOX = ((32, 0, 0), (64, 32, 32))


def record(box: Any, key: str = "box", **fields: Any) -> dict[str, Any]:
    return {"volume": "v.zarr", "number": 0, key: [list(corner) for corner in box], "chunk": [0, 0, 0]} | fields


def write(path: Path, *records: dict[str, Any]) -> None:
    lines = JsonLines(path)
    for each in records:
        lines.write("region", **each)
    lines.close()


@pytest.mark.parametrize("key", ["box", "region"])
def test_the_last_line_about_a_box_holds(tmp_path: Path, key: str) -> None:
    path = tmp_path / "quarantine.jsonl"
    assert read_quarantine(path) == []
    assert still_quarantined([record(BOX, key)], path) == [record(BOX, key)]
    write(path, record(BOX, key, cause="torn"), record(OTHER_BOX, key, cause="torn"))
    assert [box_of(found) for found in read_quarantine(path)] == [BOX, OTHER_BOX]
    clear(path, [record(BOX, key)])
    assert [box_of(found) for found in read_quarantine(path)] == [OTHER_BOX]
    of_checkpoint = [record(BOX, key), record(OTHER_BOX, key), record(BOX, key, number=1)]
    assert still_quarantined(of_checkpoint, path) == of_checkpoint[1:]
    write(path, record(BOX, key, cause="torn still"))
    assert {found["cause"] for found in read_quarantine(path)} == {"torn", "torn still"}
    assert still_quarantined(of_checkpoint, path) == of_checkpoint


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


def test_what_is_whole_again_is_cleared_and_the_next_resume_reads_it(
    run: Callable[..., list[Any]], volume: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = run(8)
    assert kept
    capsys.readouterr()
    assert quarantine.main(["tiny"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[0] == f"run tiny: {len(kept)} place{'s' * (len(kept) > 1)} in quarantine"
    assert len(listed) == 1 + len(kept)
    assert all(str(volume) in line and "chunk [1, 1, 1]: " in line for line in listed[1:])
    assert quarantine.main(["tiny", "--json"]) == 0
    assert [found["number"] for found in json.loads(capsys.readouterr().out)] == [0] * len(kept)

    assert quarantine.main(["tiny", "--retry"]) == 6, "it is torn still"
    assert f"0 of {len(kept)} can be read again" in capsys.readouterr().out
    (volume / "1/1/1").unlink()
    assert quarantine.main(["tiny", "--retry"]) == 6, "that it is absent now does not make it whole"
    (tmp_path / "whole").rename(volume / "1/1/1")
    assert quarantine.main(["tiny", "--retry"]) == 0
    assert f"{len(kept)} of {len(kept)} can be read again" in capsys.readouterr().out
    assert quarantine.main(["tiny"]) == 0
    assert "run tiny: 0 places in quarantine" in capsys.readouterr().out

    assert run(9, "--resume") == []
    assert f"{len(kept)} of {len(kept)} unreadable places are tried again" in capsys.readouterr().out


@pytest.mark.parametrize("whole", [True, False], ids=["restored", "gone"])
def test_of_a_shard_that_is_restored_air_is_no_damage(
    tiny_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    voxels = textured((96, 128, 128))
    voxels[:32, :32, :32] = 0
    volume = write_array(tmp_path / "sharded.zarr", voxels, zarr_format=3, shards=(64, 64, 64))
    shard = volume / "c/0/0/0"
    sound = shard.read_bytes()
    shard.write_bytes(sound[:-2] + b"no")
    config = tiny_config(data={"volumes": [{"path": str(volume)}]})
    assert train.main(["--config", str(config), "training.max_steps=8"]) == 0
    (found,) = read_quarantine(tmp_path / "runs/tiny/quarantine.jsonl")
    assert box_of(found) == ((0, 0, 0), (64, 64, 64))
    of_air = {key: found[key] for key in ("volume", "number", "box", "cause")} | {"chunk": [0, 0, 0]}
    write(tmp_path / "runs/tiny/quarantine.jsonl", of_air)  # it is chance which was met first
    shard.write_bytes(sound)
    if not whole:
        shard.unlink()
    assert quarantine.main(["tiny", "--retry"]) == (0 if whole else 6)


def test_a_retry_tells_what_is_found_now_and_what_it_cannot_look_at(
    run: Callable[..., list[Any]],
    volume: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = run(8)
    (volume / "1/1/1").unlink()
    capsys.readouterr()
    assert quarantine.main(["tiny", "--retry"]) == 6
    (*_, line) = capsys.readouterr().out.splitlines()
    assert line.endswith("listed as stored, but missing")
    assert kept[0]["cause"] not in line

    config = tmp_path / "runs/tiny/config.resolved.yaml"
    text = config.read_text()
    config.write_text(text.replace(str(volume), volume.name))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert quarantine.main([str(config.parent), "--retry"]) == 6
    assert f"{volume.name} does not exist in the folder {tmp_path / 'elsewhere'}; " in capsys.readouterr().err
    config.write_text(text)
    monkeypatch.chdir(tmp_path)

    shutil.rmtree(volume)
    write_array(volume, textured((32, 32, 32)))
    assert quarantine.main(["tiny", "--retry"]) == 2
    error = capsys.readouterr().err
    assert "of the quarantine does not lie inside" in error
    assert "clear it with --clear" in error


def test_what_is_cleared_and_torn_still_is_found_again_and_kept(
    run: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = run(8)
    assert quarantine.main(["tiny", "--clear"]) == 0
    assert "cleared; the next --resume reads them again" in capsys.readouterr().out.replace("place cleared", "cleared")
    again = run(16, "--resume")
    assert again, "the resume has met the chunk again"
    assert {str(each["chunk"]) for each in again} == {"[1, 1, 1]"}
    assert run(17, "--resume")[: len(again)] == again, "a later resume does not try it once more"
    assert kept


def test_a_run_that_is_not_there_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert quarantine.main(["nothing"]) == 13
    assert "RUN must be a run directory or a name below runs/; got 'nothing'" in capsys.readouterr().err


@pytest.mark.long
def test_a_chunk_of_a_coarser_condition_is_tried_again_where_it_lies(
    tiny_config: Callable[..., Path], volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    coarse = write_array(tmp_path / "coarse.zarr", textured((48, 64, 64), seed=1))
    config = tiny_config(data={"volumes": [{"path": str(volume), "condition": {"path": str(coarse)}}]})
    sound = (coarse / "0/1/1").read_bytes()
    (coarse / "0/1/1").write_bytes(b"torn")
    assert train.main(["--config", str(config), "training.max_steps=8"]) == 0
    (found,) = read_quarantine(tmp_path / "runs/tiny/quarantine.jsonl")
    assert box_of(found) == ((0, 64, 64), (64, 128, 128)), "in voxels of the volume"
    assert quarantine.main(["tiny", "--retry"]) == 6
    (coarse / "0/1/1").write_bytes(sound)
    assert quarantine.main(["tiny", "--retry"]) == 0
