"""Collects the figures of a window of steps for a verdict on the bottleneck (`monitor/verdict.py`)."""

import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import fields
from statistics import fmean
from typing import Any

import torch

from vesuvius.monitor.clock import StepTimes
from vesuvius.monitor.monitor import Monitor
from vesuvius.monitor.probes.cores import bound_cores, cpu_quotas, throttling, usable_cores
from vesuvius.monitor.probes.system_sample import Rates
from vesuvius.monitor.verdict import Verdict, diagnose
from vesuvius.monitor.window import Knobs, Window
from vesuvius.runlog.units import quantile
from vesuvius.stream.stream import PatchStream
from vesuvius.training.request import RunContext
from vesuvius.training.step.setup import is_compiled, uses_channels_last

log = logging.getLogger(__name__)

_MIN_STEPS = 5  # fewer are too noisy for a verdict
# Excluded steps: the first includes starting readers and choosing kernels.  After readers die or restart, the next
# reported steps may be older, as a GPU reports late.
_AT_START, _AFTER_RECONFIGURE = 1, 3
# The following steps are excluded, for at most this long, while data read in advance feeds them.
_READ_AHEAD_S = 60.0
# A verdict is due after so many seconds of steps, however few: the first of a session, and each further one.
_FIRST_S, _FURTHER_S = 60.0, 600.0
_MIN_TIMED_STEPS = 2
_RATES_EVERY_S = 5.0
# Settings of a verdict, and fields of `ReaderStats` that are summed over a window.
_SWITCHES = ("amp", "train_batch_size", "accumulate_steps")
_READERS = ("decode_s", "bytes_read", "bytes_fetched", "requests", "retries")


