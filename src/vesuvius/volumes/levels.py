"""Which array of a group is a volume's level, and what could be chosen where there is none."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import zarr

from vesuvius.config import ArrayConfig
from vesuvius.errors import DataError, one_line
from vesuvius.volumes.geometry import ome_attributes
from vesuvius.volumes.store.object_store import shown_address

log = logging.getLogger(__name__)

_CHILDREN_NAMED = 8


@dataclass(frozen=True)
class Level:
    """One level of an OME-Zarr group."""

    path: str  # of its array below the group
    entry: Any  # the group's `multiscales` entry
    dataset: Any  # its entry of this level
    paths: tuple[str, ...]  # the arrays of all levels from the finest


def pick_level(group: zarr.Group, spec: ArrayConfig) -> Level:
    """The level of a group that a config names.

    Raises:
        DataError: the group has no pyramid or no such level.
    """
    try:
        entry = ome_attributes(group)["multiscales"][0]
        datasets = list(entry["datasets"])
        paths = tuple(str(dataset["path"]) for dataset in datasets)
    except (KeyError, IndexError, TypeError) as error:
        raise DataError(_no_pyramid(group, shown_address(spec.path).rstrip("/"))) from error
    if spec.level >= len(paths):
        raise DataError(
            f"level must be one of 0..{len(paths) - 1}; got {spec.level} of {shown_address(spec.path)}; change "
            "data.volumes[].level"
        )
    return Level(paths[spec.level], entry, datasets[spec.level], paths)


def _no_pyramid(group: zarr.Group, path: str) -> str:
    """What to say of a group that is no OME-Zarr image; names the arrays and images in it."""
    collection = "bioformats2raw.layout" in ome_attributes(group)
    what = "a bioformats2raw collection of images" if collection else "a group without multiscales metadata"
    children = _found(group)
    named = [f"{path}/{child}" for child in children[:_CHILDREN_NAMED]]
    more = f" (and {len(children) - len(named)} more)" if len(children) > len(named) else ""
    remedy = f"set path to {' or '.join(named)}{more}" if named else f"set path to an array or image in it: {path}/NAME"
    return f"a volume is an array or an OME-Zarr image; got {path}, which is {what}; {remedy}"


def _found(group: zarr.Group) -> list[str]:
    try:
        group = zarr.open_group(group.store, mode="r")  # consolidated metadata name its members where none can list
        return _series(group) or _children(group)
    except Exception as error:  # as in `volume.py`: damaged metadata and stores raise many types; names are but a help
        log.debug("looking for arrays in %s: %s", group, one_line(error))
        return []


def _series(group: zarr.Group) -> list[str]:
    """The images that a bioformats2raw collection lists."""
    collection = group.get("OME")
    series = ome_attributes(collection).get("series") if isinstance(collection, zarr.Group) else None
    return list(map(str, series)) if isinstance(series, list) else []


def _children(group: zarr.Group) -> list[str]:
    """The arrays and images in a group, or the groups if there are none."""
    members = _members(group)
    volumes = [
        name
        for name, child in members.items()
        if (child.ndim >= 3 if isinstance(child, zarr.Array) else "multiscales" in ome_attributes(child))
    ]
    groups = [name for name, child in members.items() if isinstance(child, zarr.Group) and name != "OME"]
    return sorted(volumes or groups, key=lambda name: (len(name), name) if name.isdigit() else (1000, name))


def _members(group: zarr.Group) -> dict[str, zarr.Array[Any] | zarr.Group]:
    try:
        return dict(group.members())
    except ValueError:  # the store does not list; collections number their images from 0
        found: dict[str, zarr.Array[Any] | zarr.Group] = {}
        for name in map(str, range(_CHILDREN_NAMED)):
            child = group.get(name)
            if not isinstance(child, (zarr.Array, zarr.Group)):
                break
            found[name] = child
        return found
