"""What goes wrong between a store and voxels: our errors, and what those of obstore and of the system mean."""

from __future__ import annotations

import re

from obstore.exceptions import PermissionDeniedError

from vesuvius.config import Triple
from vesuvius.errors import DataError, one_line
from vesuvius.volumes.box import Box, format_box


class FetchError(Exception):
    """An object is damaged: it is too short for what is asked of it, or no file lies in its place."""


class OutageError(DataError):
    """A store has not answered for `data.store.outage_minutes`."""


class RefusedError(DataError):
    """A store answers, and refuses: trying again would not help."""


class ClosedError(Exception):
    """A source was closed, by whoever ends the stream, while another thread read from it."""


class UnreadableChunkError(DataError):
    """A chunk whose bytes are damaged, or gone, after all tries.

    Attributes:
        volume, box, chunk, cause: what to write into the quarantine; the box holds all voxels that are damaged: the
            chunk's, or all of its shard's where the index of the shard is damaged.
    """

    def __init__(self, volume: str, region: Box, chunk: Triple, box: Box, cause: str) -> None:
        super().__init__(
            f"every chunk of a volume must be readable; got {cause} in volume {volume}, region {format_box(region)}, "
            f"chunk {list(chunk)}; restore the chunk from its source (`vesuvius volume verify` lists all such chunks)"
        )
        self.volume, self.box, self.chunk, self.cause = volume, box, chunk, cause


def refusal(error: BaseException, key: str, address: str, remote: bool) -> FetchError | RefusedError:
    """The error for a read of a key that it would not help to try again."""
    what = f"{reason(error)} for {key} in {address}"
    if not remote:
        if isinstance(error, PermissionError):
            return RefusedError(f"the files of a volume must be readable; got {what}; change their permissions")
        return FetchError(what)
    if isinstance(error, PermissionDeniedError):
        return RefusedError(
            f"a chunk must not be forbidden; got {what}, whose metadata could be read; either the credentials "
            "have expired or do not cover it (AWS_* in the environment, data.store.anonymous), or it is missing "
            "in a bucket that says so only to those who may list it: allow s3:ListBucket, or set "
            "data.store.forbidden_is_absent=true"
        )
    if "status code: 416" in str(error):
        return FetchError(what)
    return RefusedError(
        f"a store must grant access; got {what}; check the address and the credentials (AWS_* in the environment, "
        "data.store.anonymous)"
    )


def reason(error: BaseException) -> str:
    """What an error says, in one line; of obstore's neither the preamble, which ends with the address and the time that
    the request took, nor the dump of the error's structure at the end, but for what the system said."""
    text, _, dump = str(error).partition("Debug source:")
    words = one_line(re.sub(r"^.*Error performing \w+ \S+ in \S+ - ", "", text.rstrip(" :\n")))
    if "error sending request" not in words:
        return words
    causes = re.findall(r'(?:message|error): "([^"]+)"', dump)
    return causes[-1] if causes else "no answer in time" if "TimedOut" in dump else words
