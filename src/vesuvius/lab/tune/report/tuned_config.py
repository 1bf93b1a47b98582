"""The config that a tune leaves: the source's own text with a few values changed, each with its reason beside it.

    source text, {"training.workers": TunedValue(6, "1.9 times the samples/s")}
        -> the same text with `workers: 6  # tuned: was 2; 1.9 times the samples/s`

Only the lines of changed keys differ, and the result is read again and compared before anyone gets it.
"""

from __future__ import annotations

import codecs
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vesuvius.config_file import parse_config
from vesuvius.config_words import to_yaml
from vesuvius.errors import ConfigError, StorageError, one_line
from vesuvius.lab.tune.report.yaml_edit import Note, newline_of, set_key, without_note
from vesuvius.lab.tune.report.yaml_places import Place, find_places
from vesuvius.lab.tune.terms.setting import Setting, key_of
from vesuvius.observe.whole_file import write_whole

MARK = "Written by vesuvius tune"
"""Begins the header: a file that does not begin so is somebody's own and is never replaced."""

_LONGEST_VALUE = 60  # characters of the value before, in a comment


@dataclass(frozen=True)
class TunedValue:
    """A value to write and why, in words."""

    value: Any
    reason: str


def tuned_values(setting: Setting, source: Setting, reasons: Mapping[str, str]) -> dict[str, TunedValue]:
    """What differs between two settings, by full key; `reasons` by knob, as `Stop.reasons`.  Pure."""
    changes = setting.changes(source)
    return {key_of(knob): TunedValue(value, reasons.get(knob, "measured")) for knob, value in changes.items()}


def tuned_path(source: Path) -> Path:
    """`configs/exp001_full.yaml` -> `configs/exp001_full.tuned.yaml`."""
    return source.with_name(f"{source.stem}.tuned{source.suffix or '.yaml'}")


def tuned_yaml(source_text: str, source_name: str, changes: Mapping[str, TunedValue], header: Sequence[str]) -> str:
    """The text of a config with some values changed in place.  Pure.

    What an earlier tune has written about the same keys, and its header, give way to the new.

    Args:
        source_text: of a valid config, with the line ends that it has.
        source_name: what messages and the header call it.
        changes: by full key as in overrides (`training.workers`, `data.volumes.0.level`); those that the source has
            already are left alone.
        header: lines for the top, without `#`; one that begins with `MARK` comes before them.

    Raises:
        ConfigError: where the source is not valid, a value is none that its key takes, or an edit in place would
            change something else (a value that an alias repeats).
    """
    changes = {".".join(_steps(key)): tuned for key, tuned in changes.items()}
    source = parse_config(source_text, source=source_name)
    overrides = [f"{key}={to_yaml(tuned.value)}" for key, tuned in changes.items()]
    wanted = parse_config(source_text, overrides, source=source_name)
    plain, wanted_plain = source.model_dump(mode="json"), wanted.model_dump(mode="json")
    differing = [key for key in changes if value_at(plain, key) != value_at(wanted_plain, key)]
    written = _keys_of(source_text)
    bom, text = ("\ufeff", source_text[1:]) if source_text.startswith("\ufeff") else ("", source_text)
    text = _without_header(text)
    for key in differing:  # first of all keys: two on one line may have the same name
        text = without_note(text, key)
    for key in differing:
        was = one_line(to_yaml(value_at(plain, key)), _LONGEST_VALUE) + ("" if key in written else " by default")
        text = set_key(text, key, to_yaml(changes[key].value), Note(was, _clean(changes[key].reason)), source_name)
    text = bom + _header(source_name, header, text) + text
    try:
        exact = parse_config(text, source=f"{source_name}, tuned") == wanted
    except ConfigError:
        exact = False
    if not exact:
        raise ConfigError(
            f"{source_name}: its keys must be laid out so that {', '.join(changes)} can be changed in place; they "
            "cannot; write each of them on a line of its own, or pass them as overrides: " + " ".join(overrides)
        )
    return text


