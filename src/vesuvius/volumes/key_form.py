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
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.core.array import AsyncArray

from vesuvius.config import Triple
from vesuvius.errors import DataError
from vesuvius.volumes.box import times, triple
from vesuvius.volumes.chunks import ChunkGrid, ShardIndexError
from vesuvius.volumes.errors import FetchError, RefusedError
from vesuvius.volumes.format.axes import Axes
from vesuvius.volumes.store.source import Source

log = logging.getLogger(__name__)

# (key encoding, separator): `c/0/0/0`, `c.0.0.0`, `0/0/0`, `0.0.0`
_FORMS = (("default", "/"), ("default", "."), ("v2", "/"), ("v2", "."))
_FIRST_PROBES, _PROBES = 8, 64
_PAGE = 1000  # keys of a listing that are looked at
_NAMES = 100_000  # names in the folder of an array on a disk that are looked at
# The first parts of the keys of each form: those of two forms side by side are a mixture.
_FIRST_PARTS = dict(zip(_FORMS, map(re.compile, (r"c", r"c(\.\d+)+", r"\d+", r"\d+(\.\d+)+")), strict=True))

KeyForm = tuple[str, str]
"""Name of a key encoding and its separator, as in `_FORMS`."""

_warned: set[str] = set()


class _Form(ChunkGrid):
    """The chunks (or shards) of an array by one form of key."""

    def __init__(self, array: zarr.Array[Any], axes: Axes, source: Source, encoding: str, separator: str) -> None:
        super().__init__(array, axes, source)
        self.encoding, self.separator = encoding, separator

    def _encode(self, index: Sequence[Any]) -> str:
        return self.separator.join([*(["c"] if self.encoding == "default" else []), *map(str, index)])

    def place(self, key: str) -> Triple | None:
        """Where the object with a key stands; None where it is none by this form."""
        place = self.place_of(key)
        inside = place is not None and all(i < n for i, n in zip(place, self.object_counts_zyx, strict=True))
        return place if inside else None

    def found(self, places: Iterable[Triple]) -> set[Triple]:
        """Those at which the store has an object.  One request each."""
        keys = {self.object_key(place): place for place in places}
        return {keys[key] for key in keys.keys() - set(self.source.absent(list(keys), probing=True))}

    @property
    def example(self) -> str:
        """Key of the first chunk."""
        return self.object_key((0, 0, 0))


def as_stored(name: str, array: zarr.Array[Any], axes: Axes, source: Source, quiet: bool = False) -> zarr.Array[Any]:
    """The array with the form of key by which its chunks are stored.  Lists a page of keys, or asks for a few chunks.

    Args:
        name: of the volume, for messages.
        quiet: another process has opened the array, and has said what is said here.

    Raises:
        DataError: no chunk is stored by any form, or some are by another one than the metadata name.
    """
    declared, *others = forms = _forms(array, axes, source)
    try:
        found, complete = _found(forms)
    except FetchError as error:  # what lies in place of a chunk is none; whoever reads it says so
        log.debug("%s is not probed: %s", name, error)
        return array
    stored = found[0]
    for form, places in zip(others, found[1:], strict=True):
        if not places - stored:
            continue
        correct = _correction(array, form)
        if stored or any(more for more in found[1:] if more is not places) or correct is None:
            count = f"{len(places - stored)} chunks{'' if complete else ' of those asked for'}"
            raise DataError(
                f"Chunks of {name} are stored by another form of key than its metadata name: {count} lie as "
                f"{form.example}, not as {declared.example}, and would be read as air; rename them, or correct "
                f"{correct or 'the metadata'}"
            )
        if not quiet and name not in _warned:
            _warned.add(name)
            log.warning(
                "%s: its metadata name chunks like %s, but they are stored like %s and are read so; correct %s",
                *(name, declared.example, form.example, correct),
            )
        return with_key_form(array, (form.encoding, form.separator))
    hollow = bool(stored) and complete and not quiet and _only_empty_shards(declared, stored)
    if quiet or (stored and not hollow) or source.forbidden is not None:
        return array
    total = math.prod(declared.object_counts_zyx)
    if complete or hollow:
        raise DataError(
            f"No chunk of {name} is stored (0 of {total}, looked for as {declared.example} and by the other forms of "
            "key); correct its path, level or select, or copy its chunks too.  An array that is meant to be empty "
            "needs one stored chunk"
        )
    if name not in _warned:
        _warned.add(name)
        log.warning(
            "%s: none of %d chunks that were asked for at random is stored, of %d; check its path, level and select if "
            "patches come out empty",
            *(name, min(_PROBES, total), total),
        )
    return array


