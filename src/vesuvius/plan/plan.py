"""Maps sample i to its voxels, as a function of (seed, i).  No I/O, no state.

Every start in the training box (with a foreground map: every start that qualifies) is equally likely for every sample;
volumes come in proportion to their weights.  A pass takes equidistant positions in the enumeration of all starts, from
a random first one, in random order, and visits their cells (`cells.py`).  The region of a cell is read once, and K
patches are cut from it; those of M regions are mixed (`order.py`).  docs/plan.md explains it.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from vesuvius.config import AugmentConfig, Triple
from vesuvius.plan.cells import Cells, region_of
from vesuvius.plan.foreground import QualifyingStarts, starts_within
from vesuvius.plan.order import Mixing, permuted, volume_of_slot
from vesuvius.volumes.box import Box, box_at, triple

# Second word of every random seed here (`order.py` has 2), which keeps draws for different purposes independent.
_ORDER, _START, _AUGMENT, _SUBSTITUTE, _PASS, _PROPOSAL, _RETRY = 1, 3, 4, 5, 7, 8, 9
# Steps of a low-discrepancy lattice (Roberts' R3 sequence: powers of the root of x^4 = x + 1).
_LATTICE = (0.8191725133961645, 0.6710436067037893, 0.5497004779019703)
_VERSION = 3
_FINGERPRINT = 8  # samples
_WINDOWS_OF_SMALL = 4


@dataclass(frozen=True)
class PlanVolume:
    """Everything that the plan needs to know of a volume, or of the patches of a volume that hold a class."""

    name: str
    weight: float
    shape_zyx: Triple
    train: Box
    chunk_zyx: Triple
    dtype: str
    voxel_bytes: int  # bytes that a reader holds per voxel, including those of channels and a condition
    cells: Cells  # a partition of the starts in the training box
    foreground: QualifyingStarts | None = None  # None = all starts qualify
    same_as: int | None = None  # index of the entry with these voxels; None = its own
    transforms: tuple[object, ...] = ()  # how transform.json files place its channels and conditions

    @property
    def num_positions(self) -> int:
        """Number of positions in the enumeration of all starts."""
        return self.foreground.num_positions if self.foreground else self.cells.num_starts

    @property
    def num_visits_per_pass(self) -> int:
        """Number of cells visited in one pass: as many as visit the largest cell at most once."""
        return max(self.num_positions // self.cells.largest, 1)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of a patch, applied on the device."""

    flip_zyx: tuple[bool, bool, bool] = (False, False, False)  # axes to mirror
    num_rot90: int = 0  # quarter turns in the y-x plane, after that


def augmentation_of(seed: int, augment: AugmentConfig, index: int) -> Augmentation:
    """Return the augmentation of sample `index`, which does not depend on its patch.  Pure."""
    rng = np.random.default_rng((seed, _AUGMENT, index))
    flips, rotations = rng.integers(0, 2, size=3).tolist(), int(rng.integers(0, 4))
    return Augmentation(
        flip_zyx=(bool(flips[0]), bool(flips[1]), bool(flips[2])) if augment.flip else (False, False, False),
        num_rot90=rotations if augment.rot90 else 0,
    )


@dataclass(frozen=True)
class Visit:
    """A cell whose region is read for one slot."""

    slot: int  # position in reading order
    attempt: int  # 1, 2, ... replace a region that cannot be read
    entry: int  # index in the plan's volumes
    volume: int  # index of the volume whose voxels are read
    cell: Box  # the box of starts
    anchor_zyx: Triple  # the start that selected the cell, uniform over those in it that qualify
    region: Box  # the voxels that the cell's patches cover


@dataclass(frozen=True)
class Sample:
    """Everything that is random about the voxels of one sample.  Travels with them from the cutter to the step."""

    index: int  # 0, 1, 2, ...
    volume: int  # index of the volume
    region: Box  # the voxels that are read for it
    box: Box  # the voxels of its patch
    augmentation: Augmentation

    @property
    def start_zyx(self) -> Triple:
        return self.box[0]


Task = tuple[int, ...]
"""Unit of work of one reader: the slots whose regions it reads, in ascending order."""


