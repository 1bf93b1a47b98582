"""Where the voxels of a level lie in space, and which axes of its array are z, y and x, in whatever order.

Scales and translations are read, of OME-Zarr 0.1 to 0.6; in 0.6 the axes are those of the coordinate system that a
level is given in.  Any other transformation is refused: after it the axes of an array may not be those of space.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import zarr
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import DataError, one_line
from vesuvius.volumes.box import triple

T = TypeVar("T")
Names = tuple[str | None, ...]
"""What the axes of an array are called, in stored order."""

_SPACE = ("z", "y", "x")
_MOST_CHANNELS = 4  # RGBA
_WORDS = {"depth": "z", "height": "y", "width": "x"}
FloatTriple = tuple[float, float, float]

MICROMETERS = {
    "angstrom": 1e-4, "nanometer": 1e-3, "micrometer": 1.0, "millimeter": 1e3, "centimeter": 1e4, "meter": 1e6,
    "nm": 1e-3, "um": 1.0, "\u00b5m": 1.0, "\u03bcm": 1.0, "\\u00B5m": 1.0, "micron": 1.0, "microns": 1.0, "mm": 1e3,
    "cm": 1e4, "m": 1e6,
}  # fmt: skip
"""How long units of length are: names of OME-Zarr, and what writers abbreviate them to."""


def unit_name(unit: str | None) -> str | None:
    """OME-Zarr's name of a unit of length; None for anything else."""
    length = MICROMETERS.get(unit or "")
    return next((name for name, micrometers in MICROMETERS.items() if micrometers == length), None)


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


