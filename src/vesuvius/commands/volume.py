"""`vesuvius volume`: make, look at, copy, list and verify volumes."""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import closing, redirect_stdout

from vesuvius.commands.arguments.volume import parser
from vesuvius.commands.command import as_command, say
from vesuvius.commands.output.volume import (
    alignment_json,
    alignment_text,
    copy_line,
    copy_text,
    info_json,
    info_text,
    sidecar_text,
    synth_text,
    verify_json,
    verify_line,
    verify_text,
)
from vesuvius.config import ArrayConfig, StoreConfig
from vesuvius.errors import EXIT_DATA, EXIT_OK
from vesuvius.runlog.progress import Progress
from vesuvius.volume_tools.copy import CopyRequest, UnfinishedCopyError, copy_box
from vesuvius.volume_tools.info import describe_volume, make_sidecar
from vesuvius.volume_tools.partial import partial_path
from vesuvius.volume_tools.phantom_zarr import write_phantom
from vesuvius.volume_tools.verify import verify_volume
from vesuvius.volumes.alignment import align
from vesuvius.volumes.volume import open_volume

log = logging.getLogger(__name__)


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
    with redirect_stdout(sys.stderr), Progress("writing") as progress:
        report = write_phantom(
            arguments.out,
            arguments.shape,
            arguments.seed,
            chunk=arguments.chunk,
            overwrite=arguments.overwrite,
            on_progress=progress.tell,
        )
    return synth_text(report)


def _info(arguments: argparse.Namespace) -> str:
    if arguments.other is not None:
        with closing(open_volume(_source(arguments))) as volume, closing(open_volume(arguments.other)) as other:
            found = align(volume, other, "the array")
            return alignment_json(found) if arguments.json else alignment_text(volume, other, found)
    with redirect_stdout(sys.stderr):  # log lines about a listing; stdout holds the result alone
        facts = describe_volume(_source(arguments), arguments.patch, listing=arguments.list, places=arguments.places)
    return info_json(facts) if arguments.json else info_text(facts)


def _occupancy(arguments: argparse.Namespace) -> str:
    with redirect_stdout(sys.stderr):
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
        with redirect_stdout(sys.stderr), Progress("copying") as progress:
            figures = copy_box(
                request, _store(arguments), lambda f: progress.tell("chunks", f.done, f.chunks, copy_line(f))
            )
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
        with redirect_stdout(sys.stderr), Progress("verifying") as progress:
            figures = verify_volume(
                _source(arguments),
                _store(arguments),
                arguments.processes,
                lambda f: progress.tell("objects", f.done, f.objects, verify_line(f)),
            )
    except KeyboardInterrupt:
        log.warning("what was read is kept; the same command continues")
        raise
    say(verify_json(figures) if arguments.json else verify_text(figures))
    return EXIT_DATA if figures.broken else EXIT_OK
