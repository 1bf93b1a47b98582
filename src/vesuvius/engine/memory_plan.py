"""How much GPU memory and how many floating-point operations a training step takes, before there is a GPU.

One real step (`TrainStep`: noising, network, loss, backward pass, clipping, AdamW, EMA) runs on fake tensors, which
have a shape, a dtype and no memory, and `Footprint` watches it.  So the plan follows the code, not a table.

The fake tensors are those of a CPU: torch without CUDA refuses to compute with fake CUDA tensors, and on meta tensors
attention would form the whole matrix of scores.  Convolutions, linear maps and attention have the same autocast dtype
on both.  What differs on CUDA: autocast computes the norm in front of the attention in float32, which here counts in
bf16, some MiB a patch at the lowest level; Triton's kernels of norm and SiLU (`diffusion/norm_kernels.py`) do not write
the norm's result, which `lean_norm: false` keeps on a CPU: there the plan is too high, by a third of what is kept.
Beside the step, `DeviceFeed` holds 5 bytes a voxel more than the plan has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vesuvius.config import Config, StoreConfig
from vesuvius.diffusion.condition import Condition
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.unet import INT32_LIMIT, UNet, largest_activation_elements
from vesuvius.engine.footprint import Footprint
from vesuvius.engine.network import execution
from vesuvius.engine.step import AmpMode, TrainStep, parameter_count
from vesuvius.observe.units import GIB

CONTEXT_BYTES = int(0.6 * GIB)  # what CUDA itself, cuDNN's and cuBLAS's handles and kernels take of a GPU
# The caching allocator takes segments of 2 MiB and more, and holes in them stay unused.  Assumed, not measured.
FRAGMENTATION = 0.05
LARGEST_PLANNED_BATCH = 1024  # a larger answer is of no use, and the noise of each sample takes time to trace


@dataclass(frozen=True)
class MemoryPlan:
    """What one rank's training step takes.

    Attributes:
        batch: patches per micro-batch.
        amp: autocast dtype that was planned for.
        parameters: trainable weights of the network.
        flops_per_step: floating-point operations of an optimizer step, forward and backward, over all its
            micro-batches; a multiply-add is 2; blocks that are computed again count again.
        weight_bytes, gradient_bytes, optimizer_bytes, ema_bytes: held through the whole run, except that gradients
            come up in the backward pass; float32.
        activation_bytes: kept from the forward pass of a micro-batch for its backward pass.
        weight_copy_bytes: kept there in autocast copies of weights, whatever the batch.
        peak_bytes: the most that is allocated at once in a step, all of the above included.
        workspace_bytes: allowance for kernels that copy a convolution's input and output into an order of their own:
            both of the largest one.  On a CPU oneDNN does just that (with it, float32 peaks were met to 0.1 %); of
            cuDNN, whose kernels for bf16 and fp16 want channels last, it is assumed.
    """

    batch: int
    amp: AmpMode
    parameters: int
    flops_per_step: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    ema_bytes: int
    activation_bytes: int
    weight_copy_bytes: int
    peak_bytes: int
    workspace_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """What a step takes however small the batch: weights, gradients, optimizer and EMA."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.ema_bytes

    @property
    def activation_bytes_per_patch(self) -> float:
        """`activation_bytes` of one patch."""
        return self.activation_bytes / self.batch

    @property
    def vram_bytes(self) -> int:
        """The memory a GPU must have: the peak and a reserve for what allocated bytes do not show."""
        return CONTEXT_BYTES + int((1 + FRAGMENTATION) * (self.peak_bytes + self.workspace_bytes))


def plan_memory(config: Config, batch: int | None = None, amp: AmpMode = "bf16") -> MemoryPlan:
    """Trace one training step of `config`.

    Takes a second and no memory, needs no GPU and touches no global generator.  `training.compile` keeps as much as the
    eager step with `lean_norm`, whose norms are opaque to it, and the plan is the eager step's.

    Args:
        config: the experiment; no volume is opened.
        batch: patches per micro-batch; None = `training.train_batch_size`.
        amp: autocast dtype.

    Raises:
        ConfigError: a tensor would reach 2^31 elements.
    """
    batch = batch or config.training.train_batch_size
    step = {"train_batch_size": batch, "amp": amp, "compile": False}
    same = {"workers": 0, "prefetch_factor": 1, "prefetch_mib": None, "max_steps": None}  # nothing to a step
    training = config.training.model_copy(update=step | same)
    data = config.data.model_copy(update={"store": StoreConfig()})
    return _trace(config.model_copy(update={"name": "any", "seed": 0, "training": training, "data": data}))


