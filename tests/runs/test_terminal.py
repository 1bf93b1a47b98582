"""Output of `vesuvius train` on a terminal; pipes and files get plain lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support import fork_server
from tests.support.runs import WriteConfig
from tests.support.terminal import output_on_a_terminal, screen
from vesuvius.errors import EXIT_INTERRUPTED


def train_command(config: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "vesuvius.train", "--config", str(config), *arguments]


def test_on_a_terminal_steps_are_one_status_line_below_the_log(tiny_config: WriteConfig, tmp_path: Path) -> None:
    command = train_command(tiny_config(), "training.max_steps=8", "monitor.verdict_every=5")
    code, output = output_on_a_terminal(command, tmp_path)
    assert code == 0, output
    log_lines = (tmp_path / "runs/tiny/logs/train_full.log").read_text().splitlines()
    assert sum("Train step" in line for line in log_lines) == 8
    shown = screen(output, columns=1000)  # of the log lines none wraps
    assert [line for line in log_lines if "Train step" not in line] == [line for line in shown if line in log_lines]
    assert not [line for line in shown if "samples/s" in line and line not in log_lines], "left at the end"
    statuses = re.findall(r"\r\x1b\[K(step [^\r]*)", output)
    assert re.fullmatch(r"step 1/8 \(12 %\)( \| [\w. ]+ left)? \| loss \d\.\d{4} \| [\d.]+ samples/s", statuses[0])
    assert max(map(len, statuses)) < 80


def test_ctrl_c_leaves_no_status_line(tiny_config: WriteConfig, tmp_path: Path) -> None:
    command = train_command(tiny_config(), "training.epochs=1000")
    code, output = output_on_a_terminal(command, tmp_path, lambda shown: " samples/s" in shown)
    assert code == EXIT_INTERRUPTED
    log_lines = (tmp_path / "runs/tiny/logs/train_full.log").read_text().splitlines()
    assert not [line for line in screen(output, 1000) if "samples/s" in line and line not in log_lines]


def test_a_closed_pipe_gives_no_traceback_and_the_run_continues(tiny_config: WriteConfig, tmp_path: Path) -> None:
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


def test_a_closed_pipe_while_printing_the_config_is_not_an_error(tiny_config: WriteConfig, tmp_path: Path) -> None:
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
