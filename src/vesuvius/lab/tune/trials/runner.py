"""Runs a trial: the real trainer as a process of its own, watched by what it writes, ended once enough is known.

A trial that dies costs itself only: what is left of it is ended, and its cause becomes part of its `Outcome`.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from vesuvius.config import Config
from vesuvius.errors import EXIT_INTERRUPTED, VesuviusError, one_line
from vesuvius.lab.tune.terms.trial import Outcome, Trial
from vesuvius.lab.tune.trials.config import Course, course_of, trial_config, validates
from vesuvius.lab.tune.trials.measure import TaskSize
from vesuvius.lab.tune.trials.process import GONE_WITHIN_S, TrialProcess
from vesuvius.lab.tune.trials.watch import RunnerOptions, TrialFiles, TrialWatch, Why

__all__ = ["RunnerOptions", "SubprocessRunner", "TuneInterrupted"]

_LOOK_EVERY_S = 0.5
# A trial that was interrupted will be repeated: its last checkpoint is worth nothing.
_INTERRUPTED_GRACE_S = 10.0


class TuneInterrupted(VesuviusError):  # noqa: N818 - it is no error
    """The trial in hand was ended because the tune was; it has no outcome."""

    exit_code = EXIT_INTERRUPTED


class SubprocessRunner:
    """Runs trials one after the other, each in `directory/NNN`, with its config and log beside it.

    Args:
        config: of the tune.
        directory: of the trials; made where it is not there.
    """

    def __init__(self, config: Config, directory: Path, options: RunnerOptions) -> None:
        self._options = options
        self._config = config
        self._directory = directory
        self._stops = 0
        self._compiled = False

    def stop(self) -> None:
        """End the trial in hand; `run` then raises TuneInterrupted.  A second call leaves it no time to end.

        From a signal handler or another thread.  Does not wait.
        """
        self._stops += 1

    def run(self, trial: Trial) -> Outcome:
        """Run a trial to its end.  Removes what an interrupted one of the same number has left.

        Keeps its log, config, and the records of its run; its checkpoints are deleted.

        Raises:
            TuneInterrupted: `stop` was called.
            StorageError: the trial found the disk full, or not to be written.
            OSError: the same, found here.
        """
        options, began = self._options_of(trial), time.monotonic()
        course = course_of(
            self._config,
            trial,
            warmup_steps=options.warmup_steps,
            least_steps=options.least_steps,
            most_steps=options.most_steps,
            seconds=options.seconds,
        )
        try:
            config = trial_config(self._config, trial, course, options.seconds)
        except ValidationError as error:
            found = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            return Outcome("failed", one_line(f"the config cannot be so: {found}"), time.monotonic() - began, None)
        return self._run(trial, config, course, options, began)

    def _options_of(self, trial: Trial) -> RunnerOptions:
        """With twice the time where all is new: kernels are built, and how long a step takes is not known."""
        compiles = trial.setting.compile and not self._compiled
        self._compiled = self._compiled or compiles
        twice = compiles or trial.stage == "baseline"
        return replace(self._options, seconds=2 * self._options.seconds) if twice else self._options

    def _run(self, trial: Trial, config: Config, course: Course, options: RunnerOptions, began: float) -> Outcome:
        """With its own config."""
        task_samples = options.task_samples
        task = None if task_samples is None else TaskSize(task_samples, config.data.regions_per_task)
        files = TrialFiles.make(self._directory, config)
        watch = TrialWatch(files, trial.setting, course, options, validates(config), task)
        try:
            with TrialProcess(files.config, files.log, self._directory, options.lock_fd) as process:
                why = self._until_end(process, watch, began)
                code, killed = process.code, process.killed
            if self._stops:
                raise TuneInterrupted(f"the tune was interrupted in trial {trial.number}; go on with --resume")
        finally:
            shutil.rmtree(files.run / "checkpoints", ignore_errors=True)
        ended, cause, measured = watch.outcome(code, why, killed)
        return Outcome(ended, cause, time.monotonic() - began, measured)

    def _until_end(self, process: TrialProcess, watch: TrialWatch, began: float) -> Why | None:
        """Look at it until it ends, or end it; returns why it was ended, None where it ended by itself.

        One that not even SIGKILL ends is given up.
        """
        why: Why | None = None
        while not self._stops and why is None:
            if process.wait(_LOOK_EVERY_S):
                return None
            why = watch.look(time.monotonic() - began)
        process.ask_to_end()
        patience_ends = time.monotonic() + watch.grace_s
        while not process.wait(_LOOK_EVERY_S):
            if self._stops:
                patience_ends = min(patience_ends, time.monotonic() + _INTERRUPTED_GRACE_S)
            if time.monotonic() >= patience_ends or self._stops > 1:
                process.kill()
                process.wait(GONE_WITHIN_S)
                break
        return why
