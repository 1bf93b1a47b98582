"""Splits the volumes of a run into training boxes and held-out slabs; entries of one array share a slab."""

from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vesuvius.config import ArrayConfig, Triple, ValidationConfig
from vesuvius.errors import DataError
from vesuvius.plan.make_plan import Split, split_shared, split_volume
from vesuvius.volumes.alignment import align
from vesuvius.volumes.box import Box
from vesuvius.volumes.format.metadata import pick_level, read_node
from vesuvius.volumes.store.source import Source
from vesuvius.volumes.volume import Volume

_PORTS = {"http": ":80", "https": ":443"}


def split_volumes(
    channels: Sequence[Sequence[Volume]], boxes: Sequence[Box], patch_zyx: Triple, config: ValidationConfig
) -> list[Split]:
    """Split the box of each volume; those with the same voxels in any channel, at any level, get one slab.

    Reads metadata.

    Raises DataError: a box is too small, or entries that share voxels cannot be aligned, or not by a transform alike.
    """
    splits, volumes = dict[int, Split](), [each[0] for each in channels]
    for group in _groups(channels):
        first = volumes[group[0]]
        if len(group) == 1 or config.fraction == 0:
            made = [split_volume(volumes[n].name, volumes[n].shape_zyx, patch_zyx, config, boxes[n]) for n in group]
        else:
            names = [volumes[n].name for n in group]
            if len({tuple(each.spec.transform for each in channels[n]) for n in group}) > 1:
                raise DataError(
                    f"No slab can be held out of {' and '.join(names)}: a transform places the voxels that they share "
                    "elsewhere; set data.validation.fraction=0, or leave out that channel"
                )
            grids = [align(first, volumes[n], "the same scan") for n in group]
            made = split_shared(names, [boxes[n] for n in group], grids, patch_zyx, config)
        splits |= zip(group, made, strict=True)
    return [splits[n] for n in range(len(volumes))]


def _groups(volumes: Sequence[Sequence[Volume]]) -> list[list[int]]:
    groups: list[tuple[set[object], list[int]]] = []
    for index, channels in enumerate(volumes):
        arrays, members = set[object]().union(*map(_arrays, channels if len(volumes) > 1 else ())), [index]
        for group in [group for group in groups if group[0] & arrays]:
            groups.remove(group)
            arrays, members = arrays | group[0], group[1] + members
        groups.append((arrays, sorted(members)))
    return [members for _, members in groups]


def _arrays(volume: Volume) -> set[object]:
    """Identify the array of a volume and the other levels of its pyramid: however a path or an address is spelled.

    A folder is identified by its inode, so that links and relative paths do not matter; a URL by scheme, host and path,
    without credentials and query, which may be a signature.
    """
    source = volume.source
    root, paths = source.address, volume.level.paths if volume.level else ("",)
    if source.remote:
        url = urlsplit(root)
        scheme, host = url.scheme.lower(), url.netloc.rpartition("@")[2].lower()
        path = unquote(url.path) if scheme in _PORTS else root.partition("://")[2].partition("/")[2]
        base = f"{scheme}://{host.removesuffix(_PORTS.get(scheme, ':'))}"
        return {"/".join((base, *f"{path}/{each}".strip("/").split("/"))) for each in paths}
    if volume.level is None:  # perhaps a level, named by the path of its array
        parent = Path(root).resolve().parent
        with suppress(DataError), closing(Source(str(parent), source.config)) as above:
            if (node := read_node(above, "")) and not node.is_array:
                level = pick_level(above, node.document["attributes"], ArrayConfig(path=str(parent)))
                root, paths = str(parent), (*level.paths, Path(root).resolve().name)
    found = set[object]()
    for each in paths:
        with suppress(OSError):  # a level that was not copied
            facts = Path(root, each).stat()
            found.add((facts.st_dev, facts.st_ino))
    return found
