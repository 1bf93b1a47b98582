"""What the policy of a tune measures with: a living trainer, or in tests a simulated machine."""

from __future__ import annotations

from typing import Protocol

from vesuvius.errors import EXIT_INTERRUPTED, VesuviusError
from vesuvius.tuning.block import Block, Kind
from vesuvius.tuning.setting import Setting


class TuneInterrupted(VesuviusError):  # noqa: N818 - not an error
    """The block in hand was given up together with the tune."""

    exit_code = EXIT_INTERRUPTED


class Lab(Protocol):
    """Measures settings, one block at a time."""

    def measure(self, setting: Setting, kind: Kind, seconds: float, limit_s: float) -> Block:
        """Bring a setting into force and measure it for about `seconds`, longer where these hold too few steps.

        Args:
            limit_s: after which the block ends in any case, with what was measured or as a timeout.

        Raises:
            TuneInterrupted: the tune was asked to stop.
            StorageError: the disk is full, independent of the setting.
        """
        ...
