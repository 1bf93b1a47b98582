"""Redacts secrets in log lines, printed output, pages, and settings for trackers.

Configs and checkpoints of the run keep their secrets, because a resume needs them.  A secret is found by where it
stands: in the user part or the query of a URL, after the name of a secret, after the scheme of a header.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, Literal

HIDDEN = "***"
_hidden = set[str]()  # of `hide`

_USER = re.compile(r"([\w+.-]{0,20})://(?:([^\s\"'<>?]{0,1000})@|([^\s\"'<>]{0,1000})@)")
_SPACED = re.compile(r"(?<=://)[^/\s:@]+:(?!\d+\b)[^/\n]{0,200}@")  # a space in the password by mistake
_PORT = re.compile(r"\d{1,5}(?![^/?#])")
_LITERAL_KEYS = ("s3", "gs", "hf")  # schemes whose URLs have no port
# The whole query: signatures and tokens have many names.  Punctuation at the end of a sentence is kept.
_QUERY = re.compile(
    r"(\b(?:https?|wss?|az|abfss?|wasbs?)://[^\s?\"']{0,2000})\?(?=[^\s\"':;,.)])[^\s\"']*?(?=[:;,.)]*(?:[\s\"']|$))",
    re.I,
)
_SCHEME = re.compile(r"\b((?i:Bearer|Basic|Token|Negotiate)) +(?=[\w~+/.-]*[\dA-Z=])[\w~+/.-]{8,}=*")
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?=-----END|$)", re.S)

# `name: value`, `NAME=value`, `"name": value`, `two words: value`, `--name value`
_NAMED = re.compile(
    r"(?<![\w.-])(?:((?:[A-Za-z][\w.-]* ){0,2}-{0,2}[A-Za-z_][\w.-]*)(\\*[\"'])?\]?[ \t]*(=(?!=)|:(?!:|//))[ \t]*"
    r"|(--[A-Za-z][\w-]*) +(?!-))"
)
_QUOTED = re.compile(r"[bBuU]?(\\*[\"'])((?:(?!\1)(?:\\.|[^\n]))*)")
_BLOCK = re.compile(r"[|>][+-]?\d?[ \t]*\n(?P<indent>[ \t]+).*(?:\n(?P=indent).*)*|\n[ \t]+(?![^\n]*: )(?!- )\S+")
_HEADER = re.compile(
    r"(?:[A-Za-z][\w-]* +)?(?:[\w-]+=\"[^\"]*\"|[^\s\"',;]+)(?:[,;] *[\w-]+=(?:\"[^\"]*\"|[^\s\"',;]*))*"
)
_TO_THE_END = re.compile(r"[^\n]+?(?=[ \t]+#|[ \t]*(?:\n|$))")
_WORD = re.compile(r"[^\s\"']+?(?=[,;)\]}.]*(?:[\s\"']|$))")
_ASSIGNED = re.compile(r"[^\s\"'&]+")
_ENCLOSED = re.compile(r"[^\n\"']+")
_NOTHING = re.compile(r"(?:null|none|true|false|~|\*\*\*)?", re.I)
_RANDOM = re.compile(
    r"(?=\S*\d)(?=\S*[A-Za-z])(?:[A-Za-z0-9+=]{8,}|[\w+=~-]{20,})|(?=\S*[A-Z])(?=\S*\d)[A-Za-z0-9+/=]{40,}"
)

_ALWAYS = re.compile(
    r"(?:pass_?(?:word|wd|phrase|code)s?|secrets?|token|authorization|cookie|"
    r"(?:api|access|secret|private|account|storage|master|sas|shared|encryption|signing|session|subscription|ssh)"
    r"_?key(?:_?id)?)(?:_?\d+|_value)?$"
)
_IN_DATA = re.compile(r"(?:credentials?|(?:^|_)(?:o?auth|signature|sig|pass|pwd|sas|jwt|key))$")
_HINT = re.compile(r"pass|pwd|secret|token|key|auth|cookie|cred|sig|jwt|sas|x-amz|x-goog", re.I)
_LEAST_LENGTH = 8  # shortest value of a variable that is redacted; shorter ones are parts of words


def hide(*secrets: str) -> None:
    """Make `redact` remove these strings from all texts in this process."""
    _hidden.update(secret for secret in secrets if len(secret) >= _LEAST_LENGTH)


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Redact users and passwords in URLs, queries of web and Azure URLs, values after names such as `..._TOKEN=` and
    `password: `, headers, private keys, values of environment variables with such names, and the strings of `hide`."""
    if "://" in text:
        if "@" in text:
            text = _SPACED.sub(f"{HIDDEN}@", _USER.sub(_without_user, text))
        text = _QUERY.sub(rf"\1?{HIDDEN}", text)
    text = _SCHEME.sub(rf"\1 {HIDDEN}", _PRIVATE_KEY.sub(rf"\1{HIDDEN}", _without_named(text)))
    secrets = [*_hidden]
    for name in environment:
        value = environment.get(name, "")
        if len(value) >= _LEAST_LENGTH and value in text and _kind(name) and value[0] not in "/~":
            secrets.append(value)  # paths, as in GOOGLE_APPLICATION_CREDENTIALS, are kept
    for secret in secrets:
        if secret in text:  # parts of words are kept
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", HIDDEN, text)
    return text


