"""Gathers the figures of some steps and says every now and then what holds the run up: `observe/verdict.py`."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from statistics import fmean
from typing import Any, Protocol

import torch

from vesuvius.config import Config
from vesuvius.observe.clock import StepTimes
from vesuvius.observe.metrics import Metrics
from vesuvius.observe.quantile import quantile
from vesuvius.observe.system.cores import usable_cores
from vesuvius.observe.system.rates import Rates
from vesuvius.observe.verdict import Knobs, Thresholds, Verdict, Window, judge
from vesuvius.stream.feeder import FeederFigures
from vesuvius.stream.options import StreamOptions, batches_ahead
from vesuvius.stream.reader_figures import ReaderFigures, ReaderTotals

log = logging.getLogger(__name__)

# Fewer steps say little.
_STEPS_LEAST = 5
# Steps left out: the first holds the start of the readers, and kernels are chosen in it.  Where readers die or start
# anew, the steps reported next may be from before: a GPU's come late.
_AT_START, _AFTER_RECONFIGURE = 1, 3
_RATES_EVERY_S = 5.0


class DataPath(Protocol):
    """What a `PatchStream` says of itself."""

    @property
    def readers(self) -> Mapping[int, ReaderFigures]: ...

    @property
    def reader_deaths(self) -> int: ...

    @property
    def options(self) -> StreamOptions: ...

    @property
    def reader_totals(self) -> ReaderTotals: ...

    @property
    def feeder_figures(self) -> FeederFigures: ...


class Machine(Protocol):
    """What a `Monitor` says of the machine."""

    def ram(self) -> tuple[int, int]:
        """Bytes of memory that the run uses, and the limit."""
        ...

    def rates(self) -> Rates | None:
        """How busy processors, disks and network are; None = not known."""
        ...

    def gpu_busy(self) -> float | None:
        """Share of the time in which a kernel ran; None = not known."""
        ...

    def memory_is_short(self) -> bool:
        """Whether more readers or batches ahead are out of the question."""
        ...


class Verdicts:
    """Logs and records a verdict every `monitor.verdict_every` steps, and one at the end.

    Args:
        path: the stream.
        machine: the monitor.
        on_verdict: called with each.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        metrics: Metrics,
        path: DataPath,
        machine: Machine,
        on_verdict: Callable[[Verdict], None] = lambda verdict: None,
    ) -> None:
        self._config = config
        self._device = device
        self._metrics = metrics
        self._path = path
        self._machine = machine
        self._on_verdict = on_verdict
        self._options = path.options
        self._left_out = _AT_START
        self._reader_deaths = 0
        self._vram_bytes: tuple[int, int] | None = None
        self._begin(0)

    def _begin(self, step: int) -> None:
        """A new window, behind this step."""
        self._step = step
        self._times: list[StepTimes] = []
        self._seen_rates: list[Rates] = []
        self._seen_gpu_busy: list[float] = []
        self._rates_due = -math.inf
        self._before = self._path.reader_totals, self._path.feeder_figures

    def add(self, step: int, times: StepTimes, vram_bytes: tuple[int, int] | None) -> None:
        """Take in a step, counted from 1; `vram_bytes` is reserved and total."""
        every = self._config.monitor.verdict_every
        if every == 0:
            return
        if self._path.options is not self._options or self._path.reader_deaths > self._reader_deaths:
            self._options, self._reader_deaths = self._path.options, self._path.reader_deaths
            self._left_out = _AFTER_RECONFIGURE
        if self._left_out:
            self._left_out -= 1
            self._begin(step)
            return
        self._step = step
        self._times.append(times)
        self._vram_bytes = vram_bytes
        self._look_at_rates()
        if step % every == 0 and len(self._times) >= min(every, _STEPS_LEAST):
            self._judge()

    def finish(self) -> None:
        """At the end of the run: a verdict on the steps since the last one, if they are enough to say something."""
        if len(self._times) >= _STEPS_LEAST:
            self._judge()

    def _judge(self) -> None:
        monitor = self._config.monitor
        thresholds = Thresholds(monitor.data_share_good, monitor.gpu_share_good)
        window = self._window()
        knobs = _knobs(self._config, self._device, self._options, window, self._machine.memory_is_short())
        verdict = judge(window, knobs, thresholds)
        log.info("%s", verdict.line(self._step, self._config.stop_step))
        self._metrics.write("verdict", step=self._step, **verdict.record())
        self._begin(self._step)
        self._on_verdict(verdict)

    def _look_at_rates(self) -> None:
        now = time.monotonic()
        if now < self._rates_due or (rates := self._machine.rates()) is None:
            return
        self._rates_due = now + _RATES_EVERY_S
        self._seen_rates.append(rates)
        if (busy := self._machine.gpu_busy()) is not None:
            self._seen_gpu_busy.append(busy)

    def _window(self) -> Window:
        readers, feeder = self._path.reader_totals, self._path.feeder_figures
        sums: dict[str, Any] = {name: math.fsum(getattr(times, name) for times in self._times) for name in _TIMES}
        sums |= {name: getattr(readers, name) - getattr(self._before[0], name) for name in _READERS}
        sums |= {f.name: getattr(feeder, f.name) - getattr(self._before[1], f.name) for f in fields(feeder)}
        work_s = [times.step_s - times.pause_s for times in self._times]
        return Window(
            steps=len(self._times),
            **sums,
            step_p50_s=quantile(work_s, 0.5),
            step_p95_s=quantile(work_s, 0.95),
            read_s=None if readers.read_s is None else readers.read_s - (self._before[0].read_s or 0.0),
            cores=usable_cores(os.getpid()),
            idle_cores=fmean(r.idle_cores for r in self._seen_rates) if self._seen_rates else None,
            reader_cores=_cores_of_readers(self._seen_rates, self._path) if self._options.workers else None,
            gpu_busy=fmean(self._seen_gpu_busy) if self._seen_gpu_busy else None,
            vram_share=None if self._vram_bytes is None else self._vram_bytes[0] / self._vram_bytes[1],
        )


