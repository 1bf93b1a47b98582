"""`vesuvius doctor [--config FILE [key.path=value ...]]`: is this machine fit for a run?"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from vesuvius.commands.cli import as_command, say
from vesuvius.config import Config
from vesuvius.config.load import take_config
from vesuvius.errors import EXIT_ERROR, EXIT_OK, ConfigError, one_line

_EPILOG = "exit codes: 0 = every line is ok or warn, 1 = a line is fail, 2 = usage"


@as_command
def main(argv: list[str]) -> int:
    """Parse the command line and examine.  Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="vesuvius doctor",
        description="Examine this machine, and with --config what that config needs of it.  Each line is ok, warn or "
        "fail, with what was found and what to do.  Takes at most 30 s and leaves nothing behind.",
        epilog=_EPILOG,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of the experiment")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="config keys to set, with YAML values")
    args = parser.parse_intermixed_args(argv)
    if args.overrides and args.config is None:
        parser.error("key.path=value changes a config; use it with --config")
    failed = False
    config: Config | None = None
    if args.config is not None:
        try:
            config = take_config(args.config, args.overrides)
            say(line("ok", "config", f"{args.config}: {config.name}", ""))
        except ConfigError as error:
            failed = True
            say(line("fail", "config", one_line(error, 400), "correct it; the machine alone is examined now"))
    # The checks say in their lines what the package would log: an outage, a slow disk.
    logging.getLogger("vesuvius").setLevel(logging.CRITICAL)
    from vesuvius.doctor.examination import examination

    count = dict.fromkeys(("ok", "warn", "fail"), 0)
    for name, found in examination(config):
        count[found.level] += 1
        say(line(found.level, name, found.value, found.remedy))
    count["fail"] += failed
    say(f"{count['ok']} ok, {count['warn']} warn, {count['fail']} fail")
    return EXIT_ERROR if count["fail"] else EXIT_OK


def line(level: str, name: str, value: str, remedy: str) -> str:
    """`warn  cores  2 of 2 cores; do this`."""
    return f"{level:5} {name:12} {value}" + (f"; {remedy}" if remedy else "")
