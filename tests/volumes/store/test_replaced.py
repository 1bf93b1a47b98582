"""Replaced objects: no old voxel in a later run, and no mixture of two versions of an object."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping
from email.utils import formatdate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import textured, write_array
from tests.support.odd_server import objects_of, serving
from tests.support.s3 import upload
from vesuvius.config import StoreConfig
from vesuvius.volumes.errors import RefusedError
from vesuvius.volumes.store import source
from vesuvius.volumes.volume import Volume, open_volume

OLD, NEW = textured((32, 32, 32)), textured((32, 32, 32), seed=1)
LAYOUTS: dict[str, dict[str, Any]] = {
    "chunks": {"compressors": None},
    "shards": {"zarr_format": 3, "shards": (32, 32, 32), "compressors": None},  # of equal size, without checksums
}


def etag(body: bytes) -> str:
    return f'"{zlib.crc32(body):08x}"'


def time_of(body: bytes) -> str:
    return formatdate(1.7e9 + zlib.crc32(body) % 10**7, usegmt=True)


HEADERS: dict[str, Callable[[bytes], Mapping[str, str]]] = {
    "etag": lambda body: {"ETag": etag(body), "Last-Modified": formatdate(1.7e9, usegmt=True)},
    "time only": lambda body: {"Last-Modified": time_of(body)},
    "neither": lambda body: {},
}
_requests = itertools.count()
# Servers that take turns behind one address, each with its own ETags.
BALANCED: dict[str, Callable[[bytes], Mapping[str, str]]] = {
    "etags of 2 servers": lambda body: {"ETag": f'"{next(_requests) % 2}-{zlib.crc32(body):08x}"'},
    "etags of 3 servers": lambda body: {"ETag": f'"{next(_requests) % 3}-{zlib.crc32(body):08x}"'},
}
HALF = ((0, 0, 0), (32, 32, 16))
WHOLE = ((0, 0, 0), (32, 32, 32))


def opened(address: str, cache: Path | None) -> Volume:
    store = StoreConfig(cache_dir=str(cache) if cache else None, cache_gib=0.1, outage_minutes=0.01)
    return open_volume(address, store)


def read(address: str, cache: Path, box: Any = WHOLE) -> tuple[Any, Any]:
    volume = opened(address, cache)
    try:
        return volume.read(box), volume.source.stats
    finally:
        volume.close()


@pytest.mark.parametrize("headers", HEADERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_returns_the_current_version(tmp_path: Path, layout: str, headers: str) -> None:
    versions = [
        objects_of(write_array(tmp_path / n, v, 16, **LAYOUTS[layout]), "/v") for n, v in (("a", OLD), ("b", NEW))
    ]
    objects = dict(versions[0])
    with serving(objects, head=405, headers=HEADERS[headers]) as web:
        np.testing.assert_array_equal(read(f"{web}/v", tmp_path / "cache", HALF)[0], OLD[:, :, :16])
        same, figures = read(f"{web}/v", tmp_path / "cache", HALF)
        np.testing.assert_array_equal(same, OLD[:, :, :16])
        if headers == "etag":
            assert figures.cache_misses == 0
        else:
            assert figures.cache_hits == 0, "what cannot be checked is not kept: a second holds several versions"
        objects |= versions[1]
        np.testing.assert_array_equal(read(f"{web}/v", tmp_path / "cache")[0], NEW)
        chunk = next(key for key in objects if key.endswith(("/0.0.0", "/0/0/0")))
        objects[chunk] = versions[0][chunk]
        part, _ = read(f"{web}/v", tmp_path / "cache", ((0, 0, 0), (16, 16, 16)))
        np.testing.assert_array_equal(part, OLD[:16, :16, :16])
        if layout == "chunks":
            del objects[chunk]
            part, _ = read(f"{web}/v", tmp_path / "cache", ((0, 0, 0), (16, 16, 16)))
            assert not part.any(), "what is gone from the store is not kept either"


@pytest.mark.long
def test_the_cache_checks_object_stores_too(tmp_path: Path, s3: Any) -> None:
    for name, voxels in (("a", OLD), ("b", NEW)):
        path = write_array(tmp_path / name, voxels, 16, **LAYOUTS["shards"])
        address = upload(s3, path, "public", f"{tmp_path.name}/v")
        for box in (HALF, WHOLE):
            found, _ = read(address, tmp_path / "cache", box)
            np.testing.assert_array_equal(found, voxels[: box[1][0], : box[1][1], : box[1][2]])


@pytest.mark.parametrize(("headers", "cached"), [("etag", True), ("time only", False), ("etags of 2 servers", False)])
@pytest.mark.parametrize("remembered", [0, 100])
def test_a_shard_replaced_during_a_read_is_one_version_or_the_other(
    tmp_path: Path, headers: str, cached: bool, remembered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks have other offsets in the new version: the old index would return another chunk's voxels."""
    monkeypatch.setattr(source, "_STAMPS_MAX", remembered)  # as in a volume of more objects
    old = write_array(tmp_path / "a", OLD, 16, **LAYOUTS["shards"])
    moved = OLD.copy()
    moved[:16, :16, :16] = 0  # not stored, so that the offsets of all others change
    new = write_array(tmp_path / "b", np.where(moved > 0, NEW, 0).astype("u1"), 16, **LAYOUTS["shards"])
    corners = list(itertools.product((0, 16), (0, 16), (0, 16)))[1:]
    boxes = [(corner, tuple(c + 16 for c in corner)) for corner in corners]
    kinds = set()
    for after in (1, 5):
        objects = objects_of(old, "/v")
        with serving(objects, headers=(HEADERS | BALANCED)[headers]) as web:
            volume = opened(f"{web}/v", tmp_path / f"cache{after}" if cached else None)
            for number, box in enumerate(boxes):
                if number == after:
                    objects |= objects_of(new, "/v")
                found, at = volume.read(box), tuple(slice(c, c + 16) for c in box[0])
                versions = [np.array_equal(found, version[at]) for version in (OLD, NEW)]
                assert any(versions), "voxels of another chunk"
                kinds.add((number >= after, versions.index(True)))
            volume.close()
    assert kinds == {(False, 0), (True, 1)}


