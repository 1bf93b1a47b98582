"""YAML text -> the values that were written, each with its source and line.  Pure.

Scalars follow the YAML 1.2 core schema: `1e-4` is a number, `off` is text, `010` is ten, there are no dates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from vesuvius.config.describe import KeyPath, add_core_scalars, dotted
from vesuvius.errors import ConfigError

_DEEPEST = 20  # levels of nesting; the schema has four, and an alias to its own parent has no end
_MOST_REPEATS = 2000  # values that aliases repeat; ten lines of nested aliases can stand for billions
_LONGEST_NUMBER = 1000  # digits


class _CoreLoader(yaml.SafeLoader):
    """Composes nodes whose plain scalars carry the tags of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - replaces PyYAML's YAML 1.1 table, filled below


add_core_scalars(_CoreLoader)


class Origin(NamedTuple):
    """Where a key was written."""

    source: str
    line: int = 0  # counted from 1; 0 = the source as a whole
    is_override: bool = False
    others: tuple[str, ...] = ()  # further files and overrides that set keys of the same section

    def __str__(self) -> str:
        return " with ".join([f"{self.source}:{self.line}" if self.line else self.source, *self.others])

    def at(self, line: int | None) -> Origin:
        """The same source at a line counted from 0, as PyYAML counts."""
        return self if self.is_override or line is None else self._replace(line=line + 1)


class LineError(ConfigError):
    """One line of the final message."""

    def __init__(self, origin: Origin, text: str) -> None:
        super().__init__(f"{origin}: {text}")
        self.origin = origin


@dataclass
class Value:
    """A section, a list or a plain value, and where it was written."""

    content: Any  # values by key, a list of values, or a scalar
    origin: Origin | None  # None for a section that an override made on the way to its key

    def plain(self) -> Any:
        """Without origins: dicts, lists and scalars."""
        match self.content:
            case dict():
                return {key: value.plain() for key, value in self.content.items()}
            case list():
                return [value.plain() for value in self.content]
        return self.content

    def origins(self) -> Iterator[Origin]:
        """Its own, then those of all that it holds."""
        if self.origin is not None:
            yield self.origin
        inner = self.content.values() if isinstance(self.content, dict) else self.content
        for value in inner if isinstance(self.content, dict | list) else ():
            yield from value.origins()

    def at(self, path: KeyPath) -> Value | None:
        """What it holds there."""
        value = self
        for step in path:
            try:
                value = value.content[step]
            except (LookupError, TypeError):
                return None
        return value


@dataclass
class Text:
    """One YAML text on its way to values; keys that are set twice are noted as problems."""

    origin: Origin
    problems: list[LineError] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)
    _repeats: int = 0

    def value(self, text: str, path: KeyPath = ()) -> Value | None:
        """The value of a text that stands at `path`; None where there is none.  Raises LineError."""
        node = _compose(text, self.origin)
        return None if node is None else self._value(node, path)

    def _value(self, node: yaml.Node, path: KeyPath) -> Value:
        """Fresh ones for every alias."""
        here = self.origin.at(node.start_mark.line)
        self._repeats += id(node) in self._seen
        self._seen.add(id(node))
        if len(path) > _DEEPEST:
            raise LineError(here, f"{dotted(path[:3])}...: nested too deeply; does an alias name its own parent?")
        if self._repeats > _MOST_REPEATS:
            raise LineError(here, f"aliases must repeat at most {_MOST_REPEATS} values; got more; write values out")
        match node:
            case yaml.MappingNode(tag="tag:yaml.org,2002:map"):
                return Value(self._section(node, path), here)
            case yaml.SequenceNode(tag="tag:yaml.org,2002:seq"):
                return Value([self._value(item, (*path, index)) for index, item in enumerate(node.value)], here)
            case yaml.ScalarNode():
                try:
                    return Value(_scalar(node), here)
                except ValueError:
                    pass  # reported below, as for other kinds of nodes
        kind = node.tag.rpartition(":")[2]
        raise LineError(here, f"{dotted(path)}: cannot be read as {kind}; write a plain value")

    def _section(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Value]:
        section: dict[str, Value] = {}
        for key_node, value_node in node.value:
            here = self.origin.at(key_node.start_mark.line)
            if not isinstance(key_node, yaml.ScalarNode) or not key_node.value.isprintable():
                raise LineError(here, "a key must be plain text on one line")
            inner = (*path, key_node.value)
            if key_node.value in section:
                text = f"{dotted(inner)}: the key is set twice; first at {section[key_node.value].origin}; remove one"
                self.problems.append(LineError(here, text))
            else:
                section[key_node.value] = Value(self._value(value_node, inner).content, here)
        return section


def _compose(text: str, origin: Origin) -> yaml.Node | None:
    """YAML text -> its root node, None where there is none.  Pure; raises LineError."""
    line: int | None = None
    try:
        return yaml.compose(text, Loader=_CoreLoader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position)
        what = f"the character {chr(error.character)!r} is not allowed"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line if mark else None
        begun = f" begun on line {error.context_mark.line + 1}" if error.context_mark else ""
        what = f"{error.context}{begun}, {error.problem}" if error.context else f"{error.problem}"
        if r"'\t'" in what:
            what = "a tab cannot stand here; indent with spaces"
    except RecursionError:
        what = "nested too deeply"
    raise LineError(origin.at(line), f"not valid YAML: {what}")


def _scalar(node: yaml.ScalarNode) -> str | int | float | bool | None:
    """The value of a tagged scalar; raises ValueError for text that its tag does not fit, or an unknown tag."""
    text: str = node.value
    match node.tag.removeprefix("tag:yaml.org,2002:"):
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int" if len(text) < _LONGEST_NUMBER:
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        case "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        case "str":
            text.encode()  # refuses half of a surrogate pair, which "\\ud800" would make and JSON cannot carry
            return text
    raise ValueError(node.tag)
