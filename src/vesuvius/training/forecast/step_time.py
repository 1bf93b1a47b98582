"""Predicts the seconds of an optimizer step: measured on real steps where these are quick, else from operations."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vesuvius.config import Config
from vesuvius.diffusion.condition import Condition
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.monitor.probes.cores import CpuSeconds, cpu_seconds, others_cores, others_text, usable_cores
from vesuvius.runlog.units import format_duration
from vesuvius.training.forecast.machine import reachable_flops_s
from vesuvius.training.step.device import synchronize
from vesuvius.training.step.network import build_network
from vesuvius.training.step.self_test import check_kernels
from vesuvius.training.step.step import TrainStep, choose_kernels, resolve_amp

_MEASURED_S = 2.0  # of micro-batches; at least two of them
_QUICK_S = 3.0  # longest micro-batch, as its operations predict it, that is measured
_RANGE = (0.6, 2.5)  # of what its operations predict, for a step that is not measured
_STEADY = 1.3  # largest over smallest micro-batch, up to which one figure is given instead of a range


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a step without waits for data."""

    low_s: float
    high_s: float
    measured: bool  # on steps of the network; else from its operations at the rate of one large convolution
    others: str  # what other programs used meanwhile; '' where that was little

    @property
    def step_text(self) -> str:
        """`0.88 s`, or a range `4.1 to 13 s`."""
        low, high = _text(self.low_s), _text(self.high_s)
        return low if low == high else f"{low} to {high}"

    def run_text(self, steps: int) -> str:
        """The same of several steps."""
        low, high = (format_duration(steps * step_s) for step_s in (self.low_s, self.high_s))
        return low if low == high else f"{low} to {high}"


def predict_step_time(config: Config, spectrum: Spectrum, device: torch.device, flops_per_step: int) -> StepTime:
    """Run micro-batches and updates of the network on noise for about two seconds, if they are quick enough.

    Raises:
        ConfigError: the convolutions of the network are wrong on this machine (`check_kernels`).
    """
    before = cpu_seconds()
    amp = resolve_amp(config.training.amp, device)
    flops_s = reachable_flops_s(device, amp)
    predicted_s = flops_per_step / flops_s
    compiled = config.training.compile  # compiling takes minutes
    if compiled or predicted_s / config.training.accumulate_steps > _QUICK_S:
        low_s, high_s = (factor * predicted_s for factor in _RANGE)
        return StepTime(low_s, high_s, False, _others(before))
    return StepTime(*_measure(config, spectrum, device), True, _others(before))


def _measure(config: Config, spectrum: Spectrum, device: torch.device) -> tuple[float, float]:
    """Return the least and the most seconds that a step came to; the same where micro-batches took much the same."""
    training, channels, scalars = config.training, config.condition_channels, len(config.model.scalars)
    choose_kernels(device, training)
    step = TrainStep(config, build_network(config, device), Schedule.from_config(config.diffusion, spectrum), device)
    batch, size_zyx = training.train_batch_size, config.data.patch_size
    check_kernels(config, batch, device, step.amp)
    condition = Condition(
        torch.zeros(batch, channels, *size_zyx, device=device) if channels else None,
        torch.zeros(batch, scalars + 1, device=device) if scalars else None,
    )
    x_0 = torch.randn(batch, 1, *size_zyx, generator=torch.Generator(device).manual_seed(0), device=device)

    def seconds(work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        synchronize(device)
        return time.perf_counter() - began

    def micro_batch() -> None:
        step.accumulate(
            x_0, np.arange(batch), np.linspace(0, config.diffusion.timesteps - 1, batch, dtype=np.int64), condition
        )

    def update() -> None:
        step.apply(training.lr)

    for work in (micro_batch, update):  # the first ones choose kernels and allocate memory
        work()
    taken_s: list[float] = []
    while len(taken_s) < 2 or sum(taken_s) < _MEASURED_S:
        taken_s.append(seconds(micro_batch))
    update_s = seconds(update)
    low_s, middle_s, high_s = min(taken_s), float(np.median(taken_s)), max(taken_s)
    if high_s <= _STEADY * low_s:
        low_s = high_s = middle_s
    return training.accumulate_steps * low_s + update_s, training.accumulate_steps * high_s + update_s


def _others(before: CpuSeconds) -> str:
    return others_text(others_cores(before, cpu_seconds()), usable_cores(os.getpid()))


def _text(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 60 else format_duration(seconds)
