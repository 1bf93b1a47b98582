"""Azure blob service on loopback (GET and list); verifies each signature with its own computation
(https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key, .../create-service-sas)."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import parse_qsl, unquote
from xml.sax.saxutils import escape

from tests.support.odd_server import Asked, OddServer, odd_server, served, sized

ACCOUNT, CONTAINER, TOKEN = "account", "scans", "token-of-an-identity"
KEY = base64.b64encode(b"the key of the account, not of a user").decode()
_DATE = "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT"
_SIGNED = ("sp", "st", "se", None, "si", "sip", "spr", "sv", "sr", "", "", "rscc", "rscd", "rsce", "rscl", "rsct")


def _signature(text: str) -> str:
    return base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()


def sas_token() -> dict[str, str]:
    """Query parameters of a token for reading and listing the container, without expiry."""
    query = {"sp": "rl", "se": "2099-01-01T00:00:00Z", "spr": "https,http", "sv": "2022-11-02", "sr": "c"}
    return query | {"sig": _signature_of_sas(query)}


def _signature_of_sas(query: Mapping[str, str]) -> str:
    resource = f"/blob/{ACCOUNT}/{CONTAINER}"
    return _signature("\n".join(resource if name is None else query.get(name, "") for name in _SIGNED))


def _signature_of_request(asked: Asked, path: str, query: Mapping[str, str]) -> str:
    names = ("content-encoding", "content-language", "content-length", "content-md5", "content-type", "date")
    names += ("if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range")
    values = [asked.headers.get(name, "").replace("0", "") if name == "content-length" else asked.headers.get(name, "")
              for name in names]  # fmt: skip
    own = [f"{name}:{value}" for name, value in sorted(asked.headers.items()) if name.startswith("x-ms-")]
    parameters = [f"{name}:{value}" for name, value in sorted(query.items())]
    return _signature("\n".join([asked.method, *values, *own, f"/{ACCOUNT}{path}", *parameters]))


def signer(asked: Asked) -> str | None:
    """Credential that signed a request; None if unsigned, 'wrong' for an invalid signature."""
    path, _, text = asked.target.partition("?")
    query = dict(parse_qsl(text))
    given = asked.headers.get("authorization")
    if given is None:
        return ("sas" if query["sig"] == _signature_of_sas(query) else "wrong") if "sig" in query else None
    if given == f"Bearer {TOKEN}":
        return "identity"
    return "key" if given == f"SharedKey {ACCOUNT}:{_signature_of_request(asked, path, query)}" else "wrong"


@contextmanager
def azure_server(objects: Mapping[str, bytes], public: bool = False) -> Iterator[OddServer]:
    """Serve the container's blobs, by key, below URL/ACCOUNT; `public`: to everybody."""

    def reply(asked: Asked) -> bytes:
        by = signer(asked)
        if by == "wrong" or (by is None and not public):
            code = "AuthenticationFailed" if by else "NoAuthenticationInformation"
            text = f"<Error><Code>{code}</Code><Message>Server failed to authenticate.</Message></Error>"
            return sized("403 Forbidden" if by else "401 Unauthorized", text.encode(), "Content-Type: application/xml")
        path, _, text = asked.target.partition("?")
        query = dict(parse_qsl(text))
        if query.get("comp") == "list":
            body = _list(objects, query.get("prefix", ""), query.get("delimiter"))
            return sized("200 OK", body.encode(), "Content-Type: application/xml")
        data = objects.get(unquote(path).removeprefix(f"/{ACCOUNT}/{CONTAINER}/"))
        if data is None:
            return sized("404 Not Found", b"<Error><Code>BlobNotFound</Code></Error>")
        if asked.span and asked.span[0] is None:
            return sized("400 Bad Request", b"<Error><Code>InvalidHeaderValue</Code></Error>")
        return served(data, asked, _DATE, f'ETag: "{hashlib.md5(data).hexdigest()}"')

    with odd_server(reply) as server:
        yield server


def _list(objects: Mapping[str, bytes], prefix: str, delimiter: str | None) -> str:
    names = sorted(name for name in objects if name.startswith(prefix))
    folders = set[str]()
    if delimiter:
        deep = {name for name in names if delimiter in name[len(prefix) :]}
        folders = {prefix + name[len(prefix) :].partition(delimiter)[0] + delimiter for name in deep}
        names = [name for name in names if name not in deep]
    blobs = "".join(
        f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>Thu, 01 Jan 2026 00:00:00 GMT</Last-Modified>"
        f"<Etag>e</Etag><Content-Type>application/octet-stream</Content-Type><Content-Length>{len(objects[name])}</Content-Length></Properties></Blob>"
        for name in names
    )
    prefixes = "".join(f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>" for name in sorted(folders))
    return f"<EnumerationResults><Blobs>{blobs}{prefixes}</Blobs><NextMarker/></EnumerationResults>"
