"""`--dry-run`: say what a run that passed its checks would do."""

from __future__ import annotations

from vesuvius.config import Config
from vesuvius.data.box import format_box
from vesuvius.data.prepare import PreparedData
from vesuvius.data.stream import StreamOptions, store_bytes
from vesuvius.engine.preflight import Preflight, preflight
from vesuvius.engine.step import choose_device, resolve_amp
from vesuvius.observe.memory import GIB


def dry_run(config: Config, resume: bool) -> list[str]:
    """What would happen, a line each.  Writes nothing; raises what `preflight` raises."""
    found = preflight(config, resume)
    training, device = config.training, choose_device()
    store_gib = store_bytes(found.data.job, StreamOptions.from_config(training, config.cluster)) / GIB
    return [
        f"run        {found.directory.path}, steps {_steps(config)}",
        *_resume_lines(config, found, resume),
        *_data_lines(config, found),
        f"model      {found.parameters / 1e6:.1f} M parameters, device {device}, "
        f"amp {resolve_amp(training.amp, device)}",
        f"batch      {training.train_batch_size} x {training.accumulate_steps} = {config.global_batch} samples a step",
        f"readers    {training.workers} workers, object store {store_gib:.2f} GiB",
        _disk_line(found, training.keep_last),
        "dry run: all checks passed, nothing was written",
    ]


def _steps(config: Config) -> str:
    stop = f", stops at {config.stop_step}" if config.stop_step < config.horizon_steps else ""
    return f"{config.training.epochs} x {config.training.steps_per_epoch} = {config.horizon_steps}{stop}"


def _resume_lines(config: Config, found: Preflight, resume: bool) -> list[str]:
    if found.state is None:
        return ["resume     no checkpoint yet: starts at step 0"] if resume else []
    finished = ", which is the end: nothing to do" if found.state["step"] >= config.stop_step else ""
    lines = [f"resume     from {found.checkpoint}, step {found.state['step']}{finished}"]
    return lines + [f"changed    {line}" for line in found.drift]


def _data_lines(config: Config, found: Preflight) -> list[str]:
    data, lines = found.data, []
    for number, (volume, split, grey) in enumerate(zip(data.volumes, data.splits, found.greys, strict=True)):
        validation = format_box(split.validation) if split.validation else "none"
        lines += [
            f"volume     {volume.name}: {_times(volume.shape_zyx)} {volume.dtype}, chunks {_times(volume.chunk_zyx)}, "
            f"decoded by {volume.codec_pipeline}",
            f"  split    training {format_box(split.train)}; validation {validation}",
            f"  greys    {grey.low:g} becomes -1, {grey.high:g} becomes +1",
            f"  regions  {_regions(data, number)}",
        ]
    if data.plan.repeats_within_a_run:
        lines.append(
            f"WARN       fewer regions than data.regions_per_task={config.data.regions_per_task}: batches repeat them"
        )
    return [*lines, f"plan       {data.plan.hash}, {data.plan.samples_per_task} samples a task"]


def _regions(data: PreparedData, number: int) -> str:
    planned = data.plan.volumes[number]
    largest = [max(hi - lo for lo, hi in axis) for axis in planned.intervals_zyx]
    amplification = data.plan.read_amplification(number)
    return f"{planned.region_count} of up to {_times(largest)}, read amplification {amplification:.2f}"


def _disk_line(found: Preflight, keep_last: int) -> str:
    need = (keep_last + 1) * found.checkpoint_bytes
    line = (
        f"disk       {need / GIB:.2f} GiB for {keep_last} + 1 checkpoints of {found.checkpoint_bytes / GIB:.2f} GiB, "
        f"{found.free_bytes / GIB:.2f} GiB free"
    )
    return line if need <= found.free_bytes else f"{line}\nWARN       that will not fit: lower training.keep_last"


def _times(sizes: tuple[int, ...] | list[int]) -> str:
    return "x".join(str(size) for size in sizes)
