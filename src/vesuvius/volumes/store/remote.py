"""Objects behind a URL: read, looked for and listed once, in whichever way this server understands.

A server that answers otherwise than obstore demands is asked in another way at once, and from then on: ranges from the
end become ranges with a start, servers without ranges send whole objects, and `web.py` reads what obstore cannot read
from a web server at all.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from email.utils import format_datetime
from typing import Any

import obstore
from obstore.exceptions import BaseError, GenericError, NotSupportedError

from vesuvius.config import StoreConfig
from vesuvius.volumes.errors import (
    BrokenOffError,
    ProtocolError,
    RefusedError,
    is_outage,
    is_protocol_error,
    reason,
    status_of,
)
from vesuvius.volumes.store.byte_range import ByteRange, checked, cut
from vesuvius.volumes.store.credentials import Signing, find_signing
from vesuvius.volumes.store.object_store import is_web, open_store, shown_address, web_url
from vesuvius.volumes.store.web import Answer, WebServer, is_past

log = logging.getLogger(__name__)

# Objects up to this size are fetched whole where a server does not know byte ranges.
_WHOLE_BYTES_MAX = 64 * 2**20
# How obstore calls answers to a range that are none, or of another range.
_RANGE_ERRORS = re.compile(r"source: (NotPartial|NoContentRange|ParseContentRange|UnexpectedRange)")

_BREAK_OFF = re.compile("IncompleteBody|kind: UnexpectedEof")

_warned: set[tuple[str, str]] = set()

Listed = tuple[str, str]
"""Key of an object, and a text that changes with its content."""


class RemoteStore:
    """One store with a URL.  Its methods may be called from several threads, and try once.

    Attributes:
        signing: how requests are signed.
    """

    def __init__(self, address: str, config: StoreConfig) -> None:
        scheme = address.partition("://")[0]
        self.signing = find_signing(scheme, config.anonymous) if scheme in ("s3", "gs") else Signing("")
        self._store = open_store(address, config, self.signing)
        self._name = shown_address(address)
        self._web = WebServer(*web_url(address), config.timeout_s) if is_web(address) else None
        self._web_reads = 0  # of what obstore could not read
        self._has_suffixes: bool | None = None  # ranges from the end; None before one has come
        self._refusals = 0  # of such ranges
        self._broken = set[str]()  # keys of objects whose body broke off when it was last read
        self._lock = threading.Lock()
        self._whole: tuple[str, Answer] | None = None
        self._whole_lock = threading.Lock()

    @property
    def can_list(self) -> bool:
        """Whether the store can list its objects, which plain web servers cannot."""
        return self._web is None

    def read(self, key: str, byte_range: ByteRange | None) -> Answer:
        """An object, or a range of it.

        Raises:
            FetchError: the object ends before the range.
            RefusedError: the server sends large objects as a whole only.
            FileNotFoundError, ProtocolError, BaseError, OSError: there is none, or it did not come.
        """
        if byte_range is None:
            return self._get(key, None)
        if byte_range.start < 0:
            return self._read_end(key, byte_range)
        try:
            answer = self._get(key, byte_range)
        except NotSupportedError as error:
            return self._cut_from_whole(key, byte_range, reason(error))
        least = byte_range.start + len(answer.data) + byte_range.reserved
        checked(answer.data, byte_range, least if answer.size is None else answer.size)
        return answer

    def forget(self, key: str) -> None:
        """Have an object fetched again of which a copy may be kept."""
        with self._whole_lock:
            if self._whole is not None and self._whole[0] == key:
                self._whole = None

    def stamp(self, key: str) -> str | None:
        """The stamp of an object.  Raises FileNotFoundError where there is no such object, else as `read`.

        A GET of one byte, as reads are GETs: servers answer HEAD with 403, 404, 405 or 501 for what they deliver.
        """
        try:
            return self._get(key, ByteRange(0, 1)).stamp
        except NotSupportedError:  # it is there, and is not sent in parts
            with suppress(BaseError):
                return _stamp(obstore.get(self._store, key).meta)  # the body is not read
        except BaseError as error:
            if status_of(error) in (400, 501):  # the server knows no ranges
                return _stamp(obstore.get(self._store, key).meta)
            if status_of(error) != 416:  # an empty object has no first byte
                raise
        return None

    def pages(self, prefix: str, after: str | None) -> Iterator[list[Listed]]:
        """What lies below a prefix (whole path segments) in order of its keys, page by page, from behind a key on."""
        for batch in obstore.list(self._store, prefix, offset=after, chunk_size=1000):
            yield list(map(_listed, batch))

    def list_one_level(self, prefix: str) -> tuple[list[Listed], list[str]]:
        """Objects and prefixes one segment below `prefix`."""
        found = obstore.list_with_delimiter(self._store, prefix)
        return list(map(_listed, found["objects"])), sorted(found["common_prefixes"])

    def _read_end(self, key: str, byte_range: ByteRange) -> Answer:
        """The last bytes of an object, found by its size where the server does not count from the end."""
        refused = ""
        if self._has_suffixes is not False and not self._asks_web:
            try:
                answer = self._get_by_obstore(key, byte_range)
            except (BaseError, FileNotFoundError, ProtocolError) as error:
                # Servers refuse such ranges with 400, 416, 501 and other statuses: what is not known to work is asked
                # in the other way, whose error is the true one.
                has_status = status_of(error) is not None
                if not is_protocol_error(error) and not (has_status and self._has_suffixes is None):
                    raise
                refused = reason(error)
                # A server that is overloaded may have refused this one alone.
                self._refusals += 1 if has_status and is_outage(error, remote=True) else 2
            else:
                self._has_suffixes = True
                return answer
        try:
            size = self._size(key)
            last = ByteRange(max(size + byte_range.start, 0), size)
            answer = self._get(key, last) if size else Answer(b"", 0, None, False)
        except NotSupportedError as error:
            return self._cut_from_whole(key, byte_range, reason(error))
        if self._has_suffixes is not False and self._refusals > 1 and refused and size:
            self._has_suffixes = False
            warn_once(
                "%s does not send the last bytes of an object (%s): two requests are needed for each shard's index",
                self._name,
                refused,
            )
        return answer

    def _size(self, key: str) -> int:
        """Bytes of an object.  Raises NotSupportedError where the server does not tell, else as `read`."""
        try:
            size = self._get(key, ByteRange(0, 1)).size
            return int(obstore.head(self._store, key)["size"]) if size is None else size
        except (BaseError, ProtocolError) as error:
            if status_of(error) == 416:  # an empty object has no first byte
                return 0
            if is_protocol_error(error):
                raise NotSupportedError(reason(error)) from error
            raise

    @property
    def _asks_web(self) -> bool:
        """Whether obstore is not asked any more: what it could not read once may have been an accident."""
        return self._web_reads > 1

    def _get(self, key: str, byte_range: ByteRange | None, most: int | None = None) -> Answer:
        """An object or a range of it that does not count from the end.

        Raises NotSupportedError where ranges are ignored, RefusedError for more than `most` bytes, else as `read`.
        """
        error: BaseError | ProtocolError | None = None
        if not self._asks_web:
            try:
                return self._get_by_obstore(key, byte_range, most)
            except (BaseError, ProtocolError) as first:
                if isinstance(first, NotSupportedError) or not is_protocol_error(first):
                    raise
                if self._web is None:
                    if byte_range is not None and _RANGE_ERRORS.search(str(first)):
                        raise NotSupportedError(reason(first)) from first
                    raise
                error = first
        assert self._web is not None
        answer = self._web.read(key, byte_range, most)
        self._check_size(key, len(answer.data), most)
        with self._lock:
            self._web_reads += 1
            say = self._web_reads == 2
        if say and error is not None:
            warn_once(
                "%s answers in an unusual way (%s): it is read over a connection for each request, which is slower; a "
                "server that sends Content-Length and Content-Range, such as nginx, is faster",
                self._name,
                reason(error),
            )
        return answer

    def _get_by_obstore(self, key: str, byte_range: ByteRange | None, most: int | None = None) -> Answer:
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
        self._check_size(key, found.meta["size"], most)
        data, (start, stop) = self._body(key, found), found.range
        if len(data) != stop - start:
            raise ProtocolError(f"{len(data)} bytes where Content-Range promises {stop - start}")
        stamp, lasting = _stamp(found.meta), bool(found.meta["e_tag"])
        if stamp is not None and not lasting:
            lasting = is_past(found.meta["last_modified"].timestamp(), self._web.now(key) if self._web else time.time())
        return Answer(data, found.meta["size"], stamp, lasting)

    def _body(self, key: str, found: Any) -> bytes:
        """Raises BrokenOffError for one that breaks off, if that of the last try did so too, else BaseError."""
        data, in_parts = bytearray(), key in self._broken  # slower, and tells how much has come
        try:
            if not in_parts:
                return bytes(found.bytes())
            for part in found.stream(min_chunk_size=1):
                data += part
        except BaseError as error:
            if not _BREAK_OFF.search(str(error)):
                raise
            self._broken.add(key)
            if in_parts:
                raise BrokenOffError(len(data)) from error
            raise
        self._broken.discard(key)
        return bytes(data)

    def _cut_from_whole(self, key: str, byte_range: ByteRange, why: str) -> Answer:
        """A range of an object of a server that does not know ranges; the last object is kept, as more parts of it will
        be asked for."""
        with self._whole_lock:
            if self._whole is not None and self._whole[0] == key:
                return self._whole[1]._replace(data=cut(self._whole[1].data, byte_range))
            answer = self._get(key, None, _WHOLE_BYTES_MAX)
            if self._whole is None:
                warn_once(
                    "%s ignores the Range header (%s): whole shards are fetched for a few of their chunks; a server "
                    "that supports Range, such as nginx, is faster",
                    self._name,
                    why,
                )
            self._whole = (key, answer)
            return answer._replace(data=cut(answer.data, byte_range))

    def _check_size(self, key: str, size: int, most: int | None) -> None:
        if most is not None and size > most:
            raise RefusedError(
                f"a volume with large shards is read in byte ranges; got a server that ignores the Range header and "
                f"sends more than {most / 2**20:.0f} MiB of {key} in {self._name}; serve the volume with a server that "
                "supports Range, such as nginx, or copy it to a disk"
            )


def warn_once(text: str, address: str, *arguments: object) -> None:
    """Log a warning about an address, unless this process has."""
    if (text, address) not in _warned:
        _warned.add((text, address))
        log.warning(text, address, *arguments)


def _stamp(meta: Any) -> str | None:
    """The ETag, or the time of the last change, which obstore gives as 1970 where there is none."""
    changed = meta["last_modified"].timestamp() > 0
    return meta["e_tag"] or (f"{format_datetime(meta['last_modified'], True)} {meta['size']}" if changed else None)


def _listed(entry: Any) -> Listed:
    return entry["path"], f"{entry['e_tag']} {entry['last_modified']} {entry['size']}"
