"""The source of a volume's bytes: a folder, a web server or an object store, read by key and byte range.

Every read is counted, and retried for as long as an outage may last: failures of the network, the server or the mount
are outages (a closed list), refusals and damage are not.  Remote stores may have a disk cache.
"""

import errno
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from obstore.exceptions import BaseError, PermissionDeniedError

from vesuvius.config import StoreConfig
from vesuvius.errors import DataError, warn_once
from vesuvius.runlog.units import format_duration, format_time
from vesuvius.threads import Pool, renew_after_fork
from vesuvius.volumes import errors
from vesuvius.volumes.store.cache import open_cache
from vesuvius.volumes.store.objects import ByteRange, LocalFiles, RemoteStore, display_address, is_remote

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_FIRST_ANSWER_S = 60.0  # a store that has never answered is more likely a wrong address than an outage
_LOG_AFTER_S, _LOG_EVERY_S = 10.0, 60.0
_STAMPS_MAX = 2**18  # some 60 MB
_ANSWERS = 20  # tries to reach the same one of several servers, each with its own ETags, as before


@dataclass
class SourceStats:
    requests: int = 0  # reads that reached the store, including retries
    retries: int = 0
    bytes_fetched: int = 0  # from the store
    cache_hits: int = 0  # reads answered by the disk cache
    cache_misses: int = 0


