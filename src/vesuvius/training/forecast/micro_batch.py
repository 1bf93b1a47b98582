"""`training.train_batch_size: auto`: the largest micro-batch that fits the memory plan.  Affects speed only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vesuvius.config import Config
from vesuvius.loader.resident import ram_limit
from vesuvius.runlog.units import format_size
from vesuvius.training.forecast.memory_plan import CONTEXT_BYTES, MemoryPlan, max_indexable_batch, plan_memory
from vesuvius.training.forecast.run_plan import num_local_ranks
from vesuvius.training.step.setup import choose_device, resolve_amp

VRAM_SHARE = 0.92
"""Share of GPU memory to plan with, as kernels, fragmentation and validations are not planned exactly."""
_RAM_SHARE = 0.4  # share of host memory for steps on a CPU; readers and volumes use the rest


@dataclass(frozen=True)
class MicroBatchFit:
    """A chosen micro-batch and its planned memory."""

    config: Config  # `auto` replaced by numbers
    step: MemoryPlan
    need_bytes: int
    available_bytes: int
    fits: bool

    @property
    def line(self) -> str:
        training, room = self.config.training, format_size(self.available_bytes)
        sizes = f"{training.train_batch_size} x {training.accumulate_steps}"
        none = "" if self.fits else ", too little for even one patch"
        return f"micro-batch {sizes}: {format_size(self.need_bytes)} of {room} by the memory plan{none}"


def fit_micro_batch(config: Config, available_bytes: int, gpu: bool) -> MicroBatchFit:
    """Choose the largest divisor of a rank's share of the effective batch whose step fits; 1 if none does.

    Takes seconds for a new network.  Raises ConfigError: a tensor of one patch has 2^31 elements.

    `available_bytes` is as from `device_memory_bytes`, `gpu` whether this is GPU memory, here or elsewhere.
    """
    patches = config.training.micro_batch * config.training.accumulate_steps
    largest = max(min(patches, max_indexable_batch(config)), 1)
    for size in (size for size in range(largest, 0, -1) if patches % size == 0):
        chosen = config.with_micro_batch(size)
        # DDP's gradient buckets stay allocated, like the gradients of accumulated micro-batches.
        planned = chosen if config.training.ranks == 1 else chosen.with_training(accumulate_steps=2)
        step = plan_memory(planned, amp=None if gpu else resolve_amp(config.training.amp, torch.device("cpu")))
        need_bytes = step.vram_bytes if gpu else step.ram_bytes
        if fits := need_bytes <= (VRAM_SHARE if gpu else _RAM_SHARE) * available_bytes:
            break
    return MicroBatchFit(chosen, step, need_bytes, available_bytes, fits)


def device_memory_bytes(config: Config, device: torch.device) -> int:
    """Memory available to a rank: what other programs leave of its GPU, including CUDA's own share, or its share of the
    host's limit.
    """
    if device.type == "cpu":
        return ram_limit(config.monitor.ram_limit_gib).total_bytes // num_local_ranks(config)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return min(free_bytes + torch.cuda.memory_reserved(device) + CONTEXT_BYTES, total_bytes)


def resolve_micro_batch(
    config: Config, available_bytes: int | None = None, gpu: bool | None = None
) -> tuple[Config, list[str]]:
    """Replace `auto` by numbers and return a log line; a config without `auto` is returned unchanged.

    Arguments are those of `fit_micro_batch`; None = this machine's device.
    """
    if config.training.train_batch_size != "auto":
        return config, []
    device = choose_device()
    available_bytes = device_memory_bytes(config, device) if available_bytes is None else available_bytes
    found = fit_micro_batch(config, available_bytes, device.type == "cuda" if gpu is None else gpu)
    return found.config, [found.line]
