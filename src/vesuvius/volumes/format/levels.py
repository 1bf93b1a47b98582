"""Which array of a group is a volume's level, and what to say of what is no volume."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vesuvius.config import ArrayConfig
from vesuvius.errors import DataError
from vesuvius.volumes.format.metadata import kind_of
from vesuvius.volumes.store.source import Source

_NAMED = 8
_METADATA = (".zarray", ".zgroup", "zarr.json")


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
            f"{_choice(source) or f'set path to an array or image in it: {place}/NAME'}"
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
    path = Path(source.address)
    what, remedy = "", "point path at the zarr itself (it holds .zarray, .zgroup or zarr.json)"
    if not source.remote and path.is_file():
        with path.open("rb") as file:
            what, remedy = kind_of(file.read(64)) or ("a file", remedy)
    elif found := _names(source):
        names = sorted((*found[0], *found[1]))
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        what = f"a folder of {', '.join(names[:_NAMED])}{more}" if names else "" if source.remote else "an empty folder"
        remedy = _choice(source) or remedy
    return DataError(
        f"a volume must be a zarr array or group; got {source.shown}, which is neither{what and f' but {what}'}; "
        f"{remedy}"
    )


def _choice(source: Source) -> str:
    """'set path to A or B', of the zarrs in a group or folder; '' where there are none, or none can be listed."""
    folders = (_names(source) or ([], []))[1]
    if not source.remote:
        folders = [name for name in folders if any(Path(source.address, name, each).is_file() for each in _METADATA)]
    names = sorted({*folders} - {"OME"}, key=lambda name: (not name.isdigit(), len(name) * name.isdigit(), name))
    more = f" (and {len(names) - _NAMED} more)" if len(names) > _NAMED else ""
    places = [f"{source.shown.rstrip('/')}/{name}" for name in names[:_NAMED]]
    return f"set path to {' or '.join(places)}{more}" if names else ""


def _names(source: Source) -> tuple[list[str], list[str]] | None:
    """Files and folders at an address; None where they cannot be listed."""
    try:
        return source.list_one_level("")
    except DataError:
        return None
