"""Bytes by key, from a folder, a web server and an object store: ranges, absence, refusals, retries and listings."""

from __future__ import annotations

import base64
import errno
import itertools
import os
import time
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus, urlsplit

import numpy as np
import pytest

from tests.conftest import textured, write_array
from tests.stream.test_stream import collect, make_job, open_stream
from tests.support.chunk_server import ChunkServer
from tests.support.odd_server import odd_server, serving, sized
from tests.support.s3 import upload
from tests.volumes.test_volume import LAYOUTS
from vesuvius.config import StoreConfig
from vesuvius.errors import DataError
from vesuvius.volumes.errors import ClosedError, UnreadableChunkError
from vesuvius.volumes.occupancy import list_chunks
from vesuvius.volumes.store import source as store_source
from vesuvius.volumes.store.objects import ByteRange
from vesuvius.volumes.store.source import Source
from vesuvius.volumes.volume import open_volume

FAST = StoreConfig(outage_minutes=0.01)
DATA = bytes(range(256)) * 4


@pytest.fixture(params=["disk", "http", "s3"])
def source(request: pytest.FixtureRequest, tmp_path: Path, server: ChunkServer, s3: Any) -> Source:
    """A store with the object `a/data`."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/data").write_bytes(DATA)
    addresses = {
        "disk": lambda: str(tmp_path),
        "http": lambda: server.url_of(tmp_path),
        "s3": lambda: upload(s3, tmp_path, "public", tmp_path.name),
    }
    return Source(addresses[request.param](), FAST)


def test_objects_and_ranges_are_read_and_absent_ones_are_none(source: Source) -> None:
    assert source.get("a/data") == DATA
    assert source.get("a/data", ByteRange(3, 20)) == DATA[3:20]
    assert source.get("a/data", ByteRange(-7)) == DATA[-7:]
    for key in ("a/none", "none/data", *(["a"] if source.remote else [])):
        assert source.get(key) is None
        assert source.get(key, ByteRange(-7)) is None
    assert source.submit("a/data", ByteRange(0, 2)).result() == DATA[:2]
    assert source.exists("a/data")
    assert source.absent(["a/none", "a/data", "b"]) == ["a/none", "b"]
    assert source.stats.retries == 0
    assert source.stats.bytes_fetched == 1024 + 17 + 7 + 2


@pytest.mark.parametrize("kind", ["reset", "truncate", "stall"])
def test_a_truncated_body_is_never_accepted(server: ChunkServer, tmp_path: Path, kind: str) -> None:
    (tmp_path / "data").write_bytes(DATA * 1000)
    source = Source(server.url_of(tmp_path), FAST)
    server.set_faults([{"path": "data", "kind": kind, "times": 2}])
    assert source.get("data") == DATA * 1000
    assert source.stats.retries == 2
    assert source.stats.bytes_fetched == len(DATA) * 1000


def test_a_closed_source_neither_waits_nor_retries(
    server: ChunkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process exits when its threads do, so a pause must not delay it."""
    monkeypatch.setattr(store_source, "_FIRST_PAUSE_S", 1000.0)
    source = Source(server.url_of(tmp_path), StoreConfig(requests=1, outage_minutes=1000))
    server.set_faults([{"path": "data", "kind": "status"}])
    trying, waiting = source.submit("data"), source.submit("data")
    while not source.stats.retries:
        time.sleep(0.01)
    source.close()
    with pytest.raises(ClosedError):
        trying.result(timeout=5)
    with pytest.raises(CancelledError):
        waiting.result(timeout=5)
    with pytest.raises(ClosedError):
        source.submit("data")
    assert server.asked_for(tmp_path) == {"data": 1}


