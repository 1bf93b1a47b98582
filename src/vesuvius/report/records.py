"""Reads a run directory for a report, in a few hundred bytes a step.  Does I/O.

Steps and the times of ranks become columns, neighboring records of the monitor are merged, others stay unchanged.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config.describe import SAME_SPEED
from vesuvius.config.yaml_source import read_yaml
from vesuvius.errors import ConfigError
from vesuvius.monitor.post_mortem import Death, deaths_of, headline, is_of_session
from vesuvius.monitor.probes.cgroup import read_text
from vesuvius.monitor.samples import spreads
from vesuvius.monitor.session import SessionRecord, is_alive, read_session
from vesuvius.runlog.records import Record, is_repeated, iter_records, parse_record

Column = NDArray[np.float64]

GONE = "deleted or moved"
"""State of a run whose directory no longer exists."""

STEP_FIELDS = (
    "step", "steps", "time", "step_s", "data_s", "h2d_s", "forward_s", "backward_s", "optimizer_s", "comm_s",
    "other_s", "pause_s", "samples", "loss", "grad_norm", "lr", "mfu", "total_s", "vram_used_bytes", "vram_limit_bytes",
    "ram_used_bytes", "ram_limit_bytes", "worker_max_bytes", "eta_s",
)  # fmt: skip
_MOST_SYSTEM = 1000  # records of the monitor that are kept, or twice as many

Band = tuple[float, float, float, float]
"""Smallest value, sum, largest value and number of some values."""


@dataclass(frozen=True)
class SystemRecord:
    """One or more neighboring records of the monitor."""

    step: float  # of the last; of records that precede the first step of a session, the last known step
    limit_bytes: float
    bands: Mapping[str, Band]  # of `used_bytes`, `trainer_bytes`, `shared_bytes`, `cores`, `worker PID`, `GPU INDEX`

    def merged(self, later: SystemRecord) -> SystemRecord:
        names = dict.fromkeys((*self.bands, *later.bands))
        bands = {name: merge([of.bands[name] for of in (self, later) if name in of.bands]) for name in names}
        return SystemRecord(later.step, later.limit_bytes, bands)


@dataclass
class RankTimes:
    """Figures of a rank from the steps that all ranks reported."""

    node: str = ""
    largest_bytes: float = 0.0  # 0 = not known
    slowest_in: int = 0  # steps
    work_s: array[float] = field(default_factory=lambda: array("f"))  # of each step: without waits and pauses
    comm_s: array[float] = field(default_factory=lambda: array("f"))


@dataclass(frozen=True)
class RunRecords:
    """The records of a run.  Steps, validations and previews that a resume repeated are left out, but nothing else."""

    path: Path
    # Of the steps, by the names of `STEP_FIELDS`, and `work_s` and `host_s`: step and other without pauses.  NaN is not
    # known.
    columns: Mapping[str, Column]
    peaks: Mapping[str, float]  # the largest value of each field among the steps left out
    first: NDArray[np.bool_]  # whether a step is the first of its session, and includes starting the readers
    timed: NDArray[np.bool_]  # whether a step was made with the latest settings that its times may depend on
    changed: tuple[str, ...]  # the keys of these settings that changed before the first timed step
    system: Sequence[SystemRecord]  # in order of time
    ranks: Sequence[RankTimes]  # empty for a single rank
    others: Sequence[Record]  # records of metrics.jsonl of other kinds, in order
    sessions: Sequence[Record]  # each `run_start` and `run_end`
    deaths: Sequence[Death]
    config: Mapping[str, Any]  # the resolved config as plain data; empty if it cannot be read
    config_text: str
    environment: Mapping[str, Any]
    state: str  # `running`, `died: CAUSE`, `ended with exit code 0: CAUSE`, `GONE`, ...
    exit_code: int | None  # of the last session; None unless it has ended

    def of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.others if record["kind"] == kind]

    @property
    def validations(self) -> list[Record]:
        """Validations whose headline is the mean over the same levels as the last one's, by version."""
        found = self.of_kind("validation")
        return [record for record in found if ("bin_sigmas" in record) == ("bin_sigmas" in found[-1])]

    def peak(self, name: str, *more: float) -> float:
        """The largest known value of a field of all steps, also of those left out, and of `more`; NaN if none is."""
        return float(np.fmax.reduce([*self.columns[name], self.peaks.get(name, math.nan), *more]))


