"""What is known from outside at one moment, for `memory_table.py`: of a run, or of the machine.  Reads only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from vesuvius.errors import EXIT_MEMORY_CRITICAL, EXIT_MEMORY_KILL, EXIT_MEMORY_WARN, EXIT_OK
from vesuvius.monitor.memory.limits import Limits, MemoryLimit, tightest
from vesuvius.monitor.memory.risk import Level, RiskWatch
from vesuvius.monitor.probes.gpus import Gpus
from vesuvius.monitor.probes.processes import ProcessUse
from vesuvius.monitor.probes.system_sample import Rates, SystemSample, Watcher, rates_between, sample_system

State = Literal["running", "hung", "ended", "killed", "elsewhere", "unknown"]

WARMUP_S = 30.0


@dataclass(frozen=True)
class Row:
    """A part of the memory."""

    # "root" (the trainer), "readers" (all), "reader" (one), "others", "store" or "total"
    part: str
    name: str  # for people
    pid: int | None = None  # of a single process
    # now_bytes, peak_bytes: None = not known
    now_bytes: float | None = None
    peak_bytes: float | None = None


@dataclass(frozen=True)
class Inspection:
    """What was found."""

    time: float  # of the inspection, seconds since 1970
    what: Literal["run", "machine"]
    name: str  # of the run or the machine, for people
    state: State  # of the run; `elsewhere` = on another machine, where only its files can be read
    state_text: str  # the same for people, with the figure that says so
    stalled: bool = False  # it hangs: by its own watchdog, or because there is no sign of life
    rows: tuple[Row, ...] = ()  # the parts, then the total
    peaks_since: float | None = None  # from when on peaks were looked for, seconds since 1970
    limit_bytes: int | None = None  # the smallest limit
    # files that the system keeps in memory and gives back when asked; no part of the total
    page_cache_bytes: int | None = None
    # level, reason: the risk; None = it cannot be judged
    level: Level | None = None
    reason: str = ""
    killers: tuple[MemoryLimit, ...] = ()  # what may kill, nearest first
    vram: Row | None = None  # what the trainer has reserved; None without a GPU
    vram_limit_bytes: int | None = None  # of its GPU
    no_gpus: str | None = None  # why no GPU is seen
    # of a run: the last `step`, `age_s` since it was recorded, `step_s_p95` of recent ones, and the last `verdict`
    steps: Mapping[str, Any] | None = None
    kills: tuple[str, ...] = ()  # what says that something was killed, a line each
    remarks: tuple[str, ...] = ()  # what else one should know, a line each
    # sample, rates: what the system says; None where it was not looked at
    sample: SystemSample | None = None
    rates: Rates | None = None

    @property
    def exit_code(self) -> int:
        """A kill outweighs the risk, and a critical risk a run that hangs: 0, 10, 11 or 12."""
        if self.kills:
            return EXIT_MEMORY_KILL
        if self.level is Level.CRITICAL:
            return EXIT_MEMORY_CRITICAL
        return EXIT_MEMORY_WARN if self.stalled or self.level is Level.WARN else EXIT_OK

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come."""
        return self.state in {"ended", "killed"}


def as_json(found: Inspection) -> dict[str, Any]:
    """One object for scripts.  Null is not known.  Pure."""
    plain = asdict(replace(found, sample=None, rates=None))
    del plain["sample"], plain["rates"]
    sample, machine = found.sample, None
    if sample is not None:
        # No key is a word that a search of logs for kills would find.
        machine = asdict(sample.machine)
        machine["kernel_kills"] = machine.pop("oom_kills")
        machine["cgroup_kernel_kills"] = sample.cgroup.oom_kills if sample.cgroup else None
        machine["core_busy"] = list(found.rates.core_busy) if found.rates else None
    return plain | {
        "exit_code": found.exit_code,
        "level": found.level.name if found.level is not None else None,
        "parts": plain.pop("rows"),
        "killers": [asdict(killer) | {"left_bytes": killer.left_bytes} for killer in found.killers],
        "processes": [asdict(process) for process in sample.processes] if sample else None,
        "machine": machine,
        "gpus": [asdict(gpu) for gpu in sample.gpus] if sample else None,
    }


