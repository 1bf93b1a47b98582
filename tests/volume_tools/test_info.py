"""The facts about a volume, compared with independent counts and computations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs
import numpy as np
import pytest
import zarr

from tests.conftest import STORED_AIR, textured, write_array, write_ome
from tests.support.chunk_server import ChunkServer
from vesuvius.config import ArrayConfig, StoreConfig
from vesuvius.errors import ConfigError, DataError, StorageError
from vesuvius.volume_tools.info import VolumeFacts, describe_codecs, describe_volume, make_sidecar
from vesuvius.volume_tools.verify import verify_volume
from vesuvius.volumes.volume import open_volume

QUICK = StoreConfig(outage_minutes=0)
BOX = (16, 16, 16)  # one chunk, whose intensities are then read whole


def look(path: object, level: int = 0, **options: Any) -> VolumeFacts:
    return describe_volume(ArrayConfig(path=str(path), level=level), QUICK, box_zyx=BOX, **options)


def write_pyramid(path: Path, voxels: np.ndarray[Any, Any], levels: int = 2, **options: Any) -> Path:
    """An OME-Zarr with levels 0, 1, ... as in real scrolls; 16^3 chunks."""
    stored = {str(k): voxels[:: 2**k, :: 2**k, :: 2**k] for k in range(levels)}
    return write_ome(path, stored, chunk=16, entry={"name": "tiny"}, **options)


def test_levels_are_described_correctly(tmp_path: Path) -> None:
    facts = look(write_pyramid(tmp_path / "v.zarr", textured((48, 64, 80), dtype="uint16")), level=1)
    assert (facts.ome_version, facts.title, facts.axes) == ("0.4", "tiny", ("z", "y", "x"))
    assert [level.shape for level in facts.levels] == [(48, 64, 80), (24, 32, 40)]
    assert [level.raw_bytes for level in facts.levels] == [48 * 64 * 80 * 2, 24 * 32 * 40 * 2]
    assert facts.chosen == facts.levels[1]
    assert (facts.chosen.path, facts.chosen.chunk_zyx, facts.chosen.shard_zyx) == ("1", (16, 16, 16), None)
    assert (facts.chosen.dtype, facts.zarr_format) == ("uint16", 2)
    assert (facts.chosen.scale_zyx, facts.chosen.unit) == ((4.8, 4.8, 4.8), "micrometer")


def test_a_level_that_cannot_be_opened_does_not_hide_the_others(tmp_path: Path) -> None:
    path = write_pyramid(tmp_path / "v.zarr", textured((48, 64, 80)))
    (path / "1" / ".zarray").unlink()
    facts = look(path)
    assert [level.path for level in facts.levels] == ["0"]
    ((broken, reason),) = facts.broken.items()
    assert broken == "1"
    assert "is not there" in reason


CODECS: list[tuple[dict[str, Any], str]] = [
    ({"compressors": numcodecs.Blosc("lz4", 5, shuffle=1)}, "blosc(cname=lz4, clevel=5, shuffle=1, blocksize=0)"),
    ({"compressors": None}, "none"),
    ({"zarr_format": 3, "compressors": zarr.codecs.GzipCodec(level=7)}, "bytes(), gzip(level=7)"),
]


@pytest.mark.parametrize(("options", "words"), CODECS, ids=[words for *_, words in CODECS])
def test_codecs_are_described_with_their_settings(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    path = write_array(tmp_path / "v.zarr", textured((32, 32, 32)), **options)
    assert describe_codecs(open_volume(path).array) == words


def test_the_sidecar_is_used_unless_a_listing_is_requested(tmp_path: Path) -> None:
    path = write_pyramid(tmp_path / "v.zarr", textured((48, 48, 48)))
    made, occupancy = make_sidecar(ArrayConfig(path=str(path)), None)
    assert made == path / "0" / ".chunk_occupancy.npz"
    assert (occupancy.total, occupancy.present) == (27, 27)
    (path / "0" / "0" / "0" / "0").unlink()
    facts, listed = look(path).occupancy, look(path, listing=True).occupancy
    assert (facts.present, facts.source) == (27, "sidecar")
    assert (listed.present, listed.source) == (26, "listing")


def test_the_occupancy_on_a_web_server_is_unknown_not_0(tmp_path: Path) -> None:
    path = write_pyramid(tmp_path / "v.zarr", textured((48, 48, 48)))
    stored = np.ones((3, 3, 3), bool)
    for chunk in ((0, 0, 0), (1, 2, 0), (2, 2, 2)):
        path.joinpath("0", *map(str, chunk)).unlink()
        stored[chunk] = False
    with ChunkServer(tmp_path) as server:
        facts = look(f"{server.url}/v.zarr", listing=True, num_boxes=100)
        occupancy, intensity = facts.occupancy, facts.intensity
        assert occupancy.present is None
        assert occupancy.unknown == "web servers cannot be listed"
        assert intensity is not None
        assert (intensity.chunks_tried, intensity.chunks_found, intensity.boxes) == (27, 24, 24), (
            "all chunks were asked for, once each"
        )
        np.savez(path / "0" / ".chunk_occupancy.npz", occupancy=stored, signature=np.array(""))
        facts = look(f"{server.url}/v.zarr")
        assert (facts.occupancy.present, facts.occupancy.source) == (24, "sidecar")
        with pytest.raises(DataError, match="web servers cannot be listed"):
            make_sidecar(ArrayConfig(path=f"{server.url}/v.zarr"), tmp_path / "o.npz", QUICK)
        with pytest.raises(ConfigError, match="add --out FILE"):
            make_sidecar(ArrayConfig(path=f"{server.url}/v.zarr"), None, QUICK)


def test_sidecars_are_written_next_to_their_level_or_to_out(tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", textured((2, 32, 32, 32)), chunk=16)
    with pytest.raises(ConfigError, match="would apply to every `select`; add --out"):
        make_sidecar(ArrayConfig(path=str(path), select=(1,)), None)
    made, _ = make_sidecar(ArrayConfig(path=str(path), select=(1,)), tmp_path / "new" / "o.npz")
    with np.load(made) as written:
        assert written["occupancy"].all()
        assert str(written["signature"]).startswith("vesuvius:")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="choose another file with --out"):
        make_sidecar(ArrayConfig(path=str(path), select=(1,)), tmp_path / "file" / "o.npz")


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "uint32", "int64", "float16", "float32", "float64"])
def test_intensities_exclude_air(tmp_path: Path, dtype: str) -> None:
    voxels = textured((48, 48, 48), dtype=dtype)
    voxels[::5] = 0
    path = write_array(tmp_path / "v.zarr", voxels, chunk=16)
    intensity = look(path, num_boxes=27).intensity  # each chunk once: the whole volume
    assert intensity is not None
    material = voxels[voxels != 0].astype(np.float64)
    assert (intensity.boxes, intensity.voxels) == (27, voxels.size)
    assert (intensity.minimum, intensity.maximum) == (material.min(), material.max())
    # Sums of 10^5 float64 in another order.
    np.testing.assert_allclose([intensity.mean, intensity.std], [material.mean(), material.std()], rtol=1e-10)
    np.testing.assert_allclose(intensity.percentiles, np.percentile(material, (0.5, 50, 99.5)), rtol=1e-6)
    assert intensity.air_share == pytest.approx(1 - material.size / voxels.size)


def test_intensities_come_from_stored_chunks_and_are_reproducible(tmp_path: Path) -> None:
    voxels = np.zeros((96, 96, 96), np.uint8)
    voxels[32:48, 48:64, 80:] = textured((16, 16, 16))
    path = write_array(tmp_path / "v.zarr", voxels, chunk=16)
    with ChunkServer(tmp_path) as server:
        listed, asked = look(path), look(f"{server.url}/v.zarr")
    assert listed.occupancy.present == 1
    assert listed.intensity is not None
    assert (listed.intensity.boxes, listed.intensity.air_share) == (1, 0)
    assert asked.intensity is not None
    assert (asked.intensity.chunks_tried, asked.intensity.chunks_found) == (216, 1)
    assert asked.intensity.percentiles == listed.intensity.percentiles, (
        "a chunk is the place, whichever way it was found"
    )
    assert look(path).intensity == listed.intensity


def test_air_has_no_intensities(tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", np.zeros((32, 32, 32), np.uint8), chunk=16, **STORED_AIR)
    intensity = look(path).intensity
    assert intensity is not None
    assert (intensity.boxes, intensity.mean, intensity.percentiles, intensity.air_share) == (8, None, None, 1.0)
    assert look(path, num_boxes=0).intensity is None


@pytest.mark.parametrize("stored", [7, 0])
def test_a_volume_without_a_chunk_under_its_keys_is_not_described(tmp_path: Path, stored: int) -> None:
    """`init` would write a config for it."""
    encoding = {"name": "v2", "separator": "/"}
    path = write_array(tmp_path / "v.zarr", np.full((32, 32, 32), stored, np.uint8), 16, chunk_key_encoding=encoding)
    (path / ".zarray").write_text((path / ".zarray").read_text().replace('"/"', '"."'))
    with pytest.raises(DataError, match="under another key encoding" if stored else "No chunk of .* is stored"):
        look(path)


def test_unreadable_boxes_are_counted_and_the_others_used(tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", textured((48, 48, 48)), chunk=16)
    (path / "1" / "1" / "1").write_bytes(b"damaged")
    intensity = look(path, num_boxes=27).intensity
    assert intensity is not None
    assert (intensity.boxes, intensity.unreadable) == (26, 1)


def test_a_damaged_shard_index_is_reported_and_other_shards_are_sampled(
    server: ChunkServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_pyramid(tmp_path / "v.zarr", textured((64, 64, 64)), levels=1, zarr_format=3, shards=(32, 32, 32))
    shard = path / "0/c/0/1/0"
    data = shard.read_bytes()
    shard.write_bytes(data[:-10] + bytes([data[-10] ^ 1]) + data[-9:])
    facts = look(path, num_boxes=64)
    assert facts.occupancy.present is None
    assert "the index of a shard does not match its checksum in 0/c/0/1/0" in str(facts.occupancy.unknown)
    for found in (facts, look(server.url_of(path), num_boxes=64)):
        assert found.intensity is not None
        assert (found.intensity.chunks_tried, found.intensity.chunks_found, found.intensity.boxes) == (64, 56, 56)
    assert "chunk [0, 2, 0]" in caplog.text
    assert "0/c/0/1/0; restore the shard" in caplog.text
    assert "network" not in caplog.text + str(facts)


def test_axes_are_described_in_stored_order_and_all_else_in_zyx(tmp_path: Path) -> None:
    path = tmp_path / "v.zarr"
    array = zarr.create_array(
        str(path), shape=(20, 2, 30, 40), chunks=(5, 1, 6, 8), dtype="int16", dimension_names=["x", "c", "y", "z"]
    )
    array[...] = textured((20, 2, 30, 40), dtype="int16")
    facts = describe_volume(ArrayConfig(path=str(path), select=(1,)), QUICK)
    assert facts.axes == ("x", "c", "y", "z")
    assert facts.chosen.shape == (20, 2, 30, 40)
    assert facts.chosen.chunk_zyx == (8, 6, 5)
    assert (facts.occupancy.present, facts.occupancy.total) == (100, 100)
    with pytest.raises(ConfigError, match="add --out FILE"):
        make_sidecar(ArrayConfig(path=str(path), select=(1,)), None)


def test_shards_without_a_chunk_are_an_empty_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are listed, and all their chunks read as air."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sharded: dict[str, Any] = {"zarr_format": 3, "shards": (32, 32, 32), "chunk_key_encoding": {"name": "default"}}
    path = write_array(tmp_path / "v.zarr", textured((64, 32, 32)), chunk=16, **sharded)
    first, *others = [file for file in (path / "c").rglob("*") if file.is_file()]
    index = b"\xff" * 16 * 8
    for file in others:
        file.write_bytes(index + google_crc32c.value(index).to_bytes(4, "little"))
    assert describe_volume(ArrayConfig(path=path)).occupancy.present == 8
    assert verify_volume(ArrayConfig(path=path)).broken == []
    first.write_bytes(others[0].read_bytes())
    for command in (describe_volume, verify_volume, lambda spec: make_sidecar(spec, None)):
        with pytest.raises(DataError, match=r"No chunk of .*/v.zarr is stored: all of its shards are empty"):
            command(ArrayConfig(path=path))
    assert not (path / ".chunk_occupancy.npz").exists()
