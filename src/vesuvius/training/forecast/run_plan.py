"""The memory plan of a run: what dry run, doctor, init and tune ask, and what is printed of it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from vesuvius.config import Config
from vesuvius.monitor.memory.limits import Limits, MemoryLimit, tightest
from vesuvius.monitor.probes.system_sample import sample_system
from vesuvius.runlog.units import GIB, size_text
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.training.forecast.memory_plan import (
    LARGEST_PLANNED_BATCH,
    MemoryPlan,
    indexable_batch,
    largest_batch,
    leaner,
    plan_memory,
)
from vesuvius.training.forecast.ram_plan import RamPlan, plan_ram, ram_warning
from vesuvius.training.step.step import choose_device

_ASSUMED_VRAM_GIB = 80  # of an A100 or H100


@dataclass(frozen=True)
class Problem:
    """Memory that a run would lack."""

    text: str
    refused: bool  # it would not fit; else it is only tight, or planned for hardware that is not here


@dataclass(frozen=True)
class RunPlan:
    """What a run takes of GPU and host memory, and what there is."""

    config: Config
    data: PreparedData
    on_gpu: bool  # the step's memory is a GPU's
    step: MemoryPlan
    ram: RamPlan
    limit: MemoryLimit  # of the host's memory
    vram_bytes: int  # memory of the GPU that is planned for
    whose: str  # where that figure is from
    vram_free_bytes: int | None = None  # of the GPU that is here

    def short(self) -> str:
        """`RAM 3 GiB planned of 24 GiB (the machine)`, and on a GPU its memory."""
        ram, limit = size_text(self.ram.total_bytes), self.limit
        text = f"RAM {ram} planned of {size_text(limit.limit_bytes)} ({limit.name})"
        if self.on_gpu:
            text += f"; VRAM {size_text(self.step.vram_bytes)} planned of {size_text(self.vram_bytes)} ({self.whose})"
        return text

    def lines(self) -> list[str]:
        """For people: the GPU's memory, then the host's and its limit."""
        step, largest = self.step, largest_batch(self.config, self.vram_bytes)
        ends = {LARGEST_PLANNED_BATCH: " or more", indexable_batch(self.config): ", where a tensor nears 2^31 elements"}
        return [
            f"memory     planned for {self.vram_bytes / GIB:.1f} GiB of VRAM ({self.whose}), amp {step.amp}",
            f"  fixed    {size_text(step.fixed_bytes)}: weights {size_text(step.weight_bytes)}, gradients "
            f"{size_text(step.gradient_bytes)}, optimizer {size_text(step.optimizer_bytes)}, "
            f"EMA {size_text(step.ema_bytes)}",
            f"  kept     {size_text(step.activation_bytes_per_patch)} of activations per patch, "
            f"{size_text(step.weight_copy_bytes)} of autocast copies of weights",
            f"  peak     {size_text(step.peak_bytes)} with train_batch_size {step.batch}, "
            f"{size_text(step.vram_bytes)} with the reserve for CUDA, cuDNN and fragmentation",
            f"  largest  train_batch_size {largest}{ends.get(largest, '')}",
            *self.ram.lines(),
            f"  limit    {size_text(self.limit.limit_bytes)} ({self.limit.name})",
        ]

    def problems(self) -> list[Problem]:
        """What does not fit, with its remedy; empty where all does."""
        need, found = self.step.vram_bytes, []
        if need > self.vram_bytes:
            largest = largest_batch(self.config, self.vram_bytes)
            remedy = f"set training.train_batch_size={largest} and raise training.accumulate_steps"
            text = (
                f"train_batch_size {self.step.batch} will not fit: {size_text(need)} of GPU memory needed of "
                f"{size_text(self.vram_bytes)}; {remedy if largest else leaner(self.config)}"
            )
            found.append(Problem(text, self.on_gpu))
        elif self.vram_free_bytes is not None and need > self.vram_free_bytes:
            free = size_text(self.vram_free_bytes)
            found.append(Problem(f"only {free} of GPU memory are free; see nvidia-smi for who holds the rest", False))
        if warning := ram_warning(self.config, self.data, self.ram, self.limit):
            # A GPU that is not here may stand in a machine with more memory.
            here = self.whose != "--vram-gib" or self.config.monitor.ram_limit_gib is not None
            found.append(Problem(warning, here and self.ram.total_bytes > self.limit.limit_bytes))
        return found


def plan_run(config: Config, data: PreparedData | None = None, vram_gib: float | None = None) -> RunPlan:
    """Plan the memory of a run on this machine, of all its ranks here, or with a GPU of `vram_gib`.

    Takes a few seconds for a network that was not planned before.  Writes nothing; `data` None opens the volumes.

    Raises:
        ConfigError: a tensor would reach 2^31 elements.
        DataError: a volume cannot be used.
    """
    data, device, free_bytes = data or prepare_data(config.seed, config.data), choose_device(), None
    on_gpu = vram_gib is not None or device.type == "cuda"
    if vram_gib is not None:
        vram_bytes, whose = int(vram_gib * GIB), "--vram-gib"
    elif on_gpu:
        properties = torch.cuda.get_device_properties(device)
        vram_bytes, whose, free_bytes = properties.total_memory, properties.name, torch.cuda.mem_get_info(device)[0]
    else:
        vram_bytes = _ASSUMED_VRAM_GIB * GIB
        whose = "assumed, as this machine has no GPU; --vram-gib N plans for another"
    ram, limit = plan_ram(config, data, on_gpu), ram_limit(config.monitor.ram_limit_gib)
    return RunPlan(config, data, on_gpu, plan_memory(config), ram, limit, vram_bytes, whose, free_bytes)


def ram_limit(configured_gib: float | None) -> MemoryLimit:
    """The smallest of the machine's memory, the limits of this process's cgroups, and `monitor.ram_limit_gib`."""
    limits = Limits(configured_bytes=None if configured_gib is None else int(configured_gib * GIB))
    return tightest(sample_system(os.getpid()), limits)
