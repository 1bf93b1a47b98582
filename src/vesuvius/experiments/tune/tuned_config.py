"""The config that a tune writes: `extends` the source, and sets the keys that differ, each with its reason.

# Written by vesuvius tune from x.yaml; the next tune of it replaces this file.

extends: x.yaml
training:
  workers: 6  # was 2; 1.9 times the samples/s
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from vesuvius.config import Config
from vesuvius.config.describe import to_yaml
from vesuvius.config.load import dump_set_keys
from vesuvius.errors import ConfigError, StorageError, one_line, storage_errors
from vesuvius.runlog.files import write_whole

MARK = "Written by vesuvius tune"
"""Begins the header: a file that does not begin so belongs to the user and is never replaced."""

_LONGEST_VALUE = 60  # characters of the value before, in a comment


def tuned_path(source: Path) -> Path:
    """`configs/exp001_full.yaml` -> `configs/exp001_full.tuned.yaml`."""
    return source.with_name(f"{source.stem}.tuned{source.suffix or '.yaml'}")


def tuned_yaml(
    source_name: str, source: Config, wanted: Config, reasons: Mapping[str, str], header: Sequence[str]
) -> str:
    """The text of a config that extends the source and reads as `wanted`.  Pure.

    Args:
        source_name: file name of the source, in whose folder the text will stand.
        source, wanted: as read without and with what the tune changes.
        reasons: by full key as in overrides (`training.workers`, `data.volumes.0.level`), of which the first that is
            about a key, its section or a part of it counts; others are "as tuned".
        header: lines for the top, without `#`; one that begins with `MARK` comes before them.
    """
    steps = {tuple(step.strip() for step in key.split(".")): reason for key, reason in reasons.items()}
    first = f"{MARK} from {source_name}; the next tune of it replaces this file."
    comments: dict[str, str] = {}

    def changed(before: BaseModel, after: BaseModel, above: tuple[str, ...] = ()) -> BaseModel:
        """Only the fields that differ; a list is one value, as files that extend others have it."""
        values: dict[str, Any] = {}
        for name in type(after).model_fields:
            old, new, path = getattr(before, name), getattr(after, name), (*above, name)
            if old == new:
                continue
            if isinstance(old, BaseModel) and type(old) is type(new):
                values[name] = changed(old, new, path)
                continue
            values[name] = new
            was = one_line(to_yaml(before.model_dump(mode="json")[name]), _LONGEST_VALUE)
            was += "" if name in before.model_fields_set else " by default"
            why = next((reason for key, reason in steps.items() if key[: len(path)] == path[: len(key)]), "as tuned")
            comments[".".join(path)] = f"was {was}; {_clean(why)}"
        return type(after).model_construct(set(values), **values)

    sparse = changed(source, wanted)
    assert isinstance(sparse, Config)
    lines = [*(f"# {_clean(line)}".rstrip() for line in (first, *header)), "", f"extends: {to_yaml(source_name)}"]
    return "\n".join(lines) + "\n" + dump_set_keys(sparse, comments).lstrip("\n")


def check_tunable(source: Path) -> None:
    """Check before the first trial that the tuned config of a source can be written.  Does I/O.

    Raises:
        ConfigError: the source was itself written by a tune, no YAML can hold its name, or a file lies in the place of
            the tuned config that no tune has written.
        StorageError: the folder of the source cannot be written.
    """
    if _is_ours(source):
        raise ConfigError(f"{source} was written by a tune: tune the config that it extends, or remove its first line")
    if not source.name.isprintable():
        raise ConfigError(f"the name of a config must be printable to be extended; got {source.name!r}; rename it")
    path = tuned_path(source)
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not _is_ours(target):
        raise ConfigError(f"{path} would be replaced, and no tune has written it (no '# {MARK}' at its top); rename it")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise StorageError(f"{target.parent} cannot be written, where the tuned config goes; change its permissions")


def write_tuned(path: Path, text: str) -> None:
    """Write the tuned config, whole or not at all; a symbolic link stays one, and its target is written.  Does I/O.

    Raises:
        StorageError: the write fails.
    """
    with storage_errors(f"{path}: the tuned config must be writable", "make room, or change its permissions"):
        write_whole(Path(os.path.realpath(path)), text.encode("utf-8"))


def _is_ours(path: Path) -> bool:
    """Whether it is a file that a tune has written."""
    begin = f"# {MARK}".encode()
    return path.is_file() and path.read_bytes()[: len(begin)] == begin


def _clean(words: str) -> str:
    """One line that a YAML comment may hold."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(words.split()))
