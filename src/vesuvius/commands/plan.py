"""`vesuvius plan CONFIG --gpus N [--nodes N] ... [key.path=value ...]`: forecast a run on many GPUs."""

import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from typing import Any

from vesuvius.commands.cli import (
    Parser,
    add_config,
    as_command,
    full_path,
    number_from_0,
    option,
    positive,
    positive_number,
)
from vesuvius.commands.facts import print_facts
from vesuvius.config.load import take_config
from vesuvius.errors import EXIT_OK
from vesuvius.volumes.store.objects import is_remote

# Of each option: field, its unit, meaning.
_RATES = {
    "latency-ms": ("latency_s", 1e-3, "of a request, without its bytes"),
    "request-mb-s": ("request_bytes_s", 1e6, "rate of one request, 10^6 bytes/s"),
    "node-gb-s": ("node_bytes_s", 1e9, "network of a node to the store, 10^9 bytes/s"),
    "requests-s": ("requests_s", 1.0, "requests per second that the store answers, to all nodes"),
    "decode-gb-s": ("decode_bytes_s", 1e9, "decoded 10^9 bytes/s of a core (default: measured)"),
    "compression": ("compression", 1.0, "decoded bytes per stored byte (default: measured)"),
}
_PRICES = {
    "price-gpu-hour": ("gpu_hour", 1.0, "of one GPU for an hour"),
    "price-gb": ("gb", 1.0, "of 10^9 bytes that leave the store"),
    "price-1000-requests": ("requests_1000", 1.0, "of 1000 requests"),
}


@as_command
def main(argv: list[str]) -> int:
    parser = Parser(
        prog="vesuvius plan",
        description="Forecast a run on many GPUs before renting them: patches per second needed and available, data "
        "wait, the first limit and what raises it, bytes and requests, hours and money.  Opens the volumes and reads a "
        "few regions for two seconds, unless --decode-gb-s and --compression are given.",
        examples=(
            "vesuvius plan configs/exp001_full.yaml --gpus 64 --nodes 8 --cores 96 --store s3 --step-s 2.9",
            "vesuvius plan configs/demo.yaml --gpus 1 --step-from runs/demo --json training.workers=4",
        ),
    )
    add_config(parser, "config CONFIG")
    option(parser, "--gpus N", "ranks of the run, one GPU each", positive, required=True)
    option(parser, "--nodes N", "machines", positive, 1)
    option(parser, "--cores N", "cores of a node (default: of this machine)", positive)
    steps = parser.add_mutually_exclusive_group()
    option(steps, "--step-s S", "time of a step without data wait, communication included", _number)
    recorded = "the same from the records of a run, profile or bench trial, scaled to the patches per GPU"
    option(steps, "--step-from DIR", recorded, full_path)
    option(parser, "--json", "print JSON; null = unknown")
    stores = parser.add_argument_group("store and decoding")
    names = "figures to begin with, see docs/scale.md (default: by the first remote address)"
    option(stores, "--store {s3,http,local}", names, choices=("s3", "http", "local"))
    for group, options in ((stores, _RATES), (parser.add_argument_group("prices (the sum has those given)"), _PRICES)):
        for name, (_, _, meaning) in options.items():
            may_be_0 = name.startswith(("price", "latency"))
            kind = number_from_0 if may_be_0 else positive_number
            option(group, f"--{name} X", meaning, partial(_number, kind=kind))
    args = parser.parse_intermixed_args(argv)
    config = take_config(args.config, args.overrides)

    # The imports below load torch.
    from vesuvius.experiments.capacity.forecast import forecast
    from vesuvius.experiments.capacity.node import Machines
    from vesuvius.experiments.capacity.rates import STORES, recorded_step_s
    from vesuvius.monitor.probes.cores import usable_cores

    def given(options: Mapping[str, tuple[str, float, str]]) -> dict[str, Any]:
        values = {name: getattr(args, name.replace("-", "_")) for name in options}
        return {field: unit * values[name] for name, (field, unit, _) in options.items() if values[name] is not None}

    path = next(filter(is_remote, config.data.paths), "")
    name = args.store or ("s3" if path.startswith("s3://") else "http" if path else "local")
    machines = Machines(args.gpus, args.nodes, args.cores or max(int(usable_cores(os.getpid())), 1))
    with redirect_stdout(sys.stderr):  # only the result goes to stdout
        step = args.step_s
        if args.step_from is not None:
            step = recorded_step_s(args.step_from, config.training.micro_batch * config.training.accumulate_steps)
        facts = forecast(config, machines, step, replace(STORES[name], **given(_RATES)), given(_PRICES))
    print_facts(facts if args.json else _named(facts), args)
    return EXIT_OK


def _number(text: str, kind: Callable[[str], float] = positive_number) -> float:
    """Parse a number whose product with others is finite."""
    if (number := kind(text)) and not 1e-9 <= number <= 1e9:
        raise ArgumentTypeError(f"{text!r} is not a number from 1e-9 to 1e9")
    return number


def _named(value: Any) -> Any:
    """Replace None, whose lines would be left out, by a word, and number texts, to print one per line."""
    if isinstance(value, dict):
        return {key: _named(each) for key, each in value.items()}
    if isinstance(value, list):
        if value and isinstance(value[0], str):
            return {str(number): text for number, text in enumerate(value, 1)}
        return [_named(each) for each in value]
    return "unknown" if value is None else value
