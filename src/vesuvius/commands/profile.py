"""`vesuvius profile --config FILE [--trace] [key.path=value ...]`: where does the time of a step go?"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from vesuvius.commands.cli import as_command, say, whole
from vesuvius.config.load import take_config
from vesuvius.errors import EXIT_OK


@as_command
def main(argv: list[str]) -> int:
    """Parse the command line and profile.  Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="vesuvius profile",
        description="Train some steps of a config and say where their time goes, what to try, and what to leave alone. "
        "Writes a page to runs/NAME/profiles/; an existing run is not touched.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", required=True, help="YAML file of the experiment")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="config keys to set, with YAML values")
    parser.add_argument("--steps", type=whole(5), default=20, metavar="N", help="steps measured after the warm-up; 20")
    parser.add_argument(
        "--trace",
        action="store_true",
        help="also write a trace for chrome://tracing, and the longest operators",
    )
    args = parser.parse_intermixed_args(argv)
    config = take_config(args.config, args.overrides)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler prints what it begins and ends
    from vesuvius.experiments.profile import profile  # imports torch

    command = shlex.join(["vesuvius", "profile", *argv])
    report = profile(config, args.config, args.steps, args.trace, command)
    say(f"{report.text}\n\n{report.directory}/profile.html")
    return EXIT_OK
