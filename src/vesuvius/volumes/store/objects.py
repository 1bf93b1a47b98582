"""Reads objects and byte ranges once: files below a folder, or objects below a URL (through obstore)."""

import itertools
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import obstore
from obstore.exceptions import BaseError, GenericError
from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from vesuvius.config import StoreConfig
from vesuvius.errors import DataError, warn_once
from vesuvius.runlog.redact import redact
from vesuvius.volumes import errors
from vesuvius.volumes.store.credentials import authority, find_signing
from vesuvius.volumes.store.hub import HubFolder

_BUCKETS: dict[str, type[S3Store | GCSStore | AzureStore]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
_WEB = ("http", "https", "hf")  # plain web servers, which cannot list
_ENVIRONMENTS = {"s3": "AWS_*", "gs": "GOOGLE_*", "az": "AZURE_STORAGE_ACCOUNT_NAME and other AZURE_*"}
_reading_pid: int | None = None  # the process in which obstore's threads run
_LONGEST_REQUEST = 20  # times `timeout_s`, for a large object that keeps arriving


@dataclass(frozen=True)
class ByteRange:
    """Bytes start <= b < stop of an object; with a negative start and no stop, the last -start bytes."""

    start: int
    stop: int | None = None
    reserved: int = field(default=0, compare=False)  # bytes at the end of the object that the range must not touch
    version: str | None = None  # the object's stamp for which the range was computed; None = any

    def check(self, size: int) -> None:
        """Raise FetchError if an object of `size` bytes, minus the reserved ones, ends before the range."""
        if self.stop is not None and self.stop > size - self.reserved:
            index = f", the last {self.reserved} of which are its index" if self.reserved else ""
            raise errors.FetchError(f"bytes {self.start} to {self.stop} are outside an object of {size}{index}")

    def cut(self, data: bytes) -> bytes:
        """Cut the range out of the whole object.  Raises FetchError as `check`."""
        self.check(len(data))
        return data[self.start : self.stop]


class Answer(NamedTuple):
    data: bytes
    size: int  # bytes of the whole object
    stamp: str | None = None  # changes with the object's content; None if the store provides none
    lasting: bool = False  # whether the stamp is unique among all future versions too


class LocalFiles:
    """A folder.  Its methods raise OSError, with the system's errno, and FetchError."""

    can_list = True
    signing = ""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, key: str, byte_range: ByteRange | None) -> Answer:
        self.stamp(key)
        with (self._root / key).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if byte_range is None:
                return Answer(file.read(), size)
            byte_range.check(size)
            start, stop, _ = slice(byte_range.start, byte_range.stop).indices(size)
            file.seek(start)
            return Answer(file.read(max(stop - start, 0)), size)

    def stamp(self, key: str) -> None:
        """Raise FileNotFoundError if there is nothing; FetchError if there is something other than a file, or if the
        path ends at a broken link or at a file in place of a folder."""
        path = self._root / key
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            for part in (path, *path.parents):
                if part == self._root or part.is_dir():
                    break
                if part.exists():
                    raise errors.FetchError(f"{part} is a file, not a folder") from None
                if part.is_symlink():
                    raise errors.FetchError(f"{part} is a broken link") from None
            raise FileNotFoundError(path) from None
        if not stat.S_ISREG(mode):
            raise errors.FetchError(f"{path} is a {'folder' if stat.S_ISDIR(mode) else 'special file'}, not a file")

    def pages(self, prefix: str, after: str | None) -> Iterator[Iterable[str]]:
        """Keys of the files and folders below a prefix, in any order, always from the start; follows links to folders.

        Folders are included because one in place of a chunk is damage, not air.
        """
        for folder, folders, files in os.walk(self._root / prefix, onerror=_raise_unless_gone, followlinks=True):
            below = "" if folder == str(self._root) else f"{Path(folder).relative_to(self._root).as_posix()}/"
            yield (below + name for name in itertools.chain(files, folders))

    def list_one_level(self, prefix: str) -> tuple[list[str], list[str]]:
        files, folders = list[str](), list[str]()
        with os.scandir(self._root / prefix) as entries:
            for entry in entries:
                (folders if entry.is_dir() else files).append(f"{prefix}/{entry.name}".lstrip("/"))
        return files, folders


