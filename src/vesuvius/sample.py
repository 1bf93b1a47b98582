"""Door: `vesuvius sample --checkpoint RUN_OR_FILE`, also `python -m vesuvius.sample`: draw from a trained model."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vesuvius.door import run_door, say
from vesuvius.errors import EXIT_OK
from vesuvius.observe.logfile import terminal_lines_through

if TYPE_CHECKING:
    from vesuvius.engine.sample_request import SampleReport

log = logging.getLogger(__name__)

SECONDS_PER_LINE = 10.0

# option -> the config key that it sets
_KEYS = {
    "sampler": "diffusion.sampler",
    "steps": "diffusion.sampler_steps",
    "eta": "diffusion.sampler_eta",
    "clip": "diffusion.sampler_clip",
    "quantile": "diffusion.sampler_quantile",
    "guidance": "diffusion.sampler_guidance",
    "amp": "training.amp",
}
_MEANINGS = {
    "sampler": "ddim, ddpm (ancestral), dpmpp2m or heun",
    "steps": "sampling steps",
    "eta": "noise that ddim adds in each step, 0 to 1",
    "clip": "limit of |x_0| in each step, model values; null = none",
    "quantile": "dynamic thresholding: limit at this quantile of |x_0|, at least --clip; null = none",
    "guidance": "1 = the condition as it is, more = stronger, 0 = none",
    "amp": "auto, off, bf16 or fp16",
}


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and sample.  Returns the exit code."""
    return run_door(_main, argv)


def _main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    # As in `vesuvius train`: docs/performance.md has the figures.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # torch takes seconds to import: not for --help
    from vesuvius.engine.sample_request import SampleRequest
    from vesuvius.engine.sampling import draw_samples

    values = {option: getattr(arguments, option) for option in _KEYS}
    request = SampleRequest(
        checkpoint=arguments.checkpoint,
        weights=arguments.weights,
        overrides=tuple(f"{_KEYS[option]}={value}" for option, value in values.items() if value is not None),
        count=arguments.count,
        seed=arguments.seed,
        batch_size=arguments.batch_size,
        volume=arguments.volume,
        out=arguments.out,
        overwrite=arguments.overwrite,
    )
    with _progress() as on_step:
        report = draw_samples(request, on_step)
    say(_text(report))
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vesuvius sample",
        description="Draw samples of the size of a patch with a trained model.  Writes samples.zarr (OME-Zarr, one "
        "chunk a sample, in the grey values of the training volume), montage.png and, for a conditional model, "
        "conditions.zarr.  Sample n follows from the seed and n, bit by bit at equal batch size.",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="RUN_OR_FILE",
        help="run directory (its newest checkpoint), name of a run in runs/, checkpoint directory, or a file in one; "
        "runs/NAME/checkpoints/best is the one with the lowest validation loss",
    )
    parser.add_argument("--count", type=_positive, default=16, help="samples to draw (default: 16)")
    parser.add_argument("--seed", type=_natural, default=0, help="another seed, other samples (default: 0)")
    parser.add_argument(
        "--batch-size",
        type=_positive,
        default=4,
        help="samples drawn at once; the last batch is drawn in full, too (default: 4)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: below the run's samples/)")
    parser.add_argument("--overwrite", action="store_true", help="replace samples that are already there")
    parser.add_argument(
        "--weights",
        default="ema",
        metavar="NAME",
        help="ema for the averaged weights (default), model for those of the last step, ema_0.999 and the like for one "
        "of training.extra_ema_decays",
    )
    parser.add_argument(
        "--volume",
        type=_natural,
        default=0,
        metavar="N",
        help="training volume whose grey values, condition and scalars are used (default: 0, the first)",
    )
    keys = parser.add_argument_group("keys of the config", "as in the checkpoint's config where they are not given")
    for option, meaning in _MEANINGS.items():
        keys.add_argument(f"--{option}", metavar="VALUE", help=f"{_KEYS[option]}: {meaning}")
    return parser


def _natural(text: str) -> int:
    return _whole(text, least=0)


def _positive(text: str) -> int:
    return _whole(text, least=1)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"a whole number of at least {least} is needed; got {text!r}; try 4")
    return int(text)


def _text(report: SampleReport) -> str:
    """What is printed at the end."""
    each = report.seconds / report.count
    return (
        f"wrote {report.out}: {report.count} samples of {'x'.join(map(str, report.shape_zyx))} {report.dtype} in "
        f"{report.seconds:.1f} s ({each:.2f} s each), {report.evaluations} network evaluations per sample"
    )


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar where stderr is a terminal, from the first step on, else a line in the log every 10 s.

    Yields:
        What to call after each sampling step with the number of those done and of all.
    """
    if not sys.stderr.isatty():
        said = time.monotonic()

        def say_line(done: int, total: int) -> None:
            nonlocal said
            if time.monotonic() - said >= SECONDS_PER_LINE:
                said = time.monotonic()
                log.info("sampling: %d of %d steps", done, total)

        yield say_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress("sampling", *columns, console=Console(stderr=True), transient=True)
    with ExitStack() as shown:

        def move_bar(done: int, total: int) -> None:
            if not bar.tasks:
                bar.add_task("", total=total)
                shown.enter_context(bar)
                shown.enter_context(terminal_lines_through(lambda line: bar.console.out(line, highlight=False)))
            bar.update(bar.task_ids[0], completed=done)

        yield move_bar


if __name__ == "__main__":
    sys.exit(main())