def test_reads_are_concurrent_up_to_the_limit(server: ChunkServer, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(DATA)
    server.set_faults([{"path": "data", "kind": "delay", "delay_s": 0.1}])
    source = Source(server.url_of(tmp_path), StoreConfig(requests=6))
    futures = [source.submit("data", ByteRange(n, n + 1)) for n in range(24)]
    assert b"".join(future.result() or b"" for future in futures) == DATA[:24]
    assert server.stats()["max_in_flight"] == 6


# ---- addresses

ADDRESSES = [
    (
        "ftp://host/v.zarr",
        "Cannot open ftp://host/v.zarr: ftp is not http, https, hf, s3, gs, az in lower case",
    ),
    ("s3://", "Cannot open s3://: no bucket; check the address and the variables AWS_"),
    ("http://", "Cannot open http://: .*; check the address"),
    ("s3://bucket//scan", "Cannot open s3://bucket//scan: an empty name between two slashes"),
    ("s3://bucket/a/../b", r"Cannot open s3://bucket/a/\.\./b: "),
]


@pytest.mark.parametrize(("address", "message"), ADDRESSES)
def test_malformed_addresses_are_refused_in_one_line(address: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        open_volume(address)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


# ---- names

NAMES = ["scan#1", "q?v=2", "p%20q", 'é [z]{y}|^`"<>*\\z']


def decoys(name: str) -> set[str]:
    """Names that a program could produce if it parsed the name as part of a URL."""
    parts = urlsplit(f"s3://bucket/{name}").path[1:]
    return {parts, unquote(name), unquote_plus(name), quote(name), quote_plus(name)} - {name, ""}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("where", "name"), [*(("s3", name) for name in NAMES), *(("file", name) for name in NAMES)])
def test_names_with_any_characters_are_opened_and_printed_literally(
    tmp_path: Path, s3: Any, where: str, name: str
) -> None:
    right, wrong = textured((32, 32, 32)), 255 - textured((32, 32, 32))
    path = write_array(tmp_path / name, right)
    for decoy in decoys(name):
        write_array(tmp_path / decoy, wrong)
    root = upload(s3, tmp_path, "public", tmp_path.name) if where == "s3" else str(tmp_path)
    for address in [f"{root}/{name}/"] if where == "s3" else [f"file://{quote(str(path), '/#?')}", str(path)]:
        volume = open_volume(address, FAST)
        np.testing.assert_array_equal(volume.read(((0, 0, 0), (32, 32, 32))), right)
        assert list_chunks(volume).all()
        assert volume.name.rstrip("/") == f"{root}/{name}"


TARGETS = {
    "/v.zarr": "/v.zarr/.zarray",
    "/a//v": "/a//v/.zarray",
    "/p%20q": "/p%20q/.zarray",
    "/é": "/%C3%A9/.zarray",
    "/v#1": "/v%231/.zarray",
    "/v?sig=a%2Fb+c&e=1": "/v/.zarray?sig=a%2Fb+c&e=1",
}


@pytest.mark.parametrize("address", TARGETS)
def test_a_web_address_is_sent_as_written_with_its_query_after_each_key(address: str) -> None:
    with odd_server(lambda asked: sized("200 OK", b"ab")) as server:
        source = Source(server.url.replace("//", "//me:se%20cret@") + address, FAST)
        assert source.get(".zarray") == b"ab"
    assert {asked.target for asked in server.asked} == {TARGETS[address]}
    expected = "Basic " + base64.b64encode(b"me:se cret").decode()
    assert {asked.headers.get("authorization") for asked in server.asked} == {expected}
    assert "se%20cret" not in source.display_address
    assert "sig" not in source.display_address


def test_a_volume_on_s3_streams_and_lists_as_on_disk(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_array(tmp_path / "v.zarr", textured((96, 128, 128)), **LAYOUTS["v3-sharded"])
    (path / "c/1/1/1").unlink()
    with open_stream(make_job(path)) as stream:
        expected, _ = collect(stream, 8)
    address = upload(s3, path, "private", f"{tmp_path.name}/v.zarr")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with open_stream(make_job(address, store=FAST)) as stream:
        patches, _ = collect(stream, 8)
        assert not stream.events
    np.testing.assert_array_equal(patches, expected)
    occupancy = list_chunks(open_volume(address, FAST))
    np.testing.assert_array_equal(occupancy, list_chunks(open_volume(path)))
    assert 0 < occupancy.sum() < occupancy.size


# ---- listings


@pytest.mark.parametrize("source", ["disk", "s3"], indirect=True)
def test_a_listing_contains_the_keys_below_a_prefix_of_whole_segments(source: Source, tmp_path: Path, s3: Any) -> None:
    for key in ("1/2/3", "1/20", "10/2", "1.x"):
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(b"")
    if source.remote:
        upload(s3, tmp_path, "public", tmp_path.name)
    files, folders = source.list_one_level("")
    assert (files, sorted(folders)) == (["1.x"], ["1", "10", "a"])
    of_folders = set() if source.remote else {"1", "1/2", "10", "a"}
    assert sorted(set(source.list_keys("1")) - of_folders) == ["1/2/3", "1/20"]
    assert sorted(set(source.list_keys("")) - of_folders) == ["1.x", "1/2/3", "1/20", "10/2", "a/data"]
    assert list(source.list_keys("none")) == []


@pytest.mark.parametrize("source", ["disk"], indirect=True)
def test_a_folder_that_fails_during_a_listing_is_an_error(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b").mkdir()
    scandir = os.scandir

    def stale(path: Any) -> Any:
        if Path(path).name == "b":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return scandir(path)

    for prefix, words in (("", "Stale file handle"), ("a/data", "Not a directory")):
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", stale)
            with pytest.raises(DataError, match=rf"Cannot list the chunks of .*{words}"):
                list(itertools.islice(source.list_keys(prefix), 1000))


def test_links_to_slabs_on_other_disks_are_listed_and_read(tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", textured((96, 64, 64)))
    (tmp_path / "disk2").mkdir()
    (path / "1").rename(tmp_path / "disk2/slab")
    (path / "1").symlink_to(tmp_path / "disk2/slab")
    volume = open_volume(path)
    assert list_chunks(volume).all()
    np.testing.assert_array_equal(volume.read(((0, 0, 0), (96, 64, 64))), textured((96, 64, 64)))


@pytest.mark.parametrize("layout", ["v2", "v3-sharded"])
def test_a_slab_on_an_unmounted_disk_is_an_error_not_air(tmp_path: Path, layout: str) -> None:
    path = write_array(tmp_path / "v.zarr", textured((96, 64, 64)), **LAYOUTS[layout])
    slab = path / {"v2": "1", "v3-sharded": "c/1"}[layout]
    slab.rename(tmp_path / "unmounted")
    slab.symlink_to(tmp_path / "disk2/slab")
    volume = open_volume(path)
    with pytest.raises(DataError, match=f"{slab} is a broken link, not a folder of chunks; mount the"):
        list_chunks(volume)
    box = ((64, 0, 0), (96, 64, 64)) if layout == "v3-sharded" else ((32, 0, 0), (64, 64, 64))
    with pytest.raises(UnreadableChunkError, match=f"{slab} is a broken link"):
        volume.read(box)
    slab.unlink()
    slab.write_bytes(b"")
    with pytest.raises(UnreadableChunkError, match=f"{slab} is a file, not a folder"):
        volume.read(box)


@pytest.mark.parametrize("source", ["http"], indirect=True)
def test_listing_a_web_server_is_an_error_with_a_remedy(source: Source) -> None:
    for listing in (lambda: list(source.list_keys("a")), lambda: source.list_one_level("a")):
        with pytest.raises(
            DataError, match=r"web servers cannot be listed; put a `.chunk_occupancy.npz` next to level 0, or set data"
        ):
            listing()


@pytest.mark.parametrize("answer", [404, 405])
def test_existence_does_not_depend_on_the_answer_to_head(answer: int) -> None:
    """A program that uses HEAD, or treats a refusal of HEAD as absence, fails."""
    with serving({"/data": b"x" * 9, "/empty": b"", "/whole": b"y" * 9}, head=answer, no_ranges={"/whole"}) as address:
        source = Source(address, FAST)
        assert source.absent(["data", "empty", "whole", "none"]) == ["none"]
