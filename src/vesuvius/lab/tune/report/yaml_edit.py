"""Sets one key in a YAML text, with a comment that says why, and leaves all else as it is.  Pure.

Notes stand behind the value where they fit, else above the key; those of an earlier tune give way to them.
"""

from __future__ import annotations

import functools
import re
import textwrap
from dataclasses import dataclass, replace

from vesuvius.errors import ConfigError
from vesuvius.lab.tune.report.yaml_places import Place, find_places

_OURS = "# tuned:"
_LONGEST_REASON = 100  # characters that may stand behind a value; longer ones go above the key
_WIDTH = 120
_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")  # what ends a line for YAML


@dataclass(frozen=True)
class Note:
    """The comment of a changed key."""

    before: str
    reason: str

    def beside(self) -> str:
        return f"tuned: was {self.before}; {self.reason}"

    def above(self, key: str) -> str:
        return f"{_above(key)}{self.before}; {self.reason}"


def set_key(text: str, key: str, value: str, note: Note, name: str) -> str:
    """The text with one key set.

    Args:
        key: full, `data.volumes.0.level`.
        value: as YAML in one line.
        name: what messages call the text.

    Raises:
        ConfigError: the value, or a section around it, is shared with another place of the text.
    """
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
    return _replaced(text, parent, replace(key_place, text=_label(steps)), place, value, note, above)


def without_note(text: str, key: str) -> str:
    """The text without what an earlier tune has said above a key; as it is where the key is not in it."""
    parent = above = find_places(text)
    steps = key.split(".")
    for step in steps:
        found = parent.entry(step)
        if found is None:
            return text
        above = above if parent.flow else found[0]
        parent = found[1]
    begins = [0, *(match.end() for match in _BREAK.finditer(text, 0, above.start))]
    last = first = begins.pop()
    indent = " " * _indent(text, first)
    for before in reversed(begins):
        line, first = text[before:first], before
        if not line.startswith(f"{indent}#"):
            break
        if line.startswith(f"{indent}# {_above(_label(steps))}"):
            return text[:before] + text[last:]
        if not line.startswith(f"{indent}#   "):  # else it belongs to the comment that begins above it
            last = before
    return text


def newline_of(text: str) -> str:
    """What ends the lines of a text."""
    match = _BREAK.search(text)
    return match[0] if match else "\n"


def _above(key: str) -> str:
    return f"tuned: {key} was "


def _label(steps: list[str]) -> str:
    """What a comment calls a key; an item of a list by its list."""
    return ".".join(steps[-2:] if steps[-1].isdecimal() else steps[-1:])


def _refuse_shared(place: Place, aliased: set[str], key: str, name: str) -> None:
    """Raises ConfigError where a section is written elsewhere, or what is written here is repeated elsewhere."""
    shared = place.alias or (place.anchor if place.anchor in aliased else "")
    if shared:
        raise ConfigError(
            f"{name}:{place.line + 1}: {key} must be written out to be tuned; got a value that *{shared} shares; "
            f"replace *{shared} by what it stands for"
        )


def _replaced(text: str, parent: Place, key: Place, old: Place, value: str, note: Note, above: Place) -> str:
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
    if not parent.flow and rest.lstrip().startswith(_OURS):
        rest = ""
    if not parent.flow and "#" not in gap and not rest.strip() and _fits(head, note):
        return f"{head}  # {note.beside()}{text[line_end:]}"
    return _with_comment_above(head + rest + text[line_end:], above, note.above(str(key.text)))


def _inserted(text: str, section: Place, missing: list[str], value: str, note: Note, above: Place) -> str:
    """The text with a key that it lacks, and the sections around it that it lacks too, behind the last of `section`."""
    if section.flow:
        inner = functools.reduce(lambda inside, key: f"{{{key}: {inside}}}", reversed(missing[1:]), value)
        at = section.entries[-1][1].end if section.entries else section.end - 1
        joined = f"{', ' if section.entries else ''}{missing[0]}: {inner}"
        return _with_comment_above(text[:at] + joined + text[at:], above, note.above(missing[-1]))

    newline = newline_of(text)
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
    newline = newline_of(text)
    begin = max((match.end() for match in _BREAK.finditer(text, 0, place.start)), default=0)
    indent = _indent(text, begin)  # as the line: no deeper block goes on
    return text[:begin] + "".join(line + newline for line in _comment(indent, words)) + text[begin:]


def _comment(column: int, words: str) -> list[str]:
    indent = " " * column
    width = max(_WIDTH - column, 60)
    wrapped = textwrap.wrap(words, width - 4, break_on_hyphens=False)
    return [f"{indent}# {line}" if i == 0 else f"{indent}#   {line}" for i, line in enumerate(wrapped)]


def _fits(head: str, note: Note) -> bool:
    """Whether the comment may stand behind the last line of `head`."""
    line = _BREAK.split(head)[-1]
    return len(note.reason) <= _LONGEST_REASON and len(f"{line}  # {note.beside()}") <= _WIDTH


def _without_breaks(text: str, place: Place) -> int:
    """The end of a value without the line ends that belong to a block of text."""
    end = place.end
    while end > place.start and text[end - 1] in " \r\n\x85\u2028\u2029":
        end -= 1
    return end


def _indent(text: str, begin: int) -> int:
    """Spaces at the begin of a line."""
    return next(column for column, c in enumerate(text[begin:]) if c != " ")


def _line_end(text: str, at: int) -> int:
    match = _BREAK.search(text, at)
    return match.start() if match else len(text)
