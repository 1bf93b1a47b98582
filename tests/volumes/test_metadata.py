"""Metadata in every spelling, and the messages about unreadable metadata."""

from __future__ import annotations

import gzip
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore, StorePath

from tests.conftest import textured, write_array
from tests.support.odd_server import objects_of, serving
from tests.volumes.test_axes import multiscale
from vesuvius.config import StoreConfig
from vesuvius.errors import DataError
from vesuvius.volumes.format.metadata import metadata_hash
from vesuvius.volumes.volume import open_volume

VOXELS = textured((16, 16, 16))
Change = Callable[[dict[str, Any]], None]


def changed(path: Path, zarr_format: int, change: Change, voxels: Any = VOXELS, **options: Any) -> Path:
    """An array with edited metadata."""
    write_array(path, voxels, 8, zarr_format=zarr_format, **options)
    file = path / (".zarray" if zarr_format == 2 else "zarr.json")
    metadata = json.loads(file.read_bytes())
    change(metadata)
    file.write_text(json.dumps(metadata))
    return path


def set_to(**values: Any) -> Change:
    return lambda metadata: metadata.update(values)


def shard_of(*codecs: Any) -> Change:
    configuration = {"chunk_shape": [4, 4, 4], "codecs": list(codecs), "index_codecs": ["bytes", "crc32c"]}
    return set_to(codecs=[{"name": "sharding_indexed", "configuration": configuration}])


def read(address: str | Path) -> Any:
    volume = open_volume(address, StoreConfig(outage_minutes=0.01))
    try:
        return volume.read(((0, 0, 0), volume.shape_zyx))
    finally:
        volume.close()


@pytest.mark.parametrize("dtype", [">u1", "<u1", "=u1", "u1", "uint8"])
def test_byte_order_of_one_byte_dtypes_is_ignored(tmp_path: Path, dtype: str) -> None:
    np.testing.assert_array_equal(read(changed(tmp_path / "v.zarr", 2, set_to(dtype=dtype))), VOXELS)
    signed = VOXELS.astype("i1")
    path = changed(tmp_path / "w.zarr", 2, set_to(dtype=dtype.replace("u", "i", 1).replace("iint", "int")), signed)
    np.testing.assert_array_equal(read(path), signed)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shards", [None, (16, 16, 16)])
def test_axis_order_may_be_a_letter(tmp_path: Path, order: str, shards: Any) -> None:
    """In zarr v2 the order of a chunk's voxels, in v3 a codec, inside shards too."""
    numbers = {"C": (0, 1, 2), "F": (2, 1, 0)}[order]
    if shards is None:
        np.testing.assert_array_equal(read(write_array(tmp_path / "v2.zarr", VOXELS, 8, order=order)), VOXELS)

    def in_letters(metadata: dict[str, Any]) -> None:
        chain = metadata["codecs"] if shards is None else metadata["codecs"][0]["configuration"]["codecs"]
        transpose = next(codec for codec in chain if codec["name"] == "transpose")
        transpose["configuration"]["order"] = order

    filters = [zarr.codecs.TransposeCodec(order=numbers)]
    path = changed(tmp_path / "v3.zarr", 3, in_letters, shards=shards, filters=filters)
    np.testing.assert_array_equal(read(path), VOXELS)