def _raise_unless_gone(error: OSError) -> None:
    """Ignore folders that are gone; other errors lose their errno: as an outage, a retry would restart the walk."""
    if not isinstance(error, FileNotFoundError):
        raise OSError(str(error)) from error


# ---- URLs


def is_remote(address: str) -> bool:
    return "://" in address


def display_address(address: str) -> str:
    """An address for messages: without the user, password and query of a web address, which may be secrets."""
    return redact(address, {}) if address.startswith(("http://", "https://")) else address


def last_name(address: str) -> str:
    return display_address(address).removesuffix("?***").rstrip("/").rpartition("/")[2]


def open_store(address: str, config: StoreConfig) -> obstore.store.ObjectStore:
    """Open the obstore store of a URL.  No I/O except in `find_signing`.

    Keys of s3, gs, az and hf are taken literally, without special characters.  A web address is sent as written: its
    query follows each object's name, its user and password become a header.

    Raises DataError: the scheme is not supported, the address is malformed, or credentials cannot be used.
    """
    scheme, _, rest = address.partition("://")
    if scheme not in (*_WEB, *_BUCKETS):
        raise DataError(
            f"Cannot open {address}: {scheme} is not {', '.join([*_WEB, *_BUCKETS])} in lower case; correct it, or "
            "copy what is there to one of them or to a folder"
        )
    signing = find_signing(address, config.anonymous)
    options: dict[str, Any] = {
        # obstore's own retries would not be counted, and would not cover an interrupted body.
        "retry_config": {"max_retries": 0},
        "client_options": {
            "timeout": timedelta(seconds=_LONGEST_REQUEST * config.timeout_s),
            "read_timeout": timedelta(seconds=config.timeout_s),
            "connect_timeout": timedelta(seconds=min(config.timeout_s, 10)),
            "allow_http": True,
            "pool_max_idle_per_host": str(config.requests),
            "default_headers": dict(signing.headers),
        },
    } | signing.options
    try:
        if scheme in _WEB:
            user, at, _ = authority(address).rpartition("@")
            path, question_mark, query = rest.removeprefix(user + at).replace("#", "%23").partition("?")
            url = f"{scheme}://{path.removesuffix('/')}{question_mark}{query}"
            return HTTPStore(HubFolder(rest).url if scheme == "hf" else url, **options)
        bucket, _, key = rest.partition("/")
        if not bucket or "" in key.split("/")[:-1]:  # which obstore would skip silently
            raise ValueError("an empty name between two slashes" if bucket else "no bucket")
        return _BUCKETS[scheme](bucket, prefix=key.removesuffix("/") or None, **options)
    except (BaseError, ValueError) as error:
        variables = f" and the variables {_ENVIRONMENTS[scheme]}" if scheme in _ENVIRONMENTS else ""
        raise DataError(
            f"Cannot open {display_address(address)}: {errors.reason(error)}; check the address{variables}"
        ) from error


