"""The config that a tune leaves: the source's own text with a few values changed, each with its reason beside it.

    source text, {"training.workers": TunedValue(6, "1.9 times the samples/s")}
        -> the same text with `workers: 6  # tuned: was 2; 1.9 times the samples/s`

Only the lines of changed keys differ, and the result is read again and compared before anyone gets it.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vesuvius.config_file import parse_config
from vesuvius.config_words import to_yaml
from vesuvius.errors import ConfigError, StorageError, one_line
from vesuvius.lab.tune.setting import Setting, key_of
from vesuvius.lab.tune.whole_file import write_whole
from vesuvius.lab.tune.yaml_places import Place, find_places

MARK = "Written by vesuvius tune"
"""Begins the header: a file that does not begin so is somebody's own and is never replaced."""

_LONGEST_VALUE = 60  # characters of the value before, in a comment
_LONGEST_REASON = 100  # characters that may stand behind a value; longer ones go above the key
_WIDTH = 120
_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")  # what ends a line for YAML


@dataclass(frozen=True)
class TunedValue:
    """A value to write and why, in words."""

    value: Any
    reason: str


@dataclass(frozen=True)
class _Note:
    """The comment of a changed key."""

    before: str
    reason: str

    def beside(self) -> str:
        return f"tuned: was {self.before}; {self.reason}"

    def above(self, key: str) -> str:
        return f"tuned: {key} was {self.before}; {self.reason}"


def tuned_values(setting: Setting, source: Setting, reasons: Mapping[str, str]) -> dict[str, TunedValue]:
    """What differs between two settings, by full key; `reasons` by knob, as `Stop.reasons`.  Pure."""
    changes = setting.changes(source)
    return {key_of(knob): TunedValue(value, reasons.get(knob, "measured")) for knob, value in changes.items()}


def tuned_path(source: Path) -> Path:
    """`configs/exp001_full.yaml` -> `configs/exp001_full.tuned.yaml`."""
    return source.with_name(f"{source.stem}.tuned{source.suffix or '.yaml'}")


def tuned_yaml(source_text: str, source_name: str, changes: Mapping[str, TunedValue], header: Sequence[str]) -> str:
    """The text of a config with some values changed in place.  Pure.

    Args:
        source_text: of a valid config, with the line ends that it has.
        source_name: what messages and the header call it.
        changes: by full key as in overrides (`training.workers`, `data.volumes.0.level`); those that the source has
            already are left alone.
        header: lines for the top, without `#`; one that begins with `MARK` comes before them.

    Raises:
        ConfigError: where the source is not valid, a value is none that its key takes, or an edit in place would
            change something else (a value that an alias repeats).
    """
    source = parse_config(source_text, source=source_name)
    overrides = [f"{key}={to_yaml(tuned.value)}" for key, tuned in changes.items()]
    wanted = parse_config(source_text, overrides, source=source_name)
    plain, wanted_plain = source.model_dump(mode="json"), wanted.model_dump(mode="json")
    written = _keys_of(source_text)
    bom, text = ("\ufeff", source_text[1:]) if source_text.startswith("\ufeff") else ("", source_text)
    for key, tuned in changes.items():
        before = _value_at(plain, key)
        if before == _value_at(wanted_plain, key):
            continue
        was = one_line(to_yaml(before), _LONGEST_VALUE) + ("" if key in written else " by default")
        text = _edited(text, key, to_yaml(tuned.value), _Note(was, _clean(tuned.reason)), source_name)
    text = bom + _header(source_name, header, _newline(text)) + text
    try:
        exact = parse_config(text, source=f"{source_name}, tuned") == wanted
    except ConfigError:
        exact = False
    if not exact:
        raise ConfigError(
            f"{source_name}: its keys must be laid out so that {', '.join(changes)} can be changed in place; they "
            "cannot; write each of them on a line of its own, or pass them as overrides: " + " ".join(overrides)
        )
    return text


def check_replaceable(path: Path) -> None:
    """Raises ConfigError where a file lies that is none of ours, OSError where it cannot be read.  Does I/O."""
    if path.exists() and not path.read_bytes().removeprefix(b"\xef\xbb\xbf").startswith(f"# {MARK}".encode()):
        raise ConfigError(
            f"a tuned config replaces only one that a tune has written; got {path}, which does not begin with "
            f"'# {MARK}'; rename it"
        )


def write_tuned(path: Path, text: str) -> None:
    """Writes the tuned config, whole or not at all.  Does I/O.

    Raises:
        ConfigError: as `check_replaceable`.
        StorageError: where it cannot be written.
    """
    try:
        check_replaceable(path)
        write_whole(path, text.encode("utf-8"))
    except OSError as error:
        raise StorageError(
            f"{path}: the tuned config must be writable; got {error.strerror}; make room, or change its permissions"
        ) from error


def _edited(text: str, key: str, value: str, note: _Note, name: str) -> str:
    """The text with one key set."""
    root = place = find_places(text)
    aliased = {inner.alias for inner in root.below()}
    steps = key.split(".")
    parent, above = root, root  # `above`: the innermost thing on the way that begins a line
    for depth, step in enumerate(steps):
        _refuse_shared(place, aliased, key, name)
        found = place.entry(step)
        if found is None:
            return _inserted(text, place, steps[depth:], value, note, above)
        parent, (key_place, place) = place, found
        above = above if parent.flow else key_place
    for inner in place.below():
        if not inner.alias:  # an alias itself may go
            _refuse_shared(inner, aliased, key, name)
    label = ".".join(steps[-2:] if steps[-1].isdecimal() else steps[-1:])
    return _replaced(text, parent, replace(key_place, text=label), place, value, note, above)


