"""YAML files, environment variables and command-line overrides -> `Config`, and back to YAML.

    text -> plain values (`yaml_source.py`), over those of the file that it extends -> variables -> overrides
         -> pydantic -> `Config`, or one `ConfigError` with one line per problem

Files and lines of wrong values are looked up once something is wrong.  Functions that take a path read files.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from vesuvius.config import Config
from vesuvius.config.describe import (
    REMOVED,
    TRAINED_WITH,
    KeyPath,
    dotted,
    explain,
    iter_keys,
    schema_at,
    show,
    to_yaml,
    to_yaml_block,
)
from vesuvius.config.yaml_source import line_of, read_yaml
from vesuvius.errors import ConfigError

log = logging.getLogger(__name__)

_MOST_PROBLEMS = 20  # that are printed
_PREFIX = "VESUVIUS_"  # of variables; two underscores stand for a dot, a number for an item of a list
_NO_KEYS = ("VESUVIUS_RUNS",)  # read by `runlog/find_run.py`
_OF_SERVICES = "_SERVICE_HOST"

_Comment = Callable[[KeyPath, FieldInfo], str | None]
_Layers = dict[str, str]  # the texts by file: the one that is read, then those that it extends
_NONE: Mapping[str, str] = {}


def read_config(path: Path, overrides: Sequence[str] = (), environment: Mapping[str, str] = _NONE) -> Config:
    """Reads a YAML file and those it extends, applies what else is set, and validates.

    Args:
        overrides: `training.lr=1e-4`, applied last, in order.
        environment: variables: `VESUVIUS_TRAINING__WORKERS=4` is `training.workers=4`.

    Raises ConfigError with one line per problem, each with the file and line, variable or override it comes from.
    """
    return _validated(*_read_layers(path), overrides, environment)


def take_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """`read_config` of this process's environment, whose variables are taken out of it.  Raises ConfigError."""
    return read_config(path, overrides, take_variables())


def take_variables() -> dict[str, str]:
    """Take the variables that set keys out of the environment, and log their names.

    Processes that this one starts (readers, ranks, trainers of a tune or bench) get the config itself: they must not
    apply the variables a second time.
    """
    taken = variables(os.environ)
    for name in taken:
        del os.environ[name]
    if taken:
        log.info("keys are set by the environment: %s", ", ".join(taken))  # no values: they may be secret
    return taken


def parse_config(text: str, overrides: Sequence[str] = (), source: str = "config") -> Config:
    """As `read_config`, from a text that extends no file; messages call it `source`.  Pure; raises ConfigError."""
    tree = _tree_of(text, source)
    if "extends" in tree:
        raise ConfigError(f"{_place(('extends',), {source: text})}: extends: only a file on disk can extend another")
    return _validated(tree, {source: text}, overrides)


def parse_stored(stored: Any, overrides: Sequence[str] = (), source: str = "config") -> Config:
    """As `parse_config`, from an earlier `config.model_dump(mode="json")`, which may lack keys that came later.

    Keys that this version no longer has are passed over, unless what was trained depends on them.
    """
    kept = _without_removed(stored, source)
    diffusion = kept.get("diffusion") if isinstance(kept, dict) else None
    if isinstance(diffusion, dict) and "schedule" in diffusion:  # the key's name in earlier versions
        diffusion["noise"] = diffusion.pop("schedule")
    if isinstance(diffusion, dict) and diffusion.get("noise") == "sigmoid":
        raise _gone(source, "diffusion.noise", "sigmoid")
    return parse_config(to_yaml(kept), overrides, source)


def read_source(path: Path) -> bytes:
    """The file as it is; where it extends others, all of them merged into one text that needs no other file.

    Raises ConfigError.
    """
    tree, layers = _read_layers(path)
    if len(layers) == 1:
        return path.read_bytes()
    return f"# Merged from {', '.join(map(show, layers))}.\n\n{to_yaml_block(tree)}".encode()


# ---- to YAML


def dump_config(config: Config, with_meanings: bool = False) -> str:
    """The whole config, defaults included, as YAML that reads back equal; comments say what the keys mean.  Pure."""
    return "\n".join(_dump_section(config, lambda _, info: info.description if with_meanings else None)) + "\n"


def dump_set_keys(config: Config, comments: Mapping[str, str]) -> str:
    """The keys that were set when the config was made, each with its comment (`data.volumes[].path`).  Pure."""
    lines = _dump_section(config, lambda path, _: comments.get(dotted(path, index="[]")), only_set=True)
    return "\n".join(lines) + "\n"


