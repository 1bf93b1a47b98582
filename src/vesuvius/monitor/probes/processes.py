"""Samples the memory of a process tree: private memory of each process, and shared memory counted once."""

import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass

import psutil

from vesuvius.monitor.probes.cgroup import read_text

_BLOCK_BYTES = 512  # unit of st_blocks on every file system
_NAME_LENGTH = 60
_RESCAN_EVERY_S = 5.0
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_SHARED = ("/dev/shm/", "/memfd:")
_KEPT = "/memfd:vesuvius-resident"  # name used by stream/reading/resident.py
# Anonymous shared memory, as mapped for CUDA's pinned buffers.  Addresses are hexadecimal.
_NAMELESS = re.compile(r"^(\w+)-(\w+) ...s .* /dev/zero \(deleted\)$", re.MULTILINE)
_SIZE = re.compile(r"^(\w+):[ \t]+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True)
class ProcessUse:
    pid: int
    parent: int  # its pid
    name: str  # title as shown by `ps`, at most 60 characters, e.g. `ray::MapWorker(...)`
    started_s: float  # seconds after boot; identifies the process together with the pid
    status: str  # of psutil: running, sleeping, disk-sleep, stopped, ...
    # private memory: RssAnon, and the part of RssShmem without a file, such as CUDA's pinned buffers
    anon_bytes: int
    shmem_bytes: int  # other shared memory it has touched (RssShmem)
    file_bytes: int  # mapped page cache (RssFile)
    swap_bytes: int  # swapped private memory
    cpu_s: float  # CPU time so far, user and system

    @property
    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) or a debugger has stopped it."""
        return self.status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    @property
    def is_reader(self) -> bool:
        """Whether it is one of our readers, an actor of Ray Data, by its title."""
        return self.name.startswith("ray::") and ("_RayReader" in self.name or "MapWorker" in self.name)


class ProcessTree:
    """Samples a process and its descendants repeatedly.

    Each sample reads the parents of the machine's new processes alone, so that other users' thousands cost nothing.
    Titles, mappings and open files of shared memory are read every five seconds, and whenever a process is found.  A
    descendant remains a member when its parent ends; as pids are reused, a new one must have a living member as parent.

    A forked child shares its parent's pages until one of them writes or the child executes another program, usually
    within milliseconds: a new process that is a copy of its parent is left out of its first sample.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        root = _find_member(pid)
        self._members = {pid: root} if root else {}
        self._also: dict[int, float | None] = {}  # pids of `include`, with their start times once seen
        self._seen: set[int] = set()  # pids of the machine at the last sample
        self._shared_files: dict[_SharedFile, list[str]] = {}
        self._scanned_at = -float("inf")
        self._uses: list[ProcessUse] = []

    def include(self, pids: Collection[int]) -> None:
        """Include processes of other trees, such as readers of a shared Ray, from now on."""
        self._also = {pid: self._also.get(pid) for pid in pids}

    def sample(self) -> list[ProcessUse]:
        """Return the root, then its living descendants.  Raises ProcessLookupError: the root is no longer there."""
        first, pids = not self._uses, set(psutil.pids())
        due = time.monotonic() - self._scanned_at >= _RESCAN_EVERY_S
        found = self._find_new(pids, (pids - self._seen) | self._also.keys())
        if any(pid in self._also for pid in found):  # its descendants may be old
            found += self._find_new(pids, pids)
        if found or due:
            self._scanned_at = time.monotonic()
            for member in self._members.values():
                member.rescan()
            self._shared_files = _find_shared_files(self._members)
        uses = {pid: use for pid, member in self._members.items() if (use := member.read()) is not None}
        if self._pid not in uses:
            raise ProcessLookupError(f"process {self._pid} has ended")
        self._seen -= self._members.keys() - uses.keys()  # these pids may be reused already
        self._members = {pid: self._members[pid] for pid in uses}
        young = [] if first else [pid for pid in found if pid in uses and _is_copy(uses[pid], uses)]
        self._uses = [use for pid, use in uses.items() if pid not in young]
        return self._uses

    def shared_bytes(self) -> tuple[int, int]:
        """Return the shared memory of the processes sampled last, counted once, and its part with volumes in memory.

        That is the allocated pages of all shared-memory files they hold open (such as Ray's object store, a deleted
        file), or the most that one process has touched if that is more (shared memory without a file).
        """
        held = [(_held_bytes(file, links), file[-1]) for file, links in self._shared_files.items()]
        kept = sum(size for size, is_kept in held if is_kept)
        return max([sum(size for size, _ in held), *(use.shmem_bytes for use in self._uses)]), kept

    def _find_new(self, pids: set[int], candidates: Set[int]) -> list[int]:
        """Add those candidates that descend from members, and return them, parents first.  `pids`: of the machine."""
        parents, found = dict[int, int](), list[int]()
        for pid in candidates - self._members.keys():
            with suppress(psutil.Error):
                parents[pid] = psutil.Process(pid).ppid()
        while children := [pid for pid, parent in parents.items() if parent in self._members or pid in self._also]:
            for pid in children:
                above, member = self._members.get(parents.pop(pid)), _find_member(pid)
                if member is None:
                    continue
                if pid in self._also:
                    self._also[pid] = self._also[pid] or member.started_s
                if self._also.get(pid) == member.started_s or (above is not None and above.process.is_running()):
                    self._members[pid] = member
                    found.append(pid)
        # A child may have been listed before its parent existed: it is looked at again.
        self._seen = pids - {pid for pid, parent in parents.items() if parent and parent not in pids}
        return found