@dataclass(frozen=True)
class Plan:
    """The order of all samples.  Small and picklable: the trainer and every reader hold the same one."""

    seed: int
    patch_zyx: Triple
    mixing: Mixing
    regions_per_task: int
    augment: AugmentConfig
    volumes: tuple[PlanVolume, ...]

    @property
    def sources(self) -> list[PlanVolume]:
        """The volumes with voxels of their own."""
        return [volume for volume in self.volumes if volume.same_as is None]

    @property
    def patches_per_region(self) -> int:
        return self.mixing.patches

    @property
    def regions_in_flight(self) -> int:
        return self.mixing.regions

    @property
    def samples_per_task(self) -> int:
        return self.patches_per_region * self.regions_per_task

    @cached_property
    def region_voxels_max(self) -> int:
        return max(math.prod(volume.cells.region_zyx(self.patch_zyx)) for volume in self.volumes)

    @property
    def slots_per_pass(self) -> int:
        """Number of slots until every volume has had a full pass."""
        weights = sum(volume.weight for volume in self.volumes)
        return max(math.ceil(volume.num_visits_per_pass * weights / volume.weight) for volume in self.sources)

    @property
    def is_small(self) -> bool:
        """Whether a pass would end before reader processes have started."""
        return self.slots_per_pass <= _WINDOWS_OF_SMALL * self.regions_in_flight

    @property
    def map_bytes(self) -> int:
        return sum(volume.foreground.nbytes for volume in self.volumes if volume.foreground)

    @property
    def repeats_cells(self) -> bool:
        """Whether there are fewer cells than regions in flight, so that some cells are in flight twice."""
        return sum(volume.num_visits_per_pass for volume in self.volumes) < self.regions_in_flight

    def sample(self, index: int, attempt: int = 0) -> Sample:
        """Return sample `index` (0, 1, 2, ...); `attempt` as in `visit`.  Pure."""
        return self.sample_of(self.visit(self.mixing.slot_of(index), attempt), index)

    def sample_of(self, visit: Visit, index: int) -> Sample:
        """Return sample `index`, given the visit to its slot.  Pure."""
        box = box_at(self._start(visit, index), self.patch_zyx)
        return Sample(index, visit.volume, visit.region, box, augmentation_of(self.seed, self.augment, index))

    def visit(self, slot: int, attempt: int = 0) -> Visit:
        """Return the cell and region to read for slot 0, 1, 2, ...  Pure.

        Attempts 1, 2, ... are other cells of the same volume, for a region that cannot be read.
        """
        index, count = volume_of_slot(self.seed, tuple(volume.weight for volume in self.volumes), slot)
        volume = self.volumes[index]
        source = index if volume.same_as is None else volume.same_as
        pass_index, visit_index = divmod(count, volume.num_visits_per_pass)
        phases, first = draw_pass(self.seed, index, pass_index, volume.cells, volume.num_positions)
        if attempt:
            anchor = self._draw_start(index, (self.seed, _SUBSTITUTE, slot, attempt))
        else:
            step = permuted(visit_index, volume.num_visits_per_pass, (self.seed, _ORDER, index, pass_index))
            position = (step * volume.num_positions + first) // volume.num_visits_per_pass
            if volume.foreground is None:
                cell = volume.cells.cell_at(position, phases)
                return Visit(slot, attempt, index, source, cell, cell[0], region_of(cell, self.patch_zyx))
            anchor = volume.foreground.at(position) or self._draw_start(index, (self.seed, _PROPOSAL, index, count))
        cell = volume.cells.cell_of(anchor, phases)
        return Visit(slot, attempt, index, source, cell, anchor, region_of(cell, self.patch_zyx))

    def uniform_patch(self, volume_index: int, draw: int) -> Box:
        """Return a patch of a volume that is independent of all others and of the cells.  Pure."""
        return box_at(self._draw_start(volume_index, (self.seed, _PROPOSAL, volume_index, draw)), self.patch_zyx)

    def tasks(self, first: int, stop: int, rank: int = 0, world: int = 1) -> Iterator[Task]:
        """Yield the tasks, in reading order, for the samples first <= i < stop that are `rank` modulo `world`."""
        slots, size = self.mixing.slots(first, stop), self.regions_per_task
        for begin in range(slots.start // size * size, slots.stop, size):
            within = range(max(begin, slots.start), min(begin + size, slots.stop))
            needed = tuple(slot for slot in within if self._is_needed(slot, first, stop, rank, world))
            if needed:
                yield needed

    def describe(self) -> dict[str, Any]:
        """Return everything that the order of samples depends on, as plain data.

        The first samples serve as a fingerprint that also detects a numpy with different random streams.
        """
        first = [self.sample(i) for i in range(_FINGERPRINT)]
        return {
            "version": _VERSION,
            "seed": self.seed,
            "order": "regions",
            "patch_size": list(self.patch_zyx),
            "patches_per_region": self.patches_per_region,
            "regions_in_flight": self.regions_in_flight,
            # as earlier versions hash it
            "augment": {"flip": self.augment.flip, "turn": self.augment.rot90, "contrast": 0.0, "brightness": 0.0},
            "volumes": [
                {  # not its path: a volume may move to another disk between stop and resume
                    "weight": volume.weight,
                    "dtype": volume.dtype,
                    "shape": list(volume.shape_zyx),
                    "train": [list(volume.train[0]), list(volume.train[1])],
                    "cells": _digest(repr(volume.cells.axes)),
                    "min_foreground": volume.foreground.min_fraction if volume.foreground else 0.0,
                    "foreground": volume.foreground.hash if volume.foreground else None,
                }
                | ({"transforms": _digest(repr(volume.transforms))} if volume.transforms else {})
                for volume in self.volumes
            ],
            "first_samples": [[s.volume, *s.start_zyx] for s in first],
        }

    @cached_property
    def hash(self) -> str:
        """Digest that changes if any sample could change."""
        return _digest(json.dumps(self.describe(), sort_keys=True))

    def read_amplification(self, volume_index: int, world: int = 1) -> float:
        """Bytes that `world` ranks decode per byte of patch delivered from a volume, averaged over all starts."""
        volume = self.volumes[volume_index]
        decoded = volume.cells.decoded_voxels(self.patch_zyx, volume.chunk_zyx) * self.reads_per_region(world)
        return decoded / (self.patches_per_region * math.prod(self.patch_zyx))

    def reads_per_region(self, world: int) -> int:
        """Number of ranks that read a region, of `world`: 1 if `regions_in_flight` is a multiple of it."""
        return min(world // math.gcd(self.regions_in_flight, world), self.patches_per_region)

    def regions_held(self, world: int) -> int:
        """Number of the regions in flight that a rank of `world` holds, at most."""
        return self.regions_in_flight // math.gcd(self.regions_in_flight, world)

    def _draw_start(self, volume_index: int, seed: tuple[int, ...]) -> Triple:
        """Draw a start uniformly from those of the volume that qualify."""
        rng, volume = np.random.default_rng(seed), self.volumes[volume_index]
        if volume.foreground is not None:
            return volume.foreground.draw(rng)
        firsts, counts = zip(*((axis.first, axis.count) for axis in volume.cells.axes), strict=True)
        return triple(rng.integers(firsts, np.add(firsts, counts)).tolist())

    def _start(self, visit: Visit, index: int) -> Triple:
        """Return the start of sample `index` in the cell of its visit.

        The starts of a visit form a lattice, shifted by a uniform vector and wrapped: each is uniform in the cell, and
        together they are spread over it.
        """
        shifts = _shifts((self.seed, _START, visit.slot, visit.attempt), visit.cell)
        patch_index = self.mixing.patch_index_in_region(index)
        start = triple(
            lo + (shift - lo + int(patch_index * step % 1 * (hi - lo))) % (hi - lo)
            for shift, step, lo, hi in zip(shifts, _LATTICE, *visit.cell, strict=True)
        )
        foreground = self.volumes[visit.entry].foreground
        if foreground is None or foreground.qualifies(start):
            return start
        within = starts_within(foreground, visit.cell)
        rng = np.random.default_rng((self.seed, _RETRY, index, visit.attempt))
        return within.draw(rng) if within else visit.anchor_zyx

    def _is_needed(self, slot: int, first: int, stop: int, rank: int, world: int) -> bool:
        """Whether one of the samples first <= i < stop, i = rank modulo world, is cut from this slot."""
        if (slot - rank) % math.gcd(self.regions_in_flight, world):
            return False  # a sample equals its slot modulo this, so the slot belongs to another rank
        return any(first <= index < stop and index % world == rank for index in self.mixing.samples_of(slot))


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """List differing keys as 'lr: was 0.0001, is 0.0002', e.g. of two `Plan.describe()`.  Pure."""
    return [
        f"{key}: was {json.dumps(old.get(key))}, is {json.dumps(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


@lru_cache(maxsize=256)
def _shifts(seed: tuple[int, ...], cell: Box) -> Triple:
    return triple(np.random.default_rng(seed).integers(*cell).tolist())


@lru_cache(maxsize=64)
def draw_pass(seed: int, volume_index: int, pass_index: int, cells: Cells, num_positions: int) -> tuple[Triple, int]:
    """Draw the phases of a pass over a volume, and the position of its first visit times the number of visits."""
    rng = np.random.default_rng((seed, _PASS, volume_index, pass_index))
    return cells.draw_phases(rng), int(rng.integers(num_positions))
