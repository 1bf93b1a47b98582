"""The position of a level's voxels in space, and which axes of its array are z, y and x.

Reads scales and translations of OME-Zarr 0.1 to 0.6; in 0.6 the axes are those of the coordinate system of the level.
Any other transformation is refused, because it may turn the axes of the array away from those of space.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self, TypeVar

import numpy as np
import zarr
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import DataError, one_line
from vesuvius.volumes.box import triple

T = TypeVar("T")
Names = tuple[str | None, ...]
"""Names of an array's axes, in stored order."""

_SPACE = ("z", "y", "x")
_MOST_CHANNELS = 4  # RGBA
AXIS_WORDS = {"depth": "z", "height": "y", "width": "x"}
FloatTriple = tuple[float, float, float]

_SI = (
    ("yotta", "Y", 24), ("zetta", "Z", 21), ("exa", "E", 18), ("peta", "P", 15), ("tera", "T", 12), ("giga", "G", 9),
    ("mega", "M", 6), ("kilo", "k", 3), ("hecto", "h", 2), ("deca", "da", 1), ("", "", 0), ("deci", "d", -1),
    ("centi", "c", -2), ("milli", "m", -3), ("micro", "u", -6), ("nano", "n", -9), ("pico", "p", -12),
    ("femto", "f", -15), ("atto", "a", -18), ("zepto", "z", -21), ("yocto", "y", -24),
)  # fmt: skip
_OTHERS = {"angstrom": 1e-4, "inch": 25.4e3, "foot": 304.8e3, "yard": 914.4e3, "mile": 1609.344e6, "parsec": 3.0857e22}
MICROMETERS = {
    **{f"{name}meter": float(f"1e{power + 6}") for name, _, power in _SI},
    **_OTHERS,
    **{f"{symbol}m": float(f"1e{power + 6}") for _, symbol, power in _SI},
    **dict(zip(("\u00c5", "in", "ft", "yd", "mi", "pc"), _OTHERS.values(), strict=True)),
    "\u00b5m": 1.0, "\u03bcm": 1.0, "\\u00B5m": 1.0, "micron": 1.0, "microns": 1.0, "\u212b": 1e-4,
}  # fmt: skip
"""Units of length in micrometers: the names in OME-Zarr, and the abbreviations of OME-XML and some writers."""


def unit_name(unit: object) -> str | None:
    """The OME-Zarr name of a unit of length, also from a plural or British spelling; None for anything else."""
    word = unit.strip() if isinstance(unit, str) else ""
    length = MICROMETERS.get(word) or MICROMETERS.get(word.lower().replace("metre", "meter").removesuffix("s"))
    return next((name for name, micrometers in MICROMETERS.items() if micrometers == length), None)


@dataclass(frozen=True)
class Geometry:
    """Voxel i of a level is at scale * i + translation, in `units` (None: unknown); all (z, y, x)."""

    scale_zyx: FloatTriple
    translation_zyx: FloatTriple
    units_zyx: tuple[str | None, str | None, str | None]
    translated: bool = field(default=False, compare=False)  # whether the metadata have a translation, even 0

    @property
    def voxel_size_um(self) -> FloatTriple | None:
        """Edge lengths (z, y, x); None unless all units are lengths."""
        micrometers = [MICROMETERS.get(unit or "") for unit in self.units_zyx]
        z, y, x = (None if um is None else size * um for size, um in zip(self.scale_zyx, micrometers, strict=True))
        return None if z is None or y is None or x is None else (z, y, x)

    @property
    def is_scaled(self) -> bool:
        """Whether the voxel size is known: writers that do not know it write 1 without a unit."""
        return set(self.scale_zyx) != {1.0} or any(unit in MICROMETERS for unit in self.units_zyx)

    @property
    def is_square(self) -> bool:
        """Whether voxels are as long along y as along x (within 0.1 %), or it is unknown."""
        (_, y, x), (_, *units) = self.scale_zyx, self.units_zyx
        one, two = (MICROMETERS.get(unit or "", 1.0) for unit in units)
        if not MICROMETERS.keys() >= set(units) and units[0] != units[1]:
            return True
        return math.isclose(y * one, x * two, rel_tol=1e-3)

    def resized(self, scale_zyx: FloatTriple, units_zyx: tuple[str | None, str | None, str | None]) -> Self:
        """The same grid with another voxel size: the translation stays the same number of voxels."""
        voxels = zip(self.translation_zyx, self.scale_zyx, scale_zyx, strict=True)
        return type(self)(scale_zyx, triple(t / old * new for t, old, new in voxels), units_zyx, self.translated)

    def starting_at(self, start_zyx: Triple) -> Self:
        """The same grid from a later voxel on."""
        places = zip(self.translation_zyx, self.scale_zyx, start_zyx, strict=True)
        return replace(self, translation_zyx=triple(t + size * lo for t, size, lo in places), translated=True)

    def of(self, other: Self, axis: int) -> tuple[float, float]:
        """The other's voxel size along an axis, and its start, in voxels of this one; an unknown unit is the same."""
        first, second = (MICROMETERS.get(each.units_zyx[axis] or "") for each in (self, other))
        one, two = (1.0, 1.0) if first is None or second is None else (first, second)
        voxel = self.scale_zyx[axis] * one
        shift = (other.translation_zyx[axis] * two - self.translation_zyx[axis] * one) / voxel
        return other.scale_zyx[axis] * two / voxel, shift


