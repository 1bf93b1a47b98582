"""A Hub on this machine: files by redirect to a content network, listings in pages, as huggingface.co answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.odd_server import Asked, OddServer, odd_server, served, sized


@contextmanager
def hub_server(
    files: Mapping[str, bytes],
    root: str = "buckets/owner/name",
    revision: str = "",
    token: str | None = None,
    page: int = 4,
    fault: Callable[[Asked], bytes | None] = lambda asked: None,
) -> Iterator[tuple[OddServer, OddServer]]:
    """Serve `files` of the bucket or repository `root`; yields the Hub and its content network.

    Args:
        revision: of the files, between slashes in addresses of a repository; '' for a bucket.
        token: without it, the Hub answers 401, as for a private bucket.
        page: entries per page of a listing.
        fault: an answer in place of the Hub's own, or None.
    """
    at = f"/{revision}" if revision else ""
    api = root if root.startswith(("buckets", "datasets", "spaces")) else f"models/{root}"

    def deliver(asked: Asked) -> bytes:
        path, _, signature = asked.target.partition("?")
        assert signature == "signature=of-the-hub"
        data = files[unquote(path)[1:]]
        return served(data, asked, f'ETag: "{hash(data)}"')

    with odd_server(deliver) as network:

        def reply(asked: Asked) -> bytes:
            url = urlsplit(asked.target)
            if (given := fault(asked)) is not None:
                return given
            if token is not None and asked.headers.get("authorization") != f"Bearer {token}":
                return sized("401 Unauthorized", b'{"error":"Invalid username or password."}')
            if match := re.fullmatch(f"/{root}/resolve{at}/(.*)", url.path):
                if unquote(match[1]) not in files:
                    return sized("404 Not Found", b"Entry not found", "X-Error-Code: EntryNotFound")
                return sized("302 Found", b"", f"Location: {network.url}/{match[1]}?signature=of-the-hub")
            if match := re.fullmatch(f"/api/{api}/tree{at}/?(.*)", url.path):
                return listing(url.path, unquote(match[1]), parse_qs(url.query))
            return sized("404 Not Found", b'{"error":"Repository not found"}', "X-Error-Code: RepoNotFound")

        def listing(path: str, prefix: str, query: Mapping[str, Any]) -> bytes:
            """A page; prefixes are compared as text, recursive ones of buckets hold files only."""
            recursive = query.get("recursive") == ["true"]
            entries: dict[str, str] = {}
            for file in sorted(file for file in files if file.startswith(prefix)):
                parts = file.split("/")
                depth = prefix.count("/") + 2 if prefix else 1
                if recursive or len(parts) <= depth:
                    entries[file] = "file"
                else:
                    entries["/".join(parts[:depth])] = "directory"
            first = int(query.get("cursor", ["0"])[0])
            found = [{"type": kind, "path": name} for name, kind in entries.items()][first : first + page]
            more = "recursive=true&" if recursive else ""
            link = f'Link: <{server.url}{path}?{more}cursor={first + page}>; rel="next"'
            return sized("200 OK", json.dumps(found).encode(), *([link] if first + page < len(entries) else []))

        with odd_server(reply) as server:
            yield server, network
