"""Calls on threads pass on any result or error, without keeping a reference; some have a timeout."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import wait

import pytest

from vesuvius.threads import BoundedCall, Pool, on_thread


def test_functions_run_on_a_named_daemon_thread() -> None:
    thread = on_thread(threading.current_thread, name="mine").result()
    assert (thread.name, thread.daemon) == ("mine", True)
    assert thread is not threading.current_thread()


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3)])
def test_every_error_is_set_on_the_future(error: BaseException) -> None:
    def fails(given: BaseException) -> None:
        raise given

    assert on_thread(fails, error, name="fails").exception() is error


class Large:
    """An object that a frame of the failed call refers to."""


def test_an_error_is_freed_with_its_future() -> None:
    """A reference cycle would keep the frames of a failed call alive until garbage collection."""
    seen: list[weakref.ref[Large]] = []

    def fails() -> None:
        large = Large()
        seen.append(weakref.ref(large))
        raise ValueError

    gc.collect()
    gc.disable()
    try:
        future = on_thread(fails, name="fails")
        wait([future])
        for thread in threading.enumerate():
            if thread.name == "fails":
                thread.join()
        assert seen[0]() is not None, "the traceback holds it"
        del future
        assert seen[0]() is None
    finally:
        gc.enable()


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


def test_a_pool_runs_each_call_on_at_most_its_number_of_threads() -> None:
    pool, busy, most = Pool(3, "mine"), [], []

    def call(number: int) -> int:
        busy.append(number)
        most.append(len(busy))
        time.sleep(0.002)
        busy.remove(number)
        if number == 7:
            raise ValueError(number)
        return number

    calls = [pool.submit(call, number) for number in range(40)]
    assert isinstance(calls[7].exception(), ValueError)
    assert [each.result() for each in calls if each is not calls[7]] == [n for n in range(40) if n != 7]
    assert max(most) <= 3
    assert len(pool.threads) == 3


def test_a_closed_pool_cancels_what_has_not_begun_and_a_dropped_one_finishes() -> None:
    begun, proceed = threading.Event(), threading.Event()

    def wait_here() -> bool:
        begun.set()
        return proceed.wait(60)

    pool = Pool(1, "mine")
    running, waiting = pool.submit(wait_here), pool.submit(int)
    begun.wait(60)
    pool.close()
    late = pool.submit(int)
    assert wait([waiting, late], 0).done == {waiting, late}, "who waits for them goes on"
    proceed.set()
    assert (running.result(60), waiting.cancelled(), late.cancelled()) == (True, True, True)
    dropped = Pool(1, "mine")
    last = [dropped.submit(time.sleep, 0.05), dropped.submit(int)]
    threads = [*pool.threads, *dropped.threads]
    del dropped
    assert last[1].result(60) == 0
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_pool_works_once_threads_can_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After as many failures as it has threads, too: a call without a thread would never end."""
    pool, calls = Pool(2, "test"), list[int]()

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="can't start"):
                pool.submit(calls.append, 1)
    assert pool.submit(len, "abc").result(timeout=60) == 3
    assert calls == [], "what was refused does not run later"
    pool.close()