def read_run(path: Path) -> RunRecords:
    """Read a run directory; torn lines and missing files are skipped."""
    steps = {name: array("d") for name in STEP_FIELDS}
    peaks, ranks = dict[str, float](), list[RankTimes]()
    others, sessions, starts = list[Record](), list[Record](), list[Record]()
    system, known_step = _Merged(), 0.0
    for record in heapq.merge(*(_records(path / name) for name in ("metrics.jsonl", "system.jsonl")), key=_time):
        match record["kind"]:
            case "step":
                for name, column in steps.items():
                    column.append(figure(record.get(name)))
            case "system":
                known_step = figure(record["step"] or known_step)
                system.add(SystemRecord(known_step, figure(record.get("limit_bytes")), _bands(record)))
            case "ranks":
                _add_times(ranks, record)
            case "run_start":
                while steps["step"] and steps["step"][-1] > record["step"]:
                    for name, column in steps.items():
                        peaks[name] = float(np.fmax(peaks.get(name, math.nan), column.pop()))
                others = [each for each in others if not is_repeated(each, record)]
                starts = [*(each for each in starts if each["step"] <= record["step"]), record]
                sessions.append(record)
                known_step = figure(record["step"])
            case "run_end":
                sessions.append(record)
            case _:
                others.append(record)
    columns = {name: np.array(column) for name, column in steps.items()}
    columns |= {f"{to}_s": columns[f"{of}_s"] - columns["pause_s"] for to, of in (("work", "step"), ("host", "other"))}
    first, since, changed = np.zeros(len(columns["step"]), dtype=bool), 0, tuple[str, ...]()
    for start in starts:
        index = int(np.searchsorted(columns["step"], start["step"], side="right"))
        first[index : index + 1] = True
        if (keys := _changed_keys(start)) and index < len(first):
            since, changed = index, keys
    session, deaths = read_session(path / "session.json"), deaths_of(path)
    config = file_inside(path, "config.resolved.yaml")
    config_text = (config and read_text(config)) or ""
    env = parse_record(read_text(path / "env.json") or "") or {}
    return RunRecords(
        path, columns, peaks, first, np.arange(len(first)) >= since, changed, system.records, ranks, others, sessions,
        deaths, _config(config_text), config_text, env,
        _state(session, sessions, deaths) if path.is_dir() else GONE, session.exit_code if session else None,
    )  # fmt: skip


class _Merged:
    """Records of the monitor, of which equally many neighbors are merged, except for the last record."""

    def __init__(self) -> None:
        self.records, self._size, self._count = list[SystemRecord](), 1, 0

    def add(self, record: SystemRecord) -> None:
        if self._count and (self._count - 1) % self._size:
            self.records[-2:] = [self.records[-2].merged(self.records[-1])]
        self.records.append(record)
        self._count += 1
        if len(self.records) > 2 * _MOST_SYSTEM:
            *groups, last = self.records
            self.records = [a.merged(b) for a, b in zip(groups[::2], groups[1::2], strict=True)] + [last]
            self._size *= 2


def merge(bands: Sequence[Band]) -> Band:
    lows, sums, highs, counts = zip(*bands, strict=True)
    return min(lows), math.fsum(sums), max(highs), sum(counts)


def _bands(record: Record) -> dict[str, Band]:
    """The known figures of a record of the monitor; those that vary are [min, mean, max]."""
    known = {name: [*map(figure, values[:3])] for name, values in spreads(record).items()}
    return {name: (*v, 1.0) for name, v in known.items() if len(v) == 3 and math.isfinite(sum(v))}  # type: ignore[misc]


def _add_times(ranks: list[RankTimes], record: Record) -> None:
    for rank, times in enumerate(record.get("times") or []):
        ranks.extend([RankTimes()] if rank == len(ranks) else [])
        of, (step_s, comm_s, pause_s) = ranks[rank], (figure(times.get(f"{n}_s")) for n in ("step", "comm", "pause"))
        of.node = str(times.get("node", of.node))
        of.largest_bytes = max(of.largest_bytes, figure(times.get("trainer_bytes")))  # ignores NaN
        of.slowest_in += record.get("slowest") == rank
        of.work_s.append(step_s - comm_s - pause_s)
        of.comm_s.append(comm_s)


def file_inside(folder: Path, name: str) -> Path | None:
    """A file in a folder; None if it is another place (an absolute name, `..`, a link out of it) or no regular file."""
    try:
        path = (folder / name).resolve()
        return path if path.is_relative_to(folder.resolve()) and path.is_file() else None
    except (OSError, ValueError):
        return None


def figure(value: object) -> float:
    """A number of a record; NaN for null and anything else."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def _changed_keys(start: Record) -> tuple[str, ...]:
    """Keys that a session changed (recorded as `key: was A, is B`) and that a step's time may depend on."""
    lines = [line for name in ("drift", "accepted") for line in start.get(name) or [] if isinstance(line, str)]
    keys = [line.partition(":")[0] for line in lines if ": was " in line]
    return tuple(key for key in keys if not key.startswith(SAME_SPEED))


def _records(path: Path) -> Iterator[Record]:
    """The records of a file, with only the needed fields of each step: a long run's file exceeds memory."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for record in iter_records(path):
            if isinstance(record.get("kind"), str) and (record["kind"] != "step" or record.get("step") is not None):
                is_step = record["kind"] == "step"
                yield {"kind": "step"} | {name: record.get(name) for name in STEP_FIELDS} if is_step else record


def _time(record: Record) -> float:
    seconds = figure(record.get("time"))
    return 0.0 if math.isnan(seconds) else seconds


def _state(session: SessionRecord | None, sessions: Sequence[Record], deaths: Sequence[Death]) -> str:
    if session is None:
        return "not known"
    if session.end_time is not None:
        cause = sessions[-1].get("cause") if sessions else None
        return f"ended with exit code {session.exit_code}" + (f": {cause}" if cause else "")
    own = [headline(death) for death in deaths if death.victim == "run" and is_of_session(death, session)]
    died = f"died: {own[-1] if own else 'it recorded no end'}"
    return {True: "running", False: died, None: f"running on {session.host}, or died there"}[is_alive(session)]


def _config(text: str) -> Mapping[str, Any]:
    """The resolved config, with current names of its keys; empty if it cannot be parsed."""
    try:
        config, _ = read_yaml(text, "config.resolved.yaml")
    except ConfigError:
        return {}
    return config if isinstance(config, dict) else {}
