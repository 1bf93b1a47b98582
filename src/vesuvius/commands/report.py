"""`vesuvius report RUN [RUN ...] [--out DIR]`: what runs recorded, as one page and as Markdown."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from vesuvius.commands.command import as_command, say
from vesuvius.errors import EXIT_OK
from vesuvius.runlog.find_run import find_run


@as_command
def main(argv: list[str]) -> int:
    """Parse the command line and write the report.  Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="vesuvius report",
        description="Write what one or several runs recorded as a page (HTML that needs nothing else) and as Markdown: "
        "verdict, where the time went, losses, memory, events, previews, config.  The runs may be running.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory, or the name of one below runs/")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write to; by default a new one in the first run's reports/"
    )
    args = parser.parse_args(argv)
    runs = [find_run(text) for text in args.runs]
    from vesuvius.report.report import write_report  # imports numpy and matplotlib

    folder = write_report(runs, args.out, shlex.join(["vesuvius", "report", *argv]))
    say(f"{folder / 'report.html'}\n{folder / 'report.md'}")
    return EXIT_OK
