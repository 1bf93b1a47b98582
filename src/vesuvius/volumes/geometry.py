"""Where the voxels of a level lie in space, and what its axes are called: the OME-Zarr metadata of a volume.

Reads the metadata of OME-Zarr 0.1 to 0.6.  Up to 0.5 `axes` names the axes of the arrays.  In 0.6 (RFC-5) it is
coordinate systems that have axes, and transformations say which axis of the array each of them is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import zarr

from vesuvius.config import Triple
from vesuvius.errors import DataError, one_line
from vesuvius.volumes.axes import Names, letter_of

FloatTriple = tuple[float, float, float]

_SI = {
    "yocto": -24, "zepto": -21, "atto": -18, "femto": -15, "pico": -12, "nano": -9, "micro": -6, "milli": -3,
    "centi": -2, "deci": -1, "": 0, "hecto": 2, "kilo": 3, "mega": 6, "giga": 9, "tera": 12, "peta": 15, "exa": 18,
    "zetta": 21, "yotta": 24,
}  # fmt: skip
MICROMETERS = {f"{prefix}meter": 10.0 ** (exponent + 6) for prefix, exponent in _SI.items()} | {
    "angstrom": 1e-4,
    "inch": 25_400.0,
    "foot": 304_800.0,
    "yard": 914_400.0,
    "mile": 1_609_344_000.0,
    "parsec": 3.0856775814913674e22,
} | {"nm": 1e-3, "um": 1.0, "\u00b5m": 1.0, "\u03bcm": 1.0, "micron": 1.0, "mm": 1e3}  # fmt: skip
"""How long the length units of OME-Zarr (names of UDUNITS-2) are, and what writers abbreviate them to."""


class UnsupportedTransformError(ValueError):
    """A transformation after which the axes of an array are not those of space."""


@dataclass(frozen=True)
class Geometry:
    """Voxel i of a level is at scale * i + translation, in `units` (None: not said); all (z, y, x)."""

    scale_zyx: FloatTriple
    translation_zyx: FloatTriple
    units_zyx: tuple[str | None, str | None, str | None]
    translated: bool = field(default=False, compare=False)  # whether a translation is given, be it 0

    @property
    def voxel_size_um(self) -> FloatTriple | None:
        """Edge lengths (z, y, x) where all units are lengths."""
        micrometers = [MICROMETERS.get(unit or "") for unit in self.units_zyx]
        z, y, x = (None if um is None else size * um for size, um in zip(self.scale_zyx, micrometers, strict=True))
        return None if z is None or y is None or x is None else (z, y, x)


@dataclass(frozen=True)
class Dimension:
    """An axis of space: scale times the index along one axis of the array, plus translation."""

    array_axis: int
    scale: float = 1.0
    translation: float = 0.0
    name: str | None = None
    unit: str | None = None


@dataclass(frozen=True)
class Space:
    """What a level's metadata say of its axes."""

    volume: str  # its name, for messages
    dimensions: tuple[Dimension, ...]  # of the coordinate system that the voxels are given in
    # scaled, translated: whether a scale, a translation is given
    scaled: bool = False
    translated: bool = False
    readable: bool = True  # whether all scales and translations can be read

    def array_names(self, ndim: int) -> Names | None:
        """Names of the array's axes; None where no axis has one."""
        names = {dimension.array_axis: dimension.name for dimension in self.dimensions}
        return tuple(map(names.get, range(ndim))) if any(names.values()) else None

    def geometry(self, zyx: Triple) -> Geometry | None:
        """Of the axes at these positions of the array; None where the metadata give no scale.

        Raises:
            DataError: the scale of one of them is not above 0.
        """
        if not (self.scaled and self.readable):
            return None
        at = {dimension.array_axis: dimension for dimension in self.dimensions}
        z, y, x = (at[axis] for axis in zyx)
        if not all(dimension.scale > 0 for dimension in (z, y, x)):
            scale = [z.scale, y.scale, x.scale]
            raise _unsupported(f"the scale {scale} of z, y, x, a mirrored axis or one without a size", self.volume)
        return Geometry(
            (z.scale, y.scale, x.scale),
            (z.translation, y.translation, x.translation),
            (z.unit, y.unit, x.unit),
            self.translated,
        )


