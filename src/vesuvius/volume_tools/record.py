"""The record of a volume's arguments, which decides whether a command may resume it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from vesuvius.errors import ConfigError
from vesuvius.runlog.records import parse_record

COPY, IMPORT = "copy", "import"  # kinds: names of the record file and, with a prefix, of the attribute


def check_name(out: Path) -> None:
    """Raise ConfigError if the name does not end in .zarr."""
    if out.suffix != ".zarr":
        raise ConfigError(f"The name {out} does not end in .zarr; add the ending")


def attribute(kind: str) -> str:
    """The attribute of a finished volume that holds its record."""
    return f"vesuvius_{kind}"


def partial_path(out: Path) -> Path:
    """The path of an unfinished volume."""
    return out.with_name(f"{out.name}.partial")


def has_partial(out: Path, kind: str = COPY) -> bool:
    """Whether there is an unfinished volume to resume."""
    return (partial_path(out) / f"{kind}.json").exists()


def is_finished(out: Path, record: dict[str, Any], kind: str = COPY) -> bool:
    """Whether a volume made with these arguments is complete; removes what a killed process left.

    Raises ConfigError: there is something else.
    """
    if not os.path.lexists(out):
        return False
    check_record(out, finished_record(out, kind), record)
    if has_partial(out, kind):
        shutil.rmtree(partial_path(out), ignore_errors=True)
    return True


def finished_record(out: Path, kind: str = COPY) -> Any:
    """The arguments of a finished volume; None for a volume of another kind."""
    for name in (".zattrs", "zarr.json"):
        try:
            found: Any = parse_record((out / name).read_text())
        except (OSError, UnicodeDecodeError):
            continue
        attributes = found.get("attributes") if found and name == "zarr.json" else found
        return attributes.get(attribute(kind)) if attributes else None
    return None


def check_record(path: Path, there: Any, wanted: dict[str, Any]) -> None:
    """Raise ConfigError if `there` is not a record, or has other arguments than `wanted`."""
    if not isinstance(there, dict):
        raise ConfigError(f"{path} exists and was not made by this command; choose another name or remove it")
    differing = [key for key in wanted if (there.get(key) or None) != (wanted[key] or None)]  # new ones are off
    if differing:
        changes = ", ".join(f"{key} {json.dumps(wanted[key])} (was {json.dumps(there.get(key))})" for key in differing)
        raise ConfigError(
            f"{path} was started with other arguments: {changes}; use the same ones, choose another name or remove it"
        )
