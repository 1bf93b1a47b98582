"""Absent chunks: tells air from damage, from chunks stored under other keys, and from a volume that is gone.

zarr treats every absent chunk as air.  Some writers omit `dimension_separator` from nested zarr v2 arrays, and copies
and conversions mix up the key encodings of v2 and v3.  zarr finds nothing under the wrong keys, so a chunk counts as
absent only after the other encodings have been checked.
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
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import DataError, warn_once
from vesuvius.volumes.box import Box, box_along, chunk_ranges, format_box, scale, slices, triple
from vesuvius.volumes.chunks import ChunkGrid, KeyForm, ShardIndexError, key_form
from vesuvius.volumes.errors import FetchError, RefusedError, UnreadableChunkError
from vesuvius.volumes.store.source import Source

log = logging.getLogger(__name__)

# Metadata are checked at most once a second, in at most 1/50 of the time.
_CHECK_EVERY_S, _CHECK_SHARE = 1.0, 50
_MAX_KEY_CHECKS = 64  # absent objects of a volume for which a process tries the other key encodings

# `c/0/0/0`, `c.0.0.0`, `0/0/0`, `0.0.0`
_FORMS: tuple[KeyForm, ...] = (("default", "/"), ("default", "."), ("v2", "/"), ("v2", "."))
_FIRST_PROBES, _PROBES = 8, 64
_PAGE = 1000  # keys of a listing that are checked
_NAMES = 100_000  # names in an array's folder on disk that are checked


class MetadataCheck:
    """Checks that a volume still exists and is unchanged, by the object `key`, which held `stored` at the start."""

    def __init__(self, source: Source, key: str, stored: bytes) -> None:
        self._source, self._key, self._known = source, key, stored
        self._due = 0.0

    def check(self, at_once: bool) -> None:
        """Raise DataError if the volume is gone or has been replaced.  Skipped if the last check was recent."""
        started, key = time.monotonic(), self._key
        if started < self._due and not at_once:
            return
        found = self._source.get(key, cached=False)
        now = time.monotonic()
        self._due = now + max(_CHECK_EVERY_S, _CHECK_SHARE * (now - started))
        if found is None:
            raise DataError(
                f"Cannot read {key} of {self._source.display_address}: the volume is gone (deleted, or its file system "
                "is no longer mounted); restore it, then continue with --resume"
            )
        if found != self._known and _essential(found) != _essential(self._known):
            raise DataError(
                f"Cannot continue reading {self._source.display_address}: it has been replaced (the metadata in {key} "
                "changed since the start); start a new run for another volume"
            )
        self._known = found


class MissingChunks:
    """Classifies absent chunks of a volume: air, gone, or stored under other keys.

    `policy` is `data.missing_chunk`.  The metadata are checked before a chunk counts as gone.
    """

    def __init__(self, name: str, grid: ChunkGrid, metadata: MetadataCheck, policy: Literal["air", "error"]) -> None:
        self._name, self._grid, self._metadata, self._policy = name, grid, metadata, policy
        self._keys_checked = set[Triple]()
        self._seen = np.zeros(grid.counts_zyx, bool)  # the OS allocates pages only for parts that are read
        # Over the chunk grid, not 0 for the chunks in a listing: one of them that is absent is damaged, not air.
        self.listed: NDArray[Any] | None = None

    def mark_present(self, chunk: Triple) -> None:
        self._seen[chunk] = True

    def check_absent(self, chunk: Triple, box: Box) -> None:
        """Classify a chunk that was absent while a box was read; it is air if nothing is raised.

        Raises UnreadableChunkError if it is gone; DataError if absent chunks are not allowed, the volume is gone, or
        the chunk has another key.
        """
        if self._policy == "error":
            raise DataError(
                f"Chunk {list(chunk)} of volume {self._name} is absent, region {format_box(box)}, but "
                "data.missing_chunk=error; restore the chunk, or set data.missing_chunk=air"
            )
        # If a shard is gone and any of its chunks existed, all of it is damaged, for every box that touches it.
        grid = self._grid
        object_absent = grid.is_object_absent(chunk)
        damaged = grid.object_box(chunk) if object_absent else grid.box_of(chunk)
        chunks = slices(box_along((r.start, r.stop) for r in chunk_ranges(damaged, grid.chunk_zyx)))
        seen = self._seen[chunks].any()
        listed = self.listed is not None and self.listed[chunks].any()
        self._metadata.check(at_once=bool(seen or listed))
        if seen or listed:
            cause = f"{'it was read before' if seen else 'it is listed'}, but is now missing"
            raise UnreadableChunkError(self._name, box, chunk, damaged, cause)
        index = grid.object_index(chunk)
        if object_absent and index not in self._keys_checked and len(self._keys_checked) < _MAX_KEY_CHECKS:
            if (other := other_key(grid, index)) is not None:
                raise DataError(
                    f"Chunks of {self._name} are stored under two key encodings: {grid.key_of(chunk)} is absent, but "
                    f"{other} exists and would be read as air; rename the chunks of one encoding"
                )
            self._keys_checked.add(index)


def _essential(metadata: bytes) -> Any:
    """Metadata without attributes, which may change at any time."""
    with suppress(ValueError, AttributeError):  # not a JSON object
        return {key: value for key, value in json.loads(metadata).items() if key != "attributes"}
    return metadata


# ---- other key encodings


def check_keys(name: str, grid: ChunkGrid) -> None:
    """Check on a page of a listing, or a few keys, that chunks are stored under the key encoding of the metadata.

    Raises DataError: no chunk is stored under any encoding, or some are stored under another one.
    """
    grids = _grids(grid)
    try:
        found, complete = _stored_objects(grids)
    except FetchError as error:  # an object that is not a file; reading the chunk reports it
        log.debug("cannot check the keys of %s: %s", name, error)
        return
    stored, first, total = found[0], grid.object_key((0, 0, 0)), math.prod(grid.object_counts_zyx)
    for other, indices in zip(grids, found, strict=True):
        if indices - stored:
            raise DataError(
                f"Chunks of {name} are stored under another key encoding than its metadata say: "
                f"{len(indices - stored)} chunks{'' if complete else ' in a sample'} are stored like "
                f"{other.object_key((0, 0, 0))} instead of {first} and would be read as air; {_correction(other)}"
            )
    if grid.source.forbidden is not None or (stored and not (complete and _only_empty_shards(grid, stored))):
        return
    if complete:
        raise DataError(
            f"No chunk of {name} is stored (0 of {total}, neither like {first} nor under other key encodings); correct "
            "path, level or select, or copy the chunks; an array that is empty on purpose needs one stored chunk"
        )
    warn_once(
        "%s: none of %d random chunks (of %d) is stored; check path, level and select if patches are empty",
        *(name, min(_PROBES, total), total),
    )


def other_key(grid: ChunkGrid, index: Triple) -> str | None:
    """The key in another encoding under which an absent object exists; None if there is none.  One round trip."""
    keys = [other.object_key(index) for other in _grids(grid)[1:]]
    try:
        return next(iter(set(keys).difference(grid.source.absent(keys))), None)
    except (FetchError, RefusedError) as error:
        log.debug("cannot check %s: %s", keys, error)
        return None


def _grids(grid: ChunkGrid) -> list[ChunkGrid]:
    """The grid, then the same grid with each other key encoding."""
    forms = [form for form in _FORMS if form != key_form(grid.array)]
    return [grid, *(ChunkGrid(grid.array, grid.axes, grid.source, form) for form in forms)]


def _stored_objects(grids: list[ChunkGrid]) -> tuple[list[set[Triple]], bool]:
    """Indices of some stored objects per key encoding, and whether these are all there are.

    From the first page of a listing if the store can list, otherwise or if there are more from a few requests.
    """
    source, folder, counts = grids[0].source, grids[0].array.path, grids[0].object_counts_zyx
    found = [set[Triple]() for _ in grids]
    if source.can_list:
        most = None if _other_names(grids) else _PAGE
        try:
            page = list(itertools.islice(source.list_keys(folder), most))
        except DataError as error:
            log.debug("checking keys of %s without a listing: %s", source.display_address, error)
        else:
            found = [{index for key in page if (index := grid.index_of_key(key)) is not None} for grid in grids]
            if most is None or len(page) < most:
                return found, True
    sample = _sample_indices(counts)
    is_complete = len(sample) == math.prod(counts)
    _probe(grids, found, sample if is_complete else sample[:_FIRST_PROBES])
    if not any(found):
        _probe(grids, found, sample)
    for other in found[1:]:  # the page may have ended before the same objects under the right keys
        doubtful = sorted(other - found[0])[:_PROBES]
        found[0] |= _present(grids[0], doubtful)
        other.intersection_update(doubtful)
    return found, is_complete


def _probe(grids: list[ChunkGrid], found: list[set[Triple]], indices: Iterable[Triple]) -> None:
    """Add the objects that exist at these indices to `found`: under the first encoding, or else under the others."""
    wanted = set(indices) - found[0]
    for grid, have in zip(grids, found, strict=True):
        have |= _present(grid, wanted - have)
        wanted -= found[0]


def _present(grid: ChunkGrid, indices: Iterable[Triple]) -> set[Triple]:
    """The indices at which the store has an object.  One request each."""
    keys = {grid.object_key(index): index for index in indices}
    return {keys[key] for key in keys.keys() - set(grid.source.absent(list(keys), probing=True))}


def _other_names(grids: list[ChunkGrid]) -> bool:
    folder = grids[0].array.path
    if grids[0].source.remote:
        return False
    with suppress(OSError), os.scandir(Path(grids[0].source.address, folder)) as entries:  # a listing reports the error
        keys = (f"{folder}/{entry.name}".lstrip("/") for entry in itertools.islice(entries, _NAMES))
        return any(grid.index_of_key(key) or grid.is_chunk_folder(key) for key in keys for grid in grids[1:])
    return False


def _only_empty_shards(grid: ChunkGrid, stored: set[Triple]) -> bool:
    """Whether these shards are few and contain no chunks according to their indices."""
    if grid.shard_zyx is None or len(stored) > _PROBES:
        return False
    chunks = triple(s // c for s, c in zip(grid.shard_zyx, grid.chunk_zyx, strict=True))
    try:
        return not any(grid.present_in_shard(scale(index, chunks)).any() for index in sorted(stored))
    except (ShardIndexError, RefusedError):  # reading the shard reports it
        return False


def _sample_indices(counts_zyx: Triple) -> list[Triple]:
    """The middle and random indices of a grid; all of a small grid."""
    total = math.prod(counts_zyx)
    middle = int(np.ravel_multi_index([n // 2 for n in counts_zyx], counts_zyx))
    drawn = range(total) if total <= _PROBES else np.random.default_rng(0).integers(total, size=_PROBES - 1).tolist()
    return [triple(map(int, np.unravel_index(n, counts_zyx))) for n in dict.fromkeys([middle, *drawn])]


def _correction(grid: ChunkGrid) -> str:
    encoding, separator = grid.form
    if grid.array.metadata.zarr_format == 3:
        correct = f'correct chunk_key_encoding in zarr.json to "{encoding}" with separator "{separator}", or '
    else:
        correct = f'correct dimension_separator in .zarray to "{separator}", or ' if encoding == "v2" else ""
    return f"{correct}rename the chunks"
