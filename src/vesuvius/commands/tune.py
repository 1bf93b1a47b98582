"""`vesuvius tune --config FILE [key.path=value ...]`, also `python -m vesuvius.tune`."""

import argparse
import re
import shlex

from vesuvius.commands.cli import Parser, add_config, as_command, option, say
from vesuvius.config.load import read_config, take_config
from vesuvius.errors import EXIT_OK
from vesuvius.experiments.tune.measurement import KNOBS, Knob, key_of

KEEPABLE = tuple(knob for knob in KNOBS if knob != "accumulate_steps")  # it follows the micro-batch
_LEAST_S = 60.0
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


@as_command
def main(argv: list[str]) -> int:
    parser = Parser(
        prog="vesuvius tune",
        description="Find the fastest workers, prefetch and micro-batch for this machine by short measurements, within "
        "its memory limits.  Writes FILE.tuned.yaml, which extends FILE, and a report.",
        examples=(
            "vesuvius tune --config configs/demo.yaml --dry-run",
            "vesuvius tune --config configs/demo.yaml --budget 15m",
            "vesuvius tune --config configs/demo.yaml --keep compile,workers",
        ),
    )
    add_config(parser, required=True)
    option(parser, "--budget TIME", "total measuring time: 90s, 30m (default), 1h30m", duration, 1800.0)
    keep = f"do not change these settings; any of {', '.join(KEEPABLE)}"
    option(parser, "--keep KNOB,...", keep, knobs, [], action="extend")
    option(parser, "--dry-run", "print limits and settings to try; write nothing")
    args = parser.parse_intermixed_args(argv)
    written, config = read_config(args.config), take_config(args.config, args.overrides)
    from vesuvius.experiments.tune.session import TuneRequest, plan, tune  # imports torch

    request = TuneRequest(
        config=config,
        written=written,
        source=args.config,
        overrides=tuple(args.overrides),
        command=shlex.join(["vesuvius", "tune", *argv]),
        keep=tuple(knob for knob in KEEPABLE if knob in args.keep),
        budget_s=args.budget,
    )
    if args.dry_run:
        say("\n".join(plan(request)))
        return EXIT_OK
    code, report = tune(request)
    say(f"{report.text}\n\n{report.directory}/report.html")
    return code


def knobs(text: str) -> tuple[Knob, ...]:
    """Parse knobs such as `compile,channels_last`."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if not any(name in (knob, key_of(knob)) for knob in KEEPABLE)]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(KEEPABLE)}")
    return tuple(knob for knob in KEEPABLE if knob in names or key_of(knob) in names)


def duration(text: str) -> float:
    """Parse a time such as `90s`, `30m` or `1h30m` into seconds."""
    match = _DURATION.fullmatch(text)
    hours, minutes, seconds = (float(part or 0) for part in match.groups()) if match else (0.0, 0.0, 0.0)
    total_s = 3600 * hours + 60 * minutes + seconds
    if total_s < _LEAST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration of at least a minute, such as 90s, 30m or 1h30m")
    return total_s
