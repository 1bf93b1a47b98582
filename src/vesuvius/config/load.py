"""YAML files, environment variables and command-line overrides -> `Config`, and back to YAML.

    text -> plain values (`yaml_source.py`), over those of the file that it extends -> variables -> overrides
         -> pydantic -> `Config`, or one `ConfigError` with one line per problem

Files and lines of wrong values are looked up once something is wrong.  Functions that take a path read files; all
others are pure.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from vesuvius.config import Config
from vesuvius.config.describe import REMOVED, KeyPath, dotted, explain, schema_at, show, to_yaml, to_yaml_block
from vesuvius.config.environment import key_of_variable, variables
from vesuvius.config.yaml_source import line_of, read_yaml
from vesuvius.errors import ConfigError

_MOST_PROBLEMS = 20  # that are printed

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


def parse_config(text: str, overrides: Sequence[str] = (), source: str = "config") -> Config:
    """As `read_config`, from a text that extends no file; messages call it `source`.  Pure; raises ConfigError."""
    draft = _draft(text, source)
    if "extends" in draft.tree:
        raise ConfigError(f"{draft.file_line(('extends',))}: extends: only a file on disk can extend another")
    return _validated(draft, overrides)


def parse_stored(stored: Any, overrides: Sequence[str] = (), source: str = "config") -> Config:
    """As `parse_config`, from an earlier `config.model_dump(mode="json")`, which may lack keys that came later.

    Keys that this version no longer has are passed over: what was trained does not depend on them.
    """
    diffusion = stored.get("diffusion") if isinstance(stored, dict) else None
    if isinstance(diffusion, dict) and "schedule" in diffusion:  # the key's name in earlier versions
        renamed = {key: value for key, value in diffusion.items() if key != "schedule"}
        stored = stored | {"diffusion": renamed | {"noise": diffusion["schedule"]}}
    if isinstance(diffusion, dict) and (diffusion.get("zero_terminal_snr") or diffusion.get("loss", "l2") != "l2"):
        raise ConfigError(
            f"{source} was trained with diffusion.zero_terminal_snr or a Huber loss, which this version no longer has; "
            "use the version of vesuvius that trained it"
        )
    return parse_config(to_yaml(_without_removed(stored, only_null=False)), overrides, source)


def _without_removed(tree: Any, only_null: bool, path: KeyPath = ()) -> Any:
    """Without the keys of `REMOVED`, or those of them that are null, as in the resolved config of an older run."""
    if not isinstance(tree, dict):
        return tree
    return {
        key: _without_removed(item, only_null, (*path, key))
        for key, item in tree.items()
        if dotted((*path, key)) not in REMOVED or (only_null and item is not None)
    }


def read_source(path: Path) -> bytes:
    """The file as it is; where it extends others, all of them merged into one text that needs no other file.

    Raises ConfigError.
    """
    draft = _read_layers(path)
    if len(draft.texts) == 1:
        return path.read_bytes()
    return f"# Merged from {', '.join(map(show, draft.texts))}.\n\n{to_yaml_block(draft.tree)}".encode()


def dump_config(config: Config, with_meanings: bool = False) -> str:
    """The whole config, defaults included, as YAML that reads back equal; comments say what the keys mean.  Pure."""
    return "\n".join(_dump_section(config, lambda _, info: info.description if with_meanings else None)) + "\n"


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
    """What files, variables and overrides have set so far, and what is wrong with it."""

    tree: dict[str, Any]
    texts: dict[str, str]  # by file: this one, then those that it extends
    settings: list[tuple[str, KeyPath]] = field(default_factory=list)  # each variable or override, and what it sets
    problems: list[tuple[tuple[int, int], str]] = field(default_factory=list)  # file or setting and line, message

    def set_from(self, label: str, key: str, value_text: str) -> None:
        """Applies one variable or override; a malformed one is noted as a problem and changes nothing."""
        parts = tuple(part.strip() for part in re.sub(r"\[(\d+)\]", r".\1", key).split("."))
        try:
            value = read_yaml(value_text, label, parts, has_lines=False)
            if value is None and not value_text.strip():
                raise ConfigError(f"{label}: the value is missing; write null for none, or '' for empty text")
            self.settings.append((label, _put(self.tree, parts, value, label)))
        except ConfigError as error:
            self.note(str(error))

    def note(self, text: str) -> None:
        """Notes a problem of a variable or override, after those of files."""
        self.problems.append(((len(self.texts), len(self.settings)), text))

    def add_validation_errors(self, errors: list[ErrorDetails]) -> None:
        """Notes pydantic's errors in the words of the file, each with the source of the value at fault."""
        texts: dict[KeyPath, str] = {}
        for error in errors[: 50 * _MOST_PROBLEMS]:
            texts |= explain(error)
        for path, text in texts.items():
            place, source = self._source(path, text)
            self.problems.append((place, f"{source}: {dotted(path)}: {text}" if path else f"{source}: {text}"))

    def _source(self, path: KeyPath, text: str) -> tuple[tuple[int, int], str]:
        """The last setting of the value at fault, else its file and line.

        Keys of a section that contradict each other are named in the text.
        """
        is_section = not path or "properties" in schema_at(path)
        words = set(re.findall(r"\w+", text))
        for place, (label, key) in reversed([*enumerate(self.settings)]):
            is_within = key[: len(path)] == path and (not is_section or any(step in words for step in key[len(path) :]))
            if is_within or key == path[: len(key)]:
                return (len(self.texts), place), label
        file, line = self._place(path)
        return (file, line), self.file_line(path)

    def _place(self, path: KeyPath) -> tuple[int, int]:
        """Index of the file that has the value, or the section around it, and its line; 0 = none."""
        found, place = 0, (0, 0)
        for index, text in enumerate(self.texts.values()):
            depth, line, goes_on = line_of(text, path)
            if depth > found:
                found, place = depth, (index, line)
            if not goes_on:
                break
        return place

    def file_line(self, path: KeyPath) -> str:
        """`x.yaml:3`."""
        file, line = self._place(path)
        return [*self.texts][file] + (f":{line}" if line else "")


