"""YAML file and command-line overrides -> `Config`, and back to YAML.

    text -> YAML nodes, which know their lines -> plain values and the origin of every key -> overrides on top
         -> pydantic -> `Config`, or one `ConfigError` with one line per problem, in the words of the file

Scalars follow the YAML 1.2 core schema: `1e-4` is a number, `off` is text, `010` is ten, there are no dates.
`read_config` alone touches the disk; everything else is pure.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vesuvius.config import Config
from vesuvius.errors import ConfigError

KeyPath = tuple[str | int, ...]
JsonSchema = dict[str, Any]

_DEEPEST = 20  # levels of nesting; the schema has four, and an alias to its own parent has no end
_LONGEST_NUMBER = 1000  # digits
_LONGEST_VALUE = 80  # characters of a received value that a message quotes
_CORE_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
)


class _CoreLoader(yaml.SafeLoader):
    """Composes nodes whose plain scalars carry the tags of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - replaces PyYAML's YAML 1.1 table, filled below


class _PortableDumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or 1.2 would take for something other than text, so that any tool reads it alike."""


for _name, _pattern, _first in _CORE_SCALARS:
    for _class in (_CoreLoader, _PortableDumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_pattern})\Z"), _first)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if text.isprintable() else '"'  # the only style that keeps line breaks on one line
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_PortableDumper.add_representer(str, _represent_text)


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


def dump_config(config: Config, *, comments: bool = False) -> str:
    """The whole config, defaults included, as YAML that reads back equal; `comments` adds meanings.  Pure."""
    return "\n".join(_dump_section(config, "", comments)) + "\n"


def iter_keys(schema: JsonSchema | None = None, prefix: str = "") -> Iterator[tuple[str, JsonSchema]]:
    """Every key of the config (`data.volumes[].path`), sections before what they hold, with its JSON schema.  Pure."""
    for name, found in (_config_schema() if schema is None else schema)["properties"].items():
        key, key_schema = f"{prefix}{name}", _resolved(found)
        yield key, key_schema
        below, mark = (_resolved(key_schema["items"]), "[].") if "items" in key_schema else (key_schema, ".")
        if "properties" in below:
            yield from iter_keys(below, key + mark)


def describe_type(schema: JsonSchema) -> str:
    """What a key takes, in plain words: "an integer of at least 1 or null".  Pure."""
    schema = _resolved(schema)
    match schema:
        case {"anyOf": options}:
            return " or ".join(describe_type(option) for option in options)
        case {"enum": choices}:
            return f"one of {', '.join(choices)}"
        case {"const": only}:
            return f"'{only}'"
        case {"prefixItems": items}:
            return f"a list of {len(items)} values, each {describe_type(items[0])}"
        case {"type": "array", "items": item}:
            count = f" of at least {schema['minItems']}" if "minItems" in schema else ""
            return f"a list{count}, each {describe_type(item)}"
    words = {"integer": "an integer", "number": "a number", "string": "text", "boolean": "true or false"}
    words |= {"null": "null", "object": "a section with keys of its own"}
    bounds = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    limits = [f"{word} {schema[name]}" for name, word in bounds.items() if name in schema]
    return " ".join([words[schema["type"]], " and ".join(limits)]).strip()


def to_yaml(value: object) -> str:
    """A value on one line, as one would write it behind a key.  Pure."""
    # Inside a list because flow style quotes whatever could end the value early; the brackets are cut off again.
    options: dict[str, Any] = {"default_flow_style": True, "width": float("inf"), "allow_unicode": True}
    dumped: str = yaml.dump([value], Dumper=_PortableDumper, sort_keys=False, **options)
    return dumped.strip()[1:-1]


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
            texts |= _explain(error)
        for path, text in texts.items():
            origin = self._origin(path)
            if "properties" in _schema_at(path):  # keys of a section contradict each other, whoever wrote them
                others = dict.fromkeys(o.source for o in self._beneath(path) if o.is_override and o != origin)
                origin = origin._replace(others=tuple(others))
            self.problems.append(_LineError(origin, f"{_dotted(path)}: {text}" if path else text))

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
            raise _LineError(here, f"{_dotted(path[:3])}...: nested too deeply; does an alias name its own parent?")
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
        raise _LineError(here, f"{_dotted(path)}: cannot be read as {kind}; write a plain value")

    def _plain_mapping(self, node: yaml.MappingNode, path: KeyPath, origin: _Origin) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for key_node, value_node in node.value:
            here = origin.at(key_node.start_mark.line)
            if not isinstance(key_node, yaml.ScalarNode) or not key_node.value.isprintable():
                raise _LineError(here, "a key must be plain text on one line")
            inner = (*path, key_node.value)
            if key_node.value in plain:
                text = f"{_dotted(inner)}: the key is set twice; first at {self.origins[inner]}; remove one"
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
                raise _LineError(origin, f"{_dotted(path)} has {len(tree)} entries, counted from 0; got index {part}")
            case dict() if not part.isdecimal():
                path, tree = (*path, part), tree.get(part, {})
            case dict():
                raise _LineError(
                    origin, f"{_dotted(path)} is not a list in the file; got index {part}; give the whole list"
                )
            case _:
                raise _LineError(origin, f"{_dotted(path)} is a plain value and has no key {part}; got {_show(tree)}")
    return path


def _put(tree: Any, path: KeyPath, value: object) -> None:
    """Sets a located path, adding the sections on the way that are not there yet."""
    for step in path[:-1]:
        tree = tree.setdefault(step, {}) if isinstance(tree, dict) else tree[step]
    tree[path[-1]] = value


def _explain(error: ErrorDetails) -> dict[KeyPath, str]:
    """One pydantic error as texts by key path; entries of one list that are missing share one.  Pure."""
    path, value = error["loc"], error["input"]
    match error["type"]:
        case "missing" if isinstance(path[-1], str):
            return dict.fromkeys(_required_below(path), "required key is missing")
        case "missing":
            path = path[:-1]
        case "extra_forbidden":
            return {path: f"unknown key; got {_show(value)}{_suggest(path)}"}
        case "value_error":
            text = str(error["ctx"]["error"])
            return {path: text if "; got " in text else f"{text}; got {_show(value)}"}
        case "finite_number":
            return {path: f"must be a finite number; got {_show(value)}"}
        case "too_short" if len(value) >= error["ctx"]["min_length"]:
            return {}  # pydantic counts only the good entries; the bad ones have errors of their own
    schema = _schema_at(path)
    return {path: f"must be {describe_type(schema)}; got {_show(value)}{_hint(schema, value)}"}


def _hint(schema: JsonSchema, value: object) -> str:
    """What a value of the wrong type or spelling was probably meant to be.  Pure."""
    kinds = {option.get("type") for option in schema.get("anyOf", [schema])}
    choices = schema.get("enum", [])
    guess = None
    match value:
        case None if "object" in kinds:
            guess = "{}"
        case str() if "null" in kinds and value.lower() == "none":
            guess = "null"
        case str() if "boolean" in kinds and value.lower() in ("on", "yes", "off", "no"):
            guess = to_yaml(value.lower() in ("on", "yes"))
        case str() if close := difflib.get_close_matches(value.lower(), choices, n=1):
            guess = f"'{close[0]}'"
        case float() if "integer" in kinds and value.is_integer():
            guess = str(int(value))
        case bool() | int() | float() if "string" in kinds and not choices:
            guess = f"'{to_yaml(value)}'"
    return f"; did you mean {guess}?" if guess else ""


def _suggest(path: KeyPath) -> str:
    """The known key that an unknown one was probably meant to be, by its full name if it lives elsewhere.  Pure."""
    section, key = _dotted(path[:-1], index="[]"), str(path[-1]).lower()
    if "." in key:
        return "; dots join keys in overrides only: write each part on a line of its own, indented"

    likely: dict[str, float] = {}
    for known, _ in iter_keys():
        home, _, name = known.rpartition(".")
        alike = difflib.SequenceMatcher(None, key, name).ratio() + 0.3 * (len(key) > 2 and key in name)
        if alike >= 0.6:
            likely[known] = alike + 0.2 * (home == section)
    if likely:
        home, _, name = (best := max(likely, key=lambda known: likely[known])).rpartition(".")
        return f"; did you mean {name if home == section else best}?"
    return f"; known here: {', '.join(_schema_at(path[:-1])['properties'])}"


@functools.cache
def _config_schema() -> JsonSchema:
    return Config.model_json_schema()


def _resolved(schema: JsonSchema) -> JsonSchema:
    """The schema with its reference, if it is one, filled in."""
    if "$ref" not in schema:
        return schema
    target: JsonSchema = _config_schema()["$defs"][schema["$ref"].rpartition("/")[2]]
    return target | schema


def _schema_at(path: KeyPath) -> JsonSchema:
    """The schema of a key; empty for one that does not exist."""
    schema = _config_schema()
    for step in path:
        if isinstance(step, int):
            schema = _resolved(schema["items"] if "items" in schema else schema["prefixItems"][step])
        else:
            schema = _resolved(schema.get("properties", {}).get(step, {}))
    return schema


def _required_below(path: KeyPath) -> Iterator[KeyPath]:
    """The keys that a user has to write where `path` is absent."""
    schema = _schema_at(path)
    if "properties" not in schema:
        yield path
    for name in schema.get("required", []):
        yield from _required_below((*path, name))


def _dotted(path: KeyPath, index: str | None = None) -> str:
    """`data.volumes.0.path`, as in overrides, or with `index` in place of numbers: `data.volumes[].path`."""
    if index is None:
        return ".".join(map(str, path)) or "the top level"
    return "".join(index if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def _show(value: object) -> str:
    """A received value for a message, as it would stand in the file, text always in quotes."""
    shown = repr(value) if isinstance(value, str) else to_yaml(value)
    return shown if len(shown) <= _LONGEST_VALUE else shown[: _LONGEST_VALUE - 3] + "..."
