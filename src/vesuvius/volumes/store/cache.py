"""An LRU disk cache of fetched bytes: DIRECTORY/vesuvius-chunk-cache/3f/9c0a...

An entry is named by a hash of its key, and holds a CRC-32C and the bytes.  Any number of processes and threads may
share a directory without a lock, because complete entries are renamed into place.  About 64 times per `limit_bytes`
written, a writer lists the directory and removes the oldest entries until 85 % of the limit are left.
"""

import hashlib
import logging
import os
import random
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import google_crc32c

from vesuvius.config import StoreConfig
from vesuvius.errors import ConfigError, disk_path, warn_once
from vesuvius.runlog.files import nearest_existing

log = logging.getLogger(__name__)

_CRC_BYTES = 4
_KEPT = 0.85  # share of the limit that is left after a trim
_TRIMS_PER_LIMIT = 64  # per `limit_bytes` written
_TOUCH_S = 60.0  # `get` marks an entry as used at most this often; writing metadata on each read would cost more
_PARTIAL = ".partial"
_ABANDONED_S = 3600.0  # an incomplete file older than this belongs to a dead process


@dataclass(frozen=True)
class DiskCache:
    """Bytes by key, in files.  Cheap to construct and pickle: no I/O before the first call.

    Only `check` raises.  A cache that fails costs speed, never a read: `get` misses, `put` stores nothing,
    and the log says so once per process.
    """

    directory: Path  # created if absent
    limit_bytes: int  # on disk, within 10 %

    def check(self) -> None:
        """Raise ConfigError if the directory cannot be created or written, or lacks space for the limit.  Read-only."""
        there = nearest_existing(self.directory)
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise self._unusable(f"{there} is not a writable folder")
        try:
            free = shutil.disk_usage(there).free
            needed = self.limit_bytes - sum(size for _, _, size in self._entries())
        except OSError as error:
            raise self._unusable(error) from error
        if free < needed:
            raise self._unusable(f"{free / 2**30:.2f} GiB free, {needed / 2**30:.2f} GiB needed; lower cache_gib")

    def get(self, key: str) -> bytes | None:
        """The bytes stored under `key`; None if there are none.  Removes a damaged entry."""
        try:
            with open(self._entry(key), "rb", buffering=0) as file:
                crc, data = file.read(_CRC_BYTES), file.read()
                if abs(time.time() - os.fstat(file.fileno()).st_mtime) > _TOUCH_S:
                    with suppress(OSError):  # a read-only cache is still useful, without its LRU order
                        os.utime(file.fileno())
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn_once(error)
            return None
        if crc == _crc(data):
            return data
        log.info("removing the damaged cache entry %s", self._entry(key))
        self.drop(key)
        return None

    def put(self, key: str, data: bytes) -> None:
        """Store `data`, unless larger than 85 % of the limit.  May trim the cache first."""
        if len(data) > _KEPT * self.limit_bytes:
            return self.drop(key)
        entry = self._entry(key)
        partial = entry.with_name(f"{entry.name}.{os.getpid()}.{threading.get_ident()}{_PARTIAL}")
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            if random.random() < _TRIMS_PER_LIMIT * len(data) / self.limit_bytes:
                self._trim()
            partial.write_bytes(_crc(data) + data)
            partial.replace(entry)
        except OSError as error:
            self._warn_once(error)

    def drop(self, key: str) -> None:
        try:
            self._entry(key).unlink(missing_ok=True)
        except OSError as error:
            self._warn_once(error)

    def _entry(self, key: str) -> Path:
        name = hashlib.blake2b(key.encode(), digest_size=20).hexdigest()
        return self.directory / name[:2] / name[2:]

    def _entries(self) -> list[tuple[int, str, int]]:
        """(last use in ns, path, bytes on disk) of each entry, complete or not.  Ignores other files."""
        entries = []
        for number in range(256):
            with suppress(FileNotFoundError), os.scandir(os.path.join(self.directory, f"{number:02x}")) as files:
                for file in files:
                    with suppress(FileNotFoundError):  # removed by another process
                        found = file.stat(follow_symlinks=False)
                        entries.append((found.st_mtime_ns, file.path, found.st_blocks * 512))
        return entries

    def _trim(self) -> None:
        """Remove the least recently used entries beyond 85 % of the limit.  Raises OSError."""
        entries = self._entries()
        total = sum(size for _, _, size in entries)
        abandoned_ns = time.time_ns() - int(_ABANDONED_S * 1e9)
        for used_ns, path, size in sorted(entries):
            if total <= _KEPT * self.limit_bytes:
                break
            if not path.endswith(_PARTIAL) or used_ns < abandoned_ns:  # else another process is writing it
                with suppress(FileNotFoundError):
                    os.unlink(path)
                total -= size

    def _unusable(self, cause: OSError | str) -> ConfigError:
        return ConfigError(
            f"Cannot use {self.directory} for the disk cache: {cause}; set data.store.cache_dir to a folder on a local "
            "disk with room for data.store.cache_gib, or to null for no cache"
        )

    def _warn_once(self, error: Exception) -> None:
        text = (
            "Cannot use %s for the disk cache: %s; the run continues without caching; free some space there or change "
            "data.store.cache_dir (logged once per process)"
        )
        warn_once(text, self.directory, error)


def open_cache(config: StoreConfig) -> DiskCache | None:
    """The configured disk cache; None without one."""
    if config.cache_dir is None:
        return None
    folder = disk_path(f"{config.cache_dir}/vesuvius-chunk-cache", "data.store.cache_dir=")
    return DiskCache(folder, int(config.cache_gib * 2**30))


def _crc(data: bytes) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(_CRC_BYTES, "little")
