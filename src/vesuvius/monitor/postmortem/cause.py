"""What killed a process of this machine, by the kernel's counts of OOM kills and the last memory sample."""

from __future__ import annotations

from dataclasses import dataclass

from vesuvius.monitor.postmortem.death import Cause, share_of
from vesuvius.monitor.probes.cgroup import read_cgroup
from vesuvius.monitor.probes.files import Roots
from vesuvius.monitor.probes.machine import read_machine
from vesuvius.monitor.recent import MemorySample

NEARLY_FULL = 0.9
_NAME_THE_VICTIM = "the kernel's log names the victim; as root: dmesg | grep -i killed"


@dataclass(frozen=True)
class KillCounts:
    """How many processes the kernel has killed for lack of memory; None where it does not count."""

    cgroup: int | None = None  # of those in a cgroup, whoever's limit it was
    machine: int | None = None  # on the whole machine since boot; containers see it too
    path: str = ""  # of that cgroup; '' = not known

    def since(self, before: KillCounts) -> KillCounts:
        """How many more than before; None where that is not known, it is another cgroup, or the count fell.  Pure."""
        comparable = self.path == before.path or not self.path or not before.path
        return KillCounts(
            _rise(before.cgroup, self.cgroup) if comparable else None, _rise(before.machine, self.machine), self.path
        )


def read_counts_of(pid: int, roots: Roots = Roots()) -> KillCounts:
    """The counts now, of the machine and of the cgroup that a living process is in."""
    cgroup = read_cgroup(pid, roots)
    path = cgroup.path if cgroup else ""
    return KillCounts(cgroup.oom_kills if cgroup else None, read_machine(roots).oom_kills, path)


def judge(rise: KillCounts, last: MemorySample | None, since: str) -> tuple[Cause, list[str]]:
    """What killed a process, and the evidence.  Pure.

    Args:
        rise: kills counted since the last sample before the death.
        last: the last sample of the run's memory; None without one.
        since: for people, from when on kills were counted.
    """
    share = share_of(last) if last is not None else None
    full = share is not None and share >= NEARLY_FULL
    if rise.cgroup:
        counted = f"the kernel killed {rise.cgroup} process(es) of this cgroup for memory since {since}"
        return _likely_scope(last), [f"{counted}: most likely this one", _NAME_THE_VICTIM]
    if rise.cgroup is None and rise.machine:
        counted = f"the kernel killed {rise.machine} process(es) of this machine for memory since {since}"
        if full:
            return _likely_scope(last), [f"{counted}: memory was nearly full, most likely this one", _NAME_THE_VICTIM]
        return "unknown", [f"{counted}: which ones is not known", _NAME_THE_VICTIM]
    if rise.cgroup == 0 or rise.machine == 0:
        where = "this cgroup" if rise.cgroup == 0 else "this machine"
        return "signal", [f"the kernel counted no kill for memory in {where} since {since}"]
    return "unknown", ["the kernel's counts of kills cannot be read here"]


def _likely_scope(last: MemorySample | None) -> Cause:
    return "machine" if last is not None and last.killer == "the machine" else "cgroup"


def _rise(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None or now < before else now - before
