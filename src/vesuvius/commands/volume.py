"""`vesuvius volume`: make, look at, copy, list and verify volumes."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from vesuvius.commands.arguments.types import natural, naturals, number_from_0, positive, triple
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
from vesuvius.commands.sample import array
from vesuvius.config import ArrayConfig, DataConfig, StoreConfig
from vesuvius.errors import EXIT_DATA, EXIT_OK
from vesuvius.runlog.progress import Progress
from vesuvius.volume_tools.copy import CopyRequest, UnfinishedCopyError, copy_box
from vesuvius.volume_tools.info import describe_volume, make_sidecar
from vesuvius.volume_tools.partial import partial_path
from vesuvius.volume_tools.phantom_zarr import MIN_SIZE_VOXELS, write_phantom
from vesuvius.volume_tools.verify import verify_volume
from vesuvius.volumes.alignment import align
from vesuvius.volumes.volume import open_volume

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse has no public name for it

log = logging.getLogger(__name__)

_PATCH = DataConfig.model_fields["patch_size"].default
_PATCH_TEXT = ",".join(map(str, _PATCH))
_SIZE = triple(1, _PATCH_TEXT)
_STORE = StoreConfig()


@as_command
def main(argv: list[str]) -> int:
    """Run `vesuvius volume ARGV`; the exit code.  A wrong command line raises SystemExit(2), as argparse does."""
    arguments = _parser().parse_args(argv)
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


def _parser() -> argparse.ArgumentParser:
    """What `vesuvius volume ...` may look like.  A wrong command line makes it raise SystemExit(2)."""
    top = argparse.ArgumentParser(prog="vesuvius volume", description="Make, look at, copy, list and verify volumes.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_synth(commands)
    _add_info(commands)
    _add_copy(commands)
    _add_occupancy(commands)
    _add_verify(commands)
    return top


def _add_synth(commands: Commands) -> None:
    synth = commands.add_parser(
        "synth",
        help="write a synthetic papyrus scroll",
        description="Write a synthetic papyrus scroll as OME-Zarr 0.4, laid out and about as compressible as a real "
        "one, and the labels of its sheets beside it (OUT.labels.zarr; 1 = papyrus).  The same seed and shape give the "
        "same voxels whatever the chunk size.",
    )
    synth.add_argument("out", type=Path, metavar="OUT.zarr", help="where to write; the name ends in .zarr")
    synth.add_argument(
        "--shape",
        type=triple(MIN_SIZE_VOXELS, "256,512,512"),
        default=(256, 512, 512),
        metavar="Z,Y,X",
        help="voxels (default: 256,512,512)",
    )
    synth.add_argument("--seed", type=natural, default=0, help="which scroll (default: 0)")
    synth.add_argument("--chunk", type=natural, default=128, help="edge of a chunk in voxels, even (default: 128)")
    synth.add_argument("--overwrite", action="store_true", help="replace existing zarr volumes")


def _add_info(commands: Commands) -> None:
    info = commands.add_parser(
        "info",
        help="say what a volume is and how patches of it would be read",
        description="Say what a volume is: levels, chunks, codec, stored chunks, grey values of random stored boxes, "
        "and how patches of it would be read, with the `data` section of a config.",
    )
    _add_source(info, "PATH", "zarr group or array: a folder, or an address https://, s3:// or gs://")
    info.add_argument(
        "other",
        type=array,
        nargs="?",
        metavar="OTHER",
        help="say only how this array, e.g. labels, lies in PATH: PATH or PATH@LEVEL; exit code 6 if it does not",
    )
    info.add_argument(
        "--patch", type=_SIZE, default=_PATCH, metavar="Z,Y,X", help=f"voxels of a patch (default: {_PATCH_TEXT})"
    )
    info.add_argument("--places", type=natural, default=16, help="boxes to sample grey values from (default: 16)")
    info.add_argument("--list", action="store_true", help="list the store to count its chunks, however long that takes")
    info.add_argument("--json", action="store_true", help="print JSON; null = unknown")


def _add_copy(commands: Commands) -> None:
    copy = commands.add_parser(
        "copy",
        help="copy a box of a volume, remote or not, to a disk; continues where it stopped",
        description="Copy a box of one level to an OME-Zarr 0.4 on a disk (blosc-zstd, the chunks of the source).  "
        "Missing chunks stay missing.  However it ends, the same command continues where it stopped; until it is "
        "complete, the copy lies in OUT.zarr.partial.  Exit code 6: chunks could not be read.",
    )
    _add_source(copy, "SOURCE", "what to copy from: a folder, or an address https://, s3:// or gs://")
    copy.add_argument("out", type=Path, metavar="OUT.zarr", help="where to write; the name ends in .zarr")
    copy.add_argument(
        "--start",
        type=triple(0, "0,128,128"),
        default=(0, 0, 0),
        metavar="Z,Y,X",
        help="first voxel (default: 0,0,0)",
    )
    copy.add_argument("--size", type=_SIZE, metavar="Z,Y,X", help="voxels of the box (default: to the end)")
    copy.add_argument(
        "--levels", type=natural, default=1, help="levels of the copy, each the mean of 2x2x2 voxels (default: 1)"
    )
    _add_store(copy)
    copy.add_argument("--no-space-check", action="store_true", help="start even if the disk may be too small")


def _add_occupancy(commands: Commands) -> None:
    occupancy = commands.add_parser(
        "occupancy",
        help="list the stored chunks of a level once, and keep the result beside it",
        description="List the stored chunks of a level and write .chunk_occupancy.npz beside it, where training "
        "(data.min_foreground) and `info` find it.",
    )
    _add_source(occupancy, "PATH", "zarr group or array: a folder, or an address s3:// or gs://")
    occupancy.add_argument("--out", type=Path, metavar="FILE", help="write it here instead; needed for an address")


def _add_source(parser: argparse.ArgumentParser, metavar: str, meaning: str) -> None:
    parser.add_argument("path", metavar=metavar, help=meaning)
    parser.add_argument("--level", type=natural, default=0, help="level of the pyramid, 0 = finest (default: 0)")
    parser.add_argument(
        "--select",
        type=naturals,
        default=(),
        metavar="I,...",
        help="indices that fix the other axes than z, y, x",
    )


def _add_verify(commands: Commands) -> None:
    verify = commands.add_parser(
        "verify",
        help="read every stored chunk once and list those that are broken; continues where it stopped",
        description="Read every stored chunk of a level once and list those that are broken.  However it ends, the "
        "same command continues where it stopped.  Where the list of stored chunks is kept beside the level "
        "(.chunk_occupancy.npz, of `vesuvius volume occupancy`), a chunk that it lists but that is missing "
        "counts as broken.  Exit code 6: some are broken.",
    )
    _add_source(verify, "PATH", "zarr group or array: a folder, or an address https://, s3:// or gs://")
    verify.add_argument(
        "--processes",
        type=positive,
        default=min(4, os.cpu_count() or 1),
        metavar="N",
        help="that read and decode at once (default: the cores, at most 4)",
    )
    verify.add_argument("--json", action="store_true", help="print JSON")
    _add_store(verify)


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests",
        type=positive,
        default=_STORE.requests,
        help=f"at a time, of each process (default: {_STORE.requests})",
    )
    parser.add_argument(
        "--outage-minutes",
        type=number_from_0,
        default=_STORE.outage_minutes,
        metavar="M",
        help=f"how long to wait for a network or server that does not answer (default: {_STORE.outage_minutes:g})",
    )
    parser.add_argument(
        "--forbidden-is-absent",
        action="store_true",
        help="treat 403 as a missing chunk, as in S3 buckets that allow reads but no listing",
    )
