"""Where the voxels of a level lie in space, and what its axes are called: the OME-Zarr metadata of a volume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zarr

if TYPE_CHECKING:
    from vesuvius.volumes.volume import Volume

FloatTriple = tuple[float, float, float]


@dataclass(frozen=True)
class Geometry:
    """Voxel i of a level is at scale * i + translation, in `units` (None: not said); all (z, y, x)."""

    scale_zyx: FloatTriple
    translation_zyx: FloatTriple
    units_zyx: tuple[str | None, str | None, str | None]

    @property
    def voxel_size_um(self) -> FloatTriple | None:
        """Edge lengths (z, y, x) where all units are micrometres."""
        return self.scale_zyx if self.units_zyx == ("micrometer",) * 3 else None


@dataclass(frozen=True)
class Multiscale:
    """What an OME-Zarr group says of its pyramid.

    Attributes:
        axes: names of all axes; None where there are none.
        entry: the `multiscales` entry itself.
    """

    version: str | None
    title: str | None
    axes: tuple[str, ...] | None
    entry: Any


def read_multiscale(volume: Volume) -> Multiscale | None:
    """The metadata of the group that a volume is a level of; None for a bare array."""
    if not volume.level_paths:
        return None
    attributes: Any = zarr.open_group(volume.array.store, mode="r").attrs.asdict()
    ome = attributes.get("ome", attributes)  # OME-Zarr 0.5 nests its metadata under "ome", 0.4 does not
    entry: Any = ome["multiscales"][0]
    version, title = entry.get("version", ome.get("version")), entry.get("name")
    names = tuple(axis if isinstance(axis, str) else str(axis.get("name")) for axis in entry.get("axes", []))
    return Multiscale(
        version=None if version is None else str(version),
        title=None if title is None else str(title),
        axes=names or None,
        entry=entry,
    )


def level_geometry(entry: Any, path: str) -> Geometry | None:
    """What the transformations of one level, and then those of the whole pyramid, come to.  Pure.

    Args:
        entry: a `multiscales` entry.
        path: the level's array within the group.

    Returns:
        None where the metadata give no scale.
    """
    dataset = next(level for level in entry["datasets"] if str(level["path"]).strip("/") == path.strip("/"))
    scale: list[float] | None = None
    translation = [0.0, 0.0, 0.0]
    for holder in (dataset, entry):
        for transform in holder.get("coordinateTransformations", []):
            vector = [float(value) for value in transform.get(transform["type"], ())][-3:]
            if transform["type"] == "scale":
                scale = [a * b for a, b in zip(scale or [1.0] * 3, vector, strict=True)]
                translation = [a * b for a, b in zip(translation, vector, strict=True)]
            elif transform["type"] == "translation":
                translation = [a + b for a, b in zip(translation, vector, strict=True)]
    if scale is None:
        return None
    axes = [axis if isinstance(axis, dict) else {} for axis in entry.get("axes", [])][-3:] or [{}] * 3
    return Geometry(
        (scale[0], scale[1], scale[2]),
        (translation[0], translation[1], translation[2]),
        (axes[0].get("unit"), axes[1].get("unit"), axes[2].get("unit")),
    )