def _found(forms: list[_Form]) -> tuple[list[set[Triple]], bool]:
    """Some chunks of each form; and whether a form of which none is given has none.

    From a page of keys where the store lists, and else, or where there are more, by requests for a few chunks.
    """
    declared = forms[0]
    source, counts = declared.source, declared.object_counts_zyx
    found, complete = [set[Triple]() for _ in forms], False
    if source.can_list:
        try:
            most = None if _other_names(declared) else _PAGE
            page = list(itertools.islice(source.list_keys(declared.array.path), most))
        except DataError as error:
            log.debug("%s is probed without a listing: %s", source.shown, error)
        else:
            found = [{place for key in page if (place := form.place(key)) is not None} for form in forms]
            complete = most is None or len(page) < most
    if complete:
        return found, True
    places = _some_places(counts, _PROBES)
    few = len(places) == math.prod(counts)
    _ask(forms, found, places if few else places[:_FIRST_PROBES])
    if not any(found):
        _ask(forms, found, places)
    for other in found[1:]:  # a page may end before the same chunks by the right key
        doubtful = sorted(other - found[0])[:_PROBES]
        found[0] |= declared.found(doubtful)
        other.intersection_update(doubtful)
    return found, few


def _ask(forms: list[_Form], found: list[set[Triple]], places: Iterable[Triple]) -> None:
    """Add to what is found what lies at some places: by the first form, or else by the others."""
    wanted = set(places) - found[0]
    for form, have in zip(forms, found, strict=True):
        have |= form.found(wanted - have)
        wanted -= found[0]


def other_key(grid: ChunkGrid, place: Triple) -> str | None:
    """The key by which an object lies there that is absent by its own; None where there is none.  One round trip."""
    keys = [form.object_key(place) for form in _forms(grid.array, grid.axes, grid.source)[1:]]
    try:
        return next(iter(set(keys).difference(grid.source.absent(keys))), None)
    except (FetchError, RefusedError) as error:
        log.debug("%s is not probed: %s", keys, error)
        return None


def _other_names(form: _Form) -> bool:
    """Whether names of another form lie in the array's folder on a disk, among other things perhaps."""
    if form.source.remote:
        return False
    others = [name for other, name in _FIRST_PARTS.items() if other != (form.encoding, form.separator)]
    try:
        with os.scandir(Path(form.source.address, form.array.path)) as entries:
            names = (entry.name for entry in itertools.islice(entries, _NAMES))
            return any(other.fullmatch(name) for name in names for other in others)
    except OSError:  # whoever lists it says so
        return False


def _only_empty_shards(form: _Form, stored: set[Triple]) -> bool:
    """Whether these shards are few and hold no chunk: known by their indices."""
    if form.shard_zyx is None or len(stored) > _PROBES:
        return False
    chunks = triple(s // c for s, c in zip(form.shard_zyx, form.chunk_zyx, strict=True))
    try:
        return not any(form.present_in_shard(times(place, chunks)).any() for place in sorted(stored))
    except (ShardIndexError, RefusedError):  # whoever reads the shard says what is wrong with it
        return False


def _some_places(counts_zyx: Triple, most: int) -> list[Triple]:
    """The middle and random places of a grid; all of them where they are few."""
    total = math.prod(counts_zyx)
    middle = int(np.ravel_multi_index([n // 2 for n in counts_zyx], counts_zyx))
    drawn = range(total) if total <= most else np.random.default_rng(0).integers(total, size=most - 1).tolist()
    numbers = list(dict.fromkeys([middle, *drawn]))
    return [triple(map(int, np.unravel_index(number, counts_zyx))) for number in numbers]


def _forms(array: zarr.Array[Any], axes: Axes, source: Source) -> list[_Form]:
    """The form that the metadata name, and then the others."""
    declared = key_form(array)
    return [_Form(array, axes, source, *form) for form in (declared, *(form for form in _FORMS if form != declared))]


def key_form(array: zarr.Array[Any]) -> KeyForm:
    """The form of key that an array's metadata name."""
    if array.metadata.zarr_format == 2:
        return "v2", str(array.metadata.dimension_separator)
    encoding = array.metadata.chunk_key_encoding
    return str(encoding.name), str(getattr(encoding, "separator", None))


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


def _correction(array: zarr.Array[Any], form: _Form) -> str | None:
    """What the metadata would have to say for a form; None where they cannot."""
    if array.metadata.zarr_format == 3:
        return f'chunk_key_encoding in zarr.json to "{form.encoding}" with the separator "{form.separator}"'
    return f'dimension_separator in .zarray to "{form.separator}"' if form.encoding == "v2" else None
