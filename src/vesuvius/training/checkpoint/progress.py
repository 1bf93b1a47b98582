"""How far a run is: what a checkpoint knows beside the tensors, and the times a resumed run goes on counting."""

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
_PAUSES = 5
_COUNTS = ("step", "sample_index", "validated_step", "previewed_step")


@dataclass(frozen=True)
class Best:
    """The best validation so far, by the `relative_error` of the averaged weights."""

    step: int
    relative_error: float


@dataclass(frozen=True)
class TimeLeft:
    """Until this session ends.

    Attributes:
        seconds: as far as they are known.
        at_least: something that is still to come, say the first validation, has not been measured.
    """

    seconds: float
    at_least: bool


@dataclass
class Progress:
    """How far a run is, over all its sessions.

    Attributes:
        step, sample_index: both count from 0 and are those of the next step.
        quarantined: a record for each region that could not be read so far.
        validated_step, previewed_step: the last step behind which a validation, a preview was finished; 0 = none.
        best: the best validation, whose checkpoint is kept.
        trained_s: seconds of training in earlier sessions, as far as their work was kept.
        sessions: sessions so far, with this one.
        pace: seconds of the last steps without the work between them, and without the first step of a session, which
            holds the start of the readers.
        pauses: seconds of the last validations, previews, hand-overs of a checkpoint ("save") and writes to disk
            ("write"), which the run waits for at its end alone.
    """

    step: int = 0
    sample_index: int = 0
    quarantined: list[dict[str, Any]] = field(default_factory=list)
    validated_step: int = 0
    previewed_step: int = 0
    best: Best | None = None
    trained_s: float = 0.0
    sessions: int = 1
    pace: deque[float] = field(default_factory=lambda: deque(maxlen=_PACE_STEPS))
    pauses: dict[str, deque[float]] = field(default_factory=dict)
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
                "samples %d to %d are left out: %d ranks begin with a whole batch", before, self.sample_index, ranks
            )

    def go_back_to(self, step: int, samples_per_step: int) -> None:
        """Count as if nothing behind `step` had been launched."""
        self.sample_index -= (self.step - step) * samples_per_step
        self.step = step

    def note_pause(self, what: str, seconds: float) -> None:
        """What it took this time."""
        self.pauses.setdefault(what, deque(maxlen=_PAUSES)).append(seconds)

    def validation_due(self, config: Config) -> bool:
        """Whether a validation belongs behind the present step and has not been finished."""
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

    def time_left(self, config: Config, behind: int | None = None) -> TimeLeft | None:
        """From step `behind` (default: the present one) to the last one or `max_hours`; None without a pace.

        Steps at their recent mean pace (a median would miss the waits of a run that is short of data), and each
        validation, preview and save to come at the mean of the last few.
        """
        if not self.pace:
            return None
        behind, training = self.step if behind is None else behind, config.training
        validates = training.validate_every if config.data.validation.fraction > 0 else 0
        to_come = {
            "validation": _times_due(validates, max(behind - 1, self.validated_step), config),
            "preview": _times_due(training.preview_every, max(behind - 1, self.previewed_step), config),
            "save": _times_due(training.save_every, behind, config),
        }
        seconds = statistics.fmean(self.pace) * (config.stop_step - behind)
        counts = to_come | {"write": 1}  # the last one, which is waited for
        seconds += sum(counts[what] * statistics.fmean(pauses) for what, pauses in self.pauses.items())
        at_least = any(count and what not in self.pauses for what, count in to_come.items())
        if training.max_hours is not None:
            session_s = max(3600 * training.max_hours - self.session_s, 0.0)
            if session_s <= seconds:
                return TimeLeft(session_s, at_least=False)
        return TimeLeft(seconds, at_least)

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
        best = state["best"]
        pauses = {
            what: known if isinstance(known, list) else [known] for what, known in state.get("pauses_s", {}).items()
        }
        return cls(
            **{key: state[key] for key in _COUNTS},
            quarantined=list(state["quarantined"]),
            best=Best(**best) if best and "relative_error" in best else None,  # earlier versions compared losses
            trained_s=state["trained_s"],
            sessions=state["sessions"] + 1,
            pace=deque(state["pace_s"], maxlen=_PACE_STEPS),
            pauses={what: deque(known, maxlen=_PAUSES) for what, known in pauses.items()},  # earlier: none, or the last
        )


def _times_due(every: int, done: int, config: Config) -> int:
    """How often what comes at each multiple, and at the end of the horizon, comes behind step `done`."""
    if every <= 0:
        return 0
    stop = config.stop_step
    at_the_end = stop == config.horizon_steps and stop % every > 0 and done < stop
    return stop // every - min(done, stop) // every + at_the_end
