"""`vesuvius bench --config FILE --sweep KEY=A,B --compare KEY=A,B`: which setting is faster here, and by how much?"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from vesuvius.commands.cli import as_command, positive, positive_number, say
from vesuvius.commands.tune import duration
from vesuvius.config.load import take_variables

_ROUNDS = 6


@as_command
def main(argv: list[str]) -> int:
    """Parse the command line and measure.  Returns the exit code."""
    parser = _parser()
    args = parser.parse_intermixed_args(argv)
    if args.ranks and (args.sweep or args.compare):
        parser.error("--ranks excludes other axes: each number of ranks is compared with the first, all else equal")
    from vesuvius.experiments.bench.results import make_cells, parse_axis
    from vesuvius.experiments.bench.session import PAGE, BenchRequest, bench

    sweeps = [parse_axis(text) for text in args.sweep]
    if args.ranks:
        sweeps = [parse_axis(f"training.ranks={args.ranks}")]
    cells = make_cells(sweeps, [parse_axis(text) for text in args.compare])
    code, report = bench(
        BenchRequest(
            source=args.config,
            overrides=tuple(args.overrides),
            environment=take_variables(),
            cells=tuple(cells),
            rounds=args.rounds,
            seconds=args.seconds,
            limit_s=args.limit,
            command=shlex.join(["vesuvius", "bench", *argv]),
        )
    )
    say(f"{report.text}\n\n{report.directory}/{PAGE}.html")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vesuvius bench",
        description="Measure settings of a config side by side: a process for each, in rounds, so that drift of the "
        "machine cancels.  The first value of each key is the baseline.  Writes a page and JSON to "
        "runs/NAME/benches/; an existing run is not touched.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", required=True, help="YAML file of the experiment")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="config keys to set, with YAML values")
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=A,B,...", help="values, crossed with those of other sweeps"
    )
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="KEY=A,B,...",
        help="values to change alone, all other keys as in the baseline",
    )
    parser.add_argument("--ranks", metavar="1,2,4,8", help="numbers of ranks: speed-up, efficiency, memory of each")
    parser.add_argument("--rounds", type=positive, default=_ROUNDS, metavar="N", help=f"rounds of all cells; {_ROUNDS}")
    parser.add_argument(
        "--seconds", type=positive_number, default=10.0, metavar="S", help="of the steady state in each; 10"
    )
    parser.add_argument(
        "--limit", type=duration, default=1200.0, metavar="TIME", help="longest time of one measurement; 20m"
    )
    return parser
