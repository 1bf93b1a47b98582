"""`vesuvius bench --config FILE --sweep KEY=A,B --compare KEY=A,B`: compare the speed of settings."""

import shlex

from vesuvius.commands.cli import Parser, add_config, as_command, option, positive, positive_number, say
from vesuvius.commands.tune import duration
from vesuvius.config.load import take_variables


@as_command
def main(argv: list[str]) -> int:
    parser = Parser(
        prog="vesuvius bench",
        description="Compare the speed of settings, each in its own process and in rounds, so that drift of the "
        "machine cancels.  The first value of each key is the baseline.  Writes a page and JSON to "
        "runs/NAME/benches/.",
        examples=(
            "vesuvius bench --config configs/demo.yaml --sweep training.workers=0,1,2,4",
            "vesuvius bench --config configs/demo.yaml --compare training.compile=false,true",
            "vesuvius bench --config configs/demo.yaml --ranks 1,2,4,8",
        ),
    )
    add_config(parser, required=True)
    for name, meaning in (("sweep", "several form a grid"), ("compare", "other keys stay at the baseline")):
        option(parser, f"--{name} KEY=A,B,...", f"values of one key; {meaning}", default=[], action="append")
    option(parser, "--ranks 1,2,4,8", "rank counts to compare")
    option(parser, "--rounds N", "over all settings", positive, 6)
    option(parser, "--seconds S", "of the steady state in each measurement", positive_number, 10.0)
    option(parser, "--limit TIME", "longest time of one measurement (default: 20m)", duration, 1200.0)
    args = parser.parse_intermixed_args(argv)
    if args.ranks and (args.sweep or args.compare):
        parser.error("--ranks cannot be combined with --sweep or --compare; run two benches")
    from vesuvius.experiments.bench.results import make_trials, parse_axis
    from vesuvius.experiments.bench.session import PAGE, BenchRequest, bench

    sweeps = [parse_axis(text) for text in args.sweep]
    if args.ranks:
        sweeps = [parse_axis(f"training.ranks={args.ranks}")]
    trials = make_trials(sweeps, [parse_axis(text) for text in args.compare])
    code, report = bench(
        BenchRequest(
            source=args.config,
            overrides=tuple(args.overrides),
            environment=take_variables(),
            trials=tuple(trials),
            rounds=args.rounds,
            seconds=args.seconds,
            limit_s=args.limit,
            command=shlex.join(["vesuvius", "bench", *argv]),
        )
    )
    say(f"{report.text}\n\n{report.directory}/{PAGE}.html")
    return code