class Source:
    """Reads objects below a folder or URL; thread-safe.  A store that never answered is given up after a minute."""

    def __init__(self, address: str, config: StoreConfig, has_answered: bool = False) -> None:
        self.address = address = str(address)  # plain, as it gets into names, records and states
        self.config = config
        self.remote = is_remote(address)
        self.stats = SourceStats()
        self.forbidden: str | None = None  # the answer to the last `probing` read that the store forbade
        self.display_address = display_address(address)  # for messages
        self._root = Path(address).absolute()  # meaningful for folders only
        self._store = RemoteStore(address, config) if self.remote else LocalFiles(self._root)
        self.can_list, self._signing = self._store.can_list, self._store.signing
        self._cache = open_cache(config) if self.remote else None
        self._stamps: dict[str, str] = {}  # of objects that the cache holds, as last seen in the store
        self._closed = threading.Event()
        self._patient = has_answered or not self.remote  # else a store is given up after a minute
        self._logged = 0.0  # time of the last log line about this outage
        self.rest()
        renew_after_fork(self)

    def renew(self) -> None:
        """Make the locks anew in a forked child; the failing threads are not there."""
        self._lock = threading.Lock()
        self._failing: dict[int, errors.Outage] = {}  # by thread
        was_closed, self._closed = self._closed.is_set(), threading.Event()
        if was_closed:
            self._closed.set()

    @property
    def outage(self) -> errors.Outage | None:
        """The oldest read that is failing and being retried; None if there is none.  Thread-safe."""
        with self._lock:
            return min(self._failing.values(), key=lambda failing: failing.since, default=None)

    def get(
        self, key: str, byte_range: ByteRange | None = None, cached: bool = True, probing: bool = False
    ) -> bytes | None:
        """Read an object or a range of it; None if it does not exist.  Arguments and errors as in `get_stamped`."""
        found = self.get_stamped(key, byte_range, cached, probing)
        return None if found is None else found[0]

    def get_stamped(
        self, key: str, byte_range: ByteRange | None = None, cached: bool = True, probing: bool = False
    ) -> tuple[bytes, str | None] | None:
        """Read an object or a range of it.  Returns it with the object's stamp, if any; None if it does not exist.

        A cache entry is used if its stamp (ETag) is the version of the range or, if it has none, that of the object in
        the store, requested once per object.

        Args:
            cached: False for objects that may change while they are read.
            probing: forbidden (403) counts as absent, as S3 answers for absent keys without permission to list.

        Raises FetchError if the object is damaged, ReplacedError if it does not have the version of the range,
        OutageError and RefusedError.
        """
        cache, name = self._cache if cached else None, self._entry(key, byte_range)
        version = byte_range.version if byte_range else None
        if cache is not None and (kept := cache.get(name)) is not None:
            stamp, _, data = kept.partition(b"\n")
            if stamp.decode() == (version or self._stamp(key)):
                self.count(cache_hits=1)
                return data, stamp.decode()
        for _ in range(_ANSWERS):
            answer = self._retried(key, lambda: self._store.read(key, byte_range), probing)
            if answer is None:
                return None
            self.count(bytes_fetched=len(answer.data))
            if version in (None, answer.stamp):
                break
        else:
            raise errors.ReplacedError(
                f"{key} was replaced between reads of its parts, or its server sends ETags or dates that do not depend "
                "on the content"
            )
        if cache is not None:
            self.count(cache_misses=1)
            if answer.stamp is not None and answer.lasting:
                self._keep_stamp(key, answer.stamp)
                cache.put(name, f"{answer.stamp}\n".encode() + answer.data)
            else:
                warn_once("%s sends no ETags: its objects are not cached in data.store.cache_dir", self.display_address)
        return answer.data, answer.stamp

    def submit(self, key: str, byte_range: ByteRange | None = None, probing: bool = False) -> Future[bytes | None]:
        return self.start(self.get, key, byte_range, not probing, probing)

    def forget(self, key: str, byte_range: ByteRange | None = None) -> None:
        """Remove a damaged object or range from the cache, and forget the object's stamp."""
        with self._lock:
            self._stamps.pop(key, None)
        if self._cache is not None:
            self._cache.drop(self._entry(key, byte_range))

    def exists(self, key: str) -> bool:
        """Whether an object exists.  Raises as `get`."""
        return self._retried(key, lambda: [self._store.stamp(key)]) is not None

    def absent(self, keys: list[str]) -> list[str]:
        """The keys without an object, checked concurrently.  Raises as `get`."""
        found = [self.start(self.exists, key) for key in keys]
        return [key for key, there in zip(keys, found, strict=True) if not there.result()]

    def list_keys(self, prefix: str) -> Iterator[str]:
        """Keys below a prefix (whole path segments), in any order; on disk also those of folders, possibly repeated.

        Raises DataError: the store cannot list, or refuses access to any folder.
        """
        pages: Iterator[Iterable[str]] | None = None
        last: str | None = None

        def next_page() -> Iterable[str] | None:
            """The keys after `last`; restarts an interrupted listing."""
            nonlocal pages
            pages = pages or self._store.pages(prefix, last)
            try:
                return next(pages, None)
            except BaseException:
                pages = None
                raise

        while (page := self._listed(prefix, next_page)) is not None:
            for last in page:  # `next_page` continues after `last`
                yield last

    def list_one_level(self, prefix: str) -> tuple[list[str], list[str]]:
        """Keys and prefixes one segment below `prefix`, in any order.  Raises as `list_keys`."""
        return self._listed(prefix, lambda: self._store.list_one_level(prefix))

    def start(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        if self._closed.is_set():
            raise errors.ClosedError(f"{self.display_address} was closed; open it again")
        return self._pool.submit(function, *arguments)

    def rest(self) -> None:
        """Let the threads end after the calls so far; later ones start others."""
        self._pool = Pool(self.config.requests, "fetch")

    def close(self) -> None:
        """Stop the threads; reads in progress are abandoned without a retry."""
        self._closed.set()
        self._pool.close()

    def count(self, **figures: int) -> None:
        with self._lock:
            for name, value in figures.items():
                setattr(self.stats, name, getattr(self.stats, name) + value)

    def _entry(self, key: str, byte_range: ByteRange | None) -> str:
        part = f"?{byte_range.start}:{byte_range.stop}" if byte_range else ""
        return f"{self.address.rstrip('/')}/{key}{part}"

    def _stamp(self, key: str) -> str | None:
        """The stamp of an object as last seen in the store; it is requested if none is remembered."""
        if (stamp := self._stamps.get(key)) is None:
            stamp = self._retried(key, lambda: self._store.stamp(key))
            if stamp is not None:
                self._keep_stamp(key, stamp)
        return stamp

    def _keep_stamp(self, key: str, stamp: str) -> None:
        with self._lock:
            self._stamps[key] = stamp
            if len(self._stamps) > _STAMPS_MAX:  # the oldest costs a request if it is needed again
                del self._stamps[next(iter(self._stamps))]

    def _listed(self, prefix: str, read: Callable[[], T]) -> T:
        if not self.can_list:
            raise DataError(
                f"Cannot list the chunks of {self.display_address}: web servers cannot be listed; put a "
                "`.chunk_occupancy.npz` next to level 0, or set data.foreground.level to a coarser level"
            )
        what = f"the listing of {prefix or 'all keys'}"
        try:
            return self._run(what, read)
        except (BaseError, OSError, errors.ProtocolError) as error:
            if errors.status_of(error) in (None, 400) and not isinstance(error, OSError):
                raise errors.refusal(error, what, self.display_address, self.remote, self._signing) from error
            signing = f" ({self._signing})" if self._signing else ""
            raise DataError(
                f"Cannot list the chunks of {self.display_address}: {errors.reason(error)}{signing}; allow listing, or "
                "set data.foreground.level to a coarser level"
            ) from error

    def _retried(self, key: str, read: Callable[[], T], probing: bool = False) -> T | None:
        """Call `read` with retries; None if the object does not exist."""
        try:
            return self._run(key, read)
        except FileNotFoundError:
            return None
        except (BaseError, OSError, errors.ProtocolError) as error:
            if isinstance(error, PermissionDeniedError) and (probing or self.config.forbidden_is_absent):
                self.forbidden = f"{errors.reason(error)} ({self._signing})" if self._signing else errors.reason(error)
                return None
            raise errors.refusal(error, key, self.display_address, self.remote, self._signing) from error

    def _run(self, key: str, read: Callable[[], T]) -> T:
        """Call `read`, and retry it during an outage; an answer that violates the protocol is retried once.

        Raises OutageError if it has failed for as long as an outage may last, ClosedError once `closed` is set, and any
        other error of `read`.
        """
        pause_s, tries, answered, broke_protocol = _FIRST_PAUSE_S, 0, True, False
        began: float | None = None
        try:
            while not self._closed.is_set():
                tries += 1
                self.count(requests=1)
                try:
                    return read()
                except (BaseError, OSError, errors.ProtocolError) as error:
                    now = time.monotonic()
                    if errors.is_protocol_error(error) and not broke_protocol:
                        broke_protocol = True
                    elif not self._is_retryable(error):
                        raise
                    else:
                        began = now if began is None else began
                        self._record_failure(error)
                        if now - began >= self._patience_s:
                            answered = False
                            raise self._outage_error(error, f"{tries} attempts of {key}") from error
                self.count(retries=1)
                self._closed.wait(random.uniform(0, pause_s))  # jitter, so that many readers do not retry in step
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            answered = False
            raise errors.ClosedError(f"{self.display_address} was closed; open it again")
        finally:
            self._end(answered)

    @property
    def _patience_s(self) -> float:
        outage_s = 60 * self.config.outage_minutes
        return outage_s if self._patient else min(outage_s, _FIRST_ANSWER_S)

    def _record_failure(self, error: BaseException) -> None:
        """Record that this thread's read fails, and log it every minute."""
        now, thread = time.time(), threading.get_ident()
        with self._lock:
            since = self._failing[thread].since if thread in self._failing else now
            self._failing[thread] = errors.Outage(since, errors.reason(error), self.display_address)
            oldest = min(self._failing.values(), key=lambda failing: failing.since)
            if now - oldest.since < _LOG_AFTER_S or now - self._logged < _LOG_EVERY_S:
                return
            self._logged = now
        wait = f"{self.config.outage_minutes:g} minutes (data.store.outage_minutes)"
        if self._patience_s < 60 * self.config.outage_minutes:
            wait = f"{self._patience_s:g} s, because it has never answered: check the address"
        log.warning("%s (for %s); retrying for up to %s", oldest, format_duration(now - oldest.since), wait)

    def _end(self, answered: bool) -> None:
        """Record that this thread's read has ended, whether or not the store answered."""
        self._patient |= answered
        with self._lock:
            ended, logged = self._failing.pop(threading.get_ident(), None), self._logged
            if ended is None or self._failing:
                return
            self._logged = 0.0
        if logged and answered:
            log.info("%s responds again after %s", self.display_address, format_duration(time.time() - ended.since))

    def _outage_error(self, error: BaseException, tries: str) -> errors.OutageError:
        text = f"Cannot reach the store: {errors.reason(error)} ({tries} in {self.display_address})"
        remedy = "check the address and the network"
        if self._patient:
            since = format_time(self._failing[threading.get_ident()].since)
            text += f", since {since}, and data.store.outage_minutes={self.config.outage_minutes:g}"
            remedy = "check the network and the server, then continue the run with --resume, or repeat the command"
        return errors.OutageError(f"{text}; {remedy}")

    def _is_retryable(self, error: BaseException) -> bool:
        """Whether an error is transient.  An I/O error of one file is not if the metadata are readable."""
        if not self.remote and isinstance(error, OSError) and error.errno == errno.EIO:
            for name in ("zarr.json", ".zarray", ".zgroup"):
                with suppress(OSError):
                    if (self._root / name).read_bytes():
                        return False
        return errors.is_outage(error, self.remote)


def open_object(address: str, config: StoreConfig) -> tuple[Source, str]:
    """Return the source of one object, a path or URL, and the object's key in it."""
    base, mark, query = address.partition("?") if is_remote(address) else (address, "", "")
    folder, _, key = base.rpartition("/")
    key = unquote(key) if address.startswith(("http://", "https://")) else key
    return Source(f"{folder}{mark}{query}", config), key
