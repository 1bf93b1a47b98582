"""A process that is measured and its children, in their own session, ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from vesuvius.errors import EXIT_INTERRUPTED, VesuviusError
from vesuvius.monitor.probes.processes import read_process

Ended = Literal["ok", "guard", "gpu_memory", "killed", "failed", "timeout"]
"""How a measurement ends."""


# Makes the kernel's OOM killer prefer it to other processes.
_OOM_SCORE = "500"
# SIGKILL works at once, unless a process waits in the kernel for a disk or a driver.
GONE_WITHIN_S = 10.0
_POLL_EVERY_S = 0.05


class TrialInterrupted(VesuviusError):  # noqa: N818 - not an error
    """The measurement in hand was given up together with the tune or the bench."""

    exit_code = EXIT_INTERRUPTED


class TrialProcess:
    """A running command.  A context manager that kills all processes of its session on exit.

    Ctrl-C at the terminal does not reach it, because it has its own session.

    Args:
        command: its words.
        log: file for its output.
        environment: variables beside those of this process.
        lock_fd: descriptor that it keeps open; None = none.
        takes_commands: whether `tell` reaches it.

    Raises:
        OSError: the log cannot be written, or the program is not there.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        lock_fd: int | None,
        takes_commands: bool = False,
    ) -> None:
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=os.environ | environment,
                stdin=subprocess.PIPE if takes_commands else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=() if lock_fd is None else (lock_fd,),
            )
        with suppress(OSError):  # not Linux, or the process has ended
            Path(f"/proc/{self.pid}/oom_score_adj").write_text(_OOM_SCORE)

    def __enter__(self) -> TrialProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait(GONE_WITHIN_S)
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    @property
    def pid(self) -> int:
        """Its process id, also the id of the session."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code, or minus the number of the signal that killed it; None while it runs."""
        return self._process.returncode

    def wait(self, seconds: float) -> bool:
        """Wait at most this long for its end; return whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    def tell(self, line: bytes) -> None:
        """Give it a command; one that has ended does not hear it."""
        assert self._process.stdin is not None, "it takes commands"
        with suppress(OSError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def kill(self) -> None:
        """Kill until no process is left, because a killed one may just have started another.

        Readers of a killed trainer would live for another minute, with all their memory.
        """
        give_up = time.monotonic() + GONE_WITHIN_S
        while (pids := _living_in_session(self.pid)) and time.monotonic() < give_up:
            for pid in pids:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_EVERY_S)


def _living_in_session(session: int) -> list[int]:
    """Return the processes of a session without zombies, including other process groups, such as Ray's daemons."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, PermissionError):
            pid = int(path.name)
            if os.getsid(pid) == session and read_process(pid) is not None:
                found.append(pid)
    return found
