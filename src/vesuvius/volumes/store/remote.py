"""Objects behind a URL, by obstore: read, looked for and listed once."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from email.utils import format_datetime
from typing import Any, NamedTuple

import obstore
from obstore.exceptions import BaseError, GenericError

from vesuvius.config import StoreConfig
from vesuvius.volumes.errors import (
    BREAK_OFF,
    BrokenOffError,
    ProtocolError,
    is_outage,
    is_protocol_error,
    reason,
    status_of,
)
from vesuvius.volumes.store.byte_range import ByteRange, checked
from vesuvius.volumes.store.credentials import Signing, find_signing
from vesuvius.volumes.store.object_store import is_web, open_store, shown_address

log = logging.getLogger(__name__)

# An object without an ETag is known by its time of change: whole seconds of a clock that may differ from ours.
_SETTLED_S = 60.0

_warned: set[tuple[str, str]] = set()


class Answer(NamedTuple):
    """What was read of an object."""

    data: bytes
    size: int  # bytes of the whole object
    stamp: str | None  # changes with the content of the object; None where the server tells nothing of the kind
    lasting: bool  # whether the stamp also differs from that of any version to come


class RemoteStore:
    """One store with a URL.  Its methods may be called from several threads, and try once.

    Attributes:
        signing: how requests are signed.
        can_list: whether the store can list its objects, which plain web servers cannot.
    """

    def __init__(self, address: str, config: StoreConfig) -> None:
        scheme = address.partition("://")[0]
        self.signing = find_signing(scheme, config.anonymous) if scheme in ("s3", "gs") else Signing("")
        self.can_list = not is_web(address)
        self._store = open_store(address, config, self.signing)
        self._name = shown_address(address)
        self._broken: set[str] = set()  # keys of bodies that broke off at the last try
        self._has_suffixes: bool | None = None  # ranges from the end; None before one was asked for

    def read(self, key: str, byte_range: ByteRange | None) -> Answer:
        """An object, or a range of it.

        Raises:
            FetchError: the object ends before the range.
            FileNotFoundError, ProtocolError, BaseError, OSError: there is none, or it did not come.
        """
        if byte_range is None:
            return self._get(key, None)
        if byte_range.start < 0:
            return self._read_end(key, byte_range)
        answer = self._get(key, byte_range)
        checked(answer.data, byte_range, answer.size)
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
        return [entry["path"] for entry in found["objects"]], sorted(found["common_prefixes"])

    def _read_end(self, key: str, byte_range: ByteRange) -> Answer:
        """The last bytes of an object, found by its size where the server does not count from the end.

        Servers refuse such ranges with many statuses, 404 among them: before one has come, the other way's error is
        the true one.
        """
        refused: Exception | None = None
        if self._has_suffixes is not False:
            try:
                answer = self._get(key, byte_range)
            except (BaseError, FileNotFoundError, ProtocolError) as error:
                if self._has_suffixes or (status_of(error) is None and is_outage(error, remote=True)):
                    raise
                refused = error
            else:
                self._has_suffixes = True
                return answer
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
        data, (start, stop), stamp = self._body(key, found), found.range, _stamp(found.meta)
        if len(data) != stop - start:
            raise ProtocolError(f"{len(data)} bytes where Content-Range promises {stop - start}")
        settled = time.time() - found.meta["last_modified"].timestamp() >= _SETTLED_S
        return Answer(data, found.meta["size"], stamp, stamp is not None and (bool(found.meta["e_tag"]) or settled))

    def _body(self, key: str, found: Any) -> bytes:
        """Raises BrokenOffError for one that breaks off, if that of the last try did so too, else BaseError."""
        data, in_parts = bytearray(), key in self._broken  # slower, and tells how much has come
        try:
            if not in_parts:
                return bytes(found.bytes())
            for part in found.stream(min_chunk_size=1):
                data += part
        except BaseError as error:
            if not BREAK_OFF.search(str(error)):
                raise
            self._broken.add(key)
            if in_parts:
                raise BrokenOffError(len(data)) from error
            raise
        self._broken.discard(key)
        return bytes(data)


def warn_once(text: str, address: str, *arguments: object) -> None:
    """Log a warning about an address, unless this process has."""
    if (text, address) not in _warned:
        _warned.add((text, address))
        log.warning(text, address, *arguments)


def _stamp(meta: Any) -> str | None:
    """The ETag, or the time of the last change, which obstore gives as 1970 where there is none."""
    changed = meta["last_modified"].timestamp() > 0
    return meta["e_tag"] or (f"{format_datetime(meta['last_modified'], True)} {meta['size']}" if changed else None)
