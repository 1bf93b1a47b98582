"""Why a rank ends because of another one."""

from __future__ import annotations

from vesuvius.errors import EXIT_ERROR, VesuviusError


class RankError(VesuviusError):
    """Another rank failed, or did not answer.  Ends this process with the exit code of that rank."""

    def __init__(self, message: str, exit_code: int = EXIT_ERROR) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RankLostError(RankError):
    """Another rank ended without a message, as a killed process does: a restart may help."""


def restart_may_help(error: BaseException) -> bool:
    """Whether an error without a message for the user is of a GPU or its network, which another start may not meet.

    An assertion in a kernel, such as an index out of range, fails again wherever it runs.  Pure.
    """
    text = str(error)
    return any(word in text for word in ("CUDA", "NCCL")) and "device-side assert" not in text