_TIMES = ("step_s", "data_s", "h2d_s", "forward_s", "backward_s", "optimizer_s", "other_s", "pause_s")
_READERS = ("decode_s", "bytes_read", "bytes_fetched", "requests", "retries")


def telemetry(path: DataPath) -> dict[str, Any]:
    """What the readers and the feeder have done so far, for the record of a step; they only grow within a session."""
    return {"readers": asdict(path.reader_totals), "feeder": asdict(path.feeder_figures)}


def _knobs(
    config: Config, device: torch.device, options: StreamOptions, window: Window, memory_is_short: bool
) -> Knobs:
    """The settings as they are now: of the readers what the stream says, which the memory guard or
    `autotune.py` may have changed."""
    training, store = config.training, config.data.store
    patch_bytes = window.delivered_bytes // max(window.batches * options.batch_size, 1)
    limit_mib = None
    if options.prefetch_bytes is not None and patch_bytes:
        limited = batches_ahead(patch_bytes, options) < max(options.workers, 1) * options.prefetch_factor
        limit_mib = max(options.prefetch_bytes // 2**20, 1) if limited else None
    return Knobs(
        on_gpu=device.type == "cuda",
        amp=training.amp,
        compile=training.compile,
        channels_last=training.channels_last,
        cudnn_benchmark=training.cudnn_benchmark,
        deterministic=training.deterministic,
        train_batch_size=training.train_batch_size,
        accumulate_steps=training.accumulate_steps,
        workers=options.workers,
        prefetch_factor=options.prefetch_factor,
        prefetch_limit_mib=limit_mib,
        requests=store.requests,
        cached=store.cache_dir is not None,
        memory_is_short=memory_is_short,
    )


def _cores_of_readers(seen: Sequence[Rates], path: DataPath) -> float | None:
    """Processors that readers on this machine used, on average; None where none of them was seen."""
    pids = list(path.readers)
    used = [
        sum(found) for rates in seen if (found := [rates.process_cores[p] for p in pids if p in rates.process_cores])
    ]
    return fmean(used) if used else None
