"""Second stop of a patch: which voxels sample i is cut from.  Pure: no I/O, no state, a function of (seed, i).

The order of samples depends on the seed and the `data` section alone.  Sample i belongs to task i // (K R); within
its task, run k = (i % (K R)) // R holds one patch from each of the task's R regions, so a batch of R patches mixes R
regions while every region is read once for K patches.  Regions of a volume come in a random order, none again before
all have been seen; a volume is drawn for each region by its weight.  Where a foreground map is given, only regions
and positions with enough foreground come, found on the map and not by reading.  Ranks take samples by index modulo
their number, which gives each rank its own regions where R is a multiple of it.
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

from vesuvius.config import AugmentConfig, DataConfig, Triple
from vesuvius.errors import DataError
from vesuvius.plan.foreground import ForegroundMap
from vesuvius.plan.permutation import permuted
from vesuvius.plan.split import Split
from vesuvius.volumes.box import Box

# Second word of every random seed below: keeps the draws for different purposes independent.
_ORDER, _VOLUME, _START, _AUGMENT, _SUBSTITUTE = 1, 2, 3, 4, 5
_SLOTS_PER_DRAW = 64
# Patches per region are chosen such that this many bytes are decoded per byte of patch, within bounds.
_READ_AMPLIFICATION = 0.8
_PATCHES_PER_REGION = (4, 64)

Interval = tuple[int, int]


@dataclass(frozen=True)
class PlanVolume:
    """What the plan knows of a volume.

    Attributes:
        intervals_zyx: the extents of its regions along each axis; a region is one of each.
        foreground: where there is something to see, or None where every region and position counts.
        eligible: with `foreground`, the numbers of the regions that hold a patch with enough of it, rising.
    """

    name: str
    weight: float
    shape_zyx: Triple
    train: Box
    chunk_zyx: Triple
    dtype: str
    intervals_zyx: tuple[tuple[Interval, ...], tuple[Interval, ...], tuple[Interval, ...]]
    foreground: ForegroundMap | None = None
    eligible: NDArray[np.uint32] | None = None

    @cached_property
    def region_count(self) -> int:
        """How many regions come in one pass."""
        return math.prod(len(axis) for axis in self.intervals_zyx) if self.eligible is None else len(self.eligible)

    def region(self, number: int) -> Box:
        """The box of region `number`, 0 <= number < region_count; without a map they count along x first."""
        z_list, y_list, x_list = self.intervals_zyx
        if self.eligible is not None:
            number = int(self.eligible[number])
        rest, ix = divmod(number, len(x_list))
        iz, iy = divmod(rest, len(y_list))
        (z0, z1), (y0, y1), (x0, x1) = z_list[iz], y_list[iy], x_list[ix]
        return (z0, y0, x0), (z1, y1, x1)


@dataclass(frozen=True)
class Augmentation:
    """What the device does to a patch.

    Attributes:
        flip_zyx, turns: mirror the axes that are set, then turn by `turns` x 90 degrees in the y-x plane.
        gain, offset: model values v become gain * v + offset.
    """

    flip_zyx: tuple[bool, bool, bool] = (False, False, False)
    turns: int = 0
    gain: float = 1.0
    offset: float = 0.0


@dataclass(frozen=True)
class Sample:
    """Where sample `index` comes from."""

    index: int
    volume: int
    region: Box
    start_zyx: Triple


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
    augment: AugmentConfig
    min_foreground: float
    volumes: tuple[PlanVolume, ...]

    @property
    def samples_per_task(self) -> int:
        return self.patches_per_region * self.regions_per_task

    @cached_property
    def region_voxels_max(self) -> int:
        """Voxels of the largest region."""
        return max(
            math.prod(max(hi - lo for lo, hi in axis) for axis in volume.intervals_zyx) for volume in self.volumes
        )

    @property
    def map_bytes(self) -> int:
        """Memory of the foreground maps and of the lists of eligible regions."""
        maps = [volume.foreground.fraction.nbytes for volume in self.volumes if volume.foreground]
        return sum(maps) + sum(volume.eligible.nbytes for volume in self.volumes if volume.eligible is not None)

    @property
    def repeats_within_a_run(self) -> bool:
        """Whether there are fewer regions than a run of samples wants to mix."""
        return sum(volume.region_count for volume in self.volumes) < self.regions_per_task

    def sample(self, index: int, attempt: int = 0) -> Sample:
        """Where sample `index` (0, 1, 2, ...) comes from; `attempt` as in `region_of_slot`.  Pure."""
        volume, region = self.region_of_slot(self.slot_of(index), attempt)
        seed = (self.seed, _START, index, attempt) if attempt else (self.seed, _START, index)
        return Sample(index, volume, region, self._draw_start(np.random.default_rng(seed), volume, region))

    def augmentation(self, index: int) -> Augmentation:
        """What is done to sample `index`, whichever patch it is.  Pure."""
        rng = np.random.default_rng((self.seed, _AUGMENT, index))
        flips, turns = rng.integers(0, 2, size=3).tolist(), int(rng.integers(0, 4))
        gain, offset = rng.uniform(-1, 1, size=2).tolist()
        augment = self.augment
        return Augmentation(
            flip_zyx=(bool(flips[0]), bool(flips[1]), bool(flips[2])) if augment.flip else (False, False, False),
            turns=turns if augment.turn else 0,
            gain=1 + augment.contrast * gain,
            offset=augment.brightness * offset,
        )

    def volume_of(self, index: int) -> int:
        """The volume of sample `index`, also where its region is replaced.  Pure."""
        return self._volume_of_slot(self.slot_of(index))[0]

    def slot_of(self, index: int) -> int:
        """The region slot of sample `index`."""
        task, within = divmod(index, self.samples_per_task)
        return task * self.regions_per_task + within % self.regions_per_task

    def region_of_slot(self, slot: int, attempt: int = 0) -> tuple[int, Box]:
        """Volume number and box of region slot 0, 1, 2, ...; task n holds slots n R to n R + R - 1.  Pure.

        Attempts 1, 2, ... are other regions of the same volume, for one that cannot be read.
        """
        volume, visit = self._volume_of_slot(slot)
        if not attempt:
            return volume, self.region_of_visit(volume, visit)
        rng = np.random.default_rng((self.seed, _SUBSTITUTE, slot, attempt))
        return volume, self.volumes[volume].region(int(rng.integers(self.volumes[volume].region_count)))

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
            "augment": self.augment.model_dump(),
            "min_foreground": self.min_foreground,
            "volumes": [
                {  # not its path: a volume may move to another disk between stop and resume
                    "weight": volume.weight,
                    "dtype": volume.dtype,
                    "shape": list(volume.shape_zyx),
                    "train": [list(volume.train[0]), list(volume.train[1])],
                    "regions": volume.region_count,
                    "intervals": hashlib.sha256(repr(volume.intervals_zyx).encode()).hexdigest()[:16],
                    "foreground": volume.foreground.hash if volume.foreground else None,
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
        planned = self.volumes[volume]
        return decoded_voxels(planned) / (self.patches_per_region * math.prod(self.patch_zyx))

    def _draw_start(self, rng: np.random.Generator, volume: int, region: Box) -> Triple:
        foreground = self.volumes[volume].foreground
        if foreground is not None:
            return foreground.draw_start(rng, region, self.patch_zyx, self.min_foreground)
        stops = [stop - patch + 1 for stop, patch in zip(region[1], self.patch_zyx, strict=True)]
        z, y, x = rng.integers(region[0], stops).tolist()
        return z, y, x

    def _region_number(self, volume: int, visit: int) -> int:
        """Which region the volume's slot number `visit` (0, 1, 2, ...) reads.

        Even and odd regions take turns in coming in a new random order, so the end of one pass and the start
        of the next share no region.  With fewer than 2 R regions that gap would be too short: one random
        order is then repeated.
        """
        count = self.volumes[volume].region_count
        again, position = divmod(visit, count)
        if count < 2 * self.regions_per_task:
            return permuted(position, count, (self.seed, _ORDER, volume))
        even = (count + 1) // 2
        odd, position = (0, position) if position < even else (1, position - even)
        return 2 * permuted(position, count // 2 if odd else even, (self.seed, _ORDER, volume, again, odd)) + odd

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
        patches_per_region=config.patches_per_region or _patches_per_region(config.patch_size, volumes),
        regions_per_task=config.regions_per_task,
        augment=config.augment,
        min_foreground=config.min_foreground,
        volumes=tuple(volumes),
    )


def plan_volume(
    name: str,
    split: Split,
    shape_zyx: Triple,
    chunk_zyx: Triple,
    dtype: str,
    weight: float,
    config: DataConfig,
    *,
    voxel_bytes: int | None = None,
    foreground: ForegroundMap | None = None,
) -> PlanVolume:
    """Lay regions over the training box of a volume.  Pure.

    A region is two strides long on each axis and one starts at every stride, so neighbours overlap by half and every
    patch position but a few is inside some region.  The stride is a whole number of chunks such that a region holds
    1.75 patches; it is shortened where R regions would exceed `data.reader_mib`, or the volume would have fewer than
    2 R regions.  `data.region_size` replaces all that.

    Args:
        voxel_bytes: bytes that a reader holds per voxel; more than the dtype's where a condition is read as well.
        foreground: what `data.min_foreground` is measured on.

    Raises:
        DataError: a region is smaller than a patch, or no region holds enough foreground.
    """
    patch = config.patch_size
    if config.region_size is not None and any(r < p for r, p in zip(config.region_size, patch, strict=True)):
        raise DataError(
            f"a region must hold a patch; got data.region_size {list(config.region_size)} for patch {list(patch)}; "
            "enlarge it or set it to null"
        )
    strides = _strides(split.train, chunk_zyx, voxel_bytes or np.dtype(dtype).itemsize, config)
    z, y, x = (_intervals(lo, hi, stride, p) for lo, hi, stride, p in zip(*split.train, strides, patch, strict=True))
    if foreground is None:
        return PlanVolume(name, weight, shape_zyx, split.train, chunk_zyx, dtype, (z, y, x))
    eligible = foreground.eligible_regions((z, y, x), patch, config.min_foreground)
    if not len(eligible):
        raise DataError(
            f"some patch must hold data.min_foreground of foreground; got none with {config.min_foreground:g} in "
            f"{len(z) * len(y) * len(x)} regions of {name}; lower it, or check data.foreground and the mask"
        )
    return PlanVolume(name, weight, shape_zyx, split.train, chunk_zyx, dtype, (z, y, x), foreground, eligible)


def _strides(train: Box, chunk_zyx: Triple, voxel_bytes: int, config: DataConfig) -> list[int]:
    """Distance between the starts of neighbouring regions along each axis."""
    patch = config.patch_size
    if config.region_size is not None:
        return [-(-size // 2) for size in config.region_size]
    strides = [chunk * math.ceil(1.75 * p / (2 * chunk)) for p, chunk in zip(patch, chunk_zyx, strict=True)]
    shortest = [math.ceil(0.625 * p) for p in patch]
    while True:
        intervals = [_intervals(lo, hi, stride, p) for lo, hi, stride, p in zip(*train, strides, patch, strict=True)]
        region_bytes = voxel_bytes * math.prod(max(hi - lo for lo, hi in axis) for axis in intervals)
        enough = math.prod(len(axis) for axis in intervals) >= 2 * config.regions_per_task
        shorter = [a for a in range(3) if strides[a] > shortest[a]]
        if (enough and config.regions_per_task * region_bytes <= config.reader_mib * 2**20) or not shorter:
            return strides
        axis = max(shorter, key=lambda a: strides[a] / patch[a])
        strides[axis] = max(strides[axis] // 2, shortest[axis])


def decoded_voxels(volume: PlanVolume) -> float:
    """Voxels that are decoded to read one region, whole chunks, on average over the regions."""
    decoded = 1.0
    for intervals, chunk in zip(volume.intervals_zyx, volume.chunk_zyx, strict=True):
        decoded *= float(np.mean([(-(-hi // chunk) - lo // chunk) * chunk for lo, hi in intervals]))
    return decoded


def _patches_per_region(patch: Triple, volumes: Sequence[PlanVolume]) -> int:
    """So many that the volume with the costliest regions reaches the read amplification aimed at."""
    low, high = _PATCHES_PER_REGION
    wanted = max(decoded_voxels(volume) for volume in volumes) / (_READ_AMPLIFICATION * math.prod(patch))
    return min(max(math.ceil(wanted), low), high)


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
