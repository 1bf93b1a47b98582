"""Reads a run directory for a report: steps as columns, other records unchanged.  Does I/O."""

from __future__ import annotations

import gzip
import heapq
import math
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config.describe import SAME_SPEED
from vesuvius.config.yaml_source import read_yaml
from vesuvius.errors import ConfigError
from vesuvius.monitor.post_mortem import headline as death_headline
from vesuvius.monitor.post_mortem import read_deaths
from vesuvius.monitor.probes.files import read_text
from vesuvius.monitor.session import SessionRecord, is_alive, read_session
from vesuvius.runlog.records import Record, is_repeated, iter_records, parse_record, records_in

Column = NDArray[np.float64]

GONE = "deleted or moved"
"""State of a run whose directory no longer exists."""

STEP_FIELDS = (
    "step", "steps", "time", "step_s", "data_s", "h2d_s", "forward_s", "backward_s", "optimizer_s", "comm_s",
    "other_s", "pause_s", "samples", "loss", "grad_norm", "lr", "mfu", "total_s", "vram_used_bytes", "vram_limit_bytes",
    "ram_used_bytes", "ram_limit_bytes", "worker_max_bytes", "eta_s",
)  # fmt: skip
_SYSTEM_FIELDS = (
    "kind", "time", "step", "limit_bytes", "used_bytes", "trainer_bytes", "shared_bytes", "readers", "vram", "gpus",
    "cores_busy",
)  # fmt: skip
# By kind, the fields that a report takes apart; a record in which one has another type is skipped, like a torn line.
_SHAPES: Mapping[str, Any] = {
    "system": {
        "used_bytes": [], "trainer_bytes": [], "shared_bytes": [], "readers": {},
        "gpus": [{"index": int | str, "busy": []}],
    },
    "ranks": {"times": [{}]},
    "run_start": {"validated_step": int, "previewed_step": int, "drift": [], "accepted": []},
    "validation": {"bin_edges": [int | float], "weights": {"ema": {"relative_bins": []}}},
}  # fmt: skip


@dataclass(frozen=True)
class RunRecords:
    """The records of a run, without those that a resume superseded."""

    path: Path
    columns: Mapping[str, Column]  # of the steps, by the names of `STEP_FIELDS`; NaN is not known
    first: NDArray[np.bool_]  # whether a step is the first of its session, and includes starting the readers
    timed: NDArray[np.bool_]  # whether a step was made with the latest settings that its times may depend on
    changed: tuple[str, ...]  # the keys of these settings that changed before the first timed step
    system: Sequence[Record]  # the monitor's records, in order of time
    others: Sequence[Record]  # records of metrics.jsonl that are not steps, in order
    sessions: Sequence[Record]  # each `run_start` and `run_end`, superseded or not
    # time, step and headline of each process that died, and whether it was killed from outside
    deaths: Sequence[tuple[float, int, str, bool]]
    config: Mapping[str, Any]  # the resolved config as plain data; empty if it cannot be read
    config_text: str
    environment: Mapping[str, Any]
    state: str  # `running`, `killed`, `ended with exit code 0: CAUSE`, `GONE`, ...
    exit_code: int | None  # of the last session; None unless it has ended

    def of_kind(self, kind: str) -> list[Record]:
        """The records of a kind other than `step` and `system`."""
        return [record for record in self.others if record["kind"] == kind]


def read_run(path: Path) -> RunRecords:
    """Read a run directory; torn lines and missing files are skipped."""
    steps = {name: array("d") for name in STEP_FIELDS}
    system, others, sessions = list[Record](), list[Record](), list[Record]()
    for record in heapq.merge(_metrics(path / "metrics.jsonl"), _system(path), key=_time):
        match record["kind"]:
            case "step":
                for name, column in steps.items():
                    column.append(figure(record.get(name)))
            case "system":
                system.append(record)
            case kind:
                if kind == "run_start":
                    while steps["step"] and steps["step"][-1] > record["step"]:
                        for column in steps.values():
                            column.pop()
                    for kept in (system, others):
                        kept[:] = [each for each in kept if not is_repeated(each, record)]
                others.append(record)
                if kind in ("run_start", "run_end"):
                    sessions.append(record)
    columns = {name: np.array(column) for name, column in steps.items()}
    first, since, changed = np.zeros(len(columns["step"]), dtype=bool), 0, tuple[str, ...]()
    for start in (record for record in others if record["kind"] == "run_start"):
        index = int(np.searchsorted(columns["step"], start["step"], side="right"))
        first[index : index + 1] = True
        if (keys := _changed_keys(start)) and index < len(first):
            since, changed = index, keys
    config_text, session = read_text(path / "config.resolved.yaml") or "", read_session(path / "session.json")
    return RunRecords(
        path,
        columns,
        first,
        np.arange(len(first)) >= since,
        changed,
        system,
        others,
        sessions,
        [
            (death.time, death.step, death_headline(death), death.cause not in ("guard", "gpu"))
            for death in read_deaths(path / "post_mortem.jsonl")
        ],
        _config(config_text),
        config_text,
        parse_record(read_text(path / "env.json") or "") or {},
        _state(session, sessions) if path.is_dir() else GONE,
        session.exit_code if session else None,
    )


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


def _metrics(path: Path) -> Iterator[Record]:
    """The records of metrics.jsonl, with only the needed fields of each step: a long run's file exceeds memory."""
    with suppress(OSError):
        for record in _placed(iter_records(path)):
            is_step = record["kind"] == "step"
            yield {"kind": "step"} | {name: record.get(name) for name in STEP_FIELDS} if is_step else record


def _system(run: Path) -> Iterator[Record]:
    """The records of the monitor; older versions compressed earlier ones into system.NNNNNN.jsonl.gz."""
    for path in (*sorted(run.glob("system.*.jsonl.gz")), run / "system.jsonl"):
        with (
            suppress(OSError, EOFError, zlib.error),
            gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines,
        ):
            for record in _placed(records_in(lines)):
                yield {name: record.get(name) for name in _SYSTEM_FIELDS}


def _placed(records: Iterable[Record]) -> Iterator[Record]:
    """The records that have a kind, and a step if their kind needs one, and the types of `_SHAPES`."""
    for record in records:
        kind = record.get("kind")
        step = int if kind in ("step", "run_start") else int | None
        if isinstance(kind, str) and isinstance(record.get("step"), step) and _fits(record, _SHAPES.get(kind, {})):
            yield record


def _fits(value: object, shape: Any) -> bool:
    """Whether a value is of a type, a list of such, or a dict whose fields, if they are known, are such."""
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(value.get(k) is None or _fits(value[k], s) for k, s in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(each, of) for each in value for of in shape)
    return isinstance(value, shape)


def _time(record: Record) -> float:
    seconds = figure(record.get("time"))
    return 0.0 if math.isnan(seconds) else seconds


def _state(session: SessionRecord | None, sessions: Sequence[Record]) -> str:
    if session is None:
        return "not known"
    if session.end_time is not None:
        cause = sessions[-1].get("cause") if sessions else None
        return f"ended with exit code {session.exit_code}" + (f": {cause}" if cause else "")
    elsewhere = f"running on {session.host}, or killed there"
    return {True: "running", False: "killed", None: elsewhere}[is_alive(session)]


def _config(text: str) -> Mapping[str, Any]:
    """The resolved config, with current names of its keys; empty if it cannot be parsed."""
    try:
        found, _ = read_yaml(text, "config.resolved.yaml", is_stored=True)
    except ConfigError:
        return {}
    return found if isinstance(found, dict) else {}
