"""Render the output of memcheck for a run as an SVG picture for documents.

python tools/memcheck_picture.py demo --out docs/memcheck.svg
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console

from vesuvius.monitor.memcheck.inspection import Inspection, inspect_run
from vesuvius.monitor.memcheck.memory_table import memory_table
from vesuvius.runlog.find_run import find_run


def main() -> None:
    """Sample once and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run directory, or the name of one below runs/")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--width", type=int, default=100, metavar="COLUMNS")
    args = parser.parse_args()
    found = inspect_run(find_run(args.run))
    args.out.write_text(table_svg(found, f"vesuvius memcheck {args.run}", args.width), encoding="utf-8")


def table_svg(found: Inspection, title: str, width: int = 100) -> str:
    """Return the table as SVG."""
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False
    )
    console.print(memory_table(found))
    # Without the web fonts that rich embeds.
    return re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=title), flags=re.DOTALL)


if __name__ == "__main__":
    main()
