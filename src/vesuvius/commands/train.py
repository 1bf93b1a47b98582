"""`vesuvius train --config FILE [key.path=value ...]`, also `python -m vesuvius.train`."""

from __future__ import annotations

import argparse
import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from vesuvius.commands.cli import as_command, natural, positive_number, say
from vesuvius.config.load import dump_config, read_config, take_config
from vesuvius.errors import EXIT_OK

log = logging.getLogger(__name__)


@as_command
def main(argv: list[str]) -> int:
    """Parse the command line and train.  Returns the exit code."""
    parser = argparse.ArgumentParser(prog="vesuvius train", description="Train a 3D diffusion model.")
    parser.add_argument("--config", type=Path, metavar="FILE", required=True, help="YAML file of the experiment")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="config keys to set, with YAML values")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint of this run, if any")
    parser.add_argument(
        "--allow-drift", action="store_true", help="with --resume: continue although the data or the model have changed"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would happen, write nothing")
    parser.add_argument(
        "--vram-gib", type=positive_number, metavar="N", help="with --dry-run: GPU memory to plan for, GiB"
    )
    parser.add_argument("--print-config", action="store_true", help="print every key with its value and its meaning")
    parser.add_argument(
        "--replay",
        type=natural,
        metavar="STEP",
        help="only compute a step again, from a checkpoint and the volumes",
    )
    # Of the trainer that `vesuvius tune` starts: it takes commands on standard input, and ends with that.
    parser.add_argument("--tune-worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args(argv)
    if args.vram_gib is not None and not args.dry_run:
        parser.error("--vram-gib only plans; use it with --dry-run")
    if args.replay is not None and any((args.resume, args.allow_drift, args.dry_run, args.print_config)):
        parser.error("--replay trains nothing; it takes --config and overrides only")
    if args.print_config:
        config = read_config(args.config, args.overrides, os.environ)
        say(dump_config(config, with_meanings=True).rstrip("\n"), exact=True)
        return EXIT_OK
    config = take_config(args.config, args.overrides)
    if args.replay is not None:
        from vesuvius.training.replay import replay

        *lines, exit_code = replay(config, args.replay, args.overrides)
        say("\n".join(map(str, lines)))
        return int(exit_code)
    resume = args.resume or config.training.resume == "auto"
    if args.allow_drift and not resume:
        parser.error("--allow-drift is about resuming; use it with --resume")
    # torch takes seconds to import: not needed for what came before
    if args.dry_run:
        from vesuvius.training.forecast.start_log import dry_run

        for line in dry_run(config, resume, args.vram_gib, args.allow_drift):
            say(line)
        return EXIT_OK
    from vesuvius.training.request import Request

    request = Request(config, args.config, resume, args.allow_drift)
    if args.tune_worker:
        from vesuvius.experiments.tune.worker import CommandPipe, TuneWorker
        from vesuvius.training.ranks.share import single_rank_config
        from vesuvius.training.run import train

        facts = args.config.with_name("data_facts.pt")  # reading what they are made of takes long on a slow store
        worker = partial(TuneWorker, CommandPipe())
        return train(replace(request, config=single_rank_config(config), make_tuner=worker, facts=facts))
    from vesuvius.launch.launch import launch

    return launch(request)
