"""What goes wrong between a store and voxels: our errors, and what those of obstore and of the system mean."""

from __future__ import annotations

import errno
import re
import socket

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from vesuvius.config import Triple
from vesuvius.errors import DataError, VesuviusError, one_line
from vesuvius.runlog.redact import redact
from vesuvius.volumes.box import Box, format_box

# Statuses that pass: those of HTTP, and of proxies in front of a server that is away.
_OUTAGE_STATUSES = {408, 425, 429, 500, 502, 503, 504, 509, 520, 521, 522, 523, 524, 529, 530}
# The same of the network, in the words of obstore's errors.
_OUTAGE_SIGNS = re.compile(
    r"kind: Timeout|TimedOut|dns error|Connection(Refused|Reset|Aborted)|BrokenPipe|NotConnected|Too many open files|"
    r"(Network|Host)(Unreachable|Down)|AddrNotAvailable|Incomplete(Message|Body)|UnexpectedEof|ChannelClosed|Canceled|"
    r"provider: (EndpointConnection|ConnectTimeout|ReadTimeout|ConnectionClosed|MetadataRetrieval)Error"  # of boto3
)
_NO_CREDENTIALS = re.compile(r"token request|get-access-token")  # obstore could not get any
# What a network file system says while its server is away, and a process that is short of something for a while.
_OUTAGE_ERRNOS = {
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.ECONNRESET, errno.ECONNREFUSED),
    *(errno.EAGAIN, errno.ENFILE, errno.EMFILE),
}

# What a connection fails of where the server is there, in the words of obstore's errors, and in ours.
_MEANINGS = (
    (r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)", "its TLS certificate is not valid: {}"),
    (r"InvalidMessage", "it does not speak TLS"),
    (r"Parse\(\s*(?:Header\(\s*)?(\w+)", "its answer is not HTTP: {}"),
    (r"RangeNotSupported", "status 200 for a range"),
    (r"IncompleteMessage", "the connection was closed without an answer"),
    (r"IncompleteBody|kind: UnexpectedEof", "the connection was closed before the end of the body"),
)


class FetchError(Exception):
    """An object is damaged: it is too short for what is asked of it, or no file lies in its place."""


class ReplacedError(FetchError):
    """A part of an object is of another version than those that were read before."""


class OutageError(DataError):
    """A store has not answered for `data.store.outage_minutes`."""


class RefusedError(DataError):
    """A store answers, and refuses: trying again would not help."""


class ProtocolError(Exception):
    """A server answers, and its answer breaks the protocol."""


class ClosedError(VesuviusError):
    """A source was closed, by whoever ends the stream, while another thread read from it, or before."""


class UnreadableChunkError(DataError):
    """A chunk whose bytes are damaged, or gone, after all tries.

    `volume`, `box`, `chunk` and `cause` are for the quarantine; the box holds all voxels that are damaged: the chunk's,
    or all of its shard's where the index of the shard is damaged.
    """

    def __init__(self, volume: str, region: Box, chunk: Triple, box: Box, cause: str) -> None:
        super().__init__(
            f"every chunk of a volume must be readable; got {cause} in volume {volume}, region {format_box(region)}, "
            f"chunk {list(chunk)}; restore the chunk from its source (`vesuvius volume verify` lists all such chunks)"
        )
        self.volume, self.box, self.chunk, self.cause = volume, box, chunk, cause


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error of obstore reports; None for other errors."""
    match = re.search(r"non-2xx status code: (\d{3})", str(error)) if isinstance(error, (BaseError, OSError)) else None
    return int(match[1]) if match else None


def is_outage(error: BaseException, remote: bool) -> bool:
    """Whether an error of a read may pass by itself.  Pure.

    Args:
        remote: whether the store has a URL; what is wrong with a file on disk passes only where its mount was away.
    """
    status = status_of(error)
    if status is not None:
        return status in _OUTAGE_STATUSES
    if isinstance(error, OSError):
        passes = isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)) or error.errno in _OUTAGE_ERRNOS
        return passes and not isinstance(error, (FileNotFoundError, PermissionError))
    return remote and isinstance(error, BaseError) and bool(_OUTAGE_SIGNS.search(str(error)))


def is_protocol_error(error: BaseException) -> bool:
    """Whether a server has answered what it must not, rather than refused or been away.  Pure."""
    ours = isinstance(error, ProtocolError)
    return ours or (isinstance(error, BaseError) and status_of(error) is None and not is_outage(error, remote=True))


def refusal(error: BaseException, key: str, address: str, remote: bool, signing: str = "") -> FetchError | RefusedError:
    """The error for a read of a key that it would not help to try again.

    Args:
        signing: with what requests are signed, or why they are not.
    """
    what = f"{reason(error)} for {key} in {address}"
    if not remote:
        if isinstance(error, PermissionError):
            return RefusedError(f"the files of a volume must be readable; got {what}; change their permissions")
        return FetchError(what)
    signing = f" ({signing})" if signing else ""
    if isinstance(error, PermissionDeniedError):
        text = f"a chunk must not be forbidden; got {what}{signing}, whose metadata could be read; "
        if address.startswith(("az://", "hf://")):
            return RefusedError(f"{text}the credentials have expired or do not cover it")
        return RefusedError(
            f"{text}either the credentials have expired or do not cover it, or it is missing in a bucket that says so "
            "only to those who may list it: allow s3:ListBucket, or set data.store.forbidden_is_absent=true"
        )
    status = status_of(error)
    if status == 416:
        return FetchError(what)
    if isinstance(error, UnauthenticatedError) or status == 400 or _NO_CREDENTIALS.search(str(error)):
        return RefusedError(f"The store refuses access: {what}{signing}; check the address and the credentials")
    return RefusedError(
        f"The store answers, but not as HTTP demands: {what}; check the address and what stands between (a proxy, a "
        "certificate, AWS_REGION), or serve the volume with another server, such as nginx"
    )


def reason(error: BaseException) -> str:
    """What an error says, in one line and without secrets, which a server may have sent back; of obstore's neither the
    preamble, which ends with the address and the time that the request took, nor the dump of the error's structure at
    the end, but for what the system said."""
    return redact(_told(error))


def _told(error: BaseException) -> str:
    text, _, dump = str(error).partition("Debug source:")
    words = one_line(re.sub(r"^.*Error performing \w+ \S+ in \S+ - |^Generic \w+ error: ", "", text.rstrip(" :\n")))
    if status_of(error) is not None:
        _, status, body = re.split(r"(non-2xx status code: \d+[^:]*)(?:: )?", text.rstrip(" :\n"), maxsplit=1)
        told = re.findall(r"<(?:title|Code|Message)>([^<]+)<", body, re.IGNORECASE) if "<" in body else [body]
        return one_line(f"Server returned {status}" + (f": {' '.join(told)}" if any(told) else ""))
    for sign, meaning in _MEANINGS:
        if match := re.search(sign, dump):
            return meaning.format(*match.groups())
    if "error sending request" not in words:
        return words
    causes = re.findall(r'(?:message|error): "([^"]+)"', dump)
    # Where a redirect has led, the address of the request is another one.
    place = re.search(r'ConnectError\(\s*"[^"]*",\s*([\[\]\w.:]+:\d+),', dump)
    at = f" by {place[1]}" if place and place[1] not in text else ""
    return causes[-1] + at if causes else f"no answer in time{at}" if "TimedOut" in dump else words
