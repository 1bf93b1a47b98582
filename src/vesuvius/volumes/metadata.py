"""Reads the metadata of a zarr array or group, and names what is wrong with them.

Spellings that zarr-python does not know are put into its own (`|u1` written as `>u1`, transpose order "F"); whatever it
cannot read is found before it is asked to, so that the message says what it is and not what it broke.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numcodecs.registry
import numpy as np
import zarr
from numcodecs.errors import UnknownCodecError
from zarr.abc.store import Store
from zarr.core.array import AsyncArray
from zarr.core.group import AsyncGroup, GroupMetadata
from zarr.registry import get_codec_class
from zarr.storage import StorePath

from vesuvius.errors import DataError, one_line
from vesuvius.volumes.errors import FetchError
from vesuvius.volumes.store.source import Source

log = logging.getLogger(__name__)

_NUMBERS = ("bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)), "float16", "float32")
_NUMBERS_V3 = {*_NUMBERS, "float64"}
_KINDS = {"c": "complex numbers", "S": "strings", "U": "strings", "M": "dates", "m": "durations", "O": "Python objects"}
_MOST_CHUNKS = 2**40  # lists of a volume hold a byte for each, in memory that is taken as it is used
_INNER = ("codecs", "index_codecs")  # of a shard
_FIELDS_V3 = {
    *("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs"),
    *("attributes", "storage_transformers", "dimension_names"),
}
_MAGIC = {
    b"\x1f\x8b": "gzip data: store it uncompressed, or have the server send it without Content-Encoding",
    b"\x28\xb5\x2f\xfd": "zstd data: store it uncompressed",
    b"version https://git-lfs": "a Git LFS pointer: fetch the file with `git lfs pull`",
    b"<?xml": "an XML document, perhaps the server's error message: check the address and the credentials",
    b"<": "an HTML page: check the address and the login, as the server answers with a page",
}


@dataclass(frozen=True)
class Node:
    """The metadata of an array or a group."""

    key: str  # of the object that holds them
    stored: bytes  # what it holds
    document: dict[str, Any]  # the same as zarr-python reads it, with the attributes of zarr v2
    is_array: bool


def read_node(source: Source, path: str) -> Node | None:
    """Metadata at a path below an address; None where there are none.  One round trip.

    Raises:
        DataError: they are no JSON object; as `Source.get`.
    """
    prefix = f"{path}/" if path else ""
    keys = [prefix + name for name in ("zarr.json", ".zarray", ".zgroup", ".zattrs")]
    try:
        if source.remote:
            stored = [future.result() for future in [source.submit(key) for key in keys]]
        else:
            stored = [source.get(key) for key in keys]
    except FetchError as error:
        raise DataError(f"The metadata of {source.shown} cannot be read: {error}; restore them") from error
    v3, array, group, attributes = stored
    if v3 is not None:
        document = _parsed(source, keys[0], v3)
        _check_format(source, keys[0], document, 3)
        kind = document.get("node_type")
        if kind not in ("array", "group"):
            raise _wrong(source, keys[0], f"node_type is {kind!r}", "correct it to array or group")
        document["attributes"] = document.get("attributes") or {}
        if not isinstance(document["attributes"], dict):
            raise _wrong(source, keys[0], f"attributes is {document['attributes']!r}, not an object", "correct it")
        if array is not None:
            log.debug("%s holds both zarr.json and .zarray; zarr.json is read", source.shown)
        return Node(keys[0], v3, document, kind == "array")
    for key, data in zip(keys[1:3], (array, group), strict=True):
        if data is not None:
            document = _parsed(source, key, data)
            _check_format(source, key, document, 2)
            document["attributes"] = _parsed(source, keys[3], attributes) if attributes is not None else {}
            return Node(key, data, document, key == keys[1])
    return None


def open_group(node: Node, store: Store) -> zarr.Group:
    """The group at the root of a store.  No I/O."""
    document = node.document
    return zarr.Group(AsyncGroup(GroupMetadata(document["attributes"], document["zarr_format"]), StorePath(store)))


def open_array(source: Source, node: Node, store: Store, path: str) -> zarr.Array[Any]:
    """The array that metadata describe.  No I/O.

    Raises:
        DataError: zarr-python cannot read it.
    """
    document = _normalised(node.document)
    problem = _problem(document)
    if problem:
        raise _wrong(source, node.key, *problem)
    try:
        array = zarr.Array(AsyncArray(document, StorePath(store, path)))  # type: ignore[call-overload]
        chunks = math.prod(-(-n // c) for n, c in zip(array.shape, array.chunks, strict=True))
    except Exception as error:  # malformed metadata raise many types
        cause = f"zarr-python refuses them ({type(error).__name__}: {one_line(error)})"
        raise _wrong(source, node.key, cause, "correct them") from error
    if chunks > _MOST_CHUNKS:
        cause = f"shape is {list(array.shape)}, {chunks:.2g} chunks of {list(array.chunks)}"
        raise _wrong(source, node.key, cause, f"correct it, or store the volume in less than {_MOST_CHUNKS:.2g} chunks")
    return array


def _check_format(source: Source, key: str, document: dict[str, Any], wanted: int) -> None:
    if (found := document.get("zarr_format")) != wanted:
        raise _wrong(source, key, f"zarr_format is {found!r}", "convert the volume to zarr v2 or v3")


def _wrong(source: Source, key: str, cause: str, remedy: str) -> DataError:
    return DataError(f"The metadata {key} of {source.shown} cannot be read: {cause}; {remedy}")


def _parsed(source: Source, key: str, data: bytes) -> dict[str, Any]:
    """A JSON object.  Raises DataError that says what it is instead."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _wrong(source, key, *_what_it_is(data, error)) from None
    if not isinstance(document, dict):
        what = {list: "a list", str: "a string", type(None): "null"}.get(type(document), "a number")
        raise _wrong(source, key, f"they are {what}, not an object", "restore them")
    return document


