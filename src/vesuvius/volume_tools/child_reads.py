"""Chunks read in child processes, so that one whose decoding ends the process is found like any other broken one.

    parent                                            child
    a task: some chunks              ---------------> reads them one after the other; its note is the place of the
                                                      one in hand
    broken chunks, lines of the log  <---------------
    the task is done                 <---------------

A child that dies is replaced; its note tells the chunk, and its successor continues after it.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from logging.handlers import QueueHandler
from multiprocessing import connection, sharedctypes
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

from vesuvius.config import ArrayConfig, StoreConfig, Triple
from vesuvius.errors import DataError
from vesuvius.volumes.box import Box, intersection
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.missing import StoredChunks
from vesuvius.volumes.volume import Nan, Volume, open_volume

log = logging.getLogger(__name__)

_STAGED_AHEAD = 8


@dataclass(frozen=True)
class BrokenChunk:
    """A chunk that cannot be read."""

    chunk: Triple
    key: str  # of the object that holds it
    cause: str
    box: Box  # the voxels that are lost with it, (start_zyx, stop_zyx)


@dataclass(frozen=True)
class Reading:
    """What is read, by every child.  Picklable."""

    spec: ArrayConfig
    store: StoreConfig
    stored: StoredChunks | None = None
    nan: Nan = "air"


@dataclass
class FinishedTask:
    """A task of which each chunk was read once, or is broken."""

    number: int
    chunks: int
    broken: list[BrokenChunk] = field(default_factory=list)


def read_in_children(
    reading: Reading, volume: Volume, tasks: Iterable[tuple[int, list[Triple]]], processes: int
) -> Iterator[FinishedTask]:
    """Read all chunks of all tasks.  Closing the iterator ends the children.

    Args:
        volume: the same one, opened here, to name keys and boxes; no chunk is read with it.
        tasks: a number and the chunks, of each; taken one by one, whenever a child is free.
        processes: at work at once.

    Raises:
        DataError: the volume as a whole cannot be read any more, or children die without a chunk in hand.
    """
    waiting = iter(tasks)
    children: list[_Child] = []
    try:
        for number, chunks in itertools.islice(waiting, processes):
            children.append(_Child(reading, volume))
            children[-1].give(number, chunks)
        while children:
            by_pipe = {child.pipe: child for child in children}
            for pipe in connection.wait(list(by_pipe)):
                child = by_pipe[pipe]  # type: ignore[index]
                finished = child.take()
                if finished is None:
                    continue
                yield finished
                task = next(waiting, None)
                if task is not None:
                    child.give(*task)
                else:
                    child.end()
                    children.remove(child)
    finally:
        for child in children:
            child.end()


class _Child:
    """A process, replaced when it dies, and the task that it has."""

    def __init__(self, reading: Reading, volume: Volume) -> None:
        self._reading, self._volume = reading, volume
        self._killed: set[Triple] = set()
        self._chunks: list[Triple] = []
        self._finished = FinishedTask(0, 0)
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self._note = context.Value("q", -1, lock=False)
        self._process: BaseProcess = context.Process(
            target=_serve, args=(other, self._reading, self._note), daemon=True
        )
        self._process.start()
        other.close()  # else its death would not be the end of the pipe

    def give(self, number: int, chunks: list[Triple]) -> None:
        """Hand a task over."""
        self._finished = FinishedTask(number, len(chunks))
        self._send(chunks)

    def _send(self, chunks: list[Triple]) -> None:
        self._chunks = chunks
        self._note.value = -1
        with suppress(OSError):  # it died: `take` will notice
            self.pipe.send(chunks)

    def take(self) -> FinishedTask | None:
        """One message of the process, or its death; the task where that was the last of it."""
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            return self._replace()
        match message:
            case BrokenChunk():
                self._finished.broken.append(message)
            case logging.LogRecord():
                if log.isEnabledFor(message.levelno):
                    log.handle(message)
            case DataError():
                raise message
            case None:
                return self._finished
        return None

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.terminate()
        self._process.join(5)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self.pipe.close()

    def _replace(self) -> FinishedTask | None:
        """Start another process after the chunk that this one died of; the task where that was its last chunk."""
        self._process.join()
        code, place = self._process.exitcode, self._note.value
        self.pipe.close()
        how = f"signal {-code} ({signal.strsignal(-code)})" if code is not None and code < 0 else f"exit code {code}"
        if place < 0:
            raise DataError(
                f"a process that reads chunks must survive; got one that ended with {how} before its "
                f"first chunk of {self._volume.name}; check the machine's memory (`vesuvius memcheck`)"
            )
        chunk = self._chunks[place]
        again = code == -signal.SIGKILL and chunk not in self._killed  # a kill may be for want of memory, once
        if again:
            self._killed.add(chunk)
        else:
            box, key = self._volume.grid.box_of(chunk), self._volume.grid.key_of(chunk)
            self._finished.broken.append(BrokenChunk(chunk, key, f"decoding it ended the process with {how}", box))
        rest = self._chunks[place if again else place + 1 :]
        self._start()
        if not rest:
            return self._finished
        self._send(rest)
        return None


def _serve(pipe: connection.Connection, reading: Reading, note: sharedctypes.Synchronized[int]) -> None:
    """What a child does: read the chunks of each task that comes, until the pipe ends."""
    for number in (signal.SIGINT, signal.SIGHUP):  # they go to all of a terminal's processes; the parent ends us
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # numcodecs makes a lock for blosc.  A spawned process gives it a name, and where it is terminated Python's resource
    # tracker complains of a leak; of the fork kind it has none.  No process is started from here.
    multiprocessing.set_start_method("fork", force=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # backtraces of what ends the process; the log goes through the pipe
    sending = threading.Lock()

    def send(message: Any) -> None:
        with sending:
            pipe.send(message)

    package = logging.getLogger("vesuvius")
    package.setLevel(logging.INFO)
    package.addHandler(QueueHandler(SimpleNamespace(put_nowait=send)))
    with suppress(EOFError, BrokenPipeError):
        try:
            volume = open_volume(reading.spec, reading.store, nan=reading.nan, known=True)
            volume.missing.stored = reading.stored
            while True:
                _read_task(volume, pipe.recv(), note, send)
                send(None)
        except DataError as error:
            send(error)


def _read_task(volume: Volume, chunks: list[Triple], note: sharedctypes.Synchronized[int], send: Any) -> None:
    lost: Box | None = None
    boxes = [volume.grid.box_of(chunk) for chunk in chunks]
    for place, box in enumerate(boxes):
        if lost is not None and intersection(box, lost) == box:
            continue  # its shard's index is damaged, which was told
        note.value = place
        for ahead in boxes[place : place + _STAGED_AHEAD]:
            volume.stage(ahead)
        try:
            volume.read(box)
        except UnreadableChunkError as error:
            lost = error.box
            send(BrokenChunk(error.chunk, volume.grid.key_of(error.chunk), error.cause, error.box))
    volume.unstage()


def _end_with_parent() -> None:
    """A parent that was killed cannot end its children."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
