"""`--dry-run`: say what a run that passed its checks would do."""

from __future__ import annotations

import torch

from vesuvius.config import Config
from vesuvius.engine.memory_plan import LARGEST_PLANNED_BATCH, MemoryPlan, indexable_batch, largest_batch, plan_memory
from vesuvius.engine.preflight import Preflight, doubts, preflight
from vesuvius.engine.ram_plan import plan_ram, ram_limit, ram_warning
from vesuvius.engine.resume import checkpoint_to_resume
from vesuvius.engine.run_dir import run_dir
from vesuvius.engine.start_log import mixing_text, noise_text
from vesuvius.engine.step import AmpMode, choose_device, resolve_amp
from vesuvius.observe.units import GIB, gib, size_text
from vesuvius.stream.prepare import PreparedData
from vesuvius.volumes.box import format_box

ASSUMED_VRAM_GIB = 80  # of an A100 or H100


def dry_run(
    config: Config,
    resume: bool,
    vram_gib: float | None = None,
    allow_drift: bool = False,
    restart_damaged: bool = False,
) -> list[str]:
    """What would happen, a line each.  Writes nothing; raises what `preflight` raises.

    `vram_gib` is the GPU memory to plan for; None = this machine's GPU, or 80 GiB where there is none.
    """
    checkpoint = checkpoint_to_resume(run_dir(config).checkpoints, restart_damaged) if resume else None
    found = preflight(config, resume, checkpoint, allow_drift, caches=False)
    training, device = config.training, choose_device()
    return [
        f"run        {found.directory.path}, steps {_steps(config)}",
        *_resume_lines(config, found, resume),
        *_data_lines(config, found),
        f"model      {found.parameters / 1e6:.1f} M parameters, device {device}, "
        f"amp {resolve_amp(training.amp, device)}",
        f"batch      {training.train_batch_size} x {training.accumulate_steps} = {config.global_batch} samples a step",
        *_memory_lines(config, device, vram_gib),
        *_ram_lines(config, found, gpu=device.type == "cuda" or vram_gib is not None),
        *_fixed_lines(config, found),
        _disk_line(config, found),
        *(f"WARN       {doubt}" for doubt in doubts(config)),
        "dry run: all checks passed, nothing was written",
    ]


def _steps(config: Config) -> str:
    stop = f", stops at {config.stop_step}" if config.stop_step < config.horizon_steps else ""
    return f"{config.training.epochs} x {config.training.steps_per_epoch} = {config.horizon_steps}{stop}"


def _resume_lines(config: Config, found: Preflight, resume: bool) -> list[str]:
    if found.initial is not None:
        return [f"weights    from {found.initial.source}"]
    if found.resumed is None:
        return ["resume     no whole checkpoint yet: starts at step 0"] if resume else []
    finished = ", which is the end: nothing to do" if found.resumed.step >= config.stop_step else ""
    lines = [f"resume     from {found.resumed.checkpoint}, step {found.resumed.step}{finished}"]
    lines += [f"changed    {line}" for line in found.resumed.drift]
    return lines + [f"WARN       accepted by --allow-drift: {line}" for line in found.resumed.accepted]


def _data_lines(config: Config, found: Preflight) -> list[str]:
    data, lines = found.data, []
    for number, (volume, split, grey) in enumerate(zip(data.volumes, data.splits, found.greys.volumes, strict=True)):
        validation = format_box(split.validation) if split.validation else "none"
        lines += [
            f"volume     {volume.name}: {_times(volume.shape_zyx)} {volume.dtype}, chunks {_times(volume.chunk_zyx)}, "
            f"decoded by {volume.codec_pipeline}",
            f"  split    training {format_box(split.train)}; validation {validation}",
            f"  greys    {grey.low:g} becomes -1, {grey.high:g} becomes +1",
            f"  regions  {_regions(data, number)}",
        ]
    return [
        *lines,
        f"plan       {data.plan.hash}, {mixing_text(data.job)}",
        f"diffusion  {noise_text(config.diffusion, found.spectrum)}",
    ]


def _regions(data: PreparedData, number: int) -> str:
    planned = data.plan.volumes[number]
    largest = planned.cells.region_zyx(data.plan.patch_zyx)
    amplification = data.plan.read_amplification(number)
    return f"{planned.visits_per_pass} a pass, of up to {_times(largest)}, read amplification {amplification:.2f}"


