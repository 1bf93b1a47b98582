"""Runs a trial: the real trainer as a process of its own, watched by what it writes, ended once enough is known.

A trial that dies costs itself only: what is left of it is ended, and its cause becomes part of its `Outcome`.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from vesuvius.config import Config
from vesuvius.errors import EXIT_INTERRUPTED, VesuviusError
from vesuvius.lab.tune.trial import Outcome, Trial
from vesuvius.lab.tune.trial_config import course_of, trial_config, validates
from vesuvius.lab.tune.trial_process import TrialProcess
from vesuvius.lab.tune.trial_watch import RunnerOptions, TrialFiles, TrialWatch, Why

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

    Attributes:
        options: may be replaced between two trials.
    """

    def __init__(self, config: Config, directory: Path, options: RunnerOptions) -> None:
        self.options = options
        self._config = config
        self._directory = directory
        self._stops = 0

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
            OSError: the directory cannot be written.
        """
        options, began = self.options, time.monotonic()
        course = course_of(
            self._config,
            trial,
            warmup_steps=options.warmup_steps,
            least_steps=options.least_steps,
            most_steps=options.most_steps,
            seconds=options.seconds,
        )
        config = trial_config(self._config, trial, course, options.seconds)
        files = TrialFiles.make(self._directory, config)
        watch = TrialWatch(files, trial.setting, course, options, validates(config))
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
        """Look at it until it ends, or end it; returns why it was ended, None where it ended by itself."""
        why: Why | None = None
        while not self._stops and why is None:
            if process.wait(_LOOK_EVERY_S):
                return None
            why = watch.look(time.monotonic() - began)
        process.ask_to_end()
        given_up = time.monotonic() + self.options.grace_s
        while not process.wait(_LOOK_EVERY_S):
            if self._stops:
                given_up = min(given_up, time.monotonic() + _INTERRUPTED_GRACE_S)
            if time.monotonic() >= given_up or self._stops > 1:
                process.kill()
        return why
