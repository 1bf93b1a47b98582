"""Errors between a store and its voxels, and the meaning of the errors of obstore and the system."""

import errno
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from vesuvius.config import Triple
from vesuvius.errors import DataError, VesuviusError, one_line
from vesuvius.runlog.redact import redact
from vesuvius.runlog.units import format_time
from vesuvius.volumes.box import Box, format_box

# Transient HTTP statuses, including those of proxies in front of a server that is down.
_OUTAGE_STATUSES = {408, 425, 429, 500, 502, 503, 504, 509, 520, 521, 522, 523, 524, 529, 530}
# Transient network errors, in the words of obstore.
_OUTAGE_SIGNS = re.compile(
    r"kind: Timeout|TimedOut|dns error|Connection(Refused|Reset|Aborted)|BrokenPipe|NotConnected|Too many open files|"
    r"(Network|Host)(Unreachable|Down)|AddrNotAvailable|Incomplete(Message|Body)|UnexpectedEof|ChannelClosed|Canceled|"
    r"provider: (EndpointConnection|ConnectTimeout|ReadTimeout|ConnectionClosed|MetadataRetrieval)Error"  # of boto3
)
_NO_CREDENTIALS = re.compile(r"token request|get-access-token")  # obstore could not get any
# Errors of a network file system whose server is down, and of a process that is short of a resource for a while.
_OUTAGE_ERRNOS = {
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.ECONNRESET, errno.ECONNREFUSED),
    *(errno.EAGAIN, errno.ENFILE, errno.EMFILE),
}

# Why a connection to a running server fails: patterns in obstore's errors, and our words.
_MEANINGS = (
    (r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)", "its TLS certificate is not valid: {}"),
    (r"InvalidMessage", "the server does not use TLS"),
    (r"Parse\(\s*(?:Header\(\s*)?(\w+)", "its response is not HTTP: {}"),
    (r"RangeNotSupported", "status 200 for a range"),
    (r"IncompleteMessage", "the connection was closed without a response"),
    (r"IncompleteBody|kind: UnexpectedEof", "the connection was closed before the end of the body"),
)


@dataclass(frozen=True)
class Outage:
    since: float  # time of the first failure of the oldest failing read, seconds since 1970
    cause: str  # of that read's last failure
    address: str  # of the store

    def __str__(self) -> str:
        return f"{self.address} has not answered since {format_time(self.since)}: {self.cause}"


class FetchError(Exception):
    """An object is damaged: it is shorter than the requested range, or it is not a file."""


class ReplacedError(FetchError):
    """Part of an object comes from another version than the parts read before."""


class OutageError(DataError):
    """A store did not answer for `data.store.outage_minutes`."""


class RefusedError(DataError):
    """A store answers and refuses; a retry would not help."""


class ProtocolError(Exception):
    """A server's answer violates the protocol."""


class ClosedError(VesuviusError):
    """The source was closed by another thread before or during a read."""


class UnreadableChunkError(DataError):
    """A chunk is damaged or gone, after all retries.

    `volume`, `box`, `chunk` and `cause` go into the quarantine; the box contains all damaged voxels: the chunk's, or
    the shard's if its index is damaged.
    """

    def __init__(self, volume: str, region: Box, chunk: Triple, box: Box, cause: str) -> None:
        super().__init__(
            f"Cannot read chunk {list(chunk)} of volume {volume}, region {format_box(region)}: {cause}; restore the "
            "chunk from its source (`vesuvius volume verify` lists all such chunks)"
        )
        self.volume, self.box, self.chunk, self.cause = volume, box, chunk, cause


