"""What is said before the first step, by a run and by its dry run: where it continues, on which volumes, how far."""

from __future__ import annotations

import logging
import math

import torch
from torch import nn

from vesuvius.config import Config, DiffusionConfig
from vesuvius.config.describe import CHANGES_TRAINING
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.runlog.units import format_duration, format_sizes, size_text
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.training.checkpoint.progress import Progress
from vesuvius.training.forecast.preflight import Preflight
from vesuvius.training.ranks.part import Part
from vesuvius.training.step.step import AmpMode, parameter_count
from vesuvius.volumes.box import format_box

log = logging.getLogger(__name__)


def log_start(config: Config, preflight: Preflight, world: int, lost: bool) -> None:
    """The checkpoint, what has changed since, and the data, as `world` ranks read them.

    `lost`: the run existed, so there should be a checkpoint.
    """
    if preflight.resumed is not None:
        log.info("continuing from %s", preflight.resumed.checkpoint)
    elif lost:
        log.warning("no complete checkpoint in %s: starting at step 0", preflight.directory.checkpoints)
    if preflight.initial is not None:
        log.info("starting from the weights of %s", preflight.initial.source)
    for doubt in preflight.doubts(config, world):
        log.warning("%s", doubt)
    if preflight.resumed is not None:
        for line in preflight.resumed.drift:
            level = logging.WARNING if line.startswith(CHANGES_TRAINING) else logging.INFO
            log.log(level, "changed since the checkpoint: %s", line)
        for line in preflight.resumed.accepted:
            log.warning("accepted by --allow-drift, so the run is no longer one experiment: %s", line)
    for line in data_lines(config, preflight, world):
        log.info("%s", line)
    if config.training.validate_every and not any(split.validation for split in preflight.data.splits):
        log.info("no validation: data.validation.fraction is 0")


def data_lines(config: Config, preflight: Preflight, world: int) -> list[str]:
    """Volumes, their split, grey values and regions, the plan and the noise, as `world` ranks read them."""
    data, lines = preflight.data, []
    facts = zip(data.volumes, data.splits, preflight.facts.greys.volumes, data.plan.volumes, strict=True)
    for number, (volume, split, grey, planned) in enumerate(facts):
        lines += [
            f"volume     {volume.name}: {format_sizes(volume.shape_zyx)} {volume.dtype}, "
            f"chunks {format_sizes(volume.chunk_zyx)}",
            f"  split    training {format_box(split.train)}; validation "
            + (format_box(split.validation) if split.validation else "none"),
            f"  greys    {grey.low:g} becomes -1, {grey.high:g} becomes +1",
            f"  regions  {planned.visits_per_pass} a pass, of up to "
            f"{format_sizes(planned.cells.region_zyx(data.plan.patch_zyx))}, "
            f"{data.plan.read_amplification(number, world):.2f} bytes decoded per byte of patch",
        ]
    return [
        *lines,
        f"plan       {data.plan.hash}, {_mixing_text(data.job)}",
        f"diffusion  {noise_text(config.diffusion, preflight.facts.spectrum)}",
    ]


def _mixing_text(job: ReaderJob) -> str:
    """What a batch is drawn from."""
    plan = job.plan
    return (
        f"a batch is drawn from {plan.regions_in_flight} regions in flight "
        f"({size_text(plan.regions_in_flight * job.block_bytes)}), {plan.patches_per_region} patches from each"
    )


def noise_text(config: DiffusionConfig, spectrum: Spectrum) -> str:
    """Which noise levels are trained, and what of the data they follow from.  Pure."""
    schedule = Schedule.from_config(config, spectrum)
    least, most = (math.sqrt(1 / alpha_bar - 1) for alpha_bar in schedule.alpha_bar_64[[0, -1]])
    spread = f"standard deviation {spectrum.std:.3g}, largest amplitude of a frequency {math.sqrt(spectrum.peak):.3g}"
    if not spectrum.peak:
        spread = "constant in all patches measured, which leaves nothing to learn"
    return (
        f"noise {config.noise}: sigma {least:.3g} to {most:.3g} times the signal; the data: mean {spectrum.mean:.3g}, "
        f"{spread}"
    )


def log_network(config: Config, network: nn.Module, device: torch.device, amp: AmpMode) -> None:
    """Size of the network and how it is computed."""
    size, batch = parameter_count(network) / 1e6, config.global_batch
    log.info("model %.1f M parameters, device %s, amp %s, global batch %d", size, device, amp, batch)


def log_ranks(config: Config, part: Part) -> None:
    """How the ranks share a step; nothing where there is one."""
    if part.world > 1:
        log.info(
            "rank %d of %d: %d of the %d samples of a step, in micro-batches of %d",
            part.rank,
            part.world,
            len(part.places),
            part.global_batch,
            part.micro_batch,
        )
    if part.world != config.training.ranks:
        log.warning(
            "training.ranks is %s and %d are running: the effective batch stays %d, each accumulates %d micro-batches",
            config.training.ranks,
            part.world,
            part.global_batch,
            part.accumulate_steps,
        )


def log_progress(config: Config, progress: Progress, limit_s: float | None) -> None:
    """How far a resumed run is and how long it will take, before its first step."""
    if progress.step == 0:
        return
    left = progress.time_left(config, limit_s=limit_s)
    log.info(
        "step %d of %d, %d samples, epoch %d of %d; %s of training before session %d, about %s left",
        progress.step,
        config.stop_step,
        progress.sample_index,
        min(progress.step // config.training.steps_per_epoch + 1, config.training.epochs),
        config.training.epochs,
        format_duration(progress.trained_s),
        progress.sessions,
        "unknown time" if left is None else format_duration(left),
    )
