"""One row of `gpu_check.py`: a training step in one setting, judged by its losses, timed by the device's clock.

The data lie on the device: what is measured is the step (noise and its copy included), not the reading.
Without a GPU everything runs on the CPU with memory figures None: that is the rehearsal.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from numpy.typing import NDArray
from torch import Tensor, nn

from vesuvius.config import Config
from vesuvius.diffusion.network.regions import CompiledRegions
from vesuvius.diffusion.randomness import sample_noise, stratified_timesteps
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.errors import one_line
from vesuvius.monitor.clock import StepTimes, make_clock
from vesuvius.monitor.probes.vram import is_gpu_memory_error
from vesuvius.training.forecast.memory_plan import plan_memory
from vesuvius.training.step.self_test import TOLERANCES, convolution_errors, network_convolutions
from vesuvius.training.step.setup import AmpMode, build_network
from vesuvius.training.step.step import PendingOutcome, StepOutcome, TrainStep

Row = dict[str, Any]

JUDGED_STEPS = 3  # whose losses are compared with float32; they warm up, too
# Of the loss of each patch, and of the length of the gradient.  bf16 came to 0.0004 and 0.001 with the weights of
# exp001_full on a CPU, while the losses changed by 40 % from step to step.
LOSS_LIMIT, GRADIENT_LIMIT = 0.01, 0.03
LEAST_STEPS, MOST_STEPS = 3, 30
REHEARSED_BATCH = 2  # in a rehearsal larger micro-batches "do not fit"


class OutOfTimeError(RuntimeError):
    """The time of a row is used up."""


class WrongResultError(RuntimeError):
    """Losses or gradients are off beyond rounding."""


class CompileFailedError(RuntimeError):
    """Blocks were to be compiled and were not."""


class Budget:
    """The time that is left: of all, and of the row that is measured."""

    def __init__(self, seconds: float) -> None:
        self._end = self._row_end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def begin_row(self, most_s: float) -> None:
        self._row_end = min(self._end, time.monotonic() + most_s)

    def check(self) -> None:
        """Raise OutOfTimeError once the row's time is used up.

        Asked between pieces of work: an exception out of a signal's handler leaves torch's stacks of modes broken.
        """
        if time.monotonic() >= self._row_end:
            raise OutOfTimeError


@dataclass(frozen=True)
class Setting:
    """How a step is computed: the keys of `training.*` that are tried."""

    compile: bool
    channels_last: bool
    recompute_norm: bool
    train_batch_size: int
    accumulate_steps: int
    optimizer: Literal["adamw", "muon"]

    def with_micro_batch(self, patches: int) -> Setting:
        """Return the same with another micro-batch and as many patches a step."""
        effective = self.train_batch_size * self.accumulate_steps
        return Setting(**asdict(self) | {"train_batch_size": patches, "accumulate_steps": effective // patches})

    @property
    def overrides(self) -> str:
        """For a command line.  The optimizer is left out: it decides what is learned, not only how fast."""
        keys = {key: value for key, value in asdict(self).items() if key != "optimizer"}
        return " ".join(f"training.{key}={str(value).lower()}" for key, value in keys.items())


class Bench:
    """The device, and a config whose step is measured on it.

    Args:
        config: with `amp` resolved and one rank.
        seconds: least length of a timed window.
        peak_flops_s: of the device in the config's amp; None = unknown, no MFU.
        budget: asked before each convolution of the self-test and each micro-batch.
    """

    def __init__(
        self, device: torch.device, config: Config, seconds: float, peak_flops_s: float | None, budget: Budget
    ) -> None:
        self.device, self.config, self._seconds, self._peak_flops_s = device, config, seconds, peak_flops_s
        self.budget = budget
        self._references: dict[str, list[StepOutcome]] = {}
        self._drawer = ThreadPoolExecutor(1)
        self._ahead: dict[int, Future[Tensor]] = {}  # noise by the number of its step

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def amp(self) -> AmpMode:
        amp = self.config.training.amp
        assert amp != "auto"
        return amp

    @property
    def patches(self) -> int:
        """Of an optimizer step."""
        return self.config.training.train_batch_size * self.config.training.accumulate_steps

    @cached_property
    def flops_per_patch(self) -> int:
        """Of forward and backward pass: convolutions and products, 2 a multiply-add, nothing that is computed twice."""
        once = {"checkpoint_levels": (), "optimizer": "adamw", "train_batch_size": 1, "accumulate_steps": 1}
        return plan_memory(self.config.with_training(**once), amp=self.amp).flops_per_step

    @cached_property
    def x_0(self) -> Tensor:
        """Smooth model values, float32 [patches, 1, Z, Y, X], on the device."""
        size_zyx, generator = self.config.data.patch_size, torch.Generator().manual_seed(0)
        coarse = torch.randn(self.patches, 1, *(max(size // 4, 1) for size in size_zyx), generator=generator)
        return torch.tanh(F.interpolate(coarse.to(self.device), size=size_zyx, mode="trilinear"))

    @cached_property
    def condition(self) -> Tensor | None:
        channels = self.config.condition_channels
        shape = (self.patches, channels, *self.config.data.patch_size)
        return torch.ones(shape, device=self.device) if channels else None

    @cached_property
    def schedule(self) -> Schedule:
        return Schedule.from_config(self.config.diffusion, Spectrum.of(self.x_0[:2, 0].cpu()))

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    # ---- what is right

    def self_test(self, channels_last: bool, batch: int) -> Row:
        """Largest relative errors of the network's convolutions, as at the start of a run in 16 bits."""
        errors: dict[str, float] = {}
        for convolution in network_convolutions(self.config, batch):
            self.budget.check()
            found = convolution_errors(convolution, self.device, self.amp, channels_last)
            errors |= {part: float(np.maximum(error, errors.get(part, 0.0))) for part, error in found.items()}
        if any(not error <= TOLERANCES[self.amp] for error in errors.values()):  # also NaN
            worst = ", ".join(f"{part} {error:.1e}" for part, error in errors.items())
            raise WrongResultError(f"convolutions are off by {worst}; {TOLERANCES[self.amp]:g} allowed")
        return {"errors": errors}

    def reference(self, optimizer: str) -> list[StepOutcome]:
        """The first steps in float32 (no TF32), eager, contiguous; computed once for each optimizer."""
        if optimizer not in self._references:
            plain = {"compile": False, "channels_last": False, "train_batch_size": 1, "accumulate_steps": self.patches}
            config = self.config.with_training(amp="off", optimizer=optimizer, **plain)
            with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
                self._references[optimizer] = self._judged_steps(self._step(config), config)
        return self._references[optimizer]

    def _judged_steps(self, step: TrainStep, config: Config) -> list[StepOutcome]:
        results = []
        for number in range(JUDGED_STEPS):
            results.append(self._one(step, config, number))
            self.synchronize()
            if (regions := step.network.execution.call) and isinstance(regions, CompiledRegions) and regions.failure:
                raise CompileFailedError(regions.failure)
        return [result.read() for result in results]

    # ---- what is fast

    def measure(self, setting: Setting) -> Row:
        """Seconds, memory and shares of the step in a setting.

        Raises WrongResultError and CompileFailedError.
        """
        reference = self.reference(setting.optimizer)
        config = self.config.with_training(**asdict(setting))
        if not self.on_gpu and setting.train_batch_size > REHEARSED_BATCH:
            raise torch.OutOfMemoryError(f"rehearsed: micro-batches above {REHEARSED_BATCH} do not fit")
        torch.backends.cudnn.benchmark = True
        step, started = self._step(config), time.perf_counter()
        differences = compare(self._judged_steps(step, config), reference)
        warm_up_s = time.perf_counter() - started
        if self.on_gpu:
            torch.cuda.empty_cache()  # cuDNN's trials filled whatever memory was free
            torch.cuda.reset_peak_memory_stats()
        times = self._clocked(step, config)
        steps_s = [one.step_s for one in times]
        step_s = statistics.median(steps_s)
        row: Row = {
            "step_s": step_s,
            "steps_s": steps_s,
            "warm_up_s": warm_up_s,
            "patches_s": self.patches / step_s,
            "mfu": self._peak_flops_s and self.patches * self.flops_per_patch / step_s / self._peak_flops_s,
            "waiting_share": _waiting_share(times),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated() if self.on_gpu else None,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() if self.on_gpu else None,
        }
        plan = plan_memory(config, amp=self.amp)  # the allocator also hands out what the kernels work in
        return row | differences | {"plan_peak_bytes": max(plan.live_bytes) + plan.workspace_bytes}

    def _step(self, config: Config) -> TrainStep:
        network = build_network(config, self.device)
        _wake(network)
        return TrainStep(config, network, self.schedule, self.device)

    def _one(self, step: TrainStep, config: Config, number: int) -> PendingOutcome:
        """Optimizer step `number` of a run whose batch is always the same patches."""
        t = stratified_timesteps(config.seed, number, self.patches, config.diffusion.timesteps)
        size = config.training.train_batch_size
        noise = self._ahead.get(number) or self._noise(number)
        self._ahead = {number + 1: self._noise(number + 1)}
        for first in range(0, self.patches, size):
            self.budget.check()
            part = slice(first, first + size)
            condition = None if self.condition is None else self.condition[part]
            eps = noise.result()[part].to(self.device, non_blocking=True)
            last = first + size == self.patches
            step.accumulate(self.x_0[part], self._indices(number)[part], t[part], condition, last, eps)
        return step.apply(config.training.lr)

    def _indices(self, number: int) -> NDArray[np.int64]:
        return np.arange(self.patches, dtype=np.int64) + number * self.patches

    def _noise(self, number: int) -> Future[Tensor]:
        """Of a step, drawn on a thread while the device computes, as in a run."""
        shape, seed = (1, *self.config.data.patch_size), self.config.seed
        return self._drawer.submit(sample_noise, seed, self._indices(number), shape, pinned=self.on_gpu)

    def _clocked(self, step: TrainStep, config: Config) -> list[StepTimes]:
        """Steps as the training loop runs them: the host never waits for the device."""
        started = time.perf_counter()
        self._one(step, config, JUDGED_STEPS)
        self.synchronize()
        one_s = time.perf_counter() - started
        clock = make_clock(self.device)
        step.timed = clock.computing
        times = []
        for number in range(min(max(math.ceil(self._seconds / one_s), LEAST_STEPS), MOST_STEPS)):
            self._one(step, config, JUDGED_STEPS + 1 + number)
            clock.step_done()
            times += clock.finished()
        return times + clock.finished(wait=True)


