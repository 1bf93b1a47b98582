"""Which chunks a copy of a box has, and in which order they are read.  Pure.

Chunk i of the copy begins at voxel i * chunk of the box.  Where the box does not begin at a chunk of the source,
several chunks of the copy need the same chunk of the source.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from vesuvius.config import Triple
from vesuvius.volume_tools.pyramid import level_shapes
from vesuvius.volumes.box import Box, chunk_box, chunk_ranges, grid_shape, shape_of, shifted, triple

_REGION_BYTES_MAX = 64 * 2**20


@dataclass(frozen=True)
class CopyPlan:
    """A copy of a box."""

    source_box: Box  # the box, in voxels of the source
    chunk_zyx: Triple  # of the source and of all levels of the copy
    levels: int  # of the copy
    voxel_bytes: int
    requests: int  # concurrent requests

    @cached_property
    def shapes(self) -> list[Triple]:
        """Voxels of each level."""
        return level_shapes(shape_of(self.source_box), self.levels)

    @cached_property
    def counts(self) -> list[Triple]:
        """Chunks of each level along each axis."""
        return [grid_shape(shape, self.chunk_zyx) for shape in self.shapes]

    @property
    def raw_bytes(self) -> int:
        """Voxels of all levels, uncompressed."""
        return self.voxel_bytes * sum(map(math.prod, self.shapes))

    @property
    def chunk_count(self) -> int:
        """Chunks of all levels."""
        return sum(map(math.prod, self.counts))

    def regions(self) -> Iterator[list[Triple]]:
        """The chunks of the finest level, region by region, each region's in C order."""
        counts, edges = self.counts[0], self.region_edges
        for first in itertools.product(*(range(0, count, edge) for count, edge in zip(counts, edges, strict=True))):
            ranges = (range(i, min(i + edge, count)) for i, edge, count in zip(first, edges, counts, strict=True))
            yield list(itertools.product(*triple(ranges)))

    @cached_property
    def region_edges(self) -> Triple:
        """Chunks of a region along each axis: enough for all requests, at most 64 MiB of voxels."""
        most = min(self.requests, _REGION_BYTES_MAX // (math.prod(self.chunk_zyx) * self.voxel_bytes))
        counts, edges = self.counts[0], [1, 1, 1]
        while 2 * math.prod(edges) <= most and (growable := [axis for axis in range(3) if edges[axis] < counts[axis]]):
            edges[min(growable, key=lambda axis: (edges[axis], -axis))] *= 2
        return triple(edges)

    def box_of(self, level: int, chunk: Triple) -> Box:
        """The voxels of a chunk of the copy."""
        return chunk_box(chunk, self.chunk_zyx, self.shapes[level])

    def in_source(self, box: Box) -> Box:
        """A box of the finest level in voxels of the source."""
        return shifted(box, self.source_box[0])

    @property
    def cache_bytes(self) -> int:
        """Disk cache for chunks of the source that several regions need, so that each is fetched once.

        Regions come layer by layer along z.  What a layer shares with the next one must outlive the layer.
        """
        if all(lo % chunk == 0 for lo, chunk in zip(self.source_box[0], self.chunk_zyx, strict=True)):
            return 0
        depth, *rows = map(len, chunk_ranges(self.source_box, self.chunk_zyx))
        layer = min(depth, self.region_edges[0] + 2) * math.prod(rows)
        file_bytes = math.prod(self.chunk_zyx) * self.voxel_bytes + 2**14
        return 2**22 + layer * file_bytes * 5 // 4  # an eviction frees a tenth more than it must
