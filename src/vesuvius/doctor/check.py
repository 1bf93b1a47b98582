"""Checks that may break or hang without ending the examination."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from vesuvius.errors import one_line
from vesuvius.threads import on_thread

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    level: Level
    value: str  # what is there, with its unit
    remedy: str = ""  # what to do; empty where all is well


@dataclass(frozen=True)
class Check:
    """Something to look at."""

    name: str
    look: Callable[[], Finding]  # returns the finding; whatever it raises is a failure with that as its cause
    within_s: float = 5.0  # after so long it counts as hung
    if_hung: str = "find out what it waits for"  # what to do then
    hung: Level = "fail"  # how bad that is
    beside: bool = False  # whether it may run beside the others; those that measure a speed may not


THREADS = "doctor: "
"""How the names of the threads of checks begin: a command that ends does not wait for one that hangs."""


def examine(
    checks: Sequence[Check], total_s: float, load: Callable[[], str] = lambda: ""
) -> Iterator[tuple[str, Finding]]:
    """Each check's name and finding, in their order.

    Those that run beside the others begin together, after all that do not.  A check that hangs is left behind in a
    thread of its own.  One that had less than its own time, because others took it, was not tried: a warning.

    Args:
        total_s: seconds for all together.
        load: says how busy the processors are where that is why a check takes long: then hanging is a warning.
    """
    ends = time.monotonic() + total_s
    begun: dict[str, Callable[[], Finding]] = {}
    for check in sorted(checks, key=lambda check: check.beside):
        begun[check.name] = wait = _begin(check, ends - time.monotonic(), load)
        if not check.beside:
            wait()
    for check in checks:
        yield check.name, begun[check.name]()


def _begin(check: Check, left_s: float, load: Callable[[], str]) -> Callable[[], Finding]:
    """Run a check in a thread; returns what waits for its finding, within the time that it has."""
    within_s = max(min(check.within_s, left_s), 0.0)
    until = time.monotonic() + within_s
    found = on_thread(_look, check, name=f"{THREADS}{check.name}")

    def wait() -> Finding:
        with suppress(TimeoutError):
            return found.result(max(until - time.monotonic(), 0.0))
        late = f"no answer within {within_s:.0f} s"
        if busy := load():
            return Finding("warn", f"{late}, {busy}", "try again when the processors are idle")
        if within_s < check.within_s:
            late = f"not completed: other checks left it {within_s:.0f} of its {check.within_s:.0f} s"
            return Finding("warn", late, "see the lines above, then try again")
        return Finding(check.hung, late, check.if_hung)

    return wait


def _look(check: Check) -> Finding:
    try:
        return check.look()
    except BaseException as error:  # of any kind: the thread has nobody else to tell
        value, _, remedy = one_line(error, 400).rpartition("; ")  # our messages end with what to do
        if not value:
            value, remedy = remedy or "no message", ""
        return Finding("fail", value if remedy else f"{type(error).__name__}: {value}", remedy)
