"""`vesuvius doctor [--config FILE [key.path=value ...]]`: check whether this machine can train."""

import logging

from vesuvius.commands.cli import Parser, add_config, as_command, say
from vesuvius.config import Config
from vesuvius.config.load import take_config
from vesuvius.errors import EXIT_NO_RESULT, EXIT_OK, ConfigError, one_line


@as_command
def main(argv: list[str]) -> int:
    parser = Parser(
        prog="vesuvius doctor",
        description="Check this machine and, with --config, whether it fits that config.  Each line is ok, warn, fail, "
        "with a finding and a remedy.  Takes at most 30 s and leaves no files.",
        epilog="exit codes: 0 = no line is fail, 2 = usage, 7 = a line is fail",
        examples=("vesuvius doctor", "vesuvius doctor --config configs/demo.yaml"),
    )
    add_config(parser)
    args = parser.parse_intermixed_args(argv)
    if args.overrides and args.config is None:
        parser.error("key.path=value needs a config; add --config FILE")
    failed = False
    config: Config | None = None
    if args.config is not None:
        try:
            config = take_config(args.config, args.overrides)
            say(line("ok", "config", f"{args.config}: {config.name}", ""))
        except ConfigError as error:
            failed = True
            say(line("fail", "config", one_line(error, 400), "correct the config; only the machine was checked"))
    # The checks report what the package would log, such as an outage or a slow disk.
    logging.getLogger("vesuvius").setLevel(logging.CRITICAL)
    from vesuvius.doctor import WITHIN_S, checks_of, examine

    count = dict.fromkeys(("ok", "warn", "fail"), 0)
    for name, finding in examine(checks_of(config), WITHIN_S):
        count[finding.level] += 1
        say(line(finding.level, name, finding.value, finding.remedy))
    count["fail"] += failed
    say(f"{count['ok']} ok, {count['warn']} warn, {count['fail']} fail")
    return EXIT_NO_RESULT if count["fail"] else EXIT_OK


def line(level: str, name: str, value: str, remedy: str) -> str:
    """Return a line such as `warn  cores  2 of 2 cores; do this`."""
    return f"{level:5} {name:12} {value}" + (f"; {remedy}" if remedy else "")
