"""The log line and the record of each step, with figures from the loop, the clock and the monitor."""

from __future__ import annotations

import logging
import math
import os
import platform
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vesuvius.diffusion.randomness import stratified_timesteps
from vesuvius.errors import NonFiniteError, one_line
from vesuvius.monitor.clock import StepClock, StepTimes
from vesuvius.monitor.monitor import Monitor
from vesuvius.monitor.probes.processes import read_process
from vesuvius.runlog.logfile import status_line, step_line
from vesuvius.runlog.records import Record
from vesuvius.runlog.units import quantile
from vesuvius.stream.reading.quarantine import check_quarantine
from vesuvius.stream.stream import PatchStream
from vesuvius.training.checkpoint.progress import region_key
from vesuvius.training.forecast.memory_plan import seconds_at_peak
from vesuvius.training.replay import Diagnosis, MicroBatch
from vesuvius.training.reporting.verdicts import Verdicts
from vesuvius.training.request import RunContext
from vesuvius.training.step.step import PendingOutcome, StepOutcome

log = logging.getLogger(__name__)

# Behind the first of a session, which holds the start of the readers.
_ROLLING_STEPS = 100
_RECENT_STEPS = 10
_NAMED = 4  # samples, of those whose loss is not finite


class RankTelemetry:
    """What a rank tells rank 0 before each step: where the time of its last one went, its node and private memory, and
    what it could not read.  Rank 0 records what all have told.

    Attributes:
        times: of this rank's last step, and its number.
        slowest: the rank that the others waited for in the last step that all told of; None = not known.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._told_of = len(run.progress.quarantined)
        self.times: tuple[int, StepTimes] | None = None
        self.slowest: int | None = None

    def collect(self) -> dict[str, Any]:
        """Return plain data about this rank since the last call."""
        found = self._run.progress.quarantined[self._told_of :]
        self._told_of += len(found)
        told: dict[str, Any] = {"quarantined": found, "times": None}
        if self.times is not None:
            (step, times), process = self.times, read_process(os.getpid())
            told["times"] = {"step": step, **_parts(times), "node": platform.node()}
            told["times"]["trainer_bytes"] = process.anon_bytes if process else None
        return told

    def record(self, told: Sequence[Mapping[str, Any]]) -> None:
        """On rank 0, record the times of all ranks, and what the others have quarantined.

        Raises DataError: more places than `data.max_quarantined` are damaged, over all ranks.
        """
        self._quarantine([record for one in told[1:] for record in one["quarantined"]])
        times = [one["times"] for one in told]
        if times and all(times):
            work_s = [one["step_s"] - one["comm_s"] - one["pause_s"] for one in times]
            self.slowest = work_s.index(max(work_s))
            self._run.metrics.write("ranks", step=min(one["step"] for one in times), slowest=self.slowest, times=times)

    def _quarantine(self, records: Sequence[dict[str, Any]]) -> None:
        """Those that are not known, once: a chunk may lie in regions of several ranks."""
        progress = self._run.progress
        known = {region_key(record) for record in progress.quarantined}
        new = list({region_key(record): record for record in records if region_key(record) not in known}.values())
        if new:
            progress.quarantine(self._run.directory.quarantine, new)
            self._told_of += len(new)
            check_quarantine(len(known) + len(new), self._run.config.data.max_quarantined, new[-1])


def _parts(times: StepTimes) -> dict[str, float]:
    return asdict(times) | {"gpu_s": times.gpu_s, "other_s": times.other_s}


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose figures may still be on the device, and its batches, to be computed again if it was not finite."""

    step: int  # counted from 1
    first_sample: int
    lr: float
    result: PendingOutcome
    batches: Sequence[MicroBatch]


