"""The start-up lines of a run's log, and its dry run, which ends after them."""

import contextlib
import logging
import math
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import functional

from vesuvius.accelerator import choose_device, synchronize
from vesuvius.config import Config, TrainingConfig
from vesuvius.config.describe import CHANGES_TRAINING
from vesuvius.config.load import parse_config, read_source
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import ConfigError
from vesuvius.monitor.probes.cores import usable_cores
from vesuvius.runlog.files import free_disk_bytes, nearest_existing
from vesuvius.runlog.run_dir import run_dir
from vesuvius.runlog.units import GIB, format_count, format_duration, format_size, format_sizes
from vesuvius.training.checkpoint.format import newest_checkpoint
from vesuvius.training.checkpoint.progress import Progress
from vesuvius.training.forecast.memory_plan import plan_memory
from vesuvius.training.forecast.plan import (
    RunPlan,
    checkpoint_sizes,
    first_pass_samples,
    num_local_ranks,
    plan_run,
    resolve_micro_batch,
)
from vesuvius.training.forecast.preflight import Preflight, config_warnings, preflight
from vesuvius.training.ranks.share import batch_advice, rank_share
from vesuvius.training.step.setup import (
    AmpMode,
    autocast,
    build_meta_network,
    parameter_count,
    resolve_amp,
    uses_channels_last,
)
from vesuvius.volumes.box import format_box

_TIME_RANGE = (0.6, 2.5)  # relative to the time predicted from operations
# Rate of a full training step (norms, attention, optimizer, memory traffic) relative to a convolution's.
_SHARE_OF_CONVOLUTION = 0.5
_MEASURED_S = 0.5


