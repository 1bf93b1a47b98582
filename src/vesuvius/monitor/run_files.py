"""What the files of a run directory say of its present session, read from outside, again and again.

Files of a long run are long: only their ends are read, and after that what was appended.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vesuvius.monitor.quantile import quantile
from vesuvius.monitor.recent import MemorySample, read_recent
from vesuvius.monitor.session import SessionRecord, read_session
from vesuvius.runlog.records import parsed
from vesuvius.runlog.units import size_text

_SYSTEM_BYTES = 2**20  # some hours of records
METRICS_BYTES = 2**18  # some hundred records
_KEPT_RECORDS = 2000
_RECENT_STEPS = 200


@dataclass(frozen=True)
class RunState:
    """What the files say of the last session.  Times are seconds since 1970."""

    # None where none was written (a run of an older version, or one that has not begun)
    session: SessionRecord | None = None
    moments: tuple[MemorySample, ...] = ()  # the session's samples of the last two minutes, oldest first
    # the most bytes there were, by name of a part (`used`, `shared`, `vram`, and `root` for the trainer) and by pid of
    # a reader, and since when they were recorded
    peaks: Mapping[str | int, float] = field(default_factory=dict)
    peaks_since: float | None = None
    step: int | None = None  # the last optimizer step
    step_time: float | None = None  # when it was recorded
    sign_time: float | None = None  # when anything was last recorded: a validation takes longer than a step
    step_s_p95: float | None = None  # of the last steps, without their pauses
    verdict: str | None = None  # the last one on what holds the run up
    end_cause: str = ""  # why the session ended, as it has recorded itself
    ranks: tuple[str, ...] = ()  # lines on the ranks in the last step that all told of; none where there is one rank
    hung: tuple[str, float] | None = None  # what the run's own watchdog says it hangs in, and since when


class Tail:
    """A file of lines, as a rule of JSON, from its end on: first the last ones, after that each time what was appended.

    Args:
        path: the file; it need not be there yet, and may be moved away and started over.
        first_bytes: how much of the end is read first.
    """

    def __init__(self, path: Path, first_bytes: int) -> None:
        self._path = path
        self._first_bytes = first_bytes
        self._file: tuple[int, int] | None = None
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """The records since the last call; lines that are torn or not yet whole are passed over."""
        return [record for line in self.lines().splitlines() if (record := _record(line)) is not None]

    def lines(self) -> bytes:
        """The whole lines since the last call."""
        try:
            with self._path.open("rb") as file:
                return self._read(file.fileno())
        except OSError:
            return b""

    def _read(self, descriptor: int) -> bytes:
        now = os.fstat(descriptor)
        if self._file is None:
            self._offset = max(now.st_size - self._first_bytes, 0)
        elif self._file != (now.st_dev, now.st_ino) or now.st_size < self._offset:
            self._offset = 0
        self._file = now.st_dev, now.st_ino
        text = os.pread(descriptor, now.st_size - self._offset, self._offset)
        whole = text.rfind(b"\n") + 1
        self._offset += whole
        return text[:whole]


class RunFiles:
    """Reads a run directory.  Writes nothing, and takes no lock."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._metrics = Tail(directory / "metrics.jsonl", METRICS_BYTES)
        self._system = Tail(directory / "system.jsonl", _SYSTEM_BYTES)
        self._metric_records: deque[dict[str, Any]] = deque(maxlen=_KEPT_RECORDS)
        self._system_records: deque[dict[str, Any]] = deque(maxlen=_KEPT_RECORDS)

    def read(self) -> RunState:
        """What they say now."""
        session = read_session(self.directory / "session.json")
        begin = session.begin_time if session else -math.inf
        self._metric_records.extend(self._metrics.new())
        self._system_records.extend(self._system.new())
        metrics = [record for record in self._metric_records if record["time"] >= begin]
        system = [record for record in self._system_records if record["time"] >= begin]
        moments = tuple(moment for moment in read_recent(self.directory / "recent.jsonl") if moment.time >= begin)
        return notes_of(session, moments, metrics, system)


