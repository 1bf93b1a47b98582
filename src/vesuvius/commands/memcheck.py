"""`vesuvius memcheck [RUN | --pid PID | --config FILE ...]`, also `tools/memcheck.py`.

Looks from outside and changes nothing.  Needs psutil and rich alone, so that it runs where a run is dying.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from vesuvius.commands.arguments.types import positive_number
from vesuvius.commands.command import as_command, say
from vesuvius.errors import EXIT_MEMORY_CRITICAL, EXIT_MEMORY_KILL, EXIT_MEMORY_WARN, EXIT_OK, ConfigError
from vesuvius.monitor.memcheck.inspection import Inspection, as_json
from vesuvius.monitor.memcheck.inspector import Inspector, MachineInspector, ProcessInspector
from vesuvius.monitor.memcheck.run_inspector import RunInspector
from vesuvius.monitor.postmortem.death import death_lines
from vesuvius.monitor.postmortem.post_mortem import deaths_of, is_of_session
from vesuvius.monitor.probes.gpus import Gpus
from vesuvius.monitor.session import is_alive, read_session
from vesuvius.runlog.find_run import find_run, runs_root

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

_EVERY_S = 2.0
_EPILOG = """exit codes: 0 ok, 10 warn, 11 critical, or ended by the memory guard, 12 a kill was seen, 13 run not found,
2 usage

without a run: the machine's own state, and with --config what a config would need"""


