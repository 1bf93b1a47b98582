"""Signals at awkward times, with real Ray readers, as sent by a terminal or a scheduler."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.forked import in_child
from tests.support.kill_harness import Session
from tests.support.runs import WriteConfig
from vesuvius.runlog.records import read_records
from vesuvius.training.stop import StopRequest


@pytest.mark.long
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_while_ray_starts_stops_the_run(
    tiny_config: WriteConfig, tmp_path: Path, number: signal.Signals, expected: int
) -> None:
    with Session(tiny_config(training={"epochs": 1000, "workers": 2}), tmp_path) as session:
        session.wait_for("INFO model")  # Ray is started next, which takes seconds and takes the handler of SIGTERM
        time.sleep(1)
        session.process.send_signal(number)
        assert session.end() == expected, session.text()
        assert "Traceback" not in session.text()
    assert read_records(tmp_path / "runs/tiny/metrics.jsonl")[-1]["exit_code"] == expected


def test_the_first_signal_after_the_time_limit_is_not_a_second_one(tmp_path: Path) -> None:
    def act() -> None:
        with StopRequest(max_hours=0) as stop:
            assert stop.is_requested()
            os.kill(os.getpid(), signal.SIGTERM)
            (tmp_path / "saves").write_text(str(stop.exit_code))
            os.kill(os.getpid(), signal.SIGTERM)

    assert in_child(act) == -signal.SIGTERM
    assert (tmp_path / "saves").read_text() == "75"