class Living:
    """A run, or the machine alone, sampled again and again: rows, peaks and risk.

    Args:
        pid: the trainer's process; None = the machine alone.
        age_s: how long it has been at work: at the beginning growth says nothing.
        others: what the rest of the run's processes are called.
    """

    def __init__(self, limits: Limits, pid: int | None, gpus: Gpus, age_s: float = WARMUP_S, others: str = "") -> None:
        self._limits = limits
        self._pid = pid
        self._gpus = gpus
        self._others = others
        self._watcher = Watcher(pid, gpus) if pid is not None else None
        self._watch = RiskWatch(limits, max(WARMUP_S - age_s, 0.0))
        self._before: SystemSample | None = None
        self._since = time.time()
        self._peaks: dict[str | int, float] = {}

    def sample(self) -> SystemSample:
        """Raises ProcessLookupError: the process has ended."""
        return self._watcher.sample() if self._watcher else sample_system(os.getpid(), self._gpus)

    def add_to(
        self,
        found: Inspection,
        sample: SystemSample,
        readers: Collection[int] = (),
        known: Mapping[str | int, float] | None = None,
    ) -> Inspection:
        """`found` with what follows from a sample.

        Args:
            readers: pids of those that have a row of their own.
            known: peaks that the run has recorded.
        """
        risk = self._watch.add(sample)
        held = {process.pid: process.anon_bytes for process in sample.processes}
        root = held.pop(self._pid, 0) if self._pid is not None else 0
        alone = {pid: size for pid, size in held.items() if pid in readers}
        sizes = sizes_of(root, alone, sample.shared_bytes, sample.used_bytes)
        for name, size in [*(known or {}).items(), *sizes.items()]:
            self._peaks[name] = max(self._peaks.get(name, 0.0), size)
        stopped = ", ".join(str(process.pid) for process in sample.processes if process.is_stopped)
        remark = f"stopped by a signal (SIGSTOP) or a debugger: process {stopped}; kill -CONT resumes it"
        before, self._before = self._before, sample
        return replace(
            found,
            remarks=(*found.remarks, *([remark] if stopped else [])),
            rows=rows_of(sizes, self._peaks, self._others) if self._watcher else (),
            peaks_since=self._since if found.peaks_since is None else found.peaks_since,
            limit_bytes=tightest(sample, self._limits).limit_bytes,
            page_cache_bytes=sample.cgroup.file_bytes
            if sample.cgroup and self._watcher
            else sample.machine.page_cache_bytes,
            level=risk.level if found.level is None else found.level,
            reason=found.reason or risk.reason,
            killers=risk.killers,
            sample=sample,
            rates=rates_between(before, sample) if before else None,
        )


def sizes_of(root: int, alone: Mapping[int, int], shared: int, used: int) -> dict[str | int, int]:
    """Memory by part, which adds up to "total".  Readers on other machines have said what they hold; it is no part of
    `used`.  Pure."""
    known = root + sum(alone.values()) + shared
    total = max(used, known)
    parts: dict[str | int, int] = {
        "root": root,
        "readers": sum(alone.values()),
        "others": total - known,
        "store": shared,
        "total": total,
    }
    return parts | dict(alone)


def rows_of(sizes: Mapping[str | int, int], peaks: Mapping[str | int, float], others: str) -> tuple[Row, ...]:
    """A row for each part that there is, the largest single process first, and the total as the last row.  Pure."""
    pids = sorted((name for name in sizes if isinstance(name, int)), key=lambda pid: -sizes[pid])
    wanted: list[tuple[str, str, str | int]] = [
        *([("root", "trainer", "root")] if sizes["root"] else []),
        *([("readers", f"readers ({len(pids)})", "readers")] if pids else []),
        *(("reader", f"reader {pid}", pid) for pid in pids),
        *([("others", others, "others")] if sizes["others"] else []),
        ("store", "object store", "store"),
        ("total", "total", "total"),
    ]
    return tuple(
        Row(part, name, key if isinstance(key, int) else None, sizes[key], max(sizes[key], peaks.get(key, 0.0)))
        for part, name, key in wanted
    )


def machine_inspector(gpus: Gpus, remarks: tuple[str, ...] = ()) -> Callable[[], Inspection]:
    """Looks at the machine, and the limits that hold for what is started from here; `remarks`: what else is to be said
    of it."""
    living, name = Living(Limits(), None, gpus), f"machine {os.uname().nodename}"

    def inspect() -> Inspection:
        found = Inspection(time.time(), "machine", name, "running", "", no_gpus=gpus.reason, remarks=remarks)
        return living.add_to(found, living.sample())

    return inspect


def is_reader(process: ProcessUse) -> bool:
    """Whether its title says that it is one of our readers, an actor of Ray Data."""
    return process.name.startswith("ray::") and ("_RayReader" in process.name or "MapWorker" in process.name)
