"""`vesuvius profile --config FILE [--trace] [key.path=value ...]`: show where the time of a step goes."""

import os
import shlex

from vesuvius.commands.cli import Parser, add_config, as_command, at_least, option, say
from vesuvius.config.load import take_config
from vesuvius.errors import EXIT_OK


@as_command
def main(argv: list[str]) -> int:
    parser = Parser(
        prog="vesuvius profile",
        description="Train a few steps and show where their time goes, which settings to try and which will not help.  "
        "Writes a page to runs/NAME/profiles/.",
        examples=(
            "vesuvius profile --config configs/demo.yaml",
            "vesuvius profile --config configs/demo.yaml --trace training.workers=4",
        ),
    )
    add_config(parser, required=True)
    option(parser, "--steps N", "steps measured after the warm-up", at_least(5), 20)
    option(parser, "--trace", "also write a trace for chrome://tracing, and list the slowest operators")
    args = parser.parse_intermixed_args(argv)
    config = take_config(args.config, args.overrides)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # quiets torch.profiler
    from vesuvius.experiments.profile import profile  # imports torch

    command = shlex.join(["vesuvius", "profile", *argv])
    report = profile(config, args.config, args.steps, args.trace, command)
    say(f"{report.text}\n\n{report.directory}/profile.html")
    return EXIT_OK
