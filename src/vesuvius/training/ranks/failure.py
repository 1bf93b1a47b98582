"""Errors with which ranks end each other, and whether a restart may help."""

from __future__ import annotations

import torch.distributed as dist

from vesuvius.errors import EXIT_ERROR, VesuviusError


class RankError(VesuviusError):
    """Another rank failed or did not respond.  Ends this process with that rank's exit code."""

    def __init__(self, message: str, exit_code: int = EXIT_ERROR) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RankLostError(RankError):
    """Another rank ended without a message, for example because it was killed: a restart may help."""


# CUDA's messages (`cudaGetErrorString`) for a failing card or link, as opposed to a kernel, which would fail again.
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
# NCCL's messages for errors that recur.
_RECURRING = (
    "device-side assert",
    "illegal memory access",
    "misaligned address",
    "invalid usage",
    "invalid argument",
    "Duplicate GPU",
    "out of memory",
)


def is_restartable(error: Exception) -> bool:
    """Whether an error comes from a lost rank, the network or a failing GPU and may not recur.  Pure."""
    if isinstance(error, VesuviusError):
        return isinstance(error, RankLostError)
    failing_gpu = "CUDA" in str(error) and any(text in str(error) for text in _FAILING_GPU)
    return failing_gpu or is_network_error(error)


def is_network_error(error: Exception) -> bool:
    """Whether an error concerns a connection between ranks and may not recur.  Pure."""
    text = str(error)
    is_connection = (
        isinstance(error, dist.DistError) or "gloo" in text or "NCCL error" in text or "NCCL communicator" in text
    )
    return is_connection and not any(words in text for words in _RECURRING)


def exit_code_of(error: BaseException) -> int:
    """Exit code of a rank that ends with this error.  Pure."""
    return error.exit_code if isinstance(error, VesuviusError) else EXIT_ERROR