def version_and_title(group: zarr.Group) -> tuple[str | None, str | None]:
    """What an OME-Zarr group says of its pyramid."""
    ome = ome_attributes(group)
    entry: Any = ome["multiscales"][0]
    version, title = entry.get("version", ome.get("version")), entry.get("name")
    return None if version is None else str(version), None if title is None else str(title)


def ome_attributes(group: zarr.Group) -> Any:
    """The OME metadata of a group, which OME-Zarr 0.5 nests under "ome" and 0.4 does not."""
    attributes: Any = group.attrs.asdict()
    ome = attributes.get("ome")
    return ome if isinstance(ome, dict) else attributes


def space_of(entry: Any, dataset: Any, ndim: int, name: str) -> Space:
    """What the transformations of one level, and then those of the whole pyramid, make of its axes.  Pure.

    In 0.6 the transformations of the pyramid lead on to other coordinate systems; they are followed only where the axes
    of the first one are not z, y and x.

    Args:
        entry: a `multiscales` entry.
        dataset: its entry of the level.
        ndim: axes of the level's array.
        name: of the volume, for messages.

    Raises:
        DataError: an axis of space is not one of the array, as after a rotation, or the metadata are malformed.
    """
    space = Space(name, tuple(Dimension(axis) for axis in range(ndim)))
    try:
        return _in_system(entry, dataset, space) if "coordinateSystems" in entry else _in_axes(entry, dataset, space)
    except UnsupportedTransformError as error:
        raise _unsupported(str(error), name) from error
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise DataError(
            f"the multiscales metadata of a volume must be well-formed; got {type(error).__name__}: {one_line(error)} "
            f"in {name}; correct its axes and transformations"
        ) from error


def _unsupported(what: str, name: str) -> DataError:
    return DataError(
        f"z, y and x must each be one axis of the array, in its direction; got {what} in the transformations of "
        f"{name}; resample it onto a grid along z, y and x, or correct its transformations"
    )


def _in_axes(entry: Any, dataset: Any, space: Space) -> Space:
    """OME-Zarr up to 0.5."""
    if entry.get("axes"):
        space = _named(space, entry["axes"])
    for holder in (dataset, entry):
        for transform in holder.get("coordinateTransformations") or ():
            space = _transformed(space, transform)
    return space


def _in_system(entry: Any, dataset: Any, space: Space) -> Space:
    """OME-Zarr 0.6."""
    systems = {str(system["name"]): system["axes"] for system in entry["coordinateSystems"]}
    reached = str(entry["coordinateSystems"][0]["name"])
    for transform in dataset.get("coordinateTransformations") or ():
        space = _transformed(space, transform)
        reached = _reference(transform.get("output")) or reached
    if reached not in systems:
        raise ValueError(f"the output {reached!r}, which is none of the coordinate systems {list(systems)}")
    space = _named(space, systems[reached])
    if _is_spatial(space):
        return space
    for transform in entry.get("coordinateTransformations") or ():
        further = systems.get(_reference(transform.get("output")) or "")
        if further is not None and _reference(transform.get("input")) == reached:
            other = _named(_transformed(space, transform), further)
            if _is_spatial(other):
                return other
    return space


def _reference(place: Any) -> str | None:
    """The coordinate system that an `input` or `output` means; drafts of 0.6 give its name alone."""
    return place if isinstance(place, str) else place.get("name") if place else None


def _named(space: Space, axes: Sequence[Any]) -> Space:
    """With the names and units of axes, which are objects, or names alone as in 0.3."""
    if len(axes) != len(space.dimensions):
        raise ValueError(f"{len(axes)} axes for an array of {len(space.dimensions)}")
    described = [axis if isinstance(axis, Mapping) else {"name": axis} for axis in axes]
    return replace(
        space,
        dimensions=tuple(
            replace(dimension, name=str(axis["name"]), unit=axis.get("unit"))
            for dimension, axis in zip(space.dimensions, described, strict=True)
        ),
    )


def _is_spatial(space: Space) -> bool:
    return {"z", "y", "x"} <= {letter_of(dimension.name) for dimension in space.dimensions}


