"""Reads for the trainer before its readers run, in a separate process that a crashing codec may end.

The process is started by the first read (half a second), answers one request at a time through a pipe, and is restarted
where it died: `GuardedReader` then reads that place with care.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Literal, Self

from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, DataConfig, VolumeConfig
from vesuvius.errors import DataError, VesuviusError, one_line
from vesuvius.plan.foreground import ForegroundMap
from vesuvius.plan.occupancy import foreground_map
from vesuvius.runlog.progress import Progress
from vesuvius.stream.reading.guarded import GuardedReader
from vesuvius.stream.reading.notes import Place, read_notes
from vesuvius.volumes.box import Box
from vesuvius.volumes.volume import Volume, open_volume

log = logging.getLogger(__name__)

Kind = Literal["volume", "condition"]
KINDS: tuple[Kind, Kind] = ("volume", "condition")

Wanted = tuple[Kind, int, Box]
"""What is read: of the volume of this number, or of its condition in voxels of its own."""

_END_S = 2.0
_AHEAD = 8  # boxes that are fetched while one is read: on a slow store a patch's chunks take few of all requests
_SERVE = "from vesuvius.stream.start.start_reads import serve; serve()"


class StartReads:
    """Reads boxes of the volumes of a run.  A context manager; leaving it ends the process.

    Args:
        config: names the volumes and their conditions.
        notes: folder of the process's notes; None = a temporary one.
    """

    def __init__(self, config: DataConfig, notes: Path | None = None) -> None:
        self._config = config
        self._held = ExitStack()
        self._notes_are_temporary = notes is None
        if notes is None:
            notes = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="vesuvius-notes-")))
        self._notes = notes
        # What codecs print when they abort: one line is the cause, the rest would fill the terminal.
        printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        self._printed: IO[bytes] = self._held.enter_context(printed)
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths = 0
        self._expected = deque[Wanted]()
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        self.expect("", [])
        if self._process is not None and failed is None:
            with suppress(EOFError):
                for found in self._ask(("nonfinite", 0, None)):
                    found.say()
        self._end()
        self._held.close()

    def read(self, kind: Kind, number: int, box: Box) -> NDArray[Any]:
        """As `Volume.read`, of the volume of this number, or of its condition in voxels of its own.

        Raises:
            UnreadableChunkError: also for a chunk that has crashed the process.
            DataError: as `Volume.read`, or the process died more than `data.max_reader_deaths` times.
        """
        while self._expected and (kind, number, box) in self._expected:
            if self._expected.popleft() == (kind, number, box):
                break
        while True:
            try:
                voxels: NDArray[Any] = self._ask((kind, number, box), list(islice(self._expected, _AHEAD)))
            except EOFError:
                self._take_death()
            else:
                if self._progress is not None:
                    self._progress.add(voxels.nbytes)
                    if not self._expected:
                        self._progress.end()
                        self._progress = None
                return voxels

    def expect(self, what: str, boxes: Sequence[Wanted]) -> None:
        """Say what `read` will be asked for next, in this order: it is fetched ahead, and its progress logged.

        Args:
            what: is done, for the log.
        """
        if self._progress is not None:
            self._progress.close()
        self._expected = deque(boxes)
        self._progress = Progress(what, len(boxes)) if boxes else None

    def foreground_map(self, volume: Volume, spec: VolumeConfig, config: DataConfig) -> ForegroundMap | None:
        """As `vesuvius.plan.occupancy.foreground_map`; a mask or a coarse level is read in the other process.

        Raises:
            DataError: as that, or a codec has crashed the process.
        """
        if config.min_foreground == 0 or (spec.mask is None and config.foreground.source == "chunks"):
            return foreground_map(volume, spec, config)  # decodes nothing
        try:
            found: ForegroundMap = self._ask(("foreground", config.volumes.index(spec), None))
        except EOFError:
            how = self._take_death()
            raise DataError(
                f"the foreground of {volume.name} must be readable; got {how} while {_source_of(spec, config)} was "
                "read; restore it, or name another mask or level"
            ) from None
        return found

    def _ask(
        self, request: tuple[Kind | Literal["foreground", "nonfinite"], int, Box | None], ahead: Sequence[Wanted] = ()
    ) -> Any:
        """Send a request and return the answer, or raise the error, of the process.  Raises EOFError where it dies.

        Args:
            ahead: what to fetch meanwhile.
        """
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _send(process.stdin, (*request, ahead))
            while True:
                match pickle.load(process.stdout):
                    case "log", name, level, text:
                        logging.getLogger(name).log(level, "%s", text)
                    case "done", answer:
                        return answer
                    case "error", error:
                        raise error
        except (BrokenPipeError, pickle.UnpicklingError) as error:
            raise EOFError from error

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the trainer, which closes the pipe
        )
        assert process.stdin is not None
        _send(process.stdin, (self._config, self._notes, self._notes_are_temporary))
        return process

    def _take_death(self) -> str:
        """Log a death and return its cause; the next request restarts the process.  Raises after too many."""
        assert self._process is not None
        pid = self._process.pid
        code = self._end()
        note = next((note for note in read_notes(self._notes) if note.pid == pid), None)
        crash, place = (note.crash, note.place) if note else (None, None)
        self._printed.seek(0)
        printed = self._printed.read().decode(errors="replace").strip()
        self._printed.truncate(0)
        how = crash or (signal.Signals(-code).name if code < 0 else f"exit code {code}")
        said = f": {one_line(printed.splitlines()[0 if crash else -1])}" if printed else ""
        if code >= 0:
            raise VesuviusError(f"the process that reads at the start must not fail; got {how}{said}; see its message")
        self._deaths += 1
        if self._deaths > self._config.max_reader_deaths:
            raise DataError(
                f"at most data.max_reader_deaths={self._config.max_reader_deaths} processes that read may die; got "
                f"{self._deaths} at the start, the last by {how} while it read {place or 'nothing'}{said}; restore "
                "the volume if they crash, free memory if they are killed, or raise the limit"
            )
        log.warning(
            "the process that reads at the start was ended by %s while it read %s%s; another one %s",
            how,
            place or "nothing",
            said,
            "reads that with care" if crash else "tries again",
        )
        return how

    def _end(self) -> int:
        """Close the pipes, wait for the process or kill it; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended in the middle of a request
            _send(process.stdin, None)
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        try:
            return process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def serve() -> None:
    """The process: answer requests from standard input until one is None."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep what is printed out of the answers
    config, notes, notes_are_temporary = pickle.load(sys.stdin.buffer)
    requests = SimpleQueue[Any]()
    taking = (requests, notes if notes_are_temporary else None)
    threading.Thread(target=_take_requests, args=taking, name="requests", daemon=True).start()
    lock = threading.Lock()
    logging.basicConfig(level=logging.INFO, handlers=[_Forward(answers, lock)])
    reads, opened = GuardedReader(notes, role="start"), dict[tuple[Kind, int], Volume]()

    def volume_of(kind: Kind, number: int) -> Volume:
        if (kind, number) not in opened:
            spec = _spec(config, kind, number)
            nan = config.nan if kind == "volume" else config.condition_nan
            opened[kind, number] = open_volume(spec, config.store, config.missing_chunk, nan, known=True)
        return opened[kind, number]

    staged = set[Wanted]()
    while (request := requests.get()) is not None:
        kind, number, box, ahead = request
        answer: tuple[str, Any]
        if kind == "nonfinite":
            with lock:
                _send(answers, ("done", [found for volume in opened.values() if (found := volume.nonfinite)]))
            continue
        try:
            if kind == "foreground":
                spec = config.volumes[number]
                volume = volume_of("volume", number)
                with reads.noting(Place(_source_of(spec, config), ((0, 0, 0), volume.shape_zyx))):
                    answer = "done", foreground_map(volume, spec, config)
            else:
                wanted = [(kind, number, box), *ahead]
                for other_kind, other, place in staged.difference(wanted):
                    volume_of(other_kind, other).release(place)
                for other_kind, other, place in wanted:
                    volume_of(other_kind, other).stage(place)
                staged = set(ahead)
                answer = "done", reads.read(volume_of(kind, number), box)
        except VesuviusError as error:
            answer = "error", error
        with lock:
            _send(answers, answer)
    for volume in opened.values():
        volume.close()
    reads.close()


def _take_requests(requests: SimpleQueue[Any], temporary: Path | None) -> None:
    """Queue requests from standard input.  Where it ends early, the trainer is gone: exit at once, as a read from a
    store that does not answer may be retried for hours."""
    request: Any = ()
    while request is not None:
        try:
            request = pickle.load(sys.stdin.buffer)
        except (EOFError, pickle.UnpicklingError):
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            os._exit(1)
        requests.put(request)


class _Forward(logging.Handler):
    """Sends log records to the trainer."""

    def __init__(self, out: IO[bytes], lock: threading.Lock) -> None:
        super().__init__()
        self._out, self._out_lock = out, lock

    def emit(self, record: logging.LogRecord) -> None:
        with self._out_lock:
            _send(self._out, ("log", record.name, record.levelno, record.getMessage()))


def _spec(config: DataConfig, kind: Kind, number: int) -> ArrayConfig:
    spec = config.volumes[number]
    if kind == "volume":
        return spec
    assert spec.condition is not None, "conditions are asked for where there are some"
    return spec.condition


def _source_of(spec: VolumeConfig, config: DataConfig) -> str:
    """What the foreground is read from."""
    return f"level {config.foreground.level} of {spec.path}" if spec.mask is None else f"the mask {spec.mask.path}"


def _send(out: IO[bytes], message: Any) -> None:
    pickle.dump(message, out, protocol=pickle.HIGHEST_PROTOCOL)
    out.flush()
