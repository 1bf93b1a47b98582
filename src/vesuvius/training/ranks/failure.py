"""Why the ranks of a run end: the errors that they raise for each other, and whether to start them again helps."""

from __future__ import annotations

import torch.distributed as dist

from vesuvius.errors import EXIT_ERROR, VesuviusError


class RankError(VesuviusError):
    """Another rank failed, or did not answer.  Ends this process with the exit code of that rank."""

    def __init__(self, message: str, exit_code: int = EXIT_ERROR) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RankLostError(RankError):
    """Another rank ended without a message, as a killed process does: a restart may help."""


# What CUDA says (`cudaGetErrorString`) of a card or a link that fails, and not of a kernel, which would fail again.
_FAILING_GPU = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "over nvlink or a hardware error",
    "hardware stack error",
    "unspecified launch failure",
    "busy or unavailable",
    "system not yet initialized",
    "unknown error",
)
# What fails again, though NCCL says it.
_FAILS_AGAIN = (
    "device-side assert",
    "illegal memory access",
    "misaligned address",
    "invalid usage",
    "invalid argument",
    "Duplicate GPU",
    "out of memory",
)


def is_restartable(error: Exception) -> bool:
    """Whether an error is of another rank that is gone, the network or a failing GPU, and may not come again.  Pure."""
    if isinstance(error, VesuviusError):
        return isinstance(error, RankLostError)
    failing_gpu = "CUDA" in str(error) and any(text in str(error) for text in _FAILING_GPU)
    return failing_gpu or is_network_error(error)


def is_network_error(error: Exception) -> bool:
    """Whether it is of a connection between ranks, and may not come again.  Pure."""
    text = str(error)
    named = isinstance(error, dist.DistError) or "gloo" in text or "NCCL error" in text or "NCCL communicator" in text
    return named and not any(again in text for again in _FAILS_AGAIN)


def exit_code_of(error: BaseException) -> int:
    """With which a rank ends that it ends.  Pure."""
    return error.exit_code if isinstance(error, VesuviusError) else EXIT_ERROR
