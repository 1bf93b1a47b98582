"""Checkpoints beside the training: the step that triggers one pays for a copy, a thread does the rest."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from vesuvius.engine.checkpoint_save import Keep, save_checkpoint
from vesuvius.engine.snapshot import Layout, Place, Snapshot, layouts_of
from vesuvius.errors import StorageError

log = logging.getLogger(__name__)

_SAY_WAITS_OVER_S = 1.0


class CheckpointWriter:
    """Writes one checkpoint at a time on a thread of its own.  A context manager that waits for the last one.

    A checkpoint that cannot be copied or written is logged and noted in `failures`; the run may go on.  What is a
    defect of ours is raised by the next call.

    Args:
        directory: `runs/<name>/checkpoints`.
        keep_last, keep_every: as in `Keep`.
        config_yaml: resolved config of the run.
        on_progress: called on the thread, often, while the disk takes the bytes.

    Attributes:
        failures: step and error of each save that failed, for the caller to take out.
    """

    def __init__(
        self,
        directory: Path,
        keep_last: int,
        keep_every: int | None,
        config_yaml: str,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = directory
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._config_yaml = config_yaml
        self._on_progress = on_progress
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._error: StorageError | None = None
        self._defect: BaseException | None = None
        self.failures: deque[tuple[int, str]] = deque()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self._join()
        elif self._thread is not None:  # the error on its way out is the one to report
            self._thread.join()

    def prepare(self, state: dict[str, Any]) -> None:
        """Make room for copies of a state of this shape, beside the training: without it the first save is slower.

        Only reads shapes, and those at once.  To be called when the optimizer has its state, behind the first step.
        """
        self._join()
        layouts = layouts_of(state)
        self._start(lambda: self._prepare(layouts))

    def save(self, step: int, state: dict[str, Any], best_step: int | None = None) -> None:
        """Copy the state, as `save_checkpoint` takes it, and let it be written.  Waits for the save before.

        A checkpoint of the same step is replaced.
        """
        started = time.monotonic()
        self._join()
        if (waited := time.monotonic() - started) > _SAY_WAITS_OVER_S:
            log.info("waited %.1f s for the writer of checkpoints", waited)
        self._error = None
        try:
            self._snapshot.take(state)
        except StorageError as error:
            self._note_failure(step, error)
            return
        keep = Keep(self._keep_last, self._keep_every, best_step)
        self._start(lambda: self._write(step, keep))

    def wait(self) -> StorageError | None:
        """Wait for what is in hand.  Returns what went wrong with the last save, None where nothing did."""
        self._join()
        return self._error

    def _prepare(self, layouts: Mapping[Place, Layout]) -> None:
        """On the thread."""
        try:
            self._snapshot.prepare(layouts)
        except StorageError as error:  # a save tries again, and counts
            log.warning("%s", error)

    def _write(self, step: int, keep: Keep) -> None:
        """On the thread."""
        try:
            path = save_checkpoint(
                self._directory, step, self._snapshot.state(), self._config_yaml, keep, self._on_progress
            )
        except StorageError as error:
            self._note_failure(step, error)
        else:
            log.info("saved %s", path)

    def _note_failure(self, step: int, error: StorageError) -> None:
        text = str(error)
        self._error = StorageError(text)  # the error itself would hold on to the memory that its frames know
        self.failures.append((step, text))
        log.error("%s", text)

    def _start(self, job: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                job()
            except BaseException as error:  # handed to the training's thread, which raises it
                self._defect = error

        # A daemon: a second signal ends the process at once, without waiting for it.
        self._thread = threading.Thread(target=guarded, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._defect is not None:
            defect, self._defect = self._defect, None
            raise defect
