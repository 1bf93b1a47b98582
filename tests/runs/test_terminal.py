"""What `vesuvius train` shows on a terminal, and that a pipe or a file in its place gets plain lines."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support import fork_server
from tests.support.runs import WriteConfig


def train_command(config: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "vesuvius.train", "--config", str(config), *arguments]


def output_on_a_terminal(
    command: list[str], cwd: Path, interrupt_at: Callable[[str], bool] = lambda shown: False
) -> str:
    """Run a command on a terminal of 80 columns, to its end; all it wrote.

    `interrupt_at`: whether it is time for what a terminal sends on Ctrl-C, from what is shown.
    """
    environment = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES", "NO_COLOR"}}
    master, slave = pty.openpty()
    written, interrupted = bytearray(), False
    with fork_server.Popen(
        command, cwd=cwd, env=environment | {"TERM": "xterm-256color"}, stdout=slave, stderr=slave
    ) as process:
        os.close(slave)
        try:
            while block := os.read(master, 4096):
                written += block
                if not interrupted and interrupt_at(written.decode("utf-8", "replace")):
                    process.send_signal(signal.SIGINT)
                    interrupted = True
        except OSError:  # Linux: nobody has the terminal open any more
            pass
        finally:
            os.close(master)
    assert process.returncode == 0, written.decode()
    return written.decode()


def test_on_a_terminal_lines_are_neither_broken_nor_coloured(tiny_config: WriteConfig, tmp_path: Path) -> None:
    text = output_on_a_terminal(train_command(tiny_config(), "training.max_steps=4"), tmp_path)
    log_lines = (tmp_path / "runs/tiny/logs/train_full.log").read_text().splitlines()
    steps = [line for line in log_lines if "Train step" in line]
    assert len(steps) == 4
    assert min(map(len, steps)) > 80, "longer than the terminal is wide, or this test shows nothing"
    for line in log_lines:
        assert line + "\r\n" in text, line
    assert "\x1b" not in text


def test_a_reader_that_leaves_gets_no_traceback_and_the_run_goes_on(tiny_config: WriteConfig, tmp_path: Path) -> None:
    command = train_command(tiny_config(), "training.max_steps=4")
    with fork_server.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        error = process.stderr.read()
    assert error == ""
    assert process.returncode == 0
    assert "done: step 4" in (tmp_path / "runs/tiny/logs/train_full.log").read_text()


def test_a_printed_config_whose_reader_leaves_is_no_error(tiny_config: WriteConfig, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as pipe:
        done = fork_server.run(
            train_command(tiny_config(), "--print-config"),
            cwd=tmp_path,
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (0, "")
