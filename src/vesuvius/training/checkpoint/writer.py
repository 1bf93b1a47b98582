"""Checkpoints beside the training: the step that triggers one pays for a copy, a thread does the rest."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from vesuvius.errors import StorageError
from vesuvius.runlog.files import directory_bytes
from vesuvius.threads import on_thread
from vesuvius.training.checkpoint.save import RetentionPolicy, save_checkpoint
from vesuvius.training.checkpoint.snapshot import Snapshot

log = logging.getLogger(__name__)

_SAY_WAITS_OVER_S = 1.0
_WARN_EVERY_S = 60.0


class CheckpointWriter:
    """Writes one checkpoint at a time on a thread of its own.  A context manager that waits for the last one.

    A checkpoint that cannot be copied or written is logged and noted in `failures`; the run may continue.  What is a
    defect of ours is raised by the next call.

    Args:
        directory: `runs/<name>/checkpoints`.
        retention: which checkpoints stay; its `best_step` comes with each save.
        config_yaml: resolved config of the run.
        on_progress: called on the thread, often, while the disk takes the bytes.

    Attributes:
        failures: step and error of each save that failed, for the caller to take out.
        saved: records of those that did not, likewise: step, seconds, bytes, saved_time (since 1970).
    """

    def __init__(
        self,
        directory: Path,
        retention: RetentionPolicy,
        config_yaml: str,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = directory
        self._retention = retention
        self._config_yaml = config_yaml
        self._on_progress = on_progress
        self._snapshot = Snapshot()
        self._job: Future[None] | None = None
        self._error: StorageError | None = None
        self.failures: deque[tuple[int, str]] = deque()
        self.saved: deque[dict[str, float]] = deque()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._join()
        except Exception as defect:
            if error is None:
                raise
            log.error("the checkpoint writer has failed as well", exc_info=defect)

    def save(self, step: int, state: dict[str, Any], best_step: int | None = None) -> None:
        """Copy the state, as `save_checkpoint` takes it, and let it be written.  Waits for the save before.

        A checkpoint of the same step is replaced.
        """
        started = time.monotonic()
        self._join()
        if (waited := time.monotonic() - started) > _SAY_WAITS_OVER_S:
            log.info("waited %.1f s for the checkpoint writer", waited)
        self._error = None
        try:
            self._snapshot.take(state)
        except StorageError as error:
            self._note_failure(step, error)
            return
        retention = replace(self._retention, best_step=best_step)
        # A daemon: a second signal ends the process at once, without waiting for it.
        self._job = on_thread(lambda: self._write(step, retention), name="checkpoint-writer")

    def wait(self) -> StorageError | None:
        """Wait for what is in hand.  Returns what went wrong with the last save, None where nothing did."""
        self._join()
        return self._error

    def _write(self, step: int, retention: RetentionPolicy) -> None:
        """On the thread."""
        started = time.monotonic()
        try:
            path = save_checkpoint(
                self._directory, step, self._snapshot.state(), self._config_yaml, retention, self._on_progress
            )
        except StorageError as error:
            self._note_failure(step, error)
        else:
            log.info("saved %s", path)
            seconds, size = time.monotonic() - started, directory_bytes(path)
            self.saved.append({"step": step, "seconds": seconds, "bytes": size, "saved_time": time.time()})

    def _note_failure(self, step: int, error: StorageError) -> None:
        text = str(error)
        self._error = StorageError(text)  # the error itself would hold on to the memory that its frames know
        self.failures.append((step, text))
        log.error("%s", text)

    def _join(self) -> None:
        """Wait for as long as it takes, since a disk that hangs may come back, and say what for."""
        started = time.monotonic()
        job, self._job = self._job, None
        while job is not None and wait([job], _WARN_EVERY_S).not_done:
            log.warning(
                "waiting for the checkpoint writer for %.0f s: it is writing to %s; check whether the disk answers",
                time.monotonic() - started,
                self._directory,
            )
        if job is not None:
            job.result()
