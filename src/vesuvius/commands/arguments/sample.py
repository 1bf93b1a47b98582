"""The command line of `vesuvius sample`.  Pure."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from vesuvius.commands.arguments.types import natural, positive, triple
from vesuvius.config import ArrayConfig

if TYPE_CHECKING:
    from vesuvius.volumes.box import Box

# option -> the config key that it sets
KEYS = {
    "sampler": "diffusion.sampler",
    "steps": "diffusion.sampler_steps",
    "eta": "diffusion.sampler_eta",
    "clip": "diffusion.sampler_clip",
    "guidance": "diffusion.sampler_guidance",
    "amp": "training.amp",
}
_MEANINGS = {
    "sampler": "ddim, ddpm (ancestral), dpmpp2m or heun",
    "steps": "sampling steps",
    "eta": "noise that ddim adds in each step, 0 to 1",
    "clip": "limit of |x_0| in each step, model values; null = none",
    "guidance": "1 = the condition as it is, more = stronger, 0 = none",
    "amp": "auto, off, bf16 or fp16",
}
_AT_LEVEL = re.compile(r"@(\d+)$")
_ONLY_OF_VOLUMES = ("shape", "inpaint", "mask", "overlap", "blend", "workers", "rounds", "dry_run")
_ONLY_OF_PATCHES = ("count", "npy", "overwrite")


def parser() -> argparse.ArgumentParser:
    """What `vesuvius sample ...` may look like.  A wrong command line makes it raise SystemExit(2)."""
    parser = argparse.ArgumentParser(
        prog="vesuvius sample",
        description="Draw from a trained model: samples of the size of a patch, or with --shape, --inpaint or an --out "
        "that ends in .zarr a volume of any size.  Samples: samples.zarr (OME-Zarr, one chunk a sample, in the grey "
        "values of the training volume), montage.png and, for a conditional model, conditions.zarr.  Sample n depends "
        "on the seed and n only, bit for bit at equal batch size.",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="RUN_OR_FILE",
        help="run directory (its newest checkpoint), name of a run in runs/, checkpoint directory, or a file in one; "
        "runs/NAME/checkpoints/best is the one with the lowest validation loss",
    )
    parser.add_argument("--count", type=positive, help="samples to draw (default: 16)")
    parser.add_argument("--seed", type=natural, default=0, help="another seed gives other samples (default: 0)")
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=4,
        help="samples, at most --count, or tiles computed at once; a last batch of tiles is filled up (default: 4)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: below the run's samples/)")
    parser.add_argument("--overwrite", action="store_true", help="replace existing samples")
    parser.add_argument("--npy", action="store_true", help="also write the samples as samples.npy: [count, Z, Y, X]")
    parser.add_argument(
        "--weights",
        default="ema",
        metavar="NAME",
        help="ema for the averaged weights (default), model for those of the last step, ema_0.999 and the like for one "
        "of training.extra_ema_decays",
    )
    parser.add_argument(
        "--volume",
        type=natural,
        default=0,
        metavar="N",
        help="training volume whose grey values, condition and scalars are used (default: 0, the first)",
    )
    parser.add_argument(
        "--condition",
        type=array,
        metavar="VOLUME",
        help="zarr volume that conditions the network, PATH or PATH@LEVEL; samples use its "
        "--box (default: held-out places of the training condition)",
    )
    parser.add_argument(
        "--box",
        type=_box,
        metavar="Z0:Z1,Y0:Y1,X0:X1",
        help="part of --condition, --inpaint and --mask that is used (default: all of them)",
    )
    _add_volume(parser.add_argument_group("volumes of any size", "docs/sampling.md explains them"))
    add_keys(parser)
    return parser


def add_keys(parser: argparse.ArgumentParser) -> None:
    """Add the options that set keys of the config."""
    keys = parser.add_argument_group("keys of the config", "default: as in the checkpoint's config")
    for option, meaning in _MEANINGS.items():
        keys.add_argument(f"--{option}", metavar="VALUE", help=f"{KEYS[option]}: {meaning}")


def overrides_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """What those options say, as `key.path=value`."""
    values = {option: getattr(arguments, option) for option in KEYS}
    return tuple(f"{KEYS[option]}={value}" for option, value in values.items() if value is not None)


def _add_volume(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--shape",
        type=triple(1, "a shape", "256,512,512"),
        metavar="Z,Y,X",
        help="voxels (default: of the given volumes, or of --box)",
    )
    group.add_argument(
        "--inpaint",
        type=array,
        metavar="VOLUME",
        help="zarr volume to fill, PATH or PATH@LEVEL; known voxels are kept",
    )
    group.add_argument(
        "--mask",
        type=array,
        metavar="VOLUME",
        help="where --inpaint is to be filled: nonzero voxels (default: chunks that are not stored)",
    )
    group.add_argument(
        "--rounds",
        type=positive,
        help="network calls per step of --inpaint; more give better borders (default: 4)",
    )
    group.add_argument(
        "--overlap", type=float, metavar="SHARE", help="least overlap of neighbouring tiles, 0 to 0.75 (default: 0.5)"
    )
    group.add_argument(
        "--blend",
        choices=("step", "final"),
        help="step = tiles are blended in each sampling step (default); final = once, when all are drawn: for drafts",
    )
    group.add_argument("--workers", type=positive, help="processes (default: as many as GPUs, or as cores)")
    group.add_argument(
        "--dry-run", action="store_true", help="print the time, disk and memory that it takes; write nothing"
    )


def wants_volume(arguments: argparse.Namespace) -> bool:
    """Whether a volume is asked for, rather than samples of the size of a patch."""
    names_one = arguments.out is not None and arguments.out.suffix == ".zarr"
    return names_one or arguments.shape is not None or arguments.inpaint is not None


def check_options(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the options together, or None."""
    volume = wants_volume(arguments)
    other, name = (_ONLY_OF_PATCHES, "samples of the size of a patch") if volume else (_ONLY_OF_VOLUMES, "volumes")
    given = [option for option in other if getattr(arguments, option) not in (None, False)]
    if given:
        option = given[0].replace("_", "-")
        remedy = "remove it" if volume else "remove it, or give --shape, or an --out that ends in .zarr"
        return f"--{option} applies to {name} only; {remedy}"
    if volume and arguments.out is None:
        return "a volume needs an output; add --out NAME.zarr"
    return None


def array(text: str) -> ArrayConfig:
    """PATH or PATH@LEVEL."""
    at = _AT_LEVEL.search(text)
    return ArrayConfig(path=text[: at.start()] if at else text, level=int(at[1]) if at else 0)


def _box(text: str) -> Box:
    found = re.fullmatch(r"(\d+):(\d+),(\d+):(\d+),(\d+):(\d+)", text.replace(" ", ""))
    numbers = [int(part) for part in found.groups()] if found else []
    if not found or any(lo >= hi for lo, hi in zip(numbers[::2], numbers[1::2], strict=True)):
        raise argparse.ArgumentTypeError(
            f"a box is first:end along z, y and x, in voxels; got {text!r}; try 0:64,128:384,128:384"
        )
    z0, z1, y0, y1, x0, x1 = numbers
    return (z0, y0, x0), (z1, y1, x1)
