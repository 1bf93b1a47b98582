"""Long operations log their progress, short ones do not."""

from __future__ import annotations

import logging
import re
import threading
import time

import pytest

from vesuvius.runlog import progress
from vesuvius.runlog.progress import with_progress


def threads() -> int:
    return sum(thread.name == "progress" for thread in threading.enumerate())


def test_progress_is_logged_during_one_long_item(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)
    caplog.set_level(logging.INFO)
    for number in with_progress(range(2), "doing it", 2):
        before = len(caplog.messages)
        while len(caplog.messages) < before + 2:
            time.sleep(0.005)
        assert caplog.messages[-1].startswith(f"doing it: {number} of 2")
    assert caplog.messages[-1].startswith("doing it: done, 2 in ")


@pytest.mark.parametrize("ends", ["all are taken", "an error"])
def test_a_closed_progress_logs_nothing_more(caplog: pytest.LogCaptureFixture, ends: str) -> None:
    caplog.set_level(logging.INFO)
    before = threads()
    items = with_progress(range(3), "doing it")
    if ends == "an error":
        assert next(iter(items)) == 0
        with pytest.raises(RuntimeError):
            items.throw(RuntimeError())  # type: ignore[attr-defined]
    else:
        assert list(items) == [0, 1, 2]
    while threads() > before:
        time.sleep(0.005)
    assert not caplog.messages, "what is short is not worth a line"


def test_another_unit_restarts_the_estimate_of_the_time_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)
    caplog.set_level(logging.INFO)

    def line() -> str:
        before = len(caplog.messages)
        while len(caplog.messages) < before + 2:
            time.sleep(0.005)
        return caplog.messages[-1]

    with progress.Progress("copying") as told:
        told.update("chunks", 1, 9, "3 MB/s")
        assert line() == "copying: 1 of 9 chunks, 3 MB/s"
        told.update("chunks", 2, 9)
        assert re.fullmatch(r"copying: 2 of 9 chunks, about \d+ s left", line())
        told.update("levels", 2, 3)
        assert line() == "copying: 2 of 3 levels"
        told.update("levels", 3, 3)
        while not (ended := caplog.messages.count("copying: 3 of 3 levels")):
            time.sleep(0.005)
        time.sleep(0.1)
        assert ended == caplog.messages.count("copying: 3 of 3 levels") == 1, "a phase that has ended is reported once"
