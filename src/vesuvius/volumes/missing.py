"""Absent chunks: tells air from damage, from chunks stored under other keys, and from a volume that is gone.

zarr reads every absent chunk as air.  Some writers omit `dimension_separator` from nested zarr v2 arrays, and copies
mix up the key encodings of v2 and v3, so the first absent chunks are looked for under the other encodings too.
"""

import itertools
import json
import logging
import time
from contextlib import suppress
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import DataError, warn_once
from vesuvius.volumes.box import Box, box_along, chunk_ranges, format_box, slices
from vesuvius.volumes.chunks import ChunkGrid, KeyForm
from vesuvius.volumes.errors import FetchError, OutageError, UnreadableChunkError

log = logging.getLogger(__name__)

# Metadata are checked at most once a second, in at most 1/50 of the time.
_CHECK_EVERY_S, _CHECK_SHARE = 1.0, 50
_MAX_KEY_CHECKS = 64  # absent objects of a volume for which a process tries the other key encodings

# `c/0/0/0`, `c.0.0.0`, `0/0/0`, `0.0.0`
_FORMS: tuple[KeyForm, ...] = (("default", "/"), ("default", "."), ("v2", "/"), ("v2", "."))
_PAGE, _PROBES = 1000, 64  # keys of a listing that are checked, and random keys of a store that cannot list


class MissingChunks:
    """Classifies absent chunks of a volume: air, gone, or stored under other keys.

    `policy` is `data.missing_chunk`, `metadata` what the object of that key held when the volume was opened.
    """

    def __init__(
        self, name: str, grid: ChunkGrid, metadata: tuple[str, bytes], policy: Literal["air", "error"]
    ) -> None:
        self._name, self._grid, self._policy = name, grid, policy
        self._key, self._known = metadata
        self._due = 0.0  # time of the next check of the metadata
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
        self.check_metadata(at_once=bool(seen or listed))
        if seen or listed:
            cause = f"{'it was read before' if seen else 'it is listed'}, but is now missing"
            raise UnreadableChunkError(self._name, box, chunk, damaged, cause)
        if object_absent:
            self.check_keys(grid.object_index(chunk))

    def check_metadata(self, at_once: bool) -> None:
        """Raise DataError if the volume is gone or has been replaced.  Skipped if the last check was recent."""
        started, source, key = time.monotonic(), self._grid.source, self._key
        if started < self._due and not at_once:
            return
        found = source.get(key, cached=False)
        now = time.monotonic()
        self._due = now + max(_CHECK_EVERY_S, _CHECK_SHARE * (now - started))
        if found is None:
            raise DataError(
                f"Cannot read {key} of {source.display_address}: the volume is gone (deleted, or its file system is no "
                "longer mounted); restore it, then continue with --resume"
            )
        if found != self._known and _essential(found) != _essential(self._known):
            raise DataError(
                f"Cannot continue reading {source.display_address}: it has been replaced (the metadata in {key} "
                "changed since the start); start a new run for another volume"
            )
        self._known = found

    def check_keys(self, index: Triple) -> None:
        """Check whether an absent object is stored under another key encoding, or, at the first one, whether all are.

        Raises DataError: it is, or no chunk is stored at all.
        """
        if index in self._keys_checked or len(self._keys_checked) >= _MAX_KEY_CHECKS:
            return
        grid, source = self._grid, self._grid.source
        others = [ChunkGrid(grid.array, grid.axes, source, form) for form in _FORMS if form != grid.form]
        keys, page = {other.object_key(index): other for other in others}, list[str]()
        try:
            found = {key: keys[key] for key in keys.keys() - set(source.absent(list(keys)))}
            if not found and not self._keys_checked and source.can_list:
                page = list(itertools.islice(source.list_keys(grid.array.path), _PAGE))
            elif not found and not self._keys_checked and not self._seen.any():
                probes = [grid.object_key(each) for each in grid.random_objects(_PROBES)]
                if len(source.absent(probes)) == len(probes):
                    what = "%s: none of %d random chunks is stored; check path, level and select if patches are empty"
                    warn_once(what, self._name, len(probes))
        except OutageError:
            raise
        except (FetchError, DataError) as error:  # reading the chunks reports what matters
            log.debug("cannot check the keys of %s: %s", self._name, error)
        else:
            if page and not any(map(grid.index_of_key, page)):
                found = {key: other for key in page for other in others if other.index_of_key(key)}
                if not found and len(page) < _PAGE and not self._seen.any():
                    self.check_metadata(at_once=True)  # or it is being deleted
                    raise DataError(
                        f"No chunk of {self._name} is stored (neither like {grid.object_key(index)} nor under other "
                        "key encodings); correct path, level or select, or copy the chunks; an array that is empty on "
                        "purpose needs one stored chunk"
                    )
            for key, other in found.items():
                raise DataError(
                    f"Chunks of {self._name} are stored under another key encoding than its metadata say: "
                    f"{grid.object_key(index)} is absent, but {key} exists and would be read as air; "
                    f"{_correction(other)}"
                )
        self._keys_checked.add(index)


def _essential(metadata: bytes) -> Any:
    """Metadata without attributes, which may change at any time."""
    with suppress(ValueError, AttributeError):  # not a JSON object
        return {key: value for key, value in json.loads(metadata).items() if key != "attributes"}
    return metadata


def _correction(grid: ChunkGrid) -> str:
    encoding, separator = grid.form
    if grid.array.metadata.zarr_format == 3:
        correct = f'correct chunk_key_encoding in zarr.json to "{encoding}" with separator "{separator}", or '
    else:
        correct = f'correct dimension_separator in .zarray to "{separator}", or ' if encoding == "v2" else ""
    return f"{correct}rename the chunks"
