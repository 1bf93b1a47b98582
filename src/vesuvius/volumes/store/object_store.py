"""What an address opens: the obstore store of a folder or URL, and the disk cache for what comes from URLs."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, from_url

from vesuvius.config import StoreConfig
from vesuvius.errors import DataError
from vesuvius.volumes.errors import reason
from vesuvius.volumes.store.cache import DiskCache

REMOTE_SCHEMES = ("http", "https", "s3", "gs")
_CREDENTIALS = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    ),
    "gs": ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_APPLICATION_CREDENTIALS"),
}


def is_remote(address: str) -> bool:
    """Whether an address is a URL rather than a folder."""
    return "://" in address


def open_store(address: str, config: StoreConfig) -> obstore.store.ObjectStore:
    """The obstore store of a folder or URL.  No I/O.

    s3 takes the usual AWS_* environment; where that holds no credentials, requests are not signed.

    Raises:
        DataError: a scheme that is not supported, or an address that is not one.
    """
    if not is_remote(address):
        return LocalStore(Path(address).absolute())
    scheme = address.partition("://")[0]
    if scheme not in REMOTE_SCHEMES:
        raise DataError(
            f"a volume is a folder or an address of {', '.join(REMOTE_SCHEMES)}; got {address}; copy it to one of them"
        )
    options: dict[str, Any] = {
        # Ours: the retries of obstore itself would neither be counted nor cover a body that breaks off.
        "retry_config": {"max_retries": 0},
        "client_options": {
            "timeout": timedelta(seconds=config.timeout_s),
            "connect_timeout": timedelta(seconds=min(config.timeout_s, 10)),
            "allow_http": True,
            "pool_max_idle_per_host": str(config.requests),
        },
    }
    anonymous = config.anonymous
    if scheme in _CREDENTIALS and anonymous is None:
        anonymous = not any(os.environ.get(name) for name in _CREDENTIALS[scheme])
    if scheme in _CREDENTIALS and anonymous:
        options["skip_signature"] = True
    try:
        return from_url(address, **options)
    except (BaseError, ValueError) as error:
        raise DataError(
            f"a volume's address must be one that its store accepts; got {reason(error)} for {address}; correct it, "
            "or the AWS_* and GOOGLE_* environment"
        ) from error


def open_cache(config: StoreConfig) -> DiskCache | None:
    """The disk cache, where one is configured."""
    if config.cache_dir is None:
        return None
    return DiskCache(Path(config.cache_dir), int(config.cache_gib * 2**30))
