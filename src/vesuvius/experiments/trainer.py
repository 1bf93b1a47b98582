"""A process of `vesuvius train` that is measured: what it has written, how it has ended, and why."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from vesuvius.config import Config
from vesuvius.config.experiment import NEVER, trial_config
from vesuvius.config.load import dump_config
from vesuvius.errors import EXIT_GPU_MEMORY, EXIT_GUARD, one_line
from vesuvius.experiments.process import Ended, TrialInterrupted, TrialProcess
from vesuvius.monitor.post_mortem import headline, record_run_death
from vesuvius.monitor.run_files import Tail
from vesuvius.runlog.records import Record

_POLL_S = 0.05
_CAUSE_LENGTH = 400
_WHOLE_FILE = 2**30
_ERROR_LINE = re.compile(r"^\S+ \S+ (?:ERROR|CRITICAL) (.+)$", re.MULTILINE)
_KILLED_IN_CONTAINER = 128 + signal.SIGKILL


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

    def watch(self, take: Callable[[Record], bool], limit_s: float, stopping: Callable[[], bool]) -> tuple[Ended, str]:
        """Give `take` each new record until it returns true; else close it, and say how it ended and why, in a line.

        Raises:
            TrialInterrupted: `stopping` came true; it is closed.
        """
        began = time.monotonic()
        try:
            while True:
                if stopping():
                    raise TrialInterrupted("interrupted while it measured; continue with --resume")
                has_ended = self.process.wait(_POLL_S)  # first: what it wrote before its end is read then
                if any(take(record) for record in self.new_records()):
                    return "ok", ""
                elapsed_s = time.monotonic() - began
                if has_ended or self.guard_text or elapsed_s >= limit_s:
                    break
        except BaseException:
            self.close()
            raise
        self.close()
        ended: Ended = "timeout"
        cause = f"no result within {elapsed_s:.0f} s"
        if has_ended or self.guard_text:
            ended, cause = self._end()
        return ended, one_line(cause, _CAUSE_LENGTH)

    def close(self) -> None:
        """Kill it and all that it started; its checkpoint is of no use."""
        self.process.__exit__()
        shutil.rmtree(self.run / "checkpoints", ignore_errors=True)

    def _end(self) -> tuple[Ended, str]:
        code = self.process.code
        assert code is not None, "it has ended"
        if self.guard_text or code == EXIT_GUARD:
            return "guard", self.guard_text or self._last_error()
        if code == EXIT_GPU_MEMORY:
            return "gpu_memory", self._last_error()
        if code < 0 or code == _KILLED_IN_CONTAINER:
            return "killed", self._death(code)
        return "failed", f"{self._last_error()} (exit code {code})"

    def _death(self, code: int) -> str:
        """What killed it, with evidence."""
        with suppress(OSError):
            if death := record_run_death(self.run):
                return "; ".join([headline(death), *death.evidence])
        return f"killed by signal {-code}" if code < 0 else "killed"

    def _last_error(self) -> str:
        """Its last error line, else its last line: for a message only, as libraries warn on the way out."""
        said = self.log.read_text(encoding="utf-8", errors="replace").strip()
        return str((_ERROR_LINE.findall(said) or said.splitlines() or ["it printed nothing"])[-1]).strip()


def next_number(directory: Path) -> int:
    """The number of the next trainer in a directory."""
    return max((int(path.stem) for path in directory.glob("*.yaml") if path.stem.isdecimal()), default=-1) + 1


def trainer_config(config: Config, number: int) -> Config:
    """Return the config of a trainer: without an end, quiet, with dense samples of the memory.  Pure.

    Each trainer has a seed of its own and therefore reads other regions: otherwise a later one would find the data of
    an earlier one in the page cache or in `data.store.cache_dir` and appear faster.  The first action of its guard ends
    it, also where that would only make readers smaller in a run: a setting that has to be reduced is not recommended.
    Its weights are worthless, and hardly move.

    Raises:
        ValidationError: the config is invalid.
    """
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
        "guard": "act",
    }
    seed = int(np.random.default_rng((config.seed, number)).integers(2**31))
    return trial_config(config, f"{number:03d}", training, monitor, seed=seed)
