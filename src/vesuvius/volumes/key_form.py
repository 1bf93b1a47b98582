"""Finds by which form of key the chunks of an array are stored, where its metadata name another one.

Writers have left `dimension_separator` out of nested zarr v2 arrays, and copies and conversions mix up the forms of v2
and v3.  zarr finds nothing by the wrong form and takes all chunks for air, so absence is believed only after a look at
the other forms.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.core.array import AsyncArray

from vesuvius.config import Triple
from vesuvius.errors import DataError
from vesuvius.volumes.box import times, triple
from vesuvius.volumes.chunks import ChunkGrid, KeyForm, ShardIndexError, key_form
from vesuvius.volumes.errors import FetchError, RefusedError
from vesuvius.volumes.format.axes import Axes
from vesuvius.volumes.store.object_store import warn_once
from vesuvius.volumes.store.source import Source

log = logging.getLogger(__name__)

# `c/0/0/0`, `c.0.0.0`, `0/0/0`, `0.0.0`
_FORMS: tuple[KeyForm, ...] = (("default", "/"), ("default", "."), ("v2", "/"), ("v2", "."))
_FIRST_PROBES, _PROBES = 8, 64
_PAGE = 1000  # keys of a listing that are looked at
_NAMES = 100_000  # names in the folder of an array on a disk that are looked at


def as_stored(name: str, array: zarr.Array[Any], axes: Axes, source: Source) -> zarr.Array[Any]:
    """The array with the form of key by which its chunks are stored.  Lists a page of keys, or asks for a few chunks.

    Args:
        name: of the volume, for messages.

    Raises:
        DataError: no chunk is stored by any form, or some are by another one than the metadata name.
    """
    grids = _grids(array, axes, source)
    declared, first = grids[0], grids[0].object_key((0, 0, 0))
    try:
        found, complete = _found(grids)
    except FetchError as error:  # what lies in place of a chunk is none; whoever reads it says so
        log.debug("%s is not probed: %s", name, error)
        return array
    stored, total = found[0], math.prod(declared.object_counts_zyx)
    unseen = [(grid, len(places - stored)) for grid, places in zip(grids, found, strict=True) if places - stored]
    if unseen:
        (grid, count), example = unseen[0], unseen[0][0].object_key((0, 0, 0))
        correct = _correction(array, grid.form)
        if stored or len(unseen) > 1 or correct is None:
            raise DataError(
                f"Chunks of {name} are stored by another form of key than its metadata name: {count} chunks"
                f"{'' if complete else ' of those asked for'} lie as {example}, not as {first}, and would be read as "
                f"air; rename them, or correct {correct or 'the metadata'}"
            )
        text = "%s: its metadata name chunks like %s, but they are stored like %s and are read so; correct %s"
        warn_once(text, name, first, example, correct)
        return with_key_form(array, grid.form)
    if source.forbidden is not None or (stored and not (complete and _only_empty_shards(declared, stored))):
        return array
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
    return array


def other_key(grid: ChunkGrid, place: Triple) -> str | None:
    """The key by which an object lies there that is absent by its own; None where there is none.  One round trip."""
    keys = [other.object_key(place) for other in _grids(grid.array, grid.axes, grid.source)[1:]]
    try:
        return next(iter(set(keys).difference(grid.source.absent(keys))), None)
    except (FetchError, RefusedError) as error:
        log.debug("%s is not probed: %s", keys, error)
        return None


def with_key_form(array: zarr.Array[Any], form: KeyForm) -> zarr.Array[Any]:
    """The array with this form of key.  Asks no store."""
    if form == key_form(array):
        return array
    document: dict[str, Any] = dict(array.metadata.to_dict())
    encoding, separator = form
    if array.metadata.zarr_format == 2:
        document["dimension_separator"] = separator
    else:
        document["chunk_key_encoding"] = {"name": encoding, "configuration": {"separator": separator}}
    return zarr.Array(AsyncArray(document, array.store_path))  # type: ignore[call-overload]


def _grids(array: zarr.Array[Any], axes: Axes, source: Source) -> list[ChunkGrid]:
    """By the form of key that the metadata name, and then by the others."""
    declared = key_form(array)
    return [ChunkGrid(array, axes, source, form) for form in sorted(_FORMS, key=lambda form: form != declared)]


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
    places = _some_places(counts, _PROBES)
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
        for entry in itertools.islice(entries, _NAMES):
            key = f"{folder}/{entry.name}".lstrip("/")
            if any(grid.place_of(key) or grid.leads_to_chunks(key) for grid in grids[1:]):
                return True
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


def _some_places(counts_zyx: Triple, most: int) -> list[Triple]:
    """The middle and random places of a grid; all of them where they are few."""
    total = math.prod(counts_zyx)
    middle = int(np.ravel_multi_index([n // 2 for n in counts_zyx], counts_zyx))
    drawn = range(total) if total <= most else np.random.default_rng(0).integers(total, size=most - 1).tolist()
    numbers = list(dict.fromkeys([middle, *drawn]))
    return [triple(map(int, np.unravel_index(number, counts_zyx))) for number in numbers]


def _correction(array: zarr.Array[Any], form: KeyForm) -> str | None:
    """What the metadata would have to say for a form; None where they cannot."""
    encoding, separator = form
    if array.metadata.zarr_format == 3:
        return f'chunk_key_encoding in zarr.json to "{encoding}" with the separator "{separator}"'
    return f'dimension_separator in .zarray to "{separator}"' if encoding == "v2" else None
