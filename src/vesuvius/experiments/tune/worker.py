"""The trainer's side of a tune: it reads commands and writes measurements between two steps.

Commands are lines of JSON on standard input; when it closes, the tune has ended, and the trainer ends too.  Results are
records of kind `trial` in `metrics.jsonl`.
"""

import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from vesuvius.accelerator import synchronize
from vesuvius.diffusion.randomness import stratified_timesteps
from vesuvius.errors import EXIT_STOPPED
from vesuvius.experiments import steady
from vesuvius.experiments.tune.measurement import READER_KNOBS, Setting
from vesuvius.monitor.clock import StepClock
from vesuvius.monitor.probes.vram import process_peaks, read_vram
from vesuvius.stream.feeder import StreamInterrupted
from vesuvius.stream.options import batches_ahead
from vesuvius.stream.reading.reader_stats import ReaderTotals
from vesuvius.training.forecast.memory_plan import CONTEXT_BYTES
from vesuvius.training.loop import TrainingLoop
from vesuvius.training.reporting.report import StepReporter
from vesuvius.training.step.feed import TrainingBatch
from vesuvius.training.step.step import learning_rate

log = logging.getLogger(__name__)

# After the end of its tune, a trainer is killed after this time.
_ORPHAN_S = 60.0
_POLL_S = 0.2
# Steps alone are timed in this many pieces, or up to four times as many while their time varies.
_PIECES = 4
_STEPS_MOST = 2_500  # steps per piece
# Idle readers together use less of a core than this, over more than two samples of the monitor.
_IDLE_CORES, _IDLE_OVER_S = 0.1, 1.1

Figures = dict[str, Any]