def compare(found: Sequence[StepOutcome], reference: Sequence[StepOutcome]) -> Row:
    """The largest relative differences of the losses of all patches and of the gradient's length.

    Raises WrongResultError if they are beyond rounding or not a number.
    """
    losses = np.array([step.losses for step in found]) / np.array([step.losses for step in reference]) - 1
    lengths = np.array([step.grad_norm for step in found]) / np.array([step.grad_norm for step in reference]) - 1
    loss_off, gradient_off = float(np.abs(losses).max()), float(np.abs(lengths).max())
    if not (loss_off <= LOSS_LIMIT and gradient_off <= GRADIENT_LIMIT):
        raise WrongResultError(
            f"losses are off by up to {loss_off:.1%}, gradients by {gradient_off:.1%} of their length, within "
            f"{len(found)} steps; {LOSS_LIMIT:.0%} and {GRADIENT_LIMIT:.0%} allowed"
        )
    return {"loss_off": loss_off, "gradient_off": gradient_off}


def attempt(bench: Bench, most_s: float, measure: Callable[[], Row]) -> Row:
    """Return the figures of `measure` with outcome ok, or another outcome with a detail.

    Outcomes: ok, out of memory, out of time, or the name of the error.
    """
    bench.budget.begin_row(most_s)
    try:
        row = measure() | {"outcome": "ok"}
    except OutOfTimeError:
        row = {"outcome": "out of time", "detail": f"not done within {most_s:.0f} s"}
    except Exception as error:
        known = {WrongResultError: "wrong", CompileFailedError: "not compiled"}
        outcome = "out of memory" if is_gpu_memory_error(error) else known.get(type(error), type(error).__name__)
        row = {"outcome": outcome, "detail": one_line(error)}
    # Only here: as long as an error is handled, its frames hold the tensors.
    gc.collect()
    if bench.on_gpu:
        torch.cuda.empty_cache()
    return row


def _waiting_share(times: Sequence[StepTimes]) -> float:
    """Share of the time in which the device neither computed nor had anything queued."""
    return sum(one.data_s + one.h2d_s + one.other_s for one in times) / sum(one.step_s for one in times)


@torch.no_grad()
def _wake(network: nn.Module) -> None:
    """Give small random values to weights that start as zero, or the first losses would not see the network."""
    generator = torch.Generator().manual_seed(1)
    for weight in network.parameters():
        if weight.ndim > 1 and not weight.any():
            values = torch.empty(weight.shape).normal_(std=0.5 * weight[0].numel() ** -0.5, generator=generator)
            weight.copy_(values)
