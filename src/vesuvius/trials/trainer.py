"""A process of `vesuvius train` that is measured: what it has written, how it has ended, and why."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from vesuvius.config import Config
from vesuvius.config.load import dump_config
from vesuvius.config.trial import NEVER, trial_config
from vesuvius.errors import EXIT_DATA, EXIT_GPU_MEMORY, EXIT_GUARD, StorageError, one_line
from vesuvius.monitor.postmortem.death import headline
from vesuvius.monitor.postmortem.post_mortem import record_run_death
from vesuvius.monitor.recent import read_recent
from vesuvius.monitor.run_files import Tail
from vesuvius.runlog.records import Record
from vesuvius.trials.ended import Ended
from vesuvius.trials.process import TrialProcess, last_words

_CAUSE_LENGTH = 400
# A trainer that lives writes a sample of its memory this often at least.
_WRITES_WITHIN_S = 10.0
_WHOLE_FILE = 2**30
# With less free space than this, the log may not contain the cause of a failure.
_DISK_FULL_BYTES = 2**20
_KILLED_IN_CONTAINER = 128 + signal.SIGKILL
_STORAGE_ERROR = re.compile(r"must fit on the disk|the run directory must be writable")


@dataclass
class Trainer:
    """A trainer process and what it has written."""

    process: TrialProcess
    run: Path
    log: Path
    tail: Tail
    guard_text: str = ""  # of the first event of its memory guard; '' = none

    @classmethod
    def start(cls, config: Config, directory: Path, lock_fd: int | None, *, takes_commands: bool) -> Self:
        """Start it; `takes_commands` = of a tune.  Raises OSError where the directory cannot be written."""
        directory.mkdir(parents=True, exist_ok=True)
        run, source, log = (directory / f"{config.name}{suffix}" for suffix in ("", ".yaml", ".log"))
        source.write_text(dump_config(config), encoding="utf-8")
        command = [sys.executable, "-m", "vesuvius.train", "--config", str(source)]
        command += ["--tune-worker"] if takes_commands else []
        process = TrialProcess(command, log, {"VESUVIUS_RUNS": str(directory.resolve())}, lock_fd, takes_commands)
        return cls(process, run, log, Tail(run / "metrics.jsonl", _WHOLE_FILE))

    def new_records(self) -> list[Record]:
        """What it has written since the last call.  Takes note of the guard."""
        records = self.tail.new()
        for record in records:
            # A checkpoint saved for the growth of others says nothing of the setting.
            if record["kind"] == "event" and record["event"] == "guard" and record.get("rung") != "save":
                self.guard_text = self.guard_text or record["text"] or "the memory guard acted"
        return records

    def close(self) -> None:
        """Kill it and all that it started; its checkpoint is of no use."""
        self.process.__exit__()
        shutil.rmtree(self.run / "checkpoints", ignore_errors=True)

    def fail(self, elapsed_s: float) -> tuple[Ended, str, int | None]:
        """Close it, as it gave no result in this time: how it ended, why in a line, and the memory that was last seen.

        Raises:
            StorageError: it could not write to the disk.
        """
        has_ended = self.process.wait(0)
        ram_bytes = self._last_ram_bytes(since=time.time() - elapsed_s)
        ended: Ended = "timeout"
        cause = f"no result within {elapsed_s:.0f} s; {self._waits_for()}"
        self.close()
        if self.guard_text or has_ended:
            ended, cause = self._end()
            self._check_storage(cause)
        return ended, one_line(cause, _CAUSE_LENGTH), ram_bytes

    def _end(self) -> tuple[Ended, str]:
        """How it has ended, and why."""
        code = self.process.code
        if self.guard_text or code == EXIT_GUARD:
            return "guard", self.guard_text or self._last_error()
        assert code is not None, "it has ended"
        if code == EXIT_GPU_MEMORY:
            return "gpu_memory", self._last_error()
        if code < 0 or code == _KILLED_IN_CONTAINER:
            return "killed", self._death(code)
        return "failed", f"{self._last_error()} (exit code {code})"

    def _waits_for(self) -> str:
        """What it did last, in words."""
        moments = read_recent(self.run / "recent.jsonl")
        if not moments:
            return "it has not begun to train"
        last = moments[-1]
        if time.time() - last.time > _WRITES_WITHIN_S:
            return f"it has written nothing for {time.time() - last.time:.0f} s"
        return f"it has been waiting for: {last.awaits}, for {last.silent_s or 0.0:.0f} s"

    def _last_ram_bytes(self, since: float) -> int | None:
        """Peak of the last seconds before its end."""
        with suppress(OSError):
            seen = [moment.used_bytes for moment in read_recent(self.run / "recent.jsonl") if moment.time >= since]
            return max(seen, default=None)
        return None

    def _check_storage(self, cause: str) -> None:
        """Raise StorageError if it ended because it could not write to the disk."""
        if self.process.code != EXIT_DATA:
            return
        if _STORAGE_ERROR.search(cause) or shutil.disk_usage(self.log.parent).free < _DISK_FULL_BYTES:
            raise StorageError(
                f"a trial must be able to write to the disk; got, in {self.log}: {one_line(cause, _CAUSE_LENGTH)}; "
                "free some space and continue with --resume"
            )

    def _death(self, code: int) -> str:
        """What killed it, with evidence."""
        by = "killed"
        with suppress(ValueError):  # most real-time signals have no name
            by = f"killed by {signal.Signals(-code).name}" if code < 0 else by
        try:
            death = record_run_death(self.run)
        except OSError as error:
            return f"{by}; its post-mortem cannot be kept: {error}"
        return f"{by} before its first step" if death is None else "; ".join([headline(death), *death.evidence])

    def _last_error(self) -> str:
        return last_words(self.log.read_text(encoding="utf-8", errors="replace"))


def next_number(directory: Path) -> int:
    """The number of the next trainer in a directory."""
    return max((int(path.stem) for path in directory.glob("*.yaml") if path.stem.isdecimal()), default=-1) + 1


def trainer_config(config: Config, number: int) -> Config:
    """Return the config of a trainer: without an end, quiet, with dense samples of the memory.  Pure.

    Each trainer has a seed of its own and therefore reads other regions: otherwise a later one would find the data of
    an earlier one in the page cache or in `data.store.cache_dir` and appear faster.  The guard ends it at
    `monitor.shrink_at`, where it would only make readers smaller in a run: a setting that has to be reduced is not
    recommended.  Its weights are worthless, and hardly move.

    Raises:
        ValidationError: the config is invalid.
    """
    at = config.monitor.shrink_at
    training = {
        "steps_per_epoch": NEVER,
        "epochs": 1,
        "max_steps": None,
        "keep_last": 1,
        "validate_every": NEVER if config.training.validate_every else 0,
        "validate_patches": config.training.train_batch_size,
        "lr": min(config.training.lr, 1e-6),
        "max_nonfinite": NEVER,
    }
    monitor = {
        "verdict_every": NEVER,
        "sample_every_s": 0.5,
        "write_every_s": 1.0,
        "guard": "act",
        "exit_at": at,
    }
    seed = int(np.random.default_rng((config.seed, number)).integers(2**31))
    return trial_config(config, f"{number:03d}", training, monitor, seed=seed)
