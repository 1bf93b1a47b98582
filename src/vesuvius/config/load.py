"""YAML files, environment variables and command-line overrides -> `Config`, and back to YAML.

    text -> values with their lines (`written.py`), over those of the file that it extends -> variables -> overrides
         -> pydantic -> `Config`, or one `ConfigError` with one line per problem

Functions that take a path read files; all others are pure.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from vesuvius.config import Config
from vesuvius.config.describe import REMOVED, KeyPath, dotted, explain, schema_at, show, to_yaml
from vesuvius.config.environment import key_of_variable, origin_of, variables
from vesuvius.config.written import LineError, Origin, Text, Value
from vesuvius.errors import ConfigError

_MOST_PROBLEMS = 20  # that are printed
_LONGEST_CHAIN = 8  # files that extend one another
_OVERRIDE = "override "

_Comment = Callable[[KeyPath, FieldInfo], str | None]
_NONE: Mapping[str, str] = {}


def read_config(path: Path, overrides: Sequence[str] = (), environment: Mapping[str, str] = _NONE) -> Config:
    """Reads a YAML file and those it extends, applies what else is set, and validates.

    Args:
        overrides: `training.lr=1e-4`, applied last, in order.
        environment: variables; those that begin with `VESUVIUS_` set keys (`environment.py`).

    Raises ConfigError with one line per problem, each with the file and line, variable or override it comes from.
    """
    return _validated(_read_layers(path), overrides, environment)


def explain_config(path: Path, overrides: Sequence[str] = (), environment: Mapping[str, str] = _NONE) -> str:
    """The whole config as `read_config` reads it, as YAML; comments say where each value comes from, and its meaning.

    Raises ConfigError.
    """
    draft = _read_layers(path)
    config = _validated(draft, overrides, environment)

    def comment(path: KeyPath, info: FieldInfo) -> str:
        found = draft.root.at(path)
        is_section = "properties" in schema_at(path) or (found is not None and isinstance(found.content, dict))
        return str(info.description) if is_section else f"{_source(found)}: {info.description}"

    return "\n".join(_dump_section(config, comment)) + "\n"


def _source(found: Value | None) -> str:
    """`default`, `x.yaml:3`, `environment variable VESUVIUS_SEED` or `command line`."""
    if found is None or found.origin is None:
        return "default"
    return "command line" if found.origin.source.startswith(_OVERRIDE) else str(found.origin)


def parse_config(text: str, overrides: Sequence[str] = (), source: str = "config") -> Config:
    """As `read_config`, from a text that extends no file; messages call it `source`.  Pure; raises ConfigError."""
    draft = _draft(text, source)
    if named := draft.root.at(("extends",)):
        raise LineError(next(named.origins()), "extends: only a file on disk can extend another")
    return _validated(draft, overrides)


def parse_stored(stored: Any, overrides: Sequence[str] = (), source: str = "config") -> Config:
    """As `parse_config`, from an earlier `config.model_dump(mode="json")`, of another set of keys."""
    diffusion = stored.get("diffusion") if isinstance(stored, dict) else None
    if isinstance(diffusion, dict) and "schedule" in diffusion:  # the key's name in earlier versions
        renamed = {key: value for key, value in diffusion.items() if key != "schedule"}
        stored = stored | {"diffusion": renamed | {"noise": diffusion["schedule"]}}
    if isinstance(diffusion, dict) and (diffusion.get("zero_terminal_snr") or diffusion.get("loss", "l2") != "l2"):
        raise ConfigError(
            f"{source} was trained with diffusion.zero_terminal_snr or a Huber loss, which this version no longer has; "
            "use the version of vesuvius that trained it"
        )
    return parse_config(to_yaml(_without_removed(stored)), overrides, source)


def _without_removed(stored: Any, path: KeyPath = ()) -> Any:
    """Without keys that this version no longer has."""
    if not isinstance(stored, dict):
        return stored
    kept = {key: item for key, item in stored.items() if dotted((*path, key)) not in REMOVED}
    return {key: _without_removed(item, (*path, key)) for key, item in kept.items()}


def read_source(path: Path) -> bytes:
    """The file as it is; where it extends others, all of them merged into one text that needs no other file.

    Raises ConfigError.
    """
    draft = _read_layers(path)
    if len(draft.files) == 1:
        return path.read_bytes()
    lines = [f"# Merged from {', '.join(map(show, draft.files))}; the comments say where each key was set.", ""]
    return "\n".join([*lines, *_merged_lines(draft.root.content), ""]).encode()


def dump_config(config: Config) -> str:
    """The whole config, defaults included, as YAML that reads back equal.  Pure."""
    return "\n".join(_dump_section(config, lambda path, info: None)) + "\n"


def dump_set_keys(config: Config, comments: Mapping[str, str]) -> str:
    """The keys that were set when the config was made, each with its comment (`data.volumes[].path`).  Pure."""

    def comment(path: KeyPath, _: FieldInfo) -> str | None:
        return comments.get(dotted(path, index="[]"))

    return "\n".join(_dump_section(config, comment, only_set=True)) + "\n"


def _dump_section(section: BaseModel, comment: _Comment, path: KeyPath = (), only_set: bool = False) -> Iterator[str]:
    for name, info in type(section).model_fields.items():
        if only_set and name not in section.model_fields_set:
            continue
        value, key = getattr(section, name), (*path, name)
        if only_set and isinstance(value, BaseModel) and not value.model_fields_set:
            continue
        text = f"  # {said}" if (said := comment(key, info)) else ""
        match value:
            case BaseModel():
                yield f"{name}:{text}"
                yield from ("  " + line for line in _dump_section(value, comment, key, only_set))
            case (BaseModel(), *_):
                yield f"{name}:{text}"
                for number, item in enumerate(value):
                    first, *others = _dump_section(item, comment, (*key, number), only_set)
                    yield f"  - {first}"
                    yield from ("    " + line for line in others)
            case _:
                yield f"{name}: {to_yaml(value)}{text}"


@dataclass
class _Draft:
    """What files and overrides have set so far, and what is wrong with it."""

    root: Value
    files: list[str]  # this one, then those that it extends
    problems: list[LineError]

    def extend(self, base: _Draft) -> None:
        """Fills in what this file leaves out: sections are merged key by key, all other values stay."""

        def fill(above: dict[str, Value], below: dict[str, Value]) -> None:
            for key, value in below.items():
                present = above.setdefault(key, value)
                if present is not value and isinstance(present.content, dict) and isinstance(value.content, dict):
                    fill(present.content, value.content)

        fill(self.root.content, base.root.content)
        self.problems += base.problems
        self.files += base.files

    def set_from(self, variable: str, value: str) -> None:
        """Applies an environment variable; one that names no key is noted as a problem."""
        try:
            self.override(f"{key_of_variable(variable)}={value}", origin_of(variable))
        except LineError as problem:
            self.problems.append(problem)

    def override(self, text: str, origin: Origin | None = None) -> None:
        """Applies one `key.path=value`; a malformed one is noted as a problem and changes nothing."""
        origin = origin or Origin(f"{_OVERRIDE}{' '.join(text.split())}", is_override=True)
        written = Text(origin)
        key, equals, value_text = text.partition("=")
        parts = tuple(part.strip() for part in re.sub(r"\[(\d+)\]", r".\1", key).split("."))
        try:
            if not equals or not all(parts) or not key.isprintable():
                raise LineError(origin, "an override must look like key.path=value, such as training.lr=1e-4")
            value = written.value(value_text, parts)
            if value is None:
                raise LineError(origin, "the value is missing; write null for none, or '' for empty text")
            _put(self.root, parts, value, origin)
            self.problems += written.problems
        except LineError as problem:
            self.problems.append(problem)

    def add_validation_errors(self, errors: list[ErrorDetails]) -> None:
        """Notes pydantic's errors in the words of the file, each with its origin."""
        texts: dict[KeyPath, str] = {}
        for error in errors:
            texts |= explain(error)
        for path, text in texts.items():
            origin, found = self._origin(path), self.root.at(path)
            if found and "properties" in schema_at(path):  # keys of a section contradict each other, whoever wrote them
                others = dict.fromkeys(o.source for o in found.origins() if o.source != origin.source)
                origin = origin._replace(others=tuple(others))
            self.problems.append(LineError(origin, f"{dotted(path)}: {text}" if path else text))

    def _origin(self, path: KeyPath) -> Origin:
        """Where `path` was written: itself, else its first key, else the section around it, else the file."""
        found, around = self.root.at(path), self.root.at(path[:-1])
        if path and found is not None:
            return next(found.origins())
        return (path[:-1] and around and around.origin) or Origin(self.files[0])

    def ordered_problems(self) -> list[LineError]:
        """Files before variables and overrides, lines in order."""

        def place(problem: LineError) -> tuple[int, int]:
            origin = problem.origin
            return (len(self.files), 0) if origin.is_override else (self.files.index(origin.source), origin.line)

        return sorted(self.problems, key=place)


