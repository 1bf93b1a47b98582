"""The log line and the record of each step, with figures from the loop, the clock and the monitor.

A non-finite step is recomputed at once, to find the first layer, samples and gradients that are not finite.
"""

import logging
import math
import os
import platform
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.diffusion.randomness import stratified_timesteps
from vesuvius.errors import NonFiniteError, one_line
from vesuvius.monitor.clock import StepClock, StepTimes
from vesuvius.monitor.monitor import Monitor
from vesuvius.monitor.probes.processes import read_process
from vesuvius.monitor.probes.vram import read_vram
from vesuvius.runlog.logfile import status_line, step_line
from vesuvius.runlog.records import Record
from vesuvius.runlog.units import quantile
from vesuvius.stream.feeder import Batch
from vesuvius.stream.reading.quarantine import check_quarantine
from vesuvius.stream.stream import PatchStream
from vesuvius.training.checkpoint.progress import region_key
from vesuvius.training.forecast.memory_plan import seconds_at_peak
from vesuvius.training.reporting.verdicts import Verdicts
from vesuvius.training.request import RunContext
from vesuvius.training.step.feed import TrainingFeed
from vesuvius.training.step.step import PendingOutcome, StepOutcome, TrainStep

log = logging.getLogger(__name__)

# Excludes the first step of a session, which includes starting the readers.
_ROLLING_STEPS = 100
_RECENT_STEPS = 10
_MAX_NAMED = 4  # samples with a non-finite loss in a message
_NAMES_SHOWN = 5  # parameters with a non-finite gradient


MicroBatch = tuple[Batch, NDArray[np.int64]]
"""A batch as it was read, and its timesteps [B]."""


@dataclass(frozen=True)
class Diagnosis:
    """Where the values of a step stop being finite."""

    layer: str | None  # first layer with a non-finite output; None if all are finite
    samples: list[int]  # with non-finite output
    input_max: float  # largest finite |x| of its input
    gradients: list[str]  # parameters with a non-finite gradient

    def __str__(self) -> str:
        if self.layer is not None:
            return (
                f"first non-finite output: {self.layer}, sample {', '.join(map(str, self.samples))}; largest finite "
                f"|x| of its input {self.input_max:.4g}"
            )
        if not self.gradients:
            return "when recomputed, all layers and gradients are finite"
        more = ", ..." if len(self.gradients) > _NAMES_SHOWN else ""
        return f"non-finite gradients: {', '.join(self.gradients[:_NAMES_SHOWN])}{more}"


def diagnose(step: TrainStep, feed: TrainingFeed, batches: Sequence[MicroBatch]) -> Diagnosis:
    """Recompute a step with the current weights and discard it.  Call it between two steps; waits for the device."""
    first_bad: list[tuple[str, list[int], float]] = []
    indices = np.empty(0, np.int64)

    @torch.no_grad()  # recomputed blocks must not save additional tensors
    def check(name: str, arguments: tuple[Any, ...], output: Tensor) -> None:
        if not first_bad and (bad := ~torch.isfinite(output).flatten(1).all(1)).any():
            inputs = [x for x in arguments if isinstance(x, Tensor) and x.is_floating_point()]
            largest = max((float(x.abs().where(torch.isfinite(x), 0).max()) for x in inputs), default=0.0)
            first_bad.append((name, indices[bad.cpu().numpy()].tolist(), largest))

    with step.scratch_gradients(), ExitStack() as hooks:
        first = step.network.register_forward_pre_hook(lambda _, args: check("the network's input", args, args[0]))
        hooks.enter_context(first)
        for name, module in step.network.named_modules():
            hook = partial(lambda of, _, args, output: check(of, args, output), name or "the network")
            hooks.enter_context(module.register_forward_hook(hook))
        for stored, t in batches:
            batch = feed.to_device(stored)
            indices = batch.indices
            step.accumulate(batch.x_0, indices, t, batch.condition, last=False, eps=batch.eps)
        parameters = step.network.named_parameters()
        bad = [name for name, p in parameters if p.grad is not None and not torch.isfinite(p.grad).all()]
    layer, samples, input_max = first_bad[0] if first_bad else (None, [], 0.0)
    return Diagnosis(layer, samples, input_max, bad)


