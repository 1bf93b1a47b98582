"""Events of a stream that the operator must know of, and the limits at which they end it."""

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

DEATHS_MAX = 32  # reader deaths per session after which the stream ends
_EVENTS_KEPT = 10_000


@dataclass(frozen=True)
class StreamEvent:
    """An event that the operator must know of; the batches continue unchanged."""

    kind: EventKind
    text: str  # one line for the log
    fields: dict[str, Any] = field(default_factory=dict)  # the same as data


class EventRecorder:
    """Records and logs the events of a stream, and enforces their limits.

    `quarantined` are records of damage found earlier.  Raises ConfigError: one does not belong to these volumes.
    """

    def __init__(self, job: ReaderJob, quarantined: Sequence[dict[str, Any]]) -> None:
        self.events: deque[StreamEvent] = deque(maxlen=_EVENTS_KEPT)
        self.quarantined: list[dict[str, Any]] = []  # a record for each damaged box; `damaged` has the boxes
        self.reader_deaths = 0
        self._data = job.data
        self.set_quarantined(quarantined)

    def set_quarantined(self, quarantined: Sequence[dict[str, Any]]) -> None:
        """Replace the known damage.  Raises ConfigError, and changes nothing, for a record of other volumes."""
        self.damaged = {parse_damaged_box(record, len(self._data.volumes)) for record in quarantined}
        self.quarantined[:] = quarantined

    def record(self, kind: EventKind, text: str, fields: Any) -> None:
        """Record and log an event."""
        self.events.append(StreamEvent(kind, text, dict(fields)))
        log.log(logging.INFO if kind in ("reconfigured", "resident") else logging.ERROR, "%s", text)

    def quarantine(self, record: dict[str, Any]) -> None:
        """Record damage, once per box.  Raises DataError: there is more damage than `data.max_quarantined` allows."""
        if (box := parse_damaged_box(record, len(self._data.volumes))) in self.damaged:
            return
        self.damaged.add(box)
        self.quarantined.append(record)
        text = (
            f"Chunk {record['chunk']} of {record['volume']} cannot be read: {record['cause']}; regions that touch its "
            f"voxels {record['box']} are replaced with others"
        )
        self.record("quarantine", text, record)
        check_quarantine(len(self.quarantined), self._data.max_quarantined, record)

    def reader_died(self, text: str, fields: dict[str, Any]) -> DataError | None:
        """Record a death.  Returns the error that ends the stream if there were too many."""
        self.reader_deaths += 1
        self.record("reader_died", f"{text}; another reader repeats its task", fields)
        if self.reader_deaths <= DEATHS_MAX:
            return None
        return DataError(
            f"{self.reader_deaths} readers died in one session (limit {DEATHS_MAX}); the last: {text}; if readers "
            "crash, restore the volume; if memory is short, lower training.workers or data.regions_in_flight"
        )
