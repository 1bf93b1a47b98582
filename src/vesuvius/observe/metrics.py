"""The metrics of a run: `metrics.jsonl`, which is the truth, and TensorBoard's events, made from the same records."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vesuvius.observe.records import JsonLines
from vesuvius.observe.tensorboard import TensorBoard


class Metrics:
    """Writes records into a file of JSON Lines and, as they stand there, into TensorBoard, if there is one.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, tensorboard: TensorBoard | None) -> None:
        self._lines = JsonLines(path)
        self._tensorboard = tensorboard

    def write(self, kind: str, **figures: Any) -> None:
        """Append one record with its kind and the time."""
        record = self._lines.write(kind, **figures)
        if self._tensorboard is not None:
            self._tensorboard.write(record)

    def close(self) -> None:
        self._lines.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def current_records(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of a run as if it had never been interrupted, in their order.  Pure.

    A session that begins at step n (`run_start`) does again what others did beyond n: what they recorded of that is
    dropped, and of validations and previews what its checkpoint does not know of.  Records without a step stay.
    """
    current: list[dict[str, Any]] = []
    for record in records:
        if record["kind"] == "run_start":
            step = record["step"]
            last = {"validation": record.get("validated_step", step), "preview": record.get("previewed_step", step)}
            current = [known for known in current if (known.get("step") or 0) <= last.get(known["kind"], step)]
        current.append(record)
    return current
