"""A decoded copy of the training boxes of all volumes in shared memory, filled with the regions as they are read.

Unreadable voxels never enter it, so regions that touch damage are still read and replaced.
"""

import gc
import hashlib
import math
import mmap
import os
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.plan.plan import Plan, PlanVolume, Visit
from vesuvius.stream.reading.reader import ReaderJob, Region, aligned
from vesuvius.volumes.box import Box, box_along, grid_shape, shape_of, slices

_BRICK = 32  # maximum edge length in voxels of a brick, the unit whose presence is tracked
_ALIGNED = 4096


class Resident:
    """The copy, of one process or shared by all ranks of a machine: each fills it and cuts from it.

    `address` is that of another process's copy on this machine; None creates a new one.  `sharers` ranks fill it
    together.  `name` identifies the content.  Raises OSError: not enough memory, or no copy of it at this address.
    """

    def __init__(self, job: ReaderJob, address: str | None = None, sharers: int = 1) -> None:
        # An anonymous file: freed with the last process that holds it, even if killed, and not limited by /dev/shm.
        content = f"{job.plan.hash} {job.data.model_dump_json()}"
        self.name = f"vesuvius-resident-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
        self._file = os.memfd_create(self.name) if address is None else os.open(address, os.O_RDWR)
        try:
            if address is not None and self.name not in os.readlink(self.address):
                raise OSError(f"{address} is not a copy of these volumes")
            if address is None:
                os.ftruncate(self._file, self.size_bytes(job))
            memory = mmap.mmap(self._file, self.size_bytes(job))
        except (OSError, ValueError):
            os.close(self._file)
            raise
        self.volumes: list[ResidentVolume] = []
        self._taken, self._slots_per_pass = 0, job.plan.slots_per_pass
        # Ranks that read the same region do not share a pass.
        self._sharers = min(sharers, job.world_size / job.plan.reads_per_region(job.world_size)) if sharers > 1 else 1
        start = 0
        for index, volume in enumerate(job.plan.sources):
            views = []
            for size in _layout(job, index, volume):
                views.append(memoryview(memory)[start : start + size])
                start += aligned(size, _ALIGNED)
            self.volumes.append(ResidentVolume(job, index, volume, views))

    @property
    def address(self) -> str:
        """Path for other processes on this machine, valid as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    @staticmethod
    def size_bytes(job: ReaderJob) -> int:
        volumes = enumerate(job.plan.sources)
        return sum(aligned(size, _ALIGNED) for index, volume in volumes for size in _layout(job, index, volume))

    @property
    def first_pass_done(self) -> bool:
        """Whether the ranks of this machine have completed a pass over the volumes, so that little is missing."""
        return self._taken * self._sharers >= self._slots_per_pass

    def missing(self, visit: Visit) -> Box | None:
        """Return the box of the missing bricks of a region, which may extend a little beyond it; None if complete."""
        return self.volumes[visit.volume].missing(visit.region)

    def take(self, region: Region) -> Region:
        """Return a region as views of the copy, after copying in its voxels if it is not complete yet."""
        visit, copy = region.visit, self.volumes[region.visit.volume]
        if copy.missing(visit.region) is not None:
            copy.keep(region.box or visit.region, region.voxels)
        self._taken += 1
        return Region(visit, copy.views(visit.region), region.report)

    def close(self) -> None:
        """Free the memory; no views of it may be in use."""
        self.volumes = []
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        gc.collect()  # the traceback of an error may still hold views


class ResidentVolume:
    """Copy of the training box of one volume, in memory for its arrays and for a flag per brick (`views`).

    Bricks are no larger than a patch, so that the regions of all cells together contain every brick completely.
    """

    def __init__(self, job: ReaderJob, volume_index: int, volume: PlanVolume, views: list[memoryview]) -> None:
        self._box, self._brick = volume.train, _brick(job.plan)
        self._boxes_of = partial(job.boxes_of, volume_index)
        *arrays, flags = views
        self._arrays = [
            np.frombuffer(view, dtype).reshape(shape_of(box))
            for view, dtype, box in zip(arrays, job.dtypes, self._boxes_of(self._box), strict=True)
        ]
        self._is_present = np.frombuffer(flags, np.bool_).reshape(grid_shape(shape_of(self._box), self._brick))

    def views(self, region: Box) -> list[NDArray[Any]]:
        """Return views (Z, Y, X) of a complete region, one per array; do not keep them."""
        boxes = zip(self._arrays, self._boxes_of(region), self._boxes_of(self._box), strict=True)
        return [array[slices(box, whole[0])] for array, box, whole in boxes]

    def missing(self, region: Box) -> Box | None:
        """As in `Resident`."""
        touched = self._touched(region)
        absent = np.argwhere(~self._is_present[touched])
        if not len(absent):
            return None
        ends = zip(absent.min(0).tolist(), absent.max(0).tolist(), touched, *self._box, self._brick, strict=True)
        return box_along(
            (start + (first + at.start) * b, min(start + (last + at.start + 1) * b, stop))
            for first, last, at, start, stop, b in ends
        )

    def keep(self, box: Box, voxels: list[NDArray[Any]]) -> None:
        """Copy in a box (Z, Y, X) of each array."""
        for view, source in zip(self.views(box), voxels, strict=True):
            view[...] = source
        self._is_present[self._contained(box)] = True  # last, as other ranks read it

    def _touched(self, region: Box) -> tuple[slice, ...]:
        ends = zip(*region, self._box[0], self._brick, strict=True)
        return tuple(slice((lo - start) // b, -(-(hi - start) // b)) for lo, hi, start, b in ends)

    def _contained(self, region: Box) -> tuple[slice, ...]:
        ends = zip(*region, *self._box, self._brick, strict=True)
        return tuple(
            slice(-(-(lo - start) // b), -(-(hi - start) // b) if hi == stop else (hi - start) // b)
            for lo, hi, start, stop, b in ends
        )


def _layout(job: ReaderJob, volume_index: int, volume: PlanVolume) -> list[int]:
    boxes = job.boxes_of(volume_index, volume.train)
    flags = math.prod(grid_shape(shape_of(volume.train), _brick(job.plan)))
    return [*(math.prod(shape_of(box)) * dtype.itemsize for box, dtype in zip(boxes, job.dtypes, strict=True)), flags]


def _brick(plan: Plan) -> Triple:
    z, y, x = (min(size, _BRICK) for size in plan.patch_zyx)
    return z, y, x
