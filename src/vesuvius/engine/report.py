"""What a run logs: the line and the record of each step, gathered from the loop, the clock and the monitor."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch

from vesuvius.config import Config
from vesuvius.data.stream import ReaderFigures
from vesuvius.engine.step import StepOutcome, StepResult
from vesuvius.errors import NonFiniteError
from vesuvius.observe.clock import StepClock, StepTimes
from vesuvius.observe.logfile import StepFigures, step_line
from vesuvius.observe.memory import MemoryUse
from vesuvius.observe.records import JsonLines

log = logging.getLogger(__name__)

_PACE_STEPS = 50


@dataclass(frozen=True)
class _Launched:
    """A step whose figures may still be on the device."""

    step: int
    first_sample: int
    lr: float
    result: StepResult


def _reader_sums(readers: list[ReaderFigures]) -> dict[str, float]:
    """What the living readers have done so far, all together."""
    names = ("decode_s", "bytes_read", "bytes_fetched", "requests", "retries", "cache_hits", "cache_misses")
    sums: dict[str, float] = {name: sum(getattr(reader, name) for reader in readers) for name in names}
    return sums | {"read_s": sum(reader.read_s or 0.0 for reader in readers)}


class StepReporter:
    """Logs steps once the device has finished them, and counts those that were not finite.

    Args:
        memory: returns the latest memory use.
        readers: what the reader processes last said.
        on_logged: called with the number of each step that was logged (a progress bar).
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        clock: StepClock,
        metrics: JsonLines,
        memory: Callable[[], MemoryUse],
        readers: Mapping[int, ReaderFigures],
        on_logged: Callable[[int], None],
    ) -> None:
        self._config = config
        self._device = device
        self._clock = clock
        self._metrics = metrics
        self._memory = memory
        self._readers = readers
        self._on_logged = on_logged
        self._launched: deque[_Launched] = deque()
        self._pace: deque[float] = deque(maxlen=_PACE_STEPS)
        self._nonfinite_in_a_row = 0

    def launched(self, step: int, first_sample: int, lr: float, result: StepResult) -> None:
        """Note a step (counted from 1) that was handed to the device."""
        self._launched.append(_Launched(step, first_sample, lr, result))

    def report(self, wait: bool = False) -> None:
        """Log the steps finished since the last call; with `wait`, all of them.

        Raises:
            NonFiniteError: `max_nonfinite` steps in a row had no finite loss and gradient.
        """
        for times in self._clock.finished(wait):
            self._report(self._launched.popleft(), times)

    def _report(self, launched: _Launched, times: StepTimes) -> None:
        outcome = launched.result.read()
        figures = self._gather(launched, outcome, times)
        log.info(step_line(figures))
        record = asdict(figures) | asdict(times) | {"other_s": times.other_s, "sample_index": launched.first_sample}
        for pair in ("ram_bytes", "vram_bytes"):
            record[pair.replace("_", "_used_")], record[pair.replace("_", "_limit_")] = record.pop(pair) or (None, None)
        del record["times"]
        record["readers"] = _reader_sums(list(self._readers.values()))
        self._metrics.write("step", **record, finite=outcome.finite, scaler_overflow=outcome.overflowed)
        self._on_logged(launched.step)
        if outcome.finite or outcome.overflowed:
            self._nonfinite_in_a_row = 0
        else:
            self._nonfinite(launched, outcome)

    def _nonfinite(self, launched: _Launched, outcome: StepOutcome) -> None:
        self._nonfinite_in_a_row += 1
        samples = (launched.first_sample, launched.first_sample + self._config.global_batch)
        self._metrics.write(
            "event",
            event="nonfinite",
            step=launched.step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            samples=samples,
        )
        text = (
            f"step {launched.step} was not applied: loss {outcome.loss}, gradient norm {outcome.grad_norm}, samples "
            f"{samples[0]} to {samples[1] - 1}"
        )
        log.error(text)
        if self._nonfinite_in_a_row >= self._config.training.max_nonfinite:
            raise NonFiniteError(
                f"loss and gradient must be finite; {text} ({self._nonfinite_in_a_row} in a row); lower training.lr or "
                "training.clip_norm, look at these samples, or allow more by training.max_nonfinite"
            )

    def _gather(self, launched: _Launched, outcome: StepOutcome, times: StepTimes) -> StepFigures:
        config, memory = self._config, self._memory()
        self._pace.append(times.step_s)  # its median does not mind the first steps, which hold the start of the readers
        workers = config.training.workers
        peaks = [reader.rss_anon_peak_bytes or 0 for reader in list(self._readers.values())]
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
            ram_bytes=(memory.used_bytes, memory.limit_bytes),
            workers=workers,
            worker_max_bytes=max(peaks) if workers and peaks else None,
            eta_s=statistics.median(self._pace) * (config.stop_step - launched.step),
        )

    def _vram(self) -> tuple[int, int] | None:
        if self._device.type != "cuda":
            return None
        return torch.cuda.memory_reserved(self._device), torch.cuda.get_device_properties(self._device).total_memory
