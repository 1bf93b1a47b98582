"""Processes: who holds how much private memory, and what they share, counted once."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vesuvius.observe.system.files import read_text
from vesuvius.observe.system.roots import Roots

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_BLOCK_BYTES = 512  # of st_blocks, whatever the file system
_NAME_LENGTH = 60
_DEAD = frozenset("ZXx")
_SHARED = ("/dev/shm/", "/memfd:")
_SIZE = re.compile(r"^(\w+):[ \t]+(\d+) kB$", re.MULTILINE)

_FileId = tuple[int, int]  # device and inode


@dataclass(frozen=True)
class ProcessUse:
    """One process.

    Attributes:
        pid, parent: process ids.
        name: its title, as `ps` shows it, shortened to 60 characters: Ray's say what they are (`ray::MapWorker(...)`).
        started_s: seconds after boot at which it began: with the pid, its identity.
        state: letter of /proc/PID/stat: R running, S asleep, D waiting for a disk, Z dead and not yet reaped.
        anon_bytes: private memory in use (RssAnon): what it alone would give back.
        shmem_bytes: shared memory that it has touched (RssShmem).
        file_bytes: page cache that it maps (RssFile).
        swap_bytes: private memory that was swapped out.
        cpu_s: processor time so far, user and system.
    """

    pid: int
    parent: int
    name: str
    started_s: float
    state: str
    anon_bytes: int
    shmem_bytes: int
    file_bytes: int
    swap_bytes: int
    cpu_s: float


class ProcessTree:
    """A process and its descendants, looked at again and again.

    Which they are is found out with each look, from a listing of the machine's processes and the parents of those that
    are new; titles, and which files of shared memory they hold, every `rescan_every_s` seconds and whenever one has
    come.  The rest costs two small reads a process.  Who was once a descendant stays one, also when its parent ends
    and it is handed to another.

    A child that a fork has made shares its parent's pages until one of them writes, or the child becomes another
    program, in a millisecond.  So a newcomer that is the image of its parent is left out of its first look; should it
    stay so, what both still share counts twice.

    Raises:
        ProcessLookupError: from `look`, once the root is gone (a zombie counts as gone), also when its pid was given
            to another process.
    """

    def __init__(self, pid: int, roots: Roots = Roots(), rescan_every_s: float = 5.0) -> None:
        self._pid = pid
        self._roots = roots
        self._rescan_every_s = rescan_every_s
        root = _find_member(pid, roots)
        self._members = {pid: root} if root else {}
        self._strangers: set[int] = set()
        self._shared_files: dict[_FileId, list[str]] = {}
        self._scanned_at = -float("inf")
        self._uses: list[ProcessUse] = []

    def look(self) -> list[ProcessUse]:
        """The root first, then its living descendants."""
        first = not self._uses
        found = self._find_new()
        if found or time.monotonic() - self._scanned_at >= self._rescan_every_s:
            self._rescan()
        uses = {pid: use for pid, member in self._members.items() if (use := member.read()) is not None}
        if self._pid not in uses:
            raise ProcessLookupError(f"the process to watch must be alive; got {self._pid}, which is not")
        self._members = {pid: self._members[pid] for pid in uses}
        young = [] if first else [pid for pid in found if pid in uses and _is_copy(uses[pid], uses)]
        self._uses = [use for pid, use in uses.items() if pid not in young]
        return self._uses

    def shared_bytes(self) -> int:
        """Shared memory of the processes last looked at, counted once.

        Each file of shared memory that one of them holds open (Ray's object store is one, deleted by name) counts with
        the pages it really has; where that is less than the most that any one of them has touched (shared memory
        without a file), the latter.
        """
        files = sum(_held_bytes(file, links) for file, links in self._shared_files.items())
        return max([files, *(use.shmem_bytes for use in self._uses)])

    def _find_new(self) -> list[int]:
        """Take in descendants that have come since the last look, and return them."""
        pids = _all_pids(self._roots)
        self._strangers.intersection_update(pids)
        unknown = [pid for pid in pids if pid not in self._strangers and pid not in self._members]
        stats = {pid: stat for pid in unknown if (stat := _read_stat(pid, self._roots)) and stat.state not in _DEAD}
        found = _descendants(self._members, stats)
        for pid in found:
            self._members[pid] = _Member(pid, stats[pid].start, self._roots)
        # Nobody becomes a descendant later, so a stranger need not be asked again.  One whose parent was not in the
        # listing is asked again: the parent may be a descendant that began while the listing was made.
        self._strangers.update(_descendants({0, *self._strangers}, stats))
        self._strangers.difference_update(found)
        return found

    def _rescan(self) -> None:
        """Find out anew what all are called, and which files of shared memory they hold."""
        self._scanned_at = time.monotonic()
        for member in self._members.values():
            member.read_name()
        self._shared_files = _find_shared_files([member.directory for member in self._members.values()])


def read_process(pid: int, roots: Roots = Roots()) -> ProcessUse | None:
    """One process; None where there is none, or only a zombie."""
    member = _find_member(pid, roots)
    if member is None:
        return None
    member.read_name()
    return member.read()


def pss_bytes(pids: Iterable[int], roots: Roots = Roots()) -> int | None:
    """Proportional set size of processes together, from smaps_rollup; None where it may not be read.

    Only on demand: the kernel walks every page, which takes seconds for a process of 200 GB.  Those that have ended
    count nothing.
    """
    total = 0
    for pid in pids:
        text = read_text(roots.proc / str(pid) / "smaps_rollup")
        if text is None and _find_member(pid, roots) is not None:
            return None
        total += _sizes(text or "").get("Pss", 0)
    return total


@dataclass(frozen=True)
class _Stat:
    """What /proc/PID/stat says; `start` and the times in clock ticks."""

    command: str
    state: str
    parent: int
    cpu_ticks: int
    start: int


@dataclass
class _Member:
    """A process that is looked at again and again, with the paths of its files.

    Attributes:
        start: clock ticks after boot at which it began; another start under the same pid is another process.
        name: its title when it was last asked for; Ray's processes change theirs.
    """

    pid: int
    start: int
    roots: Roots
    name: str = ""

    def __post_init__(self) -> None:
        self.directory = f"{self.roots.proc}/{self.pid}"

    def read_name(self) -> None:
        title = (read_text(f"{self.directory}/cmdline") or "").replace("\0", " ").split()
        self.name = " ".join(title)[:_NAME_LENGTH]

    def read(self) -> ProcessUse | None:
        """None where it has ended, though its pid may be there: a zombie, or given to another."""
        stat = _parse_stat(read_text(f"{self.directory}/stat"))
        if stat is None or stat.start != self.start or stat.state in _DEAD:
            return None
        status = _sizes(read_text(f"{self.directory}/status") or "")
        anon, shmem, file = _resident(status, self.directory)
        return ProcessUse(
            pid=self.pid,
            parent=stat.parent,
            name=self.name or stat.command,
            started_s=stat.start / _TICKS_PER_S,
            state=stat.state,
            anon_bytes=anon,
            shmem_bytes=shmem,
            file_bytes=file,
            swap_bytes=status.get("VmSwap", 0),
            cpu_s=stat.cpu_ticks / _TICKS_PER_S,
        )


def _find_member(pid: int, roots: Roots) -> _Member | None:
    stat = _read_stat(pid, roots)
    return None if stat is None or stat.state in _DEAD else _Member(pid, stat.start, roots)


def _all_pids(roots: Roots) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(roots.proc) if name.isdigit())
    except OSError:
        return []


def _read_stat(pid: int, roots: Roots) -> _Stat | None:
    return _parse_stat(read_text(f"{roots.proc}/{pid}/stat"))


def _parse_stat(text: str | None) -> _Stat | None:
    """The command stands in parentheses and may have spaces and parentheses itself: the last one closes it.  Pure."""
    before, _, after = (text or "").rpartition(")")
    fields = after.split()
    try:
        return _Stat(
            command=before.partition("(")[2],
            state=fields[0],
            parent=int(fields[1]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            start=int(fields[19]),
        )
    except (IndexError, ValueError):
        return None


def _descendants(pids: Iterable[int], stats: Mapping[int, _Stat]) -> list[int]:
    """Those in `stats` that descend from some others by an unbroken line of living parents.  Pure."""
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    found: list[int] = []
    waiting = [child for pid in pids for child in children.pop(pid, [])]
    while waiting:
        found.append(waiting.pop())
        waiting += children.pop(found[-1], [])  # popped: stats read at different moments could have a circle
    return found


def _is_copy(use: ProcessUse, uses: Mapping[int, ProcessUse]) -> bool:
    """Whether a process has its parent's title and, give or take a little, its size.  Pure."""
    parent = uses.get(use.parent)
    if parent is None or parent.name != use.name:
        return False
    return abs(parent.anon_bytes - use.anon_bytes) * 16 <= parent.anon_bytes > 0


def _sizes(text: str) -> dict[str, int]:
    """Bytes by name, from lines such as `RssAnon:  123 kB`.  Pure."""
    return {name: int(kib) * 1024 for name, kib in _SIZE.findall(text)}


def _resident(status: Mapping[str, int], directory: str) -> tuple[int, int, int]:
    """Private, shared and file pages in memory.

    Kernels before 4.5, and some that only look like Linux, do not tell them apart; then `statm` tells private from all
    others, which are taken for pages of files.
    """
    if "RssAnon" in status:
        return status["RssAnon"], status.get("RssShmem", 0), status.get("RssFile", 0)
    pages = (read_text(f"{directory}/statm") or "").split()
    if "VmRSS" not in status or len(pages) < 3 or not pages[2].isdigit():
        return status.get("VmRSS", 0), 0, 0
    others = min(int(pages[2]) * _PAGE_BYTES, status["VmRSS"])
    return status["VmRSS"] - others, 0, others


def _find_shared_files(directories: Iterable[str]) -> dict[_FileId, list[str]]:
    """Files of shared memory that processes hold open, with all links to each, by device and inode."""
    files: dict[_FileId, list[str]] = {}
    for directory in directories:
        try:
            links = [f"{directory}/fd/{name}" for name in os.listdir(f"{directory}/fd")]
        except OSError:
            continue
        for link in links:
            try:
                if os.readlink(link).startswith(_SHARED):
                    stat = os.stat(link)
                    files.setdefault((stat.st_dev, stat.st_ino), []).append(link)
            except OSError:  # closed since
                continue
    return files


def _held_bytes(file: _FileId, links: Iterable[str]) -> int:
    """Memory that a file of shared memory has; 0 when none of the links leads to it any more."""
    for link in links:
        try:
            stat = os.stat(link)
        except OSError:
            continue
        if (stat.st_dev, stat.st_ino) == file:
            return stat.st_blocks * _BLOCK_BYTES
    return 0
