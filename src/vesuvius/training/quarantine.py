"""The quarantine of a run, `runs/<name>/quarantine.jsonl`, and how `vesuvius quarantine` clears it.

    {"kind": "region", "volume": "v.zarr level 0", "number": 0, "box": [[z0, y0, x0], [z1, y1, x1]],
     "chunk": [z, y, x], "cause": "RuntimeError: blosc encoded value is invalid"}
    {"kind": "cleared", "volume": "v.zarr level 0", "number": 0, "box": [[z0, y0, x0], [z1, y1, x1]]}

The file only grows; the last line about a box holds.  Checkpoints hold the list as it was when they were saved, so a
resume leaves out what was cleared since.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from vesuvius.runlog.records import JsonLines, read_records
from vesuvius.volumes.box import Box

log = logging.getLogger(__name__)

Record = dict[str, Any]
Key = tuple[str, int, Box]
"""Volume, its number in the config, and the box."""

_CLEARED = "cleared"


def box_of(record: Record) -> Box:
    """The voxels that a record of the quarantine is about."""
    (z0, y0, x0), (z1, y1, x1) = record["box"]
    return (z0, y0, x0), (z1, y1, x1)


def read_quarantine(path: Path) -> list[Record]:
    """What is in quarantine now, oldest first; empty where the file is not there."""
    return [record for record in _last_lines(path).values() if record["kind"] != _CLEARED]


def clear(path: Path, records: Sequence[Record]) -> None:
    """Have the next resume try these again.  Raises OSError where the file cannot be opened."""
    with closing(JsonLines(path)) as lines:
        for record in records:
            lines.write(_CLEARED, volume=record["volume"], number=record["number"], box=box_of(record))


def still_quarantined(records: Sequence[Record], path: Path) -> list[Record]:
    """The records of a checkpoint without those that were cleared.  Says how many are tried again."""
    cleared = {key for key, record in _last_lines(path).items() if record["kind"] == _CLEARED}
    kept = [record for record in records if _key_of(record) not in cleared]
    if len(kept) < len(records):
        log.info(
            "%d of %d unreadable places are tried again, as `vesuvius quarantine` has cleared them",
            len(records) - len(kept),
            len(records),
        )
    return kept


def _last_lines(path: Path) -> dict[Key, Record]:
    """The last line about each box, in the order of the first ones."""
    try:
        records = read_records(path)
    except FileNotFoundError:
        return {}
    last: dict[Key, Record] = {}
    for record in records:
        last[_key_of(record)] = record
    return last


def _key_of(record: Record) -> Key:
    return record["volume"], record["number"], box_of(record)