@pytest.mark.parametrize("headers", BALANCED)
def test_etags_that_differ_per_server_are_not_damage(tmp_path: Path, headers: str) -> None:
    objects = objects_of(write_array(tmp_path / "a", OLD, 16, **LAYOUTS["shards"]), "/v")
    with serving(objects, headers=BALANCED[headers]) as web:
        volume = opened(f"{web}/v", None)
        for start in (0, 16) * 3:
            np.testing.assert_array_equal(volume.read(((start, 0, 0), (start + 16, 32, 16))), OLD[start:][:16, :, :16])
        assert volume.source.stats.retries == 0
        volume.close()


def test_an_object_with_a_new_etag_at_each_request_is_refused_not_damaged(tmp_path: Path) -> None:
    objects = objects_of(write_array(tmp_path / "a", OLD, 16, **LAYOUTS["shards"]), "/v")
    with serving(objects, headers=lambda body: {"ETag": f'"{next(_requests)}"'}) as web:
        volume = opened(f"{web}/v", None)
        words = r"c/0/0/0 was replaced .* or its server sends ETags or dates that"
        with pytest.raises(RefusedError, match=rf"{words}.* 3 times in a row: http.* is being written"):
            volume.read(((16, 0, 0), (32, 16, 16)))
        volume.close()


def test_a_whole_shard_is_split_by_its_own_index(tmp_path: Path) -> None:
    """An older index is still cached from a partial read."""
    hollow = OLD.copy()
    hollow[:16, :16, :16] = 0  # not stored, so that all chunks have other offsets
    old, new = (write_array(tmp_path / n, v, 16, **LAYOUTS["shards"]) for n, v in (("a", hollow), ("b", NEW)))
    with serving(objects := objects_of(old, "/v"), headers=HEADERS["etag"]) as web:
        for cache in (None, tmp_path / "cache"):
            objects |= objects_of(old, "/v")
            volume = opened(f"{web}/v", cache)
            np.testing.assert_array_equal(volume.read(HALF), hollow[:, :, :16])
            objects |= objects_of(new, "/v")
            np.testing.assert_array_equal(volume.read(WHOLE), NEW)
            np.testing.assert_array_equal(volume.read(HALF), NEW[:, :, :16])
            volume.close()
