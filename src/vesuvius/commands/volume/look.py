"""`vesuvius volume info`, `occupancy` and `verify`: what reads a volume."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from contextlib import closing, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from vesuvius.commands.cli import natural, positive, say, triple
from vesuvius.commands.sample import array
from vesuvius.commands.volume.arguments import add_source, add_store, source_of, store_of
from vesuvius.commands.volume.facts import print_facts
from vesuvius.errors import EXIT_DATA, EXIT_OK
from vesuvius.runlog.progress import Progress
from vesuvius.volume_tools.info import BOX_ZYX, describe_volume, make_sidecar
from vesuvius.volume_tools.verify import VerifyFigures, verify_volume
from vesuvius.volumes.alignment import align, describe_geometry
from vesuvius.volumes.volume import open_volume

if TYPE_CHECKING:
    from vesuvius.commands.volume.arguments import Commands

log = logging.getLogger(__name__)


def add_info(commands: Commands) -> None:
    """Add `vesuvius volume info`."""
    info = commands.add_parser(
        "info",
        help="say what a volume is, or how another lies in it",
        description="Say what a volume is: levels, chunks, codec, stored chunks, grey values of random stored boxes.  "
        "How patches of it would be read is said by `vesuvius train --dry-run`.",
    )
    add_source(info, "PATH", "zarr group or array: a folder, or an address https://, s3://, gs://, az:// or hf://")
    info.add_argument(
        "other",
        type=array,
        nargs="?",
        metavar="OTHER",
        help="say only how this array, e.g. labels, lies in PATH: PATH or PATH@LEVEL; exit code 6 if it does not",
    )
    size = ",".join(map(str, BOX_ZYX))
    info.add_argument(
        "--patch", type=triple(1, size), default=BOX_ZYX, metavar="Z,Y,X", help=f"voxels of a box (default: {size})"
    )
    info.add_argument("--places", type=natural, default=16, help="boxes to sample grey values from (default: 16)")
    info.add_argument("--list", action="store_true", help="list the store to count its chunks, however long that takes")
    info.add_argument("--json", action="store_true", help="print JSON; null = unknown")
    info.set_defaults(run=_info)


def _info(arguments: argparse.Namespace) -> int:
    if arguments.other is not None:
        with closing(open_volume(source_of(arguments))) as volume, closing(open_volume(arguments.other)) as other:
            found = align(volume, other, "the array")
            facts = {
                "volume": f"{volume.name}: {describe_geometry(volume)}",
                "array": f"{other.name}: {describe_geometry(other)}",
                "known_from": found.caveat or "scale and translation",
                "factors": found.factors,  # voxels of the volume per voxel of the array
                "offsets": found.offsets,  # where the array begins, in voxels of the volume
                "covered": found.covered,  # where both exist
            }
    else:
        with redirect_stdout(sys.stderr):  # log lines about a listing; stdout holds the result alone
            found_facts = describe_volume(
                source_of(arguments), listing=arguments.list, num_boxes=arguments.places, box_zyx=arguments.patch
            )
        facts = asdict(found_facts)
        if not arguments.json:
            del facts["chosen"]  # it is among the levels
    print_facts(facts, arguments)
    return EXIT_OK


def add_occupancy(commands: Commands) -> None:
    """Add `vesuvius volume occupancy`."""
    occupancy = commands.add_parser(
        "occupancy",
        help="list the stored chunks of a level once, and keep the result beside it",
        description="List the stored chunks of a level and write .chunk_occupancy.npz beside it, where training "
        "(data.min_foreground) and `info` find it.",
    )
    add_source(occupancy, "PATH", "zarr group or array: a folder, or an address s3://, gs:// or az://")
    occupancy.set_defaults(run=_occupancy)
    occupancy.add_argument("--out", type=Path, metavar="FILE", help="write it here instead; needed for an address")


def _occupancy(arguments: argparse.Namespace) -> int:
    with redirect_stdout(sys.stderr):
        path, occupancy = make_sidecar(source_of(arguments), arguments.out)
    print_facts({"written": path} | asdict(occupancy), arguments)
    return EXIT_OK


def add_verify(commands: Commands) -> None:
    """Add `vesuvius volume verify`."""
    verify = commands.add_parser(
        "verify",
        help="read every stored chunk once and list those that are broken; continues where it stopped",
        description="Read every stored chunk of a level once and list those that are broken.  However it ends, the "
        "same command continues where it stopped.  Where the list of stored chunks is kept beside the level "
        "(.chunk_occupancy.npz, of `vesuvius volume occupancy`), a chunk that it lists but that is missing "
        "counts as broken.  Exit code 6: some are broken.",
    )
    add_source(verify, "PATH", "zarr group or array: a folder, or an address https://, s3://, gs://, az:// or hf://")
    verify.add_argument(
        "--processes",
        type=positive,
        default=min(4, os.cpu_count() or 1),
        metavar="N",
        help="that read and decode at once (default: the cores, at most 4)",
    )
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(run=_verify)
    add_store(verify)


def _verify(arguments: argparse.Namespace) -> int:
    def tell(figures: VerifyFigures) -> None:
        found = f"{figures.chunks} chunks read, {len(figures.broken)} broken"
        progress.update("objects", figures.done, figures.objects, found)

    try:
        with redirect_stdout(sys.stderr), Progress("verifying") as progress:
            figures = verify_volume(source_of(arguments), store_of(arguments), arguments.processes, tell)
    except KeyboardInterrupt:
        log.warning("what was read is kept; the same command continues")
        raise
    print_facts(asdict(figures), arguments)
    if not arguments.json:
        say("restore what is broken from its source" if figures.broken else "all are intact")
    return EXIT_DATA if figures.broken else EXIT_OK