def notes_of(
    session: SessionRecord | None,
    moments: Sequence[MemorySample],
    metrics: Sequence[Mapping[str, Any]],
    system: Sequence[Mapping[str, Any]],
) -> RunState:
    """From the records of a session, each with its time and kind, in order.  Pure."""
    steps = [record for record in metrics if record["kind"] == "step" and _is_number(record.get("step"))]
    work_s = [
        record["step_s"] - (record.get("pause_s") or 0.0)
        for record in steps[-_RECENT_STEPS:]
        if _is_number(record.get("step_s"))
    ]
    times = [record["time"] for record in system] + [moment.time for moment in moments]
    end = metrics[-1] if metrics and metrics[-1]["kind"] == "run_end" else {}
    return RunState(
        session=session,
        moments=tuple(moments),
        peaks=_peaks(moments, system),
        peaks_since=min(times, default=None),
        step=int(steps[-1]["step"]) if steps else None,
        step_time=steps[-1]["time"] if steps else None,
        sign_time=metrics[-1]["time"] if metrics else None,
        step_s_p95=quantile(work_s, 0.95) if work_s else None,
        verdict=next((str(r["text"]) for r in reversed(metrics) if r["kind"] == "verdict" and r.get("text")), None),
        end_cause=str(end.get("cause") or ""),
        ranks=_ranks(metrics),
        hung=_hung(metrics),
    )


def _ranks(metrics: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """A line for each rank."""
    last = next((record for record in reversed(metrics) if record["kind"] == "ranks"), None)
    if last is None or not isinstance(last.get("times"), list):
        return ()
    lines = []
    for rank, times in enumerate(last["times"]):
        held = times.get("trainer_bytes")
        lines.append(
            f"rank {rank} on {times.get('node', 'a node not known')}: trainer "
            f"{'not known' if held is None else size_text(held)} private, step {times['step_s']:.3f} s, of which "
            f"{times['comm_s']:.3f} s waiting for others{', the slowest' if rank == last.get('slowest') else ''}"
        )
    return tuple(lines)


def _hung(metrics: Sequence[Mapping[str, Any]]) -> tuple[str, float] | None:
    """Of the last event of the watchdog, unless something has come since."""
    for record in reversed(metrics):
        if record["kind"] == "step" or record.get("event") == "recovered":
            return None
        if record.get("event") == "hung" and record.get("text"):
            seconds = record.get("seconds")
            return str(record["text"]), record["time"] - (seconds if _is_number(seconds) else 0.0)
    return None


def _peaks(moments: Sequence[MemorySample], system: Sequence[Mapping[str, Any]]) -> dict[str | int, float]:
    """What is no figure, nor a list [min, mean, max] of them, is passed over."""
    seen: list[tuple[str | int, Any]] = []
    for record in system:
        vram, readers = record.get("vram"), record.get("readers")
        seen += [("used", record.get("used_bytes")), ("shared", record.get("shared_bytes"))]
        seen += [("root", record.get("trainer_bytes"))]
        seen += [("vram", vram.get("reserved_bytes"))] if isinstance(vram, dict) else []
        readers = readers if isinstance(readers, dict) else {}
        seen += [(int(pid), size) for pid, size in readers.items() if pid.isdecimal()]
    for moment in moments:
        seen += [("used", moment.used_bytes), ("shared", moment.shared_bytes), ("root", moment.trainer_bytes)]
        seen += [("vram", moment.vram_used_bytes), *moment.reader_bytes.items()]
    peaks: dict[str | int, float] = {}
    for name, size in seen:
        most = size[-1] if isinstance(size, list) and size else size
        if _is_number(most):
            peaks[name] = max(peaks.get(name, 0.0), most)
    return peaks


def _record(line: bytes) -> dict[str, Any] | None:
    record = parsed(line)
    return record if record and isinstance(record.get("kind"), str) and _is_number(record.get("time")) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
