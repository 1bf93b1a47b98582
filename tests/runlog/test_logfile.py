"""Messages on stdout, stderr and in the log file, also if one of them cannot be written."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.terminal import output_on_a_terminal, screen
from vesuvius.runlog.files import AppendFile
from vesuvius.runlog.logfile import _TerminalHandler, close_logs, log_to_terminal, open_log

log = logging.getLogger("vesuvius.test")

needs_dev_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a disk that is full")


class Hangup(io.StringIO):
    """A terminal whose window was closed."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    log_to_terminal()
    yield
    close_logs()


def test_warnings_and_errors_go_to_stderr_and_the_rest_to_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        log.log(level, "message")
    out, err = capsys.readouterr()
    assert [line.split()[2] for line in out.splitlines()] == ["INFO"]
    assert [line.split()[2] for line in err.splitlines()] == ["WARNING", "ERROR"]


def test_a_closed_output_is_silenced_and_the_log_file_keeps_the_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    open_log(tmp_path / "log")
    closed = Hangup()
    closed.close()
    for stream in (Hangup(), closed, None):
        monkeypatch.setattr(sys, "stdout", stream)
        log.info("one")
        log.info("two")
        log.warning("three")
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("WARNING three")
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["one", "two", "three"] * 3


@needs_dev_full
def test_a_full_disk_is_logged_once_and_lost_lines_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    open_log(Path("/dev/full"))
    for number in range(3):
        log.info("line %d", number)
    close_logs()
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    full, lost = err.splitlines()
    assert "ERROR cannot write /dev/full: [Errno 28] No space left on device; free some space" in full
    assert "4 lines are lost" in lost, "these three, and the one that says it is full"


def test_a_line_of_a_signal_handler_during_another_write_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python refuses a write to a buffered stream from a handler that interrupted one."""

    class Busy(io.TextIOWrapper):
        def write(self, text: str) -> int:
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    with (tmp_path / "out").open("wb") as file:
        monkeypatch.setattr(sys, "stdout", Busy(file))
        _TerminalHandler().emit(logging.LogRecord("vesuvius", logging.INFO, "", 0, "SIGINT: stopping", None, None))
        assert (tmp_path / "out").read_text() == "SIGINT: stopping\n"


def test_a_line_waiting_for_a_hung_disk_blocks_no_other_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard and watchdog log, too, before they act."""
    writing, goes_on, whole_write = threading.Event(), threading.Event(), AppendFile._write_waiting

    def stalled(file: AppendFile) -> OSError | None:
        writing.set()
        assert goes_on.wait(60)
        return whole_write(file)

    monkeypatch.setattr(AppendFile, "_write_waiting", stalled)
    open_log(tmp_path / "log")
    first, second = (threading.Thread(target=log.warning, args=(f"line {n}",), daemon=True) for n in (1, 2))
    first.start()
    assert writing.wait(60)
    second.start()
    second.join(30)
    held_up = second.is_alive()
    goes_on.set()
    first.join(60)
    second.join(60)
    close_logs()
    assert not held_up
    assert [line.split()[-1] for line in (tmp_path / "log").read_text().splitlines()] == ["1", "2"]


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