@contextmanager
def damage_seen(box: Box, volume_box: Callable[[Box], Box]) -> Iterator[None]:
    """Raise an UnreadableChunkError of an array in voxels of the volume, whose `box` was read; `volume_box` maps it."""
    try:
        yield
    except UnreadableChunkError as error:
        raise UnreadableChunkError(error.volume, box, error.chunk, volume_box(error.box), error.cause) from error


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error of obstore reports; None for other errors."""
    match = re.search(r"non-2xx status code: (\d{3})", str(error)) if isinstance(error, (BaseError, OSError)) else None
    return int(match[1]) if match else None


def is_outage(error: BaseException, remote: bool) -> bool:
    """Whether an error of a read is transient; of files on disk only if the mount was away.  Pure."""
    status = status_of(error)
    if status is not None:
        return status in _OUTAGE_STATUSES
    if isinstance(error, OSError):
        passes = isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)) or error.errno in _OUTAGE_ERRNOS
        return passes and not isinstance(error, (FileNotFoundError, PermissionError))
    return remote and isinstance(error, BaseError) and bool(_OUTAGE_SIGNS.search(str(error)))


def is_protocol_error(error: BaseException) -> bool:
    """Whether a server violated the protocol, as opposed to a refusal or an outage.  Pure."""
    ours = isinstance(error, ProtocolError)
    return ours or (isinstance(error, BaseError) and status_of(error) is None and not is_outage(error, remote=True))


def refusal(error: BaseException, key: str, address: str, remote: bool, signing: str = "") -> FetchError | RefusedError:
    """The error for a read that failed permanently; `signing` says how requests are signed, or why they are not."""
    what = f"{reason(error)} for {key} in {address}"
    if not remote:
        if isinstance(error, PermissionError):
            return RefusedError(f"Cannot read a file of the volume: {what}; correct its permissions")
        return FetchError(what)
    signing = f" ({signing})" if signing else ""
    if isinstance(error, PermissionDeniedError):
        text = f"The store forbids access to a chunk, though not to the metadata: {what}{signing}; "
        if address.startswith(("az://", "hf://")):
            return RefusedError(f"{text}renew the credentials, or use credentials that cover the chunk")
        return RefusedError(
            f"{text}renew the credentials, or use credentials that cover the chunk; if it may be absent (without "
            "s3:ListBucket, S3 reports that as 403), allow s3:ListBucket or set data.store.forbidden_is_absent=true"
        )
    status = status_of(error)
    if status == 416:
        return FetchError(what)
    if isinstance(error, UnauthenticatedError) or status == 400 or _NO_CREDENTIALS.search(str(error)):
        return RefusedError(f"The store refuses access: {what}{signing}; check the address and the credentials")
    return RefusedError(
        f"The server's response violates HTTP: {what}; check the address and anything between you and the server (a "
        "proxy, a certificate, AWS_REGION), or serve the volume with another server, such as nginx"
    )


def reason(error: BaseException) -> str:
    """An error in one line, without secrets that a server may have echoed.

    For errors of obstore, neither the preamble (address, duration) nor the dump of the error's structure is included,
    except for the system's message in it.
    """
    return redact(_message(error))


def _message(error: BaseException) -> str:
    text, _, dump = str(error).partition("Debug source:")
    words = one_line(re.sub(r"^.*Error performing \w+ \S+ in \S+ - |^Generic \w+ error: ", "", text.rstrip(" :\n")))
    if status_of(error) is not None:
        _, status, body = re.split(r"(non-2xx status code: \d+[^:]*)(?:: )?", text.rstrip(" :\n"), maxsplit=1)
        details = re.findall(r"<(?:title|Code|Message)>([^<]+)<", body, re.IGNORECASE) if "<" in body else [body]
        return one_line(f"Server returned {status}" + (f": {' '.join(details)}" if any(details) else ""))
    for sign, meaning in _MEANINGS:
        if match := re.search(sign, dump):
            return meaning.format(*match.groups())
    if "error sending request" not in words:
        return words
    causes = re.findall(r'(?:message|error): "([^"]+)"', dump)
    # After a redirect the request went to another address than the preamble names.
    target = re.search(r'ConnectError\(\s*"[^"]*",\s*([\[\]\w.:]+:\d+),', dump)
    at = f" by {target[1]}" if target and target[1] not in text else ""
    return causes[-1] + at if causes else f"no response in time{at}" if "TimedOut" in dump else words
