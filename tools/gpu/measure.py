"""One measurement of `gpu_check.py`: some training steps of one network, timed by the device's clock, with its memory.

The data lie on the device: what is measured is the step (noise of the CPU and its copy included), not the reading.
Without a GPU everything runs on the CPU with memory figures None: that is the rehearsal.
"""

from __future__ import annotations

import contextlib
import gc
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from gpu.networks import SHIPPED, Spec, Triple, build, experiment
from torch import Tensor

from vesuvius.config import Config
from vesuvius.diffusion.randomness import stratified_timesteps
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.errors import one_line
from vesuvius.monitor.clock import StepTimes, make_clock
from vesuvius.monitor.probes.vram import is_gpu_memory_error
from vesuvius.training.forecast.memory_plan import peak_flops_s
from vesuvius.training.step.step import StepResult, TrainStep

Row = dict[str, Any]

WARM_UP_STEPS = 2  # the first makes the optimizer's state and cuDNN's choices
LEAST_STEPS, MOST_STEPS = 3, 30
REHEARSED_BATCH = 2  # in a rehearsal larger micro-batches "do not fit"


class OutOfTimeError(BaseException):
    """The budget is used up.  No `Exception`, so that nothing on the way takes it for a failure of the step."""


class Budget:
    """The time that is left, and an alarm that ends a measurement which exceeds it."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    @contextlib.contextmanager
    def enforced(self) -> Iterator[None]:
        """Raise OutOfTimeError in the main thread once nothing is left.  It waits for the kernel that runs."""

        def ring(number: int, frame: FrameType | None) -> None:
            raise OutOfTimeError

        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, max(self.left_s, 0.01))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Bench:
    """Where and on what is measured."""

    device: torch.device  # cuda, or in a rehearsal cpu
    patch_zyx: Triple  # voxels of a patch
    seconds: float  # least length of a timed window
    peak_tflops: tuple[float, float] | None  # of 16-bit and of TF32 products; None: unknown, no MFU

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def find_peak_tflops(device_name: str) -> tuple[float, float] | None:
    """Peak of 16-bit and TF32 products by the device's name; None where the table has it not.  Pure."""
    half, tf32 = (peak_flops_s(device_name, amp, tf32=True) for amp in ("bf16", "off"))
    return (half / 1e12, tf32 / 1e12) if half and tf32 else None


# ---- a step, timed


def attempt(bench: Bench, budget: Budget, row: Row, measure: Callable[[], Row]) -> Row:
    """`row` with what `measure` found and outcome ok; or with an outcome that says why it found nothing.

    Outcomes: ok, out of memory, out of time, or the name of the error.
    """
    try:
        with budget.enforced():
            row = row | measure() | {"outcome": "ok"}
    except OutOfTimeError:
        row = row | {"outcome": "out of time"}
    except Exception as error:
        row = row | {
            "outcome": "out of memory" if is_gpu_memory_error(error) else type(error).__name__,
            "detail": one_line(error),
        }
    # Only here: as long as an error is handled, its frames hold the tensors.
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if bench.on_gpu:
        torch.cuda.empty_cache()
    return row


def measured(bench: Bench, spec: Spec, batch: int, budget: Budget, flops_per_patch: int, **training: Any) -> Row:
    """Patches/s, memory and shares of the step.  `batch`: the micro-batch; `training`: as for `experiment`."""
    row: Row = {"system": spec.name, "micro_batch": batch, "settings": spec.switches | training}
    config = experiment(spec, bench.patch_zyx, batch, **training)
    return attempt(bench, budget, row, lambda: _timed_steps(bench, spec, config, flops_per_patch))


def fits(bench: Bench, spec: Spec, batch: int, budget: Budget, **training: Any) -> bool | None:
    """Whether two optimizer steps go through; None where something else than memory forbids it."""
    config = experiment(spec, bench.patch_zyx, batch, **training)

    def two_steps() -> Row:
        step, x_0 = prepared(bench, spec, config)
        for number in range(2):  # moments come with the first, gradients beside them with the second
            one_step(step, config, x_0, number)
        synchronize(bench)
        return {}

    outcome = attempt(bench, budget, {}, two_steps)["outcome"]
    # ConfigError: a tensor would reach 2^31 elements, which is a limit as well.
    return {"ok": True, "out of memory": False, "ConfigError": False}.get(outcome)


def prepared(bench: Bench, spec: Spec, config: Config) -> tuple[TrainStep, Tensor]:
    """The step of a run and a batch of patches, with cuDNN as the run would have it; memory is counted from here."""
    torch.backends.cudnn.benchmark = config.training.cudnn_benchmark
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    elif config.training.train_batch_size > REHEARSED_BATCH:
        raise torch.OutOfMemoryError(f"rehearsed: micro-batches above {REHEARSED_BATCH} do not fit")
    return make_step(bench, spec, config), resident_patches(bench, config.training.train_batch_size)


def _timed_steps(bench: Bench, spec: Spec, config: Config, flops_per_patch: int) -> Row:
    batch = config.training.train_batch_size
    step, x_0 = prepared(bench, spec, config)
    started = time.perf_counter()
    for number in range(WARM_UP_STEPS):
        warm_up_s = time.perf_counter() - started
        one_step(step, config, x_0, number)
        synchronize(bench)
    step_s = time.perf_counter() - started - warm_up_s
    count = min(max(math.ceil(bench.seconds / step_s), LEAST_STEPS), MOST_STEPS)
    times = _clocked(bench, step, config, x_0, count)
    steps_s = [one.step_s for one in times]
    row: Row = {
        "amp": step.amp,
        "parameters": sum(p.numel() for p in step.network.parameters()),
        "steps": count,
        "step_s": statistics.median(steps_s),
        "step_s_range": [min(steps_s), max(steps_s)],
        "first_step_s": warm_up_s,
        "patches_s": batch / statistics.median(steps_s),
        **shares(times),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if bench.on_gpu else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if bench.on_gpu else None,
    }
    row["mfu"] = _mfu(bench, step.amp, row["patches_s"], flops_per_patch)
    return row


