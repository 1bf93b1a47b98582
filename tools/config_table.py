"""Prints the Markdown table of all config keys, made from the models; can also check or replace the one in README.

    python tools/config_table.py --check README.md

The table stands between the two marker lines named below.
"""

import argparse
import re
import sys
from pathlib import Path

from vesuvius.config_words import describe_type, iter_keys, to_yaml

BEGIN = "<!-- config table: begin -->"
END = "<!-- config table: end -->"


def config_table() -> str:
    """The Markdown table, one row per key that takes a value.  Pure."""
    rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for key, schema in iter_keys():
        if "properties" in schema:
            continue  # a section: its keys follow
        default = f"`{to_yaml(schema['default'])}`" if "default" in schema else "required"
        cells = [f"`{key}`", _escaped(describe_type(schema)), default, _escaped(schema["description"])]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def with_table(text: str, table: str) -> str:
    """The text with what stands between the markers replaced.  Pure; raises ValueError where they are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the file must hold the lines {BEGIN} and {END}, in this order")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([|<*`])", r"\\\1", text)


def main() -> int:
    """Returns the exit code: 1 where the file is out of date or has no markers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", type=Path, metavar="FILE", help="exit 1 if the table in FILE is out of date")
    action.add_argument("--write", type=Path, metavar="FILE", help="replace the table in FILE")
    arguments = parser.parse_args()
    path = arguments.check or arguments.write
    if path is None:
        print(config_table())
        return 0
    try:
        old = path.read_text(encoding="utf-8")
        new = with_table(old, config_table())
    except (OSError, ValueError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    if arguments.write:
        path.write_text(new, encoding="utf-8")
    elif new != old:
        print(f"{path}: the config table is out of date; run: python {sys.argv[0]} --write {path}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