class Verdicts:
    """Logs and records a verdict every `monitor.verdict_every` steps, and one at the end.

    With long steps the first comes after a minute or two, and further ones at most ten minutes apart.
    """

    def __init__(self, run: RunContext, stream: PatchStream, machine: Monitor) -> None:
        self._run, self._stream, self._machine = run, stream, machine
        self.last: Verdict | None = None
        self._options = stream.options
        self._num_excluded = _AT_START
        self._read_ahead_s: float | None = 0.0  # of steps fed by data read in advance; None = none left
        self._due_s = _FIRST_S
        self._reader_deaths = 0
        self._held = False
        self._vram_bytes: tuple[int, int] | None = None
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._step = step
        self._times: list[StepTimes] = []
        self._working: list[int] = []
        self._rates: list[Rates] = []
        self._gpu_busy: list[float] = []
        self._quotas_before = cpu_quotas(os.getpid())
        self._rates_due = -math.inf
        self._before = self._stream.reader_totals, self._stream.feeder_stats

    def add(self, step: int, times: StepTimes, vram_bytes: tuple[int, int] | None) -> None:
        every = self._run.config.monitor.verdict_every
        if every == 0 and not self._held:
            return
        if self._stream.options is not self._options or self._stream.reader_deaths > self._reader_deaths:
            self._options, self._reader_deaths = self._stream.options, self._stream.reader_deaths
            self._num_excluded = _AFTER_RECONFIGURE
        if self._num_excluded:
            self._num_excluded, self._read_ahead_s = self._num_excluded - 1, 0.0
            self._begin(step)
            return
        if self._is_read_ahead(step, times):
            return
        self._step = step
        self._times.append(times)
        self._working.append(self._stream.num_readers_with_work)
        self._vram_bytes = vram_bytes
        self._sample_rates()
        by_step = step % max(every, 1) == 0 and len(self._times) >= min(every, _MIN_STEPS)
        in_time = len(self._times) >= _MIN_TIMED_STEPS and math.fsum(t.step_s for t in self._times) >= self._due_s
        if not self._held and (by_step or in_time):
            self._due_s = _FURTHER_S
            self._judge()

    def _is_read_ahead(self, step: int, times: StepTimes) -> bool:
        """Whether a step may use data read while the trainer started, which hides the current reading speed.

        Ends once the batches ahead ran out, or as many blocks as can be ahead have arrived.
        """
        if self._read_ahead_s is None or self._held:
            return False
        ahead, (readers, feeder) = self._stream.max_blocks_ahead, self._before
        if ahead == 0:
            self._read_ahead_s = None
            return False
        self._read_ahead_s += times.step_s
        replaced = self._stream.reader_totals.blocks - readers.blocks > ahead
        ran_out = self._stream.feeder_stats.empty_queue_hits > feeder.empty_queue_hits
        if replaced or ran_out or self._read_ahead_s >= _READ_AHEAD_S:
            self._read_ahead_s = None
            self._begin(step)
        return True

    def finish(self, min_steps: int = _MIN_STEPS) -> Verdict | None:
        """Judge the steps since the last verdict; None if there are too few."""
        self._held = False
        return self._judge() if len(self._times) >= min_steps else None

    def restart(self, step: int) -> None:
        """Judge all steps after this one together, when `finish` is called."""
        self._held = True
        self._options, self._reader_deaths, self._num_excluded = self._stream.options, self._stream.reader_deaths, 0
        self._begin(step)

    def _judge(self) -> Verdict:
        run = self._run
        window, knobs = self._window(), _knobs(run, self._stream, self._machine.memory_is_short())
        verdict = diagnose(window, knobs)
        command = f"; to find the best setting: {run.directory.tune_command}" if verdict.overrides else ""
        log.info("%s%s", verdict.line(self._step, run.config.stop_step), command)
        run.metrics.write("verdict", step=self._step, **verdict.record())
        self._begin(self._step)
        self.last = verdict
        return verdict

    def _sample_rates(self) -> None:
        now = time.monotonic()
        if now < self._rates_due or (rates := self._machine.rates()) is None:
            return
        self._rates_due = now + _RATES_EVERY_S
        self._rates.append(rates)
        if (busy := self._machine.gpu_busy()) is not None:
            self._gpu_busy.append(busy)

    def _window(self) -> Window:
        """Figures of these steps.  Each rank counts its share of the node's cores: all follow the verdict's advice."""
        readers, feeder = self._stream.reader_totals, self._stream.feeder_stats
        ranks_here = self._run.ranks.local_world
        sums: dict[str, Any] = {
            f.name: math.fsum(getattr(times, f.name) for times in self._times) for f in fields(StepTimes)
        }
        sums |= {name: getattr(readers, name) - getattr(self._before[0], name) for name in _READERS}
        sums |= {f.name: getattr(feeder, f.name) - getattr(self._before[1], f.name) for f in fields(feeder)}
        work_s = [times.step_s - times.pause_s for times in self._times]
        share, quota = throttling(self._quotas_before, cpu_quotas(os.getpid())) or (None, None)
        return Window(
            steps=len(self._times),
            **sums,
            step_p50_s=quantile(work_s, 0.5),
            step_p95_s=quantile(work_s, 0.95),
            read_s=None if readers.read_s is None else readers.read_s - (self._before[0].read_s or 0.0),
            cores=usable_cores(os.getpid()) / ranks_here,
            idle_cores=_mean([r.idle_cores(bound_cores()) / ranks_here for r in self._rates]),
            own_cores=_mean([math.fsum(r.process_cores.values()) for r in self._rates]),
            throttled_share=share,
            throttled_quota=None if quota is None else quota.cores,
            working_readers=fmean(self._working),
            stopped_readers=self._machine.stopped_readers(),
            reader_cores=self._reader_cores() if self._options.processes else None,
            gpu_busy=_mean(self._gpu_busy),
            vram_share=None if self._vram_bytes is None else self._vram_bytes[0] / self._vram_bytes[1],
        )

    def _reader_cores(self) -> float | None:
        """Mean cores used by readers on this machine; None if none was sampled."""
        pids = list(self._stream.readers)
        seen = ([rates.process_cores[p] for p in pids if p in rates.process_cores] for rates in self._rates)
        return _mean([math.fsum(found) for found in seen if found])


def _knobs(run: RunContext, stream: PatchStream, memory_is_short: bool) -> Knobs:
    """Current settings; the readers' come from the stream, as the memory guard may change them."""
    store, options = run.config.data.store, stream.options
    return Knobs(
        **{name: getattr(run.config.training, name) for name in _SWITCHES},
        compile=is_compiled(run.config.training, run.device),
        channels_last=uses_channels_last(run.config.training, run.device),
        on_gpu=run.device.type != "cpu",
        workers=options.num_processes,
        reader_threads=options.num_threads,
        prefetch_factor=options.prefetch_factor,
        requests=options.requests or store.requests,
        cached=store.cache_dir is not None,
        threads=torch.get_num_threads(),
        resident=stream.has_resident and not options.processes,
        memory_is_short=memory_is_short,
    )


def _mean(figures: Sequence[float]) -> float | None:
    return fmean(figures) if figures else None
