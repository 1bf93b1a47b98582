"""A box of voxels: what is read, cut and named in messages."""

from __future__ import annotations

from vesuvius.config import Triple

Box = tuple[Triple, Triple]
"""(start_zyx, stop_zyx) in voxels, half open."""


def shape_of(box: Box) -> Triple:
    """Edge lengths."""
    (z0, y0, x0), (z1, y1, x1) = box
    return z1 - z0, y1 - y0, x1 - x0


def slices(box: Box, origin: Triple = (0, 0, 0)) -> tuple[slice, slice, slice]:
    """What cuts the box out of an array that starts at `origin`."""
    z, y, x = (slice(lo - o, hi - o) for lo, hi, o in zip(*box, origin, strict=True))
    return z, y, x


def intersection(a: Box, b: Box) -> Box:
    """What two boxes share; with a stop below its start where they share nothing."""
    z0, y0, x0 = map(max, a[0], b[0])
    z1, y1, x1 = map(min, a[1], b[1])
    return (z0, y0, x0), (z1, y1, x1)


def intersects(a: Box, b: Box) -> bool:
    """Whether two boxes share a voxel."""
    return all(lo < hi for lo, hi in zip(*intersection(a, b), strict=True))


def format_box(box: Box) -> str:
    """'z 0:128, y 0:256, x 128:256'."""
    return ", ".join(f"{axis} {lo}:{hi}" for axis, lo, hi in zip("zyx", *box, strict=True))
