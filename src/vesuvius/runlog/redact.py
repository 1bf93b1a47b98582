"""Redacts secrets in log lines, printed output, pages, and settings for trackers.

Configs and checkpoints of the run keep their secrets, because a resume needs them.  A secret is found by where it
stands: in the user part or the query of a URL, after the name of a secret, after the scheme of a header.
"""

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
    r"(\b(?!(?:s3|gs|hf):)\w[\w+.-]{0,20}://[^\s?\"']{0,2000})\?(?=[^\s\"':;,.)])[^\s\"']*?(?=[:;,.)]*(?:[\s\"']|$))",
    re.I,
)
_SCHEME = re.compile(r"\b((?i:Bearer|Basic|Token|Negotiate)) +(?=[\w~+/.-]*[\dA-Z=])[\w~+/.-]{8,}=*")
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?=-----END|$)", re.S)

# `name: value`, `NAME=value`, `"name": value`, `two words: value`, `--name value`
_NAMED = re.compile(
    r"(?<![\w.-])(?:((?:[A-Za-z][\w.-]* ){0,2}-{0,2}[A-Za-z_][\w.-]*)(\\*[\"'])?\]?[ \t]*(=(?!=)|:(?!:|//))[ \t]*"
    r"|(--[A-Za-z][\w-]*) +(?!-))"
)
_QUOTED = re.compile(r"[bBuU]?(\\*[\"'])((?:(?!\1)(?:\\.|[^\n])|'')*)")
_BRACKET = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|([\[{])|([\]}])")
_WORD = r"[^\s\"'&]+?(?=[,;)\]}.]*(?:[\s\"'&]|$))"
_NOTHING = re.compile(r"(?:null|none|true|false|~|\*\*\*)?", re.I)
_RANDOM = re.compile(
    r"(?=\S*\d)(?=\S*[A-Za-z])(?:[A-Za-z0-9+=]{8,}|[\w+=~-]{20,})|(?=\S*[A-Z])(?=\S*\d)[A-Za-z0-9+/=]{40,}"
).fullmatch

_ALWAYS = re.compile(
    r"(?:pass_?(?:word|wd|phrase|code)s?|secrets?|token|authorization|cookie|"
    r"(?:api|access|secret|private|account|storage|master|sas|shared|encryption|signing|session|subscription|ssh)"
    r"_?key(?:_?id)?)(?:_?\d+|_value)?$"
)
_IN_DATA = re.compile(r"(?:credentials?|(?:^|_)(?:o?auth|signature|sig|pass|pwd|pat|sas|jwt|key))$")
_HINT = re.compile(r"pass|pwd|secret|token|key|auth|cookie|cred|sig|jwt|sas|pat|x-amz|x-goog", re.I)
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
        case bytes() if is_secret:
            return HIDDEN
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
    words = re.sub(r"[^A-Za-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).lower().strip("_")
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
    parts, kept, at = list[str](), 0, 0 if _HINT.search(text) else len(text)
    while found := _NAMED.search(text, at):
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
    if before[-1:] in ("?", "&") and (kind or re.match(r"x-(amz|goog)-", name, re.I)):  # a parameter
        kind = "always"
    if not kind or (before[-1:] in ("/", "~") and sign == ":"):  # a file
        return at, at
    begins_line, is_enclosed = not before.strip(" \t-("), not quote and before[-1:] in ("'", '"')
    is_spaced, indent = sign == ":" or (sign and text[at - 1] == " "), len(before.rstrip("("))
    if inner := _QUOTED.match(text, at):
        begin, end = inner.span(2)
    elif text[at : at + 1] in ("[", "{"):
        begin, end = at, _closed(text, at)
    else:
        # To the closing quote; in YAML with the lines that are indented more; a line; to the comma of a mapping.
        forms = {
            rf"[^\n{before[-1:]}]+": is_enclosed,
            rf"[^\n]*(?:\s*\n[ \t]{{{indent + 1},}}[^\n]+|\n[ \t]{{{indent}}}- [^\n]+)*": (
                begins_line and is_spaced and kind == "always"
            ),
            r"[^\n]+": re.search("authorization|cookie", name, re.I),
            r"[^\n,}\]]+": is_spaced and before.rstrip(" ").endswith(("{", "[", ",")),
            _WORD: True,
        }
        value = re.compile(next(form for form, applies in forms.items() if applies)).match(text, at)
        begin, end = at, value.end() if value else at
    secret, is_line = text[begin:end], is_enclosed or (begins_line and text[end : end + 1] in ("", "\n"))
    is_data = quote or (sign == "=" and name.lower() != "key") or (name.lower().endswith("key") and _RANDOM(secret))
    is_data = is_data or (is_line and re.fullmatch("credentials?|.*auth|pwd", name, re.I))
    if _NOTHING.fullmatch(secret) or (kind == "in data" and (not is_data or secret[0] in "/~")):  # a path
        return at, at
    return begin, end


def _closed(text: str, begin: int) -> int:
    """Where the bracket at `begin` is closed, or the end of the text."""
    depth = 0
    for bracket in _BRACKET.finditer(text, begin):
        depth += bool(bracket[1]) - bool(bracket[2])
        if not depth:
            return bracket.end()
    return len(text)
