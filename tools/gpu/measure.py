"""A training step in one setting, judged by its losses and timed by the device's clock, for `gpu_check.py`.

Patches and noise lie on the device, as a run reads and draws ahead on other threads.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from vesuvius.accelerator import empty_cache, synchronize
from vesuvius.config import Config
from vesuvius.diffusion.network.regions import CompiledRegions
from vesuvius.diffusion.randomness import sample_noise, stratified_timesteps
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.monitor.clock import StepTimes, make_clock
from vesuvius.runlog.units import GIB
from vesuvius.training.forecast.memory_plan import plan_memory
from vesuvius.training.step.setup import build_network
from vesuvius.training.step.step import PendingOutcome, TrainStep

Row = dict[str, Any]

JUDGED_STEPS = 3  # whose losses are compared with float32; they warm up, too
# Of the loss of each patch, and of the length of the gradient.  bf16 came to 0.0004 and 0.001 with the weights of
# exp001_full on a CPU, while the losses changed by 40 % from step to step.
LOSS_LIMIT, GRADIENT_LIMIT = 0.01, 0.03
WINDOW_S, LEAST_STEPS, MOST_STEPS = 2.0, 3, 30  # least length of a timed window on a GPU
REHEARSED_BATCH = 2  # in a rehearsal larger micro-batches "do not fit"


class RowError(RuntimeError):
    """Ends a row without figures; `outcome` is wrong, skipped, not compiled or out of time."""

    def __init__(self, outcome: str, detail: str = "") -> None:
        super().__init__(detail)
        self.outcome = outcome


class Bench:
    """A config with one rank and `amp` resolved, on a device of whose memory `memory_share` may be used."""

    def __init__(
        self, device: torch.device, config: Config, peak_flops_s: float | None = None, memory_share: float = 1.0
    ) -> None:
        self.device, self.config, self.peak_flops_s, self._memory_share = device, config, peak_flops_s, memory_share
        self.on_gpu, self.amp, self.patches = device.type != "cpu", config.training.amp, config.global_batch
        self.row_end_s = math.inf
        self._references: dict[str, Row] = {}

    def check_time(self) -> None:
        """Between pieces of work: an exception out of a signal's handler leaves torch's stacks of modes broken."""
        if time.monotonic() >= self.row_end_s:
            raise RowError("out of time", "more than its limit, or than --minutes")

    def limit_memory(self, share: float = 1.0) -> None:
        """Free what earlier work left, and limit this process to a share of the GPU's memory."""
        gc.collect()
        empty_cache()
        if self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(min(share, self._memory_share))

    @cached_property
    def flops_per_patch(self) -> int:
        """Of forward and backward pass: convolutions and products, 2 a multiply-add, nothing that is computed twice."""
        once = {"checkpoint_levels": (), "optimizer": "adamw", "train_batch_size": 1, "accumulate_steps": 1}
        return plan_memory(self.config.with_training(**once), amp=self.amp).flops_per_step

    @cached_property
    def x_0(self) -> Tensor:
        """Smooth model values, float32 [patches, 1, Z, Y, X]."""
        size_zyx, generator = self.config.data.patch_size, torch.Generator().manual_seed(0)
        coarse = torch.randn(self.patches, 1, *(max(size // 4, 1) for size in size_zyx), generator=generator)
        return torch.tanh(F.interpolate(coarse, size=size_zyx, mode="trilinear")).to(self.device)

    @cached_property
    def eps(self) -> Tensor:
        return sample_noise(self.config.seed, range(self.patches), (1, *self.config.data.patch_size), self.device)

    @cached_property
    def condition(self) -> Tensor | None:
        shape = (self.patches, self.config.condition_channels, *self.config.data.patch_size)
        return torch.ones(shape, device=self.device) if self.config.condition_channels else None

    @cached_property
    def schedule(self) -> Schedule:
        return Schedule.from_config(self.config.diffusion, Spectrum.of(self.x_0[:2, 0].cpu()))

    def reference(self, optimizer: str) -> Row:
        """Judged steps in float32 (no TF32), eager, contiguous; computed once for each optimizer."""
        plain = {"compile": False, "channels_last": False, "train_batch_size": 1, "accumulate_steps": self.patches}
        config = self.config.with_training(amp="off", optimizer=optimizer, **plain)
        if optimizer not in self._references:
            with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
                self._references[optimizer] = self.judged_steps(self.step(config), config)
        return self._references[optimizer]

    def measure(self, setting: Row) -> Row:
        """Seconds, memory and shares of the step in a setting.

        An effective batch larger than the config's has its patches several times, so that the reference holds for it.
        Raises RowError: wrong, or not compiled.
        """
        config = self.config.with_training(**setting)
        if not self.on_gpu and setting["train_batch_size"] > REHEARSED_BATCH:
            raise torch.OutOfMemoryError(f"rehearsed: micro-batches above {REHEARSED_BATCH} do not fit")
        reference = self.reference(setting["optimizer"])
        torch.backends.cudnn.benchmark = True
        step, started = self.step(config), time.perf_counter()
        row = compare(self.judged_steps(step, config), reference)
        row["warm_up_s"] = time.perf_counter() - started
        empty_cache()  # cuDNN's trials filled whatever memory was free
        if self.on_gpu:
            torch.accelerator.reset_peak_memory_stats()
        times = self._clocked(step, config)
        row["steps_s"] = [one.step_s for one in times]
        row["step_s"] = statistics.median(row["steps_s"])
        row["patches_s"] = config.global_batch / row["step_s"]
        row["mfu"] = self.peak_flops_s and row["patches_s"] * self.flops_per_patch / self.peak_flops_s
        # Share of the time in which the device neither computed nor had anything queued.
        waited_s = sum(one.data_s + one.h2d_s + one.other_s for one in times)
        row["waiting_share"] = waited_s / sum(row["steps_s"])
        row["peak_gib"] = torch.accelerator.max_memory_allocated() / GIB if self.on_gpu else None
        row["reserved_gib"] = torch.accelerator.max_memory_reserved() / GIB if self.on_gpu else None
        return row | {"plan_gib": planned_peak(config) / GIB}

    def step(self, config: Config) -> TrainStep:
        network = build_network(config, self.device)
        wake(network)
        return TrainStep(config, network, self.schedule, self.device)

    def judged_steps(self, step: TrainStep, config: Config) -> Row:
        """Losses and gradient lengths of the first steps."""
        results = []
        for number in range(JUDGED_STEPS):
            results.append(self.one(step, config, number, self.eps))
            synchronize(self.device)
            if (regions := step.network.execution.call) and isinstance(regions, CompiledRegions) and regions.failure:
                raise RowError("not compiled", regions.failure)
        steps = [result.read() for result in results]
        return {"losses": [step.losses for step in steps], "grad_norms": [step.grad_norm for step in steps]}

    def one(self, step: TrainStep, config: Config, number: int, eps: Tensor | None = None) -> PendingOutcome:
        """Optimizer step `number` of a run whose batch is always the same patches; without `eps` its noise is drawn."""
        size, places = config.training.micro_batch, np.arange(config.global_batch) % self.patches
        t = stratified_timesteps(config.seed, number, self.patches, config.diffusion.timesteps)[places]
        for first in range(0, len(places), size):
            self.check_time()
            rows = places[first : first + size]
            whole, copies = slice(rows[0], rows[-1] + 1), max(size // self.patches, 1)
            tensors = (self.x_0, self.condition, eps)
            given = [None if each is None else torch.cat([each[whole]] * copies) for each in tensors]
            indices, last = rows + number * self.patches, first + size == len(places)
            step.accumulate(given[0], indices, t[first : first + size], given[1], last, given[2])
        return step.apply(config.training.lr)

    def _clocked(self, step: TrainStep, config: Config) -> list[StepTimes]:
        """Steps as the training loop runs them: the host never waits for the device."""
        started = time.perf_counter()
        self.one(step, config, JUDGED_STEPS, self.eps)
        synchronize(self.device)
        one_s, window_s = time.perf_counter() - started, WINDOW_S if self.on_gpu else 0.0
        clock = make_clock(self.device)
        step.timed = clock.computing
        times = []
        for number in range(min(max(math.ceil(window_s / one_s), LEAST_STEPS), MOST_STEPS)):
            self.one(step, config, JUDGED_STEPS + 1 + number, self.eps)
            clock.step_done()
            times += clock.finished()
        return times + clock.finished(wait=True)


def planned_peak(config: Config) -> int:
    """Bytes that a step allocates at most, by the memory plan: the allocator also hands out what kernels work in."""
    plan = plan_memory(config, amp=config.training.amp)
    return max(plan.live_bytes) + plan.workspace_bytes


def judged(what: str, off: float, allowed: float) -> Row:
    """How far it is off, and which share of what is allowed.  Raises RowError beyond it, also for NaN."""
    if not off <= allowed:
        raise RowError("wrong", f"{what}: off by {off:.1e}, {allowed:.1e} allowed")
    return {"off": off, "used": off / allowed}


def compare(found: Row, reference: Row) -> Row:
    """The largest relative differences of the losses of all patches and of the gradient's length.

    Raises RowError if they are beyond rounding or not a number.
    """
    (losses, lengths), (exact, exact_lengths) = (map(np.array, figures.values()) for figures in (found, reference))
    loss_off = float(np.abs(losses / np.tile(exact, losses.shape[1] // exact.shape[1]) - 1).max())
    gradient_off = float(np.abs(lengths / exact_lengths - 1).max())
    judged("a patch's loss", loss_off, LOSS_LIMIT)
    judged("the gradient's length", gradient_off, GRADIENT_LIMIT)
    return {"loss_off": loss_off, "gradient_off": gradient_off}


@torch.no_grad()
def wake(network: nn.Module) -> None:
    """Give small random values to weights that start as zero, or the first losses would not see the network."""
    generator = torch.Generator().manual_seed(1)
    for weight in network.parameters():
        if weight.ndim > 1 and not weight.any():
            values = torch.empty(weight.shape).normal_(std=0.5 * weight[0].numel() ** -0.5, generator=generator)
            weight.copy_(values)
