"""`vesuvius <command> ...`: runs the command, logs to the terminal, turns errors into a message and an exit code.

Also shared by all commands: their argument parser, printing, and argument types.  Imports nothing heavy, so that
`vesuvius --help` answers at once.
"""

import argparse
import errno
import faulthandler
import functools
import importlib
import io
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from vesuvius import __version__, errors
from vesuvius.runlog.logfile import close_logs, is_lost_terminal, log_to_terminal, silence
from vesuvius.runlog.redact import redact

log = logging.getLogger(__name__)

_END_WITHIN_S = 0.5

COMMANDS = {
    "demo": "write a synthetic scroll and train a tiny model on it, in minutes",
    "init": "write a first config for a volume on this machine",
    "train": "train a model from a config file, or resume training",
    "tune": "find the fastest settings of a config on this machine",
    "predict": "evaluate any network on a whole volume",
    "plan": "forecast reads, data wait, hours and money of a run on many GPUs",
    "sample": "generate patches or whole volumes with a trained model",
    "evaluate": "compare generated patches with real ones",
    "volume": "import, inspect, copy, list, verify or synthesize volumes",
    "quarantine": "list the chunks that a run could not read, or clear the list",
    "doctor": "check whether this machine can train, with a remedy for each problem",
    "profile": "show where the time of a training step goes, and what to try",
    "bench": "compare the speed of settings or rank counts",
    "report": "write an HTML page with the curves and events of runs",
    "memcheck": "show the memory of a run, its limits, and how close it is to them",
}


# ---- a command


def as_command(body: Callable[[list[str]], int]) -> Callable[..., int]:
    """The `main` of a command: logs to the terminal, turns errors into a message and an exit code.

    Without arguments, it takes those of this process and ends it.
    """

    @functools.wraps(body)
    def main(argv: list[str] | None = None) -> int:
        with suppress(RuntimeError, ValueError):  # standard error is closed or has no descriptor
            if argv is None:
                faulthandler.enable(all_threads=False)  # a crash in a codec or driver leaves a stack
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # names may have characters that the terminal's encoding lacks
                stream.reconfigure(errors="backslashreplace")
        exit_code = _run_command(body, sys.argv[1:] if argv is None else argv)
        if argv is None:
            end_soon(exit_code)
        return exit_code

    return main


@as_command
def main(arguments: list[str]) -> int:
    """Run one command.  Returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        names = "\n".join(f"  {name:10} {meaning}" for name, meaning in COMMANDS.items())
        say(f"usage: vesuvius <command> [options]\n\ncommands:\n{names}\n\n`vesuvius <command> --help` explains one")
        return errors.EXIT_OK if arguments else errors.EXIT_CONFIG
    if arguments[0] == "--version":
        say(f"vesuvius {__version__}")
        return errors.EXIT_OK
    command, *rest = arguments
    if command not in COMMANDS:
        raise errors.ConfigError(f"unknown command {command!r}; `vesuvius --help` lists the commands")
    shared = command in ("quarantine", "report")
    module = importlib.import_module(f"vesuvius.commands.{'runs' if shared else command}")
    exit_code: int = getattr(module, command if shared else "main")(rest)
    return exit_code


def end_soon(exit_code: int) -> None:
    """End the process with this code even if threads or exit handlers block.

    Python waits for threads at exit, and one that reads from a store may block for minutes: they get half a second.
    After a stop, or if one of several ranks has failed (its GPU may hang), the process ends at once.
    """

    def end() -> None:
        time.sleep(_END_WITHIN_S)
        os._exit(exit_code)

    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                silence(stream)  # otherwise Python tries again at exit and returns 120
    stopped = exit_code in (errors.EXIT_STOPPED, errors.EXIT_INTERRUPTED, errors.EXIT_GUARD)
    if stopped or (exit_code and "RANK" in os.environ):
        os._exit(exit_code)
    threading.Thread(target=end, name="end-soon", daemon=True).start()


def _run_command(main: Callable[[list[str]], int], argv: list[str]) -> int:
    log_to_terminal()
    # Before torch loads OpenMP: spinning threads take the core that the thread they wait for needs
    # (docs/performance.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        name = main.__name__ if main.__name__ != "main" else main.__module__.removeprefix("vesuvius.commands.")
        try:
            with errors.needs_extra(f"`vesuvius {' '.join(argv[:1]) if name == 'cli' else name}`"):
                return main(argv)
        finally:
            say("", end="")  # flushes the output of argparse
    except errors.VesuviusError as error:
        log.error("%s", error)
        return error.exit_code
    except KeyboardInterrupt:
        log.error("interrupted")
        return errors.EXIT_INTERRUPTED
    except Exception as error:
        if failure := errors.system_error(error):
            log.error("%s", failure)
            return failure.exit_code
        log.exception("Bug in vesuvius, please report it: %s: %s", type(error).__name__, error)
        return errors.EXIT_ERROR
    finally:
        close_logs()


def say(text: str, end: str = "\n", *, exact: bool = False) -> bool:
    """Print a command's output without secrets.  A closed pipe (`| head`) or terminal is not an error.

    Returns whether the output still has a reader: a command that prints for ever ends without one.  With `exact`,
    secrets are kept: the output is read back.  Raises StorageError if it is a file on a full disk.
    """
    if sys.stdout is None:  # closed when the process started
        return False
    try:
        if exact and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")
        print(text if exact else redact(text), end=end, flush=True)
    except OSError as error:
        lost = isinstance(error, BrokenPipeError) or (error.errno == errno.EIO and is_lost_terminal(sys.stdout))
        silence(sys.stdout)  # otherwise Python flushes it again at exit
        if lost:
            return False
        raise errors.StorageError(
            f"Cannot write the output: {error}; {errors.disk_remedy(error)} or write it elsewhere"
        ) from error
    return True


# ---- arguments


class Parser(argparse.ArgumentParser):
    """Parser of a command, whose help ends with examples."""

    def __init__(self, *, examples: Sequence[str], **options: Any) -> None:
        formatter = functools.partial(argparse.HelpFormatter, max_help_position=26)
        super().__init__(**options, formatter_class=formatter)
        self._examples = examples

    def format_help(self) -> str:
        self.usage = " ".join([self.prog, *self._required(), "[options]"])
        return f"{super().format_help()}\nexamples:\n" + "".join(f"  {line}\n" for line in self._examples)

    def _required(self) -> Iterator[str]:
        """Yield the required options, and the positional arguments."""
        repeats = {"?": "[{0}]", "*": "[{0} ...]", "+": "{0} [{0} ...]"}
        for action in self._actions:
            if action.option_strings and action.required:
                yield f"{action.option_strings[0]} {action.metavar}"
            elif not action.option_strings:
                # While `parse_intermixed_args` parses the options, the number of values is in `save_nargs`.
                nargs: Any = getattr(action, "save_nargs", action.nargs)
                yield repeats.get(nargs, "{0}").format(action.metavar)

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and one line: the usage of many options would hide it."""
        self.exit(errors.EXIT_CONFIG, f"{self.prog}: error: {message}; see `{self.prog} --help`\n")


