"""YAML file and command-line overrides -> `Config`, and back to YAML.

    text -> YAML nodes, which know their lines -> plain values and the origin of every key -> overrides on top
         -> pydantic -> `Config`, or one `ConfigError` with one line per problem, in the words of the file

Scalars follow the YAML 1.2 core schema: `1e-4` is a number, `off` is text, `010` is ten, there are no dates.
`read_config` alone touches the disk; everything else is pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vesuvius.config import Config
from vesuvius.config_words import KeyPath, add_core_scalars, dotted, explain, schema_at, show, to_yaml
from vesuvius.errors import ConfigError

_DEEPEST = 20  # levels of nesting; the schema has four, and an alias to its own parent has no end
_LONGEST_NUMBER = 1000  # digits


class _CoreLoader(yaml.SafeLoader):
    """Composes nodes whose plain scalars carry the tags of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - replaces PyYAML's YAML 1.1 table, filled below


add_core_scalars(_CoreLoader)


def read_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file, puts the overrides (`training.lr=1e-4`) on top, the last one winning, and validates the whole.

    Raises ConfigError, one line per problem, each with the file and line or the override that it comes from.
    """
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; give the path of a YAML config") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: this is a directory; give the path of a YAML config") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: must be UTF-8 text; got byte 0x{data[error.start]:02x}") from None
    return parse_config(text, overrides, source=str(path))


def parse_config(text: str, overrides: Sequence[str] = (), source: str = "config") -> Config:
    """As `read_config`, from the text of the file; messages call it `source`.  Pure; raises ConfigError."""
    draft = _Draft(_Origin(source))
    draft.load(text)
    for override in overrides:
        draft.override(override)
    try:
        # By way of JSON: in strict mode pydantic takes a list for a tuple there, and still converts nothing else.
        config = Config.model_validate_json(json.dumps(draft.tree))
    except ValidationError as error:
        draft.add_validation_errors(error.errors())
    if draft.problems:
        ordered = sorted(draft.problems, key=lambda problem: (problem.origin.is_override, problem.origin.line))
        raise ConfigError("\n".join(map(str, ordered)))
    return config


def parse_stored(stored: Any, overrides: Sequence[str] = (), source: str = "config") -> Config:
    """As `parse_config`, from what `config.model_dump(mode="json")` has given, which may lack keys that came later."""
    diffusion = stored.get("diffusion") if isinstance(stored, dict) else None
    if isinstance(diffusion, dict) and "schedule" in diffusion:  # the name of the key in earlier versions
        renamed = {key: value for key, value in diffusion.items() if key != "schedule"}
        stored = stored | {"diffusion": renamed | {"noise": diffusion["schedule"]}}
    return parse_config(to_yaml(stored), overrides, source)


def dump_config(config: Config, *, comments: bool = False) -> str:
    """The whole config, defaults included, as YAML that reads back equal; `comments` adds meanings.  Pure."""
    return "\n".join(_dump_section(config, "", comments)) + "\n"


def _dump_section(section: BaseModel, indent: str, comments: bool) -> Iterator[str]:
    for key, info in type(section).model_fields.items():
        value = getattr(section, key)
        comment = f"  # {info.description}" if comments else ""
        match value:
            case BaseModel():
                yield f"{indent}{key}:{comment}"
                yield from _dump_section(value, indent + "  ", comments)
            case (BaseModel(), *_):
                yield f"{indent}{key}:{comment}"
                for item in value:
                    first, *others = _dump_section(item, indent + "    ", comments)
                    yield f"{indent}  - {first.lstrip()}"
                    yield from others
            case _:
                yield f"{indent}{key}: {to_yaml(value)}{comment}"


class _Origin(NamedTuple):
    """Where a key was written."""

    source: str
    line: int = 0  # counted from 1; 0 = the source as a whole
    is_override: bool = False
    others: tuple[str, ...] = ()  # overrides that had a say too

    def __str__(self) -> str:
        return " with ".join([f"{self.source}:{self.line}" if self.line else self.source, *self.others])

    def at(self, line: int | None) -> _Origin:
        """The same source at a line counted from 0, as PyYAML counts."""
        return self if self.is_override or line is None else self._replace(line=line + 1)


class _LineError(ConfigError):
    """One line of the final message."""

    def __init__(self, origin: _Origin, text: str) -> None:
        super().__init__(f"{origin}: {text}")
        self.origin = origin


@dataclass
class _Draft:
    """What file and overrides have said so far: plain values, where each was written, and what is wrong."""

    file: _Origin
    tree: Any = None
    origins: dict[KeyPath, _Origin] = field(default_factory=dict)
    problems: list[_LineError] = field(default_factory=list)

    def load(self, text: str) -> None:
        """Takes the file; raises _LineError where it is not YAML or has no keys at the top."""
        node = _compose(text, self.file)
        if node is None:
            raise _LineError(self.file, "the file is empty; it needs at least name and data.volumes")
        if not isinstance(node, yaml.MappingNode):
            origin = self.file.at(node.start_mark.line)
            raise _LineError(origin, "the file must hold keys and values, such as `name: demo`, at the top level")
        self.tree = self._plain(node, (), self.file)

    def override(self, text: str) -> None:
        """Takes one `key.path=value`; a malformed one is noted as a problem and changes nothing."""
        origin = _Origin(f"override {' '.join(text.split())}", is_override=True)
        key, equals, value = text.partition("=")
        parts = [part.strip() for part in key.split(".")]
        try:
            if not equals or not all(parts) or not key.isprintable():
                raise _LineError(origin, "an override must look like key.path=value, such as training.lr=1e-4")
            node = _compose(value, origin)
            if node is None:
                raise _LineError(origin, "the value is missing; write null for none, or '' for empty text")
            path = _locate(parts, self.tree, origin)
            part = _Draft(origin)
            _put(self.tree, path, part._plain(node, path, origin))
        except _LineError as problem:
            self.problems.append(problem)
            return
        kept = {known: o for known, o in self.origins.items() if known[: len(path)] != path}
        self.origins = kept | part.origins
        self.problems += part.problems

    def add_validation_errors(self, errors: list[ErrorDetails]) -> None:
        """Notes what pydantic found, in our words, each with its origin."""
        texts: dict[KeyPath, str] = {}
        for error in errors:
            texts |= explain(error)
        for path, text in texts.items():
            origin = self._origin(path)
            if "properties" in schema_at(path):  # keys of a section contradict each other, whoever wrote them
                others = dict.fromkeys(o.source for o in self._beneath(path) if o.is_override and o != origin)
                origin = origin._replace(others=tuple(others))
            self.problems.append(_LineError(origin, f"{dotted(path)}: {text}" if path else text))

    def _beneath(self, path: KeyPath) -> list[_Origin]:
        return [origin for known, origin in self.origins.items() if known[: len(path)] == path]

    def _origin(self, path: KeyPath) -> _Origin:
        """Where `path` was written: itself, else its first key, else the nearest section around it."""
        if not path:
            return self.file
        if beneath := self._beneath(path):
            return beneath[0]
        return self._origin(path[:-1]) if path[:-1] in self.origins else self.file

    def _plain(self, node: yaml.Node, path: KeyPath, origin: _Origin) -> Any:
        """Turns a node into dicts, lists and scalars, fresh ones for every alias, and notes the origins of all keys."""
        here = origin.at(node.start_mark.line)
        if len(path) > _DEEPEST:
            raise _LineError(here, f"{dotted(path[:3])}...: nested too deeply; does an alias name its own parent?")
        if path:
            self.origins.setdefault(path, here)
        match node:
            case yaml.MappingNode(tag="tag:yaml.org,2002:map"):
                return self._plain_mapping(node, path, origin)
            case yaml.SequenceNode(tag="tag:yaml.org,2002:seq"):
                return [self._plain(item, (*path, index), origin) for index, item in enumerate(node.value)]
            case yaml.ScalarNode():
                try:
                    return _scalar(node)
                except ValueError:
                    pass  # told below, as for other kinds of nodes
        kind = node.tag.rpartition(":")[2]
        raise _LineError(here, f"{dotted(path)}: cannot be read as {kind}; write a plain value")

    def _plain_mapping(self, node: yaml.MappingNode, path: KeyPath, origin: _Origin) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for key_node, value_node in node.value:
            here = origin.at(key_node.start_mark.line)
            if not isinstance(key_node, yaml.ScalarNode) or not key_node.value.isprintable():
                raise _LineError(here, "a key must be plain text on one line")
            inner = (*path, key_node.value)
            if key_node.value in plain:
                text = f"{dotted(inner)}: the key is set twice; first at {self.origins[inner]}; remove one"
                self.problems.append(_LineError(here, text))
            else:
                self.origins[inner] = here
                plain[key_node.value] = self._plain(value_node, inner, origin)
        return plain


def _compose(text: str, origin: _Origin) -> yaml.Node | None:
    """YAML text -> its root node, None where there is none.  Pure; raises _LineError."""
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
    raise _LineError(origin.at(line), f"not valid YAML: {what}")


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


def _locate(parts: list[str], tree: Any, origin: _Origin) -> KeyPath:
    """The parts of an override's key -> a path into the tree, indices as numbers.  Pure; raises _LineError."""
    path: KeyPath = ()
    for part in parts:
        match tree:
            case list() if part in map(str, range(len(tree))):
                path, tree = (*path, int(part)), tree[int(part)]
            case list():
                raise _LineError(origin, f"{dotted(path)} has {len(tree)} entries, counted from 0; got index {part}")
            case dict() if not part.isdecimal():
                path, tree = (*path, part), tree.get(part, {})
            case dict():
                raise _LineError(
                    origin, f"{dotted(path)} is not a list in the file; got index {part}; give the whole list"
                )
            case _:
                raise _LineError(origin, f"{dotted(path)} is a plain value and has no key {part}; got {show(tree)}")
    return path


def _put(tree: Any, path: KeyPath, value: object) -> None:
    """Sets a located path, adding the sections on the way that are not there yet."""
    for step in path[:-1]:
        tree = tree.setdefault(step, {}) if isinstance(tree, dict) else tree[step]
    tree[path[-1]] = value
