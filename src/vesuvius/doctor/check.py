"""Checks that may break or hang without ending the examination."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
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
    if_late: str = "find out what it waits for"  # what to do where it does not answer
    late: Level = "fail"  # how bad that is


def examine(checks: Sequence[Check], within_s: float) -> Iterator[tuple[str, Finding]]:
    """Each check's name and finding, in their order.

    All begin together.  A check that hangs is left behind in a daemon thread of its own, and is a failure; only a
    warning where more processes want to run than there are processors.

    Args:
        within_s: seconds for all together.
    """
    until = time.monotonic() + within_s
    begun = [(check, on_thread(_look, check, name=f"doctor: {check.name}")) for check in checks]
    for check, found in begun:
        try:
            yield check.name, found.result(max(until - time.monotonic(), 0.0))
        except TimeoutError:
            late, load, cores = f"no answer within {within_s:.0f} s", os.getloadavg()[0], os.cpu_count() or 1
            if load > cores + 1:  # one of them is this examination
                late += f", load {load:.1f} on {cores} processors"
                yield check.name, Finding("warn", late, "try again when the processors are idle")
            else:
                yield check.name, Finding(check.late, late, check.if_late)


def _look(check: Check) -> Finding:
    try:
        return check.look()
    except BaseException as error:  # of any kind: the thread has nobody else to tell
        value, _, remedy = one_line(error, 400).rpartition("; ")  # our messages end with what to do
        if not value:
            value, remedy = remedy or "no message", ""
        return Finding("fail", value if remedy else f"{type(error).__name__}: {value}", remedy)
