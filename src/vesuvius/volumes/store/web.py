"""Reads from web servers whose answers obstore refuses: streams of unknown length, ranges of unknown totals, bad dates.

Slower than obstore, as every request takes a connection of its own; what it returns is checked as strictly.
"""

from __future__ import annotations

import http.client
import re
import ssl
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit, urlunsplit

from obstore.exceptions import BaseError, GenericError, NotSupportedError, PermissionDeniedError, UnauthenticatedError

from vesuvius.volumes.errors import BrokenOffError, ProtocolError
from vesuvius.volumes.store.byte_range import ByteRange


class Answer(NamedTuple):
    """What was read of an object."""

    data: bytes
    size: int | None  # bytes of the whole object, if the server tells
    stamp: str | None  # changes with the content of the object; None where the server tells nothing of the kind
    lasting: bool  # whether the stamp also differs from that of any version to come


def is_past(changed: float, now: float) -> bool:
    """Whether an object's time of change, in seconds, tells it from those that replace it from `now` on."""
    return now - changed >= 2  # whole seconds, both


# Characters that stay as they are in an address; `%` because it is escaped already.
_KEPT_IN_URLS = "%/:?#[]@!$&'()*+,;=~"
_KEPT_IN_KEYS = "/:@!$&'()*+,;=~"
_HANDLERS = (
    urllib.request.ProxyHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPRedirectHandler,
    urllib.request.HTTPErrorProcessor,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.UnknownHandler,
)


class WebServer:
    """The objects below one URL.

    Args:
        headers: sent to this server, and to no other one that it redirects to.
    """

    def __init__(self, url: str, headers: dict[str, str], timeout_s: float) -> None:
        parts = urlsplit(url)
        self._base = quote(urlunsplit(parts._replace(query="")), _KEPT_IN_URLS)
        self._query = "?" + quote(parts.query, _KEPT_IN_URLS) if parts.query else ""
        self._headers = headers
        self._opener = urllib.request.OpenerDirector()  # no ftp and no files, whereto a redirect could lead
        for handler in _HANDLERS:
            self._opener.add_handler(handler())
        self._timeout_s = timeout_s
        self._ahead_s: float | None = None  # of its clock before ours; None before an answer said so

    def read(self, key: str, byte_range: ByteRange | None, most: int | None = None) -> Answer:
        """An object or a range of it.

        Args:
            byte_range: its start is not negative.
            most: bytes to read at most of a body of unknown length.

        Raises:
            NotSupportedError: the server ignores ranges, or does not say which one it sends.
            ProtocolError: what came is not an answer, or its end cannot be told.
            Exception: as obstore for statuses; OSError where the network fails.
        """
        headers = {}
        if byte_range is not None:
            headers["Range"] = f"bytes={byte_range.start}-{'' if byte_range.stop is None else byte_range.stop - 1}"
        with self._open(key, headers) as answer:
            length, size = (None, None) if byte_range is None else _range_of(answer, byte_range)
            if byte_range is None and answer.status != 200:
                raise ProtocolError(f"status {answer.status} for the whole of an object")
            if answer.chunked:
                data = answer.read() if most is None else answer.read(most + 1)
            elif answer.length is not None:
                data = answer.read() if most is None else answer.read(most + 1)
                if answer.length and (most is None or len(data) <= most):
                    raise BrokenOffError(len(data))
            else:
                given = answer.headers.get("Content-Length")
                raise ProtocolError(
                    "an answer with neither Content-Length nor chunks, whose end cannot be told from a lost connection"
                    if given is None
                    else f"Content-Length: {given}"
                )
        if length not in (None, len(data)):
            raise ProtocolError(f"{len(data)} bytes with Content-Range: {answer.headers['Content-Range']}")
        tag, changed = answer.headers.get("ETag"), answer.headers.get("Last-Modified")
        size = len(data) if byte_range is None else size
        if tag or not changed:
            return Answer(data, size, tag or None, bool(tag))
        when = _seconds(changed)
        return Answer(data, size, f"{changed} {size}", when is not None and is_past(when, self.now(key)))

    def now(self, key: str) -> float:
        """Seconds since 1970 by the server's clock, or by ours if it does not tell.

        Args:
            key: the object that is asked for where no answer has come yet.
        """
        if self._ahead_s is None:
            with suppress(BaseError, FileNotFoundError, ProtocolError), self._open(key, {"Range": "bytes=0-0"}):
                pass  # any answer has a date
        return time.time() + (self._ahead_s or 0)

    def _note_clock(self, headers: Any) -> None:
        if (date := _seconds(headers.get("Date") or "")) is not None:
            self._ahead_s = date - time.time()

    @contextmanager
    def _open(self, key: str, headers: dict[str, str]) -> Iterator[Any]:
        url = f"{self._base}/{quote(key, _KEPT_IN_KEYS)}{self._query}"
        request = urllib.request.Request(url, headers={"Accept-Encoding": "identity", **headers})
        for name, value in self._headers.items():
            request.add_unredirected_header(name, value)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                self._note_clock(answer.headers)
                yield answer
        except HTTPError as error:
            with error:
                self._note_clock(error.headers)
                raise _of_status(error) from None
        except URLError as error:
            cause = error.reason
            if isinstance(cause, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
                raise ConnectionError(str(cause)) from None
            if isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError):
                raise cause from None
            raise ProtocolError(str(cause)) from None
        except http.client.RemoteDisconnected:
            raise
        except http.client.IncompleteRead as error:
            raise BrokenOffError(len(error.partial)) from None
        except http.client.HTTPException as error:
            raise ProtocolError(f"not HTTP: {type(error).__name__} {error}".strip()) from None


def _seconds(date: str) -> float | None:
    """Seconds since 1970 of a date in a header; None where it is none."""
    try:
        return parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None


def _of_status(error: HTTPError) -> Exception:
    text = f"Server returned non-2xx status code: {error.code} {error.reason}"
    match error.code:
        case 401:
            return UnauthenticatedError(text)
        case 403:
            return PermissionDeniedError(text)
        case 404:
            return FileNotFoundError(text)
        case code if 300 <= code < 400:
            return ProtocolError(f"a redirect that leads nowhere: {code} {error.reason}")
    return GenericError(text)


def _range_of(answer: Any, byte_range: ByteRange) -> tuple[int, int | None]:
    """Bytes that an answer to a range holds, and of the whole object if the server tells."""
    given = answer.headers.get("Content-Range", "").strip()
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", given)
    if answer.status != 206 or match is None:
        raise NotSupportedError(f"status {answer.status}, Content-Range: {given or 'none'}")
    start, stop, size = int(match[1]), int(match[2]) + 1, None if match[3] == "*" else int(match[3])
    if start != byte_range.start or (byte_range.stop is not None and stop > byte_range.stop):
        raise NotSupportedError(f"Content-Range: {given} for bytes {byte_range.start} to {byte_range.stop}")
    return stop - start, size
