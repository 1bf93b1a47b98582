"""`vesuvius volume synth`, `copy` and `import`: commands that write a volume."""

import argparse
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from vesuvius.commands.cli import full_path, lengths, natural, naturals, triple
from vesuvius.commands.volume.shared import Commands, add_source, add_store, print_facts, source_of, store_of
from vesuvius.errors import EXIT_OK
from vesuvius.runlog.progress import Progress
from vesuvius.runlog.units import format_rate
from vesuvius.volume_tools.copy import CopyRequest, CopyStats, copy_box
from vesuvius.volume_tools.importing import ImportRequest, import_volume
from vesuvius.volume_tools.partial import partial_path
from vesuvius.volume_tools.phantom import MIN_SIZE_VOXELS, write_phantom

log = logging.getLogger(__name__)


def add_synth(commands: Commands) -> None:
    synth = commands.add_parser(
        "synth",
        help="write a synthetic papyrus scroll",
        description="Write a synthetic papyrus scroll as OME-Zarr 0.4, about as compressible as a real one, and its "
        "sheet labels (OUT.labels.zarr; 1 = papyrus).  Voxels depend only on seed and shape.",
        examples=("vesuvius volume synth volumes/scroll.zarr --shape 256,512,512 --seed 1",),
    )
    synth.add_argument("out", type=full_path, metavar="OUT.zarr", help="where to write; the name ends in .zarr")
    size, shape = triple(MIN_SIZE_VOXELS, "256,512,512"), "size in voxels (default: 256,512,512)"
    synth.add_argument("--shape", type=size, default=(256, 512, 512), metavar="Z,Y,X", help=shape)
    synth.add_argument("--seed", type=natural, default=0, help="seed of the scroll (default: 0)")
    synth.add_argument("--chunk", type=natural, default=128, help="chunk size in voxels, even (default: 128)")
    windings = "also write OUT.instances.zarr: the number of the winding of each voxel of papyrus, 0 = none"
    synth.add_argument("--instances", action="store_true", help=windings)
    synth.set_defaults(run=_synth)


def _synth(arguments: argparse.Namespace) -> int:
    with redirect_stdout(sys.stderr), Progress("writing") as progress:
        options = {"chunk": arguments.chunk, "instances": arguments.instances, "on_progress": progress.update}
        report = write_phantom(arguments.out, arguments.shape, arguments.seed, **options)
    print_facts(report, arguments)
    return EXIT_OK


def add_copy(commands: Commands) -> None:
    copy = commands.add_parser(
        "copy",
        help="copy a box of a local or remote volume to disk; resumable",
        description="Copy a box of one level to an OME-Zarr 0.4 on disk (blosc-zstd, chunks as in the source).  An "
        "interrupted copy continues where it stopped; until then, its name is OUT.zarr.partial.  Exit code 6: "
        "chunks could not be read.",
        examples=("vesuvius volume copy https://host/scroll.zarr scroll.zarr --level 2",),
    )
    add_source(copy, "SOURCE", "zarr group or array: a folder, or an address https://, s3://, gs://, az:// or hf://")
    copy.add_argument("out", type=full_path, metavar="OUT.zarr", help="where to write; the name ends in .zarr")
    start, size = triple(0, "0,128,128"), triple(1, "72,136,136")
    copy.add_argument("--start", type=start, default=(0, 0, 0), metavar="Z,Y,X", help="first voxel (default: 0,0,0)")
    copy.add_argument("--size", type=size, metavar="Z,Y,X", help="size of the box in voxels (default: to the end)")
    levels = "levels to write, each averaging 2x2x2 voxels (default: 1)"
    copy.add_argument("--levels", type=natural, default=1, help=levels)
    _add_labels(copy)
    add_store(copy)
    copy.set_defaults(run=_copy)


def _copy(arguments: argparse.Namespace) -> int:
    request = CopyRequest(
        source_of(arguments), arguments.out, arguments.start, arguments.size, arguments.levels, arguments.labels
    )

    def tell(stats: CopyStats) -> None:
        failed = f"{len(stats.failures)} FAILED, " if stats.failures else ""
        progress.update("chunks", stats.done, stats.chunks, failed + _speed(stats))

    with redirect_stdout(sys.stderr), _kept(arguments.out), Progress("copying") as progress:
        stats = copy_box(request, store_of(arguments), tell)
    there = stats.before == stats.chunks
    told = {"out": f"{request.out}, {'is complete' if there else 'from ' + arguments.path}"}
    print_facts(told | vars(stats) | {"failures": len(stats.failures)}, arguments)
    return EXIT_OK


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
    importer.add_argument("source", metavar="SOURCE", help=source)
    importer.add_argument("out", type=full_path, metavar="OUT.zarr", help="where to write; the name ends in .zarr")
    select = "index for each axis (longer than 1) other than z, y, x, such as channel, time and color"
    importer.add_argument("--select", type=naturals, default=(), metavar="I,...", help=select)
    shape = triple(1, "1024,2048,2048")
    importer.add_argument("--shape", type=shape, metavar="Z,Y,X", help="size of a raw file in voxels")
    importer.add_argument("--dtype", type=_dtype, metavar="T", help="dtype of a raw file, e.g. uint8, >u2, float32")
    voxel = "voxel size (default: from the source)"
    importer.add_argument("--voxel-size-um", type=lengths, metavar="Z,Y,X", help=voxel)
    levels = "levels to write, each averaging 2x2x2 voxels (default: until one fits into a chunk)"
    importer.add_argument("--levels", type=natural, help=levels)
    _add_labels(importer)
    importer.set_defaults(run=_import)


def _add_labels(parser: argparse.ArgumentParser) -> None:
    words = "the voxels are labels: coarser levels have the most frequent of 2x2x2, not their mean"
    parser.add_argument("--labels", action="store_true", help=words)


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


def _import(arguments: argparse.Namespace) -> int:
    request = ImportRequest(*(getattr(arguments, field.name) for field in fields(ImportRequest)))

    def tell(stats: CopyStats, doing: str) -> None:
        progress.update("chunks", stats.done, stats.chunks, doing or _speed(stats))

    with redirect_stdout(sys.stderr), _kept(arguments.out), Progress("importing") as progress:
        source, stats = import_volume(request, tell)
    there = "is complete" if stats.before == stats.chunks else f"from {arguments.source}"
    facts = {"dtype": source.dtype.name, "voxel_size_um": source.geometry.voxel_size_um} | vars(stats)
    print_facts({"out": f"{request.out}, {there}"} | facts | {"failures": 0}, arguments)
    return EXIT_OK


def _speed(stats: CopyStats) -> str:
    return f"{format_rate(stats.voxel_bytes / max(stats.seconds, 1e-3))} of voxels"


@contextmanager
def _kept(out: Path) -> Iterator[None]:
    """Log on Ctrl-C that the command can be continued."""
    try:
        yield
    except KeyboardInterrupt:
        if partial_path(out).exists():
            log.warning("interrupted; %s is kept; run the same command again to continue", partial_path(out))
        raise
