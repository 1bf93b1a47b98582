"""`--dry-run`: check everything a run needs, and say what it would do."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from vesuvius.config import Config
from vesuvius.data.prepare import PreparedData, prepare_data
from vesuvius.data.stream import store_need_bytes
from vesuvius.data.volume import format_box
from vesuvius.diffusion.unet import UNet
from vesuvius.engine.checkpoint import newest_checkpoint
from vesuvius.engine.resume import read_state
from vesuvius.engine.run_dir import refuse_existing, run_dir
from vesuvius.engine.step import choose_device, parameter_count, resolve_amp
from vesuvius.errors import StorageError

GIB = 2**30
# float32 weights, gradient-free: model, moving average twice (state and export), two moments of AdamW.
_CHECKPOINT_BYTES_PER_PARAMETER = 5 * 4


def dry_run(config: Config, resume: bool) -> list[str]:
    """Check config, stores, split, plan and disk space.  Writes nothing.

    Returns:
        what would happen, a line each.

    Raises:
        ConfigError, DataError, StorageError: as `train` would.
    """
    directory = run_dir(config)
    if not resume:
        refuse_existing(directory)
    data = prepare_data(config.seed, config.data)
    lines = [f"run        {directory.path}, steps {_steps(config)}"]
    checkpoint = newest_checkpoint(directory.checkpoints) if resume else None
    if checkpoint is not None:
        state, drift = read_state(checkpoint, config, data.plan)
        lines.append(f"resume     from {checkpoint}, step {state['step']}")
        lines += [f"changed    {line}" for line in drift]
    lines += _data_lines(config, data)
    with torch.device("meta"):
        parameters = parameter_count(UNet(config.model))
    device = choose_device()
    training = config.training
    lines += [
        f"model      {parameters / 1e6:.1f} M parameters, device {device}, amp {resolve_amp(training.amp, device)}",
        f"batch      {training.train_batch_size} x {training.accumulate_steps} = {config.global_batch} samples a step",
        f"readers    {training.workers} workers, object store "
        f"{store_need_bytes(data.job, training.train_batch_size, training) / GIB:.2f} GiB",
        _disk_line(directory.path, parameters, training.keep_last),
    ]
    return [*lines, "dry run: all checks passed, nothing was written"]


def _steps(config: Config) -> str:
    stop = f", stops at {config.stop_step}" if config.stop_step < config.horizon_steps else ""
    return f"{config.training.epochs} x {config.training.steps_per_epoch} = {config.horizon_steps}{stop}"


def _data_lines(config: Config, data: PreparedData) -> list[str]:
    lines = []
    for number, (volume, split, planned) in enumerate(zip(data.volumes, data.splits, data.plan.volumes, strict=True)):
        validation = format_box(split.validation) if split.validation else "none"
        largest = [max(hi - lo for lo, hi in axis) for axis in planned.intervals_zyx]
        lines += [
            f"volume     {volume.name}: {_times(volume.shape_zyx)} {volume.dtype}, chunks {_times(volume.chunk_zyx)}, "
            f"decoded by {volume.codec_pipeline}",
            f"  split    training {format_box(split.train)}; validation {validation}",
            f"  regions  {planned.region_count} of up to {_times(largest)}, read amplification "
            f"{data.plan.read_amplification(number):.2f}",
        ]
    if data.plan.repeats_within_a_run:
        lines.append(
            f"WARN       fewer regions than data.regions_per_task={config.data.regions_per_task}: "
            "batches repeat regions"
        )
    lines.append(f"plan       {data.plan.hash}, {data.plan.samples_per_task} samples a task")
    return lines


def _disk_line(path: Path, parameters: int, keep_last: int) -> str:
    checkpoint = parameters * _CHECKPOINT_BYTES_PER_PARAMETER
    need = checkpoint * (keep_last + 1)
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    text = (
        f"{need / GIB:.2f} GiB for {keep_last} + 1 checkpoints of {checkpoint / GIB:.2f} GiB, {free / GIB:.2f} GiB free"
    )
    if need > free:
        raise StorageError(
            f"the checkpoints must fit on the disk; got {text}; free some space, lower training.keep_last or link "
            "runs/ to a larger disk"
        )
    return f"disk       {text}"


def _times(sizes: tuple[int, ...] | list[int]) -> str:
    return "x".join(str(size) for size in sizes)
