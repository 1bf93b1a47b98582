"""How far a run is: what a checkpoint knows beside the tensors, how long it has trained, and its quarantine.

    {"kind": "region", "volume": "v.zarr level 0", "number": 0, "box": [[z0, y0, x0], [z1, y1, x1]],
     "chunk": [z, y, x], "cause": "RuntimeError: blosc encoded value is invalid"}
    {"kind": "cleared"}

`runs/<name>/quarantine.jsonl` only grows; `vesuvius quarantine --clear` ends what came before in it.
Checkpoints hold the list as it was when they were saved, so a resume leaves out what was cleared since.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vesuvius.config import Config
from vesuvius.runlog.records import JsonLines, Record, read_records
from vesuvius.volumes.box import Box

log = logging.getLogger(__name__)

FIRST_PREVIEW_S = 90.0
_PACE_STEPS = 1000  # of which the time left follows: some validations and saves are among them
_CLEARED = "cleared"
_COUNTS = ("step", "sample_index", "validated_step", "previewed_step")


@dataclass(frozen=True)
class Best:
    """The best validation so far, by the `relative_error` of the averaged weights."""

    step: int
    relative_error: float


@dataclass
class Progress:
    """How far a run is, over all its sessions."""

    # step, sample_index: both count from 0 and are those of the next step
    step: int = 0
    sample_index: int = 0
    # a record for each region that could not be read so far
    quarantined: list[dict[str, Any]] = field(default_factory=list)
    # validated_step, previewed_step: the last step after which a validation, a preview was finished; 0 = none
    validated_step: int = 0
    previewed_step: int = 0
    best: Best | None = None  # the best validation, whose checkpoint is kept
    trained_s: float = 0.0  # seconds of training in earlier sessions, as far as their work was kept
    sessions: int = 1  # sessions so far, with this one
    # the last steps of this session that were reported, and when, from the second one: readers start in the first
    _reported: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_PACE_STEPS))
    _session_start: float = field(default_factory=time.monotonic)

    def advance(self, samples: int) -> None:
        """One step more, of so many samples."""
        self.step += 1
        self.sample_index += samples

    def align_to_ranks(self, ranks: int, global_batch: int) -> None:
        """Leave out the samples up to the next global batch where the ranks could not share those that are next.

        That can be so after sessions with another effective batch.
        """
        if self.sample_index % ranks:
            before, self.sample_index = self.sample_index, -(-self.sample_index // global_batch) * global_batch
            log.warning(
                "samples %d to %d are skipped: %d ranks begin with a whole batch", before, self.sample_index, ranks
            )

    def rewind_to(self, step: int, samples_per_step: int) -> None:
        """Count as if nothing after `step` had been launched."""
        self.sample_index -= (self.step - step) * samples_per_step
        self.step = step

    def validation_due(self, config: Config) -> bool:
        """Whether a validation is due after the present step and has not been finished."""
        held_out = config.data.validation.fraction > 0
        return held_out and self._due(config.training.validate_every, self.validated_step, config.horizon_steps)

    def preview_due(self, config: Config) -> bool:
        """Likewise for a preview; the first one is due after `FIRST_PREVIEW_S`, at whatever step that is."""
        every = config.training.preview_every
        is_first = every > 0 and self.step > self.previewed_step == 0 and self.total_s >= FIRST_PREVIEW_S
        return is_first or self._due(every, self.previewed_step, config.horizon_steps)

    def _due(self, every: int, done: int, horizon: int) -> bool:
        """At every multiple and at the end of the horizon, once."""
        return every > 0 and self.step > done and (self.step % every == 0 or self.step == horizon)

    def quarantine(self, path: Path, records: Sequence[Record]) -> None:
        """Leave these regions out from now on, and write them down."""
        with closing(JsonLines(path)) as lines:
            for record in records:
                lines.write("region", step=self.step, **record)
        self.quarantined += records

    @property
    def session_s(self) -> float:
        """Seconds since this session began."""
        return time.monotonic() - self._session_start

    @property
    def total_s(self) -> float:
        """Seconds of training over all sessions."""
        return self.trained_s + self.session_s

    def mark_reported(self, step: int) -> None:
        """A step was reported."""
        self._reported.append((step, time.monotonic()))

    def time_left(self, config: Config, limit_s: float | None = None) -> float | None:
        """Seconds from the last reported step to the last one, or `limit_s` until `max_hours`; None before the third.

        At the mean pace of the last thousand steps, with the validations, previews and saves that came between them.
        """
        if len(self._reported) < 2:
            return None
        (first, began), (last, now) = self._reported[0], self._reported[-1]
        seconds = (now - began) / (last - first) * (config.stop_step - last)
        return seconds if limit_s is None else min(seconds, limit_s)

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {key: getattr(self, key) for key in _COUNTS} | {
            "quarantined": list(self.quarantined),
            "best": None if self.best is None else vars(self.best).copy(),
            "trained_s": self.total_s,
            "sessions": self.sessions,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """What `state_dict` returned, at the start of the next session."""
        return cls(
            **{key: state[key] for key in _COUNTS},
            quarantined=list(state["quarantined"]),
            best=Best(**state["best"]) if state["best"] else None,
            trained_s=state["trained_s"],
            sessions=state["sessions"] + 1,
        )


def box_of(record: Record) -> Box:
    """The voxels that a record of the quarantine is about."""
    (z0, y0, x0), (z1, y1, x1) = record["box"]
    return (z0, y0, x0), (z1, y1, x1)


def read_quarantine(path: Path) -> list[Record]:
    """What is in quarantine now, one record a box, oldest first; empty where the file is not there."""
    found: dict[tuple[str, int, Box], Record] = {}
    for record in read_records(path) if path.exists() else []:
        if record["kind"] == _CLEARED:
            found.clear()
        else:
            found[region_key(record)] = record
    return list(found.values())


def clear_quarantine(path: Path) -> None:
    """Have the next resume try all of these again.  Raises OSError where the file cannot be opened."""
    with closing(JsonLines(path)) as lines:
        lines.write(_CLEARED)


def without_cleared(records: Sequence[Record], path: Path) -> list[Record]:
    """The records of a checkpoint without those that were cleared since.  Says how many are tried again."""
    ever = [record for record in read_records(path) if record["kind"] != _CLEARED] if path.exists() else []
    cleared = set(map(region_key, ever)) - set(map(region_key, read_quarantine(path)))
    kept = [record for record in records if region_key(record) not in cleared]
    if again := len(records) - len(kept):
        log.info("%d of %d unreadable places are tried again, as they were cleared", again, len(records))
    return kept


def region_key(record: Record) -> tuple[str, int, Box]:
    """Volume, its number in the config, and the box."""
    return record["volume"], record["number"], box_of(record)
