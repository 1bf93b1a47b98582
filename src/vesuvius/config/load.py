"""YAML files, environment variables and command-line overrides -> `Config`, and back to YAML.

    text -> plain values (`yaml_source.py`), over those of the file that it extends -> variables -> overrides
         -> pydantic -> `Config`, or one `ConfigError` with one line per problem

Functions with a path read files.
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vesuvius.config import Config
from vesuvius.config.describe import KeyPath, dotted, explain, iter_keys, schema_at, show, to_yaml, to_yaml_block
from vesuvius.config.patterns import located, match_volumes
from vesuvius.config.section import Location
from vesuvius.config.yaml_source import Lines, find_comment, read_yaml
from vesuvius.errors import ConfigError

log = logging.getLogger(__name__)

_MOST_PROBLEMS = 20  # printed
_PREFIX = "VESUVIUS_"  # of variables; `__` stands for a dot, a number for a list item
_NO_KEYS = ("VESUVIUS_RUNS", "VESUVIUS_HTTP_HEADERS")  # read by `runlog/find_run.py`, `volumes/store/credentials.py`
_OF_SERVICES = "_SERVICE_HOST"

_Layers = dict[str, Lines]  # by file: the config itself, then those that it extends
_NONE: Mapping[str, str] = {}
_read: dict[Path, bytes] = {}  # files as they were last read, by absolute path


def read_config(path: Path, overrides: Sequence[str] = (), environment: Mapping[str, str] = _NONE) -> Config:
    """Read a YAML file and those it extends, apply variables, then overrides in order, validate, and match patterns.

    Args:
        overrides: `training.lr=1e-4`.
        environment: variables: `VESUVIUS_TRAINING__WORKERS=4` is `training.workers=4`.

    Raises ConfigError with one line per problem, each with the file and line, variable or override it comes from.
    """
    config = _validated(*_read_layers(path), overrides, environment)
    return config.model_copy(update={"data": match_volumes(config.data)})


def take_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Like `read_config` with this process's environment, from which its variables are removed.  Raises ConfigError."""
    return read_config(path, overrides, take_variables())


def take_variables() -> dict[str, str]:
    """Remove the variables that set config keys from the environment, and log their names.

    Child processes (readers, ranks, trial trainers) get the config itself and must not apply the variables again.
    """
    taken = variables(os.environ)
    for name in taken:
        del os.environ[name]
    if taken:
        log.info("config keys from the environment: %s", ", ".join(taken))  # values may be secret
    return taken


def parse_config(text: str, overrides: Sequence[str] = (), source: str = "config") -> Config:
    """Like `read_config`, from text that extends no file, with patterns as they are; `source` names it in messages."""
    tree, lines = _tree_of(text, source)
    if "extends" in tree:
        raise ConfigError(f"{source}:{lines['extends',]}: extends: only a file on disk can extend another; remove it")
    return _validated(tree, {source: lines}, overrides)


def parse_stored(stored: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "config") -> Config:
    """Like `parse_config`, from a stored `config.model_dump(mode="json")`, also of another version.

    Unknown keys are ignored and logged, unless the trained model depends on them.
    """
    tree: dict[str, Any] = read_yaml(to_yaml(dict(stored)), source)[0]
    # of networks before there was a choice
    before: dict[str, Any] = {"noise_embedding": "t"}
    for section, of_before in (("model", {"patch_embed_kernel": 3}), ("diffusion", before)):
        if isinstance(found := tree.get(section, {}), dict):  # else refused below
            if found.get("residual_guidance", 1) != 1:
                before["residual_guidance_interval"] = None
            tree[section] = of_before | found
    for key, value in (unknown := _without_unknown(tree, {key for key, _ in iter_keys()})).items():
        if key.startswith(("model.", "diffusion.", "data.condition_")):
            trained = f"{source} was trained with {key}={show(value)}, which this version does not have"
            raise ConfigError(f"{trained}; use the version of vesuvius that trained it")
    if unknown:
        log.info("%s: ignored keys of another version: %s", source, ", ".join(unknown))
    return parse_config(to_yaml(tree), overrides, source)


def _without_unknown(tree: dict[str, Any], known: set[str], within: str = "") -> dict[str, Any]:
    """Remove unknown sections and keys from a tree; returns their values by key."""
    taken: dict[str, Any] = {}
    for name in list(tree):
        key = within + name
        if isinstance(tree[name], dict) and any(each.startswith(f"{key}.") for each in known):
            taken |= _without_unknown(tree[name], known, f"{key}.")
        elif key not in known:
            taken[key] = tree.pop(name)
    return taken