def _dump_section(section: BaseModel, comment: _Comment, path: KeyPath = (), only_set: bool = False) -> Iterator[str]:
    for name, info in type(section).model_fields.items():
        if only_set and name not in section.model_fields_set:  # of a tuned config, whose other keys have no value
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


# ---- variables


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are meant for the config, sections before what they hold.  Pure.

    Those that Kubernetes puts into each pod of a namespace with a Service called `vesuvius` or `vesuvius-...` are not.
    """
    services = [name.removesuffix(_OF_SERVICES) for name in environment if name.endswith(_OF_SERVICES)]
    foreign = tuple(f"{service}{part}" for service in services for part in ("_SERVICE_", "_PORT"))
    names = sorted(name for name in environment if name.startswith(_PREFIX) and not name.startswith(foreign))
    return {name: environment[name] for name in names if name not in _NO_KEYS}


def key_of_variable(name: str) -> str:
    """The key that a variable sets, as in an override: `data.volumes.0.path` of `VESUVIUS_DATA__VOLUMES__0__PATH`.

    Pure.  Raises ConfigError where there is none, with the variable of the nearest key.
    """
    steps = tuple(int(part) if part.isdecimal() else part for part in name.removeprefix(_PREFIX).lower().split("__"))
    known, key = [known for known, _ in iter_keys()], dotted(steps, index="[]")
    if name.isupper() and key.removesuffix("[]") in known:
        return dotted(steps)
    if key in REMOVED:
        raise ConfigError(f"{dotted(steps)} was removed; {REMOVED[key]}; unset the variable")
    names = [_PREFIX + key.replace("[]", ".0").replace(".", "__").upper() for key in known]
    ending = name.upper().replace(_PREFIX, "_", 1)  # of a key whose section was left out
    near = [each for each in names if each.endswith(ending)] or get_close_matches(name.upper(), names, 1, 0.0)
    raise ConfigError(f"names no config key; did you mean {near[0]}? unset it if it is not meant for vesuvius")


# ---- from files and settings


def _tree_of(text: str, source: str) -> dict[str, Any]:
    """The values of one file; raises ConfigError where it is not YAML or has no keys at the top."""
    tree = read_yaml(text, source)
    if tree is None:
        raise ConfigError(f"{source}: the file is empty; it needs at least name and data.volumes")
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: the file must hold keys and values, such as `name: demo`, at the top level")
    return tree


def _read_layers(path: Path, chain: tuple[Path, ...] = (), named_at: str = "") -> tuple[dict[str, Any], _Layers]:
    """The values of a file, over those of the file it extends.  Raises ConfigError.

    Args:
        chain: the files that lead here, the first one first.
        named_at: where `extends` names this one: "x.yaml:2: extends: ".
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{named_at}{path}: {error.strerror}; give the path of a YAML config") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: must be UTF-8 text; got byte 0x{error.object[error.start]:02x}") from None
    tree, layers = _tree_of(text, str(path)), {str(path): text}
    if "extends" not in tree:
        return tree, layers
    name, here = tree.pop("extends"), f"{_place(('extends',), layers)}: extends: "
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ConfigError(f"{here}must be the path of a YAML config, from this file's folder; got {show(name)}")
    chain, base = (*chain, path), path.parent / os.path.expanduser(name)
    if os.path.realpath(base) in map(os.path.realpath, chain):
        circle = " -> ".join(map(str, (*chain, base)))
        raise ConfigError(f"{here}files must not extend each other in a circle; got {circle}; remove one")
    below, more = _read_layers(base, chain, here)
    return _merged(tree, below), layers | more


def _merged(above: dict[str, Any], below: dict[str, Any]) -> dict[str, Any]:
    """The values of both, section by section; of other values and lists those above."""
    merged = above | {key: value for key, value in below.items() if key not in above}
    for key in above.keys() & below.keys():
        if isinstance(above[key], dict) and isinstance(below[key], dict):
            merged[key] = _merged(above[key], below[key])
    return merged


