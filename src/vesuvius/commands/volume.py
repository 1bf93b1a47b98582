"""`vesuvius volume`: import, inspect, copy, list, verify, synthesize and relabel volumes.

Each command has a function that adds its arguments, and one that does its work and returns the facts to print.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from vesuvius.commands import cli
from vesuvius.commands.cli import option
from vesuvius.commands.facts import print_facts
from vesuvius.commands.sample import array, box, level
from vesuvius.config import ArrayConfig, StoreConfig
from vesuvius.errors import EXIT_DATA, EXIT_OK, needs_extra
from vesuvius.runlog.progress import Progress
from vesuvius.runlog.units import format_rate
from vesuvius.volume_tools.copy import CopyRequest, CopyStats, copy_box
from vesuvius.volume_tools.importing import ImportRequest, import_volume
from vesuvius.volume_tools.info import BOX_ZYX, describe_volume, make_sidecar
from vesuvius.volume_tools.partial import partial_path
from vesuvius.volume_tools.phantom import MIN_SIZE_VOXELS, write_phantom
from vesuvius.volume_tools.verify import VerifyStats, verify_volume
from vesuvius.volumes.alignment import align, describe_geometry
from vesuvius.volumes.volume import open_volume

log = logging.getLogger(__name__)

Commands: TypeAlias = "argparse._SubParsersAction[cli.Parser]"  # argparse has no public name for it
Facts: TypeAlias = Mapping[str, Any]
_STORE = StoreConfig()
_LABELS = "the voxels are labels: coarser levels have the most frequent of 2x2x2, not their mean"


@cli.as_command
def main(argv: list[str]) -> int:
    parser = cli.Parser(
        prog="vesuvius volume",
        description="Import, inspect, copy, list, verify, synthesize and relabel volumes.",
        examples=("vesuvius volume info scroll.zarr", "vesuvius volume import --help"),
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (add_synth, add_info, add_copy, add_import, add_relabel, add_occupancy, add_verify):
        add(commands)
    arguments = parser.parse_args(argv)
    with redirect_stdout(sys.stderr):  # only the result goes to stdout
        facts: Facts = arguments.run(arguments)
    print_facts(facts, arguments)
    if arguments.command != "verify":
        return EXIT_OK
    if not arguments.json:
        cli.say("restore the broken chunks from their source" if facts["broken"] else "all chunks are intact")
    return EXIT_DATA if facts["broken"] else EXIT_OK


def add_synth(commands: Commands) -> None:
    synth = commands.add_parser(
        "synth",
        help="write a synthetic papyrus scroll",
        description="Write a synthetic papyrus scroll as OME-Zarr 0.4, about as compressible as a real one, and its "
        "sheet labels (OUT.labels.zarr; 1 = papyrus).  Voxels depend only on seed and shape.",
        examples=("vesuvius volume synth volumes/scroll.zarr --shape 256,512,512 --seed 1",),
    )
    add_out(synth)
    option(synth, "--shape Z,Y,X", "size in voxels", cli.triple(MIN_SIZE_VOXELS, "256,512,512"), (256, 512, 512))
    option(synth, "--seed N", "seed of the scroll", cli.natural, 0)
    option(synth, "--chunk N", "chunk size in voxels, even", cli.natural, 128)
    windings = "also write OUT.instances.zarr: the number of the winding of each voxel of papyrus, 0 = none"
    option(synth, "--instances", windings)
    synth.set_defaults(run=_synth)


def _synth(arguments: argparse.Namespace) -> Facts:
    with Progress("writing") as progress:
        options = {"chunk": arguments.chunk, "instances": arguments.instances, "on_progress": progress.update}
        return write_phantom(arguments.out, arguments.shape, arguments.seed, **options)


def add_info(commands: Commands) -> None:
    info = commands.add_parser(
        "info",
        help="describe a volume, or its alignment with another array",
        description="Describe a volume: levels, chunks, codec, stored chunks, intensities of random boxes.  "
        "(`vesuvius train --dry-run` describes how patches are read.)",
        examples=("vesuvius volume info scroll.zarr --level 1", "vesuvius volume info scroll.zarr labels.zarr"),
    )
    add_source(info, "PATH")
    other = "show only how this array (PATH, PATH@LEVEL or PATH@7.91um) aligns with PATH; exit code 6 if it does not"
    option(info, "other OTHER", other, array, nargs="?")
    option(info, "--patch Z,Y,X", "size of a box in voxels", cli.triple(1, "72,136,136"), BOX_ZYX)
    option(info, "--boxes N", "number of boxes to sample intensities from", cli.natural, 16)
    option(info, "--list", "count the stored chunks by listing the store; may take long")
    option(info, "--json", "print JSON; null = unknown")
    info.set_defaults(run=_info)


def _info(arguments: argparse.Namespace) -> Facts:
    if arguments.other is not None:
        with open_volume(source_of(arguments)) as volume, open_volume(arguments.other) as other:
            found = align(volume, other, "the array")
            return {
                "volume": f"{volume.name}: {describe_geometry(volume)}",
                "array": f"{other.name}: {describe_geometry(other)}",
                "known_from": found.caveat or "scale and translation",
                "factors": found.factors,  # voxels of the volume per voxel of the array
                "offsets": found.offsets,  # where the array begins, in voxels of the volume
                "covered": found.covered,  # where both exist
            }
    asked = {"listing": arguments.list, "num_boxes": arguments.boxes, "box_zyx": arguments.patch}
    facts = asdict(describe_volume(source_of(arguments), **asked))
    if not arguments.json:
        del facts["chosen"]  # also listed among the levels
    return facts


def add_copy(commands: Commands) -> None:
    copy = commands.add_parser(
        "copy",
        help="copy a box of a local or remote volume to disk; resumable",
        description="Copy a box of one level to an OME-Zarr 0.4 on disk (blosc-zstd, chunks as in the source).  An "
        "interrupted copy continues where it stopped; until then, its name is OUT.zarr.partial.  Exit code 6: "
        "chunks could not be read.",
        examples=("vesuvius volume copy https://host/scroll.zarr scroll.zarr --level 2",),
    )
    add_source(copy, "SOURCE")
    add_out(copy)
    option(copy, "--start Z,Y,X", "first voxel", cli.triple(0, "0,128,128"), (0, 0, 0))
    option(copy, "--size Z,Y,X", "size of the box in voxels (default: to the end)", cli.triple(1, "72,136,136"))
    option(copy, "--levels N", "levels to write, each averaging 2x2x2 voxels", cli.natural, 1)
    option(copy, "--labels", _LABELS)
    add_store(copy)
    copy.set_defaults(run=_copy)


def _copy(arguments: argparse.Namespace) -> Facts:
    request = CopyRequest(
        source_of(arguments), arguments.out, arguments.start, arguments.size, arguments.levels, arguments.labels
    )

    def tell(stats: CopyStats) -> None:
        failed = f"{len(stats.failures)} FAILED, " if stats.failures else ""
        progress.update("chunks", stats.done, stats.chunks, failed + _speed(stats))

    with _resumable(arguments.out), Progress("copying") as progress:
        stats = copy_box(request, store_of(arguments), tell)
    there = stats.before == stats.chunks
    told = {"out": f"{request.out}, {'is complete' if there else 'from ' + arguments.path}"}
    return told | vars(stats) | {"failures": len(stats.failures)}


def add_import(commands: Commands) -> None:
    importer = commands.add_parser(
        "import",
        help="convert TIFF or PNG slices, TIFF, HDF5, DICOM, NIfTI, NRRD, npy or N5 to OME-Zarr; resumable",
        description="Convert a scan to OME-Zarr 0.5 (zarr v3, 128^3 chunks in 512^3 shards, blosc-zstd) with all "
        "levels, keeping dtype and voxel size.  An interrupted import continues where it stopped; until then, its "
        "name is OUT.zarr.partial.",
        epilog="exit code 6: the source cannot be read",
        examples=("vesuvius volume import slices/ scroll.zarr --voxel-size-um 7.91,7.91,7.91",),
    )
    formats = "TIFF, PNG or DICOM slices; .tif, .nii(.gz), .nrrd, .nhdr, .npy, .h5:/DATASET, .n5:/DATASET"
    source = f"folder of {formats}; or raw voxels with --shape and --dtype"
    option(importer, "source SOURCE", source)
    add_out(importer)
    select = "index for each axis (longer than 1) other than z, y, x, such as channel, time and color"
    option(importer, "--select I,...", select, cli.naturals, ())
    option(importer, "--shape Z,Y,X", "size of a raw file in voxels", cli.triple(1, "1024,2048,2048"))
    option(importer, "--dtype T", "dtype of a raw file, e.g. uint8, >u2, float32", _dtype)
    option(importer, "--voxel-size-um Z,Y,X", "voxel size (default: from the source)", cli.lengths)
    levels = "levels to write, each averaging 2x2x2 voxels (default: until one fits into a chunk)"
    option(importer, "--levels N", levels, cli.natural)
    option(importer, "--labels", _LABELS)
    importer.set_defaults(run=_import)


def _dtype(text: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(text)
    except Exception:  # numpy parses whole expressions
        dtype = np.dtype(object)
    if dtype.kind not in "buif" or dtype.itemsize > 8:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not bool, an integer or a float of up to 8 bytes; try uint8, >u2 or float32"
        )
    return np.dtype(f"{dtype.byteorder}{dtype.kind}{dtype.itemsize}")  # int64 for longlong, its twin in numpy


def _import(arguments: argparse.Namespace) -> Facts:
    request = ImportRequest(*(getattr(arguments, field.name) for field in fields(ImportRequest)))

    def tell(stats: CopyStats, doing: str) -> None:
        progress.update("chunks", stats.done, stats.chunks, doing or _speed(stats))

    with _resumable(arguments.out), Progress("importing") as progress:
        source, stats = import_volume(request, tell)
    there = "is complete" if stats.before == stats.chunks else f"from {arguments.source}"
    facts = {"dtype": source.dtype.name, "voxel_size_um": source.geometry.voxel_size_um} | vars(stats)
    return {"out": f"{request.out}, {there}"} | facts | {"failures": 0}


def _speed(stats: CopyStats) -> str:
    return f"{format_rate(stats.voxel_bytes / max(stats.seconds, 1e-3))} of voxels"


_CHANGES: dict[str, tuple[float, Callable[[str], float], str, str]] = {
    "deform": (0.0, cli.number_from_0, "A", "smooth random deformation; root mean square displacement"),
    "deform_length": (32.0, cli.positive_number, "L", "correlation length of --deform"),
    "bend": (0.0, cli.number_from_0, "A", "deformation as long as half the box; root mean square displacement"),
    "thicken": (0.0, float, "V", "grow each instance into class 0; negative: shrink it"),
    "tear": (0, cli.natural, "N", "strips of 4 voxels cut across instances"),
    "contact": (
        0.0,
        cli.number_from_0,
        "SHARE",
        "bend instances until this share of the surface between neighbors is --within",
    ),
    "within": (6.0, cli.number_from_0, "V", "gap between two instances that counts as contact; 0 = touching"),
}


def add_relabel(commands: Commands) -> None:
    relabel = commands.add_parser(
        "relabel",
        help="deform, thicken and tear labels, or bring sheets into contact; instances stay exact",
        description="Change labels at random: OUT.zarr gets the classes, OUT.instances.zarr the ids.  Lengths are in "
        "voxels.  The result depends only on --seed, the labels and the options, and is computed in memory, about "
        "90 bytes a voxel.  Prints topology and contacts of before and after.",
        examples=(
            "vesuvius volume relabel scan.labels.zarr new.zarr --instances ids.zarr --contact 0.7 --within 3",
            "vesuvius volume relabel bodies.zarr membranes.zarr --boundary --deform 4 --deform-length 24 --seed 1",
        ),
    )
    option(relabel, "labels LABELS", "classes, 0 = nothing: PATH or PATH@LEVEL", array)
    add_out(relabel)
    instances = "ids of the same voxels, one per sheet or body, 0 = none; needed by all but --deform and --bend"
    option(relabel, "--instances VOLUME", instances, array)
    option(relabel, "--boundary", "LABELS are ids of bodies; OUT.zarr gets 1 at their boundaries and at id 0")
    option(relabel, "--box Z0:Z1,Y0:Y1,X0:X1", "part to change (default: all)", box)
    option(relabel, "--seed N", "seed of the changes", cli.natural, 0)
    changes = relabel.add_argument_group("changes, in this order")
    for name, (default, kind, metavar, meaning) in _CHANGES.items():
        option(changes, f"--{name.replace('_', '-')} {metavar}", meaning, kind, default)
    relabel.set_defaults(run=_relabel)


def _relabel(arguments: argparse.Namespace) -> Facts:
    with needs_extra("`vesuvius volume relabel`"):
        from vesuvius.volume_tools.relabel import Changes
        from vesuvius.volume_tools.relabel_volume import relabel_volume

    changes = Changes(**{name: getattr(arguments, name) for name in _CHANGES})
    given = {name: getattr(arguments, name) for name in ("labels", "out", "instances", "boundary", "box", "seed")}
    with _resumable():
        return {"out": arguments.out} | relabel_volume(**given, changes=changes)


def add_occupancy(commands: Commands) -> None:
    occupancy = commands.add_parser(
        "occupancy",
        help="list the stored chunks of a level, and save the list next to it",
        description="List the stored chunks of a level and write .chunk_occupancy.npz next to it, for training "
        "(data.min_foreground) and `vesuvius volume info`.",
        examples=("vesuvius volume occupancy scroll.zarr", "vesuvius volume occupancy s3://b/s.zarr --out s.npz"),
    )
    add_source(occupancy, "PATH", "s3://, gs:// or az://")
    option(occupancy, "--out FILE", "file to write instead; required for an address", cli.full_path)
    occupancy.set_defaults(run=_occupancy)


def _occupancy(arguments: argparse.Namespace) -> Facts:
    path, occupancy = make_sidecar(source_of(arguments), arguments.out)
    return {"written": path} | asdict(occupancy)


def add_verify(commands: Commands) -> None:
    verify = commands.add_parser(
        "verify",
        help="read every stored chunk and list the broken ones; resumable",
        description="Read every stored chunk of a level and list the broken ones, including chunks that "
        "`vesuvius volume occupancy` listed and that are now missing.  An interrupted command continues where it "
        "stopped.  Exit code 6: broken chunks were found.",
        examples=("vesuvius volume verify scroll.zarr --processes 8",),
    )
    add_source(verify, "PATH")
    processes = "processes that read and decode (default: number of cores, at most 4)"
    count = min(4, os.cpu_count() or 1)
    option(verify, "--processes N", processes, cli.positive, count)
    option(verify, "--json", "print JSON")
    verify.set_defaults(run=_verify)
    add_store(verify)


def _verify(arguments: argparse.Namespace) -> Facts:
    def tell(stats: VerifyStats) -> None:
        found = f"{stats.chunks} chunks read, {len(stats.broken)} broken"
        progress.update("objects", stats.done, stats.objects, found)

    with _resumable(), Progress("verifying") as progress:
        return asdict(verify_volume(source_of(arguments), store_of(arguments), arguments.processes, tell))


# ---- what several of them have


def add_source(parser: cli.Parser, metavar: str, addresses: str = "https://, s3://, gs://, az:// or hf://") -> None:
    option(parser, f"path {metavar}", f"zarr group or array: a folder, or an address {addresses}")
    levels = "level of the pyramid, 0 = finest (default: 0), or its voxel size: 7.91um"
    option(parser, "--level LEVEL", levels, level, {})
    option(parser, "--select I,...", "index for each axis other than z, y, x", cli.naturals, ())


def add_out(parser: cli.Parser) -> None:
    option(parser, "out OUT.zarr", "where to write; the name ends in .zarr", cli.full_path)


def source_of(arguments: argparse.Namespace) -> ArrayConfig:
    return ArrayConfig(path=arguments.path, select=arguments.select, **arguments.level)


def add_store(parser: cli.Parser) -> None:
    stores = parser.add_argument_group("reading from stores")
    option(stores, "--requests N", "requests in flight per process", cli.positive, _STORE.requests)
    outage = "how long to retry if the network or server is down"
    option(stores, "--outage-minutes M", outage, cli.number_from_0, _STORE.outage_minutes)
    forbidden = "treat 403 as a missing chunk, as in S3 buckets that allow reads but no listing"
    option(stores, "--forbidden-is-absent", forbidden)


def store_of(arguments: argparse.Namespace) -> StoreConfig:
    return StoreConfig(
        **{name: getattr(arguments, name) for name in ("requests", "outage_minutes", "forbidden_is_absent")}
    )


@contextmanager
def _resumable(out: Path | None = None) -> Iterator[None]:
    """Log on Ctrl-C that the command can be continued, once there is a partial `out`."""
    try:
        yield
    except KeyboardInterrupt:
        if out is None or partial_path(out).exists():
            kept = "" if out is None else f"{partial_path(out)} is kept; "
            log.warning("interrupted; %srun the same command again to continue", kept)
        raise
