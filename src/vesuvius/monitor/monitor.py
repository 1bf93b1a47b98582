"""Samples memory every second, records it every minute, and warns when memory is close to a limit.

Output: `recent.jsonl`, `system.jsonl` (`samples.py`) and, if the guard has to act, an `Order` for the loop.  One thread
samples and judges, another writes, so that a hung disk or GPU driver does not blind the guard.
"""

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from statistics import fmean
from typing import Any, Literal, Self

from vesuvius.monitor.memory.guard import Guard, LoopStatus, Order
from vesuvius.monitor.memory.limits import MemoryPolicy, run_bytes
from vesuvius.monitor.memory.risk import Level, Risk, RiskWatch
from vesuvius.monitor.probes.cgroup import CgroupUse
from vesuvius.monitor.probes.gpus import VramUse
from vesuvius.monitor.probes.system_sample import Rates, SystemSample, Watcher, rates_between
from vesuvius.monitor.samples import KEPT, MemorySample, RecentFile, summarize
from vesuvius.runlog.files import AsyncWriter, directory_bytes, free_disk_bytes
from vesuvius.runlog.records import JsonLines, Record
from vesuvius.runlog.run_dir import RunDir
from vesuvius.runlog.units import format_count, format_size
from vesuvius.threads import BoundedCall

log = logging.getLogger(__name__)

GuardMode = Literal["off", "warn", "act"]

RECORD_S = 60.0
# The first records hold one sample each, so that short runs and profiles have curves, too.
SINGLE_RECORDS = 30
_RATES_OVER_S = 10.0
_BLIND_EVERY_S = 600.0
_DISK_EVERY_S = 60.0
_JOIN_S = 2.0
_VRAM_S = 0.5  # takes microseconds; the driver of a failed GPU may never answer


