"""Measures of label volumes in memory: topology, boundaries, and gaps between neighboring instances.  Pure.

Labels are integers (Z, Y, X); in instances, 0 is the space between them.  Needs scipy.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from vesuvius.volumes.voxels import euler_sum, pair_slices

Labels = NDArray[Any]
Mask = NDArray[np.bool_]


class Topology(NamedTuple):
    """Betti numbers of the union of closed voxels: components share a corner, cavities are closed by faces."""

    components: int
    tunnels: int
    cavities: int


def topology(mask: Mask) -> Topology:
    """Components, tunnels and cavities of a bool mask; what continues beyond its border is not known, so it is open."""
    if not mask.any():
        return Topology(0, 0, 0)
    padded = np.pad(mask, 1)
    components = int(ndimage.label(padded, np.ones((3, 3, 3)))[1])
    cavities = int(ndimage.label(~padded)[1]) - 1
    return Topology(components, components + cavities - euler_sum(padded), cavities)


def topologies(instances: Labels) -> dict[int, Topology]:
    """Topology of each instance; ids are small, from 1."""
    found = enumerate(ndimage.find_objects(instances), start=1)
    return {number: topology(instances[box] == number) for number, box in found if box is not None}


def boundaries(instances: Labels) -> NDArray[np.uint8]:
    """Return 1 at voxels without an instance, or with a neighbor along an axis in another one; 0 elsewhere."""
    found: Mask = instances == 0
    for axis in range(3):
        low, high = pair_slices(axis)
        differ = instances[low] != instances[high]
        found[low] |= differ
        found[high] |= differ
    return found.view(np.uint8)


def grown(mask: Mask, instances: Labels, steps: int) -> Mask:
    """Grow a mask by a cube of one voxel per step, each time within the instances that it is in."""
    mask = mask.copy()
    for axis in (0, 1, 2) * steps:
        low, high = pair_slices(axis)
        same = instances[low] == instances[high]
        up, down = mask[low] & same, mask[high] & same
        mask[high] |= up
        mask[low] |= down
    return mask


def nearest(mask: Mask) -> NDArray[np.int32]:
    """Index (3, Z, Y, X) of the voxel in the mask that is nearest to each voxel; arbitrary for an empty mask."""
    found: NDArray[np.int32] = ndimage.distance_transform_edt(~mask, return_distances=False, return_indices=True)
    return found


def distance(to: NDArray[np.int32]) -> NDArray[np.float32]:
    """Distance in voxels (Z, Y, X) to the indices that `nearest` found."""
    at = np.ogrid[tuple(map(slice, to.shape[1:]))]
    squares: NDArray[np.float32] = sum(np.square(t - i, dtype=np.float32) for t, i in zip(to, at, strict=True))
    return np.sqrt(squares)


def peeled(instances: Labels, voxels: float) -> Mask:
    """Instances without their outer voxels; parts that would vanish keep their innermost layer."""
    inside: Mask = instances != 0
    keep = inside
    edge = inside & (boundaries(instances) != 0)
    depth = distance(nearest(edge)) if edge.any() else np.full(inside.shape, np.inf)
    for by in [*range(1, math.ceil(voxels)), voxels]:
        if not (core := inside & (depth > by - 1)).any():
            break
        # parts that would vanish, and what joins them to the core, stay as they were one voxel before
        steps = math.ceil(by)
        thin = inside & ~grown(core, instances, steps + 1)
        keep = core | keep & grown(thin, instances, steps + 2)
    return keep


class Faces(NamedTuple):
    """Pairs of adjacent voxels to which different instances are nearest: the surface halfway between instances."""

    ids: NDArray[np.int32]  # (2, n): the two instances, the smaller number first
    gaps: NDArray[np.float64]  # (n,): voxels between the two nearest voxels of these instances; 0 = touching
    ends: NDArray[np.int32]  # (2, 3, n): the two voxels


def facing(instances: Labels) -> Faces:
    """Where instances (Z, Y, X) face each other."""
    to, ids, ends = nearest(instances != 0), [], []
    owner = instances[tuple(to)]
    for axis in range(3):
        low, high = pair_slices(axis)
        at: tuple[Any, ...] = np.nonzero(owner[low] != owner[high])
        ids.append(np.stack([owner[low][at], owner[high][at]]))
        ends.append(np.stack([to[(slice(None), *part)][(slice(None), *at)] for part in (low, high)]))
    id_pairs, end_pairs = np.concatenate(ids, axis=-1), np.concatenate(ends, axis=-1)
    swap = id_pairs[0] > id_pairs[1]
    id_pairs[:, swap], end_pairs[:, :, swap] = id_pairs[::-1, swap], end_pairs[::-1, :, swap]
    return Faces(id_pairs, np.sqrt(np.square(end_pairs[0] - end_pairs[1]).sum(0)) - 1, end_pairs)


def approaches(faces: Faces) -> dict[tuple[int, int], tuple[float, NDArray[np.int32]]]:
    """Nearest approach of each pair of neighbors (a < b): the gap, and a voxel of each (2, 3)."""
    order = np.lexsort((faces.gaps, faces.ids[1], faces.ids[0]))
    first = order[np.flatnonzero(np.diff(faces.ids[:, order], prepend=-1).any(0))]
    return {(int(faces.ids[0, n]), int(faces.ids[1, n])): (float(faces.gaps[n]), faces.ends[:, :, n]) for n in first}
