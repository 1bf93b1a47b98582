"""Where the bytes of a volume come from: a folder, a web server or an object store.

Every read is counted, tried again while its store is away (`retry.py`), and on remote stores answered from a disk cache
where one is configured.  `Source` knows keys and byte ranges; that they are chunks is known to `volume.py` and
`chunks.py`.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from obstore.exceptions import BaseError, PermissionDeniedError

from vesuvius.config import StoreConfig
from vesuvius.errors import DataError
from vesuvius.volumes.errors import FetchError, ProtocolError, is_outage, reason, refusal, status_of
from vesuvius.volumes.store.byte_range import ByteRange
from vesuvius.volumes.store.local_files import check_file, check_path, list_files, read_file
from vesuvius.volumes.store.object_store import is_remote, open_cache, shown_address
from vesuvius.volumes.store.remote import RemoteStore
from vesuvius.volumes.store.retry import Outage, Retrier

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class SourceFigures:
    """What a source has done so far; on disk without what zarrs has read itself."""

    requests: int = 0  # reads that reached the store, tries included
    retries: int = 0  # tries after a failed one
    bytes_fetched: int = 0  # bytes that came from the store
    # cache_hits, cache_misses: reads answered by the disk cache, and not
    cache_hits: int = 0
    cache_misses: int = 0


class Source:
    """Reads objects below one address.  Its methods may be called from several threads.

    Args:
        address: folder or URL.
        known: whether the store has answered before.  One that has not is given up after a minute.

    Attributes:
        cache_scope: what names in the cache start with; another volume has another one.  While it is empty, as when
            metadata are looked for, nothing is cached, and what is forbidden (403) counts as absent: S3 answers so for
            absent keys where one may not list.
        remote: whether the address is a URL.
        shown: the address as messages name it.
        forbidden: what the store said of the last read that it forbade while the volume was opened; else None.
        metadata_key: the object with the array's metadata, once whoever opens the volume has found it.
    """

    def __init__(self, address: str, config: StoreConfig, known: bool = False) -> None:
        self.address = address
        self.config = config
        self.cache_scope = ""
        self.remote = is_remote(address)
        self.figures = SourceFigures()
        self.forbidden: str | None = None
        self.metadata_key: str | None = None
        self._store = RemoteStore(address, config) if self.remote else None
        self._root = Path(address).absolute()  # where it is a folder
        self._cache = open_cache(config) if self.remote else None
        self.shown = shown_address(address)
        self._retrier = Retrier(self.shown, config, known, self.remote, self._may_pass, self.count)
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    @property
    def outage(self) -> Outage | None:
        """Set while reads fail and are tried again; the oldest of them.  May be read from any thread at any time."""
        return self._retrier.outage

    def get(self, key: str, byte_range: ByteRange | None = None, cached: bool = True) -> bytes | None:
        """The object, or a range of it; None where there is none.

        Args:
            cached: False for what may change at its address, which the disk cache would hold for ever.

        Raises:
            FetchError: it is damaged.
            OutageError: the store has not answered for `data.store.outage_minutes`.
            RefusedError: the store refuses access, or cannot deliver byte ranges.
        """
        cache = self._cache if self.cache_scope and cached else None
        name = self._cache_name(key, byte_range)
        if cache is not None:
            kept = cache.get(name)
            self.count(cache_hits=kept is not None, cache_misses=kept is None)
            if kept is not None:
                return kept
        data = self._tried(key, lambda: self._read(key, byte_range))
        if data is not None and cache is not None:
            cache.put(name, data)
        return data

    def submit(self, key: str, byte_range: ByteRange | None = None) -> Future[bytes | None]:
        """`get` on one of `config.requests` threads."""
        return self.start(self.get, key, byte_range)

    def forget(self, key: str, byte_range: ByteRange | None = None) -> None:
        """Remove from the cache what turned out to be damaged."""
        if self._cache is not None:
            self._cache.drop(self._cache_name(key, byte_range))

    def exists(self, key: str) -> bool:
        """Whether there is such an object.  Raises FetchError as `get`."""
        return self._tried(key, lambda: self._look(key)) is not None

    def absent(self, keys: list[str]) -> list[str]:
        """Those for which there is no object; asks for many at once.  Raises FetchError as `get`."""
        found = [self.start(self.exists, key) for key in keys]
        return [key for key, there in zip(keys, found, strict=True) if not there.result()]

    @property
    def can_list(self) -> bool:
        """Whether the store can list its objects, which plain web servers cannot."""
        return self._store is None or self._store.can_list

    @property
    def signing(self) -> str:
        """How requests are signed, for messages; empty where they never are."""
        return "" if self._store is None else self._store.signing.words

    def list_keys(self, prefix: str, folders_too: bool = False) -> Iterator[str]:
        """Keys below a prefix (whole path segments), in any order.  On a disk links to folders are followed.

        Args:
            folders_too: on a disk also the folders, which may lie where a file should.

        Raises:
            DataError: the store cannot list, or access is refused, if only to one folder.
        """
        with self._listing_errors():
            store = self._store
            if store is None:  # obstore would look at the size of each file
                yield from list_files(self._root, prefix, folders_too)
                return
            pages: Iterator[list[str]] | None = None
            last: str | None = None

            def next_page() -> list[str] | None:
                """The keys behind `last`; asked for anew where the listing has broken off."""
                nonlocal pages
                pages = pages or store.pages(prefix, last)
                try:
                    return next(pages, None)
                except BaseException:
                    pages = None
                    raise

            while (page := self._retrier.run(f"the list of {prefix or 'all keys'}", next_page)) is not None:
                yield from page
                last = page[-1] if page else last

    def check_folder(self, key: str) -> None:
        """Raises DataError where on a disk something else lies in place of a folder of chunks."""
        try:
            check_path(self._root, self._root / key)
        except FetchError as error:
            raise DataError(
                f"a folder of chunks must be a folder; got {error}; mount the disk that holds it, or restore it from "
                "its source"
            ) from None

    def list_one_level(self, prefix: str) -> tuple[list[str], list[str]]:
        """Keys and prefixes one segment below `prefix`, of a remote store; errors as `list_keys`."""
        with self._listing_errors():
            store = self._store
            assert store is not None
            return self._retrier.run(f"the list of {prefix or 'all keys'}", lambda: store.list_one_level(prefix))

    def close(self) -> None:
        """End the threads; what they are reading is abandoned, and not tried again."""
        with self._lock:
            self._retrier.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def start(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function on one of the `config.requests` threads."""
        with self._lock:
            self._retrier.check_open()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.config.requests, thread_name_prefix="fetch")
            return self._pool.submit(function, *arguments)

    @contextmanager
    def _listing_errors(self) -> Iterator[None]:
        if not self.can_list:
            raise DataError(
                f"a listing of chunks needs a store that can list; got {self.shown}, a web server; put a "
                "`.chunk_occupancy.npz` beside level 0, or set data.foreground.source=level"
            )
        try:
            yield
        except (BaseError, OSError, ProtocolError) as error:
            if status_of(error) in (None, 400) and not isinstance(error, OSError):
                raise refusal(error, "the list of its keys", self.shown, self.remote, self.signing) from error
            signing = f" ({self.signing})" if self.signing else ""
            raise DataError(
                f"the chunks of a volume must be listable; got {reason(error)} from {self.shown}{signing}; allow "
                "listing, or set data.foreground.source=level"
            ) from error

    def _cache_name(self, key: str, byte_range: ByteRange | None) -> str:
        part = f"?{byte_range.start}:{byte_range.stop}" if byte_range else ""
        return f"{self.cache_scope}/{key}{part}"

    def _read(self, key: str, byte_range: ByteRange | None) -> bytes:
        return read_file(self._root, key, byte_range) if self._store is None else self._store.read(key, byte_range)

    def _look(self, key: str) -> bool:
        """Raises FileNotFoundError where there is no such object."""
        if self._store is None:
            check_file(self._root, key)
        else:
            self._store.check_exists(key)
        return True

    def _tried(self, key: str, read: Callable[[], T]) -> T | None:
        """What `read` returns, tried again for as long as an outage may last; None where there is no such object."""
        try:
            return self._retrier.run(key, read)
        except FileNotFoundError:
            return None
        except (BaseError, OSError, ProtocolError) as error:
            if isinstance(error, PermissionDeniedError) and self._absent_if_forbidden:
                self.forbidden = f"{reason(error)} ({self.signing})" if self.signing else reason(error)
                return None
            raise refusal(error, key, self.shown, self.remote, self.signing) from error

    @property
    def _absent_if_forbidden(self) -> bool:
        return self.remote and (not self.cache_scope or self.config.forbidden_is_absent)

    def _may_pass(self, error: BaseException) -> bool:
        """Whether an error may pass by itself; an I/O error of the disk under one chunk does not."""
        if not self.remote and isinstance(error, OSError) and error.errno == errno.EIO and self._metadata_readable():
            return False
        return is_outage(error, self.remote)

    def _metadata_readable(self) -> bool:
        """Whether the file system as such is there: an I/O error is then one of the disk, under that chunk alone."""
        try:
            return self.metadata_key is not None and (self._root / self.metadata_key).read_bytes() != b""
        except OSError:
            return False

    def count(self, **figures: int) -> None:
        """Add to the figures."""
        with self._lock:
            for name, value in figures.items():
                setattr(self.figures, name, getattr(self.figures, name) + value)
