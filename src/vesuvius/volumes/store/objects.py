"""Objects and parts of them: files below a folder, or what lies behind a URL, by obstore.  Each is read once."""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import obstore
from obstore.exceptions import BaseError, GenericError
from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from vesuvius.config import StoreConfig
from vesuvius.errors import DataError, warn_once
from vesuvius.runlog.redact import redact
from vesuvius.volumes.errors import (
    FetchError,
    ProtocolError,
    is_outage,
    is_protocol_error,
    reason,
    status_of,
)
from vesuvius.volumes.store.credentials import authority, find_signing

_BUCKETS: dict[str, type[S3Store | GCSStore | AzureStore]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
_WEB = ("http", "https", "hf")  # plain web servers, which cannot list
_ENVIRONMENTS = {
    "s3": " or the AWS_*",
    "gs": " or the GOOGLE_*",
    "az": " or AZURE_STORAGE_ACCOUNT_NAME and other AZURE_*",
}
_LONGEST_REQUEST = 20  # times `timeout_s`, for a large object that keeps arriving


@dataclass(frozen=True)
class ByteRange:
    """Bytes start <= b < stop of an object; a negative start and no stop are the last -start bytes."""

    start: int
    stop: int | None = None
    reserved: int = field(default=0, compare=False)  # bytes at the end of the object that the range must not touch

    def check(self, size: int) -> None:
        """Raises FetchError where an object of `size` bytes, less what is reserved, ends before the range does."""
        if self.stop is not None and self.stop > size - self.reserved:
            kept = f", of which the last {self.reserved} are its index" if self.reserved else ""
            raise FetchError(f"bytes {self.start} to {self.stop} of an object of {size}{kept}")

    def cut(self, data: bytes) -> bytes:
        """These bytes of a whole object.  Raises FetchError as `check`."""
        self.check(len(data))
        return data[self.start : self.stop]


class Answer(NamedTuple):
    """What was read of an object."""

    data: bytes
    size: int  # bytes of the whole object
    stamp: str | None = None  # changes with the content of the object; None where the store tells nothing of the kind
    lasting: bool = False  # whether the stamp also differs from that of any version to come


class LocalFiles:
    """A folder.  Its methods raise OSError, with the system's number, and FetchError."""

    can_list = True
    signing = ""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, key: str, byte_range: ByteRange | None) -> Answer:
        """A file, or a range of it."""
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
        """Raises FileNotFoundError where there is nothing, FetchError for what is there and no file, or where the path
        ends at a broken link or at a file in place of a folder."""
        path = self._root / key
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            for place in (path, *path.parents):
                if place == self._root or place.is_dir():
                    break
                if place.exists():
                    raise FetchError(f"a file in place of the folder {place}") from None
                if place.is_symlink():
                    raise FetchError(f"a broken link, {place}") from None
            raise FileNotFoundError(path) from None
        if not stat.S_ISREG(mode):
            raise FetchError(f"{'a folder' if stat.S_ISDIR(mode) else 'a special file'} in place of the file {path}")

    def pages(self, prefix: str, after: str | None) -> Iterator[Iterable[str]]:
        """Keys of the files and folders (one in a chunk's place is no air) below a prefix, in any order and from the
        start; links to folders are followed."""
        for folder, folders, files in os.walk(self._root / prefix, onerror=_raise_unless_gone, followlinks=True):
            below = "" if folder == str(self._root) else f"{Path(folder).relative_to(self._root).as_posix()}/"
            yield (below + name for name in itertools.chain(files, folders))

    def list_one_level(self, prefix: str) -> tuple[list[str], list[str]]:
        """Keys of the files, and of the folders, one segment below `prefix`."""
        files, folders = list[str](), list[str]()
        with os.scandir(self._root / prefix) as entries:
            for entry in entries:
                (folders if entry.is_dir() else files).append(f"{prefix}/{entry.name}".lstrip("/"))
        return files, folders


def _raise_unless_gone(error: OSError) -> None:
    """Below a folder that is not there, or not any more, no keys are listed.  Without the system's number nothing is an
    outage: a walk is not tried again, as it would begin anew."""
    if not isinstance(error, FileNotFoundError):
        raise OSError(str(error)) from error


# ---- behind a URL


def is_remote(address: str) -> bool:
    """Whether an address is a URL rather than a folder."""
    return "://" in address


def shown_address(address: str) -> str:
    """An address as messages name it: of web servers without user, password and query, which may be secrets."""
    return redact(address, {}) if address.startswith(("http://", "https://")) else address


def last_name(address: str) -> str:
    """The last segment of an address or of a folder's path."""
    return shown_address(address).removesuffix("?***").rstrip("/").rpartition("/")[2]


