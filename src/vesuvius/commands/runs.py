"""`vesuvius report RUN [RUN ...]` and `vesuvius quarantine RUN`: the records of runs."""

import shlex
from contextlib import suppress
from itertools import pairwise

from vesuvius.commands.cli import Parser, as_command, full_path, natural, option, say
from vesuvius.errors import EXIT_INTERRUPTED, EXIT_OK, storage_errors
from vesuvius.runlog.find_run import find_run
from vesuvius.runlog.units import format_count

_PORT = 8642
_RUN = "run directory, or the name of a run below runs/"


@as_command
def report(argv: list[str]) -> int:
    parser = Parser(
        prog="vesuvius report",
        description="Write one or more runs, finished or in progress, as a self-contained HTML page: "
        "verdict, time, losses, memory, events, previews, config.",
        examples=("vesuvius report demo --serve", "vesuvius report demo other-run --out comparison"),
    )
    option(parser, "runs RUN", _RUN, nargs="+")
    option(parser, "--out DIR", "folder to write (default: a new one in the first run's reports/)", full_path)
    serve = f"serve the page on 127.0.0.1 instead, refreshed while the runs train (default port: {_PORT})"
    option(parser, "--serve PORT", serve, natural, nargs="?", const=_PORT)
    # Without a number after it, `--serve` would take the name of a run as its port.
    numbered = pairwise([*argv, ""])
    with_port = [f"--serve={_PORT}" if each == "--serve" and not then.isdecimal() else each for each, then in numbered]
    args = parser.parse_intermixed_args(with_port)
    if args.out is not None and args.serve is not None:
        parser.error("--out writes a page and --serve serves one; give only one of them")
    runs = [find_run(text) for text in args.runs]
    from vesuvius.report.model import write_report  # imports numpy and matplotlib
    from vesuvius.report.serve import HOST, LivePage, open_server

    command = shlex.join(["vesuvius", "report", *argv])
    if args.serve is None:
        say(str(write_report(runs, args.out, command) / "report.html"))
        return EXIT_OK
    with open_server(LivePage(runs, command), args.serve) as server:
        say(f"http://{HOST}:{server.server_port}/ (Ctrl-C to stop)")
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return EXIT_INTERRUPTED


@as_command
def quarantine(argv: list[str]) -> int:
    parser = Parser(
        prog="vesuvius quarantine",
        description="List the chunks that a run could not read and replaced with other patches.  The next --resume "
        "reads cleared chunks again: those still damaged return to the list, and those no longer stored count as air.",
        examples=("vesuvius quarantine demo", "vesuvius quarantine demo --clear"),
    )
    option(parser, "run RUN", _RUN)
    option(parser, "--clear", "let the next --resume read all of them again")
    args = parser.parse_args(argv)
    run = find_run(args.run)
    from vesuvius.stream.reading.reading_log import remove_logs  # these import numpy
    from vesuvius.training.checkpoint.progress import box_of, clear_quarantine, read_quarantine
    from vesuvius.volumes.box import format_box

    path = run / "quarantine.jsonl"
    records = read_quarantine(path)
    count = format_count(len(records), "damaged region")
    if args.clear:
        if records:
            with storage_errors(f"the run directory {run}", "free some space"):
                clear_quarantine(path)
                remove_logs(run / "reading", crashes=True)  # otherwise readers would skip what crashed them
        say(f"run {run.name}: {count} cleared; the next --resume reads them again")
    else:
        say(f"run {run.name}: {count} in quarantine")
        for record in records:
            chunk = f", chunk {record['chunk']}" if record.get("chunk") else ""
            say(f"  {record['volume']}, {format_box(box_of(record))}{chunk}: {record['cause']}")
    return EXIT_OK
