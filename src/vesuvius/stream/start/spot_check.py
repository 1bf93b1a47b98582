"""Read some chunks of each volume for a dry run, where training would read them: are they whole?

A small volume is read whole; of a large one, one chunk of each of many random patches.  The same ones each time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, DataConfig, Triple
from vesuvius.stream.reading.quarantine import DamagedBox
from vesuvius.stream.start.prepare import Expect, PreparedData, ReadBox, expect_nothing
from vesuvius.stream.start.start_reads import Kind
from vesuvius.volumes.alignment import Alignment
from vesuvius.volumes.box import intersects
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.volume import Volume

MOST_CHUNKS = 64
_LIMIT_S = 10.0
_SEED = 0


@dataclass
class SpotCheck:
    """What was read of one volume, or condition."""

    spec: ArrayConfig
    name: str
    chunks: int  # of the whole volume, stored or not
    read: int = 0  # of these, looked at, the absent and the broken ones included
    absent: int = 0  # not stored, and so air
    quarantined: int = 0  # left out, as the run that is resumed knows that they are damaged
    # those that cannot be read; for a damaged shard one entry
    broken: list[UnreadableChunkError] = field(default_factory=list)

    def line(self) -> str:
        """What was found, without the broken ones' names."""
        counts = {
            "BROKEN": len(self.broken),
            "not stored (air)": self.absent,
            "in quarantine skipped": self.quarantined,
        }
        found = [f"{count} {what}" for what, count in counts.items() if count]
        return f"{self.read} of {self.chunks} of {self.name} read: {', '.join(found) or 'all intact'}"

    def problem(self, max_quarantined: int) -> str | None:
        """A message on the broken ones; None where there are none."""
        if not self.broken:
            return None
        first = self.broken[0]
        level = f" --level {self.spec.level}" if self.spec.level else ""
        select = f" --select {','.join(map(str, self.spec.select))}" if self.spec.select else ""
        return (
            f"every chunk of a volume must be readable; got {len(self.broken)} broken of {self.read} that were read of "
            f"{self.name} ({self.chunks} in all), the first: chunk {list(first.chunk)}: {first.cause}; list all with "
            f"`vesuvius volume verify {self.spec.path}{level}{select}` and restore them from their source (a run would "
            f"replace patches that touch them, in up to data.max_quarantined={max_quarantined} places)"
        )


def spot_check(
    data: PreparedData,
    config: DataConfig,
    read: ReadBox,
    quarantined: frozenset[DamagedBox] = frozenset(),
    most: int = MOST_CHUNKS,
    expect: Expect = expect_nothing,
) -> Iterator[SpotCheck]:
    """Read up to `most` chunks of each volume and condition, for ten seconds in all, but at least one of each.

    Args:
        read: what reads them, e.g. `StartReads.read`, which a crashing codec may end.
        quarantined: chunks that touch these are left out.
        expect: told what will be read.

    Raises:
        DataError: a store is away for `data.store.outage_minutes`, or refuses.
    """
    arrays: list[tuple[Kind, int, ArrayConfig]] = [("volume", *numbered) for numbered in enumerate(config.volumes)]
    arrays += [("condition", number, spec.condition) for number, spec in enumerate(config.volumes) if spec.condition]
    started = time.monotonic()
    for place, (kind, number, spec) in enumerate(arrays, 1):
        volume, alignment = data.array(kind, number)
        found = SpotCheck(spec, volume.name, math.prod(volume.grid.counts_zyx))
        chunks = _chunks(data, number, volume, alignment, most)
        expect(f"reading chunks of {volume.name}", [(kind, number, volume.grid.box_of(chunk)) for chunk in chunks])
        for chunk in chunks:
            box = volume.grid.box_of(chunk)
            if any(n == number and intersects(alignment.volume_box(box), damaged) for n, damaged in quarantined):
                found.quarantined += 1
                continue
            if any(intersects(box, error.box) for error in found.broken):
                continue  # of a shard that is damaged as a whole
            found.read += 1
            try:
                _read(found, volume, chunk, read(kind, number, box))
            except UnreadableChunkError as error:
                found.broken.append(error)
            if time.monotonic() - started > _LIMIT_S * place / len(arrays):
                break
        yield found


def _read(found: SpotCheck, volume: Volume, chunk: Triple, voxels: NDArray[Any]) -> None:
    """Count a chunk that is not stored.  Raises UnreadableChunkError for one that the listing has and that is gone."""
    box = volume.grid.box_of(chunk)
    if (voxels != volume.fill_value).any() or not volume.grid.absent(box):
        return
    volume.missing.check_absent(chunk, box)
    found.absent += 1


def _chunks(data: PreparedData, number: int, volume: Volume, alignment: Alignment, most: int) -> list[Triple]:
    """All chunks that training and validation touch, or `most` of them in the order of random patches."""
    split, grid = data.splits[number], volume.grid
    if math.prod(grid.counts_zyx) <= most:
        boxes = (split.train, *((split.validation,) if split.validation else ()))
        return sorted({chunk for box in boxes for chunk in grid.chunks_of(alignment.array_box(box))})
    drawn: dict[Triple, None] = {}
    for draw in range(4 * most):
        touched = list(grid.chunks_of(alignment.array_box(data.plan.uniform_patch(number, draw))))
        drawn.setdefault(touched[np.random.default_rng((_SEED, number, draw)).integers(len(touched))])
        if len(drawn) == most:
            break
    return list(drawn)
