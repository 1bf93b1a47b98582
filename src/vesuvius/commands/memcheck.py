"""`vesuvius memcheck [RUN]`, also `tools/memcheck.py`.

Reads only, from outside the run.  Needs only psutil and rich, so that it works while a run is dying.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

from vesuvius.commands.cli import Parser, as_command, option, positive_number, say
from vesuvius.errors import EXIT_MEMORY_CRITICAL, EXIT_MEMORY_KILL, EXIT_MEMORY_WARN, EXIT_OK
from vesuvius.monitor.memcheck.inspection import Inspection, inspect_machine, inspect_run
from vesuvius.monitor.post_mortem import death_lines, deaths_of, is_of_session
from vesuvius.monitor.probes.gpus import Gpus
from vesuvius.monitor.session import is_alive, read_session
from vesuvius.runlog.find_run import find_run, runs_root
from vesuvius.runlog.records import naming_wrong_values

_EVERY_S = 2.0


@as_command
def main(argv: list[str]) -> int:
    parser = Parser(
        prog="vesuvius memcheck",
        description="Show the memory of a run, its limits, and how close it is to them; without a run, those of the "
        "machine.  Reads only; the run may be dead.",
        epilog="exit codes: 0 ok, 10 warn, hung or died of another cause, 11 critical or stopped by the memory guard, "
        "12 an OOM kill, 13 run not found",
        examples=("vesuvius memcheck demo --watch 2", "vesuvius memcheck demo --post-mortem"),
    )
    option(parser, "run RUN", "run directory, or the name of a run below runs/", nargs="?")
    how = parser.add_mutually_exclusive_group()
    option(how, "--once", "sample once (default unless on a terminal)")
    option(how, "--watch S", "sample every S seconds (default on a terminal: 2)", positive_number)
    option(parser, "--json", "print a JSON object, with --watch one per line")
    option(parser, "--post-mortem", "show which processes of the run died, and why")
    args = parser.parse_args(argv)
    run = find_run(args.run) if args.run is not None else None
    if args.post_mortem:
        if run is None:
            parser.error("--post-mortem needs a run; name its directory")
        return _post_mortem(run, args.json)
    if run is not None:
        return watch(partial(inspect_run, run), args)
    with Gpus(within_s=5.0) as gpus:
        return watch(partial(inspect_machine, gpus, _runs_at_work()), args)


def _runs_at_work() -> tuple[str, ...]:
    """Return a line that names the active runs below `runs/`; empty if there are none."""
    sessions = [(path.parent.name, read_session(path)) for path in sorted(runs_root().glob("*/session.json"))]
    names = [name for name, session in sessions if session and session.end_time is None and is_alive(session)]
    return (f"runs in progress: {', '.join(names)}; try `vesuvius memcheck {names[0]}`",) if names else ()


def watch(inspect: Callable[[], Inspection], args: argparse.Namespace) -> int:
    """Show one or more inspections, and return the exit code of the last one."""
    on_terminal = sys.stdout is not None and sys.stdout.isatty() and not args.json
    goes_on = not args.once and (args.watch is not None or on_terminal)
    found: Inspection | None = None
    try:
        with _screen(args.json, live=goes_on and on_terminal) as show:
            while True:
                next_s = time.monotonic() + (args.watch or _EVERY_S)
                found = inspect()
                if not show(found) or not goes_on or found.state in ("ended", "died"):
                    return found.exit_code
                time.sleep(min(max(next_s - time.monotonic(), 0.0), threading.TIMEOUT_MAX))
    except KeyboardInterrupt:  # the usual end of a watch
        if found is None:
            raise
        return found.exit_code


@contextmanager
def _screen(as_lines_of_json: bool, live: bool) -> Iterator[Callable[[Inspection], bool]]:
    """Yield a function that shows an inspection (JSON, live table, tables) and returns whether anybody reads it."""
    if as_lines_of_json:
        yield lambda found: say(json.dumps(found.as_json()))
        return
    from rich.console import Console
    from rich.live import Live

    from vesuvius.monitor.memcheck.memory_table import memory_table

    console = Console(highlight=False)
    live_table = Live(console=console, auto_refresh=False)

    def show(found: Inspection) -> bool:
        """Print by `say`, which handles closed pipes."""
        if live:
            live_table.update(memory_table(found), refresh=True)
            return True
        with console.capture() as captured:
            console.print(memory_table(found))
        return say("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")

    with live_table if live else nullcontext():
        yield show


def _post_mortem(run: Path, as_lines_of_json: bool) -> int:
    with naming_wrong_values(run):
        deaths, session = deaths_of(run), read_session(run / "session.json")
    if as_lines_of_json:
        say(json.dumps([asdict(death) for death in deaths]))
    else:
        texts = ["\n".join(death_lines(death)) for death in deaths]
        say("\n\n".join(texts) or f"run {run.name}: no deaths recorded")
    recent = [death for death in deaths if session is None or is_of_session(death, session)]
    if any(death.is_for_memory for death in recent):
        return EXIT_MEMORY_KILL
    if any(death.cause == "guard" for death in recent):
        return EXIT_MEMORY_CRITICAL
    return EXIT_MEMORY_WARN if recent else EXIT_OK
