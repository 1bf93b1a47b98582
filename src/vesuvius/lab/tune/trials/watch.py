"""Looks at a trial by the files that it writes: when enough is known, and what came of it."""

from __future__ import annotations

import re
import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vesuvius.config import Config
from vesuvius.config_file import dump_config
from vesuvius.errors import (
    EXIT_DATA,
    EXIT_GPU_MEMORY,
    EXIT_GUARD,
    EXIT_OK,
    EXIT_STOPPED,
    StorageError,
    one_line,
)
from vesuvius.lab.tune.terms.setting import Setting
from vesuvius.lab.tune.terms.trial import MOST_TIMES, Ended, Measured
from vesuvius.lab.tune.trials.config import LEAST_SAID, Course
from vesuvius.lab.tune.trials.measure import TaskSize, measure, pace_of
from vesuvius.observe.death.death import headline
from vesuvius.observe.death.post_mortem import record_run_death
from vesuvius.observe.recent import read_recent
from vesuvius.observe.run_files import Tail

_WHOLE_FILE = 2**30
_CAUSE_LENGTH = 400
# From SIGTERM on a trial finishes its step, validates and saves if that is due, and ends its readers.
_STEPS_TO_END = 3
_SECONDS_TO_END = 30.0
# With less free space than this not even the log says why a trial failed.
_DISK_FULL_BYTES = 2**20
_KILLED_IN_CONTAINER = 128 + signal.SIGKILL
_STORAGE_ERROR = re.compile(r"must fit on the disk|the run directory must be writable")
_ERROR_LINE = re.compile(r"^\S+ \S+ (?:ERROR|CRITICAL) (.+)$", re.MULTILINE)

Why = Literal["enough", "guard", "seconds"]
"""Why a trial is to be ended before it ends by itself."""

End = tuple[Ended, str, Measured | None]
"""As in `Outcome`."""


@dataclass(frozen=True)
class RunnerOptions:
    """How long trials go on.

    Attributes:
        seconds: at most, from its start; then what was measured so far counts.  Twice as many for the baseline, of
            which nothing is known, and for the first trial that compiles.
        least_steps: measured ones, before it may end because the interval is narrow.
        most_steps: measured ones, at which it ends once it has gone on for as long as its start took, or has measured
            so many times as many as `steps_worth_a_start` says.
        half_width: of the 95 % interval of samples a second, relative: what is called narrow.
        warmup_steps: left out at the start.
        grace_s: from SIGTERM to SIGKILL, or three of the slowest steps and half a minute where that is more; the
            trainer finishes its step, saves and ends its readers meanwhile.
        lock_fd: descriptor of the tune's lock, which a trial keeps should the tune be killed; None = none.
        task_samples: of a task of the plan; None = not known: nothing is then said of how fast readers are, and a
            trial that lives on what they had read ahead is taken for as fast as it was.
    """

    seconds: float = 300.0
    least_steps: int = 50
    most_steps: int = 100
    half_width: float = 0.02
    warmup_steps: int = 5
    grace_s: float = 60.0
    lock_fd: int | None = None
    task_samples: int | None = None


