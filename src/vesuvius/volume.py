"""The door `vesuvius volume`: make, look at, copy, list and verify volumes."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import TypeVar

from vesuvius.config import ArrayConfig, StoreConfig, Triple
from vesuvius.door import run_door, say
from vesuvius.errors import EXIT_DATA, EXIT_OK
from vesuvius.observe.logfile import terminal_lines_through
from vesuvius.volume_arguments import parser
from vesuvius.volume_tools.copy import CopyFigures, CopyRequest, UnfinishedCopyError, copy_box
from vesuvius.volume_tools.info import describe_volume, make_sidecar
from vesuvius.volume_tools.partial import partial_path
from vesuvius.volume_tools.phantom_zarr import count_chunks, write_phantom
from vesuvius.volume_tools.verify import VerifyFigures, verify_volume
from vesuvius.volume_words import (
    copy_rates,
    copy_text,
    info_json,
    info_text,
    progress_line,
    sidecar_text,
    synth_text,
    verify_json,
    verify_line,
    verify_text,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

LEVELS = 3
SECONDS_PER_LINE = 10.0


def main(argv: list[str] | None = None) -> int:
    """Run `vesuvius volume ARGV`; the exit code.  A wrong command line raises SystemExit(2), as argparse does."""
    return run_door(_main, argv)


def _main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    match arguments.command:
        case "synth":
            say(_synth(arguments))
        case "info":
            say(_info(arguments))
        case "copy":
            say(_copy(arguments))
        case "occupancy":
            say(_occupancy(arguments))
        case "verify":
            return _verify(arguments)
    return EXIT_OK


def _source(arguments: argparse.Namespace) -> ArrayConfig:
    return ArrayConfig(path=arguments.path, level=arguments.level, select=arguments.select)


def _store(arguments: argparse.Namespace) -> StoreConfig:
    return StoreConfig(
        requests=arguments.requests,
        outage_minutes=arguments.outage_minutes,
        forbidden_is_absent=arguments.forbidden_is_absent,
    )


def _synth(arguments: argparse.Namespace) -> str:
    shape_zyx, chunk = arguments.shape, arguments.chunk
    with _progress(shape_zyx, chunk) as advance, _interrupt_deferred() as check_interrupt:

        def on_chunk() -> None:
            check_interrupt()
            advance()

        report = write_phantom(
            arguments.out,
            shape_zyx,
            arguments.seed,
            chunk=chunk,
            levels=LEVELS,
            overwrite=arguments.overwrite,
            on_chunk=on_chunk,
        )
    return synth_text(report)


def _info(arguments: argparse.Namespace) -> str:
    with contextlib.redirect_stdout(sys.stderr):  # lines about a listing; what is asked for is printed alone
        facts = describe_volume(_source(arguments), arguments.patch, listing=arguments.list, places=arguments.places)
    return info_json(facts) if arguments.json else info_text(facts)


def _occupancy(arguments: argparse.Namespace) -> str:
    with contextlib.redirect_stdout(sys.stderr):
        return sidecar_text(make_sidecar(_source(arguments), arguments.out))


def _copy(arguments: argparse.Namespace) -> str:
    request = CopyRequest(
        source=_source(arguments),
        out=arguments.out,
        start_zyx=arguments.start,
        size_zyx=arguments.size,
        levels=arguments.levels,
        check_space=not arguments.no_space_check,
    )
    source = f"{arguments.path} level {arguments.level}"
    try:
        with contextlib.redirect_stdout(sys.stderr), _copy_progress() as on_progress:
            figures = copy_box(request, _store(arguments), on_progress)
    except UnfinishedCopyError as error:
        say(copy_text(error.figures, arguments.out, source))
        raise
    except KeyboardInterrupt:
        if partial_path(arguments.out).exists():
            log.warning("what is done stays in %s; the same command goes on", partial_path(arguments.out))
        raise
    return copy_text(figures, arguments.out, source)


def _verify(arguments: argparse.Namespace) -> int:
    try:
        with contextlib.redirect_stdout(sys.stderr), _verify_progress() as on_progress:
            figures = verify_volume(_source(arguments), _store(arguments), arguments.processes, on_progress)
    except KeyboardInterrupt:
        log.warning("what was read is kept; the same command goes on")
        raise
    say(verify_json(figures) if arguments.json else verify_text(figures))
    return EXIT_DATA if figures.broken else EXIT_OK


def _copy_progress() -> AbstractContextManager[Callable[[CopyFigures], None]]:
    return _progress_of("copying", progress_line, _copy_bar)


def _copy_bar(figures: CopyFigures) -> tuple[int, int, str]:
    failed = f"{figures.failed} failed, " if figures.failed else ""
    return figures.chunks, figures.done, failed + copy_rates(figures)


def _verify_progress() -> AbstractContextManager[Callable[[VerifyFigures], None]]:
    return _progress_of("verifying", verify_line, _verify_bar)


def _verify_bar(figures: VerifyFigures) -> tuple[int, int, str]:
    return figures.objects, figures.done, f"{len(figures.broken)} broken" if figures.broken else ""


@contextmanager
def _progress_of(
    what: str, line_of: Callable[[T], str], bar_of: Callable[[T], tuple[int, int, str]]
) -> Iterator[Callable[[T], None]]:
    """A bar where stderr is a terminal, else a line in the log every 10 s.

    Args:
        line_of: figures as a line.
        bar_of: total, done and a few words beside the bar.
    """
    if not sys.stderr.isatty():
        said = time.monotonic()

        def say_line(figures: T) -> None:
            nonlocal said
            if time.monotonic() - said >= SECONDS_PER_LINE:
                said = time.monotonic()
                log.info("%s: %s", what, line_of(figures))

        yield say_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(what, *columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def move_bar(figures: T) -> None:
            total, done, words = bar_of(figures)
            bar.update(task, total=total, completed=done, description=words)

        with terminal_lines_through(lambda line: bar.console.out(line, highlight=False)):
            yield move_bar


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


if __name__ == "__main__":
    sys.exit(main())
