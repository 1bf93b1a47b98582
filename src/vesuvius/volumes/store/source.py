"""Where the bytes of a volume come from: a folder, a web server or an object store.

Every read is counted, tried again while its store is away (`retry.py`), and on remote stores answered from a disk cache
where one is configured.  `Source` knows keys and byte ranges; that they are chunks is known to `volume.py` and
`chunks.py`.
"""

from __future__ import annotations

import errno
import hashlib
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
from vesuvius.volumes.errors import (
    ProtocolError,
    RefusedError,
    ReplacedError,
    is_outage,
    reason,
    refusal,
    status_of,
)
from vesuvius.volumes.store.byte_range import ByteRange
from vesuvius.volumes.store.local_files import check_file, list_files, read_file
from vesuvius.volumes.store.object_store import is_remote, open_cache, shown_address
from vesuvius.volumes.store.remote import Answer, RemoteStore, warn_once
from vesuvius.volumes.store.retry import Outage, Retrier

T = TypeVar("T")

_VERSIONS_MAX = 2**18  # some 100 MB
_ROUNDS = 8  # of looking for two parts with one stamp; enough for dozens of servers


@dataclass
class _Version:
    """What tells one version of an object from others.

    Servers behind one address may each make up their own ETags: a version may have several stamps, and is known again
    by the part that was read first, which of a shard is the index.
    """

    stamps: set[str | None]
    part: ByteRange | None = None
    digest: bytes | None = None  # of that part; None before one was read

    def learn(self, part: ByteRange | None, data: bytes) -> None:
        if self.digest is None and part is not None:
            self.part, self.digest = part, _digest(data)