@as_command
def main(argv: list[str]) -> int:
    """Parse the command line and look.  Returns the exit code."""
    parser = _parser()
    args = parser.parse_intermixed_args(argv)
    _check(parser, args)
    run = find_run(args.words[0]) if args.words and args.config is None else None
    if args.post_mortem:
        assert run is not None
        return _post_mortem(run, args.json)
    with ExitStack() as stack:
        gpus = stack.enter_context(Gpus(within_s=5.0))
        if args.config is not None:
            return _plan(args.config, args.words, gpus, args.json)
        return watch(_inspector(args, run, gpus), args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vesuvius memcheck",
        usage="vesuvius memcheck [RUN | --pid PID | --config FILE [KEY=VALUE ...]] [options]",
        description="Show a run's memory, its limits and how near a kill is.  Only reads; the run may be dead.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="RUN", help="a run directory, or the name of one below runs/")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--pid", type=int, metavar="PID", help="any process and its descendants")
    what.add_argument("--config", type=Path, metavar="FILE", help="what a config needs; key.path=value may follow")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="sample once; the default where the output is not a terminal")
    how.add_argument("--watch", type=positive_number, metavar="S", help="sample every S seconds; 2 on a terminal")
    parser.add_argument("--json", action="store_true", help="one JSON object; with --watch one per line")
    parser.add_argument("--post-mortem", action="store_true", help="show what died in this run, and why")
    return parser


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends with a usage error where arguments do not go together."""
    if args.config is None and len(args.words) > 1:
        parser.error(f"one run at a time; got {' '.join(args.words)}")
    if args.words and args.config is None and args.pid is not None:
        parser.error("RUN, --pid and --config exclude each other; give one of them")
    if args.config is not None and (bad := [word for word in args.words if "=" not in word]):
        parser.error(f"after --config only overrides key.path=value may follow; got {bad[0]!r}")
    if args.config is not None and args.watch is not None:
        parser.error("--config plans once; drop --watch")
    if args.post_mortem and (not args.words or args.config is not None):
        parser.error("--post-mortem is about a run; give its directory or its name")


def _inspector(args: argparse.Namespace, run: Path | None, gpus: Gpus) -> Inspector:
    if run is not None:
        return RunInspector(run, gpus)
    if args.pid is not None:
        return ProcessInspector(args.pid, gpus)
    return MachineInspector(gpus, runs_at_work())


def runs_at_work() -> tuple[str, ...]:
    """A line that names the living runs below `runs/`; empty where there is none."""
    sessions = [(path.parent.name, read_session(path)) for path in sorted(runs_root().glob("*/session.json"))]
    names = [name for name, session in sessions if session and session.end_time is None and is_alive(session)]
    return (f"running below runs/: {', '.join(names)}; try `vesuvius memcheck {names[0]}`",) if names else ()


def watch(inspector: Inspector, args: argparse.Namespace) -> int:
    """Look once or again and again, show it, and return the exit code of the last look."""
    on_terminal = sys.stdout is not None and sys.stdout.isatty() and not args.json
    goes_on = not args.once and (args.watch is not None or on_terminal)
    exit_code: int | None = None
    try:
        with _screen(args.json, live=goes_on and on_terminal) as show:
            while True:
                next_s = time.monotonic() + (args.watch or _EVERY_S)
                found = inspector.inspect()
                exit_code = found.exit_code
                show(found)
                if not goes_on or found.is_over:
                    return exit_code
                time.sleep(max(next_s - time.monotonic(), 0.0))
    except KeyboardInterrupt:  # the usual end of a watch
        if exit_code is None:
            raise
        return exit_code


@contextmanager
def _screen(as_lines_of_json: bool, live: bool) -> Iterator[Callable[[Inspection], None]]:
    """Yields what shows an inspection: a line of JSON, a table in the place of the last one, or one below the other."""
    if as_lines_of_json:
        yield lambda found: say(json.dumps(as_json(found)))
        return
    from rich.console import Console

    from vesuvius.monitor.memcheck.memory_table import memory_table

    console = Console(highlight=False)
    if not live:
        yield lambda found: _print(console, found)
        return
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as place:
        yield lambda found: place.update(memory_table(found), refresh=True)


def _print(console: Console, found: Inspection) -> None:
    """With an empty line below; by way of `say`, which knows of pipes whose reader has left."""
    from vesuvius.monitor.memcheck.memory_table import memory_table

    with console.capture() as captured:
        console.print(memory_table(found))
    say("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")


def _post_mortem(run: Path, as_lines_of_json: bool) -> int:
    deaths = deaths_of(run)
    session = read_session(run / "session.json")
    if as_lines_of_json:
        say(json.dumps([asdict(death) for death in deaths]))
    elif not deaths:
        say(f"run {run.name}: no deaths recorded")
    else:
        say("\n\n".join("\n".join(death_lines(death)) for death in deaths))
    recent = [death for death in deaths if session is None or is_of_session(death, session)]
    if any(death.cause != "guard" for death in recent):
        return EXIT_MEMORY_KILL
    return EXIT_MEMORY_CRITICAL if recent else EXIT_OK


def _plan(config_path: Path, overrides: list[str], gpus: Gpus, as_lines_of_json: bool) -> int:
    """What a config would need, below the state of the machine.  Warns as a dry run does.

    Raises:
        ConfigError: the config is wrong, or the project's packages are not installed.
        DataError: a volume cannot be used.
    """
    found = MachineInspector(gpus).inspect()
    try:
        from vesuvius.commands.arguments.config import take_config
        from vesuvius.training.forecast.run_plan import plan_run
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--config needs the project's packages; got no module {error.name!r}; run `make install` in the "
            "checkout, or leave --config out"
        ) from error
    config = take_config(config_path, overrides)
    plan = plan_run(config)
    warnings = [problem.text for problem in plan.problems()]
    if as_lines_of_json:
        planned = asdict(plan.ram) | {"total_bytes": plan.ram.total_bytes, "vram_bytes": plan.step.vram_bytes}
        planned |= {"limit_bytes": plan.limit.limit_bytes, "warnings": warnings}
        say(json.dumps(as_json(found) | {"plan": planned}))
    else:
        with _screen(False, live=False) as show:
            show(found)
        say("\n".join([f"config {config.name}", *plan.lines()]))
        for warning in warnings:
            log.warning("%s", warning)
    return max(found.exit_code, EXIT_MEMORY_WARN if warnings else EXIT_OK)