def read_process(pid: int) -> ProcessUse | None:
    """Sample one process; None if it does not exist or is a zombie."""
    if (member := _find_member(pid)) is None:
        return None
    member.rescan()
    return member.read()


@dataclass
class _Member:
    """A process that is sampled repeatedly."""

    process: psutil.Process  # detects that the pid was reused
    started_s: float  # seconds after boot
    name: str = ""  # title when last read; Ray's processes change theirs
    nameless_bytes: int = 0  # mapped shared memory without a file, when last read

    def rescan(self) -> None:
        maps = read_text(f"{psutil.PROCFS_PATH}/{self.process.pid}/maps") or ""
        self.nameless_bytes = sum(int(end, 16) - int(begin, 16) for begin, end in _NAMELESS.findall(maps))
        with suppress(psutil.Error):  # it has ended: `read` returns None
            words = " ".join(self.process.cmdline()).split()
            self.name = " ".join(words)[:_NAME_LENGTH] or self.process.name()

    def read(self) -> ProcessUse | None:
        """Sample it; None if it has ended, is a zombie, or its pid was reused."""
        process = self.process
        try:
            with process.oneshot():
                status, parent, cpu = process.status(), process.ppid(), process.cpu_times()
            if status in _ENDED or not process.is_running():
                return None
            anon, shmem, file, swap = _memory(process)
        except psutil.Error:
            return None
        pinned, cpu_s = min(self.nameless_bytes, shmem), cpu.user + cpu.system
        return ProcessUse(
            *(process.pid, parent, self.name, self.started_s, status),
            *(anon + pinned, shmem - pinned, file, swap, cpu_s),
        )


def _find_member(pid: int) -> _Member | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            if process.status() in _ENDED:
                return None
        # Not `create_time() - boot_time()`: each adds the time of boot, which moves when the clock is set.
        ticks = (read_text(f"{psutil.PROCFS_PATH}/{pid}/stat") or "").rpartition(")")[2].split()[19]
        return _Member(process, int(ticks) / os.sysconf("SC_CLK_TCK"))
    except (psutil.Error, IndexError):  # no stat: it has ended
        return None


def _is_copy(use: ProcessUse, uses: Mapping[int, ProcessUse]) -> bool:
    parent = uses.get(use.parent)
    if parent is None or parent.name != use.name:
        return False
    return abs(parent.anon_bytes - use.anon_bytes) * 16 <= parent.anon_bytes > 0


def _memory(process: psutil.Process) -> tuple[int, int, int, int]:
    """Read private, shared, file and swapped bytes; psutil would have to walk every page.

    Kernels that only resemble Linux (gVisor) lack these figures; there psutil's are used, and all memory that is not
    private counts as file pages.
    """
    status = read_text(f"{psutil.PROCFS_PATH}/{process.pid}/status") or ""
    sizes = {name: int(kib) * 1024 for name, kib in _SIZE.findall(status)}
    swap = sizes.get("VmSwap", 0)
    if "RssAnon" in sizes:
        return sizes["RssAnon"], sizes.get("RssShmem", 0), sizes.get("RssFile", 0), swap
    memory = process.memory_info()
    file = min(memory.shared, memory.rss)
    return memory.rss - file, 0, file, swap


_SharedFile = tuple[int, int, bool]
"""A file of shared memory: device, inode, and whether it holds volumes kept in memory."""


def _find_shared_files(pids: Iterable[int]) -> dict[_SharedFile, list[str]]:
    """Find the shared-memory files that processes hold open, with their links."""
    files: dict[_SharedFile, list[str]] = {}
    for pid in pids:
        links: list[str] = []
        with suppress(OSError):
            links = [entry.path for entry in os.scandir(f"{psutil.PROCFS_PATH}/{pid}/fd")]
        for link in links:
            with suppress(OSError):  # closed since
                if (target := os.readlink(link)).startswith(_SHARED):
                    stat = os.stat(link)
                    files.setdefault((stat.st_dev, stat.st_ino, target.startswith(_KEPT)), []).append(link)
    return files


def _held_bytes(file: _SharedFile, links: Iterable[str]) -> int:
    """Return the allocated bytes of a shared-memory file; 0 if none of the links leads to it any more."""
    for link in links:
        with suppress(OSError):
            stat = os.stat(link)
            if (stat.st_dev, stat.st_ino) == file[:2]:
                return stat.st_blocks * _BLOCK_BYTES
    return 0