@dataclass
class SourceFigures:
    """What a source has done so far."""

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
        remote: whether the address is a URL.
        shown: the address as messages name it.
        forbidden: what the store said of the last read that it forbade to `probing`; else None.
    """

    def __init__(self, address: str, config: StoreConfig, known: bool = False) -> None:
        self.address = address
        self.config = config
        self.remote = is_remote(address)
        self.figures = SourceFigures()
        self.forbidden: str | None = None
        self.shown = shown_address(address)
        self._store = RemoteStore(address, config) if self.remote else None
        self._root = Path(address).absolute()  # where it is a folder
        self._cache = open_cache(config) if self.remote else None
        self._versions: dict[str, _Version] = {}  # of objects of which a part was read, or the cache holds something
        self._retrier = Retrier(self.shown, config, known or not self.remote, self._may_pass, self.count)
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    @property
    def outage(self) -> Outage | None:
        """Set while reads fail and are tried again; the oldest of them.  May be read from any thread at any time."""
        return self._retrier.outage

    @property
    def can_list(self) -> bool:
        """Whether the store can list its objects, which plain web servers cannot."""
        return self._store is None or self._store.can_list

    @property
    def signing(self) -> str:
        """How requests are signed, for messages; empty where they never are."""
        return "" if self._store is None else self._store.signing.words

    def get(
        self,
        key: str,
        byte_range: ByteRange | None = None,
        cached: bool = True,
        probing: bool = False,
        version: _Version | None = None,
    ) -> bytes | None:
        """The object, or a range of it; None where there is none.

        What the disk cache holds is used if it has the stamp (ETag, or time of the last change) that the object has in
        the store, which is asked once for each object.

        Args:
            cached: False for what may change at its address while it is read.
            probing: whether what is forbidden (403) counts as absent, as while metadata are looked for: S3 answers so
                for absent keys where one may not list.
            version: of the object of which other parts were read; by default that of the last part.

        Raises:
            FetchError: it is damaged.
            ReplacedError: a part of another version of the object was read before.
            OutageError: the store has not answered for `data.store.outage_minutes`.
            RefusedError: the store refuses access, or cannot deliver byte ranges.
        """
        if self._store is None:
            found = self._tried(key, lambda: read_file(self._root, key, byte_range), probing)
            self.count(bytes_fetched=len(found or b""))
            return found
        cache, name = self._cache if cached else None, f"{self.address.rstrip('/')}/{key}"
        if byte_range is not None:
            name += f"?{byte_range.start}:{byte_range.stop}"
        version = version or self._versions.get(key)
        if cache is not None and (kept := cache.get(name)) is not None:
            of, _, data = kept.partition(b"\n")
            if version is None:  # of an earlier run, or of another process of this one
                stamp = self._tried(key, lambda: self._checked_store.stamp(key))
                version = None if stamp is None else self._note(key, stamp)
            if version is not None and of.decode() in version.stamps:
                self.count(cache_hits=1)
                version.learn(byte_range, data)
                return data
        answer = self._fetch(key, byte_range, probing)
        if answer is None:
            return None
        if byte_range is not None or cache is not None:  # a whole object is of one version, and need not be known again
            if version is None or version.digest is None:
                version = self._note(key, answer.stamp)
            elif byte_range is not None:
                answer = self._of_version(key, byte_range, answer, version)
            version.learn(byte_range, answer.data)
        if cache is not None:
            self.count(cache_misses=1)
            if answer.stamp is not None and answer.lasting:
                cache.put(name, answer.stamp.encode() + b"\n" + answer.data)
            else:
                warn_once(
                    "%s has told neither by an ETag nor by a Last-Modified of a minute ago or more whether an object "
                    "has changed: what comes so is not kept in data.store.cache_dir",
                    self.shown,
                )
        return answer.data

    def submit(self, key: str, byte_range: ByteRange | None = None, probing: bool = False) -> Future[bytes | None]:
        """`get` on one of `config.requests` threads; a range is of the version that the object has now."""
        version = self._versions.get(key) if byte_range else None
        return self.start(self.get, key, byte_range, not probing, probing, version)

    def forget(self, key: str, byte_range: ByteRange | None = None) -> None:
        """Remove from the cache what turned out to be damaged, and take the object for a new one."""
        self._versions.pop(key, None)
        if self._cache is not None:
            part = f"?{byte_range.start}:{byte_range.stop}" if byte_range else ""
            self._cache.drop(f"{self.address.rstrip('/')}/{key}{part}")

    def absent(self, keys: list[str], probing: bool = False) -> list[str]:
        """Those for which there is no object; asks for many at once.  `probing` and errors as `get`."""
        found = [self.start(self.exists, key, probing) for key in keys]
        return [key for key, there in zip(keys, found, strict=True) if not there.result()]

    def exists(self, key: str, probing: bool = False) -> bool:
        """Whether there is such an object.  `probing` and errors as `get`."""
        return self._tried(key, lambda: self._look(key), probing) is not None

    def list_keys(self, prefix: str, folders_too: bool = False) -> Iterator[str]:
        """Keys below a prefix (whole path segments), in any order.  On a disk links to folders are followed.

        Args:
            folders_too: list folders of a disk as well: one that has the key of a chunk is damage, not air.

        Raises:
            DataError: the store cannot list, or access is refused, if only to one folder.
        """
        with self._listing_errors():
            if self._store is None:  # obstore would look at the size of each file
                yield from list_files(self._root, prefix, folders_too)
                return
            pages: Iterator[list[str]] | None = None
            last: str | None = None

            def next_page() -> list[str] | None:
                """The objects behind `last`; asked for anew where the listing has broken off."""
                nonlocal pages
                pages = pages or self._checked_store.pages(prefix, last)
                try:
                    return next(pages, None)
                except BaseException:
                    pages = None
                    raise

            while (page := self._retrier.run(f"the list of {prefix or 'all keys'}", next_page)) is not None:
                yield from page
                last = page[-1] if page else last

    def list_one_level(self, prefix: str) -> tuple[list[str], list[str]]:
        """Keys and prefixes one segment below `prefix`, of a remote store; errors as `list_keys`."""
        with self._listing_errors():
            what = f"the list of {prefix or 'all keys'}"
            return self._retrier.run(what, lambda: self._checked_store.list_one_level(prefix))

    def start(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function on one of the `config.requests` threads."""
        with self._lock:
            self._retrier.check_open()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.config.requests, thread_name_prefix="fetch")
            return self._pool.submit(function, *arguments)

    def close(self) -> None:
        """End the threads; what they are reading is abandoned, and not tried again."""
        with self._lock:
            self._retrier.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def count(self, **figures: int) -> None:
        """Add to the figures."""
        with self._lock:
            for name, value in figures.items():
                setattr(self.figures, name, getattr(self.figures, name) + value)

    @property
    def _checked_store(self) -> RemoteStore:
        assert self._store is not None
        return self._store

    def _fetch(self, key: str, byte_range: ByteRange | None, probing: bool = False) -> Answer | None:
        """From the remote store itself; None where there is no such object.  Raises as `get`."""
        answer = self._tried(key, lambda: self._checked_store.read(key, byte_range), probing)
        if answer is not None:
            self.count(bytes_fetched=len(answer.data))
        return answer

    def _of_version(self, key: str, byte_range: ByteRange, answer: Answer, version: _Version) -> Answer:
        """A part of the version of which other parts were read: this answer, or another one to the same request.

        A stamp is one of that version if the part by which it is known comes with it, unchanged.  Raises ReplacedError
        where it has changed, RefusedError where each answer has a stamp of its own, else as `get`.
        """
        for number in range(_ROUNDS):
            for _ in range(1 + number % 2):  # one and two in turn: servers may take turns too
                if answer.stamp in version.stamps:
                    return answer
                known = answer if byte_range == version.part else self._fetch(key, version.part)
                if known is None or _digest(known.data) != version.digest:
                    raise ReplacedError(
                        f"{key} was replaced while parts of it were read (its stamp is now {answer.stamp})"
                    )
                version.stamps.add(known.stamp)
            if answer.stamp not in version.stamps:
                answer = self._fetch(key, byte_range) or answer
        raise RefusedError(
            f"{key} in {self.shown} has another ETag at each request (now {answer.stamp}): parts of it cannot be "
            "told from those of an object that replaces it; have the server send ETags that depend on the content, "
            "or none, or copy the volume to a disk"
        )

    def _note(self, key: str, stamp: str | None) -> _Version:
        with self._lock:
            version = self._versions[key] = _Version({stamp})
            if len(self._versions) > _VERSIONS_MAX:
                del self._versions[next(iter(self._versions))]
        return version

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

    def _look(self, key: str) -> bool:
        """Raises FileNotFoundError where there is no such object."""
        if self._store is None:
            check_file(self._root, key)
        else:
            self._store.stamp(key)
        return True

    def _tried(self, key: str, read: Callable[[], T], probing: bool = False) -> T | None:
        """What `read` returns, tried again for as long as an outage may last; None where there is no such object."""
        try:
            return self._retrier.run(key, read)
        except FileNotFoundError:
            return None
        except (BaseError, OSError, ProtocolError) as error:
            if isinstance(error, PermissionDeniedError) and (probing or self.config.forbidden_is_absent):
                self.forbidden = f"{reason(error)} ({self.signing})" if self.signing else reason(error)
                return None
            raise refusal(error, key, self.shown, self.remote, self.signing) from error

    def _may_pass(self, error: BaseException) -> bool:
        """Whether an error may pass by itself; an I/O error of the disk under one chunk does not."""
        if not self.remote and isinstance(error, OSError) and error.errno == errno.EIO and self._metadata_readable():
            return False
        return is_outage(error, self.remote)

    def _metadata_readable(self) -> bool:
        """Whether the file system as such is there: an I/O error is then one of the disk, under that chunk alone."""
        for name in ("zarr.json", ".zarray", ".zgroup"):
            try:
                return (self._root / name).read_bytes() != b""
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return False


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