class StepReporter:
    """Logs steps once the device has finished them, judges what limits them, and says where bad ones went wrong.

    `diagnose` computes a step again and says where its numbers stop being finite; `telemetry` takes the times.
    """

    def __init__(
        self,
        run: RunContext,
        clock: StepClock,
        stream: PatchStream,
        machine: Monitor,
        diagnose: Callable[[Sequence[MicroBatch]], Diagnosis],
        telemetry: RankTelemetry,
    ) -> None:
        self._run = run
        self._clock = clock
        self._stream = stream
        self._machine = machine
        self._diagnose = diagnose
        self._telemetry = telemetry
        self.verdicts = Verdicts(run, stream, machine)
        self._launched: deque[LaunchedStep] = deque()
        self._reported = 0
        self._work_s: deque[float] = deque(maxlen=_ROLLING_STEPS)  # of steps without their pauses
        self._seconds_at_peak = seconds_at_peak(run.config, run.device, run.share)

    def add_launched(self, step: LaunchedStep) -> None:
        """Note a step given to the device, and hold its batches until it is reported."""
        self._launched.append(step)

    def report(self, wait: bool = False) -> None:
        """Log the steps finished since the last call; with `wait`, all of them.

        Raises:
            NonFiniteError: `max_nonfinite` steps in a row had no finite loss and gradient.
            RankError: the sums of these steps were given up.
        """
        finished = self._clock.finished(wait)
        self._run.ranks.check_sums()
        for times in finished:
            self._report(self._launched.popleft(), times)

    @property
    def longest_step_s(self) -> float:
        """Seconds of the longest recent step without its pause; 0 until the second one, as the first starts readers."""
        return max(list(self._work_s)[-_RECENT_STEPS:], default=0.0)

    def finish(self) -> None:
        """After the last step of a session, log the remaining steps and a last verdict.  Raises as `report`."""
        self.report(wait=True)
        self.verdicts.finish()

    def _report(self, launched: LaunchedStep, times: StepTimes) -> None:
        run, outcome = self._run, launched.result.read()
        self._reported += 1
        if self._reported > 1:
            self._work_s.append(times.step_s - times.pause_s)
            run.progress.mark_reported(launched.step)
        record = self._record_of(launched, outcome, times)
        log.info(step_line(record), extra={"status": status_line(record, self.verdicts.bottleneck)})
        run.metrics.write("step", **record)
        self.verdicts.add(launched.step, times, self._vram())
        self._telemetry.times = launched.step, times
        if not (outcome.finite or outcome.overflowed):
            self._nonfinite(launched, outcome)

    def _nonfinite(self, launched: LaunchedStep, outcome: StepOutcome) -> None:
        config, step, first = self._run.config, launched.step, launched.first_sample
        indices = range(first, first + config.global_batch)
        of_step = (config.seed, step - 1, config.global_batch, config.diffusion.timesteps)
        timesteps = stratified_timesteps(*of_step).tolist()
        offending = [index for index, loss in zip(indices, outcome.losses, strict=True) if not math.isfinite(loss)]
        found = self._compute_again(launched)
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
        again = str(found or "it could not be computed again")
        if found and self._run.share.world > 1:
            again += " (of this rank's samples: see the logs of the other ranks)"
        named = ", ".join(f"{index} (t {timesteps[index - first]})" for index in offending[:_NAMED])
        more = f" and {len(offending) - _NAMED} more" if len(offending) > _NAMED else ""
        text = (
            f"step {step} was not applied: loss {outcome.loss}, gradient norm {outcome.grad_norm}, samples {first} to "
            f"{indices[-1]}, {f'not finite in {named}{more}' if named else 'each with a finite loss'}"
        )
        log.error("%s; %s", text, again)
        if outcome.nonfinite_in_a_row >= config.training.max_nonfinite:
            raise NonFiniteError(
                f"loss and gradient must be finite; {text} ({outcome.nonfinite_in_a_row} in a row); {again}; `vesuvius "
                f"train --config ... --replay {step}` shows each sample; lower training.lr or training.clip_norm, look "
                "at these samples, or allow more with training.max_nonfinite",
                step,
            )

    def _compute_again(self, launched: LaunchedStep) -> Diagnosis | None:
        """Where the step went wrong; the weights may have moved in steps launched since, but not after the last one."""
        try:
            with self._clock.pausing():
                return self._diagnose(launched.batches)
        except Exception as error:  # the run has other worries
            log.warning("step %d could not be computed again: %s", launched.step, one_line(error))
            return None

    def _record_of(self, launched: LaunchedStep, outcome: StepOutcome, times: StepTimes) -> Record:
        """Figures of a step, unrounded; None is not known."""
        config, progress = self._run.config, self._run.progress
        peaks = [reader.rss_anon_peak_bytes or 0 for reader in list(self._stream.readers.values())]
        ram_used_bytes, ram_limit_bytes = self._machine.ram()
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
            "worker_max_bytes": max(peaks, default=None) if self._stream.options.workers else None,
            "eta_s": progress.time_left(config, self._run.stop.time_left_s()),
            "ranks": self._run.share.world,
            "slowest_rank": self._telemetry.slowest,  # whom the others waited for, in the step before
            "mfu": self._seconds_at_peak / (times.step_s - times.pause_s) if self._seconds_at_peak else None,
            **_parts(times),
            "ram_used_bytes": ram_used_bytes,
            "ram_limit_bytes": ram_limit_bytes,
            "vram_used_bytes": vram_used_bytes,
            "vram_limit_bytes": vram_limit_bytes,
            "sample_index": launched.first_sample,
            "samples_total": launched.first_sample + config.global_batch,
            "session_s": progress.session_s,
            "total_s": progress.total_s,
            "step_p50_s": quantile(self._work_s, 0.5) if self._work_s else None,
            "step_p95_s": quantile(self._work_s, 0.95) if self._work_s else None,
            # totals, which only grow within a session
            "readers": asdict(self._stream.reader_totals),
            "feeder": asdict(self._stream.feeder_stats),
            "finite": outcome.finite,
            "scaler_overflow": outcome.overflowed,
        }

    def _vram(self) -> tuple[int, int] | None:
        """Reserved by torch, and the GPU's."""
        device = self._run.device
        if device.type != "cuda":
            return None
        return torch.cuda.memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
