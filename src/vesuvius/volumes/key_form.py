"""Absence is believed only after a look by the other forms of key.

Writers have left `dimension_separator` out of nested zarr v2 arrays, and copies and conversions mix up the forms of v2
and v3.  zarr finds nothing by the wrong form and takes all chunks for air.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from vesuvius.config import Triple
from vesuvius.errors import DataError
from vesuvius.volumes.box import times, triple
from vesuvius.volumes.chunks import ChunkGrid, KeyForm, ShardIndexError, key_form
from vesuvius.volumes.errors import FetchError, RefusedError
from vesuvius.volumes.store.object_store import warn_once

log = logging.getLogger(__name__)

# `c/0/0/0`, `c.0.0.0`, `0/0/0`, `0.0.0`
_FORMS: tuple[KeyForm, ...] = (("default", "/"), ("default", "."), ("v2", "/"), ("v2", "."))
_FIRST_PROBES, _PROBES = 8, 64
_PAGE = 1000  # keys of a listing that are looked at
_NAMES = 100_000  # names in the folder of an array on a disk that are looked at


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
