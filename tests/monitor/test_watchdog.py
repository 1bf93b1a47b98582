"""The watchdog with a fake clock; tests/runs/test_waits.py has real runs that hang."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vesuvius.monitor.watchdog import Watchdog

STALL_S = 300.0


class Watched:
    """A watchdog with a clock controlled by the test, and its records."""

    def __init__(self, tmp_path: Path, stall_s: float = STALL_S, record: Callable[..., None] | None = None) -> None:
        self.seconds = 0.0
        self.records: list[dict[str, Any]] = []
        self.stacks = tmp_path / "stacks"
        self.dog = Watchdog(stall_s, self.stacks, record or self._record, lambda: (12, 1000), lambda: self.seconds)

    def _record(self, kind: str, **fields: Any) -> None:
        self.records.append({"kind": kind, **fields})

    def look_for(self, seconds: float) -> None:
        """Once a second."""
        for _ in range(int(seconds)):
            self.seconds += 1
            self.dog.sample()


@pytest.fixture
def watched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Watched:
    caplog.set_level(logging.INFO, "vesuvius")
    return Watched(tmp_path)


def test_each_stall_logs_one_error_and_one_recovery(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        watched.dog.expects("batch", lambda: "regions to be read, for sample 48 on")
        watched.look_for(STALL_S - 1)
        assert caplog.records == []
        watched.look_for(5 * STALL_S)
        (error,) = caplog.records
        assert error.levelname == "ERROR"
        assert error.getMessage().startswith(
            "Verdict step 12/1000 hung: no batch for 5.0 min: waiting for regions to be read, for sample 48 on; stacks"
        )
        caplog.clear()
        watched.dog.expects("step", "the network to compute it")
        watched.look_for(2)
        (info,) = caplog.records
        assert (info.levelname, "the wait for a batch is over" in info.getMessage()) == ("INFO", True)
        caplog.clear()
    kinds = [(record["kind"], record.get("event")) for record in watched.records]
    assert kinds == 2 * [("verdict", None), ("event", "hung"), ("event", "recovered")]


def test_a_hang_is_reported_even_if_its_cause_cannot_be_told(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.dog.expects("batch", lambda: str(1 // 0))
    watched.look_for(2 * STALL_S)
    (error,) = caplog.records
    assert "waiting for an unknown cause (ZeroDivisionError: " in error.getMessage()
    assert [record["kind"] for record in watched.records] == ["verdict", "event"]


def test_the_stacks_of_all_threads_are_kept(watched: Watched) -> None:
    watched.look_for(STALL_S)
    (path,) = watched.stacks.iterdir()
    text = path.read_text()
    assert "MainThread" in text
    assert "test_the_stacks_of_all_threads" in text, "the frame of this test, from another thread"
    assert watched.records[0]["stacks"] == f"stacks/{path.name}"


def test_a_hung_disk_does_not_keep_the_watchdog_from_reporting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event is what Prometheus counts."""
    monkeypatch.setattr("vesuvius.monitor.watchdog._WITHIN_S", 0.1)
    answers, begun = threading.Event(), []

    def record(kind: str, **fields: Any) -> None:
        begun.append(fields.get("event", kind))
        answers.wait(60)

    class Hung(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            begun.append(record.levelname)
            answers.wait(60)

    hung, watched = Hung(), Watched(tmp_path, record=record)
    logging.getLogger("vesuvius").addHandler(hung)
    try:
        watched.look_for(STALL_S)
        assert {"ERROR", "verdict", "hung"} <= set(begun)
    finally:
        answers.set()
        logging.getLogger("vesuvius").removeHandler(hung)


def test_a_stopped_process_does_not_count_as_hung(watched: Watched) -> None:
    """SIGSTOP and SIGCONT: only the clock continued."""
    watched.dog.expects("batch", "the readers")
    watched.seconds += 10 * STALL_S
    watched.look_for(STALL_S - 1)
    assert watched.records == []
    watched.look_for(2)
    assert len(watched.records) == 2