def value_at(config_dump: Any, key: str) -> Any:
    """The value of a full key in `config.model_dump(mode="json")`; None where what is around it is null.  Pure.

    Args:
        key: as in an override: items of lists by their index, spaces around the parts allowed.

    Raises:
        KeyError, IndexError, ValueError, TypeError: there is no such key.
    """
    for step in _steps(key):
        if config_dump is None:
            return None
        config_dump = config_dump[int(step)] if isinstance(config_dump, list) else config_dump[step]
    return config_dump


def check_replaceable(path: Path) -> None:
    """Check that a tuned config can be written there, so that it is known before the first trial.  Does I/O.

    Raises:
        ConfigError: something lies there that no tune has written.
        StorageError: it cannot be read, or nothing can be written beside it.
    """
    target = _target(path)
    try:
        is_ours = _is_ours(target)
    except OSError as error:
        raise _unwritable(path, error) from error
    if not is_ours and os.path.lexists(target):
        raise ConfigError(
            f"a tuned config replaces only one that a tune has written; got {path}, which is not a file that begins "
            f"with '# {MARK}'; rename it"
        )
    if not os.access(target.parent, os.W_OK | os.X_OK):
        missing = None if target.parent.is_dir() else errno.ENOENT
        raise _unwritable(path, OSError(missing or errno.EACCES, os.strerror(missing or errno.EACCES)))


def write_tuned(path: Path, text: str) -> None:
    """Writes the tuned config, whole or not at all; a symbolic link stays one, and its target is written.  Does I/O.

    Raises:
        ConfigError, StorageError: as `check_replaceable`; StorageError too where it cannot be written after all.
    """
    check_replaceable(path)
    try:
        write_whole(_target(path), text.encode("utf-8"))
    except OSError as error:
        raise _unwritable(path, error) from error


def remove_tuned(path: Path) -> bool:
    """Removes what an earlier tune has written there, if it has; whether it did.  Does I/O.

    Raises StorageError.
    """
    target = _target(path)
    try:
        if not _is_ours(target):
            return False
        target.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error
    return True


def _target(path: Path) -> Path:
    """What a symbolic link stands for, whether it is there or not."""
    return Path(os.path.realpath(path))


def _is_ours(path: Path) -> bool:
    """Whether it is a file that a tune has written.  Raises OSError where it cannot be read."""
    if not path.is_file():
        return False
    begin = f"# {MARK}".encode()
    with path.open("rb") as file:
        return file.read(len(codecs.BOM_UTF8) + len(begin)).removeprefix(codecs.BOM_UTF8).startswith(begin)


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path}: the tuned config must be writable; got {error.strerror}; make room, or change its permissions"
    )


def _header(source_name: str, lines: Sequence[str], text: str) -> str:
    newline = newline_of(text)
    first = [f"{MARK} from {source_name}; the next tune of it replaces this file.", *lines]
    gap = "" if text.startswith(newline) else newline
    return "".join(f"# {_clean(line)}".rstrip() + newline for line in first) + gap


def _without_header(text: str) -> str:
    """The text without what a tune has written at its top, up to the empty line behind it."""
    lines = text.splitlines(keepends=True)
    empty = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    if not text.startswith(f"# {MARK}") or empty == len(lines) or lines[empty].strip():
        return text
    return "".join(lines[empty + 1 :])


def _clean(words: str) -> str:
    """One line that a YAML comment may hold."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(words.split()))


def _steps(key: str) -> list[str]:
    return [step.strip() for step in key.split(".")]


def _keys_of(text: str) -> set[str]:
    """Full keys that a text gives, at any depth of sections."""

    def keys(place: Place, prefix: str) -> Iterator[str]:
        items = [(str(index), item) for index, item in enumerate(place.items)]
        for name, value in [*((str(key.text), value) for key, value in place.entries), *items]:
            yield f"{prefix}{name}"
            yield from keys(value, f"{prefix}{name}.")

    return set(keys(find_places(text), ""))