def make_step(bench: Bench, spec: Spec, config: Config) -> TrainStep:
    """The training step of a run, around any of the networks."""
    network = build(spec, config, bench.device)
    spectrum = Spectrum.of(resident_patches(bench, 2)[:, 0].cpu())  # of as many frequencies as a run's
    return TrainStep(config, network, Schedule.from_config(config.diffusion, spectrum), bench.device)


def resident_patches(bench: Bench, batch: int) -> Tensor:
    """Smooth model values, float32 [batch, 1, Z, Y, X], on the device."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(batch, 1, *(max(size // 4, 1) for size in bench.patch_zyx), generator=generator)
    return torch.tanh(F.interpolate(coarse.to(bench.device), size=bench.patch_zyx, mode="trilinear"))


def one_step(step: TrainStep, config: Config, x_0: Tensor, number: int) -> StepResult:
    """Optimizer step `number` of a run whose batch is always the same patches."""
    batch = len(x_0)
    t = stratified_timesteps(config.seed, number, batch, config.diffusion.timesteps)
    step.accumulate(x_0, np.arange(batch, dtype=np.int64) + number * batch, t)
    return step.apply(config.training.lr)


def _clocked(bench: Bench, step: TrainStep, config: Config, x_0: Tensor, count: int) -> list[StepTimes]:
    """Steps as the training loop runs them: the host never waits for the device."""
    clock = make_clock(bench.device)
    step.timed = clock.computing
    times = []
    for number in range(WARM_UP_STEPS, WARM_UP_STEPS + count):
        with clock.waiting():
            batch = x_0  # it is there already
        one_step(step, config, batch, number)
        clock.step_done()
        times += clock.finished()
    return times + clock.finished(wait=True)


def shares(times: list[StepTimes]) -> Row:
    """Shares of the step time, each of the sum over all steps, and those beside computing together."""
    total_s = sum(one.step_s for one in times)
    parts = {name: sum(getattr(one, f"{name}_s") for one in times) / total_s for name in ("data", "h2d", "other")}
    return {f"{name}_share": share for name, share in parts.items()} | {"waiting_share": sum(parts.values())}


def synchronize(bench: Bench) -> None:
    if bench.on_gpu:
        torch.cuda.synchronize()


def _mfu(bench: Bench, amp: str, patches_s: float, flops_per_patch: int) -> float | None:
    if bench.peak_tflops is None:
        return None
    half, tf32 = bench.peak_tflops
    return patches_s * flops_per_patch / 1e12 / (tf32 if amp == "off" else half)


# ---- what the device is busy with


def kernel_share(bench: Bench, spec: Spec, batch: int, budget: Budget) -> Row:
    """Shares of the wall time in which kernels ran, and copies from the host, by torch's profiler.

    The check of the clock's shares.  Needs a GPU, and CUPTI.
    """
    row: Row = {"system": spec.name, "micro_batch": batch, "kernel_share": None, "copy_share": None}
    return attempt(bench, budget, row, lambda: _profiled(bench, spec, batch))


def _profiled(bench: Bench, spec: Spec, batch: int) -> Row:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    if not bench.on_gpu:
        raise RuntimeError("the profile needs a GPU")
    config = experiment(spec, bench.patch_zyx, batch, **SHIPPED)
    step, x_0 = prepared(bench, spec, config)
    for number in range(WARM_UP_STEPS):
        one_step(step, config, x_0, number)
    synchronize(bench)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for number in range(LEAST_STEPS):
            one_step(step, config, x_0, WARM_UP_STEPS + number)
        synchronize(bench)
    # Annotations, such as the optimizer's, span kernels and the gaps between them.
    events = [
        event
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation and "#" not in event.name
    ]
    if not events:
        raise RuntimeError("the profiler saw no kernels: is CUPTI allowed here?")
    begin, end = min(e.time_range.start for e in events), max(e.time_range.end for e in events)
    copies = [e for e in events if e.name.startswith("Memcpy HtoD")]
    kernels = [e for e in events if not e.name.startswith("Memcpy HtoD")]
    return {"kernel_share": _covered(kernels) / (end - begin), "copy_share": _covered(copies) / (end - begin)}


def _covered(events: list[Any]) -> float:
    """Microseconds in which at least one of the events was under way."""
    total, until = 0.0, 0.0
    for event in sorted(events, key=lambda e: e.time_range.start):
        begin, end = max(event.time_range.start, until), event.time_range.end
        if end > begin:
            total, until = total + end - begin, end
    return total


def predicted(spec: Spec, bench: Bench, row: Row) -> Row:
    """What the memory plan says of a measured row of ours, or in `prediction` why it says nothing."""
    try:
        from vesuvius.training.forecast.memory_plan import plan_memory

        plan = plan_memory(experiment(spec, bench.patch_zyx, row["micro_batch"], **row["settings"]), amp=row["amp"])
    except Exception as error:  # the plan is checked here, so that its failure must not end the check
        return {"prediction": f"{type(error).__name__}: {one_line(error)}"}
    # The allocator also hands out what the kernels work in.
    return {"predicted_peak_bytes": plan.peak_bytes + plan.workspace_bytes, "predicted_vram_bytes": plan.vram_bytes}
