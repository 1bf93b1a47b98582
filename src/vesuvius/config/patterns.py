"""Volumes by pattern, `images/*.zarr` with labels `labels/{name}_target.zarr`, and volumes files.  Reads folders."""

import glob
import logging
import os
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

from vesuvius.config.data import ArrayConfig, DataConfig, VolumeConfig
from vesuvius.config.section import Location
from vesuvius.errors import ConfigError

log = logging.getLogger(__name__)

NAME = "{name}"
_MOST_NAMED = 8  # missing files in a message
_PATHS = ("path", "labels", "condition", "mask", "channels", "more_labels", "transform", "volumes")
"""Keys of a volumes file that hold paths, or sections with paths."""


def match_volumes(data: DataConfig) -> DataConfig:
    """Return a copy with one volume for each match of a pattern, sorted; `{name}` in its other paths is its name.

    A path that exists is no pattern, whatever its characters, nor is a folder on the way that exists, or an address.
    The name is that of the last part of the path that the pattern leaves open, without `.zarr`; of a path that is no
    pattern, its last part.

    Raises ConfigError: a pattern matches nothing; files named by `{name}` do not exist (all of them are listed).
    """
    found: list[VolumeConfig] = []
    named: list[str] = []
    for volume in data.volumes:
        parts, paths, opened = Path(volume.path).parts, [volume.path], list[int]()
        if "://" not in volume.path and "\0" not in volume.path:
            whole = accumulate(parts, os.path.join)
            opened = [n for n, path in enumerate(whole) if glob.has_magic(parts[n]) and not os.path.lexists(path)]
        if opened:
            folder, *rest = os.path.join(*parts[: opened[0]]), *parts[opened[0] :]
            if not (paths := sorted(glob.glob(os.path.join(glob.escape(folder), *rest)))):
                why = "no path there matches" if os.path.isdir(folder) else "there is no such folder"
                raise ConfigError(f"{volume.path} is a pattern of paths in {folder}, but {why}; correct data.volumes")
        same = [each.path for each in (*volume.labels, volume.mask) if each and NAME not in each.path]
        if same and len(paths) > 1:
            text = "%s is used for all %d matches of %s; %s gives each its own"
            log.warning(text, same[0], len(paths), parts[-1], NAME)
        for path in paths:
            last = Path(path.partition("?")[0] if "://" in path else path).parts[opened[-1] if opened else -1]
            matched = volume if path == volume.path else volume.model_copy(update={"path": Location(path)})
            found.append(_with_name(matched, name_of(last), named))
    wanted = dict.fromkeys(named)
    if missing := [path for path in wanted if "://" not in path and not os.path.lexists(path)]:
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        raise ConfigError(
            f"{len(missing)} of {len(wanted)} paths with {NAME} do not exist: {', '.join(missing[:_MOST_NAMED])}{more}"
            "; add them, or match fewer volumes"
        )
    return data.model_copy(update={"volumes": tuple(found)})


def name_of(part: str) -> str:
    """Return the name of a volume: a part of its path, without `.zarr`."""
    return re.sub(r"(\.ome)?\.zarr$", "", part)


def _with_name(value: Any, name: str, named: list[str]) -> Any:
    """Return a path, an array, or several, with a name in place of `{name}`; adds the new paths to `named`."""
    match value:
        case Location() if NAME in value and not os.path.lexists(value):
            named.append(path := Location(value.replace(NAME, name)))
            return path
        case tuple():
            return tuple(_with_name(each, name, named) for each in value)
        case ArrayConfig():
            changed = {key: new for key, old in value if (new := _with_name(old, name, named)) != old}
            return value.model_copy(update=changed) if changed else value
    return value


def located(value: Any, folder: Path) -> Any:
    """Return the values of a volumes file with paths relative to its folder."""
    match value:
        case str():
            return value if "://" in value or value.startswith("~") else os.path.join(folder, value)
        case list():
            return [located(each, folder) for each in value]
        case dict():
            return {key: located(each, folder) if key in _PATHS else each for key, each in value.items()}
    return value
