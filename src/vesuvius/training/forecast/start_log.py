"""What the log says before the first step: where the run continues from, on which volumes, and how far it is."""

from __future__ import annotations

import logging
import math
import os

import torch
from torch import nn

from vesuvius.config import Config, DiffusionConfig
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.monitor.probes.cores import usable_cores
from vesuvius.runlog.units import format_duration, format_sizes, size_text
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.training.checkpoint.progress import Progress
from vesuvius.training.checkpoint.resume import EFFECTS
from vesuvius.training.forecast.preflight import Preflight, doubts, too_few_tasks
from vesuvius.training.ranks.part import Part
from vesuvius.training.step.step import AmpMode, parameter_count

log = logging.getLogger(__name__)

# Allowed on a resume, yet what is learned from each step is no longer the same.
_CHANGES_TRAINING = ("data.", "training.clip_norm", "training.weight_decay", "training.amp", *EFFECTS)


def log_start(config: Config, preflight: Preflight, world: int, lost: bool) -> None:
    """The checkpoint, what has changed since, and the volumes, as `world` ranks read them.

    `lost`: the run existed, so there should be a checkpoint.
    """
    if preflight.resumed is not None:
        log.info("continuing from %s", preflight.resumed.checkpoint)
    elif lost:
        log.warning("no complete checkpoint in %s: starting at step 0", preflight.directory.checkpoints)
    if preflight.initial is not None:
        log.info("starting from the weights of %s", preflight.initial.source)
    step = preflight.resumed.step if preflight.resumed else 0
    for doubt in doubts(config, usable_cores(os.getpid())) + too_few_tasks(config, preflight.data.plan, step):
        log.warning("%s", doubt)
    if preflight.resumed is not None:
        _log_drift(preflight)
    data = preflight.data
    for number, (volume, planned) in enumerate(zip(data.volumes, data.plan.volumes, strict=True)):
        amplification = data.plan.read_amplification(number, world)
        log.info(
            "volume %s: %s %s, %d regions a pass, %.2f bytes decoded per byte of patch",
            volume.name,
            format_sizes(volume.shape_zyx),
            volume.dtype,
            planned.visits_per_pass,
            amplification,
        )
        # A small volume is in the page cache soon, and has small regions so that there are enough to mix.
        small = planned.visits_per_pass < 4 * data.plan.regions_in_flight
        if amplification > 1 and not small and not data.plan.independent:
            reads = data.plan.reads_per_region(world)
            log.warning(
                "%.2f bytes are decoded per byte of patch of %s, in chunks of %s%s; raise data.patches_per_region (now "
                "%d) in a new run, %s",
                amplification,
                volume.name,
                format_sizes(volume.chunk_zyx),
                f" that {reads:.1f} of {world} ranks read" if reads > 1 else "",
                data.plan.patches_per_region,
                "or start 2, 4 or 8 ranks" if reads > 1 else "or write the volume with smaller chunks",
            )
    log.info("plan %s: %s", data.plan.hash, mixing_text(data.job))
    if data.plan.repeats:
        log.warning(
            "the volumes hold fewer patch positions than data.regions_in_flight=%d: batches repeat patches; use larger "
            "volumes, a smaller data.patch_size or a smaller data.validation.guard",
            data.plan.regions_in_flight,
        )
    log.info("%s", noise_text(config.diffusion, preflight.spectrum))
    if config.training.validate_every and not any(split.validation for split in data.splits):
        log.info("no validation: data.validation.fraction is 0")


def mixing_text(job: ReaderJob) -> str:
    """What a batch is drawn from.  Pure."""
    plan = job.plan
    if plan.independent:
        return "every patch is drawn independently and read by itself (data.order=independent)"
    return (
        f"a batch is drawn from {plan.regions_in_flight} regions in flight "
        f"({size_text(plan.regions_in_flight * job.block_bytes)}), {plan.patches_per_region} patches from each"
    )


def noise_text(config: DiffusionConfig, spectrum: Spectrum) -> str:
    """Which noise levels are trained, and what of the data they follow from.  Pure."""
    schedule = Schedule.from_config(config, spectrum)
    least, most = (math.sqrt(1 / ab - 1) if ab else math.inf for ab in schedule.alpha_bar_64[[0, -1]])
    spread = f"standard deviation {spectrum.std:.3g}, largest amplitude of a frequency {math.sqrt(spectrum.peak):.3g}"
    if not spectrum.peak:
        spread = "constant in all patches measured, which leaves nothing to learn"
    return (
        f"noise {config.noise}: sigma {least:.3g} to {most:.3g} times the signal; the data: mean {spectrum.mean:.3g}, "
        f"{spread}"
    )


def _log_drift(preflight: Preflight) -> None:
    assert preflight.resumed is not None
    for line in preflight.resumed.drift:
        level = logging.WARNING if line.startswith(_CHANGES_TRAINING) else logging.INFO
        log.log(level, "changed since the checkpoint: %s", line)
    for line in preflight.resumed.accepted:
        log.warning("accepted by --allow-drift, so the run is no longer one experiment: %s", line)


def log_network(config: Config, network: nn.Module, device: torch.device, amp: AmpMode) -> None:
    """Size of the network and how it is computed."""
    log.info(
        "model %.1f M parameters, device %s, amp %s, global batch %d",
        parameter_count(network) / 1e6,
        device,
        amp,
        config.global_batch,
    )


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
        "unknown time" if left is None else format_duration(left.seconds),
    )
