"""Write docs/config.md, the reference of all config keys, from the models; `--check` fails if it is out of date.

python tools/config_table.py --check docs/config.md
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from vesuvius.config.describe import describe_type, iter_keys, to_yaml

INTRODUCTION = """\
# Config keys

<!-- Made by tools/config_table.py from src/vesuvius/config; change the descriptions there. -->

An experiment is one YAML file. `vesuvius init VOLUME` writes a first one, and `vesuvius train --config FILE
--print-config` prints every key with its value and meaning.

- **Scalars** follow YAML 1.2: `1e-4` is a number, `off` and `yes` are text, `null` means none. Unknown keys and values
  of the wrong type are refused with file and line. Nothing is converted silently.
- **Overrides** on the command line are `key.path=value` with a YAML value: `training.lr=1e-4`,
  `"data.volumes=[{path: scroll.zarr, level: 1}]"`. They are applied after the file, in order. An override of a section
  replaces the whole section.
- **Environment variables** that begin with `VESUVIUS_` set keys too: two underscores stand for a dot, a number for an
  item of a list, and the value is YAML. `VESUVIUS_TRAINING__WORKERS=4` is `training.workers=4`, and
  `VESUVIUS_DATA__VOLUMES__0__PATH=scroll.zarr` the path of the first volume. They are applied after the file and before
  the overrides: defaults < file < environment < command line. An unknown name is an error, with the nearest key; the
  exceptions are `VESUVIUS_RUNS`, the folder of run directories, and `VESUVIUS_HTTP_HEADERS`, headers for web servers
  (volumes.md). The variables apply to all commands with `--config`, not to those that work on a run (`sample`,
  `report`). Variables that Kubernetes sets for a Service called `vesuvius` are ignored.
- **Lists** are replaced as a whole. `[]` below stands for an item of a list; overrides count from 0:
  `data.volumes[0].path=other.zarr`.
- **`extends: other.yaml`** at the top level of a file takes all keys that this file does not set from that file.
  Sections are merged key by key; lists and plain values are replaced. The path is relative to the folder of the file
  that names it. `vesuvius tune` writes such a file, `FILE.tuned.yaml`. A run keeps the merged text as
  `config.source.yaml`, so a resume does not need the other files.
- **Relative paths** start in the working directory in which the config was read, and keep their meaning if it changes
  later. A run's `config.resolved.yaml` has them as written, so that a project may move; comments give full paths.
"""


def reference() -> str:
    """The page as Markdown.  Pure."""
    sections: dict[str, list[tuple[str, dict[str, Any]]]] = {"": []}
    meanings = {}
    for key, schema in iter_keys():
        section = key.partition(".")[0]
        if "properties" in schema:
            meanings[key] = schema["description"]  # the keys of a section follow it
        else:
            sections.setdefault(section if "." in key else "", []).append((key, schema))
    parts = [INTRODUCTION]
    for section, keys in sections.items():
        title = f"`{section}`: {meanings[section]}" if section else "The experiment"
        parts.append(f"## {title}\n\n{table(keys)}\n")
    return "\n".join(parts)


def table(keys: list[tuple[str, dict[str, Any]]]) -> str:
    """A Markdown table, one row per key.  Pure."""
    rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for key, schema in keys:
        default = f"`{to_yaml(schema['default'])}`" if "default" in schema else "required"
        cells = [f"`{key}`", _escaped(describe_type(schema)), default, _escaped(schema["description"])]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _escaped(text: str) -> str:
    """Escape text for a Markdown table."""
    return re.sub(r"([|<*`])", r"\\\1", text)


def main() -> int:
    """Return the exit code: 1 if the file is out of date or cannot be read or written."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", type=Path, metavar="FILE", help="exit 1 if FILE is out of date")
    action.add_argument("--write", type=Path, metavar="FILE", help="write FILE")
    arguments = parser.parse_args()
    try:
        if arguments.write:
            arguments.write.write_text(reference(), encoding="utf-8")
        elif not arguments.check:
            print(reference(), end="")
        elif arguments.check.read_text(encoding="utf-8") != reference():
            remedy = f"run: python {sys.argv[0]} --write {arguments.check}"
            print(f"{arguments.check}: the reference of config keys is out of date; {remedy}", file=sys.stderr)
            return 1
    except OSError as error:
        print(f"{arguments.check or arguments.write}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
