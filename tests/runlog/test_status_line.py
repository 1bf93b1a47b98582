"""The status line on a real pty: below the log, rewritten in place, gone at the end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.terminal import output_on_a_terminal, screen

_START = """
import fcntl, logging, os, struct, sys, termios
from vesuvius.runlog import logfile
logfile._REDRAW_S = 0.0
logfile.log_to_terminal()
log = logging.getLogger("vesuvius.x")
def step(status):
    log.info("Train step", extra={"status": status})
def end():
    print()  # keeps what the last line shows
    os._exit(0)
"""


def lines_of(body: str, cwd: Path, columns: int = 40) -> list[str]:
    """Lines on the screen of a program, without their times."""
    code, output = output_on_a_terminal([sys.executable, "-c", _START + body], cwd, columns=columns)
    assert code == 0, output
    return [re.sub(r"^[\d-]+ [\d:]+ ", "", line) for line in screen(output, columns)]


def test_the_status_line_stays_below_the_log(tmp_path: Path) -> None:
    """Each is shorter than the one before, whose rest must not stay."""
    body = """
step("a" * 30)
log.info("one")
step("b" * 20)
log.warning("two")
step("c" * 10)
end()
"""
    assert lines_of(body, tmp_path) == ["INFO one", "WARNING two", "c" * 10]


def test_the_status_line_is_cut_to_the_columns_also_after_a_resize(tmp_path: Path) -> None:
    """A wider one would wrap, and leave its first row behind each time it is rewritten."""
    body = """
step("a" * 90)
step("b" * 90)
fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 30, 0, 0))
step("c" * 90)
end()
"""
    assert lines_of(body, tmp_path) == ["c" * 29]
    assert lines_of(body.replace("40, 30", "40, 0"), tmp_path, columns=79) == ["c" * 79], "0: unknown to the system"


@pytest.mark.parametrize("last", ["logfile.close_logs()", "log.error('bad')", "logfile.close_terminal()"])
def test_nothing_of_the_status_line_is_left_at_the_end(last: str, tmp_path: Path) -> None:
    """An error may be the last line of a process, which then ends at once."""
    assert lines_of(f"step('a' * 20)\n{last}\nend()", tmp_path) == (["ERROR bad"] if "bad" in last else [])


def test_without_a_terminal_each_step_is_a_line(tmp_path: Path) -> None:
    code = _START + "step('a')\nlog.info('one')\nlogfile.close_logs()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert [line[20:] for line in done.stdout.splitlines()] == ["INFO Train step", "INFO one"]
