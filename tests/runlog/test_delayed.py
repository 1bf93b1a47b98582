"""Writes on a thread of their own: in order, and those that are lost are counted and said."""

from __future__ import annotations

import logging
from threading import Event

import pytest

from vesuvius.runlog.files.delayed import DelayedWrites


def test_writes_beyond_a_thousand_are_lost_and_the_log_says_how_many(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    begun, goes_on, written = Event(), Event(), list[int]()
    writes = DelayedWrites("a-writer", lambda: None)

    def hang() -> None:
        begun.set()
        assert goes_on.wait(60)

    assert writes.later(hang)
    assert begun.wait(60)
    taken = [writes.later(lambda number=number: written.append(number)) for number in range(1007)]  # type: ignore[misc]
    assert taken == [True] * 1000 + [False] * 7
    assert not caplog.records, "said once they are known, not one by one"
    goes_on.set()
    assert writes.close(60)
    assert written == list(range(1000))
    (line,) = caplog.messages
    assert line.startswith("a-writer: ")
    assert "7 more are lost" in line


def test_a_write_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    failed, written = [], []
    writes = DelayedWrites("a-writer", lambda: failed.append(1))
    writes.later(lambda: 1 // 0)
    writes.later(lambda: written.append(1))
    assert writes.close(60)
    assert (failed, written, caplog.messages) == ([1], [1], [])
