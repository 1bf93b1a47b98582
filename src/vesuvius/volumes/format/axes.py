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