class RemoteStore:
    """One store with a URL.  Thread-safe; no method retries."""

    def __init__(self, address: str, config: StoreConfig) -> None:
        self._opened = open_store(address, config)
        signing = find_signing(address, config.anonymous)
        self.signing = signing.words
        scheme, _, path = address.partition("://")
        self._hub = HubFolder(path, signing.headers, config.timeout_s) if scheme == "hf" else None
        self.can_list = scheme not in _WEB or scheme == "hf"  # plain web servers cannot
        self._name = display_address(address)
        self._has_suffixes = False if scheme == "az" else None  # whether it supports suffix ranges; None = unknown

    @property
    def _store(self) -> obstore.store.ObjectStore:
        """The store.  Raises RefusedError in a forked child of a process that has read: obstore would wait forever for
        its threads, which are not there."""
        global _reading_pid
        _reading_pid = _reading_pid or os.getpid()
        if _reading_pid != os.getpid():
            raise errors.RefusedError(
                f"Cannot read {self._name} in process {os.getpid()}: it was forked from process {_reading_pid}, which "
                "has read from the network; start workers with multiprocessing_context='spawn' (or 'forkserver')"
            )
        return self._opened

    def read(self, key: str, byte_range: ByteRange | None) -> Answer:
        """An object, or a range of it.  Raises FetchError if the object ends before the range."""
        if byte_range is not None and byte_range.start < 0:
            return self._read_end(key, byte_range)
        answer = self._get(key, byte_range)
        if byte_range is not None:
            byte_range.check(answer.size)
        return answer

    def stamp(self, key: str) -> str | None:
        """The stamp of an object.  Raises FileNotFoundError if it does not exist, else as `read`.

        Sends a GET of one byte, because servers answer HEAD with 403, 404, 405 or 501 for objects that they deliver.
        """
        try:
            return self._get(key, ByteRange(0, 1)).stamp
        except (BaseError, errors.ProtocolError) as error:
            # An empty object has no first byte, and some servers do not support ranges.
            if errors.status_of(error) not in (400, 416, 501) and not errors.is_protocol_error(error):
                raise
        return _stamp(obstore.get(self._store, key).meta)  # the body is not read

    def pages(self, prefix: str, after: str | None) -> Iterator[list[str]]:
        """Keys below a prefix (whole path segments), page by page, after a key; on the Hub also those of folders."""
        if self._hub is not None:
            yield from ([key for key, _ in page] for page in self._hub.pages(prefix, after))
            return
        for batch in obstore.list(self._store, prefix, offset=after, chunk_size=1000):
            yield [entry["path"] for entry in batch]

    def list_one_level(self, prefix: str) -> tuple[list[str], list[str]]:
        if self._hub is not None:
            entries = [entry for page in self._hub.pages(prefix, None, recursive=False) for entry in page]
            return [key for key, is_dir in entries if not is_dir], [key for key, is_dir in entries if is_dir]
        found = obstore.list_with_delimiter(self._store, prefix)
        return [entry["path"] for entry in found["objects"]], list(found["common_prefixes"])

    def _read_end(self, key: str, byte_range: ByteRange) -> Answer:
        """The last bytes of an object, located by its size if the server does not support suffix ranges.

        Servers refuse such ranges with many statuses, including 404: until one has succeeded, the error of the other
        way is the relevant one.
        """
        refused: Exception | None = None
        if self._has_suffixes is not False:
            try:
                answer = self._get(key, byte_range)
                self._has_suffixes = True
                return answer
            except (BaseError, FileNotFoundError, errors.ProtocolError) as error:
                if self._has_suffixes or (errors.status_of(error) is None and errors.is_outage(error, remote=True)):
                    raise
                refused = error
        size = self._get(key, ByteRange(0, 1)).size
        answer = self._get(key, ByteRange(max(size + byte_range.start, 0), size))
        # after an outage, suffixes are tried again
        if refused is not None and not errors.is_outage(refused, remote=True):
            self._has_suffixes = False
            warn_once(
                "%s does not support suffix ranges (%s): reading a shard index takes two requests",
                self._name,
                errors.reason(refused),
            )
        return answer

    def _get(self, key: str, byte_range: ByteRange | None) -> Answer:
        options: Any = {}
        if byte_range is not None:
            start, stop = byte_range.start, byte_range.stop
            options = {"range": {"suffix": -start} if stop is None else (start, stop)}
        try:
            found = obstore.get(self._store, key, options=options)
        except FileNotFoundError as error:
            if errors.status_of(error) == 405:  # obstore reports it as absent
                raise GenericError(str(error)) from None
            raise
        data, (first, end) = bytes(found.bytes()), found.range
        if len(data) != end - first:
            raise errors.ProtocolError(f"{len(data)} bytes instead of the {end - first} in Content-Range")
        return Answer(data, found.meta["size"], _stamp(found.meta), lasting=bool(found.meta["e_tag"]))


def _stamp(meta: Any) -> str | None:
    """The ETag, or else time of the last change and size; None without either (obstore then reports 1970)."""
    changed_s = meta["last_modified"].timestamp()
    return meta["e_tag"] or (f"{changed_s} {meta['size']}" if changed_s > 0 else None)
