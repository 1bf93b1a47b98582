"""A call that is waited for only so long."""

from __future__ import annotations

import threading

import pytest

from vesuvius.threads import BoundedCall


def test_what_a_call_returns_or_raises_is_passed_on() -> None:
    results = iter([1, 2])
    call = BoundedCall(lambda: next(results), 60)
    assert [call(), call()] == [1, 2]
    with pytest.raises(StopIteration):
        call()
    assert not call.is_running


def test_where_no_thread_can_be_started_nothing_is_known_until_one_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    call = BoundedCall(lambda: 1, 60)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert [call(), call()] == [None, None]
    assert call() == 1
