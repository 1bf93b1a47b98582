"""The time of one optimizer step and of its parts, as the clock measures and the log prints it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one optimizer step; data, h2d, forward, backward, optimizer, comm and other add up to step_s."""

    step_s: float  # from the end of the step before to the end of this one
    data_s: float  # the device had nothing to do because the batch was not there
    h2d_s: float  # the device waited for the copy from host to device
    # forward_s, backward_s, optimizer_s: it computed (on a CPU: the same, by the host's clock)
    forward_s: float
    backward_s: float
    optimizer_s: float
    pause_s: float = 0.0  # of other_s, what went into work between the steps: validation, pictures, checkpoints
    comm_s: float = 0.0  # it waited for other ranks: the part of the gradients' all-reduce that no backward pass hid

    @property
    def gpu_s(self) -> float:
        """Forward, backward and optimizer."""
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def other_s(self) -> float:
        """The rest: pauses, logging, launching kernels."""
        return self.step_s - self.data_s - self.h2d_s - self.gpu_s - self.comm_s
