"""YAML text -> plain values, and the line of each key for error messages.  Pure.

Scalars follow the YAML 1.2 core schema: `1e-4` is a number, `off` is text, `010` is ten, there are no dates.
"""

from contextlib import suppress
from functools import lru_cache
from typing import Any

import yaml

from vesuvius.config.describe import KeyPath, add_core_scalars, dotted
from vesuvius.errors import ConfigError

Lines = dict[KeyPath, int]
"""Line of each key and item, counted from 1; 0 for the text as a whole."""

_MOST_VALUES = 20_000  # nested YAML aliases can expand to billions
_LONGEST_NUMBER = 1000  # digits


class _CoreLoader(yaml.SafeLoader):
    """Composes nodes whose plain scalars have YAML 1.2 tags."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - replaces PyYAML's YAML 1.1 table, filled below


add_core_scalars(_CoreLoader)


def read_yaml(text: str, source: str, path: KeyPath = (), has_lines: bool = True) -> tuple[Any, Lines]:
    """Return the values of a text at `path` of the config, and their lines.

    The values are fresh dicts, lists and scalars; None for an empty text.

    Raises ConfigError: begins with the source and, if it `has_lines`, the line.
    """
    count = 0
    lines: Lines = {path: 0}

    def refused(line: int, what: str) -> ConfigError:
        return ConfigError(f"{source}:{line + 1}: {what}" if has_lines else f"{source}: {what}")

    def plain(node: yaml.Node, path: KeyPath) -> Any:
        nonlocal count
        count += 1
        line = node.start_mark.line
        if count > _MOST_VALUES:
            raise refused(line, f"more than {_MOST_VALUES} values; use fewer YAML aliases")
        match node:
            case yaml.MappingNode(tag="tag:yaml.org,2002:map"):
                found: dict[str, Any] = {}
                for key, value in node.value:
                    if not isinstance(key, yaml.ScalarNode) or not key.value.isprintable():
                        raise refused(key.start_mark.line, "invalid key; use plain text on one line")
                    inner = (*path, key.value)
                    if key.value == "<<":
                        what = "<<: merge keys are not read; write the keys here, or in a file that this one `extends`"
                        raise refused(key.start_mark.line, what)
                    if key.value in found:
                        raise refused(key.start_mark.line, f"{dotted(inner)}: the key is set twice; remove one")
                    lines[inner] = key.start_mark.line + 1
                    found[key.value] = plain(value, inner)
                return found
            case yaml.SequenceNode(tag="tag:yaml.org,2002:seq"):
                lines.update({(*path, index): item.start_mark.line + 1 for index, item in enumerate(node.value)})
                return [plain(item, (*path, index)) for index, item in enumerate(node.value)]
            case yaml.ScalarNode():
                with suppress(ValueError):  # reported below, as for other kinds of nodes
                    return _scalar(node)
        raise refused(
            line, f"{dotted(path)}: cannot read the value as {node.tag.rpartition(':')[2]}; write a plain value"
        )

    line = 0
    try:
        root = _composed(text)
        return (None if root is None else plain(root, path)), lines
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position)
        what = f"the character {chr(error.character)!r} is not allowed"
    except yaml.MarkedYAMLError as error:
        if mark := error.problem_mark or error.context_mark:
            line = mark.line
        what = f"{error.context}, {error.problem}" if error.context else f"{error.problem}"
    except RecursionError:
        what = "nested too deeply, or an alias refers to its own parent"
    raise refused(line, f"not valid YAML: {what}")


@lru_cache(maxsize=8)  # a start reads its config several times
def _composed(text: str) -> yaml.Node | None:
    node: yaml.Node | None = yaml.compose(text, Loader=_CoreLoader)
    return node


def find_comment(text: str) -> str:
    """Return valid YAML text from its first comment on; '' without one.  Pure."""
    scalars = [token for token in yaml.scan(text, Loader=_CoreLoader) if isinstance(token, yaml.ScalarToken)]
    inside = {at for token in scalars for at in range(token.start_mark.index, token.end_mark.index)}
    return next((text[at:] for at, letter in enumerate(text) if letter == "#" and at not in inside), "")


def _scalar(node: yaml.ScalarNode) -> str | int | float | bool | None:
    """Return the value of a tagged scalar; raises ValueError for an unknown tag or text that does not fit it."""
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
            text.encode()  # refuses lone surrogates ("\\ud800"), which JSON cannot represent
            return text
    raise ValueError(node.tag)