VOXELS = Geometry((1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (None, None, None))
"""The geometry of an array without metadata."""


_ROUNDED = 0.01  # of a length: writers round scales


def contradictions(levels: Mapping[str, tuple[Triple, Geometry]]) -> dict[str, str]:
    """Find levels of a pyramid whose shape does not fit their scale and translation, and why, by path.  Pure.

    Levels cover the same region: sizes in space differ by less than a voxel of the coarser one, as all downsampling
    that rounds down or up leaves, and so do the first voxels.  Which of two levels is wrong cannot be known: a level is
    unless it fits more than half of all, itself included.
    """
    problems: dict[str, list[str]] = {path: [] for path in levels}
    for one, two in itertools.combinations(levels, 2):
        if problem := _contradiction(one, *levels[one], two, *levels[two]):
            problems[one].append(problem)
            problems[two].append(problem)
    return {path: found[0] for path, found in problems.items() if 2 * len(found) >= len(levels)}


def _contradiction(one: str, size: Triple, first: Geometry, two: str, shape: Triple, second: Geometry) -> str | None:
    """Why two levels cannot cover the same region, with both ratios; None if they can."""
    pairs = [(*first.of(second, axis), size[axis], shape[axis]) for axis in range(3)]
    if any(abs(n * ratio - voxels) >= max(ratio, 1) + _ROUNDED * voxels for ratio, _, voxels, n in pairs):
        declared = " x ".join(f"{ratio:.4g}" for ratio, *_ in pairs)
        real = " x ".join(f"{voxels / n:.4g}" for *_, voxels, n in pairs)
        return (
            f"the scale of level {two!r} is {declared} times that of level {one!r}, but by the shapes {shape} and "
            f"{size} it is {real} times"
        )
    if any(abs(shift) > max(ratio, 1) + _ROUNDED * voxels for ratio, shift, voxels, _ in pairs):
        shifts = ", ".join(f"{shift:.6g}" for _, shift, *_ in pairs)
        return f"level {two!r} begins {shifts} voxels from level {one!r}, but both cover the same region"
    return None


@dataclass(frozen=True)
class Space:
    """The axes of a level's array according to its metadata, in stored order."""

    volume: str  # its name, for messages
    names: Names | None  # None if no axis has a name
    units: tuple[str | None, ...]
    scale: tuple[float, ...] | None  # None if absent or malformed
    translation: tuple[float, ...] | None

    def geometry(self, zyx: Triple) -> Geometry | None:
        """The geometry of three axes; None if the metadata have no scale.  Raises DataError if one is not above 0."""
        if self.scale is None:
            return None
        shift = self.translation or (0.0,) * len(self.scale)
        (sz, sy, sx), (tz, ty, tx) = (tuple(values[axis] for axis in zyx) for values in (self.scale, shift))
        uz, uy, ux = (self.units[axis] for axis in zyx)
        if not all(math.isfinite(size) and size > 0 for size in (sz, sy, sx)):
            raise _unsupported(f"the scale {[sz, sy, sx]} of z, y, x is not positive", self.volume)
        return Geometry((sz, sy, sx), (tz, ty, tx), (uz, uy, ux), self.translation is not None)


def space_of(entry: Any, dataset: Any, ndim: int, name: str) -> Space:
    """Apply the transformations of a level, whose array has `ndim` axes, then those of the whole pyramid.  Pure.

    `entry` is a `multiscales` entry, `dataset` its dataset for the level.  Raises DataError: there is a transformation
    of another type, or the metadata are malformed.
    """
    try:
        transforms = list(dataset.get("coordinateTransformations") or ())
        if "coordinateSystems" in entry:
            axes = _output_axes(entry, transforms)
        else:
            axes = entry.get("axes") or []
            transforms += entry.get("coordinateTransformations") or ()
        described = [axis if isinstance(axis, Mapping) else {"name": axis} for axis in axes]  # plain names, as in 0.3
        if described and len(described) != ndim:
            raise ValueError(f"{len(described)} axes for an array of {ndim}")
        names = tuple(str(axis["name"]) for axis in described) or None
        given = [axis.get("unit") for axis in described] or [None] * ndim
        units = tuple(unit_name(unit) or (unit if isinstance(unit, str) else None) for unit in given)
        return Space(name, names, units, *_scale_and_translation(transforms, ndim, name))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise DataError(
            f"Cannot read the multiscales metadata of {name} ({type(error).__name__}: {one_line(error)}); correct its "
            "axes and transformations"
        ) from error


def _output_axes(entry: Any, transforms: list[Any]) -> Any:
    """The axes of the coordinate system into which a level's transformations lead (OME-Zarr 0.6)."""
    systems = {str(system["name"]): system["axes"] for system in entry["coordinateSystems"]}
    output = transforms[-1].get("output") if transforms else None
    target = output.get("name") if isinstance(output, Mapping) else output  # drafts of 0.6 give only the name
    target = target or next(iter(systems), None)
    if target not in systems:
        raise ValueError(f"the output {target!r} is not one of the coordinate systems {list(systems)}")
    return systems[target]


def _scale_and_translation(
    transforms: list[Any], ndim: int, name: str
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Combine a chain of transformations; a malformed one makes both unknown."""
    scale, translation, kinds = np.ones(ndim), np.zeros(ndim), set()
    pending = list(transforms)
    while pending:
        transform = pending.pop(0)
        kind = transform["type"]
        if kind == "sequence":
            pending[:0] = transform["transformations"]
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
            raise _unsupported(f"there is a transformation of type {kind!r}", name)
    found = tuple(scale.tolist()), tuple(translation.tolist())
    return found[0] if "scale" in kinds else None, found[1] if "translation" in kinds else None


def _unsupported(problem: str, name: str) -> DataError:
    return DataError(
        f"Cannot use the transformations of {name}: {problem}, but only scales above 0 and translations are supported; "
        "resample the volume onto a grid along z, y and x, or correct its transformations"
    )


# ---- axes


@dataclass(frozen=True)
class Axes:
    zyx: Triple  # positions of z, y and x among them
    select: tuple[int, ...] = ()  # the selected index of each other axis, in stored order

    @cached_property
    def others(self) -> tuple[int, ...]:
        """Positions of the axes that `select` fixes."""
        return tuple(axis for axis in range(3 + len(self.select)) if axis not in self.zyx)

    def zyx_of(self, per_axis: Sequence[T]) -> tuple[T, T, T]:
        """Pick the values of z, y and x from one value per stored axis."""
        return triple(per_axis[axis] for axis in self.zyx)

    def others_of(self, per_axis: Sequence[T]) -> tuple[T, ...]:
        """Pick the values of the other axes from one value per stored axis."""
        return tuple(per_axis[axis] for axis in self.others)

    def stored(self, zyx: Sequence[T], others: Sequence[T]) -> tuple[T, ...]:
        """Merge values of z, y, x and of the other axes into stored order."""
        values = dict(zip((*self.zyx, *self.others), (*zyx, *others), strict=True))
        return tuple(values[axis] for axis in range(len(values)))

    def to_zyx(self, voxels: NDArray[Any]) -> NDArray[Any]:
        """Reorder the first three axes from stored order to z, y, x.  Returns a view."""
        order = [sorted(self.zyx).index(axis) for axis in self.zyx]
        return voxels.transpose(*order, *range(3, voxels.ndim))

    def slab(self, voxels: NDArray[Any], others: Sequence[int]) -> NDArray[Any]:
        """The voxels at an index of each other axis, along z, y, x.  Returns a view."""
        selection: Any = self.stored((slice(None),) * 3, others)
        return self.to_zyx(voxels[selection])


def find_axes(
    name: str, array: zarr.Array[Any], ome_names: Names | None, select: tuple[int, ...]
) -> tuple[Axes, Names]:
    """Find z, y and x among the axes of an array, by name.  Returns them and all names.

    Without such names, from the group's metadata or the array's, they are the last three axes; a last axis of at most 4
    after longer ones holds color channels and is skipped.  Raises DataError: z, y and x do not occur once each, names
    contradict each other, or `select` does not fit.
    """
    own_names = _own_names(array)
    names = ome_names or own_names
    words = f"{f'axes {_listed(names)}' if names else f'{array.ndim} axes'} of shape {array.shape} in {name}"
    if array.ndim < 3:
        raise DataError(f"A volume needs the axes z, y, x, not {words}; stack the slices into one array (Z, Y, X)")
    pairs = zip(_letters(ome_names or ()), _letters(own_names or ()), strict=False)
    if any(own in _SPACE and own != ome for ome, own in pairs):
        raise DataError(
            f"The axes of the OME-Zarr metadata ({_listed(ome_names or ())}) and the dimension_names of the array "
            f"({_listed(own_names or ())}) disagree in {name}; correct the wrong ones"
        )
    end = array.ndim - has_color_last(array.shape)
    zyx = (end - 3, end - 2, end - 1)
    if names and (ome_names or spatial(names)):
        letters = _letters(names)
        if any(letters.count(letter) != 1 for letter in _SPACE):
            raise DataError(
                f"A volume needs the axes z, y, x once each, not {words}; correct the axis names in its metadata "
                "(`axes`, `coordinateSystems` or `dimension_names`)"
            )
        zyx = triple(map(letters.index, _SPACE))
    axes, extra = Axes(zyx, select), array.ndim - 3
    if len(select) != extra or any(i >= n for i, n in zip(select, axes.others_of(array.shape), strict=True)):
        raise DataError(
            f"select={list(select)} does not fit {words}: it needs a valid index for each axis other than z, y, x; set "
            f"data.volumes[].select to {extra} {'index' if extra == 1 else 'indices'}, e.g. {[0] * extra}"
        )
    return axes, names or (None,) * array.ndim


def has_color_last(shape: Sequence[int]) -> bool:
    """Whether the last axis holds color channels: at most 4, after longer axes."""
    return len(shape) > 3 and shape[-1] <= _MOST_CHANNELS < min(shape[-4:-1])


def _own_names(array: zarr.Array[Any]) -> Names | None:
    """dimension_names of zarr v3, or xarray's attribute of zarr v2; None if incomplete and without z, y and x."""
    found: Any = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS")
    if not isinstance(found, (list, tuple)) or len(found) != array.ndim:
        return None
    names = tuple(None if one is None else str(one) for one in found)
    return names if spatial(names) or all(names) else None


def spatial(names: Names) -> bool:
    """Whether any of these names is z, y or x; if not, the last three axes are used."""
    return not set(_SPACE).isdisjoint(_letters(names))


def _letters(names: Names) -> list[str]:
    """Axis names in lower case, with depth, height and width as z, y and x."""
    lower = [(name or "").strip().lower() for name in names]
    return [AXIS_WORDS.get(name, name) for name in lower]


def _listed(names: Names) -> str:
    return ", ".join(one or "(no name)" for one in names)
