"""The command line of `vesuvius volume`.  Pure."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vesuvius.commands.arguments.sample import array
from vesuvius.commands.arguments.types import natural, naturals, number_from_0, positive, triple
from vesuvius.config import DataConfig, StoreConfig
from vesuvius.volume_tools.phantom_zarr import MIN_SIZE_VOXELS

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse has no public name for it

_PATCH = DataConfig.model_fields["patch_size"].default
_PATCH_TEXT = ",".join(map(str, _PATCH))
_SIZE = triple(1, "a size", _PATCH_TEXT)
_STORE = StoreConfig()


def parser() -> argparse.ArgumentParser:
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
        type=triple(MIN_SIZE_VOXELS, "a shape", "256,512,512"),
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
        type=triple(0, "a start", "0,128,128"),
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