def _memory_lines(config: Config, device: torch.device, vram_gib: float | None) -> list[str]:
    """The memory plan of a GPU."""
    vram_bytes, whose = _vram(device, vram_gib)
    amp: AmpMode = resolve_amp(config.training.amp, device)
    if config.training.amp == "auto" and device.type == "cpu":
        amp = "bf16"  # the plan is for a GPU, and those that large take it
    plan, largest = plan_memory(config, amp=amp), largest_batch(config, vram_bytes, amp)
    if largest == LARGEST_PLANNED_BATCH:
        limit = " or more"
    elif largest == indexable_batch(config):
        limit = ", beyond which a tensor would reach 2^31 elements"
    else:
        limit = ""
    return [
        f"memory     planned for {vram_bytes / GIB:.1f} GiB of VRAM ({whose}), amp {amp}",
        f"  compute  {_compute(plan.flops_per_step)} a step",
        f"  fixed    {size_text(plan.fixed_bytes)}: weights {size_text(plan.weight_bytes)}, gradients "
        f"{size_text(plan.gradient_bytes)}, optimizer {size_text(plan.optimizer_bytes)}, "
        f"EMA {size_text(plan.ema_bytes)}",
        f"  kept     {size_text(plan.activation_bytes_per_patch)} of activations per patch, "
        f"{size_text(plan.weight_copy_bytes)} of autocast copies of weights",
        f"  peak     {size_text(plan.peak_bytes)} with train_batch_size {plan.batch}, "
        f"{size_text(plan.vram_bytes)} with the reserve for CUDA, cuDNN and fragmentation",
        f"  largest  train_batch_size {largest}{limit}",
        *_too_large_lines(config, plan, largest, vram_bytes),
    ]


def _vram(device: torch.device, vram_gib: float | None) -> tuple[int, str]:
    """Bytes of GPU memory to plan for, and where the figure is from."""
    if vram_gib is not None:
        return int(vram_gib * GIB), "--vram-gib"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.total_memory, properties.name
    return ASSUMED_VRAM_GIB * GIB, "assumed, as this machine has no GPU; --vram-gib N plans for another"


def _compute(flops: int) -> str:
    return f"{flops / 1e12:.1f} TFLOP" if flops >= 1e11 else f"{flops / 1e9:.3g} GFLOP"


def _too_large_lines(config: Config, plan: MemoryPlan, largest: int, vram_bytes: int) -> list[str]:
    if plan.vram_bytes <= vram_bytes:
        return []
    lean = "" if config.training.lean_norm else "set training.lean_norm=true, "
    remedy = (
        f"set training.train_batch_size={largest} and raise training.accumulate_steps"
        if largest
        else f"{lean}name more training.checkpoint_levels, or lower model.channels"
    )
    return [
        f"WARN       train_batch_size {plan.batch} will not fit: {plan.vram_bytes / GIB:.1f} GiB needed of "
        f"{vram_bytes / GIB:.1f} GiB; {remedy}"
    ]


def _ram_lines(config: Config, found: Preflight, gpu: bool) -> list[str]:
    """The plan of the host's memory, and what it may use."""
    plan, limit = plan_ram(config, found.data, gpu), ram_limit(config)
    warning = ram_warning(config, found.data, plan, limit)
    return [
        *plan.lines(),
        f"  limit    {size_text(limit.limit_bytes)} ({limit.whose})",
        *([f"WARN       {warning}"] if warning else []),
    ]


def _fixed_lines(config: Config, found: Preflight) -> list[str]:
    """How often is validated and drawn."""
    training = config.training
    lines = []
    if found.fixed is not None and found.fixed.held_out and training.validate_every:
        lines.append(
            f"validation every {training.validate_every} steps, {training.validate_patches} held-out patches, 8 noise "
            "levels each"
        )
    if training.preview_every:
        lines.append(f"previews   every {training.preview_every} steps, {training.preview_count} generated patches")
    return lines


def _disk_line(config: Config, found: Preflight) -> str:
    training = config.training
    for_ever = config.horizon_steps // training.keep_every if training.keep_every else 0
    best = 1 if found.fixed is not None and found.fixed.held_out and training.validate_every else 0
    count = training.keep_last + 1 + best + for_ever
    need = count * found.checkpoint_bytes
    line = (
        f"disk       {gib(need)} GiB for up to {count} checkpoints of {gib(found.checkpoint_bytes)} GiB (one "
        f"more while saving), {gib(found.free_bytes)} GiB free; a copy of one waits in host memory"
    )
    if need <= found.free_bytes:
        return line
    return f"{line}\nWARN       that will not fit: lower training.keep_last or raise training.keep_every"


def _times(sizes: tuple[int, ...] | list[int]) -> str:
    return "x".join(str(size) for size in sizes)
