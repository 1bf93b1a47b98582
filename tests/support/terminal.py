"""A real pty, and the screen resulting from its output."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import termios
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support import fork_server

_TOKEN = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|.|\n")


def output_on_a_terminal(
    command: Sequence[str], cwd: Path, interrupt_at: Callable[[str], bool] = lambda shown: False, columns: int = 80
) -> tuple[int, str]:
    """Run a command to its end on a terminal with `columns` columns; returns exit code and output.

    `interrupt_at`: whether to send Ctrl-C, given the output so far.
    """
    environment = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES", "NO_COLOR"}}
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
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
        except OSError:  # Linux: no process has the terminal open any more
            pass
        finally:
            os.close(master)
    return process.returncode, written.decode()


def screen(output: str, columns: int) -> list[str]:
    """Non-blank lines shown by a terminal with `columns` columns; longer lines wrap."""
    rows, column = [""], 0
    for token in _TOKEN.findall(output.replace("\r\n", "\n")):
        match token:
            case "\n":
                rows.append("")
                column = 0
            case "\r":
                column = 0
            case "\x1b[K":
                rows[-1] = rows[-1][:column]
            case _:
                assert len(token) == 1, token
                if column == columns:
                    rows.append("")
                    column = 0
                rows[-1] = rows[-1][:column].ljust(column) + token + rows[-1][column + 1 :]
                column += 1
    return [row for row in rows if row.strip()]
