"""Servers with unusual answers are read anyway, or reported after two tries; they are not outages.

All with an outage limit of an hour: a reader that takes an answer for an outage would not end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import textured, write_array
from tests.support.odd_server import Asked, answer, files_below, odd_server, served, sized
from tests.volumes.test_volume import LAYOUTS
from vesuvius.config import StoreConfig
from vesuvius.errors import DataError
from vesuvius.volumes.errors import RefusedError, is_outage, is_protocol_error
from vesuvius.volumes.store.objects import ByteRange
from vesuvius.volumes.store.source import Source
from vesuvius.volumes.volume import open_volume

DATA = bytes(range(256)) * 4
SHAPE = (64, 64, 64)
BOX = ((0, 0, 0), (32, 64, 64))  # half of the only shard: its index and ranges of it are asked for


def chunked(data: bytes, asked: Asked) -> bytes:
    """A streaming server: no length, no ranges, no HEAD."""
    body = b"" if asked.method == "HEAD" else b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
    return answer("200 OK", body, "Transfer-Encoding: chunked")


def of_unknown_total(data: bytes, asked: Asked) -> bytes:
    return served(data, asked).replace(f"/{len(data)}\r\n".encode(), b"/*\r\n")


def without_content_range(data: bytes, asked: Asked) -> bytes:
    return b"\r\n".join(line for line in served(data, asked).split(b"\r\n") if not line.startswith(b"Content-Range"))


def from_the_start(data: bytes, asked: Asked) -> bytes:
    """Interprets `bytes=-N` as the first N + 1 bytes."""
    if asked.span is not None and asked.span[0] is None:
        asked = Asked(asked.method, asked.target, {"range": f"bytes=0-{asked.span[1]}"})
    return served(data, asked)


def with_bad_date(data: bytes, asked: Asked) -> bytes:
    head, _, body = served(data, asked).partition(b"\r\n\r\n")
    return head + b"\r\nLast-Modified: yesterday\r\n\r\n" + body


def refusing_suffixes(status: str) -> Callable[[bytes, Asked], bytes]:
    def reply(data: bytes, asked: Asked) -> bytes:
        counts_from_end = asked.span is not None and asked.span[0] is None
        return sized(status, b"no") if counts_from_end else served(data, asked)

    return reply


READ_ALL_THE_SAME = {
    "suffix misread": from_the_start,
    "suffix ignored": lambda data, asked: (
        sized("200 OK", data) if asked.span is not None and asked.span[0] is None else served(data, asked)
    ),
    **{f"suffix {status}": refusing_suffixes(f"{status} No") for status in (400, 404, 416, 500, 501)},
}


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [*((kind, "http") for kind in READ_ALL_THE_SAME), ("suffix 501", "s3"), ("suffix misread", "s3")],
)
def test_a_server_without_suffix_ranges_is_read_and_is_not_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, scheme: str
) -> None:
    write_array(tmp_path / "bucket/v.zarr", textured(SHAPE), **LAYOUTS["v3-sharded"])
    with odd_server(files_below(tmp_path, READ_ALL_THE_SAME[kind])) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        address = f"{server.url}/bucket/v.zarr" if scheme == "http" else "s3://bucket/v.zarr"
        volume = open_volume(address, StoreConfig(anonymous=True))
        for _ in range(2):
            np.testing.assert_array_equal(volume.read(BOX), textured(SHAPE)[:32])
            volume.grid.forget(BOX)
        volume.close()
    assert volume.source.stats.retries == 0


def test_a_missing_server_feature_is_remembered_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(6):
        (tmp_path / str(number)).write_bytes(DATA)
    with odd_server(files_below(tmp_path, from_the_start)) as server:
        source = Source(server.url, StoreConfig())
        for number in range(6):
            assert source.get(str(number), ByteRange(-7)) == DATA[-7:]
        assert [asked.headers.get("range") for asked in server.asked[-2:]] == ["bytes=0-0", "bytes=1017-1023"]
        assert len(server.asked) == 1 + 2 * 6
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "does not support suffix ranges" in caplog.text


# ---- named


NAMED: dict[str, tuple[Callable[[Asked], bytes], str, ByteRange | None]] = {
    "chunked": (lambda asked: chunked(DATA, asked), "Content-Length Header missing", None),
    "no length": (lambda asked: answer("200 OK", DATA), "Content-Length Header missing", None),
    "bad date": (lambda asked: with_bad_date(DATA, asked), "Invalid last modified .yesterday", None),
    "no HTTP": (lambda asked: b"SSH-2.0-OpenSSH_9.9\r\n", "not HTTP", None),
    "redirect to itself": (lambda asked: sized("302 Found", b"", f"Location: {asked.target}"), "redirect", None),
    "method": (lambda asked: sized("405 Method Not Allowed", b""), "405 Method Not Allowed", None),
    "no ranges": (lambda asked: sized("200 OK", DATA), "status 200 for a range", ByteRange(5, 9)),
    "total unknown": (lambda asked: of_unknown_total(DATA, asked), "CONTENT_RANGE", ByteRange(5, 9)),
    "no Content-Range": (lambda asked: without_content_range(DATA, asked), "Content-?Range|range", ByteRange(5, 9)),
    "half a range": (
        lambda asked: sized("206 Partial Content", DATA[:5], "Content-Range: bytes 0-9/1024"),
        "5 bytes instead of the 10 in Content-Range",
        ByteRange(0, 10),
    ),
}


@pytest.mark.parametrize("kind", NAMED)
def test_an_invalid_answer_is_reported_with_its_address_after_two_tries(kind: str) -> None:
    reply, words, byte_range = NAMED[kind]
    with odd_server(reply) as server:
        source = Source(server.url, StoreConfig(), has_answered=True)
        with pytest.raises(
            RefusedError, match=rf"response violates HTTP: .*({words}).* for data in {server.url}; "
        ) as no:
            source.get("data", byte_range)
        assert "\n" not in str(no.value)
        assert source.stats.requests <= 2
        assert source.outage is None


def test_an_interrupted_body_is_an_outage() -> None:
    came = itertools.chain([9, 9, 0, 0], itertools.repeat(len(DATA)))
    with odd_server(lambda asked: answer("200 OK", DATA[: next(came)], f"Content-Length: {len(DATA)}")) as server:
        assert Source(server.url, StoreConfig(), has_answered=True).get("data") == DATA


def test_outages_are_a_closed_list_of_errors() -> None:
    """Errors that are neither in the list nor a status count as protocol violations."""
    from obstore.exceptions import GenericError

    for status in range(400, 600):
        passes = is_outage(GenericError(f"Server returned non-2xx status code: {status} Words: TimedOut"), remote=True)
        assert passes == (status in {408, 425, 429, 500, 502, 503, 504, 509, 520, 521, 522, 523, 524, 529, 530})
    for text in ("Generic S3 error: something new", "Debug source: kind: Connect, InvalidCertificate(Expired)"):
        assert not is_outage(GenericError(text), remote=True)
        assert is_protocol_error(GenericError(text))
    for text in ("kind: ConnectionRefused", '"dns error"', "TimedOut", "IncompleteMessage"):
        assert is_outage(GenericError(f"Debug source: {text}"), remote=True)
        assert not is_protocol_error(GenericError(f"Debug source: {text}"))
    assert is_outage(ConnectionResetError(), remote=True)
    assert not is_outage(PermissionError(), remote=True)


# ---- listings


def listing(keys: list[str], faults: dict[int, bytes]) -> Callable[[Asked], bytes]:
    """ListObjectsV2 in pages of three; `faults[n]` answers request n."""
    from urllib.parse import parse_qs, urlsplit

    count = iter(range(10**6))

    def reply(asked: Asked) -> bytes:
        if (fault := faults.get(next(count))) is not None:
            return fault
        query = {name: values[0] for name, values in parse_qs(urlsplit(asked.target).query).items()}
        after = max(query.get("start-after", ""), query.get("continuation-token", ""))
        left = [key for key in sorted(keys) if key.startswith(query.get("prefix", "")) and key > after]
        more = f"<NextContinuationToken>{left[2]}</NextContinuationToken>" if len(left) > 3 else ""
        entries = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>"
            for key in left[:3]
        )
        return sized("200 OK", f"<ListBucketResult>{more}{entries}</ListBucketResult>".encode())

    return reply


BROKEN_LISTS = {
    "503": sized("503 Slow Down", b"<Error><Code>SlowDown</Code></Error>"),
    "429": sized("429 Too Many Requests", b""),
    "cut off": answer("200 OK", b"<ListBucketResult>", "Content-Length: 1000"),
    "no answer": b"",
}


@pytest.mark.parametrize("kind", BROKEN_LISTS)
def test_an_interrupted_listing_continues_without_gaps_or_duplicates(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    keys = [f"v/{number:02}" for number in range(17)]
    faults = dict.fromkeys((0, 3, 4, 7), BROKEN_LISTS[kind])
    with odd_server(listing(keys, faults)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        source = Source("s3://bucket/v", StoreConfig(anonymous=True))
        assert list(source.list_keys("")) == [f"{number:02}" for number in range(17)]
    assert source.stats.retries == 4
    assert source.outage is None


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
def test_a_forbidden_listing_is_not_retried_and_names_the_permission(
    monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    with odd_server(lambda asked: sized(status, b"")) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        source = Source("s3://bucket/v", StoreConfig(anonymous=True))
        for ask in (lambda: list(source.list_keys("")), lambda: source.list_one_level("")):
            server.asked.clear()
            with pytest.raises(
                DataError,
                match=rf"Cannot list the chunks of s3://bucket/v: .*{status} \(not signed, because .*; allow listing",
            ):
                ask()
            assert len(server.asked) == 1
