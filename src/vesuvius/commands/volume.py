"""`vesuvius volume`: make, look at, copy, list and verify volumes."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from vesuvius.commands.arguments.volume import parser
from vesuvius.commands.command import as_command, say
from vesuvius.commands.output.progress import terminal_bar
from vesuvius.commands.output.volume import (
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
from vesuvius.config import ArrayConfig, StoreConfig
from vesuvius.errors import EXIT_DATA, EXIT_OK
from vesuvius.volume_tools.copy import CopyRequest, UnfinishedCopyError, copy_box
from vesuvius.volume_tools.info import describe_volume, make_sidecar
from vesuvius.volume_tools.partial import partial_path
from vesuvius.volume_tools.phantom_zarr import count_chunks, write_phantom
from vesuvius.volume_tools.verify import verify_volume

log = logging.getLogger(__name__)

T = TypeVar("T")

LEVELS = 3
SECONDS_PER_LINE = 10.0


@as_command
def main(argv: list[str]) -> int:
    """Run `vesuvius volume ARGV`; the exit code.  A wrong command line raises SystemExit(2), as argparse does."""
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
    total = count_chunks(arguments.shape, arguments.chunk, LEVELS)
    written = 0

    def on_chunk() -> None:
        nonlocal written
        check_interrupt()
        written += 1
        advance(written)

    progress = _progress("writing", lambda done: f"{done} of {total} chunks", lambda done: (done, total))
    with contextlib.redirect_stdout(sys.stderr), progress as advance, _interrupt_deferred() as check_interrupt:
        report = write_phantom(
            arguments.out,
            arguments.shape,
            arguments.seed,
            chunk=arguments.chunk,
            levels=LEVELS,
            overwrite=arguments.overwrite,
            on_chunk=on_chunk,
        )
    return synth_text(report)


def _info(arguments: argparse.Namespace) -> str:
    with contextlib.redirect_stdout(sys.stderr):  # log lines about a listing; stdout holds the result alone
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
        progress = _progress("copying", progress_line, lambda f: (f.done, f.chunks))
        with contextlib.redirect_stdout(sys.stderr), progress as on_progress:
            figures = copy_box(request, _store(arguments), on_progress)
    except UnfinishedCopyError as error:
        say(copy_text(error.figures, arguments.out, source))
        raise
    except KeyboardInterrupt:
        if partial_path(arguments.out).exists():
            log.warning("what is done is kept in %s; the same command continues", partial_path(arguments.out))
        raise
    return copy_text(figures, arguments.out, source)


def _verify(arguments: argparse.Namespace) -> int:
    try:
        progress = _progress("verifying", verify_line, lambda f: (f.done, f.objects))
        with contextlib.redirect_stdout(sys.stderr), progress as on_progress:
            figures = verify_volume(_source(arguments), _store(arguments), arguments.processes, on_progress)
    except KeyboardInterrupt:
        log.warning("what was read is kept; the same command continues")
        raise
    say(verify_json(figures) if arguments.json else verify_text(figures))
    return EXIT_DATA if figures.broken else EXIT_OK


@contextmanager
def _progress(
    what: str, line_of: Callable[[T], str], done_of: Callable[[T], tuple[int, int]]
) -> Iterator[Callable[[T], None]]:
    """A progress bar where stderr is a terminal, else a line in the log every 10 s.

    Args:
        line_of: progress in words.
        done_of: how much is done, of how much.
    """
    if not sys.stderr.isatty():
        logged = time.monotonic()

        def log_line(figures: T) -> None:
            nonlocal logged
            if time.monotonic() - logged >= SECONDS_PER_LINE:
                logged = time.monotonic()
                log.info("%s: %s", what, line_of(figures))

        yield log_line
        return
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with terminal_bar(what, *columns, at_once=True, transient=True) as move:
        yield lambda figures: move(*done_of(figures), line_of(figures))


@contextmanager
def _interrupt_deferred() -> Iterator[Callable[[], None]]:
    """Defers a first Ctrl-C until the function it yields is called, between chunks; a second one interrupts at once.

    During a chunk zarr's own thread would go on writing into the temporary directory while it is being removed: the
    removal can fail, and files stay.
    """
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        signal.signal(number, signal.default_int_handler)

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, as in a background job, or handled by the caller
        yield check
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
