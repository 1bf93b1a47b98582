"""Config keys in words (names, types, values) for messages, dumps and docs/config.md.  Pure."""

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic_core import ErrorDetails
from yaml.resolver import BaseResolver

from vesuvius.config import Config
from vesuvius.config.section import Location

KeyPath = tuple[str | int, ...]
JsonSchema = dict[str, Any]

# Consequences of a changed key for a resumed run, by key prefix.

# Another experiment: its weights do not fit or mean something else.  Sampler settings may change.
OTHER_EXPERIMENT = ("seed", "model.", "diffusion.", "data.normalize.", "data.condition_")
DRAWS_SAMPLES = ("diffusion.sampler", "diffusion.residual_guidance")
# Allowed, but training changes; lines of `resume.drift_effects` begin with EFFECTS.
EFFECTS = ("learning rate", "effective batch", "average of the weights")
# Nothing else tells that a volume was written anew with the same shape.
OTHER_VOXELS = "data.volumes: the fixed patches have other voxels, so losses before and after are not comparable"
CHANGES_TRAINING = ("data.", "training.clip_norm", "training.weight_decay", "training.amp", *EFFECTS)
# Step time, without pauses, stays the same.
SAME_SPEED = (
    "name", "monitor.", "training.max_", "training.lr", "training.warmup_steps", "training.epochs",
    "training.steps_per_epoch", "training.save_every", "training.keep_", "training.validate_", "training.preview_",
    "training.resume", "training.weight_decay", "training.clip_norm", "training.ema_decay", *DRAWS_SAMPLES,
)  # fmt: skip

_LONGEST_VALUE = 80  # characters of a quoted value
_CORE_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
)


def add_core_scalars(loader_or_dumper: type[BaseResolver]) -> None:
    """Make the class resolve null, booleans and numbers by the YAML 1.2 core schema."""
    for name, pattern, first in _CORE_SCALARS:
        loader_or_dumper.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(rf"(?:{pattern})\Z"), first)


class _PortableDumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as another type, so that all tools read it alike."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if text.isprintable() else '"'  # the only style with line breaks on one line
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


add_core_scalars(_PortableDumper)
_PortableDumper.add_representer(str, _represent_text)
_PortableDumper.add_representer(Location, lambda dumper, path: _represent_text(dumper, path.written))


def iter_keys(schema: JsonSchema | None = None, prefix: str = "") -> Iterator[tuple[str, JsonSchema]]:
    """Yield every key of the config (`data.volumes[].path`) with its JSON schema, sections first.  Pure."""
    for name, found in (_config_schema() if schema is None else schema)["properties"].items():
        key, key_schema = f"{prefix}{name}", _resolved(found)
        yield key, key_schema | {"description": " ".join(key_schema["description"].split())}
        inner = _resolved(_not_null(key_schema))
        below, mark = (_resolved(inner["items"]), "[].") if "items" in inner else (inner, ".")
        if "properties" in below:
            yield from iter_keys(below, key + mark)


def describe_type(schema: JsonSchema) -> str:
    """Describe the values of a key: "an integer of at least 1 or null".  Pure."""
    schema = _resolved(schema)
    match schema:
        case {"anyOf": options}:
            return " or ".join(describe_type(option) for option in options)
        case {"const": value}:
            return to_yaml(value)
        case {"enum": choices}:
            return f"one of {', '.join(map(str, choices))}"
        case {"prefixItems": items}:
            return f"a list of {len(items)} values, each {describe_type(items[0])}"
        case {"type": "array", "items": item}:
            count = f" of at least {schema['minItems']} value" if "minItems" in schema else ""
            return f"a list{count}, each {describe_type(item)}"
    words = {"integer": "an integer", "number": "a number", "string": "text", "boolean": "true or false"}
    words |= {"null": "null", "object": "a section with keys of its own"}
    bounds = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    limits = [f"{word} {schema[name]}" for name, word in bounds.items() if name in schema]
    return " ".join([words[schema["type"]], " and ".join(limits)]).strip()


def to_yaml(value: object) -> str:
    """Return a value as YAML on one line.  Pure."""
    # Inside a list, flow style quotes text that could end the value early; the brackets are removed.
    is_plain = value is None or type(value) in (bool, int)  # most values, in 1 % of the time
    return ("null" if value is None else str(value).lower()) if is_plain else _dumped([value], True).strip()[1:-1]


