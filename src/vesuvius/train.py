"""Door: `vesuvius train --config FILE [key.path=value ...]`, also `python -m vesuvius.train`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vesuvius.config_file import dump_config, read_config
from vesuvius.door import run_door
from vesuvius.errors import EXIT_OK


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and train.  Returns the exit code."""
    return run_door(_main, argv)


def _main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="vesuvius train", description="Train a 3D diffusion model.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the experiment")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="config keys to set, with YAML values")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of this run, if any")
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would happen, write nothing")
    parser.add_argument("--print-config", action="store_true", help="print every key with its value and meaning")
    args = parser.parse_intermixed_args(argv)
    config = read_config(args.config, args.overrides)
    if args.print_config:
        print(dump_config(config, comments=True), end="")
        return EXIT_OK
    resume = args.resume or config.training.resume == "auto"
    # Before torch loads its OpenMP: threads that spin for a partner which is not running hold the core it needs.  With
    # one other busy process on two cores, steps took 11 s instead of 0.4 s; a bounded spin costs nothing measurable.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # torch takes seconds to import: not needed for what came before
    if args.dry_run:
        from vesuvius.engine.dry_run import dry_run

        print("\n".join(dry_run(config, resume)))
        return EXIT_OK
    from vesuvius.engine.run import train

    with _progress_bar(config.stop_step) as on_step:
        return train(config, args.config, resume, on_step)


@contextmanager
def _progress_bar(steps: int) -> Iterator[Callable[[int], None]]:
    """A bar under the log lines where standard output is a terminal, nothing elsewhere."""
    if not sys.stdout.isatty():
        yield lambda step: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    with Progress("training", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("training", total=steps)
        yield lambda step: bar.update(task, completed=step)


if __name__ == "__main__":
    sys.exit(main())
