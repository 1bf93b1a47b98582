"""Says what lies at an address where a zarr is looked for and is not."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path

from vesuvius.errors import DataError
from vesuvius.volumes.errors import FetchError
from vesuvius.volumes.store.source import Source

_NAMES = 1000
_CONVERT = "convert it to OME-Zarr"
_FILES = {
    b"PK\x03\x04": ("a zip archive", "unpack it into a folder"),
    b"\x89HDF\r\n\x1a\n": ("an HDF5 file", _CONVERT),
    b"II*\0": ("a TIFF file", _CONVERT),
    b"MM\0*": ("a TIFF file", _CONVERT),
    b"II+\0": ("a TIFF file", _CONVERT),
    b"MM\0+": ("a TIFF file", _CONVERT),
    b"\x93NUMPY": ("a numpy file", _CONVERT),
    b"NRRD": ("an NRRD file", _CONVERT),
    b"\x1f\x8b": ("a gzip file", "unpack it"),
}
_SUFFIXES = {
    ".zip": _FILES[b"PK\x03\x04"],
    **dict.fromkeys((".h5", ".hdf5"), _FILES[b"\x89HDF\r\n\x1a\n"]),
    **dict.fromkeys((".tif", ".tiff"), _FILES[b"II*\0"]),
    **dict.fromkeys((".json", ".zarray", ".zgroup", ".zattrs"), ("a file inside a zarr", "set path to its folder")),
}
_IMAGES = {".tif", ".tiff", ".png", ".jpg", ".jpeg", ".jp2", ".bmp", ".dcm"}


def no_zarr_error(source: Source) -> DataError:
    """The error for an address without metadata of zarr.  Reads."""
    if source.forbidden:
        return DataError(
            f"a volume's store must answer; got {source.forbidden} for {source.shown}; check the address and the "
            "credentials"
        )
    what, remedy = _found(source)
    return DataError(
        f"a volume must be a zarr array or group; got {source.shown}, which is neither{what and f' but {what}'}; "
        f"{remedy or 'point path at the zarr itself (it holds .zarray, .zgroup or zarr.json)'}"
    )


def _found(source: Source) -> tuple[str, str]:
    """What it is, and the remedy; '' where unknown."""
    if not source.remote and Path(source.address).is_file():
        with Path(source.address).open("rb") as file:
            start = file.read(8)
        return next((words for magic, words in _FILES.items() if start.startswith(magic)), ("a file", ""))
    suffix = Path(source.address.rstrip("/")).suffix.lower()
    if source.remote and suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    if _is_there(source, "attributes.json"):
        return "an N5 container", _CONVERT
    if _is_there(source, "info"):
        return "a neuroglancer precomputed volume", _CONVERT
    return ("", "") if source.remote else _in_folder(Path(source.address))


def _is_there(source: Source, key: str) -> bool:
    try:
        return source.exists(key)
    except (DataError, FetchError):
        return False


def _in_folder(folder: Path) -> tuple[str, str]:
    """What a folder is, from the names in it."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in itertools.islice(entries, _NAMES))
    except OSError as error:
        return f"a folder that cannot be listed ({error.strerror})", "change its permissions"
    if not names:
        return "an empty folder", ""
    suffix, count = Counter(Path(name).suffix.lower() for name in names).most_common(1)[0]
    if suffix in _IMAGES:
        return f"a folder of images ({count} {suffix})", _CONVERT
    metadata = (".zarray", ".zgroup", "zarr.json")
    inside = [name for name in names if any((folder / name / each).is_file() for each in metadata)]
    if inside:
        more = f" (and {len(inside) - 8} more)" if len(inside) > 8 else ""
        return "a folder that holds zarrs", f"set path to {' or '.join(str(folder / n) for n in inside[:8])}{more}"
    if names[0] == "c" or all(part.isdigit() for part in names[0].split(".")):
        return "a folder of chunks without metadata", "copy its .zarray or zarr.json too"
    return "", ""
