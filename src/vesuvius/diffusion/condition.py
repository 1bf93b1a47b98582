"""The condition: network inputs beside x_t and t, and dropping them for some samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Condition:
    """The condition of a batch.

    A sample whose condition is dropped (for classifier-free guidance) has zeros in both tensors, including the presence
    flags.  Source: Ho & Salimans 2022 (a null token replaces the condition).
    """

    # float32 [B, C, Z, Y, X], joined to x_t by channel; the last one is the presence flag, 1.  None = no condition
    # volume.
    channels: Tensor | None
    # float32 [B, n + 1], in the order of `model.scalars`; the last one is the presence flag, 1.  None = no scalars.
    scalars: Tensor | None

    @property
    def empty(self) -> bool:
        """Whether the network sees only x_t and t."""
        return self.channels is None and self.scalars is None

    def kept(self, keep: Tensor) -> Condition:
        """Return the condition with those samples dropped for which `keep`, bool [B] on the device, is false.  Pure."""
        channels, scalars = self.channels, self.scalars
        return Condition(
            None if channels is None else torch.where(keep.view(-1, 1, 1, 1, 1), channels, 0.0),
            None if scalars is None else torch.where(keep.view(-1, 1), scalars, 0.0),
        )

    def left_out(self) -> Condition:
        """Return the condition with all samples dropped: the unconditional input of guidance.  Pure."""
        return Condition(*(None if part is None else torch.zeros_like(part) for part in (self.channels, self.scalars)))

    def joined(self, x_t: Tensor) -> Tensor:
        """Join x_t and the channels: [B, 1, Z, Y, X] -> [B, 1 + C, Z, Y, X].  Pure."""
        return x_t if self.channels is None else torch.cat([x_t, self.channels], dim=1)


NO_CONDITION = Condition(None, None)