VOXELS = Geometry((1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (None, None, None))
"""Of an array whose metadata do not say where it lies."""


@dataclass(frozen=True)
class Space:
    """What a level's metadata say of the axes of its array, in stored order."""

    volume: str  # its name, for messages
    names: Names | None  # None where no axis has one
    units: tuple[str | None, ...]
    scale: tuple[float, ...] | None  # None where none is given, or it cannot be read
    translation: tuple[float, ...] | None

    def geometry(self, zyx: Triple) -> Geometry | None:
        """Of the axes at these positions of the array; None where the metadata give no scale.  Raises DataError where
        one is not above 0."""
        if self.scale is None:
            return None
        shift = self.translation or (0.0,) * len(self.scale)
        (sz, sy, sx), (tz, ty, tx) = (tuple(values[axis] for axis in zyx) for values in (self.scale, shift))
        uz, uy, ux = (self.units[axis] for axis in zyx)
        if not all(math.isfinite(size) and size > 0 for size in (sz, sy, sx)):
            what = f"the scale {[sz, sy, sx]} of z, y, x, a mirrored axis or one without a size"
            raise _unsupported(what, self.volume)
        return Geometry((sz, sy, sx), (tz, ty, tx), (uz, uy, ux), self.translation is not None)


def space_of(entry: Any, dataset: Any, ndim: int, name: str) -> Space:
    """What the transformations of one level, and then those of the whole pyramid, make of its axes.  Pure.

    Args:
        entry, dataset: a `multiscales` entry, and its entry of the level.
        ndim: axes of the level's array.
        name: of the volume, for messages.

    Raises:
        DataError: there is a transformation of another type, or the metadata are malformed.
    """
    try:
        transforms = list(dataset.get("coordinateTransformations") or ())
        if "coordinateSystems" in entry:
            axes = _axes_reached(entry, transforms)
        else:
            axes = entry.get("axes") or []
            transforms += entry.get("coordinateTransformations") or ()
        described = [axis if isinstance(axis, Mapping) else {"name": axis} for axis in axes]  # names alone, as in 0.3
        if described and len(described) != ndim:
            raise ValueError(f"{len(described)} axes for an array of {ndim}")
        names = tuple(str(axis["name"]) for axis in described) or None
        units = tuple(axis.get("unit") for axis in described) or (None,) * ndim
        return Space(name, names, units, *_scale_and_translation(transforms, ndim, name))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise DataError(
            f"the multiscales metadata of a volume must be well-formed; got {type(error).__name__}: {one_line(error)} "
            f"in {name}; correct its axes and transformations"
        ) from error


def _axes_reached(entry: Any, transforms: list[Any]) -> Any:
    """The axes of the coordinate system that a level's transformations lead to: OME-Zarr 0.6."""
    systems = {str(system["name"]): system["axes"] for system in entry["coordinateSystems"]}
    output = transforms[-1].get("output") if transforms else None
    reached = output.get("name") if isinstance(output, Mapping) else output  # drafts of 0.6 give its name alone
    reached = reached or next(iter(systems), None)
    if reached not in systems:
        raise ValueError(f"the output {reached!r}, which is none of the coordinate systems {list(systems)}")
    return systems[reached]


def _scale_and_translation(
    transforms: list[Any], ndim: int, name: str
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Those of a chain of transformations; values that cannot be read make both unknown."""
    scale, translation, kinds = np.ones(ndim), np.zeros(ndim), set()
    waiting = list(transforms)
    while waiting:
        transform = waiting.pop(0)
        kind = transform["type"]
        if kind == "sequence":
            waiting[:0] = transform["transformations"]
        elif kind == "identity":
            kinds.add("scale")
        elif kind in ("scale", "translation"):
            kinds.add(kind)
            try:
                values = np.array(transform.get(kind), np.float64).reshape(ndim)
            except (TypeError, ValueError):
                return None, None
            if kind == "scale":
                scale, translation = scale * values, translation * values
            else:
                translation = translation + values
        else:
            raise _unsupported(f"a transformation of type {kind!r}", name)
    found = tuple(scale.tolist()), tuple(translation.tolist())
    return found[0] if "scale" in kinds else None, found[1] if "translation" in kinds else None


def _unsupported(what: str, name: str) -> DataError:
    return DataError(
        f"z, y and x must each be one axis of the array, in its direction, by scale and translation alone; got {what} "
        f"in the transformations of {name}; resample it onto a grid along z, y and x, or correct its transformations"
    )


# ---- axes


@dataclass(frozen=True)
class Axes:
    """The axes of an array."""

    zyx: Triple  # positions of z, y and x among them
    select: tuple[int, ...] = ()  # the index at which each other axis is fixed, in stored order

    @cached_property
    def others(self) -> tuple[int, ...]:
        """Positions of the axes that `select` fixes."""
        return tuple(axis for axis in range(3 + len(self.select)) if axis not in self.zyx)

    def zyx_of(self, per_axis: Sequence[T]) -> tuple[T, T, T]:
        """Of one value per stored axis, those of z, y and x."""
        return triple(per_axis[axis] for axis in self.zyx)

    def others_of(self, per_axis: Sequence[T]) -> tuple[T, ...]:
        """Of one value per stored axis, those of the axes that `select` fixes."""
        return tuple(per_axis[axis] for axis in self.others)

    def stored(self, zyx: Sequence[T], others: Sequence[T]) -> tuple[T, ...]:
        """Values of z, y, x and of the other axes, in stored order."""
        values = dict(zip((*self.zyx, *self.others), (*zyx, *others), strict=True))
        return tuple(values[axis] for axis in range(len(values)))

    def to_zyx(self, voxels: NDArray[Any]) -> NDArray[Any]:
        """A view whose first three axes are z, y, x, of an array whose first three are these in stored order."""
        order = [sorted(self.zyx).index(axis) for axis in self.zyx]
        return voxels.transpose(*order, *range(3, voxels.ndim))


def find_axes(
    name: str, array: zarr.Array[Any], ome_names: Names | None, select: tuple[int, ...]
) -> tuple[Axes, Names]:
    """The axes of an array, from their names.

    Without names of space the last three are z, y and x; but a last axis of up to 4 after longer ones holds channels,
    as of a colour picture, and z, y and x are the three before it.

    Args:
        name: of the volume, for messages.
        ome_names: from the group's metadata; None where it has none.

    Returns:
        The axes, and their names: None where an axis has none.

    Raises:
        DataError: z, y and x are not there once each, names contradict each other, or `select` does not fit.
    """
    own_names = _own_names(array)
    names = ome_names or own_names
    words = f"{f'axes {_listed(names)}' if names else f'{array.ndim} axes'} of shape {array.shape} in {name}"
    if array.ndim < 3:
        raise DataError(f"a volume has three axes z, y, x; got {words}; stack its slices into one array (Z, Y, X)")
    pairs = zip(_letters(ome_names or ()), _letters(own_names or ()), strict=False)
    if any(own in _SPACE and own != ome for ome, own in pairs):
        raise DataError(
            f"the axes of an OME-Zarr and the dimension_names of its arrays must agree; got {_listed(ome_names or ())} "
            f"and {_listed(own_names or ())} in {name}; correct the wrong one"
        )
    end = array.ndim
    if end > 3 and array.shape[-1] <= _MOST_CHANNELS < min(array.shape[-4:-1]):
        end -= 1
    zyx = (end - 3, end - 2, end - 1)
    if names and (ome_names or spatial(names)):
        letters = _letters(names)
        if any(letters.count(letter) != 1 for letter in _SPACE):
            raise DataError(
                f"a volume has three axes z, y, x, each once; got {words}; correct the names of the axes in its "
                "metadata (`axes`, `coordinateSystems` or `dimension_names`)"
            )
        zyx = triple(map(letters.index, _SPACE))
    axes, extra = Axes(zyx, select), array.ndim - 3
    if len(select) != extra or any(i >= n for i, n in zip(select, axes.others_of(array.shape), strict=True)):
        raise DataError(
            f"a volume has three axes z, y, x, and `select` fixes each other axis inside the array; got {words} with "
            f"select={list(select)}; set data.volumes[].select to {extra} {'index' if extra == 1 else 'indices'}, e.g. "
            f"{[0] * extra}"
        )
    return axes, names or (None,) * array.ndim


def _own_names(array: zarr.Array[Any]) -> Names | None:
    """dimension_names of zarr v3, or what xarray writes in zarr v2; None where some are missing and none is z, y or
    x."""
    found: Any = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS")
    if not isinstance(found, (list, tuple)) or len(found) != array.ndim:
        return None
    names = tuple(None if one is None else str(one) for one in found)
    return names if spatial(names) or all(names) else None


def spatial(names: Names) -> bool:
    """Whether one of these names is z, y or x: if none is, the last three axes are taken for them."""
    return not set(_SPACE).isdisjoint(_letters(names))


def _letters(names: Names) -> list[str]:
    """Names of axes in lower case; z, y and x for depth, height and width."""
    lower = [(name or "").strip().lower() for name in names]
    return [_WORDS.get(name, name) for name in lower]


def _listed(names: Names) -> str:
    return ", ".join(one or "(no name)" for one in names)
