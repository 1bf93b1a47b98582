"""The metrics of a run: `metrics.jsonl`, which is the truth, and whoever else wants its records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from vesuvius.runlog.records import JsonLines, make_record

Record = dict[str, Any]


class Metrics:
    """Writes records into a file of JSON Lines and hands them, as they stand there, to others.  Threads may write.

    Args:
        path: the file.
        listeners: called with each record, by whichever thread writes it; they must not wait for a disk or a server.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, listeners: Sequence[Callable[[Record], None]] = ()) -> None:
        self._lines = JsonLines(path)
        self._listeners = listeners

    def write(self, kind: str, **figures: Any) -> None:
        """Append one record with its kind and the time.  Listeners hear it first: the disk may be what hangs."""
        record = make_record(kind, **figures)
        try:
            self.share(record)
        finally:
            self._lines.append(record)

    def share(self, record: Record) -> None:
        """Hand a record that stands in another file to the listeners only."""
        for listener in self._listeners:
            listener(record)

    def close(self) -> None:
        self._lines.close()


def current_records(records: Iterable[Record]) -> list[Record]:
    """The records of a run as if it had never been interrupted, in their order.  Pure.

    A session that begins at step n (`run_start`) does again what others did beyond n: what they recorded of that is
    dropped, and of validations and previews what its checkpoint does not know of.  Records without a step stay.
    """
    current: list[Record] = []
    for record in records:
        if record["kind"] == "run_start":
            step: int = record["step"]
            last: dict[str, int] = {
                "validation": record.get("validated_step", step),
                "preview": record.get("previewed_step", step),
            }
            current = [known for known in current if (known.get("step") or 0) <= last.get(known["kind"], step)]
        current.append(record)
    return current