class RankTelemetry:
    """Telemetry sent to rank 0 before each step: timing of the last step, node, memory, and new quarantine records."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._num_sent = run, len(run.progress.quarantined)
        self.times: tuple[int, StepTimes] | None = None  # of this rank's last step, and its number
        self.slowest: int | None = None  # rank of the last step that all ranks reported; None = unknown

    def collect(self) -> dict[str, Any]:
        new = self._run.progress.quarantined[self._num_sent :]
        self._num_sent += len(new)
        message: dict[str, Any] = {"quarantined": new, "times": None}
        if self.times is not None:
            (step, times), process = self.times, read_process(os.getpid())
            message["times"] = {"step": step, **_parts(times), "node": platform.node()}
            message["times"]["trainer_bytes"] = process.anon_bytes if process else None
        return message

    def record(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """On rank 0, record the times of all ranks and quarantine regions found by the others.

        Raises DataError: more than `data.max_quarantined` regions are damaged, over all ranks.
        """
        self._quarantine([record for message in messages[1:] for record in message["quarantined"]])
        times = [message["times"] for message in messages]
        if times and all(times):
            work_s = [one["step_s"] - one["comm_s"] - one["pause_s"] for one in times]
            self.slowest = work_s.index(max(work_s))
            self._run.metrics.write("ranks", step=min(one["step"] for one in times), slowest=self.slowest, times=times)

    def _quarantine(self, records: Sequence[dict[str, Any]]) -> None:
        """Add regions not yet known, once each: several ranks may find the same chunk."""
        progress = self._run.progress
        known = {region_key(record) for record in progress.quarantined}
        new = list({region_key(record): record for record in records if region_key(record) not in known}.values())
        if new:
            progress.quarantine(self._run.directory.quarantine, new)
            self._num_sent += len(new)
            check_quarantine(len(known) + len(new), self._run.config.data.max_quarantined, new[-1])


def _parts(times: StepTimes) -> dict[str, float]:
    return asdict(times) | {"gpu_s": times.gpu_s, "other_s": times.other_s}


@dataclass(frozen=True)
class LaunchedStep:
    """A step that may still run on the device, and its batches, kept for diagnosis if it is not finite."""

    step: int  # counted from 1
    first_sample: int
    lr: float
    result: PendingOutcome
    batches: Sequence[MicroBatch]


class StepReporter:
    """Logs steps once the device has finished them, judges bottlenecks, and has non-finite steps diagnosed."""

    def __init__(
        self,
        run: RunContext,
        clock: StepClock,
        stream: PatchStream,
        machine: Monitor,
        diagnose: Callable[[Sequence[MicroBatch]], Diagnosis],
    ) -> None:
        self._run, self._clock, self._stream, self._machine, self._diagnose = run, clock, stream, machine, diagnose
        self.telemetry = RankTelemetry(run)
        self.verdicts = Verdicts(run, stream, machine)
        self.launched: deque[LaunchedStep] = deque()
        self._reported = 0
        self._work_s: deque[float] = deque(maxlen=_ROLLING_STEPS)  # of steps without their pauses
        self._seconds_at_peak = seconds_at_peak(run.config, run.device, run.share)

    def report(self, wait: bool = False) -> None:
        """Log the steps finished since the last call; with `wait`, all of them.

        Raises NonFiniteError: `max_nonfinite` steps in a row were not finite; RankError: their sums were aborted.
        """
        finished = self._clock.finished(wait)
        self._run.ranks.check_sums()
        for times in finished:
            self._report(self.launched.popleft(), times)

    @property
    def longest_step_s(self) -> float:
        """Longest recent step without its pause, in seconds; 0 until the second one: the first starts the readers."""
        return max(list(self._work_s)[-_RECENT_STEPS:], default=0.0)

    def finish(self) -> None:
        """Log the remaining steps and a final verdict.  Raises like `report`."""
        self.report(wait=True)
        self.verdicts.finish()

    def _report(self, launched: LaunchedStep, times: StepTimes) -> None:
        run, outcome = self._run, launched.result.read()
        self._reported += 1
        if self._reported > 1:
            self._work_s.append(times.step_s - times.pause_s)
            run.progress.mark_reported(launched.step)
        record = self._record_of(launched, outcome, times)
        bottleneck = self.verdicts.last.bottleneck if self.verdicts.last else ""
        log.info(step_line(record), extra={"status": status_line(record, bottleneck)})
        run.metrics.write("step", **record)
        self.verdicts.add(launched.step, times, self._vram())
        self.telemetry.times = launched.step, times
        if not (outcome.finite or outcome.overflowed):
            self._nonfinite(launched, outcome)

    def _nonfinite(self, launched: LaunchedStep, outcome: StepOutcome) -> None:
        config, step, first = self._run.config, launched.step, launched.first_sample
        indices = range(first, first + config.global_batch)
        of_step = (config.seed, step - 1, config.global_batch, config.diffusion.timesteps)
        timesteps = stratified_timesteps(*of_step).tolist()
        offending = [index for index, loss in zip(indices, outcome.losses, strict=True) if not math.isfinite(loss)]
        found = self._recompute(launched)
        self._run.metrics.write(
            "event",
            event="nonfinite",
            step=step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            samples=(indices.start, indices.stop),
            cause="gradient" if math.isfinite(outcome.loss) else "loss",
            offending=offending,
            timesteps=timesteps,
            losses=outcome.losses,
            **{name: found and getattr(found, name) for name in ("layer", "input_max", "gradients")},
        )
        again = str(found or "it could not be recomputed")
        if found and self._run.share.world > 1:
            again += " (samples of this rank; see the logs of the other ranks)"
        named = ", ".join(f"{index} (t {timesteps[index - first]})" for index in offending[:_MAX_NAMED])
        more = f" and {len(offending) - _MAX_NAMED} more" if len(offending) > _MAX_NAMED else ""
        text = (
            f"step {step} was not applied: loss {outcome.loss}, gradient norm {outcome.grad_norm}, samples {first} to "
            f"{indices[-1]}, {f'loss not finite for {named}{more}' if named else 'all losses finite'}"
        )
        log.error("%s; %s", text, again)
        if outcome.nonfinite_in_a_row >= config.training.max_nonfinite:
            raise NonFiniteError(
                f"Loss or gradient not finite: {text} ({outcome.nonfinite_in_a_row} in a row); {again}; lower "
                "training.lr or training.clip_norm, check these samples, or allow more with training.max_nonfinite",
                step,
            )

    def _recompute(self, launched: LaunchedStep) -> Diagnosis | None:
        """Diagnose the step; later steps may have moved the weights, except after the last one."""
        try:
            with self._clock.pausing():
                return self._diagnose(launched.batches)
        except Exception as error:  # must not hide the non-finite step
            log.warning("step %d could not be recomputed: %s", launched.step, one_line(error))
            return None

    def _record_of(self, launched: LaunchedStep, outcome: StepOutcome, times: StepTimes) -> Record:
        """Figures of a step, unrounded; None = unknown."""
        config, progress = self._run.config, self._run.progress
        peaks = [reader.rss_anon_peak_bytes or 0 for reader in list(self._stream.readers.values())]
        memory = self._machine.recent_samples()[-1]
        vram_used_bytes, vram_limit_bytes = self._vram() or (None, None)
        return {
            "step": launched.step,
            "steps": config.stop_step,
            "epoch": (launched.step - 1) // config.training.steps_per_epoch + 1,
            "epochs": config.training.epochs,
            "loss": outcome.loss,
            "grad_norm": outcome.grad_norm,
            "lr": launched.lr,
            "samples": config.global_batch,
            "workers": self._stream.num_readers_alive,
            "working": self._stream.num_readers_with_work,
            "worker_max_bytes": max(peaks, default=None) if self._stream.options.processes else None,
            "eta_s": progress.time_left(config, self._run.stop.time_left_s()),
            "ranks": self._run.share.world,
            "slowest_rank": self.telemetry.slowest,  # of the previous step
            "mfu": self._seconds_at_peak / (times.step_s - times.pause_s) if self._seconds_at_peak else None,
            **_parts(times),
            "ram_used_bytes": memory.used_bytes,
            "ram_limit_bytes": memory.limit_bytes,
            "vram_used_bytes": vram_used_bytes,
            "vram_limit_bytes": vram_limit_bytes,
            "sample_index": launched.first_sample,
            "samples_total": launched.first_sample + config.global_batch,
            "session_s": progress.session_s,
            "total_s": progress.total_s,
            "step_p50_s": quantile(self._work_s, 0.5) if self._work_s else None,
            "step_p95_s": quantile(self._work_s, 0.95) if self._work_s else None,
            # totals of this session
            "readers": asdict(self._stream.reader_totals),
            "feeder": asdict(self._stream.feeder_stats),
            "finite": outcome.finite,
            "scaler_overflow": outcome.overflowed,
        }

    def _vram(self) -> tuple[int, int] | None:
        """Bytes reserved by torch, and total."""
        use = read_vram(self._run.device, new_window=False)
        return None if use is None else (use.reserved_bytes, use.total_bytes)
