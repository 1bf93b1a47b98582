"""Measures settings in one living trainer, which is started anew only where the network's side of a setting changes.

The trainer is a process of `vesuvius train` that takes commands (`worker.py`) and writes its results into its run
directory.  One that dies does not end the tune: what is left of it is killed, and the cause goes into the `Block`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from vesuvius.config import Config
from vesuvius.errors import one_line
from vesuvius.experiments.process import TrialInterrupted
from vesuvius.experiments.trainer import Trainer, next_number, trainer_config
from vesuvius.experiments.tune.measurement import READER_KNOBS, Block, BlockKind, Command, Setting, trainer_knobs

_POLL_S = 0.05


class TrialRunner:
    """A `Runner` with at most one trainer process.  A context manager, which ends it.

    Args:
        config: of the tune.
        directory: of the trainers: `NNN` is the run directory of one, with its config and its log beside it.
        lock_fd: descriptor that a trainer keeps open; None = none.
    """

    def __init__(self, config: Config, directory: Path, *, lock_fd: int | None = None) -> None:
        self._config, self._directory, self._lock_fd = config, directory, lock_fd
        self._trainer: Trainer | None = None
        self._in_force = Setting.of(config)
        self._commands = 0
        self._stopped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def stop(self) -> None:
        """Give up the block in hand: `measure` kills the trainer and raises TrialInterrupted, now and from now on.

        May be called from a signal handler or another thread.  Does not wait.
        """
        self._stopped = True

    def measure(self, setting: Setting, kind: BlockKind, seconds: float, limit_s: float) -> Block:
        """As `Runner` says.  A trainer that gives no result in time is killed.

        Raises:
            TrialInterrupted: `stop` was called.
            OSError: the runner could not write to the disk.
        """
        began, needs_start = time.monotonic(), self._needs_start(setting)
        force = setting
        if kind == "step":  # steps alone need no readers: these stay as they are, or are not started
            readers = {"workers": 0} if needs_start else {k: getattr(self._in_force, k) for k in READER_KNOBS}
            force = replace(setting, **readers)
        try:
            trainer = self._started(force) if needs_start or self._trainer is None else self._trainer
        except ValidationError as error:
            found = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            return Block(setting, kind, "failed", one_line(f"the config is invalid: {found}"), 0.0)
        self._commands += 1
        command = Command(self._commands, kind, seconds, force.workers, force.prefetch_factor, force.requests)
        trainer.process.tell(command.line())
        block = self._result(trainer, Block(setting, kind, "ok", "", 0.0), began, limit_s)
        if block.ended == "ok":  # what it refused is not in force
            self._in_force = force
        return block if force == setting else replace(block, ram_bytes=None)

    def _result(self, trainer: Trainer, block: Block, began: float, limit_s: float) -> Block:
        """Wait for the result of a block, which is given without figures; the trainer ends unless it has one."""
        try:
            while True:
                if self._stopped:
                    raise TrialInterrupted("the tune was interrupted while it measured; continue with --resume")
                has_ended = trainer.process.wait(_POLL_S)  # first: what it wrote before its end is read then
                blocks = [record for record in trainer.new_records() if record["kind"] == "block"]
                record = next((record for record in blocks if record["number"] == self._commands), None)
                elapsed_s = time.monotonic() - began
                if record is not None and record["refused"]:
                    return replace(block, ended="failed", cause=record["refused"], seconds=elapsed_s)
                if record is not None:
                    return replace(block, seconds=elapsed_s, **record["figures"])
                if trainer.guard_text or has_ended or elapsed_s >= limit_s:
                    break
        except BaseException:
            self._end()
            raise
        self._trainer = None
        ended, cause = trainer.fail(elapsed_s)
        return replace(block, ended=ended, cause=cause, seconds=time.monotonic() - began)

    def _needs_start(self, setting: Setting) -> bool:
        trainer = self._trainer
        return trainer is None or trainer.process.wait(0) or trainer_knobs(setting) != trainer_knobs(self._in_force)

    def _started(self, setting: Setting) -> Trainer:
        """A new trainer.  Raises ValidationError where the setting does not fit the config."""
        config = trainer_config(setting.applied_to(self._config), next_number(self._directory))
        self._end()
        self._trainer = Trainer.start(config, self._directory, self._lock_fd, takes_commands=True)
        self._in_force = setting
        return self._trainer

    def _end(self) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close()
