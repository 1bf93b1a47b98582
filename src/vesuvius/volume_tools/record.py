"""What a volume that we write was made from: where it is noted, and whether a command may continue it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from vesuvius.errors import ConfigError
from vesuvius.runlog.records import parse_record

COPY, IMPORT = "copy", "import"  # what is being written, as the file of its arguments and the attribute are called


def check_name(out: Path) -> None:
    """Raises ConfigError for one that does not end in .zarr."""
    if out.suffix != ".zarr":
        raise ConfigError(f"the name of a volume must end in .zarr; got {out}; add the ending")


def attribute(kind: str) -> str:
    """Attribute of a finished volume that says what it was made from."""
    return f"vesuvius_{kind}"


def partial_path(out: Path) -> Path:
    """Where a volume is while it is not whole."""
    return out.with_name(f"{out.name}.partial")


def has_partial(out: Path, kind: str = COPY) -> bool:
    """Whether there is an unfinished volume to resume."""
    return (partial_path(out) / f"{kind}.json").exists()


def is_finished(out: Path, record: dict[str, Any], kind: str = COPY) -> bool:
    """Whether the whole volume is there, made with these arguments; removes what a kill has left beside it.

    Raises ConfigError where something else is there.
    """
    if not os.path.lexists(out):
        return False
    check_record(out, finished_record(out, kind), record)
    shutil.rmtree(partial_path(out), ignore_errors=True)
    return True


def finished_record(out: Path, kind: str = COPY) -> Any:
    """The arguments that a finished volume was made with; None for any other volume."""
    for name in (".zattrs", "zarr.json"):
        try:
            found: Any = parse_record((out / name).read_text())
        except (OSError, UnicodeDecodeError):
            continue
        attributes = found.get("attributes") if found and name == "zarr.json" else found
        return attributes.get(attribute(kind)) if attributes else None
    return None


def check_record(path: Path, there: Any, wanted: dict[str, Any]) -> None:
    """Raises ConfigError if what lies at `path` was begun with other arguments, or `there` is no record of any."""
    if not isinstance(there, dict):
        raise ConfigError(f"{path} exists and was not made by this command; choose another name, or remove it")
    differing = [key for key in wanted if there.get(key) != wanted[key]]
    if differing:
        got = ", ".join(f"{key} {json.dumps(wanted[key])} (there: {json.dumps(there.get(key))})" for key in differing)
        raise ConfigError(
            f"{path} was begun with other arguments: {got}; use the same ones, choose another name, or remove it"
        )
