"""A thread that looks at the run every second, writes what it saw every ten, and says how near a kill is.

What it sees goes to `system.jsonl` (min, mean, max), to a line of `monitor.log`, to `recent.jsonl` (each look of the
last two minutes) and, where the guard finds that something must be done, to the loop as an `Order`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vesuvius.observe.recent import Moment, RecentFile
from vesuvius.observe.records import JsonLines
from vesuvius.observe.risk.guard import Guard, Order
from vesuvius.observe.risk.killers import Limits, limit_of
from vesuvius.observe.risk.risk import Level, Risk, RiskWatch
from vesuvius.observe.rotated import RotatedFile
from vesuvius.observe.system.look import Look, Watcher
from vesuvius.observe.system.rates import Rates, rates_between
from vesuvius.observe.system_record import Window, monitor_line, system_figures
from vesuvius.observe.vram import Vram, VramUse

log = logging.getLogger(__name__)

GuardMode = Literal["off", "warn", "act"]

_RATES_OVER_S = 10.0
_MOMENTS = 120
_BLIND_EVERY_S = 600.0
_JOIN_S = 2.0


@dataclass(frozen=True)
class MonitorPaths:
    """Where the monitor writes."""

    system: Path
    log: Path
    recent: Path


@dataclass(frozen=True)
class Told:
    """What the loop tells the monitor, which knows nothing of it.

    Attributes:
        step: optimizer steps done.
        step_s: how long the longest recent step took.
        readers: private memory of each reader by pid, as it last said; those on other machines too.
        workers: readers that there are now.
        prefetch_left, workers_left: whether the guard may have fewer batches ahead, fewer readers.
    """

    step: int = 0
    step_s: float = 0.0
    readers: Mapping[int, int] = field(default_factory=dict)
    workers: int | None = None
    prefetch_left: bool = False
    workers_left: bool = False


class Monitor:
    """Looks until it is closed.  A context manager.

    Args:
        paths: the files.
        limits: what memory is held against.
        watcher: looks at the run's processes.
        vram: memory of the trainer's GPU; None without one.
        sample_every_s, write_every_s: seconds between looks, and between records.
        guard: off = no warnings and no orders; warn = no orders.
        on_exit: called in the monitor's thread, once, when the guard orders to exit: that cannot wait for the loop.
        on_record: called there with each record of `system.jsonl`.

    Attributes:
        told: set by the loop.
        look: the last one.
        risk: how it was judged.
        order: what the guard wants to be done now; None = nothing.
    """

    def __init__(
        self,
        paths: MonitorPaths,
        limits: Limits,
        watcher: Watcher,
        vram: Vram | None = None,
        *,
        sample_every_s: float = 1.0,
        write_every_s: float = 10.0,
        guard: GuardMode = "act",
        on_exit: Callable[[Order], None] = lambda order: None,
        on_record: Callable[[dict[str, Any]], None] = lambda record: None,
    ) -> None:
        self._limits = limits
        self._watcher = watcher
        self._vram = vram
        self._sample_every_s = sample_every_s
        self._looks_per_record = max(round(write_every_s / sample_every_s), 1)
        self._mode: GuardMode = guard
        self._on_exit = on_exit
        self._on_record = on_record
        self._watch = RiskWatch(limits)
        self._guard = Guard(limits)
        self._obeyed = False
        self._say_blind_again_s = -math.inf
        self._level = Level.LOW
        self._moments: deque[Moment] = deque(maxlen=_MOMENTS)
        self._looks: deque[Look] = deque(maxlen=max(round(_RATES_OVER_S / sample_every_s), 1) + 1)
        self._cost = _Cost()
        self._stop = threading.Event()
        self._judging = threading.Lock()
        self.told = Told()
        self.order: Order | None = None
        self.look = watcher.look()
        self.risk: Risk
        self._recent = RecentFile(paths.recent)
        self._records = JsonLines(RotatedFile(paths.system))
        self._lines = RotatedFile(paths.log)
        self._judge(self.look)
        self._keep(self.look, None)
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():  # in a driver, or on a disk, that does not answer; it must not hold up the end
            log.warning("the monitor does not end within %.0f s and is left behind with its files open", _JOIN_S)
            return
        self._records.close()
        self._lines.close()
        self._recent.close()

    def ram(self) -> tuple[int, int]:
        """Bytes of memory that the run uses, and the limit."""
        return self.look.used_bytes, limit_of(self.look, self._limits)

    def rates(self) -> Rates | None:
        """What processors, disks and network did in the last ten seconds; None at the beginning."""
        looks = list(self._looks)
        return rates_between(looks[0], looks[-1]) if len(looks) > 1 else None

    def gpu_busy(self) -> float | None:
        """Share of the last ten seconds in which a kernel ran on the busiest GPU, as NVML says; None = not known."""
        shares = [max((gpu.busy for gpu in look.gpus if gpu.busy is not None), default=None) for look in self._looks]
        known = [share for share in shares if share is not None]
        return sum(known) / len(known) if known else None

    def memory_is_short(self) -> bool:
        """Whether there is a warning, or the guard has made the readers smaller in this session."""
        return self._obeyed or self.risk.level > Level.LOW

    def moments(self) -> list[Moment]:
        """The looks of the last two minutes."""
        return list(self._moments)

    def carried_out(self) -> None:
        """The loop has done what was ordered; readers were started anew, and what grew before says nothing."""
        with self._judging:
            self._guard.carried_out(time.monotonic())
            self._watch.restart()
            self.order = None
            self._obeyed = True

    def readers_changed(self) -> None:
        """Readers were started anew, though the guard had not ordered it; what grew before says nothing."""
        with self._judging:
            self._watch.restart()

    def _run(self) -> None:
        window: list[tuple[Look, VramUse | None]] = []
        stopped = False
        while not stopped:
            stopped = self._stop.wait(self._sample_every_s)
            try:
                window.append(self._look_once())
                if stopped or len(window) >= self._looks_per_record:
                    whole, window = window, []
                    self._write(whole)
            except Exception:  # a monitor must not end the run it watches; the log says that it is blind
                self._say_blind()

    def _look_once(self) -> tuple[Look, VramUse | None]:
        look = self._watcher.look()
        self._looks.append(look)
        self._say_kills(self.look, look)
        self._judge(look)
        self.look = look
        vram = self._vram.read() if self._vram else None
        self._keep(look, vram)
        return look, vram

    def _judge(self, look: Look) -> None:
        """How near a kill is; says so when that has changed, and what the guard makes of it."""
        told, before, ordered = self.told, self._level, self.order
        with self._judging:
            self.risk = risk = self._watch.add(look)
            if self._mode == "act":
                self.order = self._guard.judge(
                    time.monotonic(), risk, told.step_s, told.prefetch_left, told.workers_left
                )
            order = self.order
        self._level = risk.level
        if self._mode != "off" and risk.level > before:
            log.warning("risk of an out of memory kill %s: %s", risk.level.name, risk.reason)
        elif self._mode != "off" and risk.level < before:
            log.info("memory risk is %s again", risk.level.name)
        if order is not None and order.rung == "exit" and (ordered is None or ordered.rung != "exit"):
            self._on_exit(order)

    def _say_kills(self, before: Look, look: Look) -> None:
        """The kernel may have killed a process of which nobody else hears, such as one of Ray's own."""
        if before.cgroup is None or look.cgroup is None or before.cgroup.path != look.cgroup.path:
            return
        kills = (look.cgroup.oom_kills or 0) - (before.cgroup.oom_kills or 0)
        if kills > 0:
            log.error(
                "out of memory: the kernel has killed %d process(es) of cgroup %s for its limit; see "
                "`vesuvius memcheck`, lower training.workers or monitor.ram_limit_gib",
                kills,
                look.cgroup.path,
            )

    def _say_blind(self) -> None:
        """Seldom: what fails each second would fill the log."""
        now = time.monotonic()
        if now >= self._say_blind_again_s:
            self._say_blind_again_s = now + _BLIND_EVERY_S
            log.warning("the monitor could not look at the run; it goes on trying", exc_info=True)

    def _keep(self, look: Look, vram: VramUse | None) -> None:
        told, first, anon = self.told, self.risk.killers[0], {p.pid: p.anon_bytes for p in look.processes}
        moment = Moment(
            time=look.time,
            step=told.step,
            used_bytes=look.used_bytes,
            shared_bytes=look.shared_bytes,
            trainer_bytes=look.processes[0].anon_bytes,
            reader_bytes={pid: anon.get(pid, said) for pid, said in told.readers.items()},
            killer=first.name,
            killer_used_bytes=first.used_bytes,
            kills_at_bytes=first.kills_at_bytes,
            level=self.risk.level.name,
            workers=told.workers,
            vram_used_bytes=vram.reserved_bytes if vram else None,
            vram_limit_bytes=vram.total_bytes if vram else None,
            cgroup_oom_kills=look.cgroup.oom_kills if look.cgroup else None,
            machine_oom_kills=look.machine.oom_kills,
        )
        self._moments.append(moment)
        self._recent.write(moment)

    def _write(self, seen: Sequence[tuple[Look, VramUse | None]]) -> None:
        window = Window(
            step=self.told.step,
            looks=[look for look, _ in seen],
            vrams=[vram for _, vram in seen if vram is not None],
            limit_bytes=self.ram()[1],
            readers=self._moments[-1].reader_bytes,
            risk=self.risk,
            rates=self.rates(),
            monitor_cores=self._cost.share(),
        )
        record = self._records.write("system", **system_figures(window))
        self._lines.write_line(monitor_line(window))
        self._on_record(record)


class _Cost:
    """Processor time of the thread that asks, as a share of one core since it last asked."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None

    def share(self) -> float | None:
        now = time.thread_time(), time.monotonic()
        before, self._before = self._before, now
        return None if before is None or now[1] <= before[1] else (now[0] - before[0]) / (now[1] - before[1])