@dataclass(frozen=True)
class TrialFiles:
    """Where the files of a trial are.

    Attributes:
        run: its run directory.
        config, log: beside it.
    """

    run: Path
    config: Path
    log: Path

    @classmethod
    def make(cls, directory: Path, config: Config) -> TrialFiles:
        """Write the config; what an interrupted trial of this name has left is removed.

        Raises:
            OSError: the directory cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        files = cls(*(directory / f"{config.name}{suffix}" for suffix in ("", ".yaml", ".log")))
        if files.run.exists():
            shutil.rmtree(files.run)
        files.config.write_text(dump_config(config), encoding="utf-8")
        return files


class TrialWatch:
    """What is known of a trial so far.

    Args:
        validates: whether it will.
        task: what its readers read at a time; None = not known.
    """

    def __init__(
        self,
        files: TrialFiles,
        setting: Setting,
        course: Course,
        options: RunnerOptions,
        validates: bool,
        task: TaskSize | None,
    ) -> None:
        self._files = files
        self._setting = setting
        self._course = course
        self._options = options
        self._awaits_validation = validates
        self._task = task
        self._tail = Tail(files.run / "metrics.jsonl", _WHOLE_FILE)
        self._records: list[dict[str, Any]] = []
        self._first_step_s: float | None = None

    def look(self, seconds: float) -> Why | None:
        """Why it is to be ended now; None = it is not.

        Args:
            seconds: since its start.
        """
        self._records += self._tail.new()
        if self._first_step_s is None and self._steps:
            self._first_step_s = seconds
        if self._guard_event() is not None:
            return "guard"
        if seconds >= self._options.seconds:
            return "seconds"
        return "enough" if self._is_enough(seconds) else None

    @property
    def grace_s(self) -> float:
        """Seconds that it may take to end when asked to."""
        slowest_s = max((record["step_s"] for record in self._steps), default=0.0)
        return max(self._options.grace_s, _STEPS_TO_END * slowest_s + _SECONDS_TO_END)

    def outcome(self, code: int | None, why: Why | None, killed: bool) -> End:
        """What came of it, now that it has ended.

        Args:
            code: exit code, or minus the number of a signal; None where it could not be ended.
            why: it was asked to end; None where it was not.
            killed: by the runner, because it did not.

        Raises:
            StorageError: it failed because the disk is full or cannot be written, which no setting is to blame for.
        """
        self._records += self._tail.new()
        if code == EXIT_GUARD or self._guard_event() is not None:
            return "guard", self._one_line((self._guard_event() or {}).get("text") or self._last_error()), None
        if why is not None and code == -signal.SIGTERM:
            # Ours.  The trainer does not listen to it while it starts, nor once Ray has ended.
            return self._measured(why)
        if killed or code is None:
            ended: Ended = "timeout" if why == "seconds" else "failed"
            after = f"{self.grace_s:.0f} s after it was asked to end"
            if code is None:
                return ended, f"it could not even be killed {after}: it waits for a disk or a driver", None
            return ended, f"it had to be killed {after}", None
        if code == EXIT_GPU_MEMORY:
            return "gpu_memory", self._one_line(self._last_error()), None
        if code < 0 or code == _KILLED_IN_CONTAINER:
            return "killed", self._one_line(self._death(code)), None
        if code == EXIT_DATA:
            self._check_storage()
        if code not in (EXIT_OK, EXIT_STOPPED):
            return "failed", self._one_line(f"{self._last_error()} (exit code {code})"), None
        return self._measured(why)

    def _measured(self, why: Why | None) -> End:
        """Of one that has ended as it should."""
        measured = measure(
            self._records,
            [r for r in Tail(self._files.run / "system.jsonl", _WHOLE_FILE).new() if r["kind"] == "system"],
            read_recent(self._files.run / "recent.jsonl"),
            self._setting,
            self._course,
            self._options.half_width,
            self._task,
        )
        if measured is None:
            return self._too_short(why)
        return "ok", "", replace(measured, start_s=self._start_s)

    def _too_short(self, why: Why | None) -> End:
        steps, least = len(self._steps), self._course.warmup_steps + LEAST_SAID
        rule = f"at least {least} steps are needed; got {steps}"
        if steps >= least:
            return "failed", f"a trial must end with its own verdict; got none behind {steps} steps", None
        if why == "seconds":
            return "timeout", f"{rule} in {self._options.seconds:g} s; a larger --budget gives each trial more", None
        return "failed", f"{rule}, and then it ended by itself", None

    def _is_enough(self, seconds: float) -> bool:
        """Whether further steps would say little more.

        Args:
            seconds: since its start.
        """
        options, steps = self._options, self._steps
        pace = pace_of(steps, self._setting, self._course, self._task)
        if pace is None or pace.rate.steps < options.least_steps or steps[-1]["step"] >= self._course.last_step:
            return False  # behind the last step it ends by itself
        if self._awaits_validation and not any(record["kind"] == "validation" for record in self._records):
            return False
        went_on_s = seconds - (self._first_step_s or 0.0)
        if pace.rate.steps >= options.most_steps and went_on_s >= (self._start_s or 0.0):
            return True
        if pace.rate.steps >= MOST_TIMES * options.most_steps:
            return True
        unknown = self._task is not None and self._setting.workers > 0 and pace.reader_s is None
        return pace.rate.is_narrow(options.half_width) and not pace.outrun and not unknown

    @property
    def _start_s(self) -> float | None:
        """Until its first step began to compute: compiling is no reason to go on for longer."""
        if self._first_step_s is None:
            return None
        return max(self._first_step_s - float(self._steps[0]["gpu_s"]), 0.0)

    @property
    def _steps(self) -> list[dict[str, Any]]:
        return [record for record in self._records if record["kind"] == "step"]

    def _check_storage(self) -> None:
        """Raises StorageError where it failed for want of it."""
        error = self._last_error()
        full = shutil.disk_usage(self._files.log.parent).free < _DISK_FULL_BYTES
        if full or _STORAGE_ERROR.search(error):
            raise StorageError(
                f"the disk must take what a trial writes; got, in {self._files.log}: {self._one_line(error)}; "
                "free some space and go on with --resume"
            )

    def _guard_event(self) -> dict[str, Any] | None:
        """That the guard has made the run smaller, or has ended it: this setting does not fit."""
        events = (record for record in self._records if record["kind"] == "event")
        return next((event for event in events if event["event"] == "guard"), None)

    def _death(self, code: int) -> str:
        """Who killed it, and what says so."""
        by = f"killed by {_signal_name(-code)}" if code < 0 else "killed"
        try:
            death = record_run_death(self._files.run)
        except OSError as error:
            return f"{by}; its post-mortem cannot be kept: {error}"
        if death is None:
            return f"{by} before its first step"
        return "; ".join([headline(death), *death.evidence])

    def _last_error(self) -> str:
        """The last line of its log that is an error, or else the last one."""
        text = self._files.log.read_text(encoding="utf-8", errors="replace")
        found: list[str] = _ERROR_LINE.findall(text)
        return found[-1] if found else (text.strip().splitlines() or ["it has printed nothing"])[-1]

    def _one_line(self, text: str) -> str:
        return one_line(text, _CAUSE_LENGTH)


def _signal_name(number: int) -> str:
    """Of the real-time signals only two have one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
