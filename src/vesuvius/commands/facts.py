"""Facts that a command prints: for people, or as JSON."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from vesuvius.commands.cli import say
from vesuvius.runlog.units import format_size, format_sizes
from vesuvius.volumes.box import format_box


def print_facts(facts: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Print facts as JSON (null = unknown), or one per line with indented sections and tables."""
    if getattr(arguments, "json", False):
        say(json.dumps(facts, indent=2, default=_plain))
    else:
        say("\n".join(facts_text(facts)))


def facts_text(facts: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield lines with one fact each, without unknown ones of a section."""
    facts = {name: value for name, value in facts.items() if value is not None or not indent}
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        value = _plain(value) if isinstance(value, BaseModel) else value
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}"
            yield from facts_text(value, indent + "  ")
        elif isinstance(value, Sequence) and value and isinstance(value[0], Mapping):
            yield f"{indent}{name}"
            rows = [list(value[0]), *([_shown(key, cell) for key, cell in row.items()] for row in value)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            for row in rows:
                cells = "  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True))
                yield f"{indent}  {cells}".rstrip()
        else:
            yield f"{indent}{name.ljust(width)}  {_shown(name, value)}"


def _shown(name: str, value: Any) -> str:
    match value:
        case None:
            return "-"
        case int() if name.endswith("_bytes"):
            return format_size(value)
        case float():
            return f"{value:.6g}"
        case ((_, _, _), (_, _, _)):
            return format_box(value)
        case tuple() | list():
            parts = [_shown("", each) for each in value]
            return (format_sizes(parts) if name.endswith(("_zyx", "shape", "_um")) else ", ".join(parts)) or "none"
        case {}:
            return "none"
    return str(value)


def _plain(value: object) -> object:
    """Convert config sections, paths and ratios for JSON."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    return str(value) if isinstance(value, Path) else float(value)  # type: ignore[arg-type]
