"""What is not there: chunks that are air, chunks that are gone or lie elsewhere, and volumes that are gone.

zarr takes a chunk that is not stored for air, whatever the reason.  Writers have left `dimension_separator` out of
nested zarr v2 arrays, and copies and conversions mix up the forms of key of v2 and v3: by the wrong form zarr finds
nothing, so absence is believed only after a look by the others.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import DataError, warn_once
from vesuvius.volumes.box import Box, box_along, chunk_ranges, format_box, slices, times, triple
from vesuvius.volumes.chunks import ChunkGrid, KeyForm, ShardIndexError, key_form
from vesuvius.volumes.errors import FetchError, RefusedError, UnreadableChunkError
from vesuvius.volumes.store.source import Source

log = logging.getLogger(__name__)

# Metadata are looked at no more often than this, and for no more than one part in so many of the time.
_CHECK_EVERY_S, _CHECK_SHARE = 1.0, 50
_LOOKS = 64  # absent objects of a volume for which a process looks by the other forms of key

# `c/0/0/0`, `c.0.0.0`, `0/0/0`, `0.0.0`
_FORMS: tuple[KeyForm, ...] = (("default", "/"), ("default", "."), ("v2", "/"), ("v2", "."))
_FIRST_PROBES, _PROBES = 8, 64
_PAGE = 1000  # keys of a listing that are looked at
_NAMES = 100_000  # names in the folder of an array on a disk that are looked at


@dataclass(frozen=True, eq=False)
class StoredChunks:
    """The chunks that a listing has found, one bit each.  Picklable."""

    bits: NDArray[np.uint8]  # in C order, eight to a byte
    counts_zyx: Triple  # chunks along each axis

    @classmethod
    def of(cls, occupancy: NDArray[np.bool_]) -> StoredChunks:
        """From bool over the chunk grid (z, y, x)."""
        return cls(np.packbits(occupancy), triple(occupancy.shape))

    def any_of(self, chunks: tuple[range, range, range]) -> bool:
        """Whether one of the chunks of a box of them is stored."""
        places = np.ravel_multi_index(np.ix_(*chunks), self.counts_zyx)
        return bool((self.bits[places >> 3] >> (7 - (places & 7)) & 1).any())


class MetadataCheck:
    """Whether a volume is still there, and still the same: its metadata are compared with those of the start.

    Args:
        key: the object that holds them; `stored` is what it held.
    """

    def __init__(self, source: Source, key: str, stored: bytes) -> None:
        self._source, self._key, self._known = source, key, stored
        self._due = 0.0

    def check(self, at_once: bool) -> None:
        """Raises DataError where the volume is gone, or is another one; looks no more often than costs nothing."""
        started, key = time.monotonic(), self._key
        if started < self._due and not at_once:
            return
        found = self._source.get(key, cached=False)
        now = time.monotonic()
        self._due = now + max(_CHECK_EVERY_S, _CHECK_SHARE * (now - started))
        if found is None:
            raise DataError(
                f"a volume must not move while it is read; got no {key} in {self._source.shown} any more: the volume "
                "is gone (deleted, or its file system is no longer mounted); restore it, then continue with --resume"
            )
        if found != self._known and _essential(found) != _essential(self._known):
            raise DataError(
                f"a volume must not change while it is read; got different metadata in {key} of "
                f"{self._source.shown} than at the start: it has been replaced; start a new run for another volume"
            )
        self._known = found


class MissingChunks:
    """The chunks of a volume that are not stored: told from those that are gone.

    Args:
        name: of the volume, for messages.
        metadata: looked at before a chunk is called gone.
        treatment: `data.missing_chunk`.
        stored: the chunks that a listing has found, where one was made: one of them that is absent is damaged, not air.
    """

    def __init__(
        self,
        name: str,
        grid: ChunkGrid,
        metadata: MetadataCheck,
        treatment: Literal["air", "error"],
        stored: StoredChunks | None,
    ) -> None:
        self._name, self._grid, self._metadata = name, grid, metadata
        self._treatment, self._stored = treatment, stored
        self._looked_for = set[Triple]()
        self._seen = np.zeros(grid.counts_zyx, bool)  # takes memory only where something was read

    def set_stored(self, stored: StoredChunks | None) -> None:
        """Take what a listing has found: one of these that is absent is damaged, not air."""
        self._stored = stored

    def mark_present(self, chunk: Triple) -> None:
        """Remember that a chunk is stored."""
        self._seen[chunk] = True

    def check_absent(self, chunk: Triple, box: Box) -> None:
        """What follows from a chunk that is absent, met while reading a box; air if nothing is raised.

        Raises:
            UnreadableChunkError: it is gone.
            DataError: it must not be absent, or the volume as a whole is gone.
        """
        if self._treatment == "error":
            raise DataError(
                f"chunk {list(chunk)} of volume {self._name} is not stored, region {format_box(box)}, and "
                "data.missing_chunk=error; restore it, or set data.missing_chunk=air"
            )
        # All of a shard is damaged if it is gone with one chunk that was there: the same for every box that touches it.
        grid = self._grid
        whole = grid.is_absent_with_its_object(chunk)
        damaged = grid.object_box(chunk) if whole else grid.box_of(chunk)
        chunks = chunk_ranges(damaged, grid.chunk_zyx)
        seen = bool(self._seen[slices(box_along((r.start, r.stop) for r in chunks))].any())
        listed = self._stored is not None and self._stored.any_of(chunks)
        self._metadata.check(at_once=seen or listed)
        if seen or listed:
            cause = f"{'read before' if seen else 'listed as stored'}, but missing"
            raise UnreadableChunkError(self._name, box, chunk, damaged, cause)
        place = grid.object_index(chunk)
        if whole and place not in self._looked_for and len(self._looked_for) < _LOOKS:
            if (other := other_key(grid, place)) is not None:
                raise DataError(
                    f"Chunks of {self._name} are stored by two forms of key: {grid.key_of(chunk)} is absent, and "
                    f"{other} is there and would be read as air; rename those of one form"
                )
            self._looked_for.add(place)


def _essential(metadata: bytes) -> Any:
    """Metadata without attributes, which may be edited at any time."""
    try:
        found = json.loads(metadata)
    except ValueError:
        return metadata
    return {key: value for key, value in found.items() if key != "attributes"} if isinstance(found, dict) else found


# ---- other forms of key


def check_keys(name: str, grid: ChunkGrid) -> None:
    """Look whether the chunks of an array are stored by the key that its metadata name: at a page of keys, or by a few
    requests.

    Args:
        name: of the volume, for messages.

    Raises:
        DataError: no chunk is stored by any form, or some are by another one than the metadata name.
    """
    grids = _grids(grid)
    try:
        found, complete = _found(grids)
    except FetchError as error:  # what lies in place of a chunk is none; whoever reads it says so
        log.debug("%s is not probed: %s", name, error)
        return
    stored, first, total = found[0], grid.object_key((0, 0, 0)), math.prod(grid.object_counts_zyx)
    for other, places in zip(grids, found, strict=True):
        if places - stored:
            raise DataError(
                f"Chunks of {name} are stored by another form of key than its metadata name: {len(places - stored)} "
                f"chunks{'' if complete else ' of those asked for'} lie as {other.object_key((0, 0, 0))}, not as "
                f"{first}, and would be read as air; {_correction(other)}"
            )
    if grid.source.forbidden is not None or (stored and not (complete and _only_empty_shards(grid, stored))):
        return
    if complete:
        raise DataError(
            f"No chunk of {name} is stored (0 of {total}, looked for as {first} and by the other forms of "
            "key); correct its path, level or select, or copy its chunks too.  An array that is meant to be empty "
            "needs one stored chunk"
        )
    warn_once(
        "%s: none of %d chunks that were asked for at random is stored, of %d; check its path, level and select if "
        "patches come out empty",
        *(name, min(_PROBES, total), total),
    )


def other_key(grid: ChunkGrid, place: Triple) -> str | None:
    """The key by which an object lies there that is absent by its own; None where there is none.  One round trip."""
    keys = [other.object_key(place) for other in _grids(grid)[1:]]
    try:
        return next(iter(set(keys).difference(grid.source.absent(keys))), None)
    except (FetchError, RefusedError) as error:
        log.debug("%s is not probed: %s", keys, error)
        return None


def _grids(grid: ChunkGrid) -> list[ChunkGrid]:
    """By the form of key that the metadata name, and then by the others."""
    forms = [form for form in _FORMS if form != key_form(grid.array)]
    return [grid, *(ChunkGrid(grid.array, grid.axes, grid.source, form) for form in forms)]


def _found(grids: list[ChunkGrid]) -> tuple[list[set[Triple]], bool]:
    """Places of some objects by each form; and whether a form of which none is given has none.

    From a page of keys where the store lists, and else, or where there are more, by requests for a few objects.
    """
    source, folder, counts = grids[0].source, grids[0].array.path, grids[0].object_counts_zyx
    found = [set[Triple]() for _ in grids]
    if source.can_list:
        most = None if _other_names(grids) else _PAGE
        try:
            page = list(itertools.islice(source.list_keys(folder), most))
        except DataError as error:
            log.debug("%s is probed without a listing: %s", source.shown, error)
        else:
            found = [{place for key in page if (place := grid.place_of(key)) is not None} for grid in grids]
            if most is None or len(page) < most:
                return found, True
    places = _some_places(counts)
    few = len(places) == math.prod(counts)
    _ask(grids, found, places if few else places[:_FIRST_PROBES])
    if not any(found):
        _ask(grids, found, places)
    for other in found[1:]:  # a page may end before the same objects by the right key
        doubtful = sorted(other - found[0])[:_PROBES]
        found[0] |= _present(grids[0], doubtful)
        other.intersection_update(doubtful)
    return found, few


def _ask(grids: list[ChunkGrid], found: list[set[Triple]], places: Iterable[Triple]) -> None:
    """Add to what is found what lies at some places: by the first form, or else by the others."""
    wanted = set(places) - found[0]
    for grid, have in zip(grids, found, strict=True):
        have |= _present(grid, wanted - have)
        wanted -= found[0]


def _present(grid: ChunkGrid, places: Iterable[Triple]) -> set[Triple]:
    """Those at which the store has an object.  One request each."""
    keys = {grid.object_key(place): place for place in places}
    return {keys[key] for key in keys.keys() - set(grid.source.absent(list(keys), probing=True))}


def _other_names(grids: list[ChunkGrid]) -> bool:
    """Whether names of another form lie in the array's folder on a disk, among other things perhaps."""
    folder = grids[0].array.path
    if grids[0].source.remote:
        return False
    with suppress(OSError), os.scandir(Path(grids[0].source.address, folder)) as entries:  # whoever lists it says so
        keys = (f"{folder}/{entry.name}".lstrip("/") for entry in itertools.islice(entries, _NAMES))
        return any(grid.place_of(key) or grid.leads_to_chunks(key) for key in keys for grid in grids[1:])
    return False


