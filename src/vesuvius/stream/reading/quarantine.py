"""The quarantine: a record, as plain data, for each damaged place of the volumes."""

from __future__ import annotations

from typing import Any

from vesuvius.errors import ConfigError, DataError, one_line
from vesuvius.volumes.box import Box
from vesuvius.volumes.errors import UnreadableChunkError

DamagedBox = tuple[int, Box]
"""Volume number and voxels that cannot be read."""


def quarantine_record(number: int, error: UnreadableChunkError) -> dict[str, Any]:
    """The record of damage in volume `number`."""
    return {
        "volume": error.volume,
        "number": number,
        "box": [list(error.box[0]), list(error.box[1])],
        "chunk": list(error.chunk),
        "cause": error.cause,
    }


def parse_damaged_box(record: Any, volumes: int) -> DamagedBox:
    """Volume and voxels of a record.  Raises ConfigError for anything but a record of one of so many volumes."""
    try:
        (z0, y0, x0), (z1, y1, x1) = record["box"]
        number = record["number"]
        if not 0 <= number < volumes or not all(isinstance(edge, int) for edge in (z0, y0, x0, z1, y1, x1)):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"a quarantine record must come from a stream of these {volumes} volumes; got "
            f"{one_line(repr(record))}; pass it on unchanged"
        ) from None
    return number, ((z0, y0, x0), (z1, y1, x1))


def check_quarantine(count: int, limit: int, last: dict[str, Any]) -> None:
    """Raises DataError where more places are damaged than `data.max_quarantined`; `last` is the newest record."""
    if count > limit:
        raise DataError(
            f"at most data.max_quarantined={limit} places of the volumes may be damaged; got {count}, the last: volume "
            f"{last['volume']}, voxels {last['box']}, chunk {last['chunk']}: {last['cause']}; restore the volume or "
            "raise the limit"
        )