def _draft(text: str, source: str) -> _Draft:
    """Of one file; raises ConfigError where it is not YAML or has no keys at the top."""
    tree = read_yaml(text, source)
    if tree is None:
        raise ConfigError(f"{source}: the file is empty; it needs at least name and data.volumes")
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: the file must hold keys and values, such as `name: demo`, at the top level")
    return _Draft(tree, {source: text})


def _validated(draft: _Draft, overrides: Sequence[str], environment: Mapping[str, str] = _NONE) -> Config:
    for name, value in variables(environment).items():
        try:
            draft.set_from(f"environment variable {name}", key_of_variable(name), value)
        except ConfigError as error:
            draft.note(str(error))
    for override in overrides:
        key, equals, value = override.partition("=")
        label = f"override {' '.join(override.split())}"
        if equals and key.isprintable() and all(part.strip() for part in key.split(".")):
            draft.set_from(label, key, value)
        else:
            draft.note(f"{label}: an override must look like key.path=value, such as training.lr=1e-4")
    try:
        # As JSON: in strict mode pydantic then takes a list for a tuple, and still converts nothing else.
        config = Config.model_validate_json(json.dumps(_without_removed(draft.tree, only_null=True)))
    except ValidationError as error:
        draft.add_validation_errors(error.errors())
    if draft.problems:
        lines = [text for _, text in sorted(draft.problems, key=lambda problem: problem[0])]
        more = [f"and {len(lines) - _MOST_PROBLEMS} more"] if len(lines) > _MOST_PROBLEMS else []
        raise ConfigError("\n".join([*lines[:_MOST_PROBLEMS], *more]))
    return config


def _read_layers(path: Path, chain: tuple[Path, ...] = (), named_at: str = "") -> _Draft:
    """The draft of a file, over that of the file it extends.  Raises ConfigError.

    Args:
        chain: the files that lead here, the first one first.
        named_at: where `extends` names this one.
    """
    try:
        text = _read_text(path)
    except ConfigError as error:
        raise (ConfigError(f"{named_at}: extends: {error}") if named_at else error) from None
    draft = _draft(text, str(path))
    if "extends" not in draft.tree:
        return draft
    name, here = draft.tree.pop("extends"), draft.file_line(("extends",))
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ConfigError(
            f"{here}: extends: must be the path of a YAML config, from this file's folder; got {show(name)}"
        )
    chain, base = (*chain, path), path.parent / os.path.expanduser(name)
    if os.path.realpath(base) in map(os.path.realpath, chain):
        circle = " -> ".join(map(str, (*chain, base)))
        raise ConfigError(f"{here}: extends: files must not extend each other in a circle; got {circle}; remove one")
    below = _read_layers(base, chain, here)
    _fill(draft.tree, below.tree)
    draft.texts |= below.texts
    return draft


def _fill(above: dict[str, Any], below: dict[str, Any]) -> None:
    """Fills in what a file leaves out: sections are merged key by key, all other values stay."""
    for key, value in below.items():
        present = above.setdefault(key, value)
        if present is not value and isinstance(present, dict) and isinstance(value, dict):
            _fill(present, value)


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


def _put(tree: dict[str, Any], parts: tuple[str, ...], value: Any, label: str) -> KeyPath:
    """Sets what an override names, with sections that are missing on the way, and returns its path.

    Raises ConfigError before a change.
    """
    holders: list[Any] = [tree]
    steps: list[str | int] = []
    for number, part in enumerate(parts):
        holder, path = holders[-1], dotted(parts[:number])
        match holder:
            case list() if part in map(str, range(len(holder))):
                steps.append(int(part))
                holders.append(holder[int(part)])
            case list():
                raise ConfigError(f"{label}: {path} has {len(holder)} entries, counted from 0; got index {part}")
            case dict() if part.isdecimal():
                raise ConfigError(f"{label}: {path} is not a list in the file; got index {part}; give the whole list")
            case dict():
                steps.append(part)
                holders.append(holder.get(part, {}))
            case _:
                raise ConfigError(f"{label}: {path} is a plain value and has no key {part}; got {show(holder)}")
    for holder, step, held in zip(holders[:-1], steps, [*holders[1:-1], value], strict=True):
        holder[step] = held
    return tuple(steps)