def _only_empty_shards(grid: ChunkGrid, stored: set[Triple]) -> bool:
    """Whether these shards are few and hold no chunk: known by their indices."""
    if grid.shard_zyx is None or len(stored) > _PROBES:
        return False
    chunks = triple(s // c for s, c in zip(grid.shard_zyx, grid.chunk_zyx, strict=True))
    try:
        return not any(grid.present_in_shard(times(place, chunks)).any() for place in sorted(stored))
    except (ShardIndexError, RefusedError):  # whoever reads the shard says what is wrong with it
        return False


def _some_places(counts_zyx: Triple) -> list[Triple]:
    """The middle and random places of a grid; all of them where they are few."""
    total = math.prod(counts_zyx)
    middle = int(np.ravel_multi_index([n // 2 for n in counts_zyx], counts_zyx))
    drawn = range(total) if total <= _PROBES else np.random.default_rng(0).integers(total, size=_PROBES - 1).tolist()
    return [triple(map(int, np.unravel_index(n, counts_zyx))) for n in dict.fromkeys([middle, *drawn])]


def _correction(grid: ChunkGrid) -> str:
    """What the metadata would have to say for a form, if they can."""
    encoding, separator = grid.form
    if grid.array.metadata.zarr_format == 3:
        correct = f'correct chunk_key_encoding in zarr.json to "{encoding}" with the separator "{separator}", or '
    else:
        correct = f'correct dimension_separator in .zarray to "{separator}", or ' if encoding == "v2" else ""
    return f"{correct}rename them"
