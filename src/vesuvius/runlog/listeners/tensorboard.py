"""Records of metrics.jsonl -> TensorBoard: one event file a session, in `tb/` of the run.

Everything follows from the records and the pictures that they name, so events that were lost can be made again
(`tools/tensorboard_from_metrics.py`).  `scalars.py` has the table of tags.

An event file is a row of protocol buffers in TFRecord frames.  We frame and write them here: the writer that comes with
TensorBoard has a thread, whose errors come up in some later call, and computes checksums in Python, byte by byte.
"""

from __future__ import annotations

import json
import logging
import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import google_crc32c
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING

from vesuvius.runlog.files.delayed import DelayedWrites
from vesuvius.runlog.listeners.scalars import SystemPace, scalars_of
from vesuvius.runlog.records import Record
from vesuvius.runlog.redact import redacted

log = logging.getLogger(__name__)


_EVENTS = "events.out.tfevents."
_CLOSE_S = 10.0


class TensorBoard:
    """Writes the events of one session, each handed to the system at once.

    Where they cannot be written the log says so, once, and how to make them again; nothing is written from then on.

    Args:
        directory: where the event files lie; made with the first record.
        run: the run directory, which pictures are named relative to.

    Attributes:
        failed: whether events could not be written.
    """

    def __init__(self, directory: Path, run: Path) -> None:
        self._directory = directory
        self._run = run
        self._file: int | None = None
        self._pace = SystemPace()
        self.failed = False

    def write(self, record: Record) -> None:
        """Write the events of one record, at its own time and step.

        A `run_start` hides what earlier sessions wrote beyond the step that it goes on from.
        """
        if self.failed or not self._pace.takes(record):
            return
        try:
            if self._file is None:
                self._file = self._begin(record["time"])
            for event in _events(record, self._run):
                _write_all(self._file, _framed(event.SerializeToString()))
        except OSError as error:
            self.failed = True
            self.close()
            log.error(
                "TensorBoard's events must be writable; got %s in %s; free some space: no more are written in this "
                "session; python tools/tensorboard_from_metrics.py %s rebuilds them from metrics.jsonl",
                error,
                self._directory,
                self._run,
            )

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):  # a network file system may say only now that its disk is full
                os.close(file)

    def _begin(self, time: float) -> int:
        """Open the file of this session.  Its name sorts after those of earlier ones: readers go by that."""
        self._directory.mkdir(parents=True, exist_ok=True)
        others = (re.fullmatch(rf"{_EVENTS}(\d+)", path.name) for path in self._directory.iterdir())
        number = 1 + max((int(found[1]) for found in others if found), default=-1)
        path = self._directory / f"{_EVENTS}{number:06d}"
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
        _write_all(file, _framed(Event(wall_time=time, file_version="brain.Event:2").SerializeToString()))
        return file


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
        if writes.close(close_s):
            board.close()
        else:
            log.warning("TensorBoard's disk did not answer within %.0f s; its last events are lost", close_s)


def _events(record: Record, run: Path) -> list[Event]:
    """What a record becomes; nothing for most kinds.  Reads the picture that a preview names."""
    kind, time, step = record["kind"], record["time"], record.get("step") or 0
    if kind == "run_start":
        return [Event(wall_time=time, step=step + 1, session_log=SessionLog(status=SessionLog.START))]
    values = [
        Summary.Value(tag=tag, simple_value=value) for tag, value in scalars_of(record).items() if value is not None
    ]
    if kind == "event":
        values.append(_text(f"events/{record['event']}", record))
    if kind == "preview" and (picture := _picture("preview/picture", run / record["picture"])) is not None:
        values.append(picture)
    return [Event(wall_time=time, step=step, summary=Summary(value=values))] if values else []


def _text(tag: str, record: Record) -> Summary.Value:
    """The fields of an event as JSON, indented, which Markdown shows as they are."""
    fields = {key: value for key, value in record.items() if key not in {"kind", "time", "event", "step"}}
    return Summary.Value(
        tag=tag,
        metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
        tensor=TensorProto(
            dtype=DT_STRING,
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
            string_val=[f"    {json.dumps(redacted(fields))}".encode()],
        ),
    )


def _picture(tag: str, path: Path) -> Summary.Value | None:
    try:
        encoded = path.read_bytes()
        with Image.open(path) as image:
            width, height = image.size
    except OSError as error:
        log.warning("the picture of a preview must be readable; got %s; TensorBoard does without it", error)
        return None
    return Summary.Value(
        tag=tag, image=Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encoded)
    )


def _framed(data: bytes) -> bytes:
    """A TFRecord: length, its checksum, data, their checksum.  See the comment in TensorFlow's record_writer.h."""
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _masked_crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


def _write_all(file: int, data: bytes) -> None:
    """A full disk takes a part first and refuses the rest."""
    while data:
        data = data[os.write(file, data) :]
