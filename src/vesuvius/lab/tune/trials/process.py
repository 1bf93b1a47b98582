"""The process of a trial and those that it starts: begun in a session of their own, ended all together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from vesuvius.observe.system.processes import read_process

# The kernel then takes a trial before anything else of this machine that is not marked so itself.
_OOM_SCORE = "500"
# SIGKILL is obeyed at once, unless a process waits in the kernel for a disk or a driver that does not answer.
GONE_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.05


class TrialProcess:
    """`vesuvius train` with a config.  A context manager that leaves no process behind that can be killed.

    Ctrl-C at the terminal does not reach it, as it has a session of its own.

    Args:
        config: YAML file.
        log: takes what it prints.
        runs: folder of its run directory.
        lock_fd: descriptor that it is to keep open; None = none.

    Attributes:
        killed: whether `kill` was called.

    Raises:
        OSError: the log cannot be written.
    """

    def __init__(self, config: Path, log: Path, runs: Path, lock_fd: int | None) -> None:
        self.killed = False
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vesuvius.train", "--config", str(config)],
                env=os.environ | {"VESUVIUS_RUNS": str(runs.resolve())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=() if lock_fd is None else (lock_fd,),
            )
        with suppress(OSError):  # not Linux, or it has ended already
            Path(f"/proc/{self.pid}/oom_score_adj").write_text(_OOM_SCORE)

    def __enter__(self) -> TrialProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_session()
        self.wait(GONE_WITHIN_S)

    @property
    def pid(self) -> int:
        """Of the trainer; also the id of the session."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """What the trainer has ended with; minus the number of the signal that killed it; None = it has not ended."""
        return self._process.returncode

    def wait(self, seconds: float) -> bool:
        """Wait for its end, so long at most; returns whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    def ask_to_end(self) -> None:
        """SIGTERM: it finishes its step, saves, and ends its readers."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to it and all that it has started.  Does not wait for ever for their end."""
        self.killed = True
        self._kill_session()

    def _kill_session(self) -> None:
        """Until none is left: what is killed may have started another one just before.

        Readers of a trainer that was killed live on for a minute, with all their memory.
        """
        give_up = time.monotonic() + GONE_WITHIN_S
        while (pids := _living_in_session(self.pid)) and time.monotonic() < give_up:
            for pid in pids:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_EVERY_S)


def _living_in_session(session: int) -> list[int]:
    """Processes of a session, also those in process groups of their own, as Ray's daemons are; no zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, PermissionError):
            pid = int(path.name)
            if os.getsid(pid) == session and read_process(pid) is not None:
                found.append(pid)
    return found
