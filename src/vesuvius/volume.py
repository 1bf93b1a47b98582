"""The door `vesuvius volume`: `synth` writes a synthetic scroll, so that everything runs without a download."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from vesuvius.config import Triple
from vesuvius.data.phantom_zarr import MIN_SIZE_VOXELS, PhantomReport, count_chunks, write_phantom
from vesuvius.door import run_door
from vesuvius.errors import EXIT_OK

LEVELS = 3


def main(argv: list[str] | None = None) -> int:
    """Run `vesuvius volume ARGV`; the exit code.  A wrong command line raises SystemExit(2), as argparse does."""
    return run_door(_main, argv)


def _main(argv: list[str]) -> int:
    print(_summary(_synth(_parser().parse_args(argv))))
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vesuvius volume", description="Make volumes.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    synth = commands.add_parser(
        "synth",
        help="write a synthetic papyrus scroll",
        description="Write a synthetic papyrus scroll as OME-Zarr 0.4, laid out and about as compressible as a real "
        "one, and the labels of its sheets beside it (OUT.labels.zarr; 1 = papyrus).  The same seed and shape give the "
        "same voxels whatever the chunk size.",
    )
    synth.add_argument("out", type=Path, metavar="OUT.zarr", help="where to write; the name ends in .zarr")
    synth.add_argument(
        "--shape", type=_shape, default=(256, 512, 512), metavar="Z,Y,X", help="voxels (default: 256,512,512)"
    )
    synth.add_argument("--seed", type=_natural, default=0, help="which scroll (default: 0)")
    synth.add_argument("--chunk", type=_natural, default=128, help="edge of a chunk in voxels, even (default: 128)")
    synth.add_argument("--overwrite", action="store_true", help="replace zarr volumes that are already there")
    return parser


def _shape(text: str) -> Triple:
    sizes = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if len(sizes) != 3 or min(sizes) < MIN_SIZE_VOXELS:
        raise argparse.ArgumentTypeError(
            f"a shape is three whole numbers z,y,x of at least {MIN_SIZE_VOXELS}; got {text!r}; try 256,512,512"
        )
    z, y, x = sizes
    return z, y, x


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a whole number of at least 0 is needed; got {text!r}; try 0 or 128")
    return int(text)


def _synth(arguments: argparse.Namespace) -> PhantomReport:
    shape_zyx, chunk = arguments.shape, arguments.chunk
    with _progress(shape_zyx, chunk) as advance, _interrupt_deferred() as check_interrupt:

        def on_chunk() -> None:
            check_interrupt()
            advance()

        return write_phantom(
            arguments.out,
            shape_zyx,
            arguments.seed,
            chunk=chunk,
            levels=LEVELS,
            overwrite=arguments.overwrite,
            on_chunk=on_chunk,
        )


@contextmanager
def _interrupt_deferred() -> Iterator[Callable[[], None]]:
    """Holds a first Ctrl-C back until the function it yields is called; a second one interrupts at once.

    Between chunks nothing is under way.  Amid one, zarr's own thread would go on putting files into the temporary
    directory while it is being removed: the removal can fail, and files stay.
    """
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        signal.signal(number, signal.default_int_handler)

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, as in a shell's background, or somebody else's to handle
        yield check
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _progress(shape_zyx: Triple, chunk: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr that is advanced once per chunk; nothing where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("writing", total=count_chunks(shape_zyx, chunk, LEVELS))
        yield lambda: bar.advance(task)


def _summary(report: PhantomReport) -> str:
    ratio = "-" if report.ratio is None else f"{report.ratio:.2f}"
    shape = ",".join(str(size) for size in report.shape_zyx)
    return (
        f"{report.path} (sheets: {report.labels_path.name}) shape {shape} levels {report.levels} "
        f"stored_mib {report.stored_bytes / 2**20:.1f} ratio {ratio} seconds {report.seconds:.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