PCODEC = {"name": "numcodecs.pcodec", "configuration": {"level": 8}}
INNER = {"chunk_shape": [2, 2, 2], "codecs": ["bytes"], "index_codecs": ["bytes", "crc32c"]}
SHARDS = {"name": "sharding_indexed", "configuration": INNER}
REFUSED: dict[str, tuple[int, Change, str]] = {
    "v2 codec": (2, set_to(compressor={"id": "gone", "level": 8}), "a codec is not installed .*gone.*; install"),
    "v2 codec's settings": (2, set_to(compressor={"id": "zlib", "x": 1}), "rejects them .*unexpected keyword argument"),
    "v3 codec": (3, set_to(codecs=[PCODEC], data_type="float32"), "a codec is not installed .*pcodec"),
    "v3 in shards": (3, shard_of(PCODEC), "a codec is not installed .*pcodec"),
    "v2 structure": (2, set_to(dtype=[["a", "<u1"]]), r"the dtype is \[\['a'"),
    "v2 text": (2, set_to(dtype="|S4", fill_value=None), r"dtype .*S4"),
    "v2 dates": (2, set_to(dtype="<M8[s]", fill_value=None), r"dtype .*<M8\[s\]"),
    "v2 complex": (2, set_to(dtype="<c8", fill_value=None), "its dtype <c8 is not bool, an integer"),
    "v2 no byte order": (2, set_to(dtype="u2"), "No Zarr data type found .*'u2'"),
    "v3 bfloat16": (3, set_to(data_type="bfloat16"), "the dtype is bfloat16.*; correct them, or convert"),
    "v3 grid": (3, set_to(chunk_grid={"name": "rectilinear"}), "rectilinear"),
    "shards in shards": (3, shard_of(SHARDS), "it combines shards with other codecs"),
    "v1": (2, set_to(zarr_format=1), "Invalid zarr_format: 1"),
    "chunks of 0": (2, set_to(chunks=[8, 8, 0]), r"no chunks, or more than 1.1e\+12 .*chunks \[8, 8, 0\]"),
    "v3 chunks of 0": (
        3,
        set_to(chunk_grid={"name": "regular", "configuration": {"chunk_shape": [8, 0, 8]}}),
        r"no chunks, or more than 1.1e\+12 .*chunks \[8, 0, 8\]",
    ),
    "no chunks": (2, lambda metadata: metadata.pop("chunks"), "rejects them .*chunks"),
    "huge": (2, set_to(shape=[10**12] * 3), r"shape \[10+, 10+, 10+\], chunks \[8, 8, 8\]\); correct"),
    "anything else": (2, set_to(fill_value="x"), r"zarr-python rejects them \(TypeError: .*\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_metadata_are_reported_when_a_volume_is_opened(tmp_path: Path, case: str) -> None:
    zarr_format, change, words = REFUSED[case]
    path = changed(tmp_path / "v.zarr", zarr_format, change)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DataError, match=rf"^Cannot read the metadata \S+ of \S+: .*{words}") as refused:
            read(path)
    assert "\n" not in str(refused.value)


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
HASHES: dict[str, tuple[dict[str, Any], str]] = {
    "v2": (
        {
            "zarr_format": 2, "shape": [128] * 3, "chunks": [64] * 3, "dtype": "|u1", "fill_value": 0, "order": "C",
            "compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0}, "filters": None,
            "dimension_separator": "/", "attributes": {},
        },
        "732663116537be05",
    ),
    "shards": (
        {
            "zarr_format": 3, "node_type": "array", "shape": [128] * 3, "data_type": "uint8", "fill_value": 0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [64] * 3}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "codecs": [{"name": "sharding_indexed", "configuration": {
                "chunk_shape": [32] * 3,
                "codecs": [LITTLE, {"name": "zstd", "configuration": {"level": 0, "checksum": False}}],
                "index_codecs": [LITTLE, {"name": "crc32c"}],
                "index_location": "end",
            }}],
            "attributes": {}, "dimension_names": ["z", "y", "x"],
        },
        "ecca11cc02956061",
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", HASHES)
def test_the_metadata_hash_is_stable_across_releases_of_zarr(layout: str) -> None:
    """Sidecars and unfinished copies contain the hash, and outlive an upgrade of zarr."""
    document, expected = HASHES[layout]
    array: Any = zarr.AsyncArray(document, StorePath(MemoryStore()))  # type: ignore[call-overload]
    assert metadata_hash(zarr.Array(array)) == expected


NO_JSON: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "page": (lambda _: b"\n<!DOCTYPE html><html>", "is an HTML page; check the address and the login"),
    "xml": (lambda _: b"<?xml version='1.0'?><Error/>", "is an XML document"),
    "gzip": (gzip.compress, "is gzip data; store it uncompressed"),
    "empty": (lambda _: b"", r"is empty \(0 bytes\); restore it"),
    "zeros": (lambda data: bytes(len(data)), "is empty"),
    "half": (lambda data: data[: len(data) // 2], "is not JSON, or truncated JSON"),
    "random": (lambda _: b"\x93\xfe" * 9, "is not JSON"),
    "list": (lambda _: b"[]", r"is \[\], not a JSON object"),
    "lfs": (lambda _: b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
}


@pytest.mark.parametrize("case", NO_JSON)
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_other_content_in_place_of_metadata_is_named(tmp_path: Path, case: str, zarr_format: int) -> None:
    path = write_array(tmp_path / "v.zarr", VOXELS, 8, zarr_format=zarr_format)
    make, words = NO_JSON[case]
    file = path / (".zarray" if zarr_format == 2 else "zarr.json")
    file.write_bytes(make(file.read_bytes()))
    with serving(objects_of(path, "/v")) as web:
        for address in (path, f"{web}/v"):
            with pytest.raises(DataError, match=rf"^Cannot read the metadata {file.name} of .*: .*{words}"):
                read(address)


@pytest.mark.parametrize(
    ("zarr_format", "attributes"),
    [(2, {}), (3, ...), (3, None), (3, {"ome": None}), (3, {"ome": [1]}), (3, {"ome": {"multiscales": None}})],
)
def test_a_group_without_multiscales_is_refused(tmp_path: Path, zarr_format: int, attributes: Any) -> None:
    group = {"zarr_format": zarr_format} | ({"node_type": "group"} if zarr_format == 3 else {})
    if zarr_format == 3 and attributes is not ...:  # they are optional
        group["attributes"] = attributes
    write_array(tmp_path / "g/0", VOXELS, 8, zarr_format=zarr_format)
    (tmp_path / "g" / ("zarr.json" if zarr_format == 3 else ".zgroup")).write_text(json.dumps(group))
    if zarr_format == 2:
        (tmp_path / "g/.zattrs").write_text(json.dumps(attributes or {}))
    with pytest.raises(DataError, match=r"it is a group without multiscales metadata, .*; set path to \S+/g/0$"):
        read(tmp_path / "g")


def test_null_consolidated_metadata_and_a_byte_order_mark_are_accepted(tmp_path: Path) -> None:
    path = changed(tmp_path / "v.zarr", 3, set_to(consolidated_metadata=None))
    (path / "zarr.json").write_bytes(b"\xef\xbb\xbf" + (path / "zarr.json").read_bytes())
    np.testing.assert_array_equal(read(path), VOXELS)


NO_ZARR: dict[str, tuple[str, bytes, str]] = {
    "a file": ("v.zip", b"PK", "but a file; unpack it, or convert it"),
    "a scan": ("v.nii.gz", b"", r"but a file; import it: vesuvius volume import \S+/v\.nii\.gz v\.zarr$"),
    "raw voxels": ("v.raw", b"", r"but a file; import it: .* v\.zarr --shape Z,Y,X --dtype uint16$"),
    "images": ("v/01.TIF", b"II*\0", r"but a folder with 01\.TIF; import it: vesuvius volume import \S+/v v\.zarr$"),
    "n5": (
        "v.n5/attributes.json",
        b"{}",
        r"but a folder with .*; import it: vesuvius volume import \S+/v\.n5 v\.zarr$",
    ),
    "other files": ("v/notes.txt", b"", r"but a folder with notes\.txt; set path to the zarr itself"),
    "parent": ("v/scan.zarr/.zarray", b"{}", r"but a folder with scan\.zarr; set path to \S+/v/scan\.zarr$"),
    "a file in it": ("v/.zarray", b"{}", r"but a file; unpack it"),
}


@pytest.mark.parametrize("case", NO_ZARR)
def test_a_path_to_something_other_than_zarr_is_named(tmp_path: Path, case: str) -> None:
    name, data, words = NO_ZARR[case]
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    address = file if case == "a file in it" else tmp_path / name.split("/")[0]
    with pytest.raises(DataError, match=rf"Cannot open \S+: it is neither a zarr array nor a group, {words}"):
        read(address)


# ---- groups that are no image: the message names what could be chosen, as it is to be written


def write_collection(path: Path, images: int, zarr_format: int = 2) -> Path:
    """A collection as written by bioformats2raw."""
    layout = {"bioformats2raw.layout": 3}
    attributes = layout if zarr_format == 2 else {"ome": {"version": "0.5"} | layout}
    zarr.create_group(str(path), zarr_format=zarr_format, attributes=attributes)
    zarr.create_group(str(path / "OME"), zarr_format=zarr_format)
    for number in range(images):
        image = multiscale("zyx", "0.4" if zarr_format == 2 else "0.5")
        zarr.create_group(str(path / str(number)), zarr_format=zarr_format, attributes=image)
        write_array(path / str(number) / "0", textured((8, 8, 8)), chunk=8, zarr_format=zarr_format)
    return path


def message_of(address: str) -> str:
    with pytest.raises(DataError) as refusal:
        open_volume(address, StoreConfig())
    return str(refusal.value)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_the_error_for_a_collection_names_images_that_can_be_opened(tmp_path: Path, zarr_format: int) -> None:
    path = write_collection(tmp_path / "v.zarr", 12, zarr_format)
    message = message_of(f"{path}/")
    assert f"Cannot open {path}: it is a bioformats2raw collection of images without multiscales metadata" in message
    assert f"; set path to {path}/0 or {path}/1 or {path}/2 or" in message
    assert message.endswith(f"{path}/7 (and 4 more)"), "by number, 10 and 11 last"
    volume = open_volume(path / "0")
    np.testing.assert_array_equal(volume.read(((0, 0, 0), (8, 8, 8))), textured((8, 8, 8)))


def test_the_error_for_a_group_names_its_arrays(tmp_path: Path) -> None:
    path = tmp_path / "v.zarr"
    zarr.create_group(str(path), zarr_format=3)
    assert message_of(str(path)).endswith(
        f"not an array or an OME-Zarr image; set path to an array or image in it: {path}/NAME"
    )
    for name in ("scan", "labels"):
        write_array(path / name, textured((8, 8, 8)), chunk=8, zarr_format=3)
    assert message_of(str(path)).endswith(f"set path to {path}/labels or {path}/scan")
