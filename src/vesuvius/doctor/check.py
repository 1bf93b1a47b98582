"""Checks that may break or hang without ending the examination."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from vesuvius.errors import one_line

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        value: what is there, with its unit.
        remedy: what to do; empty where all is well.
    """

    level: Level
    value: str
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """Something to look at.

    Attributes:
        look: returns the finding; whatever it raises is a failure with that as its cause.
        within_s: after so long it counts as hung.
        if_hung: what to do then.
        hung: how bad that is.
        beside: whether it may run beside the others; those that measure a speed may not.
    """

    name: str
    look: Callable[[], Finding]
    within_s: float = 10.0
    if_hung: str = "see what it waits for"
    hung: Level = "fail"
    beside: bool = False


LEFT_BEHIND = "left-behind"
"""How the name of a thread begins that a check hangs in; `command.end_soon` does not wait for it."""


def examine(
    checks: Sequence[Check], total_s: float, load: Callable[[], str] = lambda: ""
) -> Iterator[tuple[str, Finding]]:
    """Each check's name and finding, in their order.

    Those that run beside the others begin with the first of them, after all that do not.  A check that hangs is left
    behind in a thread of its own.

    Args:
        total_s: seconds for all together.
        load: says how busy the processors are where that is why a check takes long: then hanging is a warning.
    """
    ends = time.monotonic() + total_s
    begun: dict[str, _Running] = {}
    for check in sorted(checks, key=lambda check: check.beside):
        begun[check.name] = running = _Running(check, ends, load)
        if not check.beside:
            running.wait()
    for check in checks:
        yield check.name, begun[check.name].wait()


class _Running:
    """A check in a thread."""

    def __init__(self, check: Check, ends: float, load: Callable[[], str]) -> None:
        self._load = load
        self._check = check
        self._within_s = max(min(check.within_s, ends - time.monotonic()), 0.0)
        self._began = time.monotonic()
        self._finding: Finding | None = None
        self._thread = threading.Thread(target=self._look, name=f"check-{check.name}", daemon=True)
        self._thread.start()

    def wait(self) -> Finding:
        self._thread.join(max(self._began + self._within_s - time.monotonic(), 0.0))
        if self._finding is None:
            self._thread.name = f"{LEFT_BEHIND} {self._check.name}"
            late, load = f"no answer within {self._within_s:.0f} s", self._load()
            self._finding = Finding(self._check.hung, late, self._check.if_hung)
            if load:
                self._finding = Finding("warn", f"{late}, {load}", "try again when the processors are idle")
        return self._finding

    def _look(self) -> None:
        try:
            found = self._check.look()
        except BaseException as error:  # of any kind: the thread has nobody else to tell
            value, _, remedy = one_line(error, 400).rpartition("; ")  # our messages end with what to do
            if not value:
                value, remedy = remedy or "no message", ""
            found = Finding("fail", value if remedy else f"{type(error).__name__}: {value}", remedy)
        if self._finding is None:
            self._finding = found
