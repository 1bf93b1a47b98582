"""Streams that nobody has closed are closed when the interpreter exits: their threads would keep it for ever.

Nor does closing one wait for ever: what may hang is done on a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from typing import Protocol


class Closable(Protocol):
    """What is to be closed."""

    def close(self) -> None: ...


_open: set[Closable] = set()


def close_at_exit(stream: Closable) -> None:
    """Have it closed, unless it is closed by then."""
    _register()
    _open.add(stream)


def is_closed(stream: Closable) -> None:
    """It need not be closed any more."""
    _open.discard(stream)


def done_within(seconds: float, act: Callable[[], None]) -> bool:
    """Call it on a daemon thread, and wait for it no longer than that; returns whether it is done.

    Raises what it raises within that time.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ending", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return not thread.is_alive()


@cache
def _register() -> None:
    """`atexit` comes too late: the interpreter first waits for threads, and Ray Data's wait for a block."""
    with suppress(RuntimeError):  # the interpreter is already on its way out
        threading._register_atexit(_close_all)  # type: ignore[attr-defined]


def _close_all() -> None:
    with ExitStack() as streams:  # one that cannot be closed does not keep the others open
        for stream in _open:
            streams.callback(stream.close)
