"""`vesuvius volume`: make, import, look at, copy, list and verify volumes."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel

from vesuvius.commands.cli import as_command, lengths, natural, naturals, number_from_0, positive, say, triple
from vesuvius.commands.sample import array
from vesuvius.config import ArrayConfig, StoreConfig
from vesuvius.errors import EXIT_DATA, EXIT_OK
from vesuvius.runlog.progress import Progress
from vesuvius.runlog.units import format_sizes, size_text
from vesuvius.volume_tools.copy import CopyFigures, CopyRequest, copy_box
from vesuvius.volume_tools.importing import ImportRequest, import_volume
from vesuvius.volume_tools.info import BOX_ZYX, describe_volume, make_sidecar
from vesuvius.volume_tools.phantom import MIN_SIZE_VOXELS, write_phantom
from vesuvius.volume_tools.record import partial_path
from vesuvius.volume_tools.verify import VerifyFigures, verify_volume
from vesuvius.volumes.alignment import align, geometry_words
from vesuvius.volumes.box import format_box
from vesuvius.volumes.volume import open_volume

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse has no public name for it

log = logging.getLogger(__name__)

_STORE = StoreConfig()


@as_command
def main(argv: list[str]) -> int:
    """Run `vesuvius volume ARGV`; the exit code.  A wrong command line raises SystemExit(2), as argparse does."""
    arguments = _parser().parse_args(argv)
    exit_code: int = arguments.run(arguments)
    return exit_code


# ---- what is done


def _synth(arguments: argparse.Namespace) -> int:
    with redirect_stdout(sys.stderr), Progress("writing") as progress:
        report = write_phantom(
            arguments.out, arguments.shape, arguments.seed, chunk=arguments.chunk, on_progress=progress.tell
        )
    _print(report, arguments)
    return EXIT_OK


def _info(arguments: argparse.Namespace) -> int:
    if arguments.other is not None:
        with closing(open_volume(_source(arguments))) as volume, closing(open_volume(arguments.other)) as other:
            found = align(volume, other, "the array")
            facts = {
                "volume": f"{volume.name}: {geometry_words(volume)}",
                "array": f"{other.name}: {geometry_words(other)}",
                "known_from": found.caveat or "scale and translation",
                "factors": found.factors,  # voxels of the volume per voxel of the array
                "offsets": found.offsets,  # where the array begins, in voxels of the volume
                "covered": found.covered,  # where both exist
            }
    else:
        with redirect_stdout(sys.stderr):  # log lines about a listing; stdout holds the result alone
            found_facts = describe_volume(
                _source(arguments), listing=arguments.list, places=arguments.places, box_zyx=arguments.patch
            )
        facts = asdict(found_facts)
        if not arguments.json:
            del facts["chosen"]  # it is among the levels
    _print(facts, arguments)
    return EXIT_OK


def _occupancy(arguments: argparse.Namespace) -> int:
    with redirect_stdout(sys.stderr):
        path, occupancy = make_sidecar(_source(arguments), arguments.out)
    _print({"written": path} | asdict(occupancy), arguments)
    return EXIT_OK


def _copy(arguments: argparse.Namespace) -> int:
    request = CopyRequest(
        source=_source(arguments),
        out=arguments.out,
        start_zyx=arguments.start,
        size_zyx=arguments.size,
        levels=arguments.levels,
    )

    def tell(figures: CopyFigures) -> None:
        failed = f"{len(figures.failures)} FAILED, " if figures.failures else ""
        progress.tell("chunks", figures.done, figures.chunks, failed + _speed(figures))

    with redirect_stdout(sys.stderr), _kept(arguments.out), Progress("copying") as progress:
        figures = copy_box(request, _store(arguments), tell)
    there = figures.before == figures.chunks
    told = {"out": f"{request.out}, {'is complete' if there else 'from ' + arguments.path}"}
    _print(told | vars(figures) | {"failures": len(figures.failures)}, arguments)
    return EXIT_OK


def _import(arguments: argparse.Namespace) -> int:
    request = ImportRequest(*(getattr(arguments, field.name) for field in fields(ImportRequest)))

    def tell(figures: CopyFigures, doing: str) -> None:
        progress.tell("chunks", figures.done, figures.chunks, doing or _speed(figures))

    with redirect_stdout(sys.stderr), _kept(arguments.out), Progress("importing") as progress:
        source, figures = import_volume(request, tell)
    there = "is complete" if figures.before == figures.chunks else f"from {arguments.source}"
    facts = {"dtype": source.dtype.name, "voxel_size_um": source.geometry.voxel_size_um} | vars(figures)
    _print({"out": f"{request.out}, {there}"} | facts | {"failures": 0}, arguments)
    return EXIT_OK


def _speed(figures: CopyFigures) -> str:
    return f"{figures.voxel_bytes / 1e6 / max(figures.seconds, 1e-3):.1f} MB/s of voxels"


@contextmanager
def _kept(out: Path) -> Iterator[None]:
    """Where Ctrl-C ends a copy, says that it can be continued."""
    try:
        yield
    except KeyboardInterrupt:
        if partial_path(out).exists():
            log.warning("what is done is kept in %s; the same command continues", partial_path(out))
        raise


def _verify(arguments: argparse.Namespace) -> int:
    def tell(figures: VerifyFigures) -> None:
        found = f"{figures.chunks} chunks read, {len(figures.broken)} broken"
        progress.tell("objects", figures.done, figures.objects, found)

    try:
        with redirect_stdout(sys.stderr), Progress("verifying") as progress:
            figures = verify_volume(_source(arguments), _store(arguments), arguments.processes, tell)
    except KeyboardInterrupt:
        log.warning("what was read is kept; the same command continues")
        raise
    _print(asdict(figures), arguments)
    if not arguments.json:
        say("restore what is broken from its source" if figures.broken else "all are intact")
    return EXIT_DATA if figures.broken else EXIT_OK


def _source(arguments: argparse.Namespace) -> ArrayConfig:
    return ArrayConfig(path=arguments.path, level=arguments.level, select=arguments.select)


def _store(arguments: argparse.Namespace) -> StoreConfig:
    return StoreConfig(
        requests=arguments.requests,
        outage_minutes=arguments.outage_minutes,
        forbidden_is_absent=arguments.forbidden_is_absent,
    )


# ---- how facts are printed


def _print(facts: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """As JSON, where null is unknown; or a fact a line, sections indented, lists of sections as tables."""
    if getattr(arguments, "json", False):
        say(json.dumps(facts, indent=2, default=_plain))
    else:
        say("\n".join(facts_text(facts)))


def facts_text(facts: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Lines with a fact each, for a person."""
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        value = _plain(value) if isinstance(value, BaseModel) else value
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}"
            yield from facts_text(value, indent + "  ")
        elif isinstance(value, Sequence) and value and isinstance(value[0], Mapping):
            yield f"{indent}{name}"
            rows = [list(value[0]), *([_shown(key, cell) for key, cell in row.items()] for row in value)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            for row in rows:
                cells = "  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True))
                yield f"{indent}  {cells}".rstrip()
        else:
            yield f"{indent}{name.ljust(width)}  {_shown(name, value)}"


def _shown(name: str, value: Any) -> str:
    match value:
        case None:
            return "-"
        case int() if name.endswith("_bytes"):
            return size_text(value)
        case float():
            return f"{value:.6g}"
        case ((_, _, _), (_, _, _)):
            return format_box(value)
        case tuple() | list():
            parts = [_shown("", each) for each in value]
            return (format_sizes(parts) if name.endswith(("_zyx", "shape", "_um")) else ", ".join(parts)) or "none"
        case {}:
            return "none"
    return str(value)


def _plain(value: object) -> object:
    """What JSON does not know: parts of configs, paths, ratios."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    return str(value) if isinstance(value, Path) else float(value)  # type: ignore[arg-type]


# ---- arguments


def _parser() -> argparse.ArgumentParser:
    """What `vesuvius volume ...` may look like.  A wrong command line makes it raise SystemExit(2)."""
    top = argparse.ArgumentParser(
        prog="vesuvius volume", description="Make, import, look at, copy, list and verify volumes."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_synth(commands)
    _add_info(commands)
    _add_copy(commands)
    _add_import(commands)
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
    synth.set_defaults(run=_synth)


def _add_info(commands: Commands) -> None:
    info = commands.add_parser(
        "info",
        help="say what a volume is, or how another lies in it",
        description="Say what a volume is: levels, chunks, codec, stored chunks, grey values of random stored boxes.  "
        "How patches of it would be read is said by `vesuvius train --dry-run`.",
    )
    _add_source(info, "PATH", "zarr group or array: a folder, or an address https://, s3://, gs://, az:// or hf://")
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


def _add_copy(commands: Commands) -> None:
    copy = commands.add_parser(
        "copy",
        help="copy a box of a volume, remote or not, to a disk; continues where it stopped",
        description="Copy a box of one level to an OME-Zarr 0.4 on a disk (blosc-zstd, the chunks of the source).  "
        "Missing chunks stay missing.  However it ends, the same command continues where it stopped; until it is "
        "complete, the copy lies in OUT.zarr.partial.  Exit code 6: chunks could not be read.",
    )
    _add_source(copy, "SOURCE", "what to copy from: a folder, or an address https://, s3://, gs://, az:// or hf://")
    copy.add_argument("out", type=Path, metavar="OUT.zarr", help="where to write; the name ends in .zarr")
    copy.add_argument(
        "--start",
        type=triple(0, "0,128,128"),
        default=(0, 0, 0),
        metavar="Z,Y,X",
        help="first voxel (default: 0,0,0)",
    )
    size = triple(1, "72,136,136")
    copy.add_argument("--size", type=size, metavar="Z,Y,X", help="voxels of the box (default: to the end)")
    copy.add_argument(
        "--levels", type=natural, default=1, help="levels of the copy, each the mean of 2x2x2 voxels (default: 1)"
    )
    _add_store(copy)
    copy.set_defaults(run=_copy)


def _add_import(commands: Commands) -> None:
    importer = commands.add_parser(
        "import",
        help="make an OME-Zarr of TIFF or PNG slices, TIFF, HDF5, NIfTI, NRRD, npy, N5; continues where it stopped",
        description="Make an OME-Zarr 0.5 (zarr v3, chunks of 128^3 in shards of 512^3, blosc-zstd), all levels, of "
        "a scan in another format.  Dtype and voxel size are kept, and the axes put in the order z, y, x.  However it "
        "ends, the same command continues where it stopped; until it is complete, the volume lies in "
        "OUT.zarr.partial.  Exit code 6: the source cannot be read.",
    )
    importer.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder of TIFF or PNG slices; a file .tif, .nii, .nii.gz, .nrrd, .nhdr, .npy, .h5:/DATASET; a folder "
        ".n5:/DATASET; or raw voxels, with --shape and --dtype",
    )
    importer.add_argument("out", type=Path, metavar="OUT.zarr", help="where to write; the name ends in .zarr")
    importer.add_argument(
        "--select",
        type=naturals,
        default=(),
        metavar="I,...",
        help="indices that fix the axes (longer than 1) other than z, y, x, such as channels, times and colours",
    )
    importer.add_argument("--shape", type=triple(1, "1024,2048,2048"), metavar="Z,Y,X", help="voxels of a raw file")
    importer.add_argument("--dtype", type=np.dtype, metavar="T", help="of a raw file, e.g. uint8, >u2, float32")
    importer.add_argument(
        "--voxel-size-um", type=lengths, metavar="Z,Y,X", help="edges of a voxel (default: as the source says)"
    )
    importer.add_argument(
        "--levels", type=natural, help="each the mean of 2x2x2 voxels (default: down to one that fits into a chunk)"
    )
    importer.add_argument(
        "--v2", action="store_true", help="write OME-Zarr 0.4 instead (zarr v2, each chunk a file), for older programs"
    )
    importer.set_defaults(run=_import)


def _add_occupancy(commands: Commands) -> None:
    occupancy = commands.add_parser(
        "occupancy",
        help="list the stored chunks of a level once, and keep the result beside it",
        description="List the stored chunks of a level and write .chunk_occupancy.npz beside it, where training "
        "(data.min_foreground) and `info` find it.",
    )
    _add_source(occupancy, "PATH", "zarr group or array: a folder, or an address s3://, gs:// or az://")
    occupancy.set_defaults(run=_occupancy)
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
    _add_source(verify, "PATH", "zarr group or array: a folder, or an address https://, s3://, gs://, az:// or hf://")
    verify.add_argument(
        "--processes",
        type=positive,
        default=min(4, os.cpu_count() or 1),
        metavar="N",
        help="that read and decode at once (default: the cores, at most 4)",
    )
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(run=_verify)
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
