"""Addresses and listings of the Hugging Face Hub: data sets, models, Spaces and storage buckets.

Files come from `/resolve/`, which redirects to a content network; they are read through obstore like those of any web
server.  Listings come from the Hub's own API, in pages of JSON (https://huggingface.co/docs/hub/api), which obstore
cannot read.
"""

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from urllib.parse import quote, unquote, urljoin

from obstore.exceptions import GenericError

from vesuvius.volumes.errors import ProtocolError

_ADDRESS = re.compile(
    r"(buckets|datasets|models|spaces)/([^/@]+/[^/@]+)(?:@(refs/(?:pr|convert)/[^/]+|[^/]+))?(/.*)?", re.DOTALL
)
_FORMS = "hf://buckets/OWNER/NAME/PATH or hf://datasets/OWNER/NAME[@REVISION]/PATH (also models/, spaces/)"


class HubFolder:
    """The folder that hf://`path` names; I/O in listings only.  Raises ValueError: it is not such an address."""

    def __init__(self, path: str, headers: Mapping[str, str] = {}, timeout_s: float = 30.0) -> None:
        match = _ADDRESS.fullmatch(path)
        if match is None or (match[1] == "buckets" and match[3]):
            raise ValueError(f"it is not {_FORMS}")
        kind, name, revision, key = match.groups("")
        if {"", ".", ".."} & {*key.removesuffix("/").split("/")[1:]}:  # which a URL does not keep as names
            raise ValueError("an empty name between two slashes, or . or ..")
        self._root, at = key.strip("/"), ""
        if kind != "buckets":
            at = f"/{quote(unquote(revision or 'main'), '')}"
        self._origin = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        self._tree = f"{self._origin}/api/{kind}/{name}/tree{at}"
        home = name if kind == "models" else f"{kind}/{name}"
        self.url = f"{self._origin}/{home}/resolve{at}{quote(key).removesuffix('/')}"
        self._headers, self._timeout_s = headers, timeout_s
        self._next: dict[tuple[str, str], str] = {}  # prefix and last key of a page -> address of the page after it

    def pages(self, prefix: str, after: str | None, recursive: bool = True) -> Iterator[list[tuple[str, bool]]]:
        """Keys below a prefix (whole path segments) and whether they are folders, page by page, after a key.

        Raises obstore's errors, ProtocolError and OSError.
        """
        within = f"{self._root}/{prefix}".strip("/")
        query = "?recursive=true" if recursive else ""
        url = self._next.get((prefix, after or "")) or f"{self._tree}/{quote(within, '')}".rstrip("/") + query
        while url:
            headers = self._headers if url.startswith(f"{self._origin}/") else {}
            entries, url = _read_page(url, headers, self._timeout_s)
            # The Hub compares characters: a listing of `a/b` contains `a/bc`.
            below = [each for each in entries if not within or each[0].startswith(f"{within}/")]
            page = [(path[len(self._root) :].lstrip("/"), is_folder) for path, is_folder in below]
            if page:
                self._next[prefix, page[-1][0]] = url
            yield page


def _read_page(url: str, headers: Mapping[str, str], timeout_s: float) -> tuple[list[tuple[str, bool]], str]:
    """Paths on a page of a listing and whether they are folders; and the next page's address, '' if it is the last."""
    request = urllib.request.Request(url)
    for name, value in headers.items():
        request.add_unredirected_header(name, value)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            entries = [(str(entry["path"]), entry["type"] == "directory") for entry in json.load(response)]
            link = response.headers.get("Link", "")
    except urllib.error.HTTPError as error:
        if error.code == 404:  # as for object stores, nothing is stored there
            return [], ""
        text = error.read(200).decode(errors="replace")
        raise GenericError(f"Server returned non-2xx status code: {error.code}: {text}") from None
    except urllib.error.URLError as error:
        raise error.reason if isinstance(error.reason, OSError) else ProtocolError(str(error.reason)) from None
    except http.client.HTTPException as error:
        raise ConnectionError(f"the listing was interrupted: {error!r}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"the listing is not one of the Hub: {error!r}") from error
    following = re.search(r'<([^>]+)>;\s*rel="next"', link)
    return entries, urljoin(url, following[1]) if following else ""
