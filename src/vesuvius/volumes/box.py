"""Boxes of voxels and of chunks.  Pure."""

from collections.abc import Iterable
from typing import Any, TypeVar

from vesuvius.config import Triple

T = TypeVar("T")
Box = tuple[Triple, Triple]
"""(start_zyx, stop_zyx) in voxels, half open."""


def triple(zyx: Iterable[T]) -> tuple[T, T, T]:
    """Unpack exactly three values.  Raises ValueError for any other number."""
    z, y, x = zyx
    return z, y, x


def translate(start_zyx: Triple, by_zyx: Iterable[int]) -> Triple:
    return triple(start + by for start, by in zip(start_zyx, by_zyx, strict=True))


def scale(shape_zyx: Triple, factors: Triple) -> Triple:
    return triple(size * factor for size, factor in zip(shape_zyx, factors, strict=True))


def box_at(start_zyx: Triple, shape_zyx: Triple) -> Box:
    return start_zyx, translate(start_zyx, shape_zyx)


def box_along(ends: Iterable[tuple[int, int]]) -> Box:
    """The box with this start and stop along each axis."""
    starts, stops = zip(*ends, strict=True)
    return triple(starts), triple(stops)


def shifted(box: Box, by_zyx: Triple) -> Box:
    return translate(box[0], by_zyx), translate(box[1], by_zyx)


def relative(box: Box, origin: Triple) -> Box:
    """The box in voxels from this origin on."""
    return shifted(box, triple(-each for each in origin))


def is_inside(box: Box, shape_zyx: Triple) -> bool:
    """Whether a box is not empty and lies inside an array of this shape."""
    return all(0 <= lo < hi <= size for lo, hi, size in zip(*box, shape_zyx, strict=True))


def grid_shape(shape_zyx: Triple, chunk_zyx: Triple) -> Triple:
    """Number of chunks along each axis, the partial last one included."""
    return triple(-(-size // chunk) for size, chunk in zip(shape_zyx, chunk_zyx, strict=True))


def chunk_box(index_zyx: Triple, chunk_zyx: Triple, shape_zyx: Triple) -> Box:
    """The voxels of a chunk, clipped to the array."""
    start = scale(index_zyx, chunk_zyx)
    return start, triple(map(min, translate(start, chunk_zyx), shape_zyx))


def chunk_ranges(box: Box, chunk_zyx: Triple) -> tuple[range, range, range]:
    """The chunks that a box touches, along each axis."""
    return triple(range(lo // c, -(-hi // c)) for lo, hi, c in zip(*box, chunk_zyx, strict=True))


def shape_of(box: Box) -> Triple:
    return triple(hi - lo for lo, hi in zip(*box, strict=True))


def slices(box: Box, origin: Triple = (0, 0, 0)) -> tuple[slice, slice, slice]:
    """Slices that select a box from an array that starts at `origin`."""
    return triple(slice(lo - o, hi - o) for lo, hi, o in zip(*box, origin, strict=True))


def intersection(a: Box, b: Box) -> Box:
    """The overlap of two boxes; empty (stop <= start) if they do not intersect."""
    return triple(map(max, a[0], b[0])), triple(map(min, a[1], b[1]))


def intersects(a: Box, b: Box) -> bool:
    return all(lo < hi for lo, hi in zip(*intersection(a, b), strict=True))


def format_box(box: Box) -> str:
    """'z 0:128, y 0:256, x 128:256'."""
    return ", ".join(f"{axis} {lo}:{hi}" for axis, lo, hi in zip("zyx", *box, strict=True))


def indexed_box(index: Any, shape_zyx: Triple) -> tuple[Box, tuple[Any, ...]]:
    """Split an index, by numpy's rules, into the box that it spans, which may be empty, and one for the box's voxels.

    Raises IndexError, TypeError for anything but integers, slices and one `...`, and ValueError for a step of 0.
    """
    given = index if isinstance(index, tuple) else (index,)
    dots = [place for place, each in enumerate(given) if each is ...]
    if len(dots) > 1 or len(given) - len(dots) > 3:
        raise IndexError(f"{index} has too many indices for the three axes z, y, x of a volume; give at most three")
    place, rest = (dots or [len(given)])[0], (slice(None),) * (3 - len(given) + len(dots))
    spans, left = list[range](), list[Any]()
    for each, size in zip((*given[:place], *rest, *given[place + len(dots) :]), shape_zyx, strict=True):
        try:
            if isinstance(each, bool):  # a mask in numpy, but an integer in Python
                raise TypeError
            chosen: int | range = range(size)[each]
        except IndexError:
            raise IndexError(f"index {each} is out of bounds for an axis of {size} voxels") from None
        except TypeError:
            kind = type(each).__name__
            raise TypeError(f"A volume has integers and slices as indices, not {kind}; index what was read") from None
        span = range(chosen, chosen + 1) if isinstance(chosen, int) else chosen
        spans.append(range(min(span[0], span[-1]), max(span[0], span[-1]) + 1) if span else range(0))
        left.append(0 if isinstance(chosen, int) else slice(None, None, span.step))
    # a final `...` makes three integers give an array, as in numpy
    return box_along((span.start, span.stop) for span in spans), (*left, *given[place : place + len(dots)])
