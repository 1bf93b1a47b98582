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
    FetchError,
    ProtocolError,
    RefusedError,
    ReplacedError,
    is_outage,
    reason,
    refusal,
    status_of,
)
from vesuvius.volumes.store.byte_range import ByteRange
from vesuvius.volumes.store.local_files import check_file, check_path, list_files, read_file
from vesuvius.volumes.store.object_store import is_remote, open_cache, shown_address
from vesuvius.volumes.store.remote import Listed, RemoteStore, warn_once
from vesuvius.volumes.store.retry import Outage, Retrier
from vesuvius.volumes.store.web import Answer

T = TypeVar("T")

_VERSIONS_MAX = 2**18  # some 100 MB


_ROUNDS = 8  # of looking for two parts with one stamp; enough for dozens of servers


@dataclass
class _Version:
    """What tells one version of an object from others.

    Servers behind one address may each make up their own ETags: a version may have several stamps, and is known again
    by the part that was read first, which of a shard is the index.
    """

    stamps: tuple[str | None, ...]
    part: ByteRange | None = None
    digest: bytes | None = None  # of that part; None before one was read


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
        self._versions: dict[str, _Version] = {}  # of objects of which a part was read, or the cache holds something
        self.shown = shown_address(address)
        self._retrier = Retrier(self.shown, config, known, self.remote, self._may_pass, self.count)
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    @property
    def outage(self) -> Outage | None:
        """Set while reads fail and are tried again; the oldest of them.  May be read from any thread at any time."""
        return self._retrier.outage

    def get(
        self, key: str, byte_range: ByteRange | None = None, cached: bool = True, version: _Version | None = None
    ) -> bytes | None:
        """The object, or a range of it; None where there is none.

        What the disk cache holds is used if it has the stamp (ETag, or time of the last change) that the object has in
        the store, which is asked once for each object.

        Args:
            cached: False for what may change at its address while it is read.
            version: of the object of which other parts were read; by default that of the last part.

        Raises:
            FetchError: it is damaged.
            ReplacedError: a part of another version of the object was read before.
            OutageError: the store has not answered for `data.store.outage_minutes`.
            RefusedError: the store refuses access, or cannot deliver byte ranges.
        """
        if self._store is None:
            return self._tried(key, lambda: read_file(self._root, key, byte_range))
        cache = self._cache if self.cache_scope and cached else None
        name, store = self._cache_name(key, byte_range), self._store
        cache, version = self._cache if self.cache_scope and cached else None, version or self._versions.get(key)
        if cache is not None:
            kept = cache.get(name)
            of, _, data = (kept or b"").partition(b"\n")
            if kept and version is None:  # of an earlier run, or of another process of this one
                stamp = self._tried(key, lambda: store.stamp(key))
                version = None if stamp is None else self._note(key, _Version((stamp,)))
            hit = bool(kept) and version is not None and of.decode() in version.stamps
            self.count(cache_hits=hit, cache_misses=not hit)
            if hit and version is not None:
                _learn_part(version, byte_range, data)
                return data
        answer = self._fetch(key, byte_range)
        if answer is None:
            return None
        if byte_range is not None and version is not None:
            answer = self._of_version(key, byte_range, answer, version)
            _learn_part(version, byte_range, answer.data)
        elif answer.stamp is not None and (
            byte_range is not None or (cache is not None and (version is None or version.digest is None))
        ):
            _learn_part(self._note(key, _Version((answer.stamp,))), byte_range, answer.data)
        if cache is not None and answer.stamp is not None and answer.lasting:
            cache.put(name, answer.stamp.encode() + b"\n" + answer.data)
        elif cache is not None:
            warn_once(
                "%s has told neither by an ETag nor by a Last-Modified of two seconds ago or more whether an object "
                "has changed: what comes so is not kept in data.store.cache_dir",
                self.shown,
            )
        return answer.data

    def _fetch(self, key: str, byte_range: ByteRange | None) -> Answer | None:
        """From the store itself; None where there is no such object.  Raises as `get`."""
        store, answers = self._store, list[Answer]()
        assert store is not None

        def read() -> bytes:
            answers.append(store.read(key, byte_range))
            return answers[-1].data

        return None if self._tried(key, read) is None else answers[-1]

    def _of_version(self, key: str, byte_range: ByteRange, answer: Answer, version: _Version) -> Answer:
        """A part of the version of which other parts were read: `answer`, or one that comes later.

        A stamp is one of that version if the part by which it is known comes with it, unchanged.  Raises ReplacedError
        where it has changed, RefusedError where each answer has a stamp of its own, else as `get`.
        """
        for number in range(_ROUNDS):
            for _ in range(1 + number % 2):  # one and two in turn: servers may take turns too
                if answer.stamp in version.stamps:
                    return answer
                known = answer if byte_range == version.part else self._fetch(key, version.part)
                if known is None or version.digest is None or _digest(known.data) != version.digest:
                    raise ReplacedError(
                        f"{key} was replaced while parts of it were read "
                        f"(its stamp {version.stamps[0]} is now {answer.stamp})"
                    )
                version.stamps += (known.stamp,)
            if answer.stamp not in version.stamps:
                answer = self._fetch(key, byte_range) or answer
        raise RefusedError(
            f"{key} in {self.shown} has another ETag at each request ({version.stamps[0]}, then {answer.stamp}): parts "
            "of it cannot be told from those of an object that replaces it; have the server send ETags that depend on "
            "the content, or none, or copy the volume to a disk"
        )

    def _note(self, key: str, version: _Version) -> _Version:
        with self._lock:
            self._versions[key] = version
            if len(self._versions) > _VERSIONS_MAX:
                del self._versions[next(iter(self._versions))]
        return version

    def submit(self, key: str, byte_range: ByteRange | None = None) -> Future[bytes | None]:
        """`get` on one of `config.requests` threads; a range is of the version that the object has now."""
        return self.start(self.get, key, byte_range, True, self._versions.get(key) if byte_range else None)

    def forget(self, key: str, byte_range: ByteRange | None = None) -> None:
        """Remove from the cache what turned out to be damaged, and take the object for a new one."""
        self._versions.pop(key, None)
        if self._store is not None:
            self._store.forget(key)
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

    def list_keys(self, prefix: str, folders_too: bool = False, stamps: dict[str, str] | None = None) -> Iterator[str]:
        """Keys below a prefix (whole path segments), in any order.  On a disk links to folders are followed.

        Args:
            folders_too: on a disk also the folders, which may lie where a file should.
            stamps: of a remote store it is given a text for each key that changes with the object's content.

        Raises:
            DataError: the store cannot list, or access is refused, if only to one folder.
        """
        with self._listing_errors():
            store = self._store
            if store is None:  # obstore would look at the size of each file
                yield from list_files(self._root, prefix, folders_too)
                return
            pages: Iterator[list[Listed]] | None = None
            last: str | None = None

            def next_page() -> list[Listed] | None:
                """The objects behind `last`; asked for anew where the listing has broken off."""
                nonlocal pages
                pages = pages or store.pages(prefix, last)
                try:
                    return next(pages, None)
                except BaseException:
                    pages = None
                    raise

            while (page := self._retrier.run(f"the list of {prefix or 'all keys'}", next_page)) is not None:
                if stamps is not None:
                    stamps.update(page)
                yield from (key for key, _ in page)
                last = page[-1][0] if page else last

    def check_folder(self, key: str) -> None:
        """Raises DataError where on a disk something else lies in place of a folder of chunks."""
        try:
            check_path(self._root, self._root / key)
        except FetchError as error:
            raise DataError(
                f"a folder of chunks must be a folder; got {error}; mount the disk that holds it, or restore it from "
                "its source"
            ) from None

    def list_one_level(self, prefix: str, stamps: dict[str, str] | None = None) -> tuple[list[str], list[str]]:
        """Keys and prefixes one segment below `prefix`, of a remote store; stamps and errors as `list_keys`."""
        with self._listing_errors():
            store = self._store
            assert store is not None
            objects, folders = self._retrier.run(
                f"the list of {prefix or 'all keys'}", lambda: store.list_one_level(prefix)
            )
            if stamps is not None:
                stamps.update(objects)
            return [key for key, _ in objects], folders

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

    def _look(self, key: str) -> bool:
        """Raises FileNotFoundError where there is no such object."""
        if self._store is None:
            check_file(self._root, key)
        else:
            self._store.stamp(key)
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


def _learn_part(version: _Version, byte_range: ByteRange | None, data: bytes) -> None:
    if version.digest is None and byte_range is not None:
        version.part, version.digest = byte_range, _digest(data)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