def option(
    to: argparse._ActionsContainer,
    form: str,
    meaning: str,
    kind: Callable[[str], Any] | None = None,
    default: Any = None,
    **more: Any,
) -> None:
    """Add `--name METAVAR`, a switch `--name`, or the positional `name METAVAR`; the help ends with the default."""
    name, _, metavar = form.partition(" ")
    if default not in (None, (), {}, []) and "default" not in meaning:
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else f"{default:g}"
        meaning += f" (default: {shown})"
    how = {"type": kind, "metavar": metavar} if metavar else {"action": "store_true"}
    to.add_argument(name, help=meaning, **({"default": default} if metavar else {}) | how | more)


def add_config(parser: Parser, form: str = "--config FILE", **more: Any) -> None:
    option(parser, form, "YAML file of the experiment", full_path, **more)
    add_overrides(parser)


def add_overrides(parser: Parser) -> None:
    option(parser, "overrides key.path=value", "config keys to set, with YAML values", nargs="*")


# Types of arguments: each raises argparse's error with the value and what is needed.


def full_path(text: str) -> Path:
    """Parse a path on a disk that is opened later, perhaps from another working directory."""
    try:
        return errors.disk_path(text)
    except errors.ConfigError as error:  # argparse replaces the text of a ValueError
        raise argparse.ArgumentTypeError(str(error)) from None


def at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
        return int(text)

    return parse


natural, positive = at_least(0), at_least(1)


def naturals(text: str) -> tuple[int, ...]:
    """Parse integers of at least 0, separated by commas."""
    return tuple(natural(part.strip()) for part in text.split(","))


def triple(least: int, example: str) -> Callable[[str], tuple[int, int, int]]:
    """Return the type of three integers z,y,x of at least `least`."""

    def parse(text: str) -> tuple[int, int, int]:
        sizes = [int(part) if part.strip().isdecimal() else -1 for part in text.split(",")]
        if len(sizes) != 3 or min(sizes) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not three integers z,y,x of at least {least}; try {example}")
        z, y, x = sizes
        return z, y, x

    return parse


def lengths(text: str) -> tuple[float, float, float]:
    try:
        z, y, x = (positive_number(part.strip()) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers z,y,x above 0; try 7.91,7.91,7.91") from None
    return z, y, x


def positive_number(text: str) -> float:
    if (number := number_from_0(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def number_from_0(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number
