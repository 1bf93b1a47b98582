"""Parts of objects: what is asked of a store where not the whole object is needed."""

from __future__ import annotations

from dataclasses import dataclass, field

from vesuvius.volumes.errors import FetchError


@dataclass(frozen=True)
class ByteRange:
    """Bytes start <= b < stop of an object; a negative start and no stop are the last -start bytes."""

    start: int
    stop: int | None = None
    reserved: int = field(default=0, compare=False)  # bytes at the end of the object that the range must not touch


def cut(data: bytes, byte_range: ByteRange) -> bytes:
    """A range of a whole object."""
    stop = len(data) if byte_range.stop is None else byte_range.stop
    return checked(data[byte_range.start : stop], byte_range, len(data))


def checked(data: bytes, byte_range: ByteRange, size: int) -> bytes:
    """Raises FetchError where an object of `size` bytes, less what is reserved, ends before a range does."""
    if byte_range.stop is not None and byte_range.stop > size - byte_range.reserved:
        kept = f", of which the last {byte_range.reserved} are its index" if byte_range.reserved else ""
        raise FetchError(f"bytes {byte_range.start} to {byte_range.stop} of an object of {size}{kept}")
    return data
