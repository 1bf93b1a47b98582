"""What is known of a run from outside at one moment: data that the inspectors find and `memory_table.py` shows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from vesuvius.errors import EXIT_MEMORY_CRITICAL, EXIT_MEMORY_KILL, EXIT_MEMORY_WARN, EXIT_OK
from vesuvius.monitor.memory.limits import MemoryLimit
from vesuvius.monitor.memory.risk import Exhaustion, Level
from vesuvius.monitor.memory.trend import Trend
from vesuvius.monitor.probes.system_sample import Rates, SystemSample

State = Literal["running", "hung", "ended", "killed", "elsewhere", "unknown"]


@dataclass(frozen=True)
class Row:
    """A part of the memory."""

    # "root" (the trainer, or the process asked for), "readers" (all), "reader" (one), "others", "store" or "total"
    part: str
    name: str  # for people
    pid: int | None = None  # of a single process
    # now_bytes, peak_bytes: None = not known
    now_bytes: float | None = None
    peak_bytes: float | None = None
    trend: Trend | None = None  # growth or shrinking beyond doubt; None = there is none, or too little was seen
    seen_s: float | None = None  # for how long a trend was looked for; None = too little was seen to speak of one


@dataclass(frozen=True)
class Steps:
    """How the run gets on, as its files say."""

    step: int | None = None  # the last optimizer step
    age_s: float | None = None  # since it was recorded
    step_s_p95: float | None = None  # of recent steps
    verdict: str | None = None  # on what holds the run up


@dataclass(frozen=True)
class Inspection:
    """What was found."""

    time: float  # of the inspection, seconds since 1970
    what: Literal["run", "process", "machine"]
    name: str  # of the run, the process or the machine, for people
    state: State  # of the run or process; `elsewhere` = on another machine, where only its files can be read
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
    # trend, exhaustion: of the first killer's memory
    trend: Trend | None = None
    exhaustion: Exhaustion | None = None
    vram: Row | None = None  # what the trainer has reserved; None without a GPU
    vram_limit_bytes: int | None = None  # of its GPU
    no_gpus: str | None = None  # why no GPU is seen
    steps: Steps | None = None  # None except of runs
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
    sample, rates = found.sample, found.rates
    machine = asdict(sample.machine) if sample else None
    if machine is not None and sample is not None:
        # No key is a word that a search of logs for kills would find.
        machine["kernel_kills"] = machine.pop("oom_kills")
        machine["cgroup_kernel_kills"] = sample.cgroup.oom_kills if sample.cgroup else None
        machine["core_busy"] = list(rates.core_busy) if rates else None
    del plain["sample"], plain["rates"]
    return plain | {
        "exit_code": found.exit_code,
        "level": found.level.name if found.level is not None else None,
        "parts": plain.pop("rows"),
        "killers": [asdict(killer) | {"left_bytes": killer.left_bytes} for killer in found.killers],
        "processes": [asdict(process) for process in sample.processes] if sample else None,
        "machine": machine,
        "gpus": [asdict(gpu) for gpu in sample.gpus] if sample else None,
    }
