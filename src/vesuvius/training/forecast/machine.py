"""What of a machine decides how large a run may be: cores, memory, shared memory, GPU, speed.  Does I/O."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from vesuvius.monitor.memory.limits import Limits, tightest
from vesuvius.monitor.probes.cores import usable_cores
from vesuvius.monitor.probes.system_sample import sample_system
from vesuvius.runlog.units import gib
from vesuvius.training.step.device import synchronize
from vesuvius.training.step.step import AmpMode, autocast, choose_device, resolve_amp

_MEASURED_S = 0.5
_CHANNELS = {"cpu": 32, "cuda": 128}
_SIZE = 32  # voxels along each axis of the measured convolution
# What a whole training step reaches of it: norms, attention, the optimizer and memory traffic take the rest.
_SHARE_OF_CONVOLUTION = 0.5


@dataclass(frozen=True)
class Machine:
    """This machine."""

    cores: float  # that this process may use, by affinity and cgroup quota
    ram_bytes: int  # the smallest memory limit
    shm_bytes: int | None  # free in /dev/shm; None where there is none, and then Ray takes a disk
    disk_bytes: int  # free in the working directory
    gpu: str | None  # its name; None = no GPU
    vram_bytes: int | None  # free on the GPU
    amp: AmpMode  # what `training.amp: auto` means here
    flops_s: float  # floating-point operations a second that a training step is expected to reach

    def words(self) -> str:
        """`12 cores, 170 GiB of memory, NVIDIA A100 with 79.1 GiB free`."""
        gpu = f"{self.gpu} with {gib(self.vram_bytes)} GiB free" if self.gpu else "no GPU"
        return f"{self.cores:g} cores, {gib(self.ram_bytes)} GiB of memory, {gpu}"


def look_at_machine() -> Machine:
    """Describe this machine; takes a second, in which convolutions are timed."""
    device = choose_device()
    shared = Path("/dev/shm")
    on_gpu = device.type == "cuda"
    amp = resolve_amp("auto", device)
    return Machine(
        cores=usable_cores(os.getpid()),
        ram_bytes=tightest(sample_system(os.getpid()), Limits()).limit_bytes,
        shm_bytes=shutil.disk_usage(shared).free if shared.is_dir() else None,
        disk_bytes=shutil.disk_usage(Path.cwd()).free,
        gpu=torch.cuda.get_device_name(device) if on_gpu else None,
        vram_bytes=torch.cuda.mem_get_info(device)[0] if on_gpu else None,
        amp=amp,
        flops_s=reachable_flops_s(device, amp),
    )


def reachable_flops_s(device: torch.device, amp: AmpMode) -> float:
    """Floating-point operations a second that a training step is expected to reach; times convolutions for 0.5 s.

    On a CPU those that it would reach if nothing else ran.
    """
    return _SHARE_OF_CONVOLUTION * _convolution_flops_s(device, amp)


def _convolution_flops_s(device: torch.device, amp: AmpMode) -> float:
    """The best rate of forward and backward passes of a 3x3x3 convolution; a multiply-add is 2 operations.

    On a CPU processor time counts, not the clock's: other programs may run.
    """
    channels = _CHANNELS[device.type]
    x = torch.zeros(1, channels, _SIZE, _SIZE, _SIZE, device=device, requires_grad=True)
    weight = torch.zeros(channels, channels, 3, 3, 3, device=device, requires_grad=True)
    flops = 3 * 2 * 27 * channels**2 * _SIZE**3
    on_cpu, passes_s = device.type == "cpu", list[float]()
    clock, until = time.process_time if on_cpu else time.perf_counter, time.perf_counter() + _MEASURED_S
    while len(passes_s) < 3 or time.perf_counter() < until:
        began = clock()
        with autocast(device, amp):
            y = functional.conv3d(x, weight, padding=1)
        y.sum().backward()  # type: ignore[no-untyped-call]
        synchronize(device)
        passes_s.append((clock() - began) / (torch.get_num_threads() if on_cpu else 1))
    return flops / min(passes_s)
