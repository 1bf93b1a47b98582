"""`--dry-run`: say what a run that passed its checks would do."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vesuvius.config import Config
from vesuvius.errors import ConfigError
from vesuvius.runlog.run_dir import run_dir
from vesuvius.runlog.units import format_duration, gib
from vesuvius.training.checkpoint.format import newest_checkpoint
from vesuvius.training.forecast.machine import reachable_flops_s
from vesuvius.training.forecast.preflight import Preflight, preflight
from vesuvius.training.forecast.run_plan import plan_run
from vesuvius.training.forecast.start_log import data_lines
from vesuvius.training.step.step import choose_device, resolve_amp
from vesuvius.training.validation.preview import PREVIEWED

_TIME_RANGE = (0.6, 2.5)  # of what its operations predict, for a step


def dry_run(
    config: Config,
    resume: bool,
    vram_gib: float | None = None,
    allow_drift: bool = False,
) -> Iterator[str]:
    """What would happen, a line each.  Writes nothing.

    Args:
        vram_gib: GPU memory to plan for; None = this machine's GPU, or 80 GiB where there is none.

    Raises:
        ConfigError: after all lines, where the run would not fit this machine or the GPU that was asked for.
        VesuviusError: what `preflight` raises.
    """
    checkpoint = newest_checkpoint(run_dir(config).checkpoints) if resume else None
    device, asked = choose_device(), config.training.ranks
    ranks_here = max(torch.cuda.device_count(), 1) if asked == "auto" else asked
    checked = preflight(config, resume, checkpoint, allow_drift, caches=False, ranks_here=ranks_here)
    training = config.training
    yield f"run        {checked.directory.path}, steps {_steps(config)}"
    yield from _resume_lines(config, checked, resume)
    world = 1 if asked == "auto" else asked
    yield from data_lines(config, checked, world)
    yield (
        f"model      {checked.parameters / 1e6:.1f} M parameters, device {device}, "
        f"amp {resolve_amp(training.amp, device)}"
    )
    ranks = "" if training.ranks == 1 else f" x {training.ranks} ranks"
    sizes = f"{training.train_batch_size} x {training.accumulate_steps}{ranks}"
    yield f"batch      {sizes} = {config.global_batch} samples a step"
    plan, done = plan_run(config, checked.data, vram_gib), checked.resumed.step if checked.resumed else 0
    yield _time_line(config, plan.step.flops_per_step, max(config.stop_step - done, 0), vram_gib is not None)
    yield from plan.lines()
    yield from _fixed_lines(config, checked)
    count = _checkpoints_kept(config, checked)
    yield (
        f"disk       {gib(count * checked.checkpoint_bytes)} GiB for up to {count} checkpoints of "
        f"{gib(checked.checkpoint_bytes)} GiB (one more while saving), {gib(checked.free_bytes)} GiB free; a copy of "
        "one waits in host memory"
    )

    warned = checked.doubts(config, world)
    if count * checked.checkpoint_bytes > checked.free_bytes:
        warned.append("the checkpoints will not fit on the disk: lower training.keep_last or raise training.keep_every")
    problems = plan.problems()
    warned += [problem.text for problem in problems if not problem.refused]
    refused = [problem.text for problem in problems if problem.refused]
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


def _time_line(config: Config, flops: int, steps: int, elsewhere: bool) -> str:
    """Predicted time of a step, and of the run, from its operations at the rate that one large convolution reaches."""
    device = choose_device()
    compute = (f"{flops / 1e12:.1f} TFLOP" if flops >= 1e11 else f"{flops / 1e9:.3g} GFLOP") + " a step"
    if elsewhere and device.type == "cpu":
        return f"time       {compute}; its time on a GPU that is not here is unknown"
    step_s = flops / reachable_flops_s(device, resolve_amp(config.training.amp, device))
    of_step = " to ".join(_seconds(factor * step_s) for factor in _TIME_RANGE)
    of_run = " to ".join(format_duration(factor * step_s * steps) for factor in _TIME_RANGE)
    place = "GPU" if device.type == "cuda" else "CPU"
    return f"time       {compute}, about {of_step} on this {place}: {of_run} for {steps} steps, if data never waits"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 60 else format_duration(seconds)


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
        lines.append(f"previews   every {training.preview_every} steps, {PREVIEWED} generated patches")
    return lines


def _checkpoints_kept(config: Config, preflight: Preflight) -> int:
    training = config.training
    for_ever = config.horizon_steps // training.keep_every if training.keep_every else 0
    best = 1 if preflight.fixed is not None and preflight.fixed.held_out and training.validate_every else 0
    return training.keep_last + 1 + best + for_ever
