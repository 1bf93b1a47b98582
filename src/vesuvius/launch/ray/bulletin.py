"""What the ranks of Ray Train and the command that started them tell each other, through an actor."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import ray

from vesuvius.errors import EXIT_STOPPED

_ANSWER_S = 10.0
_LATE_STEPS = 2  # a step is logged, and an error of a GPU raised, so much later than it was begun, at most


@dataclass(frozen=True)
class Start:
    """What a rank learns when it is started."""

    again: bool  # it was started before
    begun: bool  # rank 0 has made a step before
    restarts: int  # after losses, so far
    # ranks that were lost since its start before, and why; empty where Ray Train only changed their number
    lost: dict[int, str]
    ended: tuple[int, str] | None  # how a rank has ended that no restart can help: exit code and message


class Bulletin:
    """What the ranks and the process that started them tell each other: starts, losses, a stop, an end."""

    def __init__(self) -> None:
        self._losses: list[dict[int, str]] = []
        self._seen: dict[int, int] = {}  # losses that a rank has heard of, by rank
        self._step: int | None = None  # the last one that rank 0 has logged
        self._failure: tuple[str, int] | None = None
        self._waiting_since: float | None = time.monotonic()
        self._stop: tuple[int, str] | None = None
        self._heard = False
        self._resize: str | None = None
        self._ended: tuple[int, str] | None = None

    def start(self, rank: int) -> Start:
        """Note a start of this rank."""
        new, again = self._losses[self._seen.get(rank, 0) :], rank in self._seen
        self._seen[rank] = len(self._losses)
        if rank == 0:
            self._waiting_since = self._resize = None
        return Start(again, self._step is not None, len(self._losses), new[-1] if new else {}, self._ended)

    def reach(self, step: int) -> None:
        """Note a step that rank 0 has made."""
        self._step = step

    def fail(self, error: str) -> int | None:
        """Note an error that another start may not meet.  Returns the step if the one before was the same, there."""
        before, self._failure = self._failure, (error, self._step or 0)
        same = before is not None and before[0] == error and abs(before[1] - self._failure[1]) <= _LATE_STEPS
        return self._failure[1] if same else None

    def lose(self, ranks: dict[int, str]) -> None:
        """Note that these ranks ended all, and why."""
        self._losses.append(ranks)
        self._waiting_since = time.monotonic()
        self._resize = None

    def waited_s(self) -> float:
        """Seconds for which no ranks have been at work; 0 where they are."""
        return 0.0 if self._waiting_since is None else time.monotonic() - self._waiting_since

    def end(self, exit_code: int, message: str) -> None:
        """Note how a rank has ended that no restart can help; the first one counts."""
        self._ended, self._resize = self._ended or (exit_code, message), None

    def ended(self) -> tuple[int, str] | None:
        """What `end` has noted."""
        return self._ended

    def ask(self, exit_code: int, reason: str) -> None:
        """Ask rank 0 for a stop."""
        self._stop = (exit_code, reason)

    def stop(self) -> tuple[int, str] | None:
        """The stop that is asked for; rank 0 hears of it."""
        self._heard = self._stop is not None
        return self._stop or (None if self._resize is None else (EXIT_STOPPED, self._resize))

    def resize(self, reason: str) -> bool:
        """Ask rank 0, where it is at work, to save and end: another number of ranks is to be started.  Returns
        whether it is."""
        if self._waiting_since is None:
            self._resize = reason
        return self._resize is not None

    def resizing(self) -> bool:
        """Whether rank 0 has yet to save for that."""
        return self._resize is not None

    def leave(self) -> None:
        """Note that rank 0 has ended, and saved."""
        self._waiting_since, self._resize = time.monotonic(), None

    def heard(self) -> bool:
        """Whether rank 0 has heard of the stop."""
        return self._heard


def answer(reference: Any) -> Any:
    """What an actor answers; None where it does not in time."""
    try:
        return ray.get(reference, timeout=_ANSWER_S)
    except ray.exceptions.RayError:
        return None
