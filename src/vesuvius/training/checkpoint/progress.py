"""Progress of a run: position, training time and quarantined regions.

    {"kind": "region", "volume": "v.zarr level 0", "number": 0, "box": [[z0, y0, x0], [z1, y1, x1]], "chunk": [z, y, x],
        "cause": "RuntimeError: blosc encoded value is invalid"}
    {"kind": "cleared"}

`runs/<name>/quarantine.jsonl` is append-only; `vesuvius quarantine --clear` voids the records before it.  Checkpoints
hold the list at the time of saving, so a resume drops records that were cleared since.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from vesuvius.config import Config
from vesuvius.runlog.records import JsonLines, Record, naming_wrong_values, read_records
from vesuvius.training.checkpoint.format import BEST_JUDGED
from vesuvius.volumes.box import Box

log = logging.getLogger(__name__)

FIRST_PREVIEW_S = 90.0
_PACE_STEPS = 1000  # for the time left; includes some validations and saves
_CLEARED = "cleared"
_COUNTS = ("step", "sample_index", "validated_step", "previewed_step")


@dataclass(frozen=True)
class Best:
    """Best validation so far, by `relative_error` of the averaged weights, the mean over `JUDGED_SIGMA`."""

    step: int
    relative_error: float


@dataclass
class Progress:
    """Progress of a run over all its sessions."""

    step: int = 0  # the next one, counted from 0
    sample_index: int = 0  # its first sample
    quarantined: list[dict[str, Any]] = field(default_factory=list)  # a record for each unreadable region so far
    validated_step: int = 0  # of the last finished validation; 0 = none
    previewed_step: int = 0
    best: Best | None = None  # best validation; its checkpoint is kept
    trained_s: float = 0.0  # seconds of training in earlier sessions, up to their last checkpoint
    sessions: int = 1  # sessions so far, including this one
    # recently reported steps of this session with their times; not the first, which includes the start of the readers
    _reported: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_PACE_STEPS))
    _session_start: float = field(default_factory=time.monotonic)

    def advance(self, samples: int) -> None:
        self.step += 1
        self.sample_index += samples

    def align_to_ranks(self, ranks: int, global_batch: int) -> None:
        """Skip to the next global batch if the ranks cannot share the next samples, as after another batch size."""
        if self.sample_index % ranks:
            before, self.sample_index = self.sample_index, -(-self.sample_index // global_batch) * global_batch
            log.warning(
                "skipping samples %d to %d: %d ranks must start at a full batch", before, self.sample_index, ranks
            )

    def rewind_to(self, step: int, samples_per_step: int) -> None:
        """Undo the count of steps launched after `step`."""
        self.sample_index -= (self.step - step) * samples_per_step
        self.step = step

    def validation_due(self, config: Config) -> bool:
        """Whether a validation after the current step is due and not yet done."""
        held_out = config.data.validation.fraction > 0
        return held_out and self._due(config.training.validate_every, self.validated_step, config.horizon_steps)

    def preview_due(self, config: Config) -> bool:
        """Whether a preview is due and not yet done; the first is due after `FIRST_PREVIEW_S`, at any step."""
        every = config.training.preview_every
        is_first = every > 0 and self.step > self.previewed_step == 0 and self.total_s >= FIRST_PREVIEW_S
        return is_first or self._due(every, self.previewed_step, config.horizon_steps)

    def _due(self, every: int, done: int, horizon: int) -> bool:
        """Whether a task is due: once at every multiple of `every` and at the end of the horizon."""
        return every > 0 and self.step > done and (self.step % every == 0 or self.step == horizon)

    def quarantine(self, path: Path, records: Sequence[Record]) -> None:
        """Exclude these regions from now on, and record them."""
        with closing(JsonLines(path)) as lines:
            for record in records:
                lines.write("region", step=self.step, **record)
        self.quarantined += records

    @property
    def session_s(self) -> float:
        return time.monotonic() - self._session_start

    @property
    def total_s(self) -> float:
        return self.trained_s + self.session_s

    def mark_reported(self, step: int) -> None:
        self._reported.append((step, time.monotonic()))

    def time_left(self, config: Config, limit_s: float | None = None) -> float | None:
        """Seconds from the last reported step to the final one, at most `limit_s`; None before the third step.

        Follows the mean pace of the last thousand steps, including the validations, previews and saves between them.
        """
        if len(self._reported) < 2:
            return None
        (first, began), (last, now) = self._reported[0], self._reported[-1]
        seconds = (now - began) / (last - first) * (config.stop_step - last)
        return seconds if limit_s is None else min(seconds, limit_s)

    def state_dict(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in _COUNTS} | {
            "quarantined": list(self.quarantined),
            BEST_JUDGED: None if self.best is None else vars(self.best).copy(),
            "trained_s": self.total_s,
            "sessions": self.sessions,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Progress at the start of the next session, from `state_dict`."""
        return cls(
            **{key: state[key] for key in _COUNTS},
            quarantined=list(state["quarantined"]),
            best=Best(**state[BEST_JUDGED]) if state.get(BEST_JUDGED) else None,
            trained_s=state["trained_s"],
            sessions=state["sessions"] + 1,
        )


def box_of(record: Record) -> Box:
    (z0, y0, x0), (z1, y1, x1) = record["box"]
    return (z0, y0, x0), (z1, y1, x1)


def read_quarantine(path: Path) -> list[Record]:
    """Regions in quarantine, one record per box, oldest first; empty if there is no file."""
    regions: dict[tuple[str, int, Box], Record] = {}
    with naming_wrong_values(path.parent):
        for record in read_records(path) if path.exists() else []:
            if record["kind"] == _CLEARED:
                regions.clear()
            else:
                regions[region_key(record)] = record
    return list(regions.values())


def clear_quarantine(path: Path) -> None:
    """Make the next resume retry all regions.  Raises OSError."""
    with closing(JsonLines(path)) as lines:
        lines.write(_CLEARED)


def without_cleared(records: Sequence[Record], path: Path) -> list[Record]:
    """Records of a checkpoint without those cleared since; logs how many are retried."""
    left = set(map(region_key, read_quarantine(path)))
    ever = [record for record in read_records(path) if record["kind"] != _CLEARED] if path.exists() else []
    cleared = set(map(region_key, ever)) - left
    kept = [record for record in records if region_key(record) not in cleared]
    if retried := len(records) - len(kept):
        log.info("retrying %d of %d unreadable regions, which were cleared from quarantine", retried, len(records))
    return kept


def region_key(record: Record) -> tuple[str, int, Box]:
    return record["volume"], record["number"], box_of(record)
