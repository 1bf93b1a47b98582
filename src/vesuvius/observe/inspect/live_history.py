"""Looks at living processes, one after the other: their parts over time, and how near a kill is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from vesuvius.observe.inspect.inspection import Inspection
from vesuvius.observe.inspect.parts import WARMUP_S, Figure, History, Labels, split_look, split_moment
from vesuvius.observe.inspect.ray_processes import is_reader
from vesuvius.observe.recent import Moment
from vesuvius.observe.risk.killers import Limits, killers_of, limit_of
from vesuvius.observe.risk.risk import RiskWatch
from vesuvius.observe.run_files import Peak
from vesuvius.observe.system.look import Look
from vesuvius.observe.system.processes import ProcessUse
from vesuvius.observe.system.rates import rates_between


class LiveHistory:
    """What was seen of one run, from the first look on and, where the run has kept moments, from before it.

    Args:
        limits: what memory is held against.
        labels: what the parts are called.
        root_pid: the process at the top; None = there is none.
        age_s: how long they had been at work at the first look or moment: at the beginning growth says nothing.
        is_single: which processes below the top have a row each, beside those that the run calls its readers.
    """

    def __init__(
        self,
        limits: Limits,
        labels: Labels,
        root_pid: int | None,
        age_s: float,
        is_single: Callable[[ProcessUse], bool] = is_reader,
    ) -> None:
        self._limits = limits
        self._labels = labels
        self._root_pid = root_pid
        self._is_single = is_single
        warmup_s = max(WARMUP_S - age_s, 0.0)
        self._parts = History(warmup_s)
        self._watch = RiskWatch(limits, warmup_s)
        self._cache = Figure("cache", "page cache, not in the total")
        self._before: Look | None = None

    def add(
        self,
        found: Inspection,
        look: Look,
        readers: Collection[int] = (),
        moments: Sequence[Moment] = (),
        peaks: Mapping[str | int, Peak] | None = None,
        names: Mapping[int, str] | None = None,
    ) -> Inspection:
        """Take a look in.

        Args:
            found: what is known without it.
            look: later than those before.
            readers: pids that the run itself calls its readers.
            moments: what the run kept; taken in before the first look, ignored later.
            peaks: what the run's own records say.
            names: what single processes are called besides their pid.

        Returns:
            `found` with what follows from the look.
        """
        if self._before is None:
            for moment in moments:
                if moment.time < look.time:
                    self._parts.add(split_moment(moment))
                    self._watch.add(look_of_moment(moment, look, self._limits))
        self._parts.add(
            split_look(look, self._root_pid, lambda process: process.pid in readers or self._is_single(process))
        )
        risk = self._watch.add(look)
        before, self._before = self._before, look
        cache_bytes = look.cgroup.file_bytes if look.cgroup else look.machine.page_cache_bytes
        self._cache.add(look.time, cache_bytes)
        return replace(
            found,
            rows=self._parts.rows(self._labels, peaks or {}, names),
            limit_bytes=limit_of(look, self._limits),
            page_cache_bytes=cache_bytes,
            page_cache=self._cache.row(),
            level=risk.level,
            reason=risk.reason,
            killers=risk.killers,
            trend=risk.trend,
            exhaustion=risk.exhaustion,
            growing=risk.growing,
            look=look,
            rates=rates_between(before, look) if before else None,
        )


def look_of_moment(moment: Moment, now: Look, limits: Limits) -> Look:
    """What a look at that moment would have shown, as far as the risk asks: who held how much, what killers counted.

    The moment has the first killer's count.  The others' are taken to have differed from now by as much.  Pure.
    """
    first = killers_of(now, limits)[0]
    change = moment.used_bytes - now.used_bytes
    if moment.killer == first.name:
        change = moment.killer_used_bytes - first.used_bytes
    machine = replace(now.machine, available_bytes=max(now.machine.available_bytes - change, 0))
    cgroup = now.cgroup and replace(
        now.cgroup,
        levels=tuple(replace(level, used_bytes=max(level.used_bytes + change, 0)) for level in now.cgroup.levels),
    )
    return replace(
        now,
        time=moment.time,
        processes=_processes_then(moment, now),
        shared_bytes=moment.shared_bytes,
        cgroup=cgroup,
        machine=machine,
        gpus=(),
    )


def _processes_then(moment: Moment, now: Look) -> tuple[ProcessUse, ...]:
    """The trainer and those readers that still live; the rest as one process that has no pid, so that sums hold."""
    root, *below = now.processes
    living = [
        replace(each, anon_bytes=moment.reader_bytes[each.pid]) for each in below if each.pid in moment.reader_bytes
    ]
    known = moment.trainer_bytes + moment.shared_bytes + sum(process.anon_bytes for process in living)
    rest = replace(root, pid=0, started_s=0.0, anon_bytes=max(moment.used_bytes - known, 0), swap_bytes=0)
    return (replace(root, anon_bytes=moment.trainer_bytes), *living, rest)
