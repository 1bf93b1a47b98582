"""Where the bytes of a volume come from: a folder, a web server or an object store.

Every read is counted, and on remote stores answered from a disk cache where one is configured.  A fault of the network,
the server or the mount is an outage: the read is tried again until `data.store.outage_minutes` have passed.  `Source`
knows keys and byte ranges; that they are chunks is known to `volume.py` and `chunks.py`.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import (
    BaseError,
    GenericError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import HTTPStore, LocalStore, from_url
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential
from tenacity.nap import sleep_using_event

from vesuvius.config import StoreConfig
from vesuvius.errors import DataError, one_line
from vesuvius.volumes.cache import DiskCache

log = logging.getLogger(__name__)

T = TypeVar("T")

REMOTE_SCHEMES = ("http", "https", "s3", "gs")
_CREDENTIALS = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    ),
    "gs": ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_APPLICATION_CREDENTIALS"),
}
_DENIED = (PermissionDeniedError, UnauthenticatedError, PermissionError)
# Of the statuses below 500, those that pass; 501 and 505 do not.
_TRANSIENT_STATUSES = {408, 425, 429}
_LASTING_STATUSES = {501, 505}
# What a network file system says while its server is away, and a process that is short of something for a while.
_TRANSIENT_ERRNOS = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.EAGAIN,
    errno.ENFILE,
    errno.EMFILE,
}
_FIRST_PAUSE_S = 0.1
# A store that has never answered is more likely a wrong address than an outage.
_FIRST_ANSWER_S = 60.0
_SAID_AFTER_S = 10.0
_SAID_EVERY_S = 60.0
# Objects up to this size are fetched whole where a server does not know byte ranges.
_WHOLE_BYTES_MAX = 64 * 2**20


@dataclass(frozen=True)
class ByteRange:
    """Bytes start <= b < stop of an object; a negative start and no stop are the last -start bytes."""

    start: int
    stop: int | None = None


@dataclass
class SourceFigures:
    """What a source has done so far.

    Attributes:
        requests: reads that reached the store, tries included.
        retries: tries after a failed one.
        bytes_fetched: bytes that came from the store.
        cache_hits, cache_misses: reads answered by the disk cache, and not.
    """

    requests: int = 0
    retries: int = 0
    bytes_fetched: int = 0
    cache_hits: int = 0
    cache_misses: int = 0


@dataclass(frozen=True)
class Outage:
    """A store does not answer.

    Attributes:
        since: when the first read that is still being tried failed, seconds since 1970.
        cause: why the last try of that read failed.
        address: of the store.
    """

    since: float
    cause: str
    address: str

    def __str__(self) -> str:
        return f"{self.address} has not answered since {_clock(self.since)}: {self.cause}"


class FetchError(Exception):
    """An object is damaged: it is too short for what is asked of it, or no file lies in its place."""


class OutageError(DataError):
    """A store has not answered for `data.store.outage_minutes`."""


class RefusedError(DataError):
    """A store answers, and refuses: trying again would not help."""


class ClosedError(Exception):
    """A source was closed, by whoever ends the stream, while another thread read from it."""


@dataclass
class Source:
    """Reads objects below one address.  Its methods may be called from several threads.

    Attributes:
        address: folder or URL.
        cache_scope: what names in the cache start with; another volume has another one.  While it is empty, as when
            metadata are looked for, nothing is cached, and what is forbidden (403) counts as absent: S3 answers so for
            absent keys where one may not list.
        known: whether the store has answered before.  One that has not is given up after a minute.
        forbidden: what the store said of the last read that it forbade while the volume was opened; else None.
        metadata_key: the object with the array's metadata, where it is known.
        outage: set while reads fail and are tried again; the oldest of them.  May be read from any thread at any time.
    """

    address: str
    config: StoreConfig
    cache_scope: str = ""
    known: bool = False
    figures: SourceFigures = field(default_factory=SourceFigures)
    forbidden: str | None = None
    metadata_key: str | None = None
    outage: Outage | None = None

    def __post_init__(self) -> None:
        self._store = open_store(self.address, self.config)
        self._root = Path(self.address).absolute()  # where it is a folder
        self.remote = is_remote(self.address)
        self._cache = open_cache(self.config) if self.remote else None
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = threading.Event()
        self._failing: dict[int, Outage] = {}
        self._said: float | None = None
        self._whole: tuple[str, bytes] | None = None
        self._whole_lock = threading.Lock()

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
        data: bytes | None = self._tried(key, lambda: self._read(key, byte_range))
        if data is not None and cache is not None:
            cache.put(name, data)
        return data

    def submit(self, key: str, byte_range: ByteRange | None = None) -> Future[bytes | None]:
        """`get` on one of `config.requests` threads."""
        return self._start(self.get, key, byte_range)

    def forget(self, key: str, byte_range: ByteRange | None = None) -> None:
        """Remove from the cache what turned out to be damaged."""
        if self._cache is not None:
            self._cache.drop(self._cache_name(key, byte_range))

    def exists(self, key: str) -> bool:
        """Whether there is such an object.  Raises FetchError as `get`."""
        return self._tried(key, lambda: self._look(key)) is not None

    def absent(self, keys: list[str]) -> list[str]:
        """Those for which there is no object; asks for many at once.  Raises FetchError as `get`."""
        found = [self._start(self.exists, key) for key in keys]
        return [key for key, there in zip(keys, found, strict=True) if not there.result()]

    def list_keys(self, prefix: str, folders_too: bool = False) -> Iterator[str]:
        """Keys below a prefix (whole path segments), in any order.  On a disk links to folders are followed.

        Args:
            folders_too: on a disk also the folders, which may lie where a file should.

        Raises:
            DataError: the store cannot list (plain web servers cannot), or access is refused, if only to one folder.
        """
        with self._listing_errors():
            if not self.remote:  # obstore would look at the size of each file
                for folder, folders, files in os.walk(
                    self._root / prefix, onerror=_raise_unless_gone, followlinks=True
                ):
                    relative = Path(folder).relative_to(self._root)
                    yield from ((relative / name).as_posix() for name in (*files, *(folders if folders_too else ())))
                return
            for batch in obstore.list(self._store, prefix, chunk_size=1000):
                for entry in batch:
                    yield entry["path"]

    def check_folder(self, key: str) -> None:
        """Raises DataError where on a disk something else lies in place of a folder of chunks."""
        try:
            _check_way(self._root, self._root / key)
        except FetchError as error:
            raise DataError(
                f"a folder of chunks must be a folder; got {error}; mount the disk that holds it, or restore it from "
                "its source"
            ) from None

    def list_one_level(self, prefix: str) -> tuple[list[str], list[str]]:
        """Keys and prefixes one segment below `prefix`, of a remote store; errors as `list_keys`."""
        with self._listing_errors():
            found = obstore.list_with_delimiter(self._store, prefix)
            return [entry["path"] for entry in found["objects"]], sorted(found["common_prefixes"])

    def close(self) -> None:
        """End the threads; what they are reading is abandoned, and not tried again."""
        with self._lock:
            self._closed.set()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        with self._lock:
            if self._closed.is_set():
                raise ClosedError(self.address)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.config.requests, thread_name_prefix="fetch")
            return self._pool.submit(function, *arguments)

    @contextmanager
    def _listing_errors(self) -> Iterator[None]:
        if isinstance(self._store, HTTPStore):
            raise DataError(
                f"a listing of chunks needs a store that can list; got {self.address}, a web server; put a "
                "`.chunk_occupancy.npz` beside level 0, or set data.foreground.source=level"
            )
        try:
            yield
        except (BaseError, OSError) as error:
            raise DataError(
                f"the chunks of a volume must be listable; got {_reason(error)} from {self.address}; allow listing, "
                "or set data.foreground.source=level"
            ) from error

    def _cache_name(self, key: str, byte_range: ByteRange | None) -> str:
        part = f"?{byte_range.start}:{byte_range.stop}" if byte_range else ""
        return f"{self.cache_scope}/{key}{part}"

    def _read(self, key: str, byte_range: ByteRange | None) -> bytes:
        if not self.remote:
            return _read_file(self._root, key, byte_range)
        wanted: Any = None
        match byte_range:
            case ByteRange(start, int(stop)):
                wanted = (start, stop)
            case ByteRange(start):
                wanted = {"suffix": -start} if start < 0 else {"offset": start}
        try:
            found = obstore.get(self._store, key, options={"range": wanted} if wanted else None)
        except NotSupportedError:
            if byte_range is None:
                raise
            return _cut(self._read_whole(key), byte_range)
        data, (start, stop) = bytes(found.bytes()), found.range
        if len(data) != stop - start:
            raise ConnectionError(f"the body has {len(data)} bytes of {stop - start}")
        return data if byte_range is None else _checked(data, byte_range, found.meta["size"])

    def _read_whole(self, key: str) -> bytes:
        """An object of a server that does not know byte ranges; the last one is kept, as more parts of it will be
        asked for."""
        with self._whole_lock:
            if self._whole is not None and self._whole[0] == key:
                return self._whole[1]
            found = obstore.get(self._store, key)
            size = found.meta["size"]
            if size > _WHOLE_BYTES_MAX:
                raise RefusedError(
                    "a volume with large shards is read in byte ranges; got a server that ignores the Range header and "
                    f"sends all {size / 2**20:.0f} MiB of {key} in {self.address}; serve the volume with a server that "
                    "supports Range, such as nginx, or copy it to a disk"
                )
            if self._whole is None:
                log.warning(
                    "%s ignores the Range header: whole shards are fetched for a few of their chunks; a server that "
                    "supports Range, such as nginx, is faster",
                    self.address,
                )
            data = bytes(found.bytes())
            self._whole = (key, data)
            return data

    def _look(self, key: str) -> bool:
        if self.remote:
            obstore.head(self._store, key)
        else:
            _check_file(self._root, key)
        return True

    def _tried(self, key: str, read: Callable[[], Any]) -> Any:
        """What `read` returns, tried again for as long as an outage may last; None where there is no such object."""
        began: float | None = None

        def given_up(state: RetryCallState) -> bool:
            nonlocal began
            began = began or time.monotonic()
            return time.monotonic() - began >= self._patience_s

        retrying = Retrying(
            stop=given_up,
            wait=wait_random_exponential(_FIRST_PAUSE_S, max=self.config.max_pause_s),
            sleep=sleep_using_event(self._closed),
            retry=retry_if_exception(self._is_transient),
            before_sleep=self._note_failure,
            reraise=True,
        )

        def once() -> Any:
            if self._closed.is_set():
                raise ClosedError(self.address)
            self.count(requests=1)
            data = read()
            self.count(bytes_fetched=len(data) if isinstance(data, bytes) else 0)
            return data

        answered = True
        try:
            return retrying(once)
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            if self._is_transient(error):
                answered = False
                raise self._outage_error(key, error, retrying) from error
            if isinstance(error, PermissionDeniedError) and self._absent_if_forbidden:
                self.forbidden = _reason(error)
                return None
            raise self._refusal(key, error) from error
        except ClosedError:
            answered = False
            raise
        finally:
            self._end_failing(id(retrying), answered)

    @property
    def _patience_s(self) -> float:
        """Seconds for which a read is tried again."""
        outage_s = 60 * self.config.outage_minutes
        return outage_s if self.known or not self.remote else min(outage_s, _FIRST_ANSWER_S)

    @property
    def _patience_words(self) -> str:
        if self._patience_s < 60 * self.config.outage_minutes:
            return f"{self._patience_s:g} s, as it has never answered: check the address"
        return f"{self.config.outage_minutes:g} minutes (data.store.outage_minutes)"

    @property
    def _absent_if_forbidden(self) -> bool:
        return self.remote and (not self.cache_scope or self.config.forbidden_is_absent)

    def _is_transient(self, error: BaseException) -> bool:
        """Whether an error may pass by itself."""
        if isinstance(error, GenericError):
            match = re.search(r"status code: (\d{3})", str(error))
            if match is None:
                return "redirect" not in str(error)
            status = int(match[1])
            return (status >= 500 and status not in _LASTING_STATUSES) or status in _TRANSIENT_STATUSES
        if not isinstance(error, OSError) or isinstance(error, (FileNotFoundError, PermissionError)):
            return False
        if not self.remote and error.errno == errno.EIO:
            return not self._metadata_readable()
        return self.remote or error.errno in _TRANSIENT_ERRNOS

    def _metadata_readable(self) -> bool:
        """Whether the file system as such is there: an I/O error is then one of the disk, under that chunk alone."""
        try:
            return self.metadata_key is not None and (self._root / self.metadata_key).read_bytes() != b""
        except OSError:
            return False

    def _note_failure(self, state: RetryCallState) -> None:
        self.count(retries=1)
        assert state.outcome is not None
        error = state.outcome.exception()
        assert error is not None
        number, now = id(state.retry_object), time.time()
        with self._lock:
            first = self._failing.get(number)
            since = first.since if first else now
            self._failing[number] = Outage(since, _reason(error), self.address)
            self.outage = outage = min(self._failing.values(), key=lambda failing: failing.since)
            say = now - outage.since >= _SAID_AFTER_S and now - (self._said or 0) >= _SAID_EVERY_S
            if say:
                self._said = now
        if say:
            log.warning(
                "%s has not answered since %s (%s): %s; trying again for up to %s",
                self.address,
                _clock(outage.since),
                _duration(now - outage.since),
                outage.cause,
                self._patience_words,
            )

    def _end_failing(self, number: int, answered: bool) -> None:
        """A read has ended: with an answer of the store, or without."""
        if answered:
            self.known = True
        with self._lock:
            outage = self.outage
            if self._failing.pop(number, None) is None:
                return
            self.outage = min(self._failing.values(), key=lambda failing: failing.since, default=None)
            over = self.outage is None and self._said is not None
            if self.outage is None:
                self._said = None
        if over and answered and outage is not None:
            log.info("%s answers again after %s", self.address, _duration(time.time() - outage.since))

    def _outage_error(self, key: str, error: BaseException, retrying: Retrying) -> OutageError:
        with self._lock:
            failing = self._failing.get(id(retrying))
        since = failing.since if failing else time.time()
        tries = retrying.statistics.get("attempt_number", 1)
        if not self.known and self.remote:
            return OutageError(
                f"a store must answer; got {_reason(error)} ({_tries(tries)} of {key} in {self.address}); check the "
                "address and the network"
            )
        return OutageError(
            f"a store must answer within data.store.outage_minutes={self.config.outage_minutes:g}; got "
            f"{_reason(error)} since {_clock(since)} ({_tries(tries)} of {key} in {self.address}); check the network "
            "and the server, then go on: a run with --resume, another command by giving it again"
        )

    def _refusal(self, key: str, error: BaseException) -> Exception:
        """The error for a read that it would not help to try again."""
        what = f"{_reason(error)} for {key} in {self.address}"
        if not self.remote:
            if isinstance(error, PermissionError):
                return RefusedError(f"the files of a volume must be readable; got {what}; change their permissions")
            return FetchError(what)
        if isinstance(error, PermissionDeniedError):
            return RefusedError(
                f"a chunk must not be forbidden; got {what}, whose metadata could be read; either the credentials have "
                "expired or do not hold for it (AWS_* in the environment, data.store.anonymous), or it is absent in a "
                "bucket that says so only to those who may list it: allow s3:ListBucket, or set "
                "data.store.forbidden_is_absent=true"
            )
        if "status code: 416" in str(error):
            return FetchError(what)
        return RefusedError(
            f"a store must grant access; got {what}; check the address and the credentials (AWS_* in the environment, "
            "data.store.anonymous)"
        )

    def count(self, **figures: int) -> None:
        """Add to the figures."""
        with self._lock:
            for name, value in figures.items():
                setattr(self.figures, name, getattr(self.figures, name) + value)


def is_remote(address: str) -> bool:
    """Whether an address is a URL rather than a folder."""
    return "://" in address


def open_store(address: str, config: StoreConfig) -> obstore.store.ObjectStore:
    """The obstore store of a folder or URL.  No I/O.

    s3 takes the usual AWS_* environment; where that holds no credentials, requests are not signed.

    Raises:
        DataError: a scheme that is not supported, or an address that is not one.
    """
    if not is_remote(address):
        return LocalStore(Path(address).absolute())
    scheme = address.partition("://")[0]
    if scheme not in REMOTE_SCHEMES:
        raise DataError(
            f"a volume is a folder or an address of {', '.join(REMOTE_SCHEMES)}; got {address}; copy it to one of them"
        )
    options: dict[str, Any] = {
        # Ours: the retries of obstore itself would neither be counted nor cover a body that breaks off.
        "retry_config": {"max_retries": 0},
        "client_options": {
            "timeout": timedelta(seconds=config.timeout_s),
            "connect_timeout": timedelta(seconds=min(config.timeout_s, 10)),
            "allow_http": True,
            "pool_max_idle_per_host": str(config.requests),
        },
    }
    anonymous = config.anonymous
    if scheme in _CREDENTIALS and anonymous is None:
        anonymous = not any(os.environ.get(name) for name in _CREDENTIALS[scheme])
    if scheme in _CREDENTIALS and anonymous:
        options["skip_signature"] = True
    try:
        return from_url(address, **options)
    except (BaseError, ValueError) as error:
        raise DataError(
            f"a volume's address must be one that its store accepts; got {_reason(error)} for {address}; correct it, "
            "or the AWS_* and GOOGLE_* environment"
        ) from error


def open_cache(config: StoreConfig) -> DiskCache | None:
    """The disk cache, where one is configured."""
    if config.cache_dir is None:
        return None
    return DiskCache(Path(config.cache_dir), int(config.cache_gib * 2**30))


def check_cache(config: StoreConfig) -> None:
    """Raises ConfigError where the disk cache cannot be used.  Changes nothing."""
    cache = open_cache(config)
    if cache is not None:
        cache.check()


def prepare_cache(config: StoreConfig) -> None:
    """Create the folder of the disk cache and shrink it to its limit.  Raises as `check_cache`."""
    cache = open_cache(config)
    if cache is not None:
        cache.prepare()


def _read_file(root: Path, key: str, byte_range: ByteRange | None) -> bytes:
    """As obstore's reads, with errors that keep the system's number.  Raises OSError, FetchError."""
    path = root / key
    _check_file(root, key)
    with path.open("rb") as file:
        if byte_range is None:
            return file.read()
        size = os.fstat(file.fileno()).st_size
        start = max(size + byte_range.start, 0) if byte_range.start < 0 else byte_range.start
        stop = size if byte_range.stop is None else min(byte_range.stop, size)
        file.seek(min(start, size))
        return _checked(file.read(max(stop - start, 0)), byte_range, size)


def _check_file(root: Path, key: str) -> None:
    """Raises FileNotFoundError where there is nothing, FetchError for what is there and no file."""
    path = root / key
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        _check_way(root, path)
        raise FileNotFoundError(path) from None
    if not stat.S_ISREG(mode):
        raise FetchError(f"{'a folder' if stat.S_ISDIR(mode) else 'a special file'} in place of the file {path}")


def _check_way(root: Path, path: Path) -> None:
    """Raises FetchError where a path ends, below its root, at a dangling link or at a file in place of a folder."""
    for place in (path, *path.parents):
        if place == root or place.is_dir():
            return
        if place.exists():
            raise FetchError(f"a file in place of the folder {place}")
        if place.is_symlink():
            raise FetchError(f"a link to what is not there, {place}")


def _raise_unless_gone(error: OSError) -> None:
    """Below a folder that is not there, or not any more, no keys are listed."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _cut(data: bytes, byte_range: ByteRange) -> bytes:
    """A range of a whole object."""
    stop = len(data) if byte_range.stop is None else byte_range.stop
    return _checked(data[byte_range.start : stop], byte_range, len(data))


def _checked(data: bytes, byte_range: ByteRange, size: int) -> bytes:
    """Raises FetchError where an object of `size` bytes ends before a range does."""
    if byte_range.stop is not None and byte_range.stop > size:
        raise FetchError(f"bytes {byte_range.start} to {byte_range.stop} of an object of {size}")
    return data


def _reason(error: BaseException) -> str:
    """What an error says, in one line; of obstore's neither the preamble, which ends with the address and the time that
    the request took, nor the dump of the error's structure at the end, but for what the system said."""
    text, _, dump = str(error).partition("Debug source:")
    words = one_line(re.sub(r"^.*Error performing \w+ \S+ in \S+ - ", "", text.rstrip(" :\n")))
    if "error sending request" not in words:
        return words
    causes = re.findall(r'(?:message|error): "([^"]+)"', dump)
    return causes[-1] if causes else "no answer in time" if "TimedOut" in dump else words


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _tries(count: int) -> str:
    return "1 try" if count == 1 else f"{count} tries"
