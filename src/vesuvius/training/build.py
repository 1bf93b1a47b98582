"""What a session works with, put together: the network, what feeds it, what saves it and what watches it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from vesuvius.config import Config
from vesuvius.config.load import dump_config
from vesuvius.diffusion.schedule import Schedule
from vesuvius.monitor.alerts.watchdog import Watchdog
from vesuvius.monitor.monitor import Monitor
from vesuvius.runlog.records import JsonLines
from vesuvius.runlog.run_dir import RunDir, run_dir
from vesuvius.stream.options import StreamOptions
from vesuvius.training.checkpoint.progress import Progress
from vesuvius.training.checkpoint.resume import restore, run_state
from vesuvius.training.checkpoint.save import RetentionPolicy
from vesuvius.training.checkpoint.writer import CheckpointWriter
from vesuvius.training.context import RunContext
from vesuvius.training.forecast.preflight import Preflight
from vesuvius.training.forecast.start_log import log_network
from vesuvius.training.guard_actions import GuardActions
from vesuvius.training.loop import MakeTuner, TrainingLoop
from vesuvius.training.milestones import Milestones
from vesuvius.training.quarantine import still_quarantined
from vesuvius.training.ranks.part import Part
from vesuvius.training.ranks.ranks import Ranks
from vesuvius.training.reporting.deaths import Deaths
from vesuvius.training.step.conditioning import Conditioner
from vesuvius.training.step.device import DeviceFeed
from vesuvius.training.step.network import build_network
from vesuvius.training.step.self_test import check_kernels
from vesuvius.training.step.step import TrainStep, choose_kernels
from vesuvius.training.validation.reference import Reference


def build_step(config: Config, preflight: Preflight, device: torch.device, part: Part, ranks: Ranks) -> TrainStep:
    """The network and its optimizer on the device, whose kernels have been checked."""
    choose_kernels(device, config.training)
    network = build_network(config, device)
    schedule = Schedule.from_config(config.diffusion, preflight.spectrum)
    train_step = TrainStep(config, network, schedule, device, part, ranks)
    check_kernels(config, config.training.train_batch_size, device, train_step.amp)
    log_network(config, network, device, train_step.amp)
    return train_step


def load_weights(config: Config, preflight: Preflight, train_step: TrainStep, device: torch.device) -> Progress:
    """Load the weights of the checkpoint or of another run, or keep the initial ones; returns how far the run is."""
    if preflight.resumed:
        progress = restore(preflight.resumed, train_step, device, config.training.threads)
        progress.quarantined = still_quarantined(progress.quarantined, run_dir(config).quarantine)
        return progress
    if preflight.initial:
        train_step.set_weights(preflight.initial.weights)
    return Progress()


def open_watchdog(config: Config, directory: RunDir, metrics: JsonLines, progress: Progress) -> Watchdog:
    """Says and records that the run hangs, from its context's start on."""
    stall_s = 60 * (config.monitor.stall_minutes or 0.0)
    return Watchdog(stall_s, directory.stacks, metrics.write, lambda: (progress.step, config.stop_step))


def open_writer(run: RunContext) -> CheckpointWriter:
    """Writes checkpoints beside the steps."""
    return CheckpointWriter(
        run.directory.checkpoints,
        RetentionPolicy(run.config.training.keep_last, run.config.training.keep_every),
        dump_config(run.config),
        on_progress=lambda: run.watchdog.alive("checkpoint"),
    )


def build_loop(
    run: RunContext,
    preflight: Preflight,
    train_step: TrainStep,
    writer: CheckpointWriter,
    monitor: Monitor,
    guard_actions: GuardActions,
    make_tuner: MakeTuner,
) -> TrainingLoop:
    """Join what feeds the steps, what is due between them, and what watches them."""
    config, data, facts = run.config, preflight.data, preflight.facts
    conditioner = Conditioner(config.data.labels, facts.greys.conditions, facts.scalars, run.device)
    fixed = preflight.fixed
    reference = None if fixed is None else Reference(fixed, facts.greys, conditioner, run.device)

    def state() -> dict[str, Any]:
        return run_state(config, data, facts, train_step, run.progress)

    job = replace(data.job, notes_dir=str(run.directory.reading.absolute()))
    options = replace(StreamOptions.from_config(config.training, config.cluster), batch_size=run.part.micro_batch)
    return TrainingLoop(
        run,
        job=job,
        feed=DeviceFeed(run.device, options, job, facts.greys.volumes, conditioner),
        train_step=train_step,
        milestones=Milestones(run, train_step, reference, preflight.spectrum, writer, state),
        monitor=monitor,
        guard_actions=guard_actions,
        deaths=Deaths(run, monitor, guard_actions),
        make_tuner=make_tuner,
    )
