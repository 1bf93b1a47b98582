"""What the network is shown beside x_t and t, and how it is left out of some samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Condition:
    """The condition of a batch.

    A sample without its condition (in training to learn guidance, in sampling for guidance) has zeros in both tensors,
    also where they say that it is there.  Source: Ho & Salimans 2022 (a null token in place of the condition).

    Attributes:
        channels: float32 [B, C, Z, Y, X], joined to x_t by channel; the last channel is 1.  None: no condition volume.
        scalars: float32 [B, n + 1], as `model.scalars` lists them; the last is 1.  None: no scalars.
    """

    channels: Tensor | None
    scalars: Tensor | None

    @property
    def empty(self) -> bool:
        """Whether the network is shown nothing but x_t and t."""
        return self.channels is None and self.scalars is None

    def kept(self, keep: Tensor) -> Condition:
        """The condition of those samples alone for which `keep`, bool [B] on the same device, is true.  Pure."""
        channels, scalars = self.channels, self.scalars
        return Condition(
            None if channels is None else torch.where(keep.view(-1, 1, 1, 1, 1), channels, 0.0),
            None if scalars is None else torch.where(keep.view(-1, 1), scalars, 0.0),
        )

    def left_out(self) -> Condition:
        """The condition of no sample: what guidance compares with.  Pure."""
        return Condition(*(None if part is None else torch.zeros_like(part) for part in (self.channels, self.scalars)))

    def joined(self, x_t: Tensor) -> Tensor:
        """[B, 1, Z, Y, X] -> [B, 1 + C, Z, Y, X].  Pure."""
        return x_t if self.channels is None else torch.cat([x_t, self.channels], dim=1)


NO_CONDITION = Condition(None, None)