def open_store(address: str, config: StoreConfig) -> obstore.store.ObjectStore:
    """The obstore store of a URL.  No I/O but what `find_signing` does.

    Keys of s3, gs, az and hf are taken literally: no character of theirs is special.  A web address is sent as it is
    written: its query follows the name of each object, its user and password become a header.

    Raises:
        DataError: a scheme that is not supported, an address that is not one, or credentials that cannot be used.
    """
    scheme, _, rest = address.partition("://")
    if scheme not in (*_WEB, *_BUCKETS):
        raise DataError(
            f"a volume is a folder or an address of {', '.join([*_WEB, *_BUCKETS])}; got {address}; copy it to one of "
            "them"
        )
    signing = find_signing(address, config.anonymous)
    options: dict[str, Any] = {
        # Ours: the retries of obstore itself would neither be counted nor cover a body that breaks off.
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
            return HTTPStore(_hub_url(rest) if scheme == "hf" else url, **options)
        bucket, _, key = rest.partition("/")
        if not bucket or "" in key.split("/")[:-1]:  # obstore would leave it out
            raise ValueError("an empty name between two slashes" if bucket else "no bucket")
        return _BUCKETS[scheme](bucket, prefix=key.removesuffix("/") or None, **options)
    except (BaseError, ValueError) as error:
        environment = f",{_ENVIRONMENTS[scheme]} environment" if scheme in _ENVIRONMENTS else ""
        raise DataError(
            f"Cannot open {shown_address(address)}: {reason(error)}; correct the address{environment}"
        ) from error


def _hub_url(path: str) -> str:
    """Where the Hub serves what lies below hf://`path`.  Raises ValueError for what is no path of a data set."""
    match = re.fullmatch(r"datasets/([^/@]+/[^/@]+)(?:@(refs/(?:pr|convert)/[^/]+|[^/]+))?(/.*)?", path, re.DOTALL)
    if match is None:
        raise ValueError("it is not hf://datasets/OWNER/NAME[@REVISION]/PATH")
    name, revision, key = match.groups("")
    hub = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    return f"{hub}/datasets/{name}/resolve/{quote(unquote(revision or 'main'), '')}{quote(key).removesuffix('/')}"


class RemoteStore:
    """One store with a URL.  Its methods may be called from several threads, and try once.

    Attributes:
        signing: how requests are signed.
        can_list: whether the store can list its objects, which plain web servers cannot.
    """

    def __init__(self, address: str, config: StoreConfig) -> None:
        self._store = open_store(address, config)
        self.signing = find_signing(address, config.anonymous).words
        scheme = address.partition("://")[0]
        self.can_list = scheme not in _WEB
        self._name = shown_address(address)
        self._has_suffixes = False if scheme == "az" else None  # ranges from the end; None before one was asked for

    def read(self, key: str, byte_range: ByteRange | None) -> Answer:
        """An object, or a range of it.  Raises FetchError where the object ends before the range does."""
        if byte_range is not None and byte_range.start < 0:
            return self._read_end(key, byte_range)
        answer = self._get(key, byte_range)
        if byte_range is not None:
            byte_range.check(answer.size)
        return answer

    def stamp(self, key: str) -> str | None:
        """The stamp of an object.  Raises FileNotFoundError where there is no such object, else as `read`.

        A GET of one byte, as reads are GETs: servers answer HEAD with 403, 404, 405 or 501 for what they deliver.
        """
        try:
            return self._get(key, ByteRange(0, 1)).stamp
        except (BaseError, ProtocolError) as error:
            # An empty object has no first byte, and some servers know no ranges.
            if status_of(error) not in (400, 416, 501) and not is_protocol_error(error):
                raise
        return _stamp(obstore.get(self._store, key).meta)  # the body is not read

    def pages(self, prefix: str, after: str | None) -> Iterator[list[str]]:
        """Keys below a prefix (whole path segments) in their order, page by page, from behind a key on."""
        for batch in obstore.list(self._store, prefix, offset=after, chunk_size=1000):
            yield [entry["path"] for entry in batch]

    def list_one_level(self, prefix: str) -> tuple[list[str], list[str]]:
        """Keys and prefixes one segment below `prefix`."""
        found = obstore.list_with_delimiter(self._store, prefix)
        return [entry["path"] for entry in found["objects"]], list(found["common_prefixes"])

    def _read_end(self, key: str, byte_range: ByteRange) -> Answer:
        """The last bytes of an object, found by its size where the server does not count from the end.

        Servers refuse such ranges with many statuses, 404 among them: before one has come, the other way's error is
        the true one.
        """
        refused: Exception | None = None
        if self._has_suffixes is not False:
            try:
                answer = self._get(key, byte_range)
                self._has_suffixes = True
                return answer
            except (BaseError, FileNotFoundError, ProtocolError) as error:
                if self._has_suffixes or (status_of(error) is None and is_outage(error, remote=True)):
                    raise
                refused = error
        size = self._get(key, ByteRange(0, 1)).size
        answer = self._get(key, ByteRange(max(size + byte_range.start, 0), size))
        if refused is not None and not is_outage(refused, remote=True):  # those may pass: it is asked for again
            self._has_suffixes = False
            warn_once(
                "%s does not send the last bytes of an object (%s): two requests are needed for each shard's index",
                self._name,
                reason(refused),
            )
        return answer

    def _get(self, key: str, byte_range: ByteRange | None) -> Answer:
        wanted: Any = None
        match byte_range:
            case ByteRange(start, int(stop)):
                wanted = (start, stop)
            case ByteRange(start):
                wanted = {"suffix": -start} if start < 0 else {"offset": start}
        try:
            found = obstore.get(self._store, key, options={"range": wanted} if wanted else None)
        except FileNotFoundError as error:
            if status_of(error) == 405:  # obstore takes it for an absence
                raise GenericError(str(error)) from None
            raise
        data, (start, stop) = bytes(found.bytes()), found.range
        if len(data) != stop - start:
            raise ProtocolError(f"{len(data)} bytes where Content-Range promises {stop - start}")
        return Answer(data, found.meta["size"], _stamp(found.meta), lasting=bool(found.meta["e_tag"]))


def _stamp(meta: Any) -> str | None:
    """The ETag, or time of the last change (1970 where there is none) and size."""
    changed_s = meta["last_modified"].timestamp()
    return meta["e_tag"] or (f"{changed_s} {meta['size']}" if changed_s > 0 else None)
