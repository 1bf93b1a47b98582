"""Where the bytes of a volume come from: a folder, a web server or an object store, by key and byte range.

Every read is counted, tried again while its store is away (`retry.py`), and on remote stores answered from a disk cache
where one is configured.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from obstore.exceptions import BaseError, PermissionDeniedError

from vesuvius.config import StoreConfig
from vesuvius.errors import DataError, warn_once
from vesuvius.volumes.errors import ClosedError, ProtocolError, ReplacedError, is_outage, reason, refusal, status_of
from vesuvius.volumes.store.cache import open_cache
from vesuvius.volumes.store.objects import ByteRange, LocalFiles, RemoteStore, is_remote, shown_address
from vesuvius.volumes.store.retry import Outage, Retrier

T = TypeVar("T")

_VERSIONS_MAX = 2**18  # some 60 MB
_ANSWERS = 20  # among which is one of the server that answered before, of a few with ETags of their own


@dataclass
class SourceFigures:
    """What a source has done so far."""

    requests: int = 0  # reads that reached the store, tries included
    retries: int = 0  # tries after a failed one
    bytes_fetched: int = 0  # bytes that came from the store
    cache_hits: int = 0  # reads answered by the disk cache
    cache_misses: int = 0


class Source:
    """Reads objects below one address.  Its methods may be called from several threads.

    Args:
        address: folder or URL.
        has_answered: whether the store has answered before.  One that has not is given up after a minute.

    Attributes:
        remote: whether the address is a URL.
        can_list: whether the store can list its objects, which plain web servers cannot.
        shown: the address as messages name it.
        forbidden: what the store said of the last read that it forbade to `probing`; else None.
    """

    def __init__(self, address: str, config: StoreConfig, has_answered: bool = False) -> None:
        self.address = address
        self.config = config
        self.remote = is_remote(address)
        self.figures = SourceFigures()
        self.forbidden: str | None = None
        self.shown = shown_address(address)
        self._root = Path(address).absolute()  # where it is a folder
        self._store = RemoteStore(address, config) if self.remote else LocalFiles(self._root)
        self.can_list, self._signing = self._store.can_list, self._store.signing
        self._cache = open_cache(config) if self.remote else None
        self._versions: dict[str, str] = {}  # stamps of objects of which a part was read, or the cache holds something
        self._retrier = Retrier(self.shown, config, has_answered or not self.remote, self._may_pass, self.count)
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    @property
    def outage(self) -> Outage | None:
        """Set while reads fail and are tried again; the oldest of them.  May be read from any thread at any time."""
        return self._retrier.outage

    def get(
        self,
        key: str,
        byte_range: ByteRange | None = None,
        cached: bool = True,
        probing: bool = False,
        version: str | None = None,
    ) -> bytes | None:
        """The object, or a range of it; None where there is none.

        What the disk cache holds is used if it has the stamp (ETag) that the object has in the store, which is asked
        once for each object.

        Args:
            cached: False for what may change at its address while it is read.
            probing: whether what is forbidden (403) counts as absent, as while metadata are looked for: S3 answers so
                for absent keys where one may not list.
            version: the stamp of the object of which other parts were read; by default that of the last part.

        Raises:
            FetchError: it is damaged.
            ReplacedError: a part of another version of the object was read before.
            OutageError, RefusedError: the store does not answer for `data.store.outage_minutes`, or refuses.
        """
        cache, name = self._cache if cached else None, self._entry(key, byte_range)
        version = version or self._versions.get(key)
        if cache is not None and (kept := cache.get(name)) is not None:
            stamp, _, data = kept.partition(b"\n")
            if version is None and (now := self._tried(key, lambda: self._store.stamp(key))) is not None:
                version = self._note(key, now)  # of an earlier run, or of another process of this one
            if stamp.decode() == version:
                self.count(cache_hits=1)
                return data
        for _ in range(_ANSWERS):
            answer = self._tried(key, lambda: self._store.read(key, byte_range), probing)
            if answer is None:
                return None
            self.count(bytes_fetched=len(answer.data))
            if byte_range is None or version in (None, answer.stamp):
                break
        else:
            raise ReplacedError(
                f"{key} was replaced while parts of it were read, or its server sends ETags or dates that do not "
                "depend on the content"
            )
        if answer.stamp is not None and (byte_range is not None or cache is not None):
            self._note(key, answer.stamp)  # a whole object is of one version, and need not be known again
        if cache is not None:
            self.count(cache_misses=1)
            if answer.lasting:
                cache.put(name, f"{answer.stamp}\n".encode() + answer.data)
            else:
                warn_once("%s sends no ETags: what comes so is not kept in data.store.cache_dir", self.shown)
        return answer.data

    def submit(self, key: str, byte_range: ByteRange | None = None, probing: bool = False) -> Future[bytes | None]:
        """`get` on one of `config.requests` threads; a range is of the version that the object has now."""
        version = self._versions.get(key) if byte_range else None
        return self.start(self.get, key, byte_range, not probing, probing, version)

    def forget(self, key: str, byte_range: ByteRange | None = None) -> None:
        """Remove from the cache what turned out to be damaged, and take the object for a new one."""
        self._versions.pop(key, None)
        if self._cache is not None:
            self._cache.drop(self._entry(key, byte_range))

    def exists(self, key: str, probing: bool = False) -> bool:
        """Whether there is such an object.  `probing` and errors as `get`."""
        return self._tried(key, lambda: [self._store.stamp(key)], probing) is not None

    def absent(self, keys: list[str], probing: bool = False) -> list[str]:
        """Those for which there is no object; asks for many at once.  `probing` and errors as `get`."""
        found = [self.start(self.exists, key, probing) for key in keys]
        return [key for key, there in zip(keys, found, strict=True) if not there.result()]

    def list_keys(self, prefix: str) -> Iterator[str]:
        """Keys below a prefix (whole path segments), in any order; on a disk also those of folders, some perhaps twice.

        Raises DataError: the store cannot list, or access is refused, if only to one folder.
        """
        pages: Iterator[Iterable[str]] | None = None
        last: str | None = None

        def next_page() -> Iterable[str] | None:
            """The objects behind `last`; asked for anew where the listing has broken off."""
            nonlocal pages
            pages = pages or self._store.pages(prefix, last)
            try:
                return next(pages, None)
            except BaseException:
                pages = None
                raise

        while (page := self._listed(prefix, next_page)) is not None:
            for last in page:  # which is where `next_page` goes on
                yield last

    def list_one_level(self, prefix: str) -> tuple[list[str], list[str]]:
        """Keys and prefixes one segment below `prefix`, in any order; errors as `list_keys`."""
        return self._listed(prefix, lambda: self._store.list_one_level(prefix))

    def start(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function on one of the `config.requests` threads."""
        with self._lock:
            if self._retrier.closed.is_set():
                raise ClosedError(f"{self.shown} was closed; open it again")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.config.requests, thread_name_prefix="fetch")
            return self._pool.submit(function, *arguments)

    def close(self) -> None:
        """End the threads; what they are reading is abandoned, and not tried again."""
        with self._lock:
            self._retrier.closed.set()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def count(self, **figures: int) -> None:
        """Add to the figures."""
        with self._lock:
            for name, value in figures.items():
                setattr(self.figures, name, getattr(self.figures, name) + value)

    def _entry(self, key: str, byte_range: ByteRange | None) -> str:
        """The name of an object, or a part of one, in the cache."""
        part = f"?{byte_range.start}:{byte_range.stop}" if byte_range else ""
        return f"{self.address.rstrip('/')}/{key}{part}"

    def _note(self, key: str, stamp: str) -> str:
        """The stamp that an object has in this process: the first one that it came with, until it is forgotten; ranges
        that were asked for by its index are of that version."""
        with self._lock:
            noted = self._versions.setdefault(key, stamp)
            if len(self._versions) > _VERSIONS_MAX:
                del self._versions[next(iter(self._versions))]
        return noted

    def _listed(self, prefix: str, read: Callable[[], T]) -> T:
        if not self.can_list:
            raise DataError(
                f"a listing of chunks needs a store that can list; got {self.shown}, a web server; put a "
                "`.chunk_occupancy.npz` beside level 0, or set data.foreground.source=level"
            )
        what = f"the list of {prefix or 'all keys'}"
        try:
            return self._retrier.run(what, read)
        except (BaseError, OSError, ProtocolError) as error:
            if status_of(error) in (None, 400) and not isinstance(error, OSError):
                raise refusal(error, what, self.shown, self.remote, self._signing) from error
            signing = f" ({self._signing})" if self._signing else ""
            raise DataError(
                f"the chunks of a volume must be listable; got {reason(error)} from {self.shown}{signing}; allow "
                "listing, or set data.foreground.source=level"
            ) from error

    def _tried(self, key: str, read: Callable[[], T], probing: bool = False) -> T | None:
        """What `read` returns, tried again for as long as an outage may last; None where there is no such object."""
        try:
            return self._retrier.run(key, read)
        except FileNotFoundError:
            return None
        except (BaseError, OSError, ProtocolError) as error:
            if isinstance(error, PermissionDeniedError) and (probing or self.config.forbidden_is_absent):
                self.forbidden = f"{reason(error)} ({self._signing})" if self._signing else reason(error)
                return None
            raise refusal(error, key, self.shown, self.remote, self._signing) from error

    def _may_pass(self, error: BaseException) -> bool:
        """An I/O error of the disk under one chunk does not pass by itself, where the metadata can be read."""
        if not self.remote and isinstance(error, OSError) and error.errno == errno.EIO:
            for name in ("zarr.json", ".zarray", ".zgroup"):
                with suppress(OSError):
                    if (self._root / name).read_bytes():
                        return False
        return is_outage(error, self.remote)