def _validated(
    tree: dict[str, Any], layers: _Layers, overrides: Sequence[str], environment: Mapping[str, str] = _NONE
) -> Config:
    settings: list[tuple[str, KeyPath]] = []  # each variable or override, and what it sets
    problems: list[str] = []

    @contextmanager
    def noted(label: str) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            problems.append(f"{label}: {str(error).removeprefix(f'{label}: ')}")

    for name, value in variables(environment).items():
        with noted(label := f"environment variable {name}"):
            settings.append((label, _set(tree, key_of_variable(name), value, label)))
    for override in overrides:
        with noted(label := f"override {' '.join(override.split())}"):
            key, equals, value = override.partition("=")
            settings.append((label, _set(tree, key if equals else "", value, label)))
    try:
        # As JSON: in strict mode pydantic then takes a list for a tuple, and still converts nothing else.
        config = Config.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        found = dict(filter(None, map(explain, error.errors()[: 50 * _MOST_PROBLEMS])))
        within = {path: f"{dotted(path)}: " if path else "" for path in found}
        wrong = [f"{_source(path, text, layers, settings)}: {within[path]}{text}" for path, text in found.items()]
        problems = [*wrong, *problems]
    if problems:
        more = [f"and {len(problems) - _MOST_PROBLEMS} more"] if len(problems) > _MOST_PROBLEMS else []
        raise ConfigError("\n".join([*problems[:_MOST_PROBLEMS], *more]))
    return config


def _source(path: KeyPath, text: str, layers: _Layers, settings: Sequence[tuple[str, KeyPath]]) -> str:
    """The last setting of a value, or within it, else its file and line.

    Keys of a section that contradict each other are named in the text.
    """
    named = set(re.findall(r"\w+", text)) if not path or "properties" in schema_at(path) else None
    of_value = [
        label
        for label, key in settings
        if key == path[: len(key)]
        or (key[: len(path)] == path and (named is None or named.intersection(key[len(path) or 1 :])))
    ]
    return of_value[-1] if of_value else _place(path, layers)


def _place(path: KeyPath, layers: _Layers) -> str:
    """`x.yaml:3`: the file that has a value, or the section around it, and its line."""
    found, place = 0, next(iter(layers))
    for file, text in layers.items():
        depth, line, goes_on = line_of(text, path)
        if depth > found:
            found, place = depth, f"{file}:{line}"
        if not goes_on:
            break
    return place


def _set(tree: dict[str, Any], key: str, text: str, label: str) -> KeyPath:
    """Sets what a variable or override names, with sections that are missing on the way, and returns its path.

    Raises ConfigError before a change.
    """
    parts = tuple(part.strip() for part in re.sub(r"\[(\d+)\]", r".\1", key).split("."))
    if not all(parts) or not key.isprintable():
        raise ConfigError("an override must look like key.path=value, such as training.lr=1e-4")
    value = read_yaml(text, label, parts, has_lines=False)
    if value is None and not text.strip():
        raise ConfigError("the value is missing; write null for none, or '' for empty text")
    holders: list[Any] = [tree]
    steps: list[str | int] = []
    for part in parts:
        holder, path = holders[-1], dotted(tuple(steps))
        if isinstance(holder, list) and part not in map(str, range(len(holder))):
            raise ConfigError(f"{path} has {len(holder)} entries, counted from 0; got index {part}")
        if isinstance(holder, dict) and part.isdecimal():
            raise ConfigError(f"{path} is not a list in the file; got index {part}; give the whole list")
        if not isinstance(holder, dict | list):
            raise ConfigError(f"{path} is a plain value and has no key {part}; got {show(holder)}")
        steps.append(int(part) if isinstance(holder, list) else part)
        holders.append(holder[int(part)] if isinstance(holder, list) else holder.get(part, {}))
    for holder, step, held in zip(holders[:-1], steps, [*holders[1:-1], value], strict=True):
        holder[step] = held
    return tuple(steps)


def _gone(source: str, key: str, value: object) -> ConfigError:
    return ConfigError(
        f"{source} was trained with {key}={show(value)}, which this version no longer has; use the version of vesuvius "
        "that trained it"
    )


def _without_removed(tree: Any, source: str, path: KeyPath = ()) -> Any:
    """A copy without the keys of `REMOVED`.  Raises ConfigError where what was trained depends on one."""
    if not isinstance(tree, dict):
        return tree
    kept: dict[str, Any] = {}
    for key, item in tree.items():
        name = dotted((*path, key))
        if name in TRAINED_WITH and item != TRAINED_WITH[name]:
            raise _gone(source, name, item)
        if name not in REMOVED:
            kept[key] = _without_removed(item, source, (*path, key))
    return kept
