"""A volume -> how much more neighboring planes differ on a regular grid than elsewhere: seams of tiles.  Pure.

Works without the size of the tiles.  Seams that are blended over several planes, of fewer than three tiles, or not a
whole number of voxels apart, are not seen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LONGEST = 512  # voxels along each axis of the part that is measured
_LEAST_PERIOD = 4
_ORDERS = 499


@dataclass(frozen=True)
class Seams:
    """The planes of a volume, evenly spaced along an axis, that differ most from the next ones."""

    ratio: float  # of their mean squared difference to the largest of planes close by, geometric mean; NaN = unknown
    axis: int
    period: int
    scores: Floats  # [500] of the volume, and of its planes in random order


def find_seams(changes: Sequence[Floats]) -> Seams:
    """Find the evenly spaced planes of any period and axis with the largest `changes`, by `plane_changes`.

    Only what exceeds both planes on either side counts, because structure changes over several planes.  Along each axis
    the score of such planes is the sum of the excess of their log changes over its standard deviation in random order;
    the score of a volume is the sum of the best ones of its axes.
    """
    rng, scores, best = np.random.default_rng(0), np.zeros(_ORDERS + 1), (math.nan, 0, 0)
    for axis, change in enumerate(changes):
        if len(change) < 2 * _LEAST_PERIOD or not (typical := float(np.median(change))) > 0:
            continue
        logs = np.log(change + 1e-3 * typical)
        around = np.pad(logs, 2, "reflect")
        excess = (logs - np.max([around[:-4], around[1:-3], around[3:-1], around[4:]], axis=0)).clip(min=0)
        orders = np.stack([excess, *(rng.permutation(excess) for _ in range(_ORDERS))])
        highest = np.full(_ORDERS + 1, -math.inf)
        for period in range(_LEAST_PERIOD, len(excess) // 2 + 1):
            padded = np.pad(orders, ((0, 0), (0, -len(excess) % period)))
            counts = np.bincount(np.arange(len(excess)) % period)
            sums = padded.reshape(len(orders), -1, period).sum(1)
            found = sums / np.sqrt(counts)
            phase = int(found[0].argmax())
            if found[0, phase] > highest[0]:
                ratio, where = math.exp(sums[0, phase] / counts[phase]), (axis, period)
            highest = np.maximum(highest, found.max(1))
        scores += highest / (excess.std() + 1e-9)
        if not ratio <= best[0]:
            best = ratio, *where
    return Seams(*best, scores)


def plane_changes(volume: Any) -> list[Floats]:
    """Return the mean squared difference of each plane and the next along z, y and x, each [size - 1].  Reads once.

    `volume` [Z, Y, X] is an array or a zarr array, of which at most 512 voxels of each axis, in the middle, are read.
    """
    middle = (slice((size - min(size, LONGEST)) // 2, (size + min(size, LONGEST)) // 2) for size in volume.shape)
    box = np.asarray(volume[tuple(middle)])
    found = [np.zeros(size - 1) for size in box.shape]
    for number in range(len(box)):
        plane = box[number].astype(np.float32)
        found[1] += np.square(np.diff(plane, axis=0)).mean(1) / len(box)
        found[2] += np.square(np.diff(plane, axis=1)).mean(0) / len(box)
        if number:
            found[0][number - 1] = np.square(plane - box[number - 1]).mean()
    return found