def read_volumes(path: Path) -> dict[str, Any] | None:
    """Return the keys of a volumes file: a list of volumes, or the key `volumes` and others; None for a config.

    Paths in it are relative to its folder.  Raises ConfigError.
    """
    values, _ = read_yaml(_text_of(path), str(path))
    keys = {"volumes": values} if isinstance(values, list) else values
    if not isinstance(keys, dict) or "volumes" not in keys:
        return None
    for entry in keys["volumes"] if isinstance(keys["volumes"], list) else ():
        if isinstance(entry, dict) and "labels" in entry and "condition" not in entry:
            labels = entry.pop("labels")
            entry["condition"], *more = labels if isinstance(labels, list) and labels else [labels]
            entry |= {"more_labels": more} if more else {}
    found: dict[str, Any] = located(keys, path.parent)
    return found


def read_source(path: Path) -> bytes:
    """Return the file as it was last read, or merged with the files that it extends.  Raises ConfigError.

    It may have been edited since, or be a pipe: `--config <(...)`.
    """
    tree, layers = _read_layers(path, again=False)
    if len(layers) == 1:
        return _read[path.absolute()]
    return f"# Merged from {', '.join(map(show, layers))}.\n\n{to_yaml_block(tree)}".encode()


# ---- to YAML


def dump_config(config: Config, with_meanings: bool = False) -> str:
    """Return the full config, with defaults, as YAML that reads back equal; comments explain the keys.  Pure.

    Relative paths stay as written, with a comment that says where they led.
    """
    meanings = {key: schema["description"] for key, schema in iter_keys()} if with_meanings else {}
    return "\n".join(_lines(config.model_dump(), meanings)) + "\n"


def dump_set_keys(config: Config, comments: Mapping[str, str]) -> str:
    """Return the keys set explicitly as YAML, with comments by key (`data.volumes[].path`).  Pure."""
    return "\n".join(_lines(config.model_dump(mode="json", exclude_unset=True), comments)) + "\n"


