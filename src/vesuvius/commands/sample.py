"""`vesuvius sample --checkpoint RUN_OR_FILE`, also `python -m vesuvius.sample`: generate with a trained model."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from vesuvius.commands import cli
from vesuvius.commands.cli import option
from vesuvius.config import ArrayConfig
from vesuvius.errors import EXIT_OK
from vesuvius.runlog.progress import Progress

if TYPE_CHECKING:
    from vesuvius.volumes.box import Box

KEYS = {
    "sampler": "diffusion.sampler: ddim, ddpm (ancestral), dpmpp2m or heun",
    "steps": "diffusion.sampler_steps: sampling steps",
    "clip": "diffusion.sampler_clip: limit on |x_0| in each step, in model values; null = none",
    "guidance": "diffusion.sampler_guidance: guidance scale: 1 = conditional, 0 = unconditional",
    "condition_noise": "diffusion.sampler_condition_noise: noise on a condition with context: more copies fewer of its "
    "defects",
    "residual_guidance": "diffusion.residual_guidance: factor on what the network adds: 1 = as trained; sharper above",
    "residual_guidance_interval": "diffusion.residual_guidance_interval: noise levels in which it applies, such as "
    "1,30; null = all",
    "amp": "training.amp: auto, off, bf16 or fp16",
}
"""The help of each option that sets a config key, which it begins with."""
_OF_VOLUMES = ("overlap", "workers", "cluster", "rounds")


@cli.as_command
def main(argv: list[str]) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    out = arguments.out
    volume = bool((out is not None and out.suffix == ".zarr") or arguments.shape or arguments.inpaint)
    volume |= arguments.condition is not None
    if volume and out is None:
        parser.error("--out is missing; add --out NAME.zarr, or --out FOLDER for pairs of scan and labels")
    others = ("count",) if volume else (*_OF_VOLUMES, "condition", "instances", "coarse", "box", "mask", "dry_run")
    if given := [name for name in others if getattr(arguments, name)]:
        of, remedy = ("patches", "") if volume else ("volumes", ", or add --shape or --out NAME.zarr")
        parser.error(f"--{given[0].replace('_', '-')} applies to {of} only; remove it{remedy}")
    common = sampling_of(arguments, arguments.checkpoint, arguments.volume)
    return _volume(arguments, common) if volume else _patches(arguments, common)


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="vesuvius sample",
        description="Generate patches with a trained model, or a volume of any size (--shape, or an --out that ends in "
        ".zarr).  Patches are written to samples.zarr, with a montage.png; the same seed gives the same samples.",
        examples=(
            "vesuvius sample --checkpoint demo --count 8",
            "vesuvius sample --checkpoint demo --shape 256,512,512 --out big.zarr",
            "vesuvius sample --checkpoint demo --condition labels.zarr --out pairs",
        ),
    )
    checkpoint = (
        "name or directory of a run (its newest checkpoint), a checkpoint, such as runs/NAME/checkpoints/best, or a "
        "model file or its address (docs/model-card.md)"
    )
    option(parser, "--checkpoint RUN_OR_FILE", checkpoint, required=True)
    option(parser, "--count N", "number of patches (default: 16)", cli.positive)
    option(parser, "--out DIR", "where to write (default: below the run's samples/)", cli.full_path)
    more = parser.add_argument_group("more options")
    option(more, "--volume N", "training volume whose intensities and condition are used", cli.natural, 0)
    add_sampling(parser, more)
    volumes = parser.add_argument_group("volumes of any size (docs/sampling.md)")
    size = cli.triple(1, "256,512,512")
    option(volumes, "--shape Z,Y,X", "voxels (default: of --condition or --box)", size)
    option(
        volumes, "--condition VOLUME", "zarr volume of labels: PATH, PATH@LEVEL or PATH@7.91um (its voxel size)", array
    )
    ids = "ids of the bodies or sheets in --condition, voxel by voxel: pairs get them too"
    option(volumes, "--instances VOLUME", ids, array)
    coarse = "run or checkpoint that first draws the condition, a coarser volume, to OUT.coarse.zarr"
    option(volumes, "--coarse RUN_OR_FILE", coarse)
    part = "part of --condition, --inpaint and --mask to use (default: all)"
    option(volumes, "--box Z0:Z1,Y0:Y1,X0:X1", part, box)
    option(volumes, "--inpaint VOLUME", "zarr volume to fill; known voxels are kept", array)
    mask = "zarr volume whose nonzero voxels mark what to fill (default: missing chunks)"
    option(volumes, "--mask VOLUME", mask, array)
    rounds = "network evaluations per step of --inpaint; more improve the borders (default: 4)"
    option(volumes, "--rounds N", rounds, cli.positive)
    overlap = "overlap of neighboring tiles, 0 to 0.75; at least 4 voxels unless 0 (default: 0.25)"
    option(volumes, "--overlap SHARE", overlap, float)
    workers = "processes, each with a GPU or core; 1 = this one (default: all of this machine)"
    option(volumes, "--workers N", workers, cli.positive)
    option(volumes, "--cluster ADDRESS", "Ray cluster whose nodes share the folder of --out; needs --workers")
    option(volumes, "--dry-run", "print the disk space and time needed; write nothing")
    return parser


def add_sampling(parser: argparse.ArgumentParser, more: argparse._ArgumentGroup) -> None:
    """Add the options of `sampling_of`: seed, batch, weights, guide, and those that set config keys."""
    option(parser, "--seed N", "seed of the samples", cli.natural, 0)
    option(more, "--batch-size N", "patches or tiles computed at once; equal sizes give equal bits", cli.positive, 4)
    weights = "ema (averaged; default), model (the last step's), ema_0.999 and the like (training.extra_ema_decays)"
    option(more, "--weights NAME", weights, default="ema")
    guide = "earlier checkpoint of the run; --residual-guidance amplifies the change since then"
    option(more, "--guide CHECKPOINT", guide)
    keys = parser.add_argument_group("config keys (default: as in the checkpoint)")
    for name, meaning in KEYS.items():
        option(keys, f"--{name.replace('_', '-')} VALUE", meaning)


def sampling_of(arguments: argparse.Namespace, checkpoint: str, volume_index: int) -> dict[str, Any]:
    """Return the fields of a `GenerateRequest`.  Fetches a model at an address; raises as `local_checkpoint`, and
    ConfigError if the checkpoint of --guide does not exist."""
    from vesuvius.training.checkpoint.download import local_checkpoint  # imports torch
    from vesuvius.training.checkpoint.format import find_checkpoint

    values = {meaning.partition(":")[0]: getattr(arguments, name) for name, meaning in KEYS.items()}
    if "," in str(interval := arguments.residual_guidance_interval):
        values["diffusion.residual_guidance_interval"] = f"[{interval.strip('[]')}]"
    return {
        "checkpoint": local_checkpoint(checkpoint),
        "weights": arguments.weights,
        "overrides": tuple(f"{key}={value}" for key, value in values.items() if value is not None),
        "seed": arguments.seed,
        "batch_size": arguments.batch_size,
        "volume_index": volume_index,
        "guide": arguments.guide and find_checkpoint(local_checkpoint(arguments.guide), "--guide").resolve(),
    }


def level(text: str) -> dict[str, Any]:
    """Parse a level of a pyramid or, with the unit um, a voxel size that picks it, as a key of `ArrayConfig`."""
    if not text.endswith(("um", "µm")):
        return {"level": cli.natural(text)}
    return {"voxel_size_um": cli.lengths(text[:-2]) if "," in text else cli.positive_number(text[:-2])}


def array(text: str) -> ArrayConfig:
    """Parse PATH, PATH@LEVEL or PATH@7.91um."""
    at = re.search(r"@(\d+|[\d.,]+[uµ]m)$", text)
    return ArrayConfig(path=text[: at.start()], **level(at[1])) if at else ArrayConfig(path=text)


def box(text: str) -> Box:
    match = re.fullmatch(r"(\d+):(\d+),(\d+):(\d+),(\d+):(\d+)", text.replace(" ", ""))
    numbers = [int(part) for part in match.groups()] if match else []
    if not match or any(lo >= hi for lo, hi in zip(numbers[::2], numbers[1::2], strict=True)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not start:stop along z, y and x, in voxels; try 0:64,128:384,128:384"
        )
    z0, z1, y0, y1, x0, x1 = numbers
    return (z0, y0, x0), (z1, y1, x1)


def _patches(arguments: argparse.Namespace, common: dict[str, Any]) -> int:
    from vesuvius.generate.sampling import SampleRequest, generate_samples  # imports torch

    request = SampleRequest(**common, count=arguments.count or 16, out=arguments.out)
    with Progress("sampling") as progress:
        text = generate_samples(request, progress.update)
    cli.say(text)
    return EXIT_OK


def _volume(arguments: argparse.Namespace, common: dict[str, Any]) -> int:
    from vesuvius.generate.volume import run
    from vesuvius.generate.volume.inputs import InputConfig
    from vesuvius.generate.volume.picture import check_picture, draw_volume_picture
    from vesuvius.training.checkpoint.download import local_checkpoint
    from vesuvius.training.checkpoint.format import find_checkpoint

    inputs = InputConfig(*(getattr(arguments, each.name) for each in fields(InputConfig)))
    options = {name: value for name in _OF_VOLUMES if (value := getattr(arguments, name)) is not None}
    out, picture = arguments.out, arguments.out.parent / f"{arguments.out.stem}.png"
    labels_out = instances_out = None
    if out.suffix != ".zarr" and arguments.condition and not arguments.inpaint:
        # The layout that villa's trainer reads: images/NAME.zarr, labels/NAME_TARGET.zarr.
        labels_out = out / "labels" / f"{arguments.seed}_labels.zarr"
        instances_out = out / "instances" / f"{arguments.seed}_instances.zarr" if arguments.instances else None
        picture = out / f"{arguments.seed}.png"
        out = out / "images" / f"{arguments.seed}.zarr"
    common |= {"out": out, "shape_zyx": arguments.shape, "inputs": inputs, "labels_out": labels_out}
    common |= {"instances_out": instances_out}
    request, coarse = run.VolumeRequest(**common, **options), None
    if arguments.coarse is not None:
        first = find_checkpoint(local_checkpoint(arguments.coarse), "--coarse")
        coarse, request = run.with_coarse(request, first)
    check_picture(request, picture)
    if arguments.dry_run:
        cli.say(run.forecast_volume(request) if coarse is None else run.forecast_with_coarse(coarse, request))
        return EXIT_OK
    with Progress("sampling") as progress:
        if coarse is not None:
            run.generate_volume(coarse, progress.update)
        text = run.generate_volume(request, progress.update)
    draw_volume_picture(request, picture)
    cli.say(f"{text}; middle slices: {picture}")
    return EXIT_OK