def _merged_lines(section: dict[str, Value], indent: str = "") -> Iterator[str]:
    """YAML of a section, each value with its origin as comment."""
    for key, value in section.items():
        label = f"{indent}{to_yaml(key)}:"
        if isinstance(value.content, dict) and value.content:
            yield label
            yield from _merged_lines(value.content, indent + "  ")
        else:
            yield f"{label} {to_yaml(value.plain())}  # {show(str(value.origin))[1:-1]}"


def _draft(text: str, source: str) -> _Draft:
    """Of one file; raises LineError where it is not YAML or has no keys at the top."""
    written = Text(Origin(source))
    root = written.value(text)
    if root is None:
        raise LineError(written.origin, "the file is empty; it needs at least name and data.volumes")
    if not isinstance(root.content, dict):
        assert root.origin is not None
        raise LineError(root.origin, "the file must hold keys and values, such as `name: demo`, at the top level")
    return _Draft(root, [source], written.problems)


def _validated(draft: _Draft, overrides: Sequence[str], environment: Mapping[str, str] = _NONE) -> Config:
    for variable, value in variables(environment).items():
        draft.set_from(variable, value)
    for override in overrides:
        draft.override(override)
    for *section, name in (key.split(".") for key in REMOVED):  # null, as in the resolved config of an older run
        around, found = draft.root.at(tuple(section)), draft.root.at((*section, name))
        if around and found and found.content is None:
            del around.content[name]
    try:
        # As JSON: in strict mode pydantic then takes a list for a tuple, and still converts nothing else.
        config = Config.model_validate_json(json.dumps(draft.root.plain()))
    except ValidationError as error:
        draft.add_validation_errors(error.errors())
    if draft.problems:
        lines = [str(problem) for problem in draft.ordered_problems()]
        more = [f"and {len(lines) - _MOST_PROBLEMS} more"] if len(lines) > _MOST_PROBLEMS else []
        raise ConfigError("\n".join([*lines[:_MOST_PROBLEMS], *more]))
    return config