class CommandPipe:
    """Commands from standard input: `number`, `kind` (a `TrialKind`), `seconds` to measure, and the reader knobs.

    When it closes, this process gets SIGTERM, and later exits.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[dict[str, Any]] = SimpleQueue()
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def next(self, stopping: Callable[[], bool]) -> dict[str, Any] | None:
        while not stopping():
            try:
                return self._queue.get(timeout=_POLL_S)
            except Empty:
                continue
        return None

    def _read(self) -> None:
        # Not `sys.stdin`: the interpreter cannot end while a thread reads from that.
        with open(0, "rb", buffering=0, closefd=False) as lines:
            for line in lines:
                self._queue.put(json.loads(line))
        log.info("tuning has ended; stopping the trainer")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_ORPHAN_S)
        os._exit(EXIT_STOPPED)


class TuneWorker:
    """Measures one trial after another; called between two steps."""

    def __init__(self, commands: CommandPipe, loop: TrainingLoop, reporter: StepReporter) -> None:
        self._loop, self._reporter, self._commands = loop, reporter, commands
        self._stream = loop.feed.stream
        source = Setting.of(loop.run.config)
        self._begin_with_readers({knob: getattr(source, knob) for knob in READER_KNOBS})
        self._rehearsed = False
        self._rehearsal_bytes = 0  # additional memory of a validation and a save
        self._script = self._measure()

    def __call__(self) -> None:
        self._sample_memory()
        next(self._script, None)

    def _measure(self) -> Generator[None]:
        run = self._loop.run
        try:
            while (command := self._commands.next(run.stop.is_requested)) is not None:
                if (knobs := {knob: command[knob] for knob in READER_KNOBS}) != self._in_force:
                    run.watchdog.expects("batch", "the workers to start")
                    workers, prefetch, requests = (knobs[name] for name in READER_KNOBS)
                    self._stream.reconfigure(  # raises ConfigError if impossible, which ends this trainer
                        num_workers=workers, processes=workers > 0, prefetch_factor=prefetch, requests=requests
                    )
                    self._loop.monitor.readers_changed()
                    self._begin_with_readers(knobs)
                match command["kind"]:
                    case "run":
                        figures = yield from self._run(command["seconds"])
                    case "reading":
                        figures = self._readers(command["seconds"])
                    case "step":
                        figures = self._step(command["seconds"])
                self._sample_memory()
                ram_bytes = max(self._ram_bytes, self._loop.monitor.sample.used_bytes + self._rehearsal_bytes)
                figures |= {"ram_bytes": ram_bytes, "vram_bytes": vram_bytes(run.device)}
                run.metrics.write("trial", number=command["number"], figures=figures)
        except StreamInterrupted:
            return

    def _begin_with_readers(self, knobs: dict[str, int]) -> None:
        self._in_force = knobs
        self._began_at, self._before = self._loop.run.progress.sample_index, self._stream.reader_totals
        self._ram_bytes, self._looked = 0, time.time()

    def _run(self, seconds: float) -> Generator[None, None, Figures]:
        """Measure the training loop.  The first time, validate and save before, as memory peaks there."""
        loop, run, kernel_steps = self._loop, self._loop.run, 0
        if not self._rehearsed:
            self._reporter.report(wait=True)
            before = loop.monitor.sample.used_bytes
            loop.periodic.run_all_now()
            self._sample_memory()
            self._rehearsal_bytes = max(self._ram_bytes - before, 0)
            self._rehearsed, kernel_steps = True, steady.KERNEL_STEPS
        self._fill()
        batch = run.config.global_batch
        warmup = steady.Warmup.of(loop.job.plan, self._stream.options, run.config.training.accumulate_steps, batch)
        began, step = time.monotonic(), run.progress.step
        # A trainer that is slower than its readers never drains what is ready.
        while (made := run.progress.step - step) < kernel_steps or (
            made < warmup.least_steps and time.monotonic() - began < seconds
        ):
            yield
        self._reporter.report(wait=True)
        self._reporter.verdicts.restart(run.progress.step)
        began, totals, first = time.monotonic(), self._stream.reader_totals, run.progress.sample_index
        length = self._length(batch, seconds)
        yield
        while not length.is_over(run.progress.sample_index - first, time.monotonic() - began):
            yield
        self._reporter.report(wait=True)
        verdict = self._reporter.verdicts.finish(min_steps=1)
        assert verdict is not None, "at least one step was measured"
        samples, working_s = verdict.window.steps * batch, verdict.window.working_s
        figures = self._figures(totals, samples, working_s)
        sustained, text = working_s / figures["measured_s"], verdict.text
        if sustained < 1:
            text = f"data-bound: reading delivers {samples / figures['measured_s']:.3g} samples/s, hidden by prefetch"
        return figures | {"data_share": 1 - sustained * (1 - verdict.window.shares["data_share"]), "text": text}

    def _readers(self, seconds: float) -> Figures:
        """Take batches as soon as they arrive, once those read ahead are used up."""
        stream, progress, options = self._stream, self._loop.run.progress, self._stream.options
        self._fill()
        began, ahead = time.monotonic(), (batches_ahead(options) + 1) * options.batch_size
        drained = progress.sample_index + ahead
        while progress.sample_index < drained:
            self._take_batch()
        empty = stream.feeder_stats.empty_queue_hits
        while stream.feeder_stats.empty_queue_hits == empty and time.monotonic() - began < seconds:
            self._take_batch()
        began, totals, first = time.monotonic(), stream.reader_totals, progress.sample_index
        length = self._length(options.batch_size, seconds)
        while not length.is_over(progress.sample_index - first, time.monotonic() - began):
            self._take_batch()
        return self._figures(totals, progress.sample_index - first, time.monotonic() - began)

    def _step(self, seconds: float) -> Figures:
        """Run steps on one batch, once the readers are idle."""
        loop, config, device = self._loop, self._loop.run.config, self._loop.run.device
        batch = self._take_batch()
        self._wait_until_idle(seconds)

        def steps(count: int) -> float:
            synchronize(device)
            began = time.monotonic()
            for step in range(loop.run.progress.step, loop.run.progress.step + count):
                timesteps = stratified_timesteps(config.seed, step, config.global_batch, config.diffusion.timesteps)
                for t in np.split(timesteps, config.training.accumulate_steps):
                    loop.train_step.accumulate(batch.x_0, batch.indices, t, batch.condition, eps=batch.eps)
                loop.train_step.apply(learning_rate(step, config.training))
                self._between()
            synchronize(device)
            return time.monotonic() - began

        steps(steady.KERNEL_STEPS)
        piece = min(max(round(seconds / steps(1) / _PIECES), 1), _STEPS_MOST)
        took = [steps(piece) for _ in range(_PIECES)]
        while len(took) < 4 * _PIECES and not steady.is_settled(took):
            took.append(steps(piece))
        return {"samples": len(took) * piece * config.global_batch, "measured_s": math.fsum(took)}

    def _take_batch(self) -> TrainingBatch:
        self._loop.run.watchdog.expects("batch", self._stream.waiting_for)
        batch = self._loop.batches.next(StepClock())
        self._loop.run.progress.sample_index += len(batch.indices)
        self._between()
        return batch

    def _between(self) -> None:
        """Let the memory guard act as between two steps, and sample memory.  Raises StreamInterrupted to stop."""
        if self._loop.run.stop.is_requested():
            raise StreamInterrupted
        self._loop.run.watchdog.expects("step", "the tuner to measure it")
        self._loop.guard_actions.execute(self._loop.feed, self._loop.monitor, self._reporter.longest_step_s)
        self._sample_memory()

    def _length(self, batch: int, seconds: float) -> steady.TrialLength:
        cycle = steady.cycle_of(self._loop.job.plan, self._stream.options.num_processes)
        return steady.TrialLength(batch, cycle, seconds)

    def _fill(self) -> None:
        """Take batches until new readers have read all regions in flight."""
        round_size = self._loop.job.plan.regions_in_flight
        while self._loop.run.progress.sample_index < (-(-self._began_at // round_size) + 1) * round_size:
            self._take_batch()

    def _wait_until_idle(self, most_s: float) -> None:
        """Wait until all buffers are full and the readers use no CPU, within bounds."""
        give_up = time.monotonic() + most_s
        while time.monotonic() < give_up and not self._loop.run.stop.is_requested():
            idle_s, cpu_s = self._stream.feeder_stats.idle_s, self._readers_cpu_s()
            time.sleep(_IDLE_OVER_S)
            is_full = self._stream.feeder_stats.idle_s - idle_s >= 0.9 * _IDLE_OVER_S
            if is_full and self._readers_cpu_s() - cpu_s < _IDLE_CORES * _IDLE_OVER_S:
                return

    def _readers_cpu_s(self) -> float:
        """CPU seconds that the readers on this machine had used at the monitor's last sample."""
        readers = self._stream.readers.copy().keys() - {os.getpid()}
        return math.fsum(each.cpu_s for each in self._loop.monitor.sample.processes if each.pid in readers)

    def _figures(self, since: ReaderTotals, samples: int, took_s: float) -> Figures:
        """The measurement; samples read ahead count with the time that the readers need for them."""
        plan, now, workers = self._loop.job.plan, self._stream.reader_totals, self._stream.options.num_processes
        # The cold start of the readers counts only if nothing was read later.
        before = since if now.blocks - since.blocks >= plan.regions_per_task else self._before
        reader_s, decode_s = steady.reader_times(before, now, plan.patches_per_region) or (None, None)
        measured_s = steady.reader_limited_s(samples, took_s, reader_s, workers)
        return {"samples": samples, "measured_s": measured_s, "reader_s": reader_s, "decode_s": decode_s}

    def _sample_memory(self) -> None:
        """Update the peak memory with the samples since the last call."""
        for sample in self._loop.monitor.recent_samples():
            if sample.time > self._looked:
                self._ram_bytes, self._looked = max(self._ram_bytes, sample.used_bytes), sample.time


def vram_bytes(device: torch.device) -> int | None:
    """Peak GPU memory of this process, including the CUDA context; None on a CPU."""
    use = read_vram(device, new_window=False)
    return None if use is None else process_peaks(device)[1] + min(use.foreign_bytes, CONTEXT_BYTES)
