"""Calls with a timeout."""

from __future__ import annotations

import threading

import pytest

from vesuvius.threads import BoundedCall


def test_results_and_exceptions_of_a_bounded_call_are_passed_on() -> None:
    results = iter([1, 2])
    call = BoundedCall(lambda: next(results), 60)
    assert [call(), call()] == [1, 2]
    with pytest.raises(StopIteration):
        call()
    assert not call.is_running


def test_a_bounded_call_returns_none_until_a_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    call = BoundedCall(lambda: 1, 60)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert [call(), call()] == [None, None]
    assert call() == 1