def to_yaml_block(tree: Mapping[str, Any]) -> str:
    """Return sections as YAML, one key per line.  Pure."""
    return _dumped(tree, default_flow_style=False)


def _dumped(value: object, default_flow_style: bool) -> str:
    options: dict[str, Any] = {"default_flow_style": default_flow_style, "width": float("inf"), "allow_unicode": True}
    return str(yaml.dump(value, Dumper=_PortableDumper, sort_keys=False, **options))


_REPLACED = {
    "training.autotune": "; `vesuvius tune --config FILE` finds the settings before a run",
    "data.regions_per_task": "; it follows from data.stream_gib and the chunks",
}


def explain(error: ErrorDetails) -> tuple[KeyPath, str] | None:
    """Return path and message of a pydantic error; None if another error covers it.  Pure."""
    path, value = error["loc"], error["input"]
    match error["type"]:
        case "missing" if isinstance(path[-1], str):
            return path, "required key is missing"
        case "missing":
            path = path[:-1]
        case "extra_forbidden":
            return path, f"unknown key{_REPLACED.get(dotted(path)) or _suggest(path)}"
        case "value_error":
            return path, str(error["ctx"]["error"])
        case "too_short" if len(value) >= error["ctx"]["min_length"]:
            return None  # pydantic counts only valid entries; the others have their own errors
    while not (schema := schema_at(path)):  # a union: pydantic reports one error per type, below
        path = path[:-1]
    return path, f"{show(value)} is not valid; use {describe_type(schema)}"


def _suggest(path: KeyPath) -> str:
    """Suggest the most similar key, in full if it is in another section.  Pure."""
    section, wanted = "".join("[]" if isinstance(step, int) else f".{step}" for step in path[:-1])[1:], str(path[-1])
    homes: dict[str, str] = {}
    for known, _ in iter_keys():
        home, _, name = known.rpartition(".")
        homes[name] = home if name not in homes or home == section else homes[name]
    here = [name for name, home in homes.items() if home == section]
    joined = {key.replace(".", "_"): key for key, _ in iter_keys()}  # VESUVIUS_TRAINING_LR
    if not section and (near := difflib.get_close_matches(wanted, joined, n=1, cutoff=0.9)):
        return f"; did you mean {joined[near[0]]}?"
    for names in ([wanted] if wanted in homes else [], here, list(homes)):
        if near := difflib.get_close_matches(wanted, names, n=1):
            home = homes[near[0]]
            return f"; did you mean {'' if home in (section, '') else f'{home}.'}{near[0]}?"
    return f"; known keys: {', '.join(here)}"


@functools.cache
def _config_schema() -> JsonSchema:
    return Config.model_json_schema()


def _resolved(schema: JsonSchema) -> JsonSchema:
    if "$ref" not in schema:
        return schema
    target: JsonSchema = _config_schema()["$defs"][schema["$ref"].rpartition("/")[2]]
    return target | schema


def _not_null(schema: JsonSchema) -> JsonSchema:
    options = [option for option in schema.get("anyOf", []) if option.get("type") != "null"]
    return options[0] if len(options) == 1 else schema


def schema_at(path: KeyPath) -> JsonSchema:
    """Return the schema of a key; empty if it does not exist."""
    schema = _config_schema()
    for step in path:
        schema = _resolved(_not_null(schema))
        if isinstance(step, int):
            items = dict(enumerate(schema.get("prefixItems", ())))
            schema = _resolved(schema["items"] if "items" in schema else items.get(step, {}))
        else:
            schema = _resolved(schema.get("properties", {}).get(step, {}))
    return schema


def dotted(path: KeyPath) -> str:
    return ".".join(map(str, path)) or "the top level"


def show(value: object) -> str:
    """Return a value for a message as YAML, text in quotes, shortened if long."""
    shown = repr(value) if isinstance(value, str) else to_yaml(value)
    return shown if len(shown) <= _LONGEST_VALUE else shown[: _LONGEST_VALUE - 3] + "..."


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {prefix + key: value}
    return found