def _read_layers(path: Path, chain: tuple[Path, ...] = (), named_at: Origin | None = None) -> _Draft:
    """The draft of a file, over that of the file it extends.  Raises ConfigError.

    Args:
        chain: the files that lead here, the first one first.
        named_at: where `extends` names this one.
    """
    try:
        text = _read_text(path)
    except ConfigError as error:
        raise (LineError(named_at, f"extends: {error}") if named_at else error) from None
    draft = _draft(text, str(path))
    named = draft.root.content.pop("extends", None)
    if named is None:
        return draft
    name, here = named.plain(), named.origin
    if not isinstance(name, str) or not name or not name.isprintable():
        raise LineError(here, f"extends: must be the path of a YAML config, from this file's folder; got {show(name)}")
    chain, base = (*chain, path), path.parent / os.path.expanduser(name)
    if os.path.realpath(base) in map(os.path.realpath, chain):
        circle = " -> ".join(map(str, (*chain, base)))
        raise LineError(here, f"extends: files must not extend each other in a circle; got {circle}; remove one")
    if len(chain) == _LONGEST_CHAIN:
        raise LineError(here, f"extends: at most {_LONGEST_CHAIN} files may extend one another; got more; merge some")
    draft.extend(_read_layers(base, chain, here))
    return draft


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return data.decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; give the path of a YAML config") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: this is a directory; give the path of a YAML config") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: must be UTF-8 text; got byte 0x{data[error.start]:02x}") from None


def _put(root: Value, parts: tuple[str, ...], value: Value, origin: Origin) -> None:
    """Sets what an override names, with sections that are missing on the way.  Raises LineError before a change."""
    way: list[tuple[Any, str | int, Value]] = []  # section or list, key or index, and what it holds there
    held = root
    for number, part in enumerate(parts):
        content, path = held.content, dotted(parts[:number])
        step: str | int = part
        match content:
            case list() if part in map(str, range(len(content))):
                step = int(part)
            case list():
                raise LineError(origin, f"{path} has {len(content)} entries, counted from 0; got index {part}")
            case dict() if part.isdecimal():
                raise LineError(origin, f"{path} is not a list in the file; got index {part}; give the whole list")
            case dict():
                pass
            case _:
                raise LineError(origin, f"{path} is a plain value and has no key {part}; got {show(content)}")
        held = held.at((step,)) or Value({}, None)
        way.append((content, step, held))
    for content, step, held in [*way[:-1], (*way[-1][:2], value)]:
        content[step] = held
