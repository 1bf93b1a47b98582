"""Events of a stream, the limits at which they end it, and checks of the state that it continues from."""

import logging
import os
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vesuvius.errors import ConfigError, DataError, one_line
from vesuvius.stream.reading.quarantine import check_quarantine, parse_damaged_box
from vesuvius.stream.reading.reader import ReaderJob

log = logging.getLogger(__name__)

EventKind = Literal["worker_died", "quarantine", "spill", "reconfigured", "resident"]

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

    def worker_died(self, text: str, fields: dict[str, Any]) -> DataError | None:
        """Record a death.  Returns the error that ends the stream if there were too many."""
        self.reader_deaths += 1
        self.record("worker_died", f"{text}; another worker repeats its task", fields)
        if self.reader_deaths <= DEATHS_MAX:
            return None
        return DataError(
            f"{self.reader_deaths} workers died in one session (limit {DEATHS_MAX}); the last: {text}; if workers "
            "crash, restore the volume; if memory is short, lower training.workers or data.regions_in_flight"
        )


def check_state(state: Any, job: ReaderJob) -> None:
    """Raise ConfigError unless `state` comes from `state_dict` of a stream over the same plan."""
    types = {"seed": int, "sample_index": int, "plan_hash": str, "quarantined": list}
    if not isinstance(state, dict) or any(type(state.get(key)) is not kind for key, kind in types.items()):
        raise ConfigError(
            f"{one_line(repr(state))} was not returned by state_dict() of a stream; pass such a state unchanged"
        )
    if state["plan_hash"] != job.plan.hash:
        raise ConfigError(
            f"The state belongs to plan {state['plan_hash']}, but the stream has plan {job.plan.hash}; use the same "
            "seed, data section, volumes and version of vesuvius"
        )
    for record in state["quarantined"]:
        parse_damaged_box(record, len(job.data.volumes))
    if state["sample_index"] < 0 or state["sample_index"] % job.world_size:
        raise ConfigError(
            f"The state is at sample {state['sample_index']}, not at a multiple of the number of ranks "
            f"({job.world_size}); continue with a number of ranks that divides it"
        )


def check_process(what: str, pid: int) -> None:
    """Raise ConfigError in a DataLoader's worker, and in any other process than `pid`."""
    worker = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", lambda: None)() is not None
    if worker or os.getpid() != pid:
        raise ConfigError(
            f"A {what} does not work in {'a worker of a DataLoader' if worker else 'a forked process'}: each would "
            "read the same samples; make and iterate it in one process; in a DataLoader of a PatchLoader, set "
            "num_workers=0 and PatchLoader(num_workers=...)"
        )
