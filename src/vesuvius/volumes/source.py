"""Where the bytes of a volume come from: a folder, a web server or an object store.

Every read is tried again after transient faults, counted, and on remote stores answered from a disk cache where one is
configured.  `Source` knows keys and byte ranges; that they are chunks is known to `volume.py` and `chunks.py`.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import BaseError, NotSupportedError, PermissionDeniedError, UnauthenticatedError
from obstore.store import HTTPStore, LocalStore, from_url
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    wait_random_exponential,
)
from tenacity.nap import sleep_using_event

from vesuvius.config import StoreConfig
from vesuvius.errors import DataError, one_line
from vesuvius.volumes.cache import DiskCache

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
# Tried again it would be refused again.
_REFUSED = (PermissionDeniedError, UnauthenticatedError, NotSupportedError, PermissionError)
_FIRST_PAUSE_S = 0.1


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


class FetchError(Exception):
    """An object could not be read, however often it was tried."""


class ClosedError(Exception):
    """A source was closed, by whoever ends the stream, while another thread read from it."""


@dataclass
class Source:
    """Reads objects below one address.  Its methods may be called from several threads.

    Attributes:
        address: folder or URL.
        cache_scope: what names in the cache start with; another volume has another one.  While it is empty, as when
            metadata are read, nothing is cached.
        outage: set while reads fail and are tried again.  May be read from any thread at any time.
    """

    address: str
    config: StoreConfig
    cache_scope: str = ""
    figures: SourceFigures = field(default_factory=SourceFigures)
    outage: Outage | None = None

    def __post_init__(self) -> None:
        self._store = open_store(self.address, self.config)
        self.remote = is_remote(self.address)
        self._cache = open_cache(self.config) if self.remote else None
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = threading.Event()

    def get(self, key: str, byte_range: ByteRange | None = None, cached: bool = True) -> bytes | None:
        """The object, or a range of it; None where there is none.

        Args:
            cached: False for what may change at its address, which the disk cache would hold for ever.

        Raises:
            FetchError: it could not be read in `1 + retries` tries, or access is refused.
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
        return self._tried(key, lambda: obstore.head(self._store, key)) is not None

    def absent(self, keys: list[str]) -> list[str]:
        """Those for which there is no object; asks for many at once.  Raises FetchError as `get`."""
        found = [self._start(self.exists, key) for key in keys]
        return [key for key, there in zip(keys, found, strict=True) if not there.result()]

    def list_keys(self, prefix: str) -> Iterator[str]:
        """Keys below a prefix (whole path segments), in any order.

        Raises:
            DataError: the store cannot list (plain web servers cannot), or access is refused.
        """
        with self._listing_errors():
            if not self.remote:  # obstore would look at the size of each file
                for folder, _, files in os.walk(Path(self.address) / prefix):
                    relative = Path(folder).relative_to(self.address)
                    yield from ((relative / name).as_posix() for name in files)
                return
            for batch in obstore.list(self._store, prefix, chunk_size=1000):
                for entry in batch:
                    yield entry["path"]

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
        if byte_range is None:
            return bytes(obstore.get(self._store, key).bytes())
        if byte_range.stop is not None:
            return bytes(obstore.get_range(self._store, key, start=byte_range.start, end=byte_range.stop))
        wanted: Any = {"suffix": -byte_range.start} if byte_range.start < 0 else {"offset": byte_range.start}
        return bytes(obstore.get(self._store, key, options={"range": wanted}).bytes())

    def _tried(self, key: str, read: Any) -> Any:
        """What `read` returns, tried again after transient faults; None where there is no such object."""
        retrying = Retrying(
            stop=stop_after_attempt(1 + self.config.retries),
            wait=wait_random_exponential(_FIRST_PAUSE_S, max=self.config.max_pause_s),
            sleep=sleep_using_event(self._closed),
            retry=retry_if_exception(_is_transient),
            before_sleep=self._note_retry,
            reraise=True,
        )

        def once() -> Any:
            if self._closed.is_set():
                raise ClosedError(self.address)
            self.count(requests=1)
            data = read()
            self.count(bytes_fetched=len(data) if isinstance(data, bytes) else 0)
            return data

        try:
            return retrying(once)
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            tries = retrying.statistics.get("attempt_number", 1)
            raise FetchError(f"{_reason(error)} ({tries} tries of {key} in {self.address})") from error

    def _note_retry(self, state: RetryCallState) -> None:
        self.count(retries=1)

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
    """Raises ConfigError where the disk cache cannot be used.  Creates its folder."""
    cache = open_cache(config)
    if cache is not None:
        cache.check()


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, (BaseError, OSError)) and not isinstance(error, (FileNotFoundError, *_REFUSED))


def _reason(error: BaseException) -> str:
    """What an error says, in one line; of obstore's neither the preamble, which ends with the address and the time that
    the request took, nor the dump of the error's structure at the end."""
    text = str(error).partition("Debug source:")[0].rstrip(" :\n")
    return one_line(re.sub(r"^.*Error performing \w+ \S+ in \S+ - ", "", text))
