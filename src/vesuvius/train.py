"""Door: `vesuvius train --config FILE [key.path=value ...]` or `--replay FILE`, also `python -m vesuvius.train`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vesuvius.config_file import dump_config, read_config
from vesuvius.door import positive_number, run_door, say
from vesuvius.errors import EXIT_OK
from vesuvius.observe.logfile import terminal_lines_through

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and train.  Returns the exit code."""
    return run_door(_main, argv)


def _main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="vesuvius train", description="Train a 3D diffusion model.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", type=Path, metavar="FILE", help="YAML file of the experiment")
    what.add_argument(
        "--replay", type=Path, metavar="FILE", help="compute a step of runs/NAME/nonfinite again and say what is wrong"
    )
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="config keys to set, with YAML values")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of this run, if any")
    parser.add_argument(
        "--allow-drift", action="store_true", help="with --resume: go on though the data or the model have changed"
    )
    parser.add_argument(
        "--restart-damaged",
        action="store_true",
        help="with --resume: where every checkpoint is damaged, move them aside and start at step 0",
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would happen, write nothing")
    parser.add_argument(
        "--vram-gib", type=positive_number, metavar="N", help="with --dry-run: GPU memory to plan for, GiB"
    )
    parser.add_argument("--print-config", action="store_true", help="print every key with its value and meaning")
    args = parser.parse_intermixed_args(argv)
    if args.vram_gib is not None and not args.dry_run:
        parser.error("--vram-gib only plans; it goes with --dry-run")
    if args.replay is not None:
        if args.resume or args.allow_drift or args.restart_damaged or args.dry_run or args.print_config:
            parser.error("--replay trains nothing; it goes with overrides alone")
        return _replay(args.replay, args.overrides)
    config = read_config(args.config, args.overrides)
    if args.print_config:
        say(dump_config(config, comments=True).rstrip("\n"))
        return EXIT_OK
    resume = args.resume or config.training.resume == "auto"
    if args.allow_drift and not resume:
        parser.error("--allow-drift is about going on; it goes with --resume")
    if args.restart_damaged and not resume:
        parser.error("--restart-damaged is about checkpoints that there are; it goes with --resume")
    # Before torch loads its OpenMP: threads that spin for a partner which is not running hold the core it needs.
    # docs/performance.md has the figures.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if config.training.cuda_allocator == "expandable":
        _let_segments_grow()
    # torch takes seconds to import: not needed for what came before
    if args.dry_run:
        from vesuvius.engine.dry_run import dry_run

        allowed = (args.allow_drift, args.restart_damaged)
        say("\n".join(dry_run(config, resume, args.vram_gib, *allowed)))
        return EXIT_OK
    from vesuvius.engine.run import train

    with _progress_bar(config.stop_step) as on_step:
        return train(config, args.config, resume, args.allow_drift, on_step, restart_damaged=args.restart_damaged)


def _let_segments_grow() -> None:
    """Before torch begins to use a GPU; whoever has set the variable knows better."""
    wanted = "expandable_segments:True"
    present = os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", wanted)
    if wanted not in present:
        log.warning(
            "training.cuda_allocator=expandable must not be set otherwise by the environment; got "
            "PYTORCH_CUDA_ALLOC_CONF=%s, which is kept; add %s to it or unset it",
            present,
            wanted,
        )


def _replay(path: Path, overrides: list[str]) -> int:
    from vesuvius.engine.replay import replay

    replayed = replay(path, overrides)
    say("\n".join(replayed.lines()))
    return replayed.exit_code


@contextmanager
def _progress_bar(steps: int) -> Iterator[Callable[[int], None]]:
    """A bar under the log lines where standard output is a terminal, nothing elsewhere.

    It appears with the first step, so that an error before it shows no empty bar, and times only the steps after it:
    those of an earlier session took no time of this one.

    Args:
        steps: the step, counted from 1, at which the run ends.

    Yields:
        What to call with the number of each step once it is logged.
    """
    if sys.stdout is None or not sys.stdout.isatty():
        yield lambda step: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    bar = Progress(
        "training",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(),
        redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),  # a file gets its warnings itself
    )

    def print_above(line: str) -> None:
        bar.console.out(line, highlight=False)  # as it is: `print` breaks lines at the width and colours numbers

    with ExitStack() as shown:

        def on_step(step: int) -> None:
            if bar.tasks:
                bar.update(bar.task_ids[0], completed=step)
                return
            bar.add_task("training", total=steps, completed=step)
            shown.enter_context(bar)
            shown.enter_context(terminal_lines_through(print_above))

        yield on_step


if __name__ == "__main__":
    sys.exit(main())