def redacted(value: Any, is_secret: bool = False) -> Any:
    """Copy dataclasses, lists, tuples and mappings with all strings redacted; other values are returned as they are.

    Of secrets (`is_secret`), strings and numbers are hidden: values of mappings with the name of a secret, and what
    follows such a name in a list.
    """
    match value:
        case str():
            return HIDDEN if is_secret and not _NOTHING.fullmatch(value) else redact(value)
        case int() | float() if is_secret and not isinstance(value, bool):
            return HIDDEN
        case Mapping():
            return {key: redacted(item, is_secret or bool(_kind(str(key)))) for key, item in value.items()}
        case list() | tuple() if not hasattr(value, "_fields"):
            names = [None, *value]
            follow = (isinstance(n, str) and (n[:2] == "--" or n == value[0]) and _kind(n) == "always" for n in names)
            return type(value)(redacted(each, is_secret or f) for f, each in zip(follow, value, strict=False))
        case _ if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: redacted(getattr(value, f.name)) for f in fields(value) if f.init})
    return value


@lru_cache(4096)
def _kind(name: str) -> Literal["always", "in data", ""]:
    """Whether a name is that of a secret: `always`, or only `in data`, as such words also stand in sentences."""
    words = re.sub(r"[^A-Za-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).lower()
    return "always" if _ALWAYS.search(words) else "in data" if _IN_DATA.search(words) else ""


def _without_user(match: re.Match[str]) -> str:
    """A URL without the user and the password, which may contain `/`, `?` and `@`."""
    scheme, until = match[1], match[2] if match[2] is not None else match[3]
    user, colon, password = until.partition(":")
    has_port = scheme.lower() not in _LITERAL_KEYS and _PORT.match(password)
    if "/" not in until or (colon and "/" not in user and not has_port):
        return f"{scheme}://{HIDDEN}@"
    host, slash, path = until.partition("/")
    return f"{scheme}://{HIDDEN}@{host.rpartition('@')[2]}{slash}{path}@" if "@" in host else match[0]


def _without_named(text: str) -> str:
    """The text without the values of names of secrets."""
    parts, kept, at = list[str](), 0, 0
    while found := _HINT.search(text) and _NAMED.search(text, at):
        at = found.end()
        begin, end = _value(text, found)
        if end > begin:
            parts += [text[kept:begin], HIDDEN]
            kept = at = end
    return "".join([*parts, text[kept:]])


def _value(text: str, named: re.Match[str]) -> tuple[int, int]:
    """Begin and end of the secret after a name; equal if there is none."""
    name, quote, sign = named[1] or named[4], named[2], named[3]
    at, kind, before = named.end(), _kind(name), text[: named.start()].rpartition("\n")[2]
    is_parameter = before[-1:] in ("?", "&")
    if is_parameter and (kind or re.match(r"x-(amz|goog)-", name, re.I)):
        kind = "always"
    if not kind or (before[-1:] in ("/", "~") and sign == ":"):  # a file
        return at, at
    begins_line, is_enclosed = not before.strip(" \t-"), not quote and before[-1:] in ("'", '"')
    if inner := _QUOTED.match(text, at):
        begin, end = inner.span(2)
    elif block := _BLOCK.match(text, at):
        begin, end = block.span()
    else:
        form = _ASSIGNED if sign == "=" else _WORD
        if is_enclosed:
            form = _ENCLOSED
        elif begins_line and sign == ":" and kind == "always":
            form = _TO_THE_END
        elif not quote and re.search("authorization|cookie", name, re.I):
            form = _HEADER
        value = form.match(text, at)
        begin, end = value.span() if value else (at, at)
    value_text, is_key = text[begin:end], name.lower().endswith("key")
    is_data = bool(quote) or (sign == "=" and name.lower() != "key")
    is_line = is_enclosed or (begins_line and text[end : end + 1] in ("", "\n"))
    is_data = is_data or (is_line and bool(re.fullmatch("credentials?|.*auth|pwd", name, re.I)))
    if _NOTHING.fullmatch(value_text) or (kind == "in data" and value_text[0] in "/~"):  # a path
        return at, at
    return (begin, end) if kind == "always" or is_data or (is_key and _RANDOM.fullmatch(value_text)) else (at, at)
