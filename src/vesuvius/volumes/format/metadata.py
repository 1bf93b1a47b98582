"""Reads the metadata of a zarr array or group, finds the level of a volume, and reports errors in them.

Converts spellings that zarr-python rejects, such as `>u1` for `|u1` or the transpose order "F".
"""

import hashlib
import itertools
import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numcodecs.registry
import numpy as np
import zarr
from numcodecs.errors import UnknownCodecError
from zarr.errors import UnknownCodecError as UnknownCodecV3Error
from zarr.storage import MemoryStore, StorePath

from vesuvius.config import ArrayConfig
from vesuvius.errors import DataError, one_line
from vesuvius.volumes.errors import FetchError
from vesuvius.volumes.format.shards import is_supported
from vesuvius.volumes.store.source import Source

_MOST_CHUNKS = 2**40  # an occupancy takes a byte per chunk of virtual memory
_INNER = ("codecs", "index_codecs")  # of a shard
_ONE_BYTE = ("u1", "i1", "b1", "uint8", "int8", "bool")
_FILES = ("zarr.json", ".zarray", ".zgroup", ".zattrs")
_IMPORTABLE = re.compile(r"\.(tiff?|btf|h5|hdf5?|nxs|nii|nii\.gz|nrrd|nhdr|npy|n5|raw)$", re.IGNORECASE)
_SLICES = (".tif", ".tiff", ".png", "attributes.json")
_NAMED = 8  # names that a message lists
_MAGIC = {
    b"\x1f\x8b": ("gzip data", "store it uncompressed, or have the server send it without Content-Encoding"),
    b"\x28\xb5\x2f\xfd": ("zstd data", "store it uncompressed"),
    b"version https://git-lfs": ("a Git LFS pointer", "fetch the file with `git lfs pull`"),
    b"<?xml": ("an XML document, possibly the server's error message", "check the address and the credentials"),
    b"<": ("an HTML page", "check the address and the login"),
}


@dataclass(frozen=True)
class Node:
    key: str  # of the object that holds them
    stored: bytes  # its content
    document: dict[str, Any]  # as zarr-python reads it, including the attributes of zarr v2
    is_array: bool


def read_node(source: Source, path: str) -> Node | None:
    """Metadata at a path below an address, in one round trip; None if there are none.  Raises DataError."""
    keys = [f"{path}/{name}".lstrip("/") for name in _FILES]
    try:
        if source.remote:
            stored = [future.result() for future in [source.submit(key, probing=True) for key in keys]]
        else:
            stored = [source.get(key) for key in keys]
    except FetchError as error:
        raise DataError(f"Cannot read the metadata of {source.display_address}: {error}; restore them") from error
    for key, data in zip(keys[:3], stored, strict=False):
        if data is not None:
            document = parse_object(source, key, data)
            if key != keys[0]:
                document["attributes"] = parse_object(source, keys[3], stored[3]) if stored[3] is not None else {}
            document.setdefault("attributes", {})  # optional in zarr v3
            return Node(key, data, document, key == keys[1] or document.get("node_type") == "array")
    return None


