"""Second stop of a patch: which voxels sample i is cut from.  Pure: no I/O, no state, a function of (seed, i).

The order of samples depends on the seed and the `data` section alone.  Sample i belongs to task i // (K R); within
its task, run k = (i % (K R)) // R holds one patch from each of the task's R regions, so a batch of R patches mixes R
regions while every region is read once for K patches.  Regions of a volume come in a random order, none again before
all have been seen; a volume is drawn for each region by its weight.  Ranks take samples by index modulo their number,
which gives each rank its own regions where R is a multiple of it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import DataConfig, Triple
from vesuvius.data.split import Split
from vesuvius.data.volume import Box
from vesuvius.errors import DataError

# Second word of every random seed below: keeps the draws for different purposes independent.
_ORDER, _VOLUME, _PATCH = 1, 2, 3
_SLOTS_PER_DRAW = 64
_REGION_BYTES_MAX = 64 * 2**20

Interval = tuple[int, int]


@dataclass(frozen=True)
class PlanVolume:
    """What the plan knows of a volume.  `intervals_zyx` are the extents of its regions along each axis."""

    name: str
    weight: float
    shape_zyx: Triple
    train: Box
    chunk_zyx: Triple
    dtype: str
    intervals_zyx: tuple[tuple[Interval, ...], tuple[Interval, ...], tuple[Interval, ...]]

    @cached_property
    def region_count(self) -> int:
        return math.prod(len(axis) for axis in self.intervals_zyx)

    def region(self, number: int) -> Box:
        """The box of region `number`, 0 <= number < region_count, counted along x first."""
        z_list, y_list, x_list = self.intervals_zyx
        rest, ix = divmod(number, len(x_list))
        iz, iy = divmod(rest, len(y_list))
        (z0, z1), (y0, y1), (x0, x1) = z_list[iz], y_list[iy], x_list[ix]
        return (z0, y0, x0), (z1, y1, x1)


@dataclass(frozen=True)
class Symmetry:
    """A symmetry of the patch: mirror the axes that are set, then turn by `turns` x 90 degrees in the y-x plane."""

    flip_zyx: tuple[bool, bool, bool] = (False, False, False)
    turns: int = 0


@dataclass(frozen=True)
class Sample:
    """Where sample `index` comes from."""

    index: int
    volume: int
    region: Box
    start_zyx: Triple
    symmetry: Symmetry


@dataclass(frozen=True)
class Task:
    """The unit of work of one reader: samples first <= i < stop, all of one task of the plan."""

    first: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """The order of all samples.  Small and picklable: the trainer and every reader hold the same one."""

    seed: int
    patch_zyx: Triple
    patches_per_region: int
    regions_per_task: int
    flip: bool
    turn: bool
    volumes: tuple[PlanVolume, ...]

    @property
    def samples_per_task(self) -> int:
        return self.patches_per_region * self.regions_per_task

    @property
    def repeats_within_a_run(self) -> bool:
        """Whether there are fewer regions than a run of samples wants to mix."""
        return sum(volume.region_count for volume in self.volumes) < self.regions_per_task

    def sample(self, index: int) -> Sample:
        """Where sample `index` (0, 1, 2, ...) comes from.  Pure."""
        task, within = divmod(index, self.samples_per_task)
        volume, region = self.region_of_slot(task * self.regions_per_task + within % self.regions_per_task)
        rng = np.random.default_rng((self.seed, _PATCH, index))
        (z0, y0, x0), (z1, y1, x1) = region
        low = (z0, y0, x0)
        high = [stop - patch + 1 for stop, patch in zip((z1, y1, x1), self.patch_zyx, strict=True)]
        z, y, x = (int(v) for v in rng.integers(low, high))
        draws = rng.integers(0, 2, size=3)
        turns = int(rng.integers(0, 4))
        symmetry = Symmetry(
            flip_zyx=(bool(draws[0]), bool(draws[1]), bool(draws[2])) if self.flip else (False, False, False),
            turns=turns if self.turn else 0,
        )
        return Sample(index, volume, region, (z, y, x), symmetry)

    def region_of_slot(self, slot: int) -> tuple[int, Box]:
        """Volume number and box of region slot 0, 1, 2, ...; task n holds slots n R to n R + R - 1.  Pure."""
        volume, visit = self._volume_of_slot(slot)
        return volume, self.region_of_visit(volume, visit)

    def region_of_visit(self, volume: int, visit: int) -> Box:
        """The box that slot number `visit` (0, 1, 2, ...) of this one volume reads.  Pure."""
        return self.volumes[volume].region(self._region_number(volume, visit))

    def tasks(self, first: int, stop: int) -> Iterator[Task]:
        """The tasks that hold samples first <= i < stop, the first and the last one cut to them."""
        while first < stop:
            end = min((first // self.samples_per_task + 1) * self.samples_per_task, stop)
            yield Task(first, end)
            first = end

    def describe(self) -> dict[str, Any]:
        """Everything the order of samples depends on, as plain data, with its first samples as a fingerprint.

        The fingerprint also catches a numpy whose random streams differ.
        """
        first = [self.sample(i) for i in range(self.regions_per_task)]
        return {
            "seed": self.seed,
            "patch_size": list(self.patch_zyx),
            "patches_per_region": self.patches_per_region,
            "regions_per_task": self.regions_per_task,
            "augment": {"flip": self.flip, "turn": self.turn},
            "volumes": [
                {  # not its path: a volume may move to another disk between stop and resume
                    "weight": volume.weight,
                    "dtype": volume.dtype,
                    "shape": list(volume.shape_zyx),
                    "train": [list(volume.train[0]), list(volume.train[1])],
                    "regions": volume.region_count,
                    "intervals": hashlib.sha256(repr(volume.intervals_zyx).encode()).hexdigest()[:16],
                }
                for volume in self.volumes
            ],
            "first_samples": [[s.volume, *s.start_zyx] for s in first],
        }

    @cached_property
    def hash(self) -> str:
        """Changes when any sample could."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()[:16]

    def read_amplification(self, volume: int) -> float:
        """Bytes decoded per byte of patch delivered from this volume, on average over its regions."""
        v = self.volumes[volume]
        decoded = 1.0
        for intervals, chunk in zip(v.intervals_zyx, v.chunk_zyx, strict=True):
            decoded *= float(np.mean([(-(-hi // chunk) - lo // chunk) * chunk for lo, hi in intervals]))
        return decoded / (self.patches_per_region * math.prod(self.patch_zyx))

    def _region_number(self, volume: int, visit: int) -> int:
        """Which region the volume's slot number `visit` (0, 1, 2, ...) reads.

        Even and odd regions take turns in coming in a new random order, so the end of one pass and the start
        of the next share no region.  With fewer than 2 R regions that gap would be too short: one random
        order is then repeated.
        """
        count = self.volumes[volume].region_count
        again, position = divmod(visit, count)
        if count < 2 * self.regions_per_task:
            return int(_permutation((self.seed, _ORDER, volume), count)[position])
        even = (count + 1) // 2
        odd, position = (0, position) if position < even else (1, position - even)
        order = _permutation((self.seed, _ORDER, volume, again, odd), count // 2 if odd else even)
        return 2 * int(order[position]) + odd

    def _volume_of_slot(self, slot: int) -> tuple[int, int]:
        """The slot's volume, and how many earlier slots went to the same volume."""
        if len(self.volumes) == 1:
            return 0, slot
        block, position = divmod(slot, _SLOTS_PER_DRAW)
        weights = tuple(volume.weight for volume in self.volumes)
        return _draw_volumes(self.seed, weights, block)[position]


def make_plan(seed: int, config: DataConfig, volumes: Sequence[PlanVolume]) -> Plan:
    """The plan of a run.  Pure."""
    return Plan(
        seed=seed,
        patch_zyx=config.patch_size,
        patches_per_region=config.patches_per_region,
        regions_per_task=config.regions_per_task,
        flip=config.augment.flip,
        turn=config.augment.turn,
        volumes=tuple(volumes),
    )


def plan_volume(
    name: str, split: Split, shape_zyx: Triple, chunk_zyx: Triple, dtype: str, weight: float, config: DataConfig
) -> PlanVolume:
    """Lay regions over the training box of a volume.  Pure.

    A region is two strides long on each axis and one starts at every stride, so neighbours overlap by half and every
    patch position but a few is inside some region.  The stride is a whole number of chunks such that a region holds
    1.75 patches; it is shortened where a region would exceed 64 MiB, or the volume would have fewer than 2 R regions.
    """
    patch = config.patch_size
    strides = [chunk * math.ceil(1.75 * p / (2 * chunk)) for p, chunk in zip(patch, chunk_zyx, strict=True)]
    while True:
        intervals = [
            _intervals(lo, hi, stride, p) for lo, hi, stride, p in zip(*split.train, strides, patch, strict=True)
        ]
        region_bytes = np.dtype(dtype).itemsize * math.prod(max(hi - lo for lo, hi in axis) for axis in intervals)
        enough = math.prod(len(axis) for axis in intervals) >= 2 * config.regions_per_task
        shortest = [math.ceil(0.625 * p) for p in patch]
        shorter = [a for a in range(3) if strides[a] > shortest[a]]
        if (enough and region_bytes <= _REGION_BYTES_MAX) or not shorter:
            break
        axis = max(shorter, key=lambda a: strides[a] / patch[a])
        strides[axis] = max(strides[axis] // 2, shortest[axis])
    z, y, x = intervals
    return PlanVolume(name, weight, shape_zyx, split.train, chunk_zyx, dtype, (z, y, x))


def plan_difference(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One line per key that differs between two `Plan.describe()`."""
    return [
        f"{key}: was {json.dumps(old.get(key))}, is {json.dumps(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _intervals(lo: int, hi: int, stride: int, patch: int) -> tuple[Interval, ...]:
    """Extents of length 2 x stride, one at each multiple of stride, that cover lo..hi and each hold a patch."""
    found: list[Interval] = []
    for start in range(lo // stride * stride, hi, stride):
        found.append((max(start, lo), min(start + 2 * stride, hi)))
        if found[-1][1] == hi:
            break
    # An end piece shorter than a patch is dropped and its neighbour grown over it.
    while len(found) > 1 and found[-1][1] - found[-1][0] < patch:
        found.pop()
        found[-1] = (found[-1][0], hi)
    while len(found) > 1 and found[0][1] - found[0][0] < patch:
        found.pop(0)
        found[0] = (lo, found[0][1])
    if any(b - a < patch for a, b in found):
        raise DataError(f"a region must hold a patch; got {found} for patch {patch}; report this as a defect")
    return tuple(found)


@lru_cache(maxsize=32)
def _permutation(seed: tuple[int, ...], count: int) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).permutation(count).astype(np.uint32)


@lru_cache(maxsize=32)
def _draw_volumes(seed: int, weights: tuple[float, ...], block: int) -> tuple[tuple[int, int], ...]:
    """For each slot of a block: its volume, and how many slots before it (in all blocks) went to that volume.

    Slots are dealt to volumes in exact proportion to the weights, then shuffled within the block.  Counts have a closed
    form (a Beatty sequence per volume in fixed-point numbers), so block 10^6 costs as much as block 0.
    """
    first, stop = block * _SLOTS_PER_DRAW, (block + 1) * _SLOTS_PER_DRAW
    before = _dealt(seed, weights, first)
    counts = [b - a for a, b in zip(before, _dealt(seed, weights, stop), strict=True)]
    dealt = np.repeat(np.arange(len(weights)), counts)
    np.random.default_rng((seed, _VOLUME, block)).shuffle(dealt)
    used = list(before)
    slots = []
    for volume in dealt.tolist():
        slots.append((volume, used[volume]))
        used[volume] += 1
    return tuple(slots)


def _dealt(seed: int, weights: tuple[float, ...], slots: int) -> list[int]:
    """How many of the first `slots` slots each volume gets: within one of its share, summing to `slots`."""
    counts = []
    rest_slots, rest_weight = slots, sum(weights)
    for volume, weight in enumerate(weights[:-1]):
        share = round(weight / rest_weight * 2**40)
        phase = int(np.random.default_rng((seed, _VOLUME, 2**32 + volume)).integers(2**40))
        counts.append((rest_slots * share + phase) >> 40)
        rest_slots -= counts[-1]
        rest_weight -= weight
    return [*counts, rest_slots]
