"""What killed a process of this machine, by the kernel's counts and the last sample; and what to change then."""

from __future__ import annotations

from dataclasses import dataclass

from vesuvius.monitor.postmortem.death import Cause, Victim, share_of
from vesuvius.monitor.probes.cgroup import read_cgroup
from vesuvius.monitor.probes.machine import read_machine
from vesuvius.monitor.recent import MemorySample

NEARLY_FULL = 0.9
_AT_ONCE_S = 60.0  # kills counted for longer than this may be those of other programs, later
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


def read_counts_of(pid: int) -> KillCounts:
    """The counts now, of the machine and of the cgroup that a living process is in."""
    cgroup = read_cgroup(pid)
    path = cgroup.path if cgroup else ""
    return KillCounts(cgroup.oom_kills if cgroup else None, read_machine().oom_kills, path)


def judge(rise: KillCounts, last: MemorySample | None, since: str, counted_s: float = 0.0) -> tuple[Cause, list[str]]:
    """What killed a process, and the evidence.  Pure.

    Args:
        rise: kills counted since the last sample before the death.
        last: the last sample of the run's memory; None without one.
        since, counted_s: from when on kills were counted, for people, and for how many seconds.
    """
    share = share_of(last) if last is not None else None
    full = share is not None and share >= NEARLY_FULL
    if rise.cgroup:
        counted = f"the kernel killed {rise.cgroup} process(es) of this cgroup for memory since {since}"
        if share is not None and not full and counted_s > _AT_ONCE_S:
            return "unknown", [f"{counted}, when memory was not nearly full: which ones is not known", _NAME_THE_VICTIM]
        return _likely_scope(last), [f"{counted}: most likely this one", _NAME_THE_VICTIM]
    if rise.cgroup is None and rise.machine:
        counted = f"the kernel killed {rise.machine} process(es) of this machine for memory since {since}"
        if full:
            return _likely_scope(last), [f"{counted}: memory was nearly full, most likely this one", _NAME_THE_VICTIM]
        return "unknown", [f"{counted}: which ones is unknown", _NAME_THE_VICTIM]
    if rise.cgroup == 0 or rise.machine == 0:
        where = "this cgroup" if rise.cgroup == 0 else "this machine"
        return "signal", [f"the kernel counted no kill for memory in {where} since {since}"]
    return "unknown", ["the kernel's counts of kills cannot be read here"]


def _likely_scope(last: MemorySample | None) -> Cause:
    return "machine" if last is not None and last.killer == "the machine" else "cgroup"


def _rise(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None or now < before else now - before


def remedy_of(
    cause: Cause, victim: Victim, workers: int, last: MemorySample | None, ray_share: float | None = None
) -> str:
    """What to do about a death.

    Args:
        workers: readers that there were.
        last: the last sample before it.
        ray_share: share of the machine's memory at which Ray kills; None = not known.
    """
    again = "the run continues with a new reader" if victim == "reader" else "start again with --resume"
    full = last is not None and (share_of(last) or 0.0) >= NEARLY_FULL
    match cause:
        case "cgroup" | "machine":
            return _less_memory(victim, workers)
        case "ray":
            at = "" if ray_share is None else f" at {100 * ray_share:.0f} % of it"
            return (
                f"{_less_memory(victim, workers)} Ray counts the memory of the whole machine, including "
                f"other users', and kills{at} (RAY_memory_usage_threshold)."
            )
        case "signal" | "unknown" if full:
            return (
                "memory was nearly used up: a container runtime, a scheduler, systemd-oomd or earlyoom ends processes "
                f"like this. {_less_memory(victim, workers)}"
            )
        case "signal" | "restart":
            return f"nothing of the configuration; {again}."
        case _:
            return f"{again}; if it happens again, watch it: vesuvius memcheck --watch 2."


def _less_memory(victim: Victim, workers: int) -> str:
    sentences = []
    if victim == "reader":
        sentences.append("The run continues with a new reader; if it happens again, stop it first.")
    if workers:
        # Never 0: what readers leak, or hold, the trainer would.
        fewer = f"training.workers={workers - 1} training.prefetch_factor=1 (fewer readers, fewer batches ahead)"
        less = fewer if workers > 1 else "training.prefetch_factor=1 (fewer batches ahead)"
        sentences.append(f"Start it with --resume {less}, or with a smaller data.reader_mib.")
    else:
        sentences.append("Start it with --resume and a smaller data.reader_mib or training.train_batch_size.")
    return " ".join(sentences)
