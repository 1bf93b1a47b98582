"""`--dry-run`: say what a run that passed its checks would do."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from vesuvius.config import Config
from vesuvius.errors import ConfigError
from vesuvius.monitor.probes.cores import usable_cores
from vesuvius.runlog.run_dir import run_dir
from vesuvius.runlog.units import GIB, format_sizes, gib, size_text
from vesuvius.stream.start.prepare import PreparedData
from vesuvius.training.checkpoint.resume import checkpoint_to_resume
from vesuvius.training.forecast.gpu_memory import leaner
from vesuvius.training.forecast.memory_plan import (
    LARGEST_PLANNED_BATCH,
    MemoryPlan,
    indexable_batch,
    largest_batch,
    plan_memory,
)
from vesuvius.training.forecast.preflight import Preflight, doubts, preflight, too_few_tasks
from vesuvius.training.forecast.ram_plan import plan_ram, ram_limit, ram_warning
from vesuvius.training.forecast.start_log import mixing_text, noise_text
from vesuvius.training.forecast.step_time import predict_step_time
from vesuvius.training.step.step import choose_device, resolve_amp
from vesuvius.volumes.box import format_box

ASSUMED_VRAM_GIB = 80  # of an A100 or H100


def dry_run(
    config: Config,
    resume: bool,
    vram_gib: float | None = None,
    allow_drift: bool = False,
    restart_damaged: bool = False,
) -> Iterator[str]:
    """What would happen, a line each.  Writes nothing.

    Args:
        vram_gib: GPU memory to plan for; None = this machine's GPU, or 80 GiB where there is none.

    Raises:
        ConfigError: after all lines, where the run would not fit this machine or the GPU that was asked for.
        VesuviusError: what `preflight` raises.
    """
    checkpoint = checkpoint_to_resume(run_dir(config).checkpoints, restart_damaged) if resume else None
    device, asked = choose_device(), config.training.ranks
    ranks_here = max(torch.cuda.device_count(), 1) if asked == "auto" else asked
    checked = preflight(config, resume, checkpoint, allow_drift, caches=False, ranks_here=ranks_here)
    training = config.training
    yield f"run        {checked.directory.path}, steps {_steps(config)}"
    yield from _resume_lines(config, checked, resume)
    yield from _data_lines(config, checked)
    yield (
        f"model      {checked.parameters / 1e6:.1f} M parameters, device {device}, "
        f"amp {resolve_amp(training.amp, device)}"
    )
    ranks = "" if training.ranks == 1 else f" x {training.ranks} ranks"
    sizes = f"{training.train_batch_size} x {training.accumulate_steps}{ranks}"
    yield f"batch      {sizes} = {config.global_batch} samples a step"
    plan = plan_memory(config)
    yield from _time_lines(config, plan, checked, vram_gib)
    vram_bytes, whose = _vram(device, vram_gib)
    yield from _memory_lines(config, plan, vram_bytes, whose)
    gpu = device.type == "cuda" or vram_gib is not None
    ram, limit = plan_ram(config, checked.data, gpu), ram_limit(config)
    yield from ram.lines()
    yield f"  limit    {size_text(limit.limit_bytes)} ({limit.name})"
    yield from _fixed_lines(config, checked)
    count = _checkpoints_kept(config, checked)
    yield (
        f"disk       {gib(count * checked.checkpoint_bytes)} GiB for up to {count} checkpoints of "
        f"{gib(checked.checkpoint_bytes)} GiB (one more while saving), {gib(checked.free_bytes)} GiB free; a copy of "
        "one waits in host memory"
    )

    warned, refused = doubts(config, usable_cores(os.getpid())), list[str]()
    warned += too_few_tasks(config, checked.data.plan, checked.resumed.step if checked.resumed else 0)
    if count * checked.checkpoint_bytes > checked.free_bytes:
        warned.append("the checkpoints will not fit on the disk: lower training.keep_last or raise training.keep_every")
    if plan.vram_bytes > vram_bytes:
        (refused if gpu else warned).append(_too_large(config, plan, vram_bytes))
    if ram_problem := ram_warning(config, checked.data, ram, limit):
        # A GPU that is not here may stand in a machine with more memory.
        here = vram_gib is None or config.monitor.ram_limit_gib is not None
        (refused if here and ram.total_bytes > limit.limit_bytes else warned).append(ram_problem)
    yield from (f"WARN       {line}" for line in warned)
    if refused:
        raise ConfigError("\n".join(refused))
    passed = f"passed with {len(warned)} warning{'s' * (len(warned) > 1)}" if warned else "all checks passed"
    yield f"dry run: {passed}, nothing was written; `vesuvius volume verify` reads all chunks"


def _steps(config: Config) -> str:
    stop = f", stops at {config.stop_step}" if config.stop_step < config.horizon_steps else ""
    return f"{config.training.epochs} x {config.training.steps_per_epoch} = {config.horizon_steps}{stop}"


def _resume_lines(config: Config, preflight: Preflight, resume: bool) -> list[str]:
    if preflight.initial is not None:
        return [f"weights    from {preflight.initial.source}"]
    if preflight.resumed is None:
        return ["resume     no complete checkpoint yet: starts at step 0"] if resume else []
    finished = ", which is the end: nothing to do" if preflight.resumed.step >= config.stop_step else ""
    lines = [f"resume     from {preflight.resumed.checkpoint}, step {preflight.resumed.step}{finished}"]
    lines += [f"changed    {line}" for line in preflight.resumed.drift]
    return lines + [f"WARN       accepted by --allow-drift: {line}" for line in preflight.resumed.accepted]


def _data_lines(config: Config, preflight: Preflight) -> list[str]:
    data, lines = preflight.data, []
    for number, (volume, split, grey) in enumerate(
        zip(data.volumes, data.splits, preflight.facts.greys.volumes, strict=True)
    ):
        validation = format_box(split.validation) if split.validation else "none"
        lines += [
            f"volume     {volume.name}: {format_sizes(volume.shape_zyx)} {volume.dtype}, "
            f"chunks {format_sizes(volume.chunk_zyx)}",
            f"  split    training {format_box(split.train)}; validation {validation}",
            f"  greys    {grey.low:g} becomes -1, {grey.high:g} becomes +1",
            f"  regions  {_regions(data, number, 1 if config.training.ranks == 'auto' else config.training.ranks)}",
        ]
    return [
        *lines,
        f"plan       {data.plan.hash}, {mixing_text(data.job)}",
        f"diffusion  {noise_text(config.diffusion, preflight.spectrum)}",
    ]


def _regions(data: PreparedData, number: int, ranks: int) -> str:
    planned = data.plan.volumes[number]
    largest = planned.cells.region_zyx(data.plan.patch_zyx)
    amplification = data.plan.read_amplification(number, ranks)
    return f"{planned.visits_per_pass} a pass, of up to {format_sizes(largest)}, read amplification {amplification:.2f}"


def _time_lines(config: Config, plan: MemoryPlan, checked: Preflight, vram_gib: float | None) -> list[str]:
    """Predicted time of a step and of the run."""
    flops, device = plan.flops_per_step, choose_device()
    compute = (f"{flops / 1e12:.1f} TFLOP" if flops >= 1e11 else f"{flops / 1e9:.3g} GFLOP") + " a step"
    if vram_gib is not None and device.type == "cpu":
        return [f"time       {compute}; its time on a GPU that is not here is unknown"]
    found = predict_step_time(config, checked.spectrum, device, flops)
    steps = max(config.stop_step - (checked.resumed.step if checked.resumed else 0), 0)
    how = "measured" if found.measured else "estimated from its operations"
    lines = [
        f"time       {compute}, {found.step_text} on this {'GPU' if device.type == 'cuda' else 'CPU'} ({how}): "
        f"{found.run_text(steps)} for {steps} steps, if data never waits"
    ]
    if found.others:
        effect = "steps are faster on a quiet machine" if found.measured else "steps will take longer until they end"
        lines.append(f"  load     {found.others}: {effect}")
    return lines


def _memory_lines(config: Config, plan: MemoryPlan, vram_bytes: int, whose: str) -> list[str]:
    """The memory plan of a GPU."""
    largest = largest_batch(config, vram_bytes)
    limits = {LARGEST_PLANNED_BATCH: " or more", indexable_batch(config): ", where a tensor nears 2^31 elements"}
    return [
        f"memory     planned for {vram_bytes / GIB:.1f} GiB of VRAM ({whose}), amp {plan.amp}",
        f"  fixed    {size_text(plan.fixed_bytes)}: weights {size_text(plan.weight_bytes)}, gradients "
        f"{size_text(plan.gradient_bytes)}, optimizer {size_text(plan.optimizer_bytes)}, "
        f"EMA {size_text(plan.ema_bytes)}",
        f"  kept     {size_text(plan.activation_bytes_per_patch)} of activations per patch, "
        f"{size_text(plan.weight_copy_bytes)} of autocast copies of weights",
        f"  peak     {size_text(plan.peak_bytes)} with train_batch_size {plan.batch}, "
        f"{size_text(plan.vram_bytes)} with the reserve for CUDA, cuDNN and fragmentation",
        f"  largest  train_batch_size {largest}{limits.get(largest, '')}",
    ]


def _vram(device: torch.device, vram_gib: float | None) -> tuple[int, str]:
    """Bytes of GPU memory to plan for, and where the figure is from."""
    if vram_gib is not None:
        return int(vram_gib * GIB), "--vram-gib"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.total_memory, properties.name
    return ASSUMED_VRAM_GIB * GIB, "assumed, as this machine has no GPU; --vram-gib N plans for another"


def _too_large(config: Config, plan: MemoryPlan, vram_bytes: int) -> str:
    largest = largest_batch(config, vram_bytes)
    remedy = (
        f"set training.train_batch_size={largest} and raise training.accumulate_steps" if largest else leaner(config)
    )
    return (
        f"train_batch_size {plan.batch} will not fit: {size_text(plan.vram_bytes)} of GPU memory needed of "
        f"{size_text(vram_bytes)}; {remedy}"
    )


def _fixed_lines(config: Config, preflight: Preflight) -> list[str]:
    """How often is validated and drawn."""
    training = config.training
    lines = []
    if preflight.fixed is not None and preflight.fixed.held_out and training.validate_every:
        lines.append(
            f"validation every {training.validate_every} steps, {training.validate_patches} held-out patches, 8 noise "
            "levels each"
        )
    if training.preview_every:
        lines.append(f"previews   every {training.preview_every} steps, {training.preview_count} generated patches")
    return lines


def _checkpoints_kept(config: Config, preflight: Preflight) -> int:
    training = config.training
    for_ever = config.horizon_steps // training.keep_every if training.keep_every else 0
    best = 1 if preflight.fixed is not None and preflight.fixed.held_out and training.validate_every else 0
    return training.keep_last + 1 + best + for_ever
