"""Errors with which ranks end each other, whether a restart may help, and how a rank ends after one.

The surviving ranks have queued sums that never complete.  NCCL waits for them whenever the host waits for the device,
and in `destroy_process_group`.  So each rank, including the failed one, aborts its process group, and a thread ends the
process if it hangs.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist

from vesuvius.errors import EXIT_ERROR, VesuviusError
from vesuvius.threads import BoundedCall, on_thread

log = logging.getLogger(__name__)

_POLL_S = 0.5
# Limits for the main thread after a failure: until the collectives are aborted, and until it notices the failure.
_ABORT_S = 5.0
_UNWIND_S = 15.0
_SAVE_S = 1800.0  # to save or wait for the save; at least timeout_s
_CLOSE_S = 10.0  # to close the connections
_RECORD_S = 3.0  # to record the cause, as the disk may not respond


class RankError(VesuviusError):
    """Another rank failed or did not respond.  Ends this process with that rank's exit code."""

    def __init__(self, message: str, exit_code: int = EXIT_ERROR) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RankLostError(RankError):
    """Another rank ended without a message, for example because it was killed: a restart may help."""


# CUDA's messages (`cudaGetErrorString`) for a failing card or link, as opposed to a kernel, which would fail again.
_FAILING_GPU = (
    "uncorrectable ECC error", "uncorrectable NVLink error", "over nvlink or a hardware error", "hardware stack error",
    "unspecified launch failure", "busy or unavailable", "system not yet initialized", "unknown error",
)  # fmt: skip
_CONNECTION = ("gloo", "NCCL error", "NCCL communicator")
# NCCL's messages for errors that recur.
_RECURRING = (
    "device-side assert", "illegal memory access", "misaligned address", "invalid usage", "invalid argument",
    "Duplicate GPU", "out of memory",
)  # fmt: skip


def is_restartable(error: Exception) -> bool:
    """Whether an error comes from a lost rank, the network or a failing GPU and may not recur.  Pure."""
    if isinstance(error, VesuviusError):
        return isinstance(error, RankLostError)
    failing_gpu = "CUDA" in str(error) and any(text in str(error) for text in _FAILING_GPU)
    return failing_gpu or is_network_error(error)


def is_network_error(error: Exception) -> bool:
    """Whether an error concerns a connection between ranks and may not recur.  Pure."""
    text = str(error)
    is_connection = isinstance(error, dist.DistError) or any(words in text for words in _CONNECTION)
    return is_connection and not any(words in text for words in _RECURRING)


def exit_code_of(error: BaseException) -> int:
    """Exit code of a rank that ends with this error.  Pure."""
    return error.exit_code if isinstance(error, VesuviusError) else EXIT_ERROR


@dataclass(eq=False)
class Abort:
    """Ends this process after a failure."""

    saves: bool = True  # rank 0 saves a checkpoint before it ends; the others wait for it
    on_kill: Callable[[RankError], None] | None = None  # records why a hung process is killed; in another thread
    unwinding: threading.Event = field(default_factory=threading.Event)  # the main thread has noticed the failure
    closing: threading.Event = field(default_factory=threading.Event)  # it is closing the connections
    ended: threading.Event = field(default_factory=threading.Event)  # they are closed
    group_aborted: threading.Event = field(default_factory=threading.Event)  # so a sum may be invalid

    def kill_if_hung(self, failure: RankError, rank: int, timeout_s: float) -> None:
        """Kill this process if its main thread hangs in a collective or in a save to a disk that does not respond."""
        stage, began = "", time.monotonic()
        while not self.ended.wait(_POLL_S):
            before, (stage, limit_s) = stage, self._stage(timeout_s)
            if stage != before:
                began = time.monotonic()
            waited_s = time.monotonic() - began
            if waited_s > _ABORT_S and not self.unwinding.is_set():
                self.abort_group()
            if waited_s > limit_s:
                log.error("%s; rank %d %s and is killed", failure, rank, stage)
                if self.on_kill is not None:
                    with suppress(Exception):
                        BoundedCall(partial(self.on_kill, failure), _RECORD_S)()
                os._exit(failure.exit_code)

    def abort_group(self) -> None:
        """Abort collectives that never complete; the host's waits for them raise."""
        if not self.group_aborted.is_set():
            self.group_aborted.set()
            on_thread(_abort_group, name="rank-abort")  # may itself hang

    def _stage(self, timeout_s: float) -> tuple[str, float]:
        """Activity of the main thread after a failure, and its limit in seconds."""
        if self.closing.is_set():
            return "has not closed its connections", _CLOSE_S
        if self.unwinding.is_set():
            return "has not shut down", max(_SAVE_S, timeout_s) if self.saves else _UNWIND_S
        return "hangs in a collective", _UNWIND_S


def _abort_group() -> None:
    """Abort the process group; no effect with gloo, whose collectives end with the connections."""
    with suppress(RuntimeError):
        if (group := dist.group.WORLD) is not None:
            group.abort()
