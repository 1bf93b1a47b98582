"""How long a thread of the data path has waited."""

from __future__ import annotations

import time


class WaitTime:
    """Adds up the seconds spent within `with`.  One thread waits, any may look."""

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = (0.0, None)  # one assignment: who looks sees both or neither

    def __enter__(self) -> None:
        self._state = (self._state[0], time.perf_counter())

    def __exit__(self, *_: object) -> None:
        self._state = (self.seconds, None)

    @property
    def waiting(self) -> bool:
        """Whether a wait goes on."""
        return self._state[1] is not None

    @property
    def seconds(self) -> float:
        """So far, a wait that goes on included."""
        total, since = self._state
        return total if since is None else total + time.perf_counter() - since