def _transformed(space: Space, transform: Any) -> Space:
    """A space after one transformation.  Raises UnsupportedTransformError."""
    kind = transform["type"]
    match kind:
        case "identity":
            return replace(space, scaled=True)
        case "scale" | "translation":
            return _moved(space, kind, transform.get(kind))
        case "sequence":
            for part in transform["transformations"]:
                space = _transformed(space, part)
            return space
        case "bijection":
            return _transformed(space, transform["forward"])
        case "mapAxis":
            return _mapped(space, transform["mapAxis"])
        case "affine" | "rotation":
            return _multiplied(space, kind, transform.get(kind))
        case "byDimension":
            return _by_dimension(space, transform["transformations"])
    raise UnsupportedTransformError(f"a transformation of type {kind!r}")


def _moved(space: Space, kind: str, values: Any) -> Space:
    """Scaled or translated.  Values that cannot be read make the scale unknown: which axis is which does not depend on
    them."""
    try:
        vector = [float(value) for value in values]
    except (TypeError, ValueError):
        vector = []
    if len(vector) != len(space.dimensions):
        return replace(space, readable=False)
    if kind == "translation":
        moved = [replace(d, translation=d.translation + v) for d, v in zip(space.dimensions, vector, strict=True)]
        return replace(space, dimensions=tuple(moved), translated=True)
    scaled = [
        replace(d, scale=d.scale * v, translation=d.translation * v)
        for d, v in zip(space.dimensions, vector, strict=True)
    ]
    return replace(space, dimensions=tuple(scaled), scaled=True)


def _mapped(space: Space, order: Any) -> Space:
    """With its axes in another order; `order[i]` is the input axis that becomes output axis i."""
    if not isinstance(order, list):
        raise TypeError(f"mapAxis {order}, which is no list of axes")
    if sorted(order) != list(range(len(space.dimensions))):
        raise ValueError(f"mapAxis {order}, which is no order of {len(space.dimensions)} axes")
    sources = [space.dimensions[axis] for axis in order]
    return replace(space, dimensions=_with_names_of(sources, space.dimensions))


def _multiplied(space: Space, kind: str, matrix: Any) -> Space:
    """An affine transformation or rotation that does no more than permute, scale and translate axes."""
    if not isinstance(matrix, list):
        raise UnsupportedTransformError(f"{kind} stored in an array of its own")
    found = []
    for row in matrix:
        *factors, shift = map(float, row if kind == "affine" else (*row, 0))
        sources = [axis for axis, factor in enumerate(factors) if factor]
        if len(factors) != len(space.dimensions) or len(sources) != 1:
            raise UnsupportedTransformError(f"{kind} with the row {row}, which is not one axis of the array")
        if factors[sources[0]] < 0:
            raise UnsupportedTransformError(f"{kind} with the row {row}, a mirrored axis")
        source, factor = space.dimensions[sources[0]], factors[sources[0]]
        found.append(replace(source, scale=source.scale * factor, translation=source.translation * factor + shift))
    if sorted(dimension.array_axis for dimension in found) != sorted(d.array_axis for d in space.dimensions):
        raise UnsupportedTransformError(f"{kind} {matrix}, which does not give each axis once")
    return replace(
        space,
        dimensions=_with_names_of(found, space.dimensions),
        scaled=True,
        translated=kind == "affine" or space.translated,
    )


def _by_dimension(space: Space, parts: Any) -> Space:
    """Transformations of some of the axes each."""
    found: dict[int, Dimension] = {}
    for part in parts:
        if not all(isinstance(axis, int) for axis in (*part["inputAxes"], *part["outputAxes"])):
            raise TypeError(f"byDimension with {part['inputAxes']} to {part['outputAxes']}, which are no axis numbers")
        some = replace(space, dimensions=tuple(space.dimensions[axis] for axis in part["inputAxes"]))
        some = _transformed(some, part["transformation"])
        found |= dict(zip(part["outputAxes"], some.dimensions, strict=True))
        space = replace(some, dimensions=space.dimensions)
    if sorted(found) != list(range(len(space.dimensions))):
        raise ValueError(f"byDimension with the output axes {sorted(found)}")
    return replace(space, dimensions=_with_names_of([found[axis] for axis in sorted(found)], space.dimensions))


def _with_names_of(dimensions: Sequence[Dimension], named: Sequence[Dimension]) -> tuple[Dimension, ...]:
    """Names and units belong to the place of an axis, not to what is moved there."""
    return tuple(replace(d, name=n.name, unit=n.unit) for d, n in zip(dimensions, named, strict=True))
