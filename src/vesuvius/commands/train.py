"""`vesuvius train --config FILE [key.path=value ...]`, also `python -m vesuvius.train`."""

import argparse
import os
from dataclasses import replace
from functools import partial

from vesuvius.commands.cli import Parser, add_config, as_command, option, positive_number, say
from vesuvius.config.load import dump_config, read_config, take_config
from vesuvius.errors import EXIT_OK
from vesuvius.runlog.run_dir import require_run, run_dir


@as_command
def main(argv: list[str]) -> int:
    parser = Parser(
        prog="vesuvius train",
        description="Train a 3D diffusion model.  On a terminal the last line shows progress, time left, loss, speed "
        "and bottleneck; the log of the run has every step.",
        examples=(
            "vesuvius train --config configs/demo.yaml --dry-run",
            "vesuvius train --config configs/demo.yaml training.lr=2e-4 training.workers=4",
            "vesuvius train --config configs/demo.yaml --resume",
        ),
    )
    add_config(parser, required=True)
    option(parser, "--resume", "continue this run from its newest checkpoint")
    option(parser, "--dry-run", "run all checks and print the plan; write nothing")
    more = parser.add_argument_group("more options")
    option(more, "--allow-drift", "with --resume: continue although the data or the model changed")
    option(more, "--vram-gib N", "with --dry-run: GPU memory to plan for, in GiB", positive_number)
    option(more, "--print-config", "print every key with its value and meaning")
    # The trainer that `vesuvius tune` starts; it takes commands on standard input.
    option(parser, "--tune-worker", argparse.SUPPRESS)
    args = parser.parse_intermixed_args(argv)
    if args.vram_gib is not None and not args.dry_run:
        parser.error("--vram-gib works only with --dry-run; add it or remove --vram-gib")
    if (args.vram_gib or 0) > 2**30:
        parser.error(f"--vram-gib {args.vram_gib:g} is above {2**30} GiB; give the memory of a GPU, such as 80")
    if args.print_config:
        config = read_config(args.config, args.overrides, os.environ)
        say(dump_config(config, with_meanings=True).rstrip("\n"), exact=True)
        return EXIT_OK
    config = take_config(args.config, args.overrides)
    resume = args.resume or config.training.resume == "auto"
    if args.allow_drift and not resume:
        parser.error("--allow-drift works only with --resume; add it or remove --allow-drift")
    if args.resume:
        require_run(run_dir(config))
    from vesuvius.launch.launch import launch, resolve_ranks
    from vesuvius.training.ranks.share import launched_world_size, single_rank_config
    from vesuvius.training.request import Request

    request = Request(config, args.config, resume, args.allow_drift)
    # The imports below load torch, which takes seconds.
    if args.dry_run:
        from vesuvius.training.forecast.start_log import dry_run

        config = resolve_ranks(request, launched_world_size()).config
        for line in dry_run(config, args.config, resume, args.vram_gib, args.allow_drift):
            say(line)
        return EXIT_OK
    if args.tune_worker:
        from vesuvius.experiments.tune.worker import CommandPipe, TuneWorker
        from vesuvius.training.run import train

        facts = args.config.with_name("data_facts.pt")  # computing them takes long on a slow store
        worker = partial(TuneWorker, CommandPipe())
        return train(replace(request, config=single_rank_config(config), make_tuner=worker, facts=facts))
    return launch(request)
