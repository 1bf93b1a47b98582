"""A decoded copy of the training boxes of all volumes in shared memory, filled with the regions that are read anyway.

Once all that a region needs is there, its patches are cut from the copy: nothing is decoded, and no region is copied.
Voxels that could not be read never get into it, so regions that touch damage are read, and replaced, as ever.
"""

from __future__ import annotations

import gc
import math
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.plan.plan import Plan, PlanVolume, Visit
from vesuvius.stream.reading.reader import ReaderJob, Region
from vesuvius.volumes.box import Box, box_along, grid_shape, shape_of, slices

_BRICK = 32  # voxels along each axis of what is known to be there or not, at most
_ALIGNED = 4096


class Resident:
    """The copy, of one process or shared by all ranks of a machine: each fills it, and each cuts from it.

    Args:
        job: whose regions it holds.
        address: of the copy of another process on this machine; None makes a new one.
        sharers: ranks that fill it together.

    Raises:
        OSError: there is no memory for it, or no copy at this address.
    """

    def __init__(self, job: ReaderJob, address: str | None = None, sharers: int = 1) -> None:
        # A file without a name in memory: it ends with the last process that holds it, however that ends, and no limit
        # on /dev/shm applies.
        self._file = os.memfd_create("vesuvius-resident") if address is None else os.open(address, os.O_RDWR)
        try:
            if address is None:
                os.ftruncate(self._file, self.size_bytes(job))
            memory = mmap.mmap(self._file, self.size_bytes(job))
        except (OSError, ValueError):
            os.close(self._file)
            raise
        self._volumes: list[_Copy] = []
        self._taken, self._slots_of_pass = 0, job.plan.slots_per_pass
        # Where a region goes to several ranks, these do not share a pass.
        self._sharers = min(sharers, job.world / job.plan.reads_per_region(job.world)) if sharers > 1 else 1
        start = 0
        for volume in job.plan.volumes:
            views = []
            for part in _layout(job, volume):
                views.append(memoryview(memory)[start : start + part])
                start += _padded(part)
            self._volumes.append(_Copy(job, volume, views))

    @property
    def address(self) -> str:
        """For other processes on this machine, as long as this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    @staticmethod
    def size_bytes(job: ReaderJob) -> int:
        """Memory that the copy of these volumes takes once it is full.  Pure."""
        return sum(_padded(part) for volume in job.plan.volumes for part in _layout(job, volume))

    @property
    def suffices(self) -> bool:
        """Whether the ranks of this machine have passed over the volumes once: what is missing yet is little."""
        return self._taken * self._sharers >= self._slots_of_pass

    def missing(self, visit: Visit) -> Box | None:
        """The box of what is missing of the region of a visit, and may exceed it a little; None where all is there."""
        return self._volumes[visit.volume].missing(visit.region)

    def views(self, visit: Visit) -> list[NDArray[Any]]:
        """The region of a visit (Z, Y, X), and its condition, all of which is there; copy out of them and drop them."""
        return self._volumes[visit.volume].views(visit.region)

    def keep(self, number: int, box: Box, voxels: list[NDArray[Any]]) -> None:
        """Copy a box of volume `number` in, (Z, Y, X), and that of its condition."""
        self._volumes[number].keep(box, voxels)

    def take(self, region: Region) -> list[NDArray[Any]]:
        """Views of a region that has come, which is copied in where it is not there yet."""
        copy, box = self._volumes[region.visit.volume], region.visit.region
        if copy.missing(box) is not None:
            copy.keep(box, region.voxels)
        self._taken += 1
        return copy.views(box)

    def close(self) -> None:
        """Let go of the memory, once nobody holds views of it."""
        self._volumes = []
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        gc.collect()  # an error on the way may hold a frame with views


class _Copy:
    """Of the training box of one volume.

    `views`: memory for its arrays, and for a flag per brick.  A patch holds a brick, so that the regions of all cells
    together hold every brick whole.
    """

    def __init__(self, job: ReaderJob, volume: PlanVolume, views: list[memoryview]) -> None:
        self._box, self._brick = volume.train, _brick(job.plan)
        shape = shape_of(volume.train)
        *arrays, flags = views
        self._arrays = [np.frombuffer(a, d).reshape(shape) for a, d in zip(arrays, job.dtypes, strict=True)]
        self._there = np.frombuffer(flags, np.bool_).reshape(grid_shape(shape, self._brick))

    def views(self, region: Box) -> list[NDArray[Any]]:
        return [array[slices(region, self._box[0])] for array in self._arrays]

    def missing(self, region: Box) -> Box | None:
        touched = self._touched(region)
        lacks = np.argwhere(~self._there[touched])
        if not len(lacks):
            return None
        ends = zip(lacks.min(0).tolist(), lacks.max(0).tolist(), touched, *self._box, self._brick, strict=True)
        return box_along(
            (start + (first + at.start) * b, min(start + (last + at.start + 1) * b, stop))
            for first, last, at, start, stop, b in ends
        )

    def keep(self, box: Box, voxels: list[NDArray[Any]]) -> None:
        for view, came in zip(self.views(box), voxels, strict=True):
            view[...] = came
        self._there[self._whole(box)] = True  # last, as other ranks look at it

    def _touched(self, region: Box) -> tuple[slice, ...]:
        """The bricks that a region lies in."""
        ends = zip(*region, self._box[0], self._brick, strict=True)
        return tuple(slice((lo - start) // b, -(-(hi - start) // b)) for lo, hi, start, b in ends)

    def _whole(self, region: Box) -> tuple[slice, ...]:
        """The bricks that lie in a region."""
        ends = zip(*region, *self._box, self._brick, strict=True)
        return tuple(
            slice(-(-(lo - start) // b), -(-(hi - start) // b) if hi == stop else (hi - start) // b)
            for lo, hi, start, stop, b in ends
        )


def _layout(job: ReaderJob, volume: PlanVolume) -> list[int]:
    """Bytes of the arrays of a volume, and of its flags."""
    voxels = math.prod(shape_of(volume.train))
    flags = math.prod(grid_shape(shape_of(volume.train), _brick(job.plan)))
    return [*(voxels * dtype.itemsize for dtype in job.dtypes), flags]


def _brick(plan: Plan) -> Triple:
    z, y, x = (min(size, _BRICK) for size in plan.patch_zyx)
    return z, y, x


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
