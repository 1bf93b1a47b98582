"""Which axes of an array are z, y and x, whatever order they are stored in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import zarr
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import DataError
from vesuvius.volumes.box import triple

T = TypeVar("T")
Names = tuple[str | None, ...]
"""What the axes of an array are called, in stored order."""

_SPACE = ("z", "y", "x")
_MOST_CHANNELS = 4  # RGBA
_WORDS = {"depth": "z", "height": "y", "width": "x"}


@dataclass(frozen=True)
class Axes:
    """The axes of an array."""

    zyx: Triple  # positions of z, y and x among them
    select: tuple[int, ...] = ()  # the index at which each other axis is fixed, in stored order

    @cached_property
    def others(self) -> tuple[int, ...]:
        """Positions of the axes that `select` fixes."""
        return tuple(axis for axis in range(3 + len(self.select)) if axis not in self.zyx)

    @property
    def permuted(self) -> bool:
        """Whether z, y and x are stored in another order."""
        return list(self.zyx) != sorted(self.zyx)

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
        select: as `Axes.select`.

    Returns:
        The axes, and their names: None where an axis has none.

    Raises:
        DataError: z, y and x are not there once each, names contradict each other, or `select` does not fit.
    """
    own_names = _own_names(array)
    names = ome_names or own_names
    if array.ndim < 3:
        raise DataError(
            f"a volume has three axes z, y, x; got {_words(array, names)} in {name}; stack its slices into one array "
            "(Z, Y, X)"
        )
    named = ome_names is not None or (own_names is not None and spatial(own_names))
    zyx = _places(name, array, names) if names and named else _unnamed(array.shape)
    if ome_names and own_names and not _agree(ome_names, own_names):
        raise DataError(
            f"the axes of an OME-Zarr and the dimension_names of its arrays must agree; got {_listed(ome_names)} and "
            f"{_listed(own_names)} in {name}; correct the wrong one"
        )
    axes = Axes(zyx, select)
    _check_select(name, array, names, axes)
    return axes, names or (None,) * array.ndim


def _unnamed(shape: Sequence[int]) -> Triple:
    end = len(shape) - (len(shape) > 3 and shape[-1] <= _MOST_CHANNELS < min(shape[-4:-1]))
    return end - 3, end - 2, end - 1


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
    return any(letter_of(one) in _SPACE for one in names)


def _agree(ome_names: Names, own_names: Names) -> bool:
    """Whether an axis that calls itself z, y or x is the one of the group."""
    pairs = ((letter_of(ome), letter_of(own)) for ome, own in zip(ome_names, own_names, strict=True))
    return all(ome == own or own not in _SPACE for ome, own in pairs)


def letter_of(name: str | None) -> str:
    """The name of an axis in lower case; z, y and x for depth, height and width."""
    lower = (name or "").strip().lower()
    return _WORDS.get(lower, lower)


def _places(name: str, array: zarr.Array[Any], names: Names) -> Triple:
    """Where z, y and x are.  Raises DataError where one is missing or there twice."""
    letters = [letter_of(one) for one in names]
    if any(letters.count(letter) != 1 for letter in _SPACE):
        raise DataError(
            f"a volume has three axes z, y, x, each once; got {_words(array, names)} in {name}; correct the names of "
            "the axes in its metadata (`axes`, `coordinateSystems` or `dimension_names`)"
        )
    return triple(map(letters.index, _SPACE))


def _check_select(name: str, array: zarr.Array[Any], names: Names | None, axes: Axes) -> None:
    extra = array.ndim - 3
    if len(axes.select) != extra:
        raise DataError(
            f"a volume has three axes z, y, x, and `select` fixes each other axis; got {_words(array, names)} in "
            f"{name} with select={list(axes.select)}; set data.volumes[].select to {extra} "
            f"{'index' if extra == 1 else 'indices'}, e.g. {[0] * extra}"
        )
    if any(index >= size for index, size in zip(axes.select, axes.others_of(array.shape), strict=True)):
        raise DataError(
            f"select must lie inside the array; got {list(axes.select)} for {_words(array, names)} in {name}; lower it"
        )


def _words(array: zarr.Array[Any], names: Names | None) -> str:
    return f"{f'axes {_listed(names)}' if names else f'{array.ndim} axes'} of shape {array.shape}"


def _listed(names: Names) -> str:
    return ", ".join(one or "(no name)" for one in names)
