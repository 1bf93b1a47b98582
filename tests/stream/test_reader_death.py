"""Why a reader died, by Ray's account: killed from outside, or by Ray's own memory monitor, in real streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import textured
from tests.stream.test_stream import collect, make_job, open_stream
from tests.support.poison import poison, write_volume
from vesuvius.errors import DataError
from vesuvius.stream import events
from vesuvius.stream.ray import private, segment, watch
from vesuvius.stream.reading.reader_figures import BlockReport, Readers, ReaderTotals
from vesuvius.stream.stream import PatchStream


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    path = write_volume(tmp_path / "poisoned.zarr", textured((128, 128, 128)))
    poison(path, (1, 1, 1))
    return path


def died(stream: PatchStream) -> list[dict[str, Any]]:
    return [event.fields for event in stream.events if event.kind == "reader_died"]


@pytest.mark.long
@pytest.mark.usefixtures("ray_cluster")
def test_a_region_that_ends_its_reader_is_replaced_and_the_stream_goes_on(poisoned: Path) -> None:
    job = make_job(poisoned)
    with open_stream(job, workers=1) as stream:
        patches, indices = collect(stream, 60)
        deaths, records = died(stream), stream.quarantined
    assert indices.tolist() == list(range(240))
    assert len(deaths) == 2
    for fields in deaths:
        assert (fields["signal"], fields["volume"]) == ("Aborted", str(poisoned))
        assert fields["chunk"] == (1, 1, 1)
    assert records
    assert all(record["chunk"] == [1, 1, 1] and "killed two readers" in record["cause"] for record in records)
    with open_stream(job, quarantined=records) as stream:
        again, _ = collect(stream, 60)
        assert died(stream) == []
    assert again.tobytes() == patches.tobytes(), "a crash changes no voxel"


@pytest.mark.long
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("limit", [0, 1])
def test_more_deaths_than_allowed_end_the_stream_with_one_line(
    poisoned: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (events, segment):
        monkeypatch.setattr(module, "DEATHS_MAX", limit)
    for chunk in [(i, j, k) for i in range(4) for j in range(4) for k in range(4)]:
        poison(poisoned, chunk)
    with (
        open_stream(make_job(poisoned), workers=1 + limit) as stream,
        pytest.raises(DataError) as raised,
    ):
        collect(stream, 100)
    text = str(raised.value)
    assert f"{limit + 1} readers died in one session, more than the {limit} that are replaced" in text
    assert "poisoned.zarr" in text
    assert "Aborted, by its own account" in text
    assert "\n" not in text
    assert "\x1b" not in text


def test_a_reader_has_died_once_a_younger_process_of_its_actor_has_reported() -> None:
    """A task that was retried may come before one that the process before had done."""
    readers = Readers()

    def died(pid: int, actor: str = "a") -> tuple[int, str] | None:
        return readers.take(BlockReport(pid, "n", actor, float(pid), 1, ReaderTotals(blocks=1)), most=2)

    assert [died(pid) for pid in (1, 1, 3, 2, 3)] == [None, None, (1, "n"), (2, "n"), None]
    assert (set(readers.living), readers.totals.blocks) == ({3}, 5)
    assert [died(9, "b"), died(8, "c")] == [None, None], "another execution's"
    assert set(readers.living) == {9, 8}


def test_ray_s_account_is_cut_to_what_it_knows_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.2, ID: f00) was "
        "22.83GB used / 23.54GB limit (0.970000)\nOOM kill reason: Memory usage 24518215680B exceeded threshold of "
        "24012685312B (95.0% of 25276510208B limit)\nObject store memory usage: [- objects spillable: 0\n"
        "Selected to kill: (Actor(8b): job ID=01, pid=29987, actual memory used=9.99GB, worker ID=1), "
    )
    kept = "Memory usage 24518215680B exceeded threshold of 24012685312B (95.0% of 25276510208B limit)"
    assert private._detail(text) == kept
    assert private._detail("Worker exits.\nMore. Some common causes include: the OOM killer") == "Worker exits. More."
    monkeypatch.setattr(private, "worker_exits", lambda *_: 1 / 0)
    assert watch.exit_of(1, "") == {}, "no cause, and no error"
    assert watch.describe_death(1, "here", {}, None)[0].endswith("killed or died (Ray does not say why)")
