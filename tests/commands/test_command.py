"""How a command's process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.recorded_runs import run_start, step, write_run

STUCK = """
import sys, threading
from vesuvius.commands import cli
def main(argv):
    threading.Thread(target=threading.Event().wait).start()  # as a read of a store that does not answer
    print("printed")
    return int(sys.argv[1])
cli.as_command(main)()
"""


@pytest.mark.parametrize("exit_code", [75])
def test_a_hanging_thread_delays_no_exit_and_keeps_the_exit_code(exit_code: int) -> None:
    command = [sys.executable, "-c", STUCK, str(exit_code)]
    done = fork_server.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (exit_code, "printed\n", "")


@pytest.mark.long
def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs/schriftrolle-日本-ä", [run_start(), step(1)])
    environment = os.environ | {"PYTHONIOENCODING": "ascii:strict", "LC_ALL": "C"}
    for arguments in (["report", run.name], ["日本"]):
        done = subprocess.run(
            [sys.executable, "-m", "vesuvius", *arguments], cwd=tmp_path, env=environment, capture_output=True
        )
        output = (done.stdout + done.stderr).decode("ascii")
        assert "Traceback" not in output, arguments
        assert "Bug in vesuvius" not in output
        assert "\\u65e5\\u672c" in output
    config = run / "config.resolved.yaml"
    command = [sys.executable, "-m", "vesuvius", "train", "--config", str(config), "--print-config"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert f"name: {run.name}" in done.stdout.decode("utf-8"), "it is read back"