def _lines(tree: Mapping[str, Any], comments: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        key = prefix + name
        text = f"  # {comments[key]}" if key in comments else ""
        match value:
            case dict():
                if value:
                    yield f"{name}:{text}"
                yield from ("  " + line for line in _lines(value, comments, f"{key}."))
            case [dict(), *_]:
                yield f"{name}:{text}"
                for item in value:
                    first, *others = _lines(item, comments, f"{key}[].")
                    yield f"  - {first}"
                    yield from ("    " + line for line in others)
            case Location() if value != value.written:
                yield f"{name}: {to_yaml(value)}  # {to_yaml(str(value))}{text}"
            case _:
                yield f"{name}: {to_yaml(value)}{text}"


# ---- variables


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that set config keys, sections first, without those that Kubernetes adds for Services named
    `vesuvius` or `vesuvius-...`.  Pure.
    """
    services = [name.removesuffix(_OF_SERVICES) for name in environment if name.endswith(_OF_SERVICES)]
    foreign = tuple(f"{service}{part}" for service in services for part in ("_SERVICE_", "_PORT"))
    names = sorted(name for name in environment if name.startswith(_PREFIX) and not name.startswith(foreign))
    return {name: environment[name] for name in names if name not in _NO_KEYS}


# ---- from files and settings


def keep_source(path: Path, text: bytes) -> None:
    """Let `read_source` return this text, which another process has read, perhaps on another machine."""
    _read[path.absolute()] = text


def _tree_of(text: str, source: str) -> tuple[dict[str, Any], Lines]:
    """Return the values and lines of one file; raises ConfigError if it is not YAML or has no keys at the top level."""
    tree, lines = read_yaml(text, source)
    if tree is None:
        raise ConfigError(f"{source}: the file is empty; set at least name and data.volumes")
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: no keys at the top level; write keys and values such as `name: demo`")
    return tree, lines


def _read_layers(path: Path, again: bool = True) -> tuple[dict[str, Any], _Layers]:
    """Return the values of a file merged over those of the files that it extends, read `again` or as they were last
    read.  Raises ConfigError."""
    tree: dict[str, Any] = {}
    layers: _Layers = {}
    chain, here = [path], ""  # files up to the last one, and the line that names it
    while True:
        found, layers[str(path)] = _tree_of(_text_of(path, here, again), str(path))
        if "extends" not in found:
            return _merged(tree, found), layers
        name, here = found.pop("extends"), f"{path}:{layers[str(path)]['extends',]}: extends: "
        tree = _merged(tree, found)
        if not isinstance(name, str) or not name or not name.isprintable():
            raise ConfigError(f"{here}{show(name)} is not the path of a YAML config, relative to this file")
        path = path.parent / os.path.expanduser(name)
        chain.append(path)
        if os.path.realpath(path) in map(os.path.realpath, chain[:-1]):
            circle = " -> ".join(map(str, chain))
            raise ConfigError(f"{here}files extend each other in a cycle ({circle}); remove one")


def _text_of(path: Path, here: str = "", again: bool = True) -> str:
    """Return the text of a file; `here` is the place that names it.  Raises ConfigError."""
    try:
        full = path.absolute()
        if again or full not in _read:
            _read[full] = path.read_bytes()
        return _read[full].decode("utf-8")
    except OSError as error:
        of_run = ", of a run its config.resolved.yaml" if (path / "config.resolved.yaml").exists() else ""
        raise ConfigError(f"{here}{path}: {error.strerror}; give the path of a YAML config{of_run}") from None
    except UnicodeDecodeError as error:
        line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        raise ConfigError(f"{path}:{line}: byte 0x{byte:02x} is not UTF-8; save the file as UTF-8") from None


def _merged(above: dict[str, Any], below: dict[str, Any]) -> dict[str, Any]:
    merged = above | {key: value for key, value in below.items() if key not in above}
    for key in above.keys() & below.keys():
        if isinstance(above[key], dict) and isinstance(below[key], dict):
            merged[key] = _merged(above[key], below[key])
    return merged


def _validated(
    tree: dict[str, Any], layers: _Layers, overrides: Sequence[str], environment: Mapping[str, str] = _NONE
) -> Config:
    settings: list[tuple[str, KeyPath]] = []  # variable or override, and the path it sets
    problems: list[str] = []
    given = [
        (f"environment variable {name}", name.removeprefix(_PREFIX).lower().replace("__", "."), value)
        for name, value in variables(environment).items()
    ]
    for override in overrides:
        key, equals, value = override.partition("=")
        given.append((f"override {' '.join(override.split())}", key if equals else "", value))
    for label, key, value in given:
        try:
            settings.append((label, _set(tree, key, value, label)))
        except ConfigError as error:
            problems.append(f"{label}: {str(error).removeprefix(f'{label}: ')}")
    if isinstance(data := tree.get("data"), dict) and str(data.get("volumes")).endswith((".yaml", ".yml")):
        listed = read_volumes(Path(os.path.expanduser(data["volumes"]))) or {}
        tree["data"] = listed | data | {"volumes": listed.get("volumes", data["volumes"])}
    try:
        # As JSON: strict mode then accepts lists for tuples, and still converts nothing else.
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
    """Return the last variable or override that set a value or a part of it, otherwise its file and line.

    Messages about contradicting keys name the keys, which selects the setting.
    """
    named = set(re.findall(r"\w+", text)) if not path or "properties" in schema_at(path) else None
    for label, key in reversed(settings):
        within = key[: len(path)] == path and (named is None or named.intersection(key[len(path) or 1 :]))
        if within or key == path[: len(key)]:
            return label
    return _place(path, layers)


def _place(path: KeyPath, layers: _Layers) -> str:
    found, place = 0, next(iter(layers))
    for file, lines in layers.items():
        depth = max(n for n in range(len(path) + 1) if path[:n] in lines)
        if depth > found:
            found, place = depth, f"{file}:{lines[path[:depth]]}"
        if any(isinstance(step, int) for step in path[:depth]):  # lists are not merged across files
            break
    return place


def _set(tree: dict[str, Any], key: str, text: str, label: str) -> KeyPath:
    """Set a variable's or override's key and its sections; returns its path.  Raises ConfigError before changes."""
    parts = tuple(part.strip() for part in re.sub(r"\[(\d+)\]", r".\1", key).split("."))
    if not all(parts) or not key.isprintable():
        raise ConfigError("not an override; write key.path=value, such as training.lr=1e-4")
    value, _ = read_yaml(text, label, parts, has_lines=False)
    if comment := find_comment(text):
        raise ConfigError(f"{show(comment)} is a YAML comment and would be cut off; put the value in quotes: \"'...'\"")
    if value is None and not text.strip():
        raise ConfigError("the value is missing; write null for none, or '' for empty text")
    holders: list[Any] = [tree]
    steps: list[str | int] = []
    for part in parts:
        holder, path = holders[-1], dotted(tuple(steps))
        if isinstance(holder, list) and part not in map(str, range(len(holder))):
            last = len(holder) - 1
            remedy = f"use 0 to {last}" if last > 0 else "set the full list" if last else "use 0, its only entry"
            raise ConfigError(f"{path} has no entry {part}; {remedy}")
        if isinstance(holder, dict) and part.isdecimal():
            raise ConfigError(f"{path} is not a list in the file and has no entry {part}; set the full list")
        if not isinstance(holder, dict | list):
            raise ConfigError(f"{path} is {show(holder)} and has no key {part}")
        steps.append(int(part) if isinstance(holder, list) else part)
        holders.append(holder[int(part)] if isinstance(holder, list) else holder.get(part, {}))
    for holder, step, held in zip(holders[:-1], steps, [*holders[1:-1], value], strict=True):
        holder[step] = held
    return tuple(steps)
