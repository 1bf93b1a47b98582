"""Boxes of voxels, and the boxes of chunks.  Pure."""

from __future__ import annotations

from vesuvius.config import Triple

Box = tuple[Triple, Triple]
"""(start_zyx, stop_zyx) in voxels, half open."""


def grid_shape(shape_zyx: Triple, chunk_zyx: Triple) -> Triple:
    """Chunks along each axis; the last one may be cut."""
    z, y, x = (-(-size // chunk) for size, chunk in zip(shape_zyx, chunk_zyx, strict=True))
    return z, y, x


def chunk_box(index_zyx: Triple, chunk_zyx: Triple, shape_zyx: Triple) -> Box:
    """The voxels of a chunk, cut at the end of the array."""
    z, y, x = (i * c for i, c in zip(index_zyx, chunk_zyx, strict=True))
    ends = zip((z, y, x), chunk_zyx, shape_zyx, strict=True)
    stop_z, stop_y, stop_x = (min(lo + c, size) for lo, c, size in ends)
    return (z, y, x), (stop_z, stop_y, stop_x)


def shape_of(box: Box) -> Triple:
    """Edge lengths."""
    (z0, y0, x0), (z1, y1, x1) = box
    return z1 - z0, y1 - y0, x1 - x0


def slices(box: Box, origin: Triple = (0, 0, 0)) -> tuple[slice, slice, slice]:
    """The slices that cut a box out of an array that starts at `origin`."""
    z, y, x = (slice(lo - o, hi - o) for lo, hi, o in zip(*box, origin, strict=True))
    return z, y, x


def intersection(a: Box, b: Box) -> Box:
    """The box that two boxes share; its stop is not above its start where they share nothing."""
    z0, y0, x0 = map(max, a[0], b[0])
    z1, y1, x1 = map(min, a[1], b[1])
    return (z0, y0, x0), (z1, y1, x1)


def intersects(a: Box, b: Box) -> bool:
    """Whether two boxes share a voxel."""
    return all(lo < hi for lo, hi in zip(*intersection(a, b), strict=True))


def format_box(box: Box) -> str:
    """'z 0:128, y 0:256, x 128:256'."""
    return ", ".join(f"{axis} {lo}:{hi}" for axis, lo, hi in zip("zyx", *box, strict=True))
