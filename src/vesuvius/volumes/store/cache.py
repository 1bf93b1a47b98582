"""A disk cache of fetched bytes: a folder of files, of which the least recently used go first.

    DIRECTORY/vesuvius-chunk-cache   marks the directory as ours
    DIRECTORY/3f/9c0a...             entries, named by a hash of their key: CRC-32C and bytes

Any number of processes and threads may share a directory without a lock: entries are renamed into place when they are
complete.  Each process lists the directory once per 64th of the limit that it writes, and removes the oldest entries
beyond 85 %; so up to 16 writers at full speed stay within a tenth of the limit.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import google_crc32c

from vesuvius.errors import ConfigError
from vesuvius.runlog.files import nearest_existing

log = logging.getLogger(__name__)

MARK = "vesuvius-chunk-cache"
_CRC_BYTES = 4
_KEPT = 0.85  # share of the limit that a removal leaves
_WRITES_PER_TRIM = 64
_TOUCH_S = 60.0  # `get` marks an entry as used at most this often: a write of metadata for each read would cost more

_warned: set[Path] = set()
_written: dict[Path, int] = {}  # bytes that this process has written since it last listed a directory
_lock = threading.Lock()


@dataclass(frozen=True)
class DiskCache:
    """Bytes by key, in files.  Cheap to construct and to pickle: it does no I/O before its first call.

    Only `check` and `prepare` raise.  A cache that cannot be read or written costs speed, never a read: `get` then
    misses, `put` stores nothing, and the log says so once per process.
    """

    directory: Path  # created where absent; holds nothing but the cache
    limit_bytes: int  # on disk, within 10 %

    def check(self) -> None:
        """Look whether `prepare` can do its work.  Changes nothing.

        Raises:
            ConfigError: the directory could not be created or written, holds foreign files, or has too little free
                space for the limit.
        """
        try:
            there = nearest_existing(self.directory)
            names = os.listdir(there)
            if not os.access(there, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))
            missing = self.limit_bytes - sum(size for _, _, size in self._entries())
            free = shutil.disk_usage(there).free
        except OSError as error:
            raise self._refused(error) from error
        if there == self.directory.absolute() and names and MARK not in names:
            raise ConfigError(
                f"the disk cache needs an empty or new directory; got {self.directory}, which holds {min(names)!r} "
                "and was not made by it; set data.store.cache_dir to a folder of its own"
            )
        if free < missing:
            raise ConfigError(
                f"the disk of the cache must hold all of it; got {free / 2**30:.2f} GiB free for "
                f"{missing / 2**30:.2f} GiB more at {self.directory}; lower data.store.cache_gib, free space, or set "
                "data.store.cache_dir to another disk"
            )

    def prepare(self) -> None:
        """Create the directory and shrink it to the limit; once per run, before the readers start.  Raises as
        `check`."""
        self.check()
        try:
            self._create()
            self._trim(0)
        except OSError as error:
            raise self._refused(error) from error

    def get(self, key: str) -> bytes | None:
        """The bytes stored under `key`, None where there are none.  Removes an entry that is damaged."""
        try:
            with open(self._entry(key), "rb", buffering=0) as file:
                crc, data = file.read(_CRC_BYTES), file.read()
                if abs(time.time() - os.fstat(file.fileno()).st_mtime) > _TOUCH_S:
                    with suppress(OSError):  # a read-only cache still serves; its order does not matter
                        os.utime(file.fileno())
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn_once(error)
            return None
        if crc == _crc(data):
            return data
        log.info("entry %s of the disk cache is damaged and is removed", self._entry(key))
        self.drop(key)
        return None

    def put(self, key: str, data: bytes) -> None:
        """Store `data` under `key`, removing the least recently used entries where the limit asks for it.

        Data larger than 85 % of the limit are not stored.
        """
        if len(data) > _KEPT * self.limit_bytes:
            return self.drop(key)
        try:
            with _lock:
                written = _written.get(self.directory)
                due = written is None or written + len(data) > self.limit_bytes / _WRITES_PER_TRIM
                _written[self.directory] = len(data) + (0 if written is None or due else written)
            if due:
                self._create()
                self._trim(len(data))
            entry = self._entry(key)
            entry.parent.mkdir(parents=True, exist_ok=True)
            partial = entry.with_name(f"{entry.name}.{os.getpid()}.{threading.get_ident()}")
            partial.write_bytes(_crc(data) + data)
            partial.replace(entry)
        except OSError as error:
            self._warn_once(error)

    def drop(self, key: str) -> None:
        """Remove the entry of `key`, if there is one."""
        try:
            self._entry(key).unlink(missing_ok=True)
        except OSError as error:
            self._warn_once(error)

    def _create(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / MARK).touch()

    def _entry(self, key: str) -> Path:
        name = hashlib.blake2b(key.encode(), digest_size=20).hexdigest()
        return self.directory / name[:2] / name[2:]

    def _entries(self) -> list[tuple[int, str, int]]:
        """(last use in ns, path, bytes on disk) of each entry, and of those that a killed process has left unfinished.
        Foreign files are not looked at."""
        entries = []
        for number in range(256):
            with suppress(FileNotFoundError), os.scandir(os.path.join(self.directory, f"{number:02x}")) as files:
                for file in files:
                    with suppress(FileNotFoundError):  # removed by another process
                        found = file.stat(follow_symlinks=False)
                        entries.append((found.st_mtime_ns, file.path, found.st_blocks * 512))
        return entries

    def _trim(self, need: int) -> None:
        """Remove the least recently used entries beyond 85 % of the limit, less `need` bytes.  Raises OSError."""
        entries = self._entries()
        total = sum(size for _, _, size in entries) + need
        for _, path, size in sorted(entries):
            if total <= _KEPT * self.limit_bytes:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= size

    def _refused(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"the disk cache needs a directory that it can create and write; got {type(error).__name__}: {error} at "
            f"{self.directory}; set data.store.cache_dir to a folder of yours on a local disk, or to null for no cache"
        )

    def _warn_once(self, error: Exception) -> None:
        if self.directory not in _warned:
            _warned.add(self.directory)
            log.warning(
                "the disk cache must be readable and writable; got %s: %s at %s; the run continues, refetching "
                "what cannot be kept; free space there or change data.store.cache_dir (said once per process)",
                *(type(error).__name__, error, self.directory),
            )


def _crc(data: bytes) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(_CRC_BYTES, "little")
