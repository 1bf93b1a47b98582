"""`vesuvius volume info`, `occupancy` and `verify`: commands that read a volume."""

import argparse
import logging
import os
import sys
from contextlib import redirect_stdout
from dataclasses import asdict

from vesuvius.commands.cli import full_path, natural, positive, say, triple
from vesuvius.commands.sample import array
from vesuvius.commands.volume.shared import Commands, add_source, add_store, print_facts, source_of, store_of
from vesuvius.errors import EXIT_DATA, EXIT_OK
from vesuvius.runlog.progress import Progress
from vesuvius.volume_tools.info import BOX_ZYX, describe_volume, make_sidecar
from vesuvius.volume_tools.verify import VerifyStats, verify_volume
from vesuvius.volumes.alignment import align, describe_geometry
from vesuvius.volumes.volume import open_volume

log = logging.getLogger(__name__)


def add_info(commands: Commands) -> None:
    info = commands.add_parser(
        "info",
        help="describe a volume, or its alignment with another array",
        description="Describe a volume: levels, chunks, codec, stored chunks, intensities of random boxes.  "
        "(`vesuvius train --dry-run` describes how patches are read.)",
        examples=("vesuvius volume info scroll.zarr --level 1", "vesuvius volume info scroll.zarr labels.zarr"),
    )
    add_source(info, "PATH", "zarr group or array: a folder, or an address https://, s3://, gs://, az:// or hf://")
    other = "show only how this array (PATH, PATH@LEVEL or PATH@7.91um) aligns with PATH; exit code 6 if it does not"
    info.add_argument("other", type=array, nargs="?", metavar="OTHER", help=other)
    size = ",".join(map(str, BOX_ZYX))
    patch = f"size of a box in voxels (default: {size})"
    info.add_argument("--patch", type=triple(1, size), default=BOX_ZYX, metavar="Z,Y,X", help=patch)
    boxes = "number of boxes to sample intensities from (default: 16)"
    info.add_argument("--boxes", type=natural, default=16, help=boxes)
    info.add_argument("--list", action="store_true", help="count the stored chunks by listing the store; may take long")
    info.add_argument("--json", action="store_true", help="print JSON; null = unknown")
    info.set_defaults(run=_info)


def _info(arguments: argparse.Namespace) -> int:
    if arguments.other is not None:
        with open_volume(source_of(arguments)) as volume, open_volume(arguments.other) as other:
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
        with redirect_stdout(sys.stderr):  # only the result goes to stdout
            found_facts = describe_volume(
                source_of(arguments), listing=arguments.list, num_boxes=arguments.boxes, box_zyx=arguments.patch
            )
        facts = asdict(found_facts)
        if not arguments.json:
            del facts["chosen"]  # also listed among the levels
    print_facts(facts, arguments)
    return EXIT_OK


def add_occupancy(commands: Commands) -> None:
    occupancy = commands.add_parser(
        "occupancy",
        help="list the stored chunks of a level, and save the list next to it",
        description="List the stored chunks of a level and write .chunk_occupancy.npz next to it, for training "
        "(data.min_foreground) and `vesuvius volume info`.",
        examples=("vesuvius volume occupancy scroll.zarr", "vesuvius volume occupancy s3://b/s.zarr --out s.npz"),
    )
    add_source(occupancy, "PATH", "zarr group or array: a folder, or an address s3://, gs:// or az://")
    out = "file to write instead; required for an address"
    occupancy.add_argument("--out", type=full_path, metavar="FILE", help=out)
    occupancy.set_defaults(run=_occupancy)


def _occupancy(arguments: argparse.Namespace) -> int:
    with redirect_stdout(sys.stderr):
        path, occupancy = make_sidecar(source_of(arguments), arguments.out)
    print_facts({"written": path} | asdict(occupancy), arguments)
    return EXIT_OK


def add_verify(commands: Commands) -> None:
    verify = commands.add_parser(
        "verify",
        help="read every stored chunk and list the broken ones; resumable",
        description="Read every stored chunk of a level and list the broken ones, including chunks that "
        "`vesuvius volume occupancy` listed and that are now missing.  An interrupted command continues where it "
        "stopped.  Exit code 6: broken chunks were found.",
        examples=("vesuvius volume verify scroll.zarr --processes 8",),
    )
    add_source(verify, "PATH", "zarr group or array: a folder, or an address https://, s3://, gs://, az:// or hf://")
    processes = "processes that read and decode (default: number of cores, at most 4)"
    count = min(4, os.cpu_count() or 1)
    verify.add_argument("--processes", type=positive, default=count, metavar="N", help=processes)
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(run=_verify)
    add_store(verify)


def _verify(arguments: argparse.Namespace) -> int:
    def tell(stats: VerifyStats) -> None:
        found = f"{stats.chunks} chunks read, {len(stats.broken)} broken"
        progress.update("objects", stats.done, stats.objects, found)

    try:
        with redirect_stdout(sys.stderr), Progress("verifying") as progress:
            stats = verify_volume(source_of(arguments), store_of(arguments), arguments.processes, tell)
    except KeyboardInterrupt:
        log.warning("interrupted; run the same command again to continue")
        raise
    print_facts(asdict(stats), arguments)
    if not arguments.json:
        say("restore the broken chunks from their source" if stats.broken else "all chunks are intact")
    return EXIT_DATA if stats.broken else EXIT_OK
