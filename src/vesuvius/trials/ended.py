"""How a measurement ends."""

from __future__ import annotations

from typing import Literal

from vesuvius.errors import EXIT_INTERRUPTED, VesuviusError

Ended = Literal["ok", "guard", "gpu_memory", "killed", "failed", "timeout"]


class TrialInterrupted(VesuviusError):  # noqa: N818 - not an error
    """The measurement in hand was given up together with the tune or the bench."""

    exit_code = EXIT_INTERRUPTED
