"""`vesuvius report RUN [RUN ...]` and `vesuvius quarantine RUN`: what runs have recorded."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from vesuvius.commands.cli import as_command, say
from vesuvius.errors import EXIT_OK, storage_errors
from vesuvius.runlog.find_run import find_run


@as_command
def report(argv: list[str]) -> int:
    """Parse the command line and write the report.  Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="vesuvius report",
        description="Write what one or several runs recorded as a page (HTML that needs nothing else): "
        "verdict, where the time went, losses, memory, events, previews, config.  The runs may be running.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory, or the name of one below runs/")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write to; by default a new one in the first run's reports/"
    )
    args = parser.parse_args(argv)
    runs = [find_run(text) for text in args.runs]
    from vesuvius.report.model import write_report  # imports numpy and matplotlib

    folder = write_report(runs, args.out, shlex.join(["vesuvius", "report", *argv]))
    say(str(folder / "report.html"))
    return EXIT_OK


@as_command
def quarantine(argv: list[str]) -> int:
    """List what a run could not read, or clear it.  Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="vesuvius quarantine",
        description="List what a run could not read and replaced by other patches.  The next --resume reads cleared "
        "places again, and those that are still damaged come back; a chunk that is not stored any more is air then.",
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, or the name of one below runs/")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--clear", action="store_true", help="have the next --resume read all of them again")
    what.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    run = find_run(args.run)
    from vesuvius.stream.reading.reading_log import remove_logs  # these import numpy
    from vesuvius.training.checkpoint.progress import box_of, clear_quarantine, read_quarantine
    from vesuvius.volumes.box import format_box

    path = run / "quarantine.jsonl"
    records = read_quarantine(path)
    count = "1 place" if len(records) == 1 else f"{len(records)} places"
    if args.json:
        say(json.dumps(records, indent=2))
    elif args.clear:
        if records:
            with storage_errors(f"the run directory {run}", "free some space"):
                clear_quarantine(path)
                remove_logs(run / "reading", crashes=True)  # else readers would not try what has crashed them
        say(f"run {run.name}: {count} cleared; the next --resume reads them again")
    else:
        say(f"run {run.name}: {count} in quarantine")
        for record in records:
            chunk = f", chunk {record['chunk']}" if record.get("chunk") else ""
            say(f"  {record['volume']}, {format_box(box_of(record))}{chunk}: {record['cause']}")
    return EXIT_OK
