"""Takes secrets out of what is shown or shared: log lines, what commands print, pages, settings for trackers.

The run directory's configs and checkpoints keep them: a resume needs them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

HIDDEN = "***"
_hidden = set[str]()  # of `hide`

_USER = re.compile(r"(?<=://)(?:[^/\s]*|[^/\s:@]+:[^/\n]{0,200})@")  # a password may hold "@", or a blank by mistake
# Signatures and tokens have many names.  What ends a sentence stays.
_QUERY = re.compile(r"(\bhttps?://[^\s?\"']*)\?[^\s\"']*?(?=[:;,.)]*(?:[\s\"']|$))", re.IGNORECASE)
_SECRET = (
    r"(?:SECRET(?:[_-]?KEY)?|PASSW(?:OR)?D|TOKEN|ACCESS[_-]?KEY(?:[_-]ID)?|CREDENTIALS?|SIGNATURE|AUTH|"
    r"(?:API|PRIVATE|ACCOUNT|STORAGE|MASTER|SAS)[_-]?KEY)"
)
_SECRET_NAME = re.compile(rf"(?:^|[_.-]){_SECRET}$|^{_SECRET}$", re.IGNORECASE)
_ASSIGNED = re.compile(rf"(\b[\w.-]*{_SECRET}=)(?:\"[^\"]*\"|'[^']*'|[^\s\"'&]+)", re.IGNORECASE)
_QUOTED = re.compile(rf"([\"'][\w.-]*(?:{_SECRET}|AUTHORIZATION)[\"']: *)(?:\"[^\"]*\"|'[^']*')", re.IGNORECASE)
_LEAST_LENGTH = 8  # characters of a variable's value that is looked for: shorter ones are parts of words


def hide(*secrets: str) -> None:
    """Let `redact` take these out of all texts, in this process."""
    _hidden.update(secret for secret in secrets if len(secret) >= _LEAST_LENGTH)


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """The text without users and passwords of addresses, queries of http addresses, values given to names such as
    `..._TOKEN=`, and the values of environment variables with such names; and what `hide` was told."""
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
            secrets.append(value)  # a path, as of GOOGLE_APPLICATION_CREDENTIALS, is none and may stay
    for secret in secrets:
        if secret in text:  # and as a part of a word it may stay
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", HIDDEN, text)
    return text


def redacted(value: Any) -> Any:
    """A copy of dataclasses, lists, tuples and mappings with all their texts redacted; anything else as it is."""
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