@dataclass(eq=False)
class Monitor:
    """Samples until it is closed.  A context manager.

    Attributes:
        loop_status: set by the loop.
        sample: latest sample of the probes.
        risk: risk at that sample.
        order: pending order of the guard, or None.
    """

    directory: RunDir
    policy: MemoryPolicy
    watcher: Watcher
    read_vram: Callable[[], VramUse | None] | None = None  # of the trainer's GPU
    _: KW_ONLY
    gpu_uuid: str | None = None  # of the trainer's GPU
    sample_every_s: float = 1.0
    guard: GuardMode = "act"  # off = no warnings and no orders; warn = no orders
    # called once in the sampling thread when the guard orders an exit, which cannot wait for the loop
    on_exit: Callable[[Order], None] = lambda order: None
    # called in the writing thread with each record of `system.jsonl`
    on_record: Callable[[Record], None] = lambda record: None
    # what the run waits for, and seconds since the last sign of life, from the watchdog
    silence: Callable[[], tuple[str, float | None]] = lambda: ("", None)

    def __post_init__(self) -> None:
        self._read_vram = BoundedCall(self.read_vram, _VRAM_S) if self.read_vram else lambda: None
        self._watch, self._guard = RiskWatch(self.policy), Guard(self.policy)
        self._obeyed = False
        self._warn_blind_again_s = -math.inf
        self._recent: deque[MemorySample] = deque(maxlen=KEPT)
        self._seen: deque[SystemSample] = deque(maxlen=max(round(_RATES_OVER_S / self.sample_every_s), 1) + 1)
        self._local: set[int] = set()
        self._disk: dict[str, int] | None = None
        self._disk_due_s = -math.inf
        self._stop = threading.Event()
        self._judging = threading.Lock()
        self.loop_status = LoopStatus()
        self.order: Order | None = None
        self.risk: Risk
        self._recent_file = RecentFile(self.directory.recent)
        self._records = JsonLines(self.directory.system)
        self._writer = AsyncWriter("monitor-writer", self._warn_blind)
        self.sample = self.watcher.sample()
        self._add(self.sample, Level.LOW)
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive() or not self._writer.close(_JOIN_S):
            # A hung driver or disk must not delay the end of the run.
            log.warning("the monitor did not stop within %.0f s; its files stay open", _JOIN_S)
            return
        for file in (self._records, self._recent_file):
            file.close()

    def rates(self) -> Rates | None:
        """CPU use over the last ten seconds; None at the beginning."""
        seen = tuple(self._seen)  # an atomic copy: the monitor's thread appends
        return rates_between(seen[0], seen[-1]) if len(seen) > 1 else None

    def gpu_busy(self) -> float | None:
        """Share of the last ten seconds in which a kernel ran on the trainer's GPU, from NVML; None if unknown."""
        gpus = [gpu for sample in tuple(self._seen) for gpu in sample.gpus]
        known = [gpu.busy for gpu in gpus if gpu.busy is not None and self.gpu_uuid and self.gpu_uuid in gpu.uuid]
        return fmean(known) if known else None

    def stopped_readers(self) -> int:
        """Number of local readers that a signal (SIGSTOP) or a debugger holds now."""
        return sum(process.is_stopped and process.pid in self.loop_status.readers for process in self.sample.processes)

    def memory_is_short(self) -> bool:
        """Whether the risk is above LOW or the guard has reduced the readers in this session."""
        return self._obeyed or self.risk.level > Level.LOW

    def recent_samples(self) -> list[MemorySample]:
        """The samples of the last two minutes, at least one."""
        return list(self._recent)

    def carried_out(self) -> None:
        """Tell the guard that its order was carried out: readers were restarted."""
        with self._judging:
            self._guard.carried_out(time.monotonic())
            self._watch.restart()
            self.order = None
            self._obeyed = True

    def readers_changed(self) -> None:
        """Forget earlier growth: readers were restarted for another reason."""
        self._watch.restart()

    def _run(self) -> None:
        window: list[MemorySample] = []
        single, stopped = SINGLE_RECORDS, False
        most, level = max(round(RECORD_S / self.sample_every_s), 1), self.risk.level
        while not stopped:
            stopped = self._stop.wait(self.sample_every_s)
            try:
                self.watcher.include(self.loop_status.local_readers)
                window.append(self._add(self.watcher.sample(), self.risk.level))
                # A rising risk is recorded at once: alerts use these records.
                rises, level = self.risk.level > level, self.risk.level
                if stopped or rises or single > 0 or len(window) >= most:
                    self._writer.submit(partial(self._write, summarize(window) | self._cores()))
                    window, single = [], single - 1
            except Exception:  # a failing monitor must not end the run
                self._warn_blind()

    def _add(self, system: SystemSample, before: Level) -> MemorySample:
        if text := kills_text(self.sample.cgroup, system.cgroup):
            self._writer.submit(partial(log.error, "%s", text))
        self._judge(system, before)
        self.sample = system
        self._seen.append(system)
        loop, held = self.loop_status, {process.pid: process.anon_bytes for process in system.processes}
        self._local |= held.keys() & loop.readers.keys()
        # A local reader that has ended holds nothing, whatever it last reported.
        gone, (awaits, silent_s) = self._local - held.keys(), self.silence()
        readers = {pid: held.get(pid, size) for pid, size in loop.readers.items() if pid not in gone}
        known = {"workers": loop.workers, "vram": self._read_vram(), "awaits": awaits, "silent_s": silent_s}
        sample = MemorySample.of(system, self.risk, readers, loop.step, **known)
        self._recent.append(sample)
        self._writer.submit(partial(self._recent_file.write, sample))
        return sample

    def _judge(self, system: SystemSample, before: Level) -> None:
        """Judge the risk, log when its level changes, and ask the guard for an order."""
        ordered = self.order
        with self._judging:
            self.risk = risk = self._watch.add(system)
            if self.guard == "act":
                self.order = self._guard.next_action(time.monotonic(), risk, self.loop_status)
            order = self.order
        if self.guard != "off" and risk.level > before:
            text = f"risk of an out of memory kill is {risk.level.name}: {risk.reason}"
            if risk.is_of_others(self.policy):
                held = format_size(run_bytes(system, self.policy))
                text += f"; this run uses {held} of it, other programs the rest (see top -o %MEM)"
            self._writer.submit(partial(log.warning, "%s", text))
        elif self.guard != "off" and risk.level < before:
            self._writer.submit(partial(log.info, "memory risk is back to %s", risk.level.name))
        if order is not None and order.action == "exit" and (ordered is None or ordered.action != "exit"):
            self.on_exit(order)

    def _warn_blind(self) -> None:
        now = time.monotonic()
        if now >= self._warn_blind_again_s:
            self._warn_blind_again_s = now + _BLIND_EVERY_S
            self._writer.submit(partial(log.warning, "sampling failed; retrying", exc_info=sys.exc_info()))

    def _cores(self) -> dict[str, Any]:
        """Return cores used in the last ten seconds: by all programs, by the trainer and by each reader."""
        if (rates := self.rates()) is None:
            return {}
        own = rates.process_cores
        return {
            "cores_busy": round(sum(rates.core_busy), 2),
            "trainer_cores": round(own.get(self.sample.processes[0].pid, 0.0), 2),
            "reader_cores": {str(pid): round(own[pid], 2) for pid in self._recent[-1].readers if pid in own},
        }

    def _write(self, figures: Record) -> None:
        self.on_record(self._records.write("system", **figures, disk=self._disk_use()))

    def _disk_use(self) -> dict[str, int] | None:
        if time.monotonic() >= self._disk_due_s:
            self._disk_due_s, self._disk = time.monotonic() + _DISK_EVERY_S, None
            with suppress(OSError):
                free_bytes = free_disk_bytes(self.directory.path)
                self._disk = {"free_bytes": free_bytes, "run_bytes": directory_bytes(self.directory.path)}
        return self._disk


def kills_text(was: CgroupUse | None, now: CgroupUse | None) -> str:
    """Message about processes that the kernel killed between two samples, Ray's own included; '' if there are none."""
    if was is None or now is None or was.path != now.path or (now.oom_kills or 0) <= (was.oom_kills or 0):
        return ""
    killed = f"{format_count((now.oom_kills or 0) - (was.oom_kills or 0), 'process')} of cgroup {now.path}"
    remedy = "see `vesuvius memcheck`, lower training.workers or monitor.ram_limit_gib"
    return f"out of memory: the kernel killed {killed}; {remedy}"
