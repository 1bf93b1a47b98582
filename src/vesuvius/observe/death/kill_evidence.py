"""What the kernel says of a process that is gone: its counts of kills for want of memory, and the lines of its log."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vesuvius.observe.system.cgroup import read_cgroup
from vesuvius.observe.system.machine import read_machine
from vesuvius.observe.system.roots import Roots

KMSG = Path("/dev/kmsg")

_RECORD_BYTES = 8192  # the longest line; the kernel refuses to write into less space than the next one needs
_SLACK_S = 5.0
# The clock of the log is not corrected by NTP and drifts from the other clocks for as long as the machine is up.
_DRIFT = 1e-4

# "Memory cgroup out of memory: Killed process 30111 (python3) total-vm:..."; kernels before 5.3 wrote "Kill process".
_KILL = re.compile(
    r"(Memory cgroup out of memory|Out of memory)\b.*?: Kill(?:ed)? process (\d+) \(.*?\),? (?:UID|total-vm|score)"
)
# Since 5.0 the line before it tells whose limit it was.
_LIMIT_OF = re.compile(r"oom-kill:.*\boom_memcg=([^,]*),.*\bpid=(\d+)")
# "python3[123]: segfault at ...", "traps: python3[123] general protection fault ip:..."
_FAULT = re.compile(r"^(?:traps: )?\S.*?\[(\d+)\]:? (?:segfault|general protection|trap )")


@dataclass(frozen=True)
class KernelKill:
    """A process that the kernel has killed for want of memory.

    Attributes:
        pid: as the kernel calls it; inside a container the process has another.
        scope: for a limit of a cgroup, or because the machine had no more.
        cgroup: whose limit it was; None where the log does not tell.
        text: the line of the log.
    """

    pid: int
    scope: Literal["cgroup", "machine"]
    cgroup: str | None
    text: str


@dataclass(frozen=True)
class KernelLog:
    """What the kernel's log holds of a span of time.

    Attributes:
        whole: whether the log goes back as far as was asked; otherwise its older lines were overwritten.
        kills: kills for want of memory, oldest first.
        faults: by pid, the line about a crash (a forbidden access to memory and the like).
    """

    whole: bool = True
    kills: tuple[KernelKill, ...] = ()
    faults: Mapping[int, str] = field(default_factory=dict)

    def kill_of(self, pid: int) -> KernelKill | None:
        """The kill of a process; the last one, should its pid have been used again."""
        return next((kill for kill in reversed(self.kills) if kill.pid == pid), None)


@dataclass(frozen=True)
class KillCounts:
    """How many processes the kernel has killed for want of memory; None where it does not count.

    Attributes:
        cgroup: of those in a cgroup, whoever's limit it was.
        machine: on the whole machine, since it was started.
        path: of that cgroup; '' = not known.
    """

    cgroup: int | None = None
    machine: int | None = None
    path: str = ""

    def since(self, before: KillCounts) -> KillCounts:
        """How many more there are than before; None where that is not known, or fell: it is another cgroup's then.

        Counts of two cgroups say nothing of each other.  Pure.
        """
        comparable = self.path == before.path or not self.path or not before.path
        return KillCounts(
            _rise(before.cgroup, self.cgroup) if comparable else None, _rise(before.machine, self.machine), self.path
        )


def read_counts_of(pid: int, roots: Roots = Roots()) -> KillCounts:
    """The counts now, of the machine and of the cgroup that a living process is in."""
    cgroup = read_cgroup(pid, roots)
    path = cgroup.path if cgroup else ""
    return KillCounts(cgroup.oom_kills if cgroup else None, read_machine(roots).oom_kills, path)


def _rise(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None or now < before else now - before


def read_kernel_log(since: float, kmsg: Path = KMSG) -> KernelLog | None:
    """The kernel's log from a moment on; None where it may not be read, as in most containers.

    Does I/O: reads all that the kernel keeps, some thousand lines, in some hundredths of a second.

    Args:
        since: seconds since 1970.  Lines of some seconds before are taken in, as the log has a clock of its own.
        kmsg: the device, or a text of its form: "level,number,microseconds since boot,flags;line".
    """
    # Both the log's clock and this one stand still while the machine sleeps.
    now, now_up_s = time.time(), time.monotonic()
    try:
        lines = list(_parsed(_records(kmsg)))
    except OSError:
        return None
    since_up_s = max(since - (now - now_up_s) - _SLACK_S - _DRIFT * now_up_s, 0.0)
    wanted = [text for up_s, text in lines if up_s >= since_up_s]
    return _log_of(wanted, whole=bool(lines) and lines[0][0] <= since_up_s)


def _log_of(lines: Iterable[str], whole: bool) -> KernelLog:
    """Pure."""
    limits_of: dict[int, str] = {}
    kills: dict[int, KernelKill] = {}
    faults: dict[int, str] = {}
    for text in lines:
        if found := _LIMIT_OF.search(text):
            limits_of[int(found[2])] = found[1]
        elif found := _KILL.search(text):
            pid = int(found[2])
            scope: Literal["cgroup", "machine"] = "cgroup" if found[1].startswith("Memory") else "machine"
            kills.pop(pid, None)  # the newest stands last
            kills[pid] = KernelKill(pid, scope, limits_of.get(pid), text)
        elif found := _FAULT.search(text):
            faults[int(found[1])] = text
    return KernelLog(whole, tuple(kills.values()), faults)


def _parsed(records: Iterable[str]) -> Iterator[tuple[float, str]]:
    """Seconds since boot and the first line of each record."""
    for record in records:
        head, found, text = record.partition(";")
        fields = head.split(",")
        if found and len(fields) >= 3 and fields[2].isdigit():  # what follows on further lines are names of devices
            yield int(fields[2]) / 1e6, text.split("\n", 1)[0]


def _records(kmsg: Path) -> Iterator[str]:
    descriptor = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISCHR(os.fstat(descriptor).st_mode):
            with open(descriptor, encoding="utf-8", errors="replace", closefd=False) as file:
                yield from file
            return
        while True:
            try:
                record = os.read(descriptor, _RECORD_BYTES)
            except BlockingIOError:  # the end
                return
            except BrokenPipeError:  # what came next has been overwritten meanwhile; the one after it is there
                continue
            if not record:
                return
            yield record.decode("utf-8", "replace")
    finally:
        os.close(descriptor)
