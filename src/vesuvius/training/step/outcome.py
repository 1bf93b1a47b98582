"""What a step came to: figures on the device, carried to the host without making it wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepOutcome:
    """What a step came to."""

    loss: float  # mean weighted loss of the global batch, before the update
    losses: tuple[float, ...]  # that of each sample, in the order of the global batch
    grad_norm: float  # length of the gradient before clipping
    finite: bool  # whether loss and gradient were finite
    applied: bool  # whether the weights moved: finite, and not after `max_nonfinite` steps that were not
    overflowed: bool  # an fp16 gradient too large for its scale: skipped, the scale halved; normal now and then
    # steps so far, this one included, that were not finite, since the last that was applied; an overflow neither counts
    # nor resets the count: it says nothing about the run
    nonfinite_in_a_row: int
    scale: float  # what the loss was multiplied by for fp16; 1 without it


class StepResult:
    """The figures of a step on their way from the device.

    They are copied to pinned memory right after the step, so that reading them once the device has finished the step
    waits for nothing that was queued after it.

    Args:
        scalars: the fields of `StepOutcome` in its order, but for the losses.
        losses: those of each micro-batch.
    """

    def __init__(self, scalars: Sequence[Tensor], losses: Sequence[Tensor]) -> None:
        figures = torch.cat([torch.stack([scalar.float() for scalar in scalars]), *losses])
        self._figures = figures
        if figures.is_cuda:
            self._figures = torch.empty(figures.shape, pin_memory=True)
            self._figures.copy_(figures, non_blocking=True)

    def read(self) -> StepOutcome:
        """The figures.  On a GPU only valid after an event that was recorded after `TrainStep.apply`."""
        loss, grad_norm, finite, applied, overflowed, in_a_row, scale, *losses = self._figures.tolist()
        return StepOutcome(
            loss=loss,
            losses=tuple(losses),
            grad_norm=grad_norm,
            finite=bool(finite),
            applied=bool(applied),
            overflowed=bool(overflowed),
            nonfinite_in_a_row=int(in_a_row),
            scale=scale,
        )
