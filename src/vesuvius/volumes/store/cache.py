"""Between the network and a reader: chunk bytes fetched from remote stores, kept on a local disk under a hard limit.

    DIRECTORY/vesuvius-chunk-cache   marks the directory as ours; its flock is the one lock; holds the running total
    DIRECTORY/incoming               the one entry that is being written, renamed when complete
    DIRECTORY/3f/9c0a...             entries, named by a hash of their key: header (magic, length, CRC-32C) and bytes

Any number of processes and threads may share a directory.  `get` takes no lock.  Whoever writes holds the lock, which
the kernel frees when its holder dies, and raises the total before the first byte: a kill at any instant leaves the
total too high, never too low, and the next scan of the directory corrects it.  Nothing is synced to disk; what a power
loss tears, the CRC tells, and a total from before the present boot is not trusted.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import google_crc32c

from vesuvius.errors import ConfigError
from vesuvius.runlog.files.disk_use import nearest_existing
from vesuvius.runlog.proc import boot_id

log = logging.getLogger(__name__)

HEADER = struct.Struct("<8sQI")
MAGIC = b"vschunk1"
STATE_NAME = "vesuvius-chunk-cache"
STATE_TITLE = "vesuvius chunk cache 1; bytes on disk at most, and the boot in which they were counted:"
SUBDIRECTORIES = tuple(f"{byte:02x}" for byte in range(256))
HASH_BYTES = 20
BLOCK_BYTES = 4096
# Always counted, so that the limit holds for what `du` says: the subdirectories, the state file, and the directory
# itself (3 blocks on XFS).
OVERHEAD_BYTES = (len(SUBDIRECTORIES) + 8) * BLOCK_BYTES
SLACK = 0.1  # of the limit; freed beyond need by an eviction, because each costs a scan of the directory
TOUCH_S = 60.0  # `get` marks an entry as used at most this often: a write of metadata for each read would cost more

_warned: set[Path] = set()


@dataclass(frozen=True)
class DiskCache:
    """Bytes by key, in files.  Cheap to construct and to pickle: it does no I/O before its first call.

    Only `check` and `prepare` raise.  A cache that cannot be read or written costs speed, never a read: `get` then
    misses, `put` stores nothing, and the log says so once per process.
    """

    directory: Path  # created where absent; holds nothing but the cache
    # disk usage of the directory at every instant, directories and unfinished entries included.  Where processes give
    # different limits each shrinks the directory to its own when it stores.
    limit_bytes: int

    def check(self) -> None:
        """Look whether `prepare` can do its work.  Changes nothing.

        Raises:
            ConfigError: the directory could not be created or written, holds foreign files, or has too little free
                space for the limit; or the limit leaves no room for an entry.
        """
        self._check_limit()
        with self._refused():
            there = nearest_existing(self.directory)
            if not there.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
            if not os.access(there, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))
            if there == self.directory.absolute():
                self._check_ours()
            self._check_room(there, self.size_bytes())

    def prepare(self) -> None:
        """Create the directory and shrink it to the limit; scans it, so for once per run, before the readers start.

        Waits for other writers.

        Raises:
            ConfigError: the directory cannot be created or written, holds foreign files, has too little free space for
                the limit, or its file system has no working flock; or the limit leaves no room for an entry.
        """
        self._check_limit()
        with self._refused():
            self._create()
            with self._locked() as state:
                if not _excludes_others(self._state):
                    raise ConfigError(
                        "the disk cache needs a file system with working flock; got one without it at "
                        f"{self.directory}; set data.store.cache_dir to a folder on a local disk"
                    )
                self._incoming.write_bytes(b"")
                held = self._make_room(0)
                _write_total(state, held)
            self._check_room(self.directory, held)

    def get(self, key: str) -> bytes | None:
        """The bytes stored under `key`, None where there are none.  Removes an entry that is damaged."""
        try:
            with open(self._entry(key), "rb", buffering=0) as file:
                header, data = file.read(HEADER.size), file.read()
                if abs(time.time() - os.fstat(file.fileno()).st_mtime) > TOUCH_S:
                    with suppress(OSError):  # a read-only cache still serves; its order of eviction does not matter
                        os.utime(file.fileno())
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn_once(error)
            return None
        if header == _header(data):
            return data
        log.info("entry %s of the disk cache is damaged and is removed", self._entry(key))
        self.drop(key)  # perhaps a sound one that another process has put there since: a miss more, no harm
        return None

    def put(self, key: str, data: bytes) -> None:
        """Store `data` under `key`, evicting the least recently used entries where the limit asks for it.

        Waits for other writers.  Data larger than the limit are not stored.
        """
        need = _counted(HEADER.size + len(data))
        if OVERHEAD_BYTES + need > self.limit_bytes:
            return self.drop(key)
        header = _header(data)
        try:
            if not self._state.exists():
                self._create()
            with self._locked() as state:
                total = _read_total(state)
                if total is None or total + need > self.limit_bytes:
                    total = self._make_room(need)
                if total + need > self.limit_bytes:  # folders have grown; on ext4 they never shrink
                    return _write_total(state, total)
                _write_total(state, total + need)  # before any byte is written
                replaced = self._write(self._entry(key), header, data)
                _write_total(state, total + need - replaced)
        except (OSError, ConfigError) as error:
            self._warn_once(error)

    def drop(self, key: str) -> None:
        """Remove the entry of `key`, if there is one.  The total stays too high until the next scan."""
        try:
            self._entry(key).unlink(missing_ok=True)
        except OSError as error:
            self._warn_once(error)

    def size_bytes(self) -> int:
        """Disk usage of the directory, or more; 0 where it does not exist.  Takes no lock."""
        try:
            with open(self._state, "rb") as state:
                total = _read_total(state.fileno())
        except FileNotFoundError:
            return 0
        return self._scan()[0] if total is None else total

    @property
    def _state(self) -> Path:
        return self.directory / STATE_NAME

    @property
    def _incoming(self) -> Path:
        return self.directory / "incoming"

    def _entry(self, key: str) -> Path:
        name = hashlib.blake2b(key.encode(), digest_size=HASH_BYTES).hexdigest()
        return self.directory / name[:2] / name[2:]

    def _create(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._check_ours()
        os.close(os.open(self._state, os.O_RDWR | os.O_CREAT, 0o666))

    def _check_limit(self) -> None:
        if self.limit_bytes <= OVERHEAD_BYTES:
            raise ConfigError(
                f"the disk cache needs more than the {OVERHEAD_BYTES} bytes of its empty folders; got a limit of "
                f"{self.limit_bytes}; raise data.store.cache_gib"
            )

    def _check_room(self, there: Path, held: int) -> None:
        """Raises ConfigError where the disk of a folder cannot take what is missing to the limit."""
        free = shutil.disk_usage(there).free
        if free < self.limit_bytes - held:
            raise ConfigError(
                f"the disk of the cache must hold all of it; got {free / 2**30:.2f} GiB free for "
                f"{(self.limit_bytes - held) / 2**30:.2f} GiB more at {self.directory}; lower data.store.cache_gib, "
                "free space, or set data.store.cache_dir to another disk"
            )

    def _check_ours(self) -> None:
        """Raises ConfigError where the directory holds what is not of a cache."""
        names = os.listdir(self.directory)
        # In this order: our first file is the state, so whoever has listed another of ours finds the state afterwards.
        if names and not self._state.exists():
            raise ConfigError(
                f"the disk cache needs an empty or new directory; got {self.directory}, which holds {min(names)!r} "
                "and was not made by it; set data.store.cache_dir to a folder of its own"
            )

    @contextmanager
    def _refused(self) -> Iterator[None]:
        """What the system says of the directory, as an error with a remedy."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"the disk cache needs a directory that it can create, write and lock; got {type(error).__name__}: "
                f"{error} at {self.directory}; set data.store.cache_dir to a folder of yours on a local disk, or to "
                "null for no cache"
            ) from error

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock; gives the open state file.  Excludes threads too: each call opens the file again."""
        with open(self._state, "r+b", buffering=0) as state:
            fcntl.flock(state, fcntl.LOCK_EX)
            try:
                yield state.fileno()
            finally:
                fcntl.flock(state, fcntl.LOCK_UN)  # closing alone would not free it where a thread has forked meanwhile

    def _write(self, path: Path, header: bytes, data: bytes) -> int:
        """Write one entry; returns the bytes of the one that it replaces.  Under the lock."""
        try:
            with open(self._incoming, "wb") as file:
                file.truncate(len(header) + len(data))  # else XFS holds up to 2/3 more until the file is closed
                file.write(header)
                file.write(data)
            path.parent.mkdir(exist_ok=True)
            replaced = 0
            with suppress(FileNotFoundError):
                replaced = _counted(path.stat().st_size)
            os.replace(self._incoming, path)
        except OSError:
            self._incoming.unlink(missing_ok=True)
            raise
        return replaced

    def _make_room(self, need: int) -> int:
        """Bring the directory under the limit less `need`; returns its true size.  Under the lock.

        Also removes what a killed writer has left: nobody else writes now.
        """
        self._incoming.unlink(missing_ok=True)
        total, entries = self._scan()
        if total + need > self.limit_bytes:
            target = self.limit_bytes * (1 - SLACK) - need
            for _, path, size in sorted(entries):
                if total <= target:
                    break
                with suppress(FileNotFoundError):
                    os.unlink(path)
                total -= size
        return total

    def _scan(self) -> tuple[int, list[tuple[int, str, int]]]:
        """Bytes on disk, and (last use in ns, path, bytes) of each entry.  Foreign files are not looked at."""
        total, entries = OVERHEAD_BYTES, []
        for name in SUBDIRECTORIES:
            folder = os.path.join(self.directory, name)  # text: a Path for each of a million files takes seconds
            with suppress(FileNotFoundError), os.scandir(folder) as files:
                # Directories grow with the number of their entries; one block of each is part of the overhead.
                total += max(os.stat(folder).st_blocks * 512 - BLOCK_BYTES, 0)
                for file in files:
                    with suppress(FileNotFoundError):  # `get` drops a damaged entry without the lock
                        found = file.stat(follow_symlinks=False)
                        if _is_entry(file.name) and stat.S_ISREG(found.st_mode):
                            used = max(_counted(found.st_size), found.st_blocks * 512)
                            entries.append((found.st_mtime_ns, file.path, used))
        return total + sum(size for _, _, size in entries), entries

    def _warn_once(self, error: Exception) -> None:
        if self.directory not in _warned:
            _warned.add(self.directory)
            log.warning(
                "the disk cache must be readable and writable; got %s: %s at %s; the run continues, refetching "
                "what cannot be kept; free space there or change data.store.cache_dir (said once per process)",
                *(type(error).__name__, error, self.directory),
            )


def _header(data: bytes) -> bytes:
    return HEADER.pack(MAGIC, len(data), google_crc32c.value(data))


def _is_entry(name: str) -> bool:
    return len(name) == 2 * HASH_BYTES - 2 and set(name) <= set("0123456789abcdef")


def _counted(size: int) -> int:
    """Bytes on disk of an entry of `size` bytes: whole blocks, and one for its name and, if fragmented, its extents."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES + BLOCK_BYTES


def _read_total(state: int) -> int | None:
    """The total in an open state file; None where it cannot be trusted: new, damaged, or from before a reboot."""
    title, _, rest = os.pread(state, 256, 0).decode(errors="replace").partition("\n")
    match rest.split():
        case [total, boot] if title == STATE_TITLE and boot == _boot() and total.isdigit():
            return int(total)
    return None


def _write_total(state: int, total: int) -> None:
    """In place, one small write of fixed length: a kill leaves the old total or the new one."""
    os.pwrite(state, f"{STATE_TITLE}\n{total:020d} {_boot()}\n".encode(), 0)


@functools.cache
def _boot() -> str:
    return boot_id() or "unknown"


def _excludes_others(path: Path) -> bool:
    """Whether the lock that we hold on `path` keeps others out; on some network file systems it does not."""
    with open(path, "r+b") as second:
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
