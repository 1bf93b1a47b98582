"""Measures settings in one living trainer, which is started anew only where the network's side of a setting changes.

The trainer is a process of `vesuvius train` that takes commands (`worker.py`) and writes its results into its run
directory.  One that dies does not end the tune: what is left of it is killed, and the cause goes into the `Block`.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from vesuvius.config import Config
from vesuvius.errors import one_line
from vesuvius.experiments.trainer import Trainer, next_number, trainer_config
from vesuvius.experiments.tune.measurement import READER_KNOBS, Block, BlockKind, Setting, trainer_knobs
from vesuvius.runlog.records import Record


class TrialRunner:
    """Measures settings with at most one trainer process.  A context manager, which ends it.

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
        """Bring a setting into force and measure it for about `seconds`, longer where these hold too few steps.

        Args:
            limit_s: after which a trainer that has given no result is killed, and the block is a timeout.

        Raises:
            TrialInterrupted: `stop` was called.
            OSError: the runner could not write to the disk.
        """
        began, force, trainer = time.monotonic(), setting, self._trainer
        starts = trainer is None or trainer.wait(0) or trainer_knobs(setting) != trainer_knobs(self._in_force)
        if kind == "step":  # steps alone need no readers: these stay as they are, or are not started
            readers = {"workers": 0} if starts else {k: getattr(self._in_force, k) for k in READER_KNOBS}
            force = replace(setting, **readers)
        if starts or trainer is None:
            try:
                config = trainer_config(force.applied_to(self._config), next_number(self._directory))
            except ValidationError as error:
                return Block(setting, kind, "failed", one_line(error, 400), 0.0)
            self._end()
            trainer = self._trainer = Trainer(config, self._directory, self._lock_fd, takes_commands=True)
            self._in_force = force
        self._commands += 1
        command = {"number": self._commands, "kind": kind, "seconds": seconds}
        command |= {knob: getattr(force, knob) for knob in READER_KNOBS}
        results: list[Record] = []

        def take(record: Record) -> bool:
            if record["kind"] == "block" and record["number"] == command["number"]:
                results.append(record)
            return bool(results)

        trainer.tell(json.dumps(command))
        ended, cause = trainer.watch(take, limit_s, lambda: self._stopped)
        block = Block(setting, kind, ended, cause, time.monotonic() - began)
        if ended != "ok":
            self._trainer = None
            return block
        (result,) = results
        self._in_force = force
        block = replace(block, **result["figures"])
        return block if force == setting else replace(block, ram_bytes=None)

    def _end(self) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close()
