"""Buckets and repositories of the Hugging Face Hub: files through its redirects, listings through its pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import textured, write_ome
from tests.support.hub import hub_server
from tests.support.odd_server import Asked, objects_of, sized
from vesuvius.config import StoreConfig
from vesuvius.errors import DataError
from vesuvius.volumes.errors import OutageError, RefusedError
from vesuvius.volumes.occupancy import list_chunks
from vesuvius.volumes.store.source import Source
from vesuvius.volumes.volume import open_volume

FAST = StoreConfig(outage_minutes=0.02)
TOKEN = "hf_0123456789"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """A scroll with one absent chunk, and others whose names begin like its own."""
    voxels = textured((40, 40, 40))
    voxels[16:32, 16:32, 16:32] = 0
    write_ome(tmp_path / "s 1#.zarr", {"0": voxels, "1": voxels[::2, ::2, ::2]}, chunk=16)
    objects = objects_of(tmp_path, "")
    found = {key.removeprefix("/"): data for key, data in objects.items()}
    found |= {f"scans/{key}": data for key, data in found.items()}
    return found | {"scans/s 1#.zarr/01/0/0/0": b"", "scans/s 1#.zarr2/.zgroup": b"{}"}


def at(url: str, monkeypatch: pytest.MonkeyPatch, token: str | None = None) -> None:
    monkeypatch.setenv("HF_ENDPOINT", url)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)


@pytest.mark.parametrize(
    ("address", "root", "revision"),
    [
        ("buckets/owner/name", "buckets/owner/name", ""),
        ("datasets/owner/name@v1", "datasets/owner/name", "v1"),
        ("models/owner/name", "owner/name", "main"),
        ("spaces/owner/name", "spaces/owner/name", "main"),
    ],
)
def test_a_volume_on_the_hub_reads_and_lists_as_on_disk(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, root: str, revision: str
) -> None:
    busy = {"count": 0}

    def fault(asked: Asked) -> bytes | None:
        """Every third request for a page fails, as under a rate limit."""
        busy["count"] += asked.target.startswith("/api")
        return sized("429 Too Many Requests", b"") if busy["count"] % 3 == 2 and "/api" in asked.target else None

    with hub_server(files, root, revision, TOKEN, fault=fault) as (hub, network):
        at(hub.url, monkeypatch, TOKEN)
        there = open_volume(f"hf://{address}/scans/s 1#.zarr/", FAST)
        with there, open_volume(tmp_path / "s 1#.zarr") as here:
            np.testing.assert_array_equal(there[:], here[:])
            np.testing.assert_array_equal(list_chunks(there), list_chunks(here))
            keys = list(there.source.list_keys("0"))
            assert len(keys) == len(set(keys)) == 28  # 26 chunks and the metadata
            assert {key.split("/")[0] for key in keys} == {"0"}
        assert busy["count"] > 15
        assert {asked.headers["authorization"] for asked in hub.asked} == {f"Bearer {TOKEN}"}
        assert not any("authorization" in asked.headers for asked in network.asked)


def test_a_page_on_another_host_gets_no_token(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server(files) as (mirror, _):
        elsewhere = f'Link: <{mirror.url}/api/buckets/owner/name/tree/scans?cursor=0>; rel="next"'

        def fault(asked: Asked) -> bytes | None:
            return sized("200 OK", b"[]", elsewhere) if "/tree/scans" in asked.target else None

        with hub_server(files, token=TOKEN, fault=fault) as (hub, _):
            at(hub.url, monkeypatch, TOKEN)
            assert "s 1#.zarr2" in Source("hf://buckets/owner/name/scans", FAST).list_one_level("")[1]
        assert {asked.headers.get("authorization") for asked in mirror.asked} == {None}


def test_errors_of_a_bucket_name_the_cause(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server(files, token=TOKEN) as (hub, _):
        at(hub.url, monkeypatch)
        refused = r"The store refuses access: Server returned .*401 Unauthorized.*not signed: no HF_TOKEN"
        with pytest.raises(RefusedError, match=refused):
            open_volume("hf://buckets/owner/name/scans/s 1#.zarr", FAST)
        with pytest.raises(DataError, match=r"Cannot list the chunks of hf:.* 401: .*no HF_TOKEN"):
            Source("hf://buckets/owner/name/scans", FAST).list_one_level("")
        at(hub.url, monkeypatch, TOKEN)
        choice = r"a folder with s 1#.zarr, s 1#.zarr2; set path to hf://buckets/owner/name/scans/s 1#.zarr or "
        with pytest.raises(DataError, match=choice):
            open_volume("hf://buckets/owner/name/scans", FAST)
        with pytest.raises(DataError, match="it is neither a zarr array nor a group; set path"):
            open_volume("hf://buckets/owner/name/absent.zarr", FAST)
        with pytest.raises(DataError, match="patterns match folders of this machine only: list the addresses"):
            open_volume("hf://buckets/owner/name/*.zarr", FAST)


@pytest.mark.parametrize("body", [b"<html>", b'{"error": 1}', b"[1]", b"[{}]", b"[{}"])
def test_a_listing_that_is_none_or_ends_early_is_an_error(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    def fault(asked: Asked) -> Any:
        whole = sized("200 OK", body)
        return whole.replace(b"Content-Length: 3", b"Content-Length: 9") if "/api" in asked.target else None

    with hub_server(files, fault=fault) as (hub, _):
        at(hub.url, monkeypatch)
        error = OutageError if len(body) == 3 else RefusedError
        with pytest.raises(error, match=r"the listing (was interrupted|is not one of the Hub)"):
            list(Source("hf://buckets/owner/name/scans", FAST).list_keys(""))


@pytest.mark.parametrize(
    "address",
    [
        "hf://",
        "hf://owner/name/v",
        "hf://datasets/name",
        "hf://kernels/owner/name/v",
        "hf://buckets/owner",
        "hf://buckets/owner/name@main/v",
    ],
)
def test_other_addresses_of_the_hub_are_refused(address: str) -> None:
    forms = r"it is not hf://buckets/OWNER/NAME/PATH or hf://datasets/OWNER/NAME\[@REVISION\]/PATH \(also models/, sp"
    with pytest.raises(DataError, match=forms):
        Source(address, FAST)
    for path in ("a//v.zarr", "/a", "a/../v.zarr", "./a"):  # listed as another name than the one that is read
        with pytest.raises(DataError, match=r"an empty name between two slashes, or \. or \.\.; check the address"):
            Source(f"hf://buckets/owner/name/{path}", FAST)
