"""What a run logs: the line and the record of each step, gathered from the loop, the clock and the monitor."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from vesuvius.config import Config
from vesuvius.engine.outcome import StepOutcome, StepResult
from vesuvius.engine.progress import Progress
from vesuvius.engine.replay_file import MicroBatch, ReplayWriter
from vesuvius.engine.verdicts import DataPath, Machine, Verdicts, telemetry
from vesuvius.errors import NonFiniteError
from vesuvius.observe.clock import StepClock, StepTimes
from vesuvius.observe.logfile import StepFigures, step_line
from vesuvius.observe.metrics import Metrics
from vesuvius.observe.quantile import quantile
from vesuvius.observe.verdict import Verdict

log = logging.getLogger(__name__)

# Behind the first of a session, which holds the start of the readers.
_ROLLING_STEPS = 100
_RECENT_STEPS = 10


@dataclass(frozen=True)
class _Launched:
    """A step whose figures may still be on the device, and the batches to keep should they not be finite."""

    step: int
    first_sample: int
    lr: float
    result: StepResult
    batches: Sequence[MicroBatch]


def _name_samples(offending: list[tuple[int, int]], limit: int = 4) -> str:
    """Which samples have no finite loss, the first few with their timesteps.  Pure."""
    if not offending:
        return "each with a finite loss"
    more = f" and {len(offending) - limit} more" if len(offending) > limit else ""
    return "not finite in " + ", ".join(f"{i} (t {t})" for i, t in offending[:limit]) + more


class StepReporter:
    """Logs steps once the device has finished them, judges what holds them up, and keeps those that were not finite.

    Args:
        progress: of the run; its pace is kept here.
        path: the stream that the steps are fed by.
        machine: the monitor.
        on_logged: called with the number of each step that was logged (a progress bar).
        replays: keeps the batches of steps that were not finite.
        on_verdict: called with each verdict on what holds the run up.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        clock: StepClock,
        metrics: Metrics,
        progress: Progress,
        path: DataPath,
        machine: Machine,
        on_logged: Callable[[int], None],
        replays: ReplayWriter,
        on_verdict: Callable[[Verdict], None] = lambda verdict: None,
    ) -> None:
        self._config = config
        self._device = device
        self._clock = clock
        self._metrics = metrics
        self._progress = progress
        self._path = path
        self._machine = machine
        self._verdicts = Verdicts(config, device, metrics, path, machine, on_verdict)
        self._on_logged = on_logged
        self._launched: deque[_Launched] = deque()
        self._reported = 0
        self._work_s: deque[float] = deque(maxlen=_ROLLING_STEPS)
        self._replays = replays

    def launched(
        self, step: int, first_sample: int, lr: float, result: StepResult, batches: Sequence[MicroBatch]
    ) -> None:
        """Note a step (counted from 1) that was handed to the device, and hold its batches until it is reported."""
        self._launched.append(_Launched(step, first_sample, lr, result, batches))

    def report(self, wait: bool = False) -> None:
        """Log the steps finished since the last call; with `wait`, all of them.

        Raises:
            NonFiniteError: `max_nonfinite` steps in a row had no finite loss and gradient.
        """
        for times in self._clock.finished(wait):
            self._report(self._launched.popleft(), times)

    @property
    def longest_step_s(self) -> float:
        """Seconds of the longest recent step without its pause; 0 until the second one, as the first starts readers."""
        return max(list(self._work_s)[-_RECENT_STEPS:], default=0.0)

    def _rolling(self, share: float) -> float | None:
        """Quantile of the last hundred steps without their pauses; None before the second."""
        return quantile(list(self._work_s), share) if self._work_s else None

    def finish(self) -> None:
        """Behind the last step of a session: log what is left, and what held it up.  Raises as `report`."""
        self.report(wait=True)
        self._verdicts.finish()

    def _report(self, launched: _Launched, times: StepTimes) -> None:
        outcome = launched.result.read()
        self._reported += 1
        if self._reported > 1:
            self._work_s.append(times.step_s - times.pause_s)
        figures = self._gather(launched, outcome, times)
        log.info(step_line(figures))
        record = asdict(figures) | asdict(times) | {"gpu_s": times.gpu_s, "other_s": times.other_s}
        record |= {"sample_index": launched.first_sample}
        record |= {"samples_total": launched.first_sample + figures.samples}
        record |= {"session_s": self._progress.session_s, "total_s": self._progress.total_s}
        for pair in ("ram_bytes", "vram_bytes"):
            record[pair.replace("_", "_used_")], record[pair.replace("_", "_limit_")] = record.pop(pair) or (None, None)
        del record["times"]
        record |= {"step_p50_s": self._rolling(0.5), "step_p95_s": self._rolling(0.95)}
        record |= telemetry(self._path)
        self._metrics.write("step", **record, finite=outcome.finite, scaler_overflow=outcome.overflowed)
        self._verdicts.add(launched.step, times, figures.vram_bytes)
        self._on_logged(launched.step)
        if not (outcome.finite or outcome.overflowed):
            self._nonfinite(launched, outcome)

    def _nonfinite(self, launched: _Launched, outcome: StepOutcome) -> None:
        indices = [int(index) for batch, _ in launched.batches for index in batch.indices]
        timesteps = [int(t) for _, part in launched.batches for t in part]
        offending = [place for place, loss in enumerate(outcome.losses) if not math.isfinite(loss)]
        last = outcome.nonfinite_in_a_row >= self._config.training.max_nonfinite
        # Behind the last one nothing is applied; behind others the steps launched by now may have been.
        later_steps = 0 if last else len(self._launched)
        replay = self._replays.write(launched.step, launched.lr, outcome.scale, launched.batches, later_steps)
        self._metrics.write(
            "event",
            event="nonfinite",
            step=launched.step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            samples=(launched.first_sample, launched.first_sample + self._config.global_batch),
            cause="gradient" if math.isfinite(outcome.loss) else "loss",
            offending=[indices[place] for place in offending],
            indices=indices,
            timesteps=timesteps,
            losses=outcome.losses,
            replay=None if replay is None else f"{replay.parent.name}/{replay.name}",
        )
        where = _name_samples([(indices[place], timesteps[place]) for place in offending])
        text = (
            f"step {launched.step} was not applied: loss {outcome.loss}, gradient norm {outcome.grad_norm}, samples "
            f"{indices[0]} to {indices[-1]}, {where}"
        )
        log.error("%s; %s", text, f"kept in {replay}" if replay else "not kept for replay")
        if last:
            raise NonFiniteError(
                f"loss and gradient must be finite; {text} ({outcome.nonfinite_in_a_row} in a row); "
                + (f"see `vesuvius train --replay {replay}`, " if replay else "")
                + "lower training.lr or training.clip_norm, look at these samples, or allow more by "
                "training.max_nonfinite",
                launched.step,
            )

    def _gather(self, launched: _Launched, outcome: StepOutcome, times: StepTimes) -> StepFigures:
        config, workers = self._config, self._path.options.workers
        self._progress.pace.append(times.step_s)
        peaks = [reader.rss_anon_peak_bytes or 0 for reader in list(self._path.readers.values())]
        return StepFigures(
            step=launched.step,
            steps=config.stop_step,
            epoch=(launched.step - 1) // config.training.steps_per_epoch + 1,
            epochs=config.training.epochs,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            lr=launched.lr,
            times=times,
            samples=config.global_batch,
            vram_bytes=self._vram(),
            ram_bytes=self._machine.ram(),
            workers=workers,
            worker_max_bytes=max(peaks) if workers and peaks else None,
            eta_s=self._progress.remaining_s(config.stop_step, launched.step) or 0.0,
        )

    def _vram(self) -> tuple[int, int] | None:
        if self._device.type != "cuda":
            return None
        return torch.cuda.memory_reserved(self._device), torch.cuda.get_device_properties(self._device).total_memory
