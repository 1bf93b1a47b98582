"""A process of `vesuvius train` under measurement: its records, how it ended, and why."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

from vesuvius.config import Config
from vesuvius.config.experiment import NEVER, trial_config
from vesuvius.config.load import dump_config
from vesuvius.errors import EXIT_GPU_MEMORY, EXIT_GUARD, one_line
from vesuvius.experiments import Ended
from vesuvius.monitor.post_mortem import headline, record_run_death
from vesuvius.runlog.records import Record, Tail
from vesuvius.training.stop import StoppedError

_OOM_SCORE = "500"  # makes the kernel's OOM killer prefer it to other processes
_GONE_WITHIN_S = 10.0  # SIGKILL works at once, unless a process waits in the kernel for a disk or a driver
_POLL_S = 0.05
_WHOLE_FILE = 2**30
_ERROR_LINE = re.compile(r"^\S+ \S+ (?:ERROR|CRITICAL) (.+)$", re.MULTILINE)
_KILLED_IN_CONTAINER = 128 + signal.SIGKILL


class Trainer:
    """A running trainer and its records.  It has its own session, so Ctrl-C at the terminal does not reach it.

    `directory` gets the run directory NAME, NAME.yaml and NAME.log.  The trainer keeps `lock_fd` open, and reads the
    commands of `tell` if it `takes_commands`.  Raises OSError.
    """

    def __init__(self, config: Config, directory: Path, lock_fd: int | None, *, takes_commands: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.run, source, self._log = (directory / f"{config.name}{suffix}" for suffix in ("", ".yaml", ".log"))
        source.write_text(dump_config(config), encoding="utf-8")
        command = [sys.executable, "-m", "vesuvius.train", "--config", str(source)]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "--tune-worker"] if takes_commands else command,
                env=os.environ | {"VESUVIUS_RUNS": str(directory.resolve())},
                stdin=subprocess.PIPE if takes_commands else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=() if lock_fd is None else (lock_fd,),
            )
        with suppress(OSError):  # not Linux, or the process has ended
            Path(f"/proc/{self._process.pid}/oom_score_adj").write_text(_OOM_SCORE)
        self._tail = Tail(self.run / "metrics.jsonl", _WHOLE_FILE)
        self._guard_text = ""  # of the first event of its memory guard; '' = none

    def wait(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    def tell(self, line: str) -> None:
        """Send the trainer a command; ignored once the trainer has ended."""
        assert self._process.stdin is not None, "it takes commands"
        with suppress(OSError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def watch(self, take: Callable[[Record], bool], limit_s: float, stopping: Callable[[], bool]) -> tuple[Ended, str]:
        """Pass new records to `take` until it returns true; returns how it ended.  Raises StoppedError."""
        began = time.monotonic()
        try:
            while True:
                if stopping():
                    raise StoppedError("interrupted during a measurement")
                has_ended = self.wait(_POLL_S)  # before reading, so that its last records are read too
                if any(take(record) for record in self._new_records()):
                    return "ok", ""
                elapsed_s = time.monotonic() - began
                if has_ended or self._guard_text or elapsed_s >= limit_s:
                    break
        except BaseException:
            self.close()
            raise
        self.close()
        timeout: tuple[Ended, str] = ("timeout", f"no result within {elapsed_s:.0f} s")
        ended, cause = self._end() if has_ended or self._guard_text else timeout
        return ended, one_line(cause, 400)

    def close(self) -> None:
        """Kill the trainer and its children until none is left: a killed process may just have started another.

        Readers of a killed trainer would live for another minute, with all their memory.  Its checkpoints are deleted.
        """
        give_up = time.monotonic() + _GONE_WITHIN_S
        while (pids := _living_in_session(self._process.pid)) and time.monotonic() < give_up:
            for pid in pids:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)
        self.wait(_GONE_WITHIN_S)
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        shutil.rmtree(self.run / "checkpoints", ignore_errors=True)

    def _new_records(self) -> list[Record]:
        records = self._tail.new()
        for record in records:
            if record["kind"] == "event" and record["event"] == "guard":
                self._guard_text = self._guard_text or record["text"] or "the memory guard acted"
        return records

    def _end(self) -> tuple[Ended, str]:
        code = self._process.returncode
        assert code is not None, "it has ended"
        if self._guard_text or code == EXIT_GUARD:
            return "guard", self._guard_text or self._last_error()
        if code == EXIT_GPU_MEMORY:
            return "gpu_memory", self._last_error()
        if code < 0 or code == _KILLED_IN_CONTAINER:
            return "killed", self._death(code)
        return "failed", f"{self._last_error()} (exit code {code})"

    def _death(self, code: int) -> str:
        with suppress(OSError):
            if death := record_run_death(self.run):
                return "; ".join([headline(death), *death.evidence])
        return f"killed by signal {-code}" if code < 0 else "killed"

    def _last_error(self) -> str:
        said = self._log.read_text(encoding="utf-8", errors="replace").strip()
        return str((_ERROR_LINE.findall(said) or said.splitlines() or ["no output"])[-1]).strip()


def _living_in_session(session: int) -> list[int]:
    """The live processes of a session, including other process groups such as Ray's daemons."""
    pids = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                pids.append(pid)
    return pids


def next_number(directory: Path) -> int:
    return max((int(path.stem) for path in directory.glob("*.yaml") if path.stem.isdecimal()), default=-1) + 1


def trainer_config(config: Config, number: int) -> Config:
    """The config of a trainer: endless, quiet, with frequent memory samples.  Pure; raises ValidationError.

    Each trainer has its own seed and therefore reads other regions: otherwise a later one would find the data of an
    earlier one in the page cache or in `data.store.cache_dir` and appear faster.
    """
    training = {
        "steps_per_epoch": NEVER,
        "epochs": 1,
        "max_steps": None,
        "keep_last": 1,
        "validate_every": NEVER if config.training.validate_every else 0,
        "validate_patches": config.training.micro_batch,
        "lr": min(config.training.lr, 1e-6),
        "max_nonfinite": NEVER,
    }
    monitor = {"verdict_every": NEVER, "sample_every_s": 0.5, "guard": "act"}
    seed = int(np.random.default_rng((config.seed, number)).integers(2**31))
    return trial_config(config, f"{number:03d}", training, monitor, seed=seed)
