"""Signals at awkward times, with real Ray readers, as sent by a terminal or a scheduler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.forked import in_child
from vesuvius.runlog.records import read_records
from vesuvius.training.stop import StopRequest

LONG_RUN = {"epochs": 1000, "workers": 2}


@contextmanager
def start(config: Path, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """`vesuvius train` in its own process group, as from a shell; killed if it outlives the test."""
    process = fork_server.Popen(
        [sys.executable, "-m", "vesuvius.train", "--config", str(config)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the run ended with {process.wait()} before it said {text!r}")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_ray_starts_stops_the_run(
    tiny_config: Callable[..., Path], tmp_path: Path, number: signal.Signals
) -> None:
    with start(tiny_config(training=LONG_RUN), tmp_path) as process:
        wait_for(process, "INFO model")  # Ray is started next, which takes seconds and takes the handler of SIGTERM
        try:
            process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
        output, _ = process.communicate(timeout=120)
    expected = 75 if number == signal.SIGTERM else 130
    assert process.returncode == expected, output
    assert "Traceback" not in output
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
