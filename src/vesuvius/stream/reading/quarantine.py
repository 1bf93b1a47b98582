"""The quarantine: a record, as plain data, of each damaged box of the volumes."""

from typing import Any

from vesuvius.errors import ConfigError, DataError, one_line
from vesuvius.volumes.box import Box
from vesuvius.volumes.errors import UnreadableChunkError

DamagedBox = tuple[int, Box]
"""Index of the volume, and the voxels that cannot be read."""


def quarantine_record(volume_index: int, error: UnreadableChunkError) -> dict[str, Any]:
    return {
        "volume": error.volume,
        "number": volume_index,
        "box": [list(error.box[0]), list(error.box[1])],
        "chunk": list(error.chunk),
        "cause": error.cause,
    }


def parse_damaged_box(record: Any, volumes: int) -> DamagedBox:
    """Return volume index and voxels of a record.  Raises ConfigError unless it belongs to one of `volumes` volumes."""
    try:
        (z0, y0, x0), (z1, y1, x1) = record["box"]
        volume_index = record["number"]
        if not 0 <= volume_index < volumes or not all(isinstance(edge, int) for edge in (z0, y0, x0, z1, y1, x1)):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{one_line(repr(record))} is not a quarantine record of these {volumes} volumes; pass the records of a "
            "stream unchanged"
        ) from None
    return volume_index, ((z0, y0, x0), (z1, y1, x1))


def check_quarantine(count: int, limit: int, last: dict[str, Any]) -> None:
    """Raise DataError if more boxes are damaged than `data.max_quarantined`; `last` is the newest record."""
    if count > limit:
        raise DataError(
            f"The volumes have {count} damaged chunks, more than data.max_quarantined={limit}; the last: volume "
            f"{last['volume']}, voxels {last['box']}, chunk {last['chunk']}: {last['cause']}; restore the volume "
            "or raise the limit"
        )
