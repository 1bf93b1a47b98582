"""`training.train_batch_size: auto`: as many patches at once as the memory plan fits.  Nothing but speed follows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vesuvius.config import Config
from vesuvius.runlog.units import format_size
from vesuvius.training.forecast.memory_plan import CONTEXT_BYTES, MemoryPlan, max_indexable_batch, plan_memory
from vesuvius.training.forecast.run_plan import num_local_ranks, ram_limit
from vesuvius.training.step.setup import choose_device, resolve_amp

VRAM_SHARE = 0.92
"""Of a GPU's memory, what is planned with; kernels, fragments and validations differ from the plan."""
_RAM_SHARE = 0.4  # of the host's memory, which readers and volumes share, for steps on a CPU


@dataclass(frozen=True)
class MicroBatchFit:
    """A choice, and the memory that it was made by."""

    config: Config  # with numbers in the place of `auto`
    step: MemoryPlan
    need_bytes: int
    available_bytes: int
    fits: bool

    @property
    def line(self) -> str:
        """For people."""
        training, room = self.config.training, format_size(self.available_bytes)
        sizes = f"{training.train_batch_size} x {training.accumulate_steps}"
        none = "" if self.fits else ", where not even one patch fits"
        return f"micro-batch {sizes}: {format_size(self.need_bytes)} of {room} by the memory plan{none}"


def fit_micro_batch(config: Config, available_bytes: int, gpu: bool) -> MicroBatchFit:
    """Choose the largest divisor of a rank's part of the effective batch whose step fits; 1 where none does.

    Takes seconds for a network that was not planned before.  Raises ConfigError: one patch has 2^31 elements.

    Args:
        available_bytes: of memory that this rank may use, as `device_memory_bytes` says.
        gpu: it is a GPU's, of this machine or of another.
    """
    patches = config.training.micro_batch * config.training.accumulate_steps
    most = max(min(patches, max_indexable_batch(config)), 1)
    for size in (size for size in range(most, 0, -1) if patches % size == 0):
        chosen = config.with_micro_batch(size)
        # The buckets in which several ranks sum their gradients stay, as gradients do where a step has several parts.
        planned = chosen if config.training.ranks == 1 else chosen.with_training(accumulate_steps=2)
        step = plan_memory(planned, amp=None if gpu else resolve_amp(config.training.amp, torch.device("cpu")))
        need_bytes = step.vram_bytes if gpu else step.ram_bytes
        if fits := need_bytes <= (VRAM_SHARE if gpu else _RAM_SHARE) * available_bytes:
            break
    return MicroBatchFit(chosen, step, need_bytes, available_bytes, fits)


def device_memory_bytes(config: Config, device: torch.device) -> int:
    """What of the memory of a device other programs leave to a rank, CUDA's own share included: of the GPU's, which
    this begins to use, or of the host's limit."""
    if device.type == "cpu":
        return ram_limit(config.monitor.ram_limit_gib).limit_bytes // num_local_ranks(config)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return min(free_bytes + torch.cuda.memory_reserved(device) + CONTEXT_BYTES, total_bytes)


def resolve_micro_batch(
    config: Config, available_bytes: int | None = None, gpu: bool | None = None
) -> tuple[Config, list[str]]:
    """Put numbers in the place of `auto`, and say which in a line; a config without it stays as it is.

    Args:
        available_bytes, gpu: as of `fit_micro_batch`; None = of this machine's device.
    """
    if config.training.train_batch_size != "auto":
        return config, []
    device = choose_device()
    available_bytes = device_memory_bytes(config, device) if available_bytes is None else available_bytes
    found = fit_micro_batch(config, available_bytes, device.type == "cuda" if gpu is None else gpu)
    return found.config, [found.line]
