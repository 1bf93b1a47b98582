"""Records of metrics.jsonl -> TensorBoard: one event file a session, in `tb/` of the run.

Everything follows from the records and the pictures that they name.  `scalars.py` has the table of tags.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vesuvius.runlog.files.delayed import DelayedWrites
from vesuvius.runlog.listeners.scalars import SystemPace, scalars_of
from vesuvius.runlog.records import Record
from vesuvius.runlog.redact import redacted

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)

_CLOSE_S = 10.0
_FLUSH_S = 10


class TensorBoard:
    """Writes the events of one session.  Its methods may wait for a disk.

    Where they cannot be written the log says so, once, and how to make them again; nothing is written from then on.

    Args:
        directory: where the event files lie; made with the first record.
        run: the run directory, which pictures are named relative to.

    Attributes:
        failed: whether events could not be written.
    """

    def __init__(self, directory: Path, run: Path) -> None:
        self._directory, self._run = directory, run
        self._writer: SummaryWriter | None = None
        self._pace = SystemPace()
        self.failed = False

    def write(self, record: Record) -> None:
        """Write the events of one record, at its own time and step.

        The first `run_start` hides what earlier sessions wrote beyond the step that it goes on from.
        """
        if self.failed or not self._pace.takes(record):
            return
        try:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                purge_step = record["step"] + 1 if record["kind"] == "run_start" else None
                self._writer = SummaryWriter(self._directory, purge_step=purge_step, flush_secs=_FLUSH_S)
            self._add(self._writer, record)
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            try:
                writer.close()
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.failed, self._writer = True, None
        log.error(
            "TensorBoard's events must be writable; got %s in %s; free some space: no more are written in this "
            "session; metrics.jsonl has all figures",
            error,
            self._directory,
        )

    def _add(self, writer: SummaryWriter, record: Record) -> None:
        """Nothing for most kinds.  Reads the picture that a preview names."""
        kind, at = record["kind"], {"global_step": record.get("step") or 0, "walltime": record["time"]}
        for tag, value in scalars_of(record).items():
            if value is not None:
                writer.add_scalar(tag, value, **at)
        if kind == "event":
            fields = {key: value for key, value in record.items() if key not in {"kind", "time", "event", "step"}}
            writer.add_text(f"events/{record['event']}", f"    {json.dumps(redacted(fields))}", **at)
        if kind == "preview":
            import numpy as np
            from PIL import Image

            try:
                with Image.open(self._run / record["picture"]) as image:
                    pixels = np.asarray(image.convert("RGB"))
            except OSError as error:
                log.warning("the picture of a preview must be readable; got %s; TensorBoard does without it", error)
            else:
                writer.add_image("preview/picture", pixels, dataformats="HWC", **at)


@contextmanager
def tensorboard_thread(board: TensorBoard, close_s: float = _CLOSE_S) -> Iterator[Callable[[Record], None]]:
    """Takes records for a thread that writes their events; at the end it has so many seconds for what waits."""
    failed = False

    def say_once() -> None:
        nonlocal failed
        if not failed:
            log.warning("an event for TensorBoard failed; further failures are not logged", exc_info=True)
        failed = True

    writes = DelayedWrites("tensorboard", say_once)

    def take(record: Record) -> None:
        writes.later(lambda: board.write(record))

    try:
        yield take
    finally:
        writes.later(board.close)
        if not writes.close(close_s):
            log.warning("TensorBoard's disk did not answer within %.0f s; its last events are lost", close_s)
