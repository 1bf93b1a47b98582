"""Reading that outlives its codecs: a place that has ended a process is read with care, and not a third time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.stream.notes import Note, Notebook, Place, Strikes
from vesuvius.volumes.box import Box
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.volume import Volume

log = logging.getLogger(__name__)

_PUBLISH_S = 1.0


class GuardedReads:
    """Reads boxes of volumes and leaves a note of each.

    A box in which a process before this one has crashed is read chunk by chunk, with the codecs of zarr-python and a
    note for each chunk: most of what ends a process by way of zarrs is an error there.  A chunk that ends a process
    even so is not read again.

    Args:
        folder: of the notes; None to leave none, and read without care.
        role, actor: as in `Note`.
    """

    def __init__(self, folder: Path | None, role: str = "reader", actor: str = "") -> None:
        self._notes: Notebook | None = None
        self._strikes: Strikes | None = None
        self._closed = threading.Event()
        if folder is None:
            return
        try:
            self._notes, self._strikes = Notebook(folder, role, actor), Strikes(folder)
        except OSError as error:
            log.warning("a reader must be able to leave notes of what it reads; got %s; it goes on without", error)

    def read(self, volume: Volume, box: Box, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """As `Volume.read`.

        Raises:
            UnreadableChunkError: also for a chunk that has ended its process.
        """
        notes, strikes = self._notes, self._strikes
        if notes is None or strikes is None:
            return volume.read(box, out)
        struck = strikes.on(volume.name, box)
        for note in struck:
            place = note.place
            if place is not None and place.chunk is not None and place.chunk_box is not None:
                cause = f"killed its reader ({note.crash})"
                raise UnreadableChunkError(volume.name, box, place.chunk, place.chunk_box, cause)
        if not struck:
            with notes.reading(Place(volume.name, box)):
                return volume.read(box, out)

        def note_chunk(chunk: Triple) -> AbstractContextManager[None]:
            return notes.reading(Place(volume.name, box, chunk, volume.grid.box_of(chunk)))

        return volume.read_with_care(box, note_chunk, out)

    def noting(self, place: Place) -> AbstractContextManager[None]:
        """Around what reads a place by itself: a crash is told of, and nothing is read with care."""
        return self._notes.reading(place) if self._notes is not None else nullcontext()

    def publish_outages(self, volumes: Sequence[Volume]) -> None:
        """From now on, say in the note which of these volumes' stores does not answer.  On a thread of its own: the one
        that reads is waiting then."""
        if self._notes is not None:
            threading.Thread(target=self._publish, args=(self._notes, volumes), name="notes", daemon=True).start()

    def _publish(self, notes: Notebook, volumes: Sequence[Volume]) -> None:
        while not self._closed.wait(_PUBLISH_S):
            outages = [volume.source.outage for volume in volumes]
            failing = (outage for outage in outages if outage is not None)
            notes.outage(min(failing, key=lambda outage: outage.since, default=None))

    def close(self) -> None:
        """Remove the note of this process.  Safe to call again."""
        self._closed.set()
        if self._notes is not None:
            self._notes.close()


def say_crashes(crashed: Sequence[Note]) -> None:
    """Log how the trainers before this one ended, and what is read with care for it."""
    for note in crashed:
        if note.place is None:
            log.error("the process before this one (%d) was ended by %s, not by what it read", note.pid, note.crash)
            continue
        log.error(
            "the process before this one (%d) was ended by %s while it read %s; that region is now read chunk by "
            "chunk, and what ends the process again is replaced by others",
            note.pid,
            note.crash,
            note.place,
        )
