"""Reads are retried during an outage, which is logged and ends in one message; refusals are not retried."""

from __future__ import annotations

import errno
import logging
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import textured, write_array
from tests.support.chunk_server import ChunkServer
from vesuvius.config import ArrayConfig, StoreConfig
from vesuvius.volumes.errors import FetchError, OutageError, RefusedError
from vesuvius.volumes.store import source as store_source
from vesuvius.volumes.store.objects import ByteRange
from vesuvius.volumes.store.source import Source
from vesuvius.volumes.volume import open_volume

FAST = StoreConfig(outage_minutes=0.02)
PATIENT = StoreConfig(outage_minutes=10)
DATA = bytes(range(256))


@pytest.fixture
def address(server: ChunkServer, tmp_path: Path) -> str:
    """A folder with the object `data` behind a web server."""
    (tmp_path / "data").write_bytes(DATA)
    return server.url_of(tmp_path)


def source_at(address: str, config: StoreConfig = FAST) -> Source:
    """A source whose store has answered before."""
    return Source(address, config, has_answered=True)


def test_an_outage_is_retried_until_it_ends(
    server: ChunkServer, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.set_faults([{"path": "data", "kind": "status", "status": 429, "times": 40}])
    source = source_at(address, StoreConfig(outage_minutes=1))
    with caplog.at_level(logging.INFO):
        assert source.get("data") == DATA
    assert source.stats.retries == 40
    assert source.outage is None
    assert not caplog.records, "a blip is not worth a line"


def test_a_long_outage_ends_with_its_start_cause_and_remedy(server: ChunkServer, address: str) -> None:
    server.set_faults([{"path": "data", "kind": "status", "status": 500}])
    began = time.monotonic()
    with pytest.raises(OutageError) as caught:
        source_at(address).get("data")
    assert 1.2 <= time.monotonic() - began < 5
    text = str(caught.value)
    assert text.startswith("Cannot reach the store: Server returned non-2xx ")
    for words in (
        "500 Internal Server Error",
        f"attempts of data in {address}), since 20",
        "outage_minutes=0.02; ",
        "--resume",
    ):
        assert words in text
    assert "\n" not in text
    assert caught.value.exit_code == 6


def test_an_outage_is_visible_while_it_lasts(server: ChunkServer, address: str) -> None:
    server.set_faults([{"path": "data", "kind": "status", "status": 503}])
    source = source_at(address, PATIENT)
    before = time.time()
    reads = [source.submit("data") for _ in range(3)]
    while source.stats.retries < 6:
        time.sleep(0.01)
    first = source.outage
    assert first is not None
    assert before <= first.since <= time.time()
    assert "503" in first.cause
    assert first.address == address
    time.sleep(0.2)
    assert source.outage is not None
    assert source.outage.since == first.since, "the oldest read that fails says since when"
    server.set_faults([])
    assert [read.result(5) for read in reads] == [DATA] * 3
    assert source.outage is None


def test_an_outage_is_logged_every_minute_and_at_its_end(
    server: ChunkServer, address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_source, "_LOG_AFTER_S", 0.3)
    monkeypatch.setattr(store_source, "_LOG_EVERY_S", 1.0)
    server.set_faults([{"path": "data", "kind": "status", "status": 503}])
    source = source_at(address, PATIENT)
    with caplog.at_level(logging.INFO):
        reads = [source.submit("data") for _ in range(8)]
        time.sleep(2.0)
        server.set_faults([])
        assert [read.result(5) for read in reads] == [DATA] * 8
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 2, "eight reads fail, with one log line per second, the first after 0.3 s"
    for line in warnings:
        assert line.startswith(f"{address} has not answered since 20")
        assert "503 Service Unavailable (for " in line
    (info,) = [r.getMessage() for r in caplog.records if r.levelname == "INFO"]
    assert re.fullmatch(rf"{address} responds again after [23][\d.]* s", info)


def test_a_store_that_never_answered_is_given_up_early(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_source, "_FIRST_ANSWER_S", 0.3)
    monkeypatch.setattr(store_source, "_LOG_AFTER_S", 0.0)
    began = time.monotonic()
    with pytest.raises(
        OutageError, match=r"Cannot reach the store: Connection refused .*; check the address"
    ) as caught:
        open_volume("http://127.0.0.1:1/v.zarr", PATIENT)
    assert time.monotonic() - began < 5
    assert "\n" not in str(caught.value)
    assert "retrying for up to 0.3 s, because it has never answered: check the address" in caplog.messages[0]


# ---- what is refused


@pytest.mark.parametrize("status", [401, 403, 501])
def test_a_refusal_is_not_retried_and_is_not_damage(server: ChunkServer, address: str, status: int) -> None:
    server.set_faults([{"path": "data", "kind": "status", "status": status}])
    remedy = "anything between you" if status == 501 else "credentials"
    with pytest.raises(RefusedError, match=rf"{status} .* for data in {address}.*{remedy}"):
        source_at(address).get("data")
    assert sum(server.stats()["paths"].values()) == 1


def test_a_store_that_forbids_absent_keys_can_be_read(server: ChunkServer, tmp_path: Path) -> None:
    """As in S3 without permission to list: 403 for every absent key, including `zarr.json` next to `.zarray`."""
    path = write_array(tmp_path / "v.zarr", textured((64, 64, 64)))
    (path / "0/0/1").unlink()
    stored = "|".join(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    server.set_faults([{"path": rf"/v\.zarr/(?!({stored})$)", "kind": "status", "status": 403}])
    spec, box = ArrayConfig(path=server.url_of(path)), ((0, 0, 0), (64, 64, 64))
    with pytest.raises(RefusedError, match="forbidden_is_absent"):
        open_volume(spec, FAST).read(box)
    expected = textured((64, 64, 64))
    expected[:32, :32, 32:] = 0
    read = open_volume(spec, FAST.model_copy(update={"forbidden_is_absent": True})).read(box)
    np.testing.assert_array_equal(read, expected)


def test_a_range_beyond_the_end_is_damage_not_an_outage(server: ChunkServer, address: str, tmp_path: Path) -> None:
    for place in (address, str(tmp_path)):
        with pytest.raises(FetchError, match="bytes 200 to 300 are outside an object of 256"):
            source_at(place).get("data", ByteRange(200, 300))


# ---- a mount


class Flaky:
    """`Path.open` on an unavailable file system: fails with an errno until the system is back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, only: str = "") -> None:
        self.away, real = True, Path.open

        def opened(path: Path, *args: Any, **options: Any) -> Any:
            if self.away and only in str(path):
                raise OSError(number, "of the file system")
            return real(path, *args, **options)

        monkeypatch.setattr(Path, "open", opened)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_an_unavailable_mount_is_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    (tmp_path / "data").write_bytes(DATA)
    source = source_at(str(tmp_path), PATIENT)
    mount = Flaky(monkeypatch, number)
    read = source.submit("data")
    while source.stats.retries < 3:
        time.sleep(0.01)
    assert source.outage is not None
    mount.away = False
    assert read.result(5) == DATA


def test_a_bad_sector_under_one_chunk_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata are readable, so retries for an hour would not help."""
    (tmp_path / "data").write_bytes(DATA)
    (tmp_path / ".zarray").write_text("{}")
    source = source_at(str(tmp_path), PATIENT)
    Flaky(monkeypatch, errno.EIO, only="data")
    with pytest.raises(FetchError, match="of the file system for data"):
        source.get("data")


def test_a_file_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_bytes(DATA)
    Flaky(monkeypatch, errno.EACCES)
    with pytest.raises(RefusedError, match=r"Cannot read a file of the volume: .*correct its permissions"):
        source_at(str(tmp_path)).get("data")