def open_array(source: Source, node: Node, path: str) -> zarr.Array[Any]:
    """Open the array that the metadata describe; no I/O.  Raises DataError: zarr-python or vesuvius cannot read it."""
    dtype = node.document.get("data_type", node.document.get("dtype"))
    cause, remedy = "", "correct them, or convert the volume"
    try:
        document = _normalized(node.document)
        array = zarr.Array(zarr.AsyncArray(document, StorePath(MemoryStore(), path)))  # type: ignore[call-overload]
        written = document["chunks"] if "chunks" in document else document["chunk_grid"]["configuration"]["chunk_shape"]
        chunks = array.chunks if all(written) else tuple(written)  # zarr 3.4 reads 0 as 1
        if array.dtype.kind not in "buif" or array.dtype.itemsize > 8:
            cause = f"its dtype {dtype} is not bool, an integer or a float of up to 8 bytes"
        elif not is_supported(getattr(array.metadata, "codecs", ())):
            cause = "it combines shards with other codecs, or has an unsupported shard index"
        elif not 1 <= math.prod(c and -(-n // c) for n, c in zip(array.shape, chunks, strict=True)) <= _MOST_CHUNKS:
            sizes = f"shape {list(array.shape)}, chunks {list(chunks)}"
            cause = f"it has no chunks, or more than {_MOST_CHUNKS:.2g} ({sizes})"
    except (UnknownCodecError, UnknownCodecV3Error) as error:
        cause = f"a codec is not installed ({one_line(error)})"
        remedy = "install the package that provides it, or store the volume with blosc, zstd or gzip"
    except Exception as error:  # malformed metadata raise many types
        cause = f"zarr-python rejects them ({type(error).__name__}: {one_line(error)}; the dtype is {dtype})"
    if cause:
        raise _unreadable(source, node.key, cause, remedy)
    return array


def _unreadable(source: Source, key: str, cause: str, remedy: str) -> DataError:
    return DataError(f"Cannot read the metadata {key} of {source.display_address}: {cause}; {remedy}")


def parse_object(source: Source, key: str, data: bytes) -> dict[str, Any]:
    """Parse a JSON object.  Raises DataError that says what the data are instead."""
    what, remedy = f"the object is empty ({len(data)} bytes)", "restore it"
    if data.strip(b" \t\r\n\0"):
        try:
            document = json.loads(data)
            if isinstance(document, dict):
                return document
            what = f"the object is {one_line(repr(document), 40)}, not a JSON object"
        except (ValueError, RecursionError) as error:
            unknown = f"not JSON, or truncated JSON ({one_line(error)})", remedy
            known = (words for magic, words in _MAGIC.items() if data.lstrip(b" \t\r\n").startswith(magic))
            what, remedy = next(known, unknown)
            what = f"the object is {what}"
    raise _unreadable(source, key, what, remedy)


def _normalized(document: dict[str, Any]) -> dict[str, Any]:
    """The same metadata in the spelling of zarr-python.  Raises as `_codecs`."""
    found = dict(document)
    if found.get("zarr_format") == 2:
        if isinstance(dtype := found.get("dtype"), str) and (bare := dtype.lstrip("<>=|")) in _ONE_BYTE:
            found["dtype"] = np.dtype(bare).str  # drops a byte order, which means nothing for one byte
        if found.get("dimension_separator", "") is None:
            del found["dimension_separator"]
        return found
    found.pop("consolidated_metadata", None)  # belongs to groups; some writers add a null to arrays
    axes = len(found["shape"]) if isinstance(found.get("shape"), list) else 0
    found["codecs"] = _codecs(found.get("codecs"), axes)
    if isinstance(encoding := found.get("chunk_key_encoding"), str):
        found["chunk_key_encoding"] = {"name": encoding}
    match found.get("data_type"):
        case {"name": str(name), **more} if not any(more.values()):
            found["data_type"] = name
    return found


def _codecs(codecs: Any, axes: int) -> Any:
    """Write each codec as an object with a configuration, and axis orders as numbers.

    Raises UnknownCodecError: a codec of numcodecs is not installed; zarr would notice only at the first chunk.
    """
    if not isinstance(codecs, list):
        return codecs
    found = list[Any]()
    for written in codecs:
        codec: Any = {"name": written} if isinstance(written, str) else written
        if isinstance(codec, dict) and isinstance(configuration := codec.get("configuration") or {}, dict):
            match codec.get("name"), configuration.get("order"):
                case "transpose", "C":
                    continue
                case "transpose", "F":
                    configuration = {"order": list(reversed(range(axes)))}
            inner = {key: _codecs(configuration[key], axes) for key in _INNER if key in configuration}
            codec = {"name": codec.get("name"), "configuration": configuration | inner}
            if str(codec["name"]).startswith("numcodecs."):
                numcodecs.registry.get_codec(dict(configuration, id=codec["name"].removeprefix("numcodecs.")))
        found.append(codec)
    return found


def metadata_hash(array: zarr.Array[Any]) -> str:
    """Hash of shape, chunks, dtype and codecs, but not of attributes."""
    metadata = {key: value for key, value in array.metadata.to_dict().items() if key != "attributes"}
    return hashlib.sha256(json.dumps(metadata, sort_keys=True, default=str).encode()).hexdigest()[:16]


# ---- levels


@dataclass(frozen=True)
class Level:
    path: str  # of its array below the group
    entry: Any  # the group's `multiscales` entry
    dataset: Any  # the level's dataset in that entry
    paths: tuple[str, ...]  # of the arrays of all levels, finest first
    version: str | None  # of OME-Zarr
    title: str | None  # the pyramid's name


def pick_level(source: Source, attributes: Any, spec: ArrayConfig) -> Level:
    """The level of a group that a config selects.  Raises DataError: the group has no pyramid or no such level.

    OME-Zarr 0.5 nests its attributes of the group under "ome", 0.4 does not.
    """
    attributes = attributes if isinstance(attributes, dict) else {}
    ome: Any = attributes["ome"] if isinstance(attributes.get("ome"), dict) else attributes
    try:
        entry = ome["multiscales"][0]
        datasets = list(entry["datasets"])
        paths = tuple(str(dataset["path"]) for dataset in datasets)
        paths[0]  # it has a level
    except (KeyError, IndexError, TypeError) as error:
        what = "a bioformats2raw collection of images" if "bioformats2raw.layout" in ome else "a group"
        address = source.display_address.rstrip("/")
        problem = f"it is {what} without multiscales metadata, not an array or an OME-Zarr image"
        remedy = _choice(source) or f"set path to an array or image in it: {address}/NAME"
        raise _unopened(address, problem, remedy) from error
    if spec.level >= len(paths):
        raise _no_level(source, spec, f"its levels are 0..{len(paths) - 1}", "change data.volumes[].level")
    words = entry.get("version", ome.get("version")), entry.get("name")
    facts = (None if word is None else str(word) for word in words)
    return Level(paths[spec.level], entry, datasets[spec.level], paths, *facts)


def find_array(source: Source, root: Node, spec: ArrayConfig) -> tuple[Node, Level | None, str]:
    """The metadata of the array in a config, its level (None for a bare array), and its name."""
    if root.is_array:
        if spec.level:
            remedy = "set level to 0 or point path at the OME-Zarr group"
            raise _no_level(source, spec, "a bare array has only level 0", remedy)
        return root, None, source.display_address
    level = pick_level(source, root.document["attributes"], spec)
    node = read_node(source, level.path)
    if node is None or not node.is_array:
        problem = f"{level.path!r} {'is not there' if node is None else 'is a group'}"
        raise _no_level(source, spec, problem, "copy the missing level or choose another")
    return node, level, f"{source.display_address} level {spec.level}"


def _no_level(source: Source, spec: ArrayConfig, problem: str, remedy: str) -> DataError:
    return _unopened(f"level {spec.level} of {source.display_address}", problem, remedy)


def _unopened(what: str, problem: str, remedy: str) -> DataError:
    return DataError(f"Cannot open {what}: {problem}; {remedy}")


def no_zarr_error(source: Source) -> DataError:
    """The error for an address without zarr metadata.  Reads."""
    if source.forbidden:
        return _unopened(source.display_address, source.forbidden, "check the address and the credentials")
    what, remedy = "", "set path to the zarr itself (it holds .zarray, .zgroup or zarr.json)"
    if not source.remote and Path(source.address).is_file():
        what, remedy = ", but a file", _import_command(source, []) or "unpack it, or convert it to OME-Zarr"
    elif names := sorted(itertools.chain(*_names(source))):
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        what = f", but a folder with {', '.join(names[:_NAMED])}{more}"
        remedy = _choice(source) or _import_command(source, names) or remedy
    elif not source.remote:
        what = ", but an empty folder"
    elif "*" in source.address:
        remedy = "patterns match folders of this machine only: list the addresses"
    return _unopened(source.display_address, f"it is neither a zarr array nor a group{what}", remedy)


def _import_command(source: Source, names: Sequence[str]) -> str:
    """How to import a file, or a folder with these names; '' if `vesuvius volume import` cannot read it."""
    name = Path(source.address).resolve().name
    if source.remote or not (any(each.lower().endswith(_SLICES) for each in names) or _IMPORTABLE.search(name)):
        return ""
    more = " --shape Z,Y,X --dtype uint16" if name.lower().endswith(".raw") else ""
    paths = map(shlex.quote, (source.address, _IMPORTABLE.sub("", name) + ".zarr"))
    return f"import it: vesuvius volume import {' '.join(paths)}{more}"


def _choice(source: Source) -> str:
    """'set path to A or B' for the zarrs in a group or folder; '' if there are none or the store cannot list."""
    folders = sorted(set(_names(source)[1]) - {"OME"})
    if not source.remote:
        folders = [name for name in folders if any(Path(source.address, name, each).is_file() for each in _FILES[:3])]
    folders.sort(key=lambda name: int(name) if name.isdigit() else math.inf)
    more = f" (and {len(folders) - _NAMED} more)" if len(folders) > _NAMED else ""
    paths = [f"{source.display_address.rstrip('/')}/{name}" for name in folders[:_NAMED]]
    return f"set path to {' or '.join(paths)}{more}" if paths else ""


def _names(source: Source) -> tuple[list[str], list[str]]:
    """Files and folders at an address; none if the store cannot list."""
    try:
        return source.list_one_level("")
    except DataError:
        return [], []
