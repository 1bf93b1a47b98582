"""What killed a process of this machine: weighs what the kernel's log and its counts of kills say.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vesuvius.observe.death.death import Cause, share_of
from vesuvius.observe.death.kill_evidence import KernelLog
from vesuvius.observe.recent import Moment

_NEARLY_FULL = 0.9


@dataclass(frozen=True)
class Case:
    """What speaks for and against the kernel.

    Attributes:
        pid: of the dead process, as it is called here.
        cgroup_rise, machine_rise: kills that the kernel has counted since `since`; None where it is not known.
        log: the kernel's log of that time; None where it may not be read.
        pids_match: whether the log calls processes as they are called here.
        last: the last look at the run's memory before the death; None without one.
        is_run: the process is the trainer, which Ray ends where one of its daemons dies.
        since: for people, from when on the kernel's kills are counted.
    """

    pid: int
    cgroup_rise: int | None = None
    machine_rise: int | None = None
    log: KernelLog | None = None
    pids_match: bool = True
    last: Moment | None = None
    is_run: bool = False
    since: str = "the last look"


def judge(case: Case) -> tuple[Cause, list[str]]:
    """What killed a process of this machine, and what says so.  Pure.

    Where the kernel's log can be read, it names who was killed; without it there are counts, which do not.  A cgroup's
    count is of victims in that cgroup, whoever's limit it was.
    """
    log = case.log
    if log is not None and case.pids_match:
        if (kill := log.kill_of(case.pid)) is not None:
            whose = [f"the limit was that of cgroup {kill.cgroup}"] if kill.cgroup else []
            return kill.scope, [f"the kernel's log: {kill.text}", *whose]
        if fault := log.faults.get(case.pid):
            return "signal", [f"the kernel's log: {fault}"]
        if case.is_run and case.cgroup_rise and log.kills:
            kill = log.kills[-1]
            other = f"the kernel's log: {kill.text}"
            return kill.scope, [other, "that is another process of the same cgroup; without Ray's daemons a run ends"]
        if log.whole:
            others = [f"the kernel killed another process: {kill.text}" for kill in log.kills[-2:]]
            return "signal", [f"the kernel's log has no kill of process {case.pid} since {case.since}", *others]
    return _judge_by_counts(case)


def _judge_by_counts(case: Case) -> tuple[Cause, list[str]]:
    blind = "the kernel's log, which would name the victim, cannot be read here; as root: dmesg | grep -i killed"
    kills = case.log.kills if case.log else ()
    if case.cgroup_rise:
        cause: Cause = kills[-1].scope if kills else _likely_scope(case.last)
        counted = f"a process of this cgroup was killed for memory since {case.since} ({case.cgroup_rise} counted)"
        return cause, [
            f"{counted}: most likely this one",
            *([f"the kernel's log: {kills[-1].text}"] if kills else [blind]),
        ]
    if case.cgroup_rise is None and case.machine_rise:
        counted = f"a process of this machine was killed for memory since {case.since} ({case.machine_rise} counted)"
        share = share_of(case.last) if case.last else None
        if share is not None and share >= _NEARLY_FULL:
            return "machine", [f"{counted}: as memory was nearly used up, most likely this one", blind]
        return "unknown", [f"{counted}: whose is not known", blind]
    if case.cgroup_rise == 0 or case.machine_rise == 0:
        where = "this cgroup" if case.cgroup_rise == 0 else "this machine"
        return "signal", [f"the kernel counted no kill for memory in {where} since {case.since}"]
    return "unknown", ["neither the kernel's log nor its count of kills can be read here"]


def _likely_scope(last: Moment | None) -> Literal["cgroup", "machine"]:
    return "machine" if last is not None and last.killer == "the machine" else "cgroup"