def _what_it_is(data: bytes, error: Exception) -> tuple[str, str]:
    """What lies in place of JSON, and the remedy.  Pure."""
    if not data.strip(b" \t\r\n\0"):
        return f"the object is empty ({len(data)} bytes)", "restore it"
    for magic, words in _MAGIC.items():
        if data.lstrip(b" \t\r\n").startswith(magic):
            what, _, remedy = words.partition(": ")
            return f"the object is {what}", remedy.strip()
    if isinstance(error, json.JSONDecodeError) and (
        error.msg.startswith("Unterminated")
        or (error.pos >= len(error.doc.rstrip()) - 1 and not error.msg.startswith("Extra data"))
    ):
        return f"the JSON breaks off after {len(data)} bytes", "restore it"
    return f"the object is not JSON ({one_line(error)})", "restore it"


def _normalised(document: dict[str, Any]) -> dict[str, Any]:
    """The same metadata in the spelling of zarr-python.  Pure."""
    found = dict(document)
    if found.get("zarr_format") == 2:
        found["dtype"] = _dtype_v2(found.get("dtype"))
        if found.get("dimension_separator", "") is None:
            del found["dimension_separator"]
        return found
    found.pop("consolidated_metadata", None)  # of groups; some writers give arrays a null
    axes = len(found["shape"]) if isinstance(found.get("shape"), list) else 0
    found["codecs"] = _codecs(found.get("codecs"), axes)
    for key in ("data_type", "chunk_key_encoding"):
        match found.get(key), key:
            case str(name), "chunk_key_encoding":
                found[key] = {"name": name}
            case {"name": str(name), **more}, "data_type" if not any(more.values()):
                found[key] = name
    return found


def _dtype_v2(dtype: Any) -> Any:
    """One byte has no byte order, whatever is written."""
    try:
        parsed = np.dtype(dtype) if isinstance(dtype, str) else None
    except TypeError:
        return dtype
    return parsed.str if parsed is not None and parsed.kind in "bui" and parsed.itemsize == 1 else dtype


def _codecs(codecs: Any, axes: int) -> Any:
    """Each codec as an object with a configuration, an order of axes as numbers."""
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
        found.append(codec)
    return found


