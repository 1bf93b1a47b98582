"""Regions that cannot be read: others take their place, the same ones whoever reads, and a run says so and goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import run_vesuvius, textured, write_array
from tests.stream.test_stream import collect, make_job, open_stream
from tests.support.chunk_server import ChunkServer
from vesuvius.commands import train
from vesuvius.errors import DataError
from vesuvius.runlog.records import read_records
from vesuvius.stream.events import EventRecorder
from vesuvius.stream.reading.quarantine import parse_damaged_box
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.training.checkpoint.format import list_checkpoints, load_checkpoint
from vesuvius.volumes.box import intersects

SHAPE = (96, 128, 128)
BAD_CHUNK = ((32, 32, 32), (64, 64, 64))
BATCHES = 24


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return write_array(tmp_path / "sound.zarr", textured(SHAPE))


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    """The same voxels, with one chunk that cannot be decoded."""
    path = write_array(tmp_path / "torn.zarr", textured(SHAPE))
    (path / "1/1/1").write_bytes(b"torn")
    return path


def test_three_broken_chunks_are_logged_once_each(volume: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By readers that do not know of each other, in sixteen regions, and again after a resume."""
    broken = [
        {"number": 0, "volume": "v", "box": [[z, 0, 0], [z + 32, 32, 32]], "chunk": [z, 0, 0], "cause": "torn"}
        for z in (0, 32, 64)
    ]
    job = make_job(volume, max_quarantined=3)
    recorder = EventRecorder(job, [])
    for place in range(16):
        recorder.quarantine(broken[place % 3] | {"region": place})
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3
    assert len(recorder.events) == len(recorder.quarantined) == 3
    again = EventRecorder(job, recorder.quarantined)
    again.quarantine(broken[0])
    assert not again.events


def holds_bad_chunk(region: Any) -> bool:
    return intersects(region, BAD_CHUNK)


def stand_in(voxels: Any, job: ReaderJob, index: int) -> Any:
    """What comes for sample `index`: the patch of its first attempt whose region is readable."""
    samples = (job.plan.sample(index, attempt) for attempt in range(100))
    z, y, x = next(sample.start_zyx for sample in samples if not holds_bad_chunk(sample.region))
    return voxels[z : z + 8, y : y + 16, x : x + 16]


def patches_of(job: ReaderJob, **options: Any) -> tuple[bytes, list[dict[str, Any]]]:
    with open_stream(job, **options) as stream:
        patches, _ = collect(stream, BATCHES)
        return patches.tobytes(), stream.quarantined


def test_only_samples_of_unreadable_regions_are_replaced(sound: Path, torn: Path) -> None:
    job, voxels = make_job(torn), textured(SHAPE)
    with open_stream(make_job(sound)) as stream:
        expected, _ = collect(stream, BATCHES)
    with open_stream(job) as stream:
        patches, indices = collect(stream, BATCHES)
        records, events = stream.quarantined, list(stream.events)
    assert indices.tolist() == list(range(4 * BATCHES))
    replaced = {index for index in range(4 * BATCHES) if holds_bad_chunk(job.plan.sample(index).region)}
    assert 0 < len(replaced) < 3 * BATCHES
    for index, patch in enumerate(patches):
        if index in replaced:
            np.testing.assert_array_equal(patch, stand_in(voxels, job, index))
        else:
            np.testing.assert_array_equal(patch, expected[index])
    assert [event.kind for event in events] == ["quarantine"] * len(records)
    (record,) = records  # many regions touch it; what is damaged is one chunk
    assert parse_damaged_box(record, 1) == (0, BAD_CHUNK)
    assert (record["volume"], record["number"], record["chunk"]) == (str(torn), 0, [1, 1, 1])
    assert "Error" in record["cause"]


# Few regions, of which many hold the chunk: a substitute often holds it too.


def test_a_passed_on_quarantine_gives_the_same_bytes_without_reading_again(server: ChunkServer, torn: Path) -> None:
    job = make_job(server.url_of(torn))
    expected, records = patches_of(job)
    assert server.asked_for(torn)["1/1/1"] > 0
    server.reset()
    patches, again = patches_of(job, quarantined=records)
    assert patches == expected
    assert again == records
    assert server.asked_for(torn)["1/1/1"] == 0


@pytest.mark.parametrize("limit", [0, 2])
def test_more_damage_than_allowed_ends_the_stream(torn: Path, limit: int) -> None:
    for chunk in ("1/1/2", "0/1/1"):
        (torn / chunk).write_bytes(b"torn")
    with (
        open_stream(make_job(torn, max_quarantined=limit)) as stream,
        pytest.raises(
            DataError,
            match=rf" {limit + 1} damaged chunks, .*data.max_quarantined={limit}; .*torn.zarr.*chunk \[\d, 1, \d\]",
        ) as caught,
    ):
        collect(stream, 100)
    assert caught.value.exit_code == 6


# ---- through the door


@pytest.fixture
def torn_volume(volume: Path) -> Path:
    """The volume of `tiny_config`, with one chunk that cannot be decoded."""
    (volume / "1/1/1").write_bytes(b"torn")
    return volume


def records_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "quarantine.jsonl").read_text().splitlines()]


def test_a_run_continues_past_an_unreadable_chunk_and_its_resume_knows_it(
    tiny_config: Callable[..., Path], torn_volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = tiny_config(), tmp_path / "runs" / "tiny"
    result = run_vesuvius("train", "--config", config, "training.max_steps=12", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "cannot be read: " in result.stderr
    records = records_of(run)
    assert records
    for record in records:
        assert record["volume"] == str(torn_volume)
        assert record["chunk"] == [1, 1, 1]
        assert holds_bad_chunk(record["box"])
        assert record["cause"]
    metrics = read_records(run / "metrics.jsonl")
    events = [record for record in metrics if record["kind"] == "event"]
    assert [event["box"] for event in events] == [record["box"] for record in records]
    assert [record["step"] for record in metrics if record["kind"] == "step"] == list(range(1, 13))

    monkeypatch.chdir(tmp_path)
    kept = load_checkpoint(list_checkpoints(run / "checkpoints")[-1])["quarantined"]
    assert [record["box"] for record in kept] == [record["box"] for record in records]
    (torn_volume / "1/1/1").unlink()  # air from now on: only the list keeps its regions out
    assert train.main(["--config", str(config), "--resume", "training.max_steps=20"]) == 0
    assert records_of(run) == records
    assert load_checkpoint(list_checkpoints(run / "checkpoints")[-1])["quarantined"] == kept
