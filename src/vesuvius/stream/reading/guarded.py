"""Reading that survives its codecs: a region that crashed a process is read again with care, and not a third time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.stream.reading.notes import Note, NoteWriter, Place, crashes_touching
from vesuvius.volumes.box import Box
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.volume import Volume

log = logging.getLogger(__name__)

_PUBLISH_S = 1.0


class GuardedReader:
    """Reads boxes of volumes and keeps a note of the current one.

    A box in which an earlier process crashed is read with a note for each chunk.  A chunk that crashes the process even
    so is not read again.

    Args:
        folder: of the notes; None to leave none, and read without care.
        role, actor: as in `Note`.
    """

    def __init__(self, folder: Path | None, role: str = "reader", actor: str = "") -> None:
        self._folder = folder
        self._notes: NoteWriter | None = None
        self._closed = threading.Event()
        if folder is not None:
            try:
                self._notes = NoteWriter(folder, role, actor)
            except OSError as error:
                log.warning("a reader must be able to note what it reads; got %s; it continues without", error)

    def read(self, volume: Volume, box: Box, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """As `Volume.read`.

        Raises:
            UnreadableChunkError: also for a chunk that has crashed a process.
        """
        notes, folder = self._notes, self._folder
        if notes is None or folder is None:
            return volume.read(box, out)
        crashes = crashes_touching(folder, volume.name, box)
        for crash in crashes:
            place = crash.place
            if place is not None and place.chunk is not None and place.chunk_box is not None:
                cause = f"killed its reader ({crash.crash})"
                raise UnreadableChunkError(volume.name, box, place.chunk, place.chunk_box, cause)
        if not crashes:
            with notes.reading(Place(volume.name, box)):
                return volume.read(box, out)

        def note_chunk(chunk: Triple) -> AbstractContextManager[None]:
            return notes.reading(Place(volume.name, box, chunk, volume.grid.box_of(chunk)))

        return volume.read(box, out, note_chunk)

    def noting(self, place: Place) -> AbstractContextManager[None]:
        """Note what the caller reads inside; a crash is reported, but nothing is read with care for it."""
        return self._notes.reading(place) if self._notes is not None else nullcontext()

    def publish_outages(self, volumes: Sequence[Volume]) -> None:
        """From now on, note which of these volumes' stores does not answer.  On its own thread: the reading one waits
        then."""
        if self._notes is not None:
            threading.Thread(target=self._publish, args=(self._notes, volumes), name="notes", daemon=True).start()

    def _publish(self, notes: NoteWriter, volumes: Sequence[Volume]) -> None:
        while not self._closed.wait(_PUBLISH_S):
            outages = [outage for volume in volumes if (outage := volume.source.outage) is not None]
            notes.outage(min(outages, key=lambda outage: outage.since, default=None))

    def close(self) -> None:
        """Remove the note of this process.  Safe to call again."""
        self._closed.set()
        if self._notes is not None:
            self._notes.close()


def log_crashes(crashed: Sequence[Note]) -> None:
    """Log how earlier trainers crashed, and what is read with care because of it."""
    for note in crashed:
        if note.place is None:
            log.error("the previous process (%d) was ended by %s, not by what it read", note.pid, note.crash)
            continue
        log.error(
            "the previous process (%d) was ended by %s while it read %s; that region is now read "
            "chunk by chunk, and what ends the process again is replaced",
            note.pid,
            note.crash,
            note.place,
        )
