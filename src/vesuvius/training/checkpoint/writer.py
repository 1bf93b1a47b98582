"""Checkpoints beside the training: the step that triggers one pays for a copy, a thread does the rest."""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from vesuvius.config import TrainingConfig
from vesuvius.errors import StorageError, one_line
from vesuvius.runlog.files import directory_bytes
from vesuvius.threads import on_thread
from vesuvius.training.checkpoint.save import save_checkpoint, tensors_in

log = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes one checkpoint at a time on a thread of its own.  A context manager that waits for the last one.

    A checkpoint that cannot be copied or written is logged, and the run may continue.  What is a defect of ours is
    raised by the next call.  Arguments are those of `save_checkpoint`.

    Attributes:
        ended: records of saves, for the caller to take out: step, seconds, bytes, saved_time (since 1970); where one
            has failed, step and text.
    """

    def __init__(self, directory: Path, training: TrainingConfig, config_yaml: str) -> None:
        self._directory, self._training, self._config_yaml = directory, training, config_yaml
        self._snapshot = Snapshot()
        self._job: Future[None] | None = None
        self._error: StorageError | None = None
        self.ended: deque[dict[str, Any]] = deque()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.wait()
        except Exception as defect:
            if error is None:
                raise
            log.error("the checkpoint writer has failed as well", exc_info=defect)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Copy the state, as `save_checkpoint` takes it, and let it be written.  Waits for the save before.

        A checkpoint of the same step is replaced.
        """
        self.wait()
        self._error = None
        try:
            self._snapshot.take(state)
        except StorageError as error:
            self._note_failure(step, error)
            return
        # A daemon: a second signal ends the process at once, without waiting for it.
        self._job = on_thread(self._write, step, name="checkpoint-writer")

    def wait(self) -> StorageError | None:
        """Wait for what is in hand.  Returns what went wrong with the last save, None where nothing did.

        It takes as long as it takes: a disk that hangs may come back, and the watchdog says what is waited for.
        """
        job, self._job = self._job, None
        if job is not None:
            job.result()
        return self._error

    def _write(self, step: int) -> None:
        """On the thread."""
        started = time.monotonic()
        try:
            path = save_checkpoint(self._directory, step, self._snapshot.state(), self._config_yaml, self._training)
        except StorageError as error:
            self._note_failure(step, error)
        else:
            log.info("saved %s", path)
            seconds, size = time.monotonic() - started, directory_bytes(path)
            self.ended.append({"step": step, "seconds": seconds, "bytes": size, "saved_time": time.time()})

    def _note_failure(self, step: int, error: StorageError) -> None:
        self._error = StorageError(str(error))  # the error itself would hold on to the memory that its frames know
        self.ended.append({"step": step, "text": str(error)})
        log.error("%s", error)


class Snapshot:
    """Host copies of all tensors of a state, in buffers that are used again from one time to the next.

    The first touch of fresh memory is several times slower than a copy: 2.8 against 15 GB/s, on 2 cores of
    an AMD EPYC.  Buffers for tensors of a GPU are pinned; torch rounds each up to a power of two.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._state: dict[str, Any] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, state: dict[str, Any]) -> None:
        """Copy a state: nested dicts, lists and tuples of tensors and plain data.

        What is in the tensors of a GPU at this point of the current stream is copied when the device gets there: the
        host does not wait, and updates that are queued later come after the copies.  The previous copy is overwritten.

        Raises:
            StorageError: the host's memory has no room for it.
        """
        tensors = tensors_in(state)
        if [_layout(buffer) for buffer in self._buffers] != [_layout(tensor) for tensor in tensors]:
            self._buffers, self._state = [], {}  # before others take their place
            self._buffers = [_allocate(tensor) for tensor in tensors]
        buffers, self._copied = iter(self._buffers), None
        with torch.no_grad():  # dicts and lists are new ones: nothing is shared
            self._state = tree_map_only(
                Tensor, lambda tensor: next(buffers).copy_(tensor, non_blocking=tensor.is_cuda), state
            )
        if any(tensor.is_cuda for tensor in tensors):
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps, does not spin
            self._copied.record()

    def state(self) -> dict[str, Any]:
        """The state as it was at `take`; waits for the device.  Its tensors are the buffers: until the next `take`."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._state


def _layout(tensor: Tensor) -> tuple[torch.Size, torch.dtype, tuple[int, ...]]:
    """As torch lays out a copy: in the memory order of the original, without its gaps."""
    return tensor.shape, tensor.dtype, torch.empty_like(tensor, device="meta").stride()


def _allocate(tensor: Tensor) -> Tensor:
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
    except (RuntimeError, MemoryError) as error:  # torch raises the former, whichever kind of memory it is
        raise StorageError(
            f"a copy of the training state must fit the host's memory; got {one_line(error)} for a tensor of "
            f"{tuple(tensor.shape)}, {tensor.dtype}{', pinned' if tensor.is_cuda else ''}; give the run more memory, "
            "or lower training.workers or training.prefetch_factor"
        ) from error