@lru_cache(maxsize=64)  # a trace takes a second, and a dry run or a tune asks for the same batch again and again
def _trace(config: Config) -> MemoryPlan:
    """Of the step that a config has, in the autocast dtype that it names."""
    training = config.training
    amp: AmpMode = training.amp  # type: ignore[assignment]  # never auto here
    # Schedule tables and timesteps are real tensors among fake ones.
    with FakeTensorMode(allow_non_fake_inputs=True), Footprint() as footprint:
        step = _step_with_state(config)
        weights = list(step.network.parameters())
        state = [value for values in step.optimizer.state.values() for value in values.values()]
        if training.accumulate_steps > 1:  # the gradient of earlier micro-batches lives through the forward pass
            _give_gradients(step)
        footprint.restart()
        with footprint.saving(weights):
            _one_micro_batch(step, config)
        # Before the update: Muon's products, below 3 % for a large model, come once a step, not once a micro-batch.
        flops = footprint.flops
        step.apply(training.lr)
        weight_bytes = sum(weight.nbytes for weight in weights)
        return MemoryPlan(
            batch=training.train_batch_size,
            amp=amp,
            parameters=parameter_count(step.network),
            flops_per_step=flops * training.accumulate_steps,
            weight_bytes=weight_bytes,
            gradient_bytes=weight_bytes,
            optimizer_bytes=sum(value.nbytes for value in state),
            ema_bytes=sum(weight.nbytes for average in step.averages.values() for weight in average.weights.values()),
            activation_bytes=footprint.saved_bytes,
            weight_copy_bytes=footprint.saved_cast_bytes,
            peak_bytes=footprint.peak_bytes,
            workspace_bytes=footprint.convolution_bytes,
        )


def largest_batch(config: Config, vram_bytes: int, amp: AmpMode = "bf16") -> int:
    """Return how many patches per micro-batch a GPU of `vram_bytes` holds, the reserve included; 0 = not even one.

    The answer was traced and fits, and one more does not, or reaches the limit of 2^31 elements a tensor or
    `LARGEST_PLANNED_BATCH`.  `accumulate_steps` stays.
    """
    fits, too_many = 0, min(indexable_batch(config), LARGEST_PLANNED_BATCH) + 1
    guess, slope_bytes = 1, 0.0
    first_bytes = plan_memory(config, 1, amp).vram_bytes if too_many > 1 else 0
    while too_many - fits > 1:
        batch = min(max(guess, fits + 1), too_many - 1)
        need_bytes = plan_memory(config, batch, amp).vram_bytes
        if need_bytes <= vram_bytes:
            fits = batch
        else:
            too_many = batch
        if batch > 1:
            # The peak is the largest of several straight lines in the batch: it bends at most a few times.
            slope_bytes = (need_bytes - first_bytes) / (batch - 1)
        guess = batch + int((vram_bytes - need_bytes) // slope_bytes) if slope_bytes > 0 else 2 * batch
    return fits


def indexable_batch(config: Config) -> int:
    """The largest micro-batch without a tensor of 2^31 elements."""
    elements = largest_activation_elements(config.model, 1, config.data.patch_size, config.input_channels, 1)
    return (INT32_LIMIT - 1) // elements


class _FakeUNet(UNet):
    """A network of fake weights, which is where it belongs and cannot be moved."""

    def to(self, *args: Any, **kwargs: Any) -> Self:  # torch moves fake weights by swapping, which their memo forbids
        return self


def _step_with_state(config: Config) -> TrainStep:
    """A step as it is after the first update: with moments and without gradients.  Call it under FakeTensorMode."""
    network = _FakeUNet(config.model, config.input_channels, 1, execution=execution(config.training))
    if config.training.channels_last:
        for weight in network.parameters():
            if weight.ndim == 5:
                weight.data = weight.data.contiguous(memory_format=torch.channels_last_3d)
    step = TrainStep(config, network, Schedule.from_config(config.diffusion), torch.device("cpu"))
    step.scaler.scale(torch.zeros(()))  # the scaler makes its state when it first sees a loss
    _give_gradients(step)
    step.apply(config.training.lr)
    return step


def _give_gradients(step: TrainStep) -> None:
    for weight in step.network.parameters():
        weight.grad = torch.zeros_like(weight)


def _one_micro_batch(step: TrainStep, config: Config) -> None:
    """Noising, forward and backward pass of a batch as `DeviceFeed` delivers it."""
    batch, patch_size = config.training.train_batch_size, config.data.patch_size
    channels, scalars = config.condition_channels, len(config.model.scalars)
    condition = Condition(
        torch.empty(batch, channels, *patch_size) if channels else None,
        torch.empty(batch, scalars + 1) if scalars else None,
    )
    x_0 = torch.empty(batch, 1, *patch_size)
    step.accumulate(x_0, np.arange(batch), np.zeros(batch, np.int64), condition)