def startup_lines(
    config: Config, source: Path | None, checked: Preflight, world: int, resume: bool, existed: bool
) -> list[tuple[int, str]]:
    """Log level and text of each line: checkpoint, changes since, warnings, data as read by `world` ranks, and network.

    The batch is compared with that of `source`.  With `resume` of a run that `existed`, a checkpoint is expected.
    """
    info, warning, resumed, data = logging.INFO, logging.WARNING, checked.resumed, checked.data
    training, device, lines = config.training, choose_device(), list[tuple[int, str]]()
    if resumed is not None:
        finished = ", the last step: nothing to do" if resumed.step >= config.stop_step else ""
        progress, epochs = Progress.from_state(resumed.state), training.epochs
        epoch = min(progress.step // training.steps_per_epoch + 1, epochs)
        done = f"step {progress.step} of {config.stop_step}, {progress.sample_index} samples, epoch {epoch} of {epochs}"
        before = f"session {progress.sessions} after {format_duration(progress.trained_s)} of training"
        lines.append((info, f"continuing from {resumed.checkpoint}: {done}; {before}{finished}"))
        drift = ((warning if line.startswith(CHANGES_TRAINING) else info, line) for line in resumed.drift)
        lines += [(level, f"changed since the checkpoint: {line}") for level, line in drift]
        accepted = "accepted by --allow-drift (results before and after are not comparable)"
        lines += [(warning, f"{accepted}: {line}") for line in resumed.accepted]
    elif resume:
        found = f"no complete checkpoint in {checked.directory.checkpoints.absolute()}: starting at step 0"
        lines.append((warning if existed else info, found))
    if checked.initial is not None:
        lines.append((info, f"starting from the weights of {checked.initial[1]}"))
        lines += [(warning, f"training.init_from: {line}") for line in checked.initial[2]]
    lines += [(warning, doubt) for doubt in config_warnings(config, data, world, usable_cores(os.getpid()))]
    lines += [(info, line) for line in _data_lines(config, checked, world)]
    ranks = "" if training.ranks == 1 else f" x {training.ranks} ranks"
    sizes = f"{training.train_batch_size} x {training.accumulate_steps}{ranks}"
    computed = f"device {device}, amp {resolve_amp(training.amp, device)}"
    lines.append((info, f"model      {parameter_count(build_meta_network(config)) / 1e6:.1f} M parameters, {computed}"))
    now, batch = config.global_batch, f"batch      {sizes} = {format_count(config.global_batch, 'sample')} per step"
    written = config  # a resumed run is compared with its checkpoint (`drift_effects`)
    with contextlib.suppress(ConfigError, OSError, UnicodeDecodeError):  # the file may be incomplete by itself
        if source and not resumed:
            written = parse_config(read_source(source).decode(), source=str(source))
    if (then := written.global_batch) != now:
        batch += f", but {then} in {source}"
        if advice := batch_advice(config, written):
            lines.append((warning, f"{format_count(now, 'sample')} per step instead of {then} {advice}"))
    lines.append((info, batch))
    if training.ranks not in ("auto", world):
        batch = f"the effective batch stays {config.global_batch}"
        micro = f"{rank_share(config, 0, world).accumulate_steps} micro-batches per rank"
        lines.append((warning, f"training.ranks is {training.ranks} but {world} are running: {batch}, with {micro}"))
    if training.validate_every and not any(split.validation for split in data.splits):
        lines.append((info, "no validation: data.validation.fraction is 0"))
    return lines


def _data_lines(config: Config, checked: Preflight, world: int) -> list[str]:
    data, plan, spectrum, lines = checked.data, checked.data.plan, checked.facts.spectrum, list[str]()
    facts = zip(data.volumes, data.splits, checked.facts.intensities.volumes, plan.sources, strict=True)
    for index, (volume, split, intensity, planned) in enumerate(facts):
        stored = f"{format_sizes(volume.shape_zyx)} {volume.dtype}, chunks {format_sizes(volume.chunk_zyx)}"
        held_out = format_box(split.validation) if split.validation else "none"
        region = format_sizes(planned.cells.region_zyx(plan.patch_zyx))
        lines += [
            f"volume     {volume.name}: {stored}, intensities {intensity.low:g} to {intensity.high:g} map to -1 to 1",
            f"  split    training {format_box(split.train)}; validation {held_out}",
            f"  regions  {region}, read amplification {plan.read_amplification(index, world):.2f}",
        ]
    if config.data.context:
        window = f"windows of {format_sizes(plan.patch_zyx)} condition voxels, {config.data.context} patches long"
        lines.append(f"context    {window}; noise up to {config.diffusion.condition_noise:g}")
    memory = format_size(plan.regions_in_flight * data.job.block_bytes)
    reads = "once" if (count := plan.reads_per_region(world)) == 1 else f"by {count} of {world} ranks"
    cut = f"{plan.patches_per_region} patches each, each read {reads}"
    table = Schedule.from_config(config.diffusion, spectrum).alpha_bar_64
    sigmas = " to ".join(f"{math.sqrt(1 / alpha_bar - 1):.3g}" for alpha_bar in table[[0, -1]])
    spread = f"standard deviation {spectrum.std:.3g}"
    if not spectrum.peak:
        spread = "constant in all patches measured: nothing to learn"
    return [
        *lines,
        f"order      {plan.regions_in_flight} regions in flight ({memory}), {cut}",
        *_resident_lines(config, checked),
        f"noise      {config.diffusion.noise}, sigma {sigmas}; data: mean {spectrum.mean:.3g}, {spread}",
    ]


def _resident_lines(config: Config, checked: Preflight) -> list[str]:
    size_bytes, refusal = checked.resident
    if not size_bytes:
        return [f"  resident not used: {refusal}"] if refusal else []
    begins = checked.resumed.step if checked.resumed else 0
    step = begins + math.ceil(first_pass_samples(config, checked.data) / config.global_batch)
    size = format_size(size_bytes)
    return [f"  resident {size} of decoded volumes in memory after about step {step}; nothing is read from then on"]


def dry_run(config: Config, source: Path, resume: bool, vram_gib: float | None, allow_drift: bool) -> Iterator[str]:
    """Start-up lines of a run, then its predicted time, memory and disk space, line by line.  Writes nothing.

    `vram_gib` is the GPU memory to plan for; None = this machine's GPU, if any.

    Raises ConfigError after all lines, if the run does not fit this machine or the given GPU; VesuviusError as from
    `preflight`.
    """
    available_bytes, gpu = (None, None) if vram_gib is None else (int(vram_gib * GIB), True)
    config, chosen = resolve_micro_batch(config, available_bytes, gpu)
    directory, training = run_dir(config), config.training
    checkpoint = newest_checkpoint(directory.checkpoints) if resume else None
    world = 1 if training.ranks == "auto" else training.ranks
    checked = preflight(config, resume, checkpoint, allow_drift, caches=False, ranks_here=num_local_ranks(config))
    stop = f", stops at {config.stop_step}" if config.stop_step < config.horizon_steps else ""
    steps = f"{training.epochs} x {training.steps_per_epoch} = {config.horizon_steps}{stop}"
    yield f"run        {directory.path}, steps {steps}"
    done = checked.resumed.step if checked.resumed else 0
    lines = startup_lines(config, source, checked, world, resume, directory.exists())
    yield from (line for level, line in lines if level == logging.INFO)
    left = max(config.stop_step - done, 0)
    plan = plan_run(config.with_training(max_steps=left or None), checked.data, vram_gib)
    yield _time_line(config, plan, left)
    yield from (f"memory     {line}" for line in [*chosen, *plan.lines()])
    permanent = config.horizon_steps // training.keep_every if training.keep_every else 0
    count = training.keep_last + 2 + permanent  # including the last and the best
    size, free = sum(checkpoint_sizes(config)), free_disk_bytes(nearest_existing(directory.path))
    needed, each = format_size(count * size), format_size(size)
    yield f"disk       {needed} for up to {count} checkpoints of {each}, {format_size(free)} free"
    warned = [line for level, line in lines if level == logging.WARNING]
    if count * size > free:
        warned.append("checkpoints will not fit on the disk; lower training.keep_last or raise training.keep_every")
    problems = plan.problems()
    warned += [problem.text for problem in problems if not problem.refused]
    yield from (f"WARN       {line}" for line in warned)
    if refused := [problem.text for problem in problems if problem.refused]:
        raise ConfigError("\n".join(refused))
    passed = f"passed with {format_count(len(warned), 'warning')}" if warned else "all checks passed"
    yield f"dry run: {passed}, nothing was written; `vesuvius volume verify` checks all chunks"


def _time_line(config: Config, plan: RunPlan, steps: int) -> str:
    device = choose_device()
    amp = resolve_amp(config.training.amp, device)
    flops = (plan.step or plan_memory(config, amp=amp)).flops_per_step
    compute = (f"{flops / 1e12:.1f} TFLOP" if flops >= 1e11 else f"{flops / 1e9:.3g} GFLOP") + " per step"
    if plan.step and device.type == "cpu":
        return f"time       {compute}; the time per step cannot be measured without the GPU"
    step_s = step_range_s(flops, device, config.training)
    of_step = " to ".join(format_duration(s) for s in step_s)
    of_run = " to ".join(format_duration(s * steps) for s in step_s)
    place = "CPU" if device.type == "cpu" else "GPU"
    return f"time       {compute}, about {of_step} on this {place}: {of_run} for {steps} steps if data loading keeps up"


def step_range_s(flops: int, device: torch.device, training: TrainingConfig) -> tuple[float, float]:
    """Minimum and maximum seconds per step of an idle machine; times a convolution for half a second."""
    amp, channels_last = resolve_amp(training.amp, device), uses_channels_last(training, device)
    step_s = flops / (_SHARE_OF_CONVOLUTION * convolution_flops_s(device, amp, channels_last))
    return _TIME_RANGE[0] * step_s, _TIME_RANGE[1] * step_s


def convolution_flops_s(device: torch.device, amp: AmpMode, channels_last: bool) -> float:
    """Forward-backward rate of a 3x3x3 convolution, as a run computes it; a multiply-add counts as 2 operations.

    Median of several rounds after a warm-up.  On a CPU processor time is measured, not wall time, as other programs may
    be running; on a GPU a round has so many passes that the host's launches do not count.
    """
    on_cpu = device.type == "cpu"
    channels, size, passes = (32, 16, 1) if on_cpu else (128, 64, 10)
    layout = torch.channels_last_3d if channels_last else torch.contiguous_format
    tensors = torch.randn(1, channels, size, size, size), torch.randn(channels, channels, 3, 3, 3)
    x, weight = (each.to(device, memory_format=layout).requires_grad_() for each in tensors)
    clock, rounds_s = time.process_time if on_cpu else time.perf_counter, list[float]()
    until = time.perf_counter() + _MEASURED_S
    while len(rounds_s) < 4 or time.perf_counter() < until:
        began = clock()
        for _ in range(passes):
            with autocast(device, amp):
                y = functional.conv3d(x, weight, padding=1)
            torch.autograd.grad(y, (x, weight), y.detach())
        synchronize(device)
        rounds_s.append((clock() - began) / (torch.get_num_threads() if on_cpu else 1))
    return passes * 3 * 2 * 27 * channels**2 * size**3 / statistics.median(rounds_s[1:])