def _refuse_shared(place: Place, aliased: set[str], key: str, name: str) -> None:
    """Raises ConfigError where a section is written elsewhere, or what is written here is repeated elsewhere."""
    shared = place.alias or (place.anchor if place.anchor in aliased else "")
    if shared:
        raise ConfigError(
            f"{name}:{place.line + 1}: {key} must be written out to be tuned; got a value that *{shared} shares; "
            f"replace *{shared} by what it stands for"
        )


def _replaced(text: str, parent: Place, key: Place, old: Place, value: str, note: _Note, above: Place) -> str:
    """The text with another value behind a key that it has."""
    colon = re.compile(r"\s*:").match(text, key.end)
    begin = colon.end() if colon and colon.end() <= old.start else old.start
    gap = text[begin : old.start]
    end = _without_breaks(text, old)
    if "#" in gap:  # a comment between key and value: stays, and the value below it
        lead = gap if parent.flow else gap.rstrip(" ") + " " * (parent.column + 2)
    else:
        lead = gap if (gap or key.start == old.start) and not _BREAK.search(gap) else " "
    head, line_end = text[:begin] + lead + value, _line_end(text, end)
    rest = text[end:line_end]
    free = not rest.strip() or rest.lstrip().startswith("# tuned:")
    if not parent.flow and "#" not in gap and free and _fits(head, note):
        return f"{head}  # {note.beside()}{text[line_end:]}"
    return _with_comment_above(head + text[end:], above, note.above(str(key.text)))


def _inserted(text: str, section: Place, missing: list[str], value: str, note: _Note, above: Place) -> str:
    """The text with a key that it lacks, and the sections around it that it lacks too, behind the last of `section`."""
    if section.flow:
        inner = functools.reduce(lambda inside, key: f"{{{key}: {inside}}}", reversed(missing[1:]), value)
        at = section.entries[-1][1].end if section.entries else section.end - 1
        joined = f"{', ' if section.entries else ''}{missing[0]}: {inner}"
        return _with_comment_above(text[:at] + joined + text[at:], above, note.above(missing[-1]))

    newline = _newline(text)
    *sections, key = missing
    lines = [""] if section.column == 0 and sections else []
    for depth, name in enumerate(sections):
        lines.append(f"{' ' * (section.column + 2 * depth)}{name}:")
    indent = " " * (section.column + 2 * len(sections))
    line = f"{indent}{key}: {value}"
    if _fits(line, note):
        lines.append(f"{line}  # {note.beside()}")
    else:
        lines += [*_comment(len(indent), note.above(key)), line]
    at = section.end
    if not _BREAK.match(text[at - 1]):  # a block of text ends with its line, all else before the end of it
        end = _line_end(text, at)
        broken = _BREAK.match(text, end)
        at = broken.end() if broken else len(text)
        lines = lines if broken else ["", *lines]
    return text[:at] + newline.join(lines) + newline + text[at:]


def _with_comment_above(text: str, place: Place, words: str) -> str:
    """Puts comment lines above the line on which `place` begins, which no edit behind it has moved."""
    newline = _newline(text)
    begin = max((match.end() for match in _BREAK.finditer(text, 0, place.start)), default=0)
    indent = next(column for column, c in enumerate(text[begin:]) if c != " ")  # as the line: no deeper block goes on
    return text[:begin] + "".join(line + newline for line in _comment(indent, words)) + text[begin:]


def _comment(column: int, words: str) -> list[str]:
    indent = " " * column
    width = max(_WIDTH - column, 60)
    wrapped = textwrap.wrap(words, width - 4, break_on_hyphens=False)
    return [f"{indent}# {line}" if i == 0 else f"{indent}#   {line}" for i, line in enumerate(wrapped)]


def _fits(head: str, note: _Note) -> bool:
    """Whether the comment may stand behind the last line of `head`."""
    line = _BREAK.split(head)[-1]
    return len(note.reason) <= _LONGEST_REASON and len(f"{line}  # {note.beside()}") <= _WIDTH


def _without_breaks(text: str, place: Place) -> int:
    """The end of a value without the line ends that belong to a block of text."""
    end = place.end
    while end > place.start and text[end - 1] in " \r\n\x85\u2028\u2029":
        end -= 1
    return end


def _line_end(text: str, at: int) -> int:
    match = _BREAK.search(text, at)
    return match.start() if match else len(text)


def _newline(text: str) -> str:
    match = _BREAK.search(text)
    return match[0] if match else "\n"


def _header(source_name: str, lines: Sequence[str], newline: str) -> str:
    first = [f"{MARK} from {source_name}; the next tune of it replaces this file.", *lines]
    return "".join(f"# {_clean(line)}".rstrip() + newline for line in first) + newline


def _clean(words: str) -> str:
    """One line that a YAML comment may hold."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(words.split()))


def _value_at(tree: Any, key: str) -> Any:
    """None where what is around the key is not there either."""
    for step in key.split("."):
        if tree is None:
            return None
        tree = tree[int(step)] if isinstance(tree, list) else tree[step]
    return tree


def _keys_of(text: str) -> set[str]:
    """Full keys that a text gives, at any depth of sections."""

    def keys(place: Place, prefix: str) -> Iterator[str]:
        items = [(str(index), item) for index, item in enumerate(place.items)]
        for name, value in [*((str(key.text), value) for key, value in place.entries), *items]:
            yield f"{prefix}{name}"
            yield from keys(value, f"{prefix}{name}.")

    return set(keys(find_places(text), ""))
