"""Kills everything a test process has started once that process ends, in whatever way: a timeout (pytest-timeout ends
the process at once), a kill, or an OOM.

All processes started by a test process inherit a mark in their environment, including daemons and their children.  A
helper process waits for its end, without using CPU, and then kills all bearers of the mark.  Linux only; elsewhere
nothing is watched.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "STARTED_BY_TESTS_OF_VESUVIUS"
_QUIET_S = 0.2  # so long no new one has been found


def watch_over_this_process() -> None:
    """Mark all processes started from now on, and have them killed when this process ends."""
    if not hasattr(os, "pidfd_open"):
        return
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    os.environ[MARK] = f"{os.getpid()}.{time.time_ns()}"
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), os.environ[MARK]]
    subprocess.run(command, env=environment, start_new_session=True, check=True)  # it leaves a daemon behind


def bearers_of(mark: str) -> list[int]:
    """Processes that were started with this mark in their environment."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is gone, or somebody else's
            if wanted in (directory / "environ").read_bytes().split(b"\0"):
                found.append(int(directory.name))
    return found


def _wait_for_the_end_of(pid: int) -> None:
    with suppress(ProcessLookupError):
        ended = select.poll()
        ended.register(os.pidfd_open(pid), select.POLLIN)
        ended.poll()


def _kill_bearers_of(mark: str) -> None:
    while bearers := bearers_of(mark):
        for pid in bearers:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_QUIET_S)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    _wait_for_the_end_of(int(sys.argv[1]))
    _kill_bearers_of(sys.argv[2])