def _problem(document: dict[str, Any]) -> tuple[str, str] | None:
    """Why zarr-python, or this program, cannot read an array, and the remedy; None where it can.  Pure."""
    zarr_format = document["zarr_format"]
    wanted = ("shape", "chunks", "dtype") if zarr_format == 2 else ("shape", "chunk_grid", "data_type", "codecs")
    if missing := [key for key in wanted if document.get(key) is None]:
        return f"{', '.join(missing)} is missing", "restore them"
    if zarr_format == 2:
        sizes = {"shape": document["shape"], "chunks": document["chunks"]}
        codecs = _missing_codecs_v2(document)
    else:
        grid = document["chunk_grid"]
        if not isinstance(grid, dict) or grid.get("name") != "regular":
            name = grid.get("name") if isinstance(grid, dict) else grid
            return f"the chunk grid {name!r} is not supported", "rewrite the volume with a regular grid"
        needed = [key for key, value in document.items() if key not in _FIELDS_V3 and not _may_be_ignored(value)]
        if needed or document.get("storage_transformers"):
            what = ", ".join(needed) or f"storage_transformers {one_line(json.dumps(document['storage_transformers']))}"
            return f"extensions that must be understood are not supported: {what}", "rewrite the volume without them"
        configuration = grid.get("configuration")
        sizes = {
            "shape": document["shape"],
            "chunk_shape": configuration.get("chunk_shape") if isinstance(configuration, dict) else None,
        }
        codecs = _missing_codecs_v3(document["codecs"])
    for key, size in sizes.items():
        if not isinstance(size, list) or not all(type(n) is int and n > 0 for n in size):
            return f"{key} is {size!r}, not a list of numbers above 0", "correct them"
    return next(codecs, None) or _no_number(document["dtype" if zarr_format == 2 else "data_type"], zarr_format)


def _missing_codecs_v2(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    filters = document.get("filters") or []
    for codec in (*(filters if isinstance(filters, list) else [filters]), document.get("compressor")):
        if codec is None:
            continue
        if not isinstance(codec, dict) or not isinstance(codec.get("id"), str):
            yield f"{codec!r} is no codec", "correct them"
        elif problem := _numcodecs_problem(codec["id"], codec):
            yield problem


def _missing_codecs_v3(codecs: Any) -> Iterator[tuple[str, str]]:
    """Of codecs, and of those inside of shards."""
    for codec in codecs if isinstance(codecs, list) else ():
        configuration = codec.get("configuration") if isinstance(codec, dict) else None
        if not isinstance(configuration, dict) or not isinstance(name := codec["name"], str):
            yield f"{codec!r} is no codec", "correct it"
            continue
        try:
            get_codec_class(name)
        except KeyError:
            yield _not_installed(name)
            continue
        if name.startswith("numcodecs."):
            plain = name.removeprefix("numcodecs.")
            if problem := _numcodecs_problem(plain, configuration | {"id": plain}, name):
                yield problem
        for key in _INNER:
            yield from _missing_codecs_v3(configuration.get(key))


def _numcodecs_problem(name: str, configuration: dict[str, Any], said: str | None = None) -> tuple[str, str] | None:
    try:
        numcodecs.registry.get_codec(dict(configuration))
    except UnknownCodecError:
        return _not_installed(said or name)
    except Exception as error:  # codecs raise whatever they like
        return f"the codec {said or name!r} refuses its configuration ({one_line(error)})", "correct it"
    return None


def _not_installed(name: str) -> tuple[str, str]:
    return (
        f"no codec {name!r} is installed",
        "install the package that provides it, or store the volume with blosc, zstd or gzip",
    )


def _no_number(dtype: Any, zarr_format: int) -> tuple[str, str] | None:
    """Why voxels of a dtype, as the metadata spell it, are not supported; None where they are."""
    what = str(dtype)
    if zarr_format == 3:
        supported = isinstance(dtype, str) and dtype in _NUMBERS_V3
    elif isinstance(dtype, str):
        try:
            parsed = np.dtype(dtype)
        except TypeError:
            return f"dtype {what!r} is unknown", "correct it, or convert the volume"
        supported = parsed.kind in "buif" and parsed.itemsize <= 8
        if supported and parsed.itemsize > 1 and dtype[:1] not in "<>":
            return f"dtype {what!r} does not say in which order its bytes are", "correct it to < or >"
        what += f" ({_KINDS[parsed.kind]})" if parsed.kind in _KINDS else ""
    else:
        supported, what = False, f"{'a structure of several values, ' * isinstance(dtype, list)}{one_line(what, 80)}"
    if supported:
        return None
    return f"its dtype {what} is not bool, nor an integer or float of up to 8 bytes", "convert the volume"


def _may_be_ignored(extension: Any) -> bool:
    return isinstance(extension, dict) and extension.get("must_understand") is False
