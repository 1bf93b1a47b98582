"""What the operator must learn of a stream, and the limits on it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vesuvius.errors import DataError
from vesuvius.stream.reading.quarantine import check_quarantine, parse_damaged_box
from vesuvius.stream.reading.reader import ReaderJob

log = logging.getLogger(__name__)

EventKind = Literal["reader_died", "quarantine", "spill", "reconfigured", "resident"]

DEATHS_MAX = 32  # readers that are replaced in one session
_EVENTS_KEPT = 10_000


@dataclass(frozen=True)
class StreamEvent:
    """Something that the operator must learn of, though the batches continue unchanged."""

    kind: EventKind  # what happened
    text: str  # one line for the log
    fields: dict[str, Any] = field(default_factory=dict)  # the same as data


class EventRecorder:
    """Records and logs the events of a stream, and says when there are too many.

    Args:
        job: its limits hold.
        quarantined: records of damage that is known already.

    Attributes:
        events: the last 10,000.
        quarantined: a record for each damaged place; `damaged` the same as boxes.
        reader_deaths: readers that died.

    Raises:
        ConfigError: a record is not of these volumes.
    """

    def __init__(self, job: ReaderJob, quarantined: Sequence[dict[str, Any]]) -> None:
        self.events: deque[StreamEvent] = deque(maxlen=_EVENTS_KEPT)
        self.quarantined: list[dict[str, Any]] = []
        self.reader_deaths = 0
        self._data = job.data
        self.know(quarantined)

    def know(self, quarantined: Sequence[dict[str, Any]]) -> None:
        """Replace what is known of damage.  Raises ConfigError, and changes nothing, for a record of other volumes."""
        self.damaged = {parse_damaged_box(record, len(self._data.volumes)) for record in quarantined}
        self.quarantined[:] = quarantined

    def record(self, kind: EventKind, text: str, fields: Any) -> None:
        """Record and log an event."""
        self.events.append(StreamEvent(kind, text, dict(fields)))
        log.log(logging.INFO if kind in ("reconfigured", "resident") else logging.ERROR, "%s", text)

    def quarantine(self, record: dict[str, Any]) -> None:
        """Record damage, once for each place.

        Raises DataError: more places are damaged than `data.max_quarantined`.
        """
        if (place := parse_damaged_box(record, len(self._data.volumes))) in self.damaged:
            return
        self.damaged.add(place)
        self.quarantined.append(record)
        text = (
            f"voxels {record['box']} of {record['volume']} cannot be read; regions that touch them are "
            f"replaced with others: chunk {record['chunk']}: {record['cause']}"
        )
        self.record("quarantine", text, record)
        check_quarantine(len(self.quarantined), self._data.max_quarantined, record)

    def reader_died(self, text: str, fields: dict[str, Any]) -> DataError | None:
        """Record a death; returns the error that ends the stream where there were too many."""
        self.reader_deaths += 1
        self.record("reader_died", f"{text}; another reader repeats its task", fields)
        if self.reader_deaths <= DEATHS_MAX:
            return None
        return DataError(
            f"{self.reader_deaths} readers died in one session, more than the {DEATHS_MAX} that are replaced; the "
            f"last: {text}; restore the volume if readers crash; if memory is short, lower training.workers or "
            "data.regions_in_flight"
        )
