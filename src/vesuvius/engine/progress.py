"""How far a run is: what a checkpoint knows beside the tensors, and the times a resumed run goes on counting."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from vesuvius.config import Config

_PACE_STEPS = 50


@dataclass(frozen=True)
class Best:
    """The best validation so far, by the `relative_error` of the averaged weights."""

    step: int
    relative_error: float


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
        pace: seconds of the last steps; their median does not mind the first ones, which hold the start of the readers.
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
    _session_start: float = field(default_factory=time.monotonic)

    def advance(self, samples: int) -> None:
        """One step more, of so many samples."""
        self.step += 1
        self.sample_index += samples

    def go_back_to(self, step: int, samples_per_step: int) -> None:
        """Count as if nothing behind `step` had been launched."""
        self.sample_index -= (self.step - step) * samples_per_step
        self.step = step

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

    def remaining_s(self, stop_step: int, behind: int | None = None) -> float | None:
        """Seconds from `behind` (default: the present step) to `stop_step` at the recent pace; None without a pace."""
        if not self.pace:
            return None
        return statistics.median(self.pace) * (stop_step - (self.step if behind is None else behind))

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {
            "step": self.step,
            "sample_index": self.sample_index,
            "quarantined": list(self.quarantined),
            "validated_step": self.validated_step,
            "previewed_step": self.previewed_step,
            "best": None if self.best is None else vars(self.best).copy(),
            "trained_s": self.total_s,
            "sessions": self.sessions,
            "pace_s": list(self.pace),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """What `state_dict` returned, at the start of the next session."""
        best = state["best"]
        return cls(
            step=state["step"],
            sample_index=state["sample_index"],
            quarantined=list(state["quarantined"]),
            validated_step=state["validated_step"],
            previewed_step=state["previewed_step"],
            best=Best(**best) if best and "relative_error" in best else None,  # earlier versions compared losses
            trained_s=state["trained_s"],
            sessions=state["sessions"] + 1,
            pace=deque(state["pace_s"], maxlen=_PACE_STEPS),
        )
