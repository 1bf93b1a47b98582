"""How far a run is: what a checkpoint knows beside the tensors, and the times that a resumed run continues to count."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from vesuvius.config import Config

log = logging.getLogger(__name__)

_PACE_STEPS = 200
_PAUSES = 10
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
    # seconds of the last steps without the work between them; until this session has made some, of earlier ones
    pace: deque[float] = field(default_factory=lambda: deque(maxlen=_PACE_STEPS))
    # seconds of the last validations, previews, hand-overs of a checkpoint ("save") and writes to disk ("write")
    pauses: dict[str, deque[float]] = field(default_factory=dict)
    _has_pace: bool = False  # of this session
    _session_start: float = field(default_factory=time.monotonic)

    def advance(self, samples: int) -> None:
        """One step more, of so many samples."""
        self.step += 1
        self.sample_index += samples

    def begin_at_multiple(self, ranks: int, global_batch: int) -> None:
        """Leave out the samples up to the next global batch where the ranks could not share those that are next.

        That can be so after sessions with another effective batch.
        """
        if self.sample_index % ranks:
            before, self.sample_index = self.sample_index, -(-self.sample_index // global_batch) * global_batch
            log.warning(
                "samples %d to %d are skipped: %d ranks begin with a whole batch", before, self.sample_index, ranks
            )

    def go_back_to(self, step: int, samples_per_step: int) -> None:
        """Count as if nothing after `step` had been launched."""
        self.sample_index -= (self.step - step) * samples_per_step
        self.step = step

    def note_step(self, seconds: float) -> None:
        """A step took so long, without the work between steps."""
        if not self._has_pace:
            self._has_pace = True
            self.pace.clear()
        self.pace.append(seconds)

    def note_pause(self, what: str, seconds: float) -> None:
        """A validation, preview, save or write took so long."""
        self.pauses.setdefault(what, deque(maxlen=_PAUSES)).append(seconds)

    def validation_due(self, config: Config) -> bool:
        """Whether a validation is due after the present step and has not been finished."""
        held_out = config.data.validation.fraction > 0
        return held_out and self._due(config.training.validate_every, self.validated_step, config.horizon_steps)

    def preview_due(self, config: Config) -> bool:
        """Likewise for a preview."""
        return self._due(config.training.preview_every, self.previewed_step, config.horizon_steps)

    def _due(self, every: int, done: int, horizon: int) -> bool:
        """At every multiple and at the end of the horizon, once."""
        return every > 0 and self.step > done and (self.step % every == 0 or self.step == horizon)

    @property
    def session_s(self) -> float:
        """Seconds since this session began."""
        return time.monotonic() - self._session_start

    @property
    def total_s(self) -> float:
        """Seconds of training over all sessions."""
        return self.trained_s + self.session_s

    def time_left(self, config: Config, after: int | None = None, limit_s: float | None = None) -> float | None:
        """Seconds from step `after` to the last one or `max_hours`; None without a pace.

        The steps left at their recent mean pace (a median would miss the waits of a run that is short of data), and
        each validation, preview and save to come at the mean of the last few; nothing for what has not been seen yet.

        Args:
            after: a step that has just been reported; default: the present one, and what is due there is done.
            limit_s: seconds until `max_hours` are over.
        """
        if not self.pace:
            return None
        training, stop, horizon = config.training, config.stop_step, config.horizon_steps
        after, saved = (self.step, self.step) if after is None else (after, after - 1)
        validates = training.validate_every if config.data.validation.fraction > 0 else 0
        to_come = {
            "validation": _times_due(validates, max(after - 1, self.validated_step), stop, horizon),
            "preview": _times_due(training.preview_every, max(after - 1, self.previewed_step), stop, horizon),
            "save": _times_due(training.save_every, saved, stop, stop),
            "write": 1,  # of the last checkpoint, for which the run waits
        }
        seconds = statistics.fmean(self.pace) * (stop - after)
        seconds += sum(statistics.fmean(known) * to_come[what] for what, known in self.pauses.items())
        return seconds if limit_s is None else min(seconds, limit_s)

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {key: getattr(self, key) for key in _COUNTS} | {
            "quarantined": list(self.quarantined),
            "best": None if self.best is None else vars(self.best).copy(),
            "trained_s": self.total_s,
            "sessions": self.sessions,
            "pace_s": list(self.pace),
            "pauses_s": {what: list(pauses) for what, pauses in self.pauses.items()},
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
            pace=deque(state["pace_s"], maxlen=_PACE_STEPS),
            pauses={what: deque(known, maxlen=_PAUSES) for what, known in state["pauses_s"].items()},
        )


def _times_due(every: int, done: int, stop: int, last: int) -> int:
    """How often what comes at each multiple, and after step `last`, comes after step `done` and until `stop`."""
    if every <= 0:
        return 0
    at_the_end = stop == last and stop % every > 0 and done < stop
    return stop // every - min(done, stop) // every + at_the_end
