"""Which array of a group is a volume's level, and what to say of what is no volume."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vesuvius.config import ArrayConfig
from vesuvius.errors import DataError
from vesuvius.volumes.errors import FetchError
from vesuvius.volumes.format.metadata import kind_of
from vesuvius.volumes.store.source import Source

_NAMES = 1000
_NAMED = 8
_CONVERT = "convert it to OME-Zarr"
_METADATA = (".zarray", ".zgroup", "zarr.json")
_IMAGES = {".tif", ".tiff", ".png", ".jpg", ".jpeg", ".jp2", ".bmp", ".dcm"}


@dataclass(frozen=True)
class Level:
    """One level of an OME-Zarr group."""

    path: str  # of its array below the group
    entry: Any  # the group's `multiscales` entry
    dataset: Any  # its entry of this level
    paths: tuple[str, ...]  # the arrays of all levels from the finest
    version: str | None  # of OME-Zarr

    @property
    def title(self) -> str | None:
        """What the group calls the pyramid."""
        name = self.entry.get("name")
        return None if name is None else str(name)


def pick_level(source: Source, attributes: dict[str, Any], spec: ArrayConfig) -> Level:
    """The level of a group that a config names.

    Args:
        attributes: of the group; OME-Zarr 0.5 nests its own under "ome", and 0.4 does not.

    Raises:
        DataError: the group has no pyramid or no such level.
    """
    ome: Any = attributes["ome"] if isinstance(attributes.get("ome"), dict) else attributes
    try:
        entry = ome["multiscales"][0]
        datasets = list(entry["datasets"])
        paths = tuple(str(dataset["path"]) for dataset in datasets)
    except (KeyError, IndexError, TypeError) as error:
        what = "a bioformats2raw collection of images" if "bioformats2raw.layout" in ome else "a group"
        place = source.shown.rstrip("/")
        raise DataError(
            f"a volume is an array or an OME-Zarr image; got {place}, which is {what} without multiscales metadata; "
            f"{_to_one_in(source) or f'set path to an array or image in it: {place}/NAME'}"
        ) from error
    if spec.level >= len(paths):
        raise DataError(
            f"level must be one of 0..{len(paths) - 1}; got {spec.level} of {source.shown}; change data.volumes[].level"
        )
    version = entry.get("version", ome.get("version"))
    return Level(paths[spec.level], entry, datasets[spec.level], paths, None if version is None else str(version))


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
    path = Path(source.address)
    if not source.remote and path.is_file():
        with path.open("rb") as file:
            return kind_of(file.read(64)) or ("a file", "")
    for key, what in (("attributes.json", "an N5 container"), ("info", "a neuroglancer precomputed volume")):
        try:
            if source.exists(key, probing=True):
                return what, _CONVERT
        except (DataError, FetchError):
            continue
    return ("", "") if source.remote else _in_folder(source)


def _in_folder(source: Source) -> tuple[str, str]:
    """What a folder is, from the names in it."""
    try:
        names = _names_in(Path(source.address))
    except OSError as error:
        return f"a folder that cannot be listed ({error.strerror})", "change its permissions"
    if not names:
        return "an empty folder", ""
    suffix, count = Counter(Path(name).suffix.lower() for name in names).most_common(1)[0]
    if suffix in _IMAGES:
        return f"a folder of images ({count} {suffix})", _CONVERT
    if inside := _to_one_in(source):
        return "a folder that holds zarrs", inside
    if names[0] == "c" or all(part.isdigit() for part in names[0].split(".")):
        return "a folder of chunks without metadata", "copy its .zarray or zarr.json too"
    return "", ""


def _to_one_in(source: Source) -> str:
    """'set path to A or B', of the zarrs in a folder; '' where there are none, or none can be listed."""
    root = Path(source.address)
    try:
        if source.remote:
            names = source.list_one_level("")[1]
        else:
            names = [name for name in _names_in(root) if any((root / name / each).is_file() for each in _METADATA)]
    except (OSError, DataError):
        return ""
    names = sorted({*names} - {"OME"}, key=lambda name: (not name.isdigit(), len(name) * name.isdigit(), name))
    more = f" (and {len(names) - _NAMED} more)" if len(names) > _NAMED else ""
    places = [f"{source.shown.rstrip('/')}/{name}" for name in names[:_NAMED]]
    return f"set path to {' or '.join(places)}{more}" if names else ""


def _names_in(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in itertools.islice(entries, _NAMES))
