"""Redacts secrets in log lines, printed output, pages, and settings for trackers.

Configs and checkpoints of the run keep their secrets, because a resume needs them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

HIDDEN = "***"
_hidden = set[str]()  # of `hide`

_USER = re.compile(r"(?<=://)(?:[^/\s]*|[^/\s:@]+:[^/\n]{0,200})@")  # a password may contain "@", or a space by mistake
# The whole query: signatures and tokens have many names.  Punctuation at the end of a sentence is kept.
_QUERY = re.compile(r"(\bhttps?://[^\s?\"']*)\?[^\s\"']*?(?=[:;,.)]*(?:[\s\"']|$))", re.IGNORECASE)
_SECRET = (
    r"(?:SECRET(?:[_-]?KEY)?|PASSW(?:OR)?D|TOKEN|ACCESS[_-]?KEY(?:[_-]ID)?|CREDENTIALS?|SIGNATURE|AUTH|"
    r"(?:API|PRIVATE|ACCOUNT|STORAGE|MASTER|SAS)[_-]?KEY)"
)
_SECRET_NAME = re.compile(rf"(?:^|[_.-]){_SECRET}$|^{_SECRET}$", re.IGNORECASE)
_ASSIGNED = re.compile(rf"(\b[\w.-]*{_SECRET}=)(?:\"[^\"]*\"|'[^']*'|[^\s\"'&]+)", re.IGNORECASE)
_QUOTED = re.compile(rf"([\"'][\w.-]*(?:{_SECRET}|AUTHORIZATION)[\"']: *)(?:\"[^\"]*\"|'[^']*')", re.IGNORECASE)
_LEAST_LENGTH = 8  # shortest value of a variable that is redacted; shorter ones are parts of words


def hide(*secrets: str) -> None:
    """Make `redact` remove these strings from all texts in this process."""
    _hidden.update(secret for secret in secrets if len(secret) >= _LEAST_LENGTH)


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Redact users and passwords in URLs, queries of http URLs, values assigned to names such as `..._TOKEN=`, values
    of environment variables with such names, and the strings of `hide`."""
    if "://" in text:
        text = _QUERY.sub(rf"\1?{HIDDEN}", _USER.sub(f"{HIDDEN}@", text))
    if "=" in text:
        text = _ASSIGNED.sub(rf"\1{HIDDEN}", text)
    if "'" in text or '"' in text:
        text = _QUOTED.sub(rf"\1'{HIDDEN}'", text)
    secrets = [*_hidden]
    for name in environment:
        value = environment.get(name, "")
        if len(value) >= _LEAST_LENGTH and value in text and _SECRET_NAME.search(name) and value[0] not in "/~":
            secrets.append(value)  # paths, as in GOOGLE_APPLICATION_CREDENTIALS, are kept
    for secret in secrets:
        if secret in text:  # parts of words are kept
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", HIDDEN, text)
    return text


def redacted(value: Any) -> Any:
    """Copy dataclasses, lists, tuples and mappings with all strings redacted; other values are returned as they are."""
    match value:
        case str():
            return redact(value)
        case Mapping():
            return {
                key: HIDDEN if isinstance(item, str) and _SECRET_NAME.search(str(key)) else redacted(item)
                for key, item in value.items()
            }
        case list() | tuple() if not hasattr(value, "_fields"):
            return type(value)(map(redacted, value))
        case _ if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: redacted(getattr(value, f.name)) for f in fields(value) if f.init})
    return value
