"""What an address opens: the obstore store of a folder or URL, and the disk cache for what comes from URLs."""

from __future__ import annotations

import base64
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import obstore
from obstore.exceptions import BaseError
from obstore.store import GCSStore, HTTPStore, LocalStore, S3Store

from vesuvius.config import StoreConfig
from vesuvius.errors import DataError
from vesuvius.runlog.redact import redact
from vesuvius.volumes.errors import reason
from vesuvius.volumes.store.cache import DiskCache
from vesuvius.volumes.store.credentials import Signing, find_signing

REMOTE_SCHEMES = ("http", "https", "s3", "gs")
_LONGEST_REQUEST = 20  # times `timeout_s`, for a large object that keeps arriving


def is_remote(address: str) -> bool:
    """Whether an address is a URL rather than a folder."""
    return "://" in address


def is_web(address: str) -> bool:
    """Whether an address is a plain web server's, which cannot list."""
    return address.startswith(("http://", "https://"))


def shown_address(address: str) -> str:
    """An address as messages name it: of web servers without user, password and query, which may be secrets."""
    return redact(address, {}) if is_web(address) else address


def last_name(address: str) -> str:
    """The last segment of an address or of a folder's path."""
    return shown_address(address).removesuffix("?***").rstrip("/").rpartition("/")[2]


def web_url(address: str) -> tuple[str, dict[str, str]]:
    """The URL of a web server's folder, as it is sent, and the header with the user and password in it, if any.

    Only `?` is special in it, and one slash at its end says nothing.
    """
    path, question_mark, query = address.replace("#", "%23").partition("?")
    scheme, _, rest = path.partition("://")
    user, at, _ = rest.partition("/")[0].rpartition("@")
    authorization = {"Authorization": "Basic " + base64.b64encode(unquote(user).encode()).decode()} if at else {}
    return f"{scheme}://{rest.removeprefix(user + at).removesuffix('/')}{question_mark}{query}", authorization


def open_store(address: str, config: StoreConfig, signing: Signing | None = None) -> obstore.store.ObjectStore:
    """The obstore store of a folder or URL.  No I/O but what `find_signing` does.

    Keys of s3 and gs are taken literally: no character of theirs is special.

    Args:
        signing: how requests to s3 and gs are signed; looked for where it is None.

    Raises:
        DataError: a scheme that is not supported, an address that is not one, or credentials that cannot be used.
    """
    if not is_remote(address):
        return LocalStore(Path(address).absolute())
    scheme, _, rest = address.partition("://")
    if scheme not in REMOTE_SCHEMES:
        raise DataError(
            f"a volume is a folder or an address of {', '.join(REMOTE_SCHEMES)}; got {address}; copy it to one of them"
        )
    options: dict[str, Any] = {
        # Ours: the retries of obstore itself would neither be counted nor cover a body that breaks off.
        "retry_config": {"max_retries": 0},
        "client_options": {
            "timeout": timedelta(seconds=_LONGEST_REQUEST * config.timeout_s),
            "read_timeout": timedelta(seconds=config.timeout_s),
            "connect_timeout": timedelta(seconds=min(config.timeout_s, 10)),
            "allow_http": True,
            "pool_max_idle_per_host": str(config.requests),
        },
    }
    try:
        if is_web(address):
            url, authorization = web_url(address)
            options["client_options"]["default_headers"] = authorization
            return HTTPStore(url, **options)
        bucket, _, key = rest.partition("/")
        if not bucket or "" in key.split("/")[:-1]:  # obstore would leave it out
            raise ValueError("an empty name between two slashes" if bucket else "no bucket")
        options |= (signing or find_signing(scheme, config.anonymous)).options
        kind = S3Store if scheme == "s3" else GCSStore
        return kind(bucket, prefix=key.removesuffix("/") or None, **options)
    except (BaseError, ValueError) as error:
        raise DataError(
            f"Cannot open {shown_address(address)}: {reason(error)}; correct the address, or the AWS_* and GOOGLE_* "
            "environment"
        ) from error


def open_cache(config: StoreConfig) -> DiskCache | None:
    """The disk cache, where one is configured."""
    if config.cache_dir is None:
        return None
    return DiskCache(Path(config.cache_dir), int(config.cache_gib * 2**30))
