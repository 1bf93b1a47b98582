"""The terminal of a run closes: real terminals, with signals delivered by the kernel, `nohup` and torchrun."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server
from tests.support.kill_harness import Session
from tests.support.runs import WriteConfig
from vesuvius.runlog.records import read_records
from vesuvius.training.checkpoint.format import list_checkpoints, step_of

# Takes the terminal at its standard input for its own, as the shell that `ssh` starts does for its commands.
TRAIN = """
import fcntl, signal, sys, termios
{first}
from vesuvius.commands import train
train.main()
"""
OWN_TERMINAL = "fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
NOHUP = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"


@contextmanager
def on_a_terminal(config: Path, cwd: Path, first: str) -> Iterator[tuple[Any, int]]:
    """A training and its terminal; its session is killed if it outlives the test."""
    master, slave = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "LINES", "NO_COLOR"}}
    process = fork_server.Popen(
        [sys.executable, "-c", TRAIN.format(first=first), "--config", str(config)],
        cwd=cwd,
        env=environment | {"TERM": "xterm"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield process, master
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def close_at_step(master: int, step: int) -> str:
    """Close a terminal once it shows this step or a later one, as fast steps are not all shown; returns all output."""
    shown = ""
    while max(map(int, re.findall(r"step (\d+)/", shown)), default=0) < step:
        shown += os.read(master, 4096).decode("utf-8", "replace")
    os.close(master)
    return shown


def run_end(run: Path) -> dict[str, Any]:
    record = read_records(run / "metrics.jsonl")[-1]
    assert record["kind"] == "run_end"
    return record


@pytest.mark.long
def test_closing_the_terminal_stops_a_run_with_ray_readers_like_sigterm(
    tiny_config: WriteConfig, tmp_path: Path
) -> None:
    """The kernel's SIGHUP reaches the trainer, its readers and Ray's daemons, and all later output fails."""
    config = tiny_config(training={"epochs": 1000, "save_every": 10_000, "workers": 1})
    with on_a_terminal(config, tmp_path, OWN_TERMINAL) as (process, master):
        shown = close_at_step(master, 40)  # beyond the regions that the trainer reads
        assert process.wait(timeout=120) == 75
    assert "samples/s" in shown
    run = tmp_path / "runs/tiny"
    (checkpoint,) = list_checkpoints(run / "checkpoints")
    end, log = run_end(run), (run / "logs/train_full.log").read_text()
    assert (end["exit_code"], end["cause"], end["step"]) == (75, "SIGHUP", step_of(checkpoint))
    assert "Traceback" not in log
    assert "worker" not in "".join(line for line in log.splitlines() if " WARNING " in line or " ERROR " in line)


@pytest.mark.parametrize("first", [f"{OWN_TERMINAL}; {NOHUP}", pytest.param("", marks=pytest.mark.long)])
def test_with_nohup_or_only_failing_output_the_run_continues(
    tiny_config: WriteConfig, tmp_path: Path, first: str
) -> None:
    """The second case is that of `setsid` or `disown`.  Progress bar, log and final output each get an EIO."""
    with on_a_terminal(tiny_config(training={"max_steps": 12}), tmp_path, first) as (process, master):
        close_at_step(master, 1)
        assert process.wait(timeout=120) == 0
    assert run_end(tmp_path / "runs/tiny")["step"] == 12


def test_simultaneous_signals_at_the_end_of_a_session_are_one_request(tiny_config: WriteConfig, tmp_path: Path) -> None:
    """From kernel and shell, then from systemd."""
    signals = (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM)
    with Session(tiny_config(training={"epochs": 1000}), tmp_path) as session:
        session.wait_for("Train step 2/")
        for number in signals:
            session.process.send_signal(number)
        assert session.end() == 75, session.text()
    assert len(list_checkpoints(tmp_path / "runs/tiny/checkpoints")) == 1
    assert run_end(tmp_path / "runs/tiny")["cause"] in [number.name for number in signals]


LATE = """
import os, signal
from vesuvius.training.stop import StopRequest
with StopRequest(None):
    os.kill(os.getpid(), signal.SIGHUP)
os.kill(os.getpid(), signal.SIGHUP)
print("writes its last line")
"""


def test_a_late_signal_does_not_interrupt_the_work_after_the_stop() -> None:
    done = fork_server.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "writes its last line\n"), done.stderr


@pytest.mark.long
def test_ranks_save_if_torchrun_forwards_the_signal_even_with_nohup(tiny_config: WriteConfig, tmp_path: Path) -> None:
    """torchrun handles SIGHUP even if it is ignored, and would kill ranks that continue."""
    config = tiny_config(training={"epochs": 1000, "ranks": 1})
    torchrun = ("nohup", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "-m", "vesuvius.train")
    output = tmp_path / "output"
    with output.open("w") as out:
        process = subprocess.Popen(
            [*torchrun, "--config", str(config)], cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT
        )
    log = tmp_path / "runs/tiny/logs/train_full.log"
    while "Train step 2/" not in (log.read_text() if log.exists() else ""):
        assert process.poll() is None, output.read_text()
    process.send_signal(signal.SIGHUP)
    process.wait(timeout=60)
    assert run_end(tmp_path / "runs/tiny")["exit_code"] == 75
    assert list_checkpoints(tmp_path / "runs/tiny/checkpoints")
