"""Closes open streams when the interpreter exits, which would otherwise wait for their threads for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import ExitStack, suppress
from functools import cache

from vesuvius.threads import on_thread

_open: set[Callable[[], None]] = set()


def close_at_exit(close: Callable[[], None]) -> None:
    """Call the `close` of a stream when the interpreter exits, unless it is forgotten by then."""
    _register()
    _open.add(close)


def forget(close: Callable[[], None]) -> None:
    """The stream is closed."""
    _open.discard(close)


def done_within(seconds: float, act: Callable[[], None]) -> bool:
    """Call a function that may hang, on a daemon thread; returns whether it ended in time.

    Raises what it raises within that time.
    """
    acting = on_thread(act, name="bounded")
    if wait([acting], seconds).not_done:
        return False
    acting.result()
    return True


@cache
def _register() -> None:
    """`atexit` runs too late: the interpreter waits for threads first, and Ray Data's wait for a block."""
    with suppress(RuntimeError):  # the interpreter is already shutting down
        threading._register_atexit(_close_all)  # type: ignore[attr-defined]


def _close_all() -> None:
    with ExitStack() as streams:  # one that cannot be closed does not keep the others open
        for close in _open:
            streams.callback(close)
