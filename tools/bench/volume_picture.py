"""Volumes of 64x256x256 voxels drawn by the demo model: docs/volume.png, and the figures beside it in docs/sampling.md.

    make demo
    python tools/bench/volume_picture.py [--run demo] [--steps 6] [--picture docs/volume.png]

Tiles blended in each step, naive tiling, and a gap that is filled, from the labels of the synthetic scroll.  Takes
about a quarter of an hour of one CPU core.  Volumes that are in --folder already are not drawn again, and their cost
is not printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from numpy.typing import NDArray
from volume_sampling import seams

from vesuvius.config import ArrayConfig
from vesuvius.diffusion.sampler import sampling_levels
from vesuvius.generate.common import GenerateRequest, Network
from vesuvius.generate.volume.inputs import InputConfig
from vesuvius.generate.volume.run import VolumeRequest, generate_volume
from vesuvius.generate.volume.tiling import Tiling
from vesuvius.training.checkpoint.format import find_checkpoint
from vesuvius.training.checkpoint.trained import read_checkpoint_info
from vesuvius.training.validation.pictures import BACKGROUND, MontageCell, ScaleBar, draw_grid
from vesuvius.training.validation.pictures import GAP as GAP_PX
from vesuvius.volumes.box import Box, shape_of, slices
from vesuvius.volumes.geometry import FloatTriple
from vesuvius.volumes.volume import open_volume

BOX: Box = ((0, 0, 0), (64, 256, 256))
GAP: Box = ((28, 80, 112), (36, 112, 144))
BATCH = 4
SHOWN_Z, SHOWN_X = 32, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("demo"))
    parser.add_argument("--volume", type=Path, default=Path("volumes/demo.zarr"))
    parser.add_argument("--labels", type=Path, default=Path("volumes/demo.labels.zarr"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("runs/volume_picture"))
    parser.add_argument("--picture", type=Path, default=Path("docs/volume.png"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    mask = arguments.folder / "mask.zarr"
    real, labels = (read_box(path) for path in (arguments.volume, arguments.labels))
    gap = np.zeros(zarr.open_array(str(arguments.volume / "0"), mode="r").shape, np.uint8)
    gap[slices(GAP)] = 1
    zarr.save_array(str(mask), gap, zarr_format=2, mode="w")

    overrides = (f"diffusion.sampler_steps={arguments.steps}",)
    checkpoint = find_checkpoint(arguments.run)
    patch = read_checkpoint_info(checkpoint).config.data.patch_size
    call = bare_call(checkpoint, overrides)
    shown, scroll = ArrayConfig(path=str(arguments.labels)), ArrayConfig(path=str(arguments.volume))
    kinds: dict[str, dict[str, Any]] = {
        "blended": {"overlap": 0.5, "inputs": InputConfig(condition=shown, box=BOX)},
        "filled": {"inputs": InputConfig(scroll, ArrayConfig(path=str(mask)), shown, BOX)},
        "naive": {"overlap": 0.0, "inputs": InputConfig(condition=shown, box=BOX)},
    }
    drawn = {}
    for name, options in kinds.items():
        out = arguments.folder / f"{name}.zarr"
        request = VolumeRequest(checkpoint, "ema", overrides, 0, BATCH, 0, out, None, workers=1, **options)
        draw_and_time(name, request, call)
        drawn[name] = read_box(out)
        if name == "filled":
            inside = tuple(slice(lo - o, hi - o) for lo, hi, o in zip(*GAP, BOX[0], strict=True))
            ratios = [border_ratio(voxels.astype(float), inside) for voxels in (drawn[name], real)]
            print(f"filled: border / interior of the gap {ratios[0]:.3f}, of the real voxels there {ratios[1]:.3f}")
        else:
            tiling = Tiling(shape_of(BOX), patch, options["overlap"])
            ratios = seams(drawn[name], real, tiling)
            print(f"{name}: seams along z, y and x " + " ".join(f"{ratio:.2f}" for ratio in ratios), flush=True)
    holed = np.where(gap[slices(BOX)], 0, real)
    pictures = {
        "real": real,
        "labels": labels * np.uint8(255),
        "blended in each step, overlap 0.5": drawn["blended"],
        "naive: tiles drawn apart, side by side": drawn["naive"],
        "real, with a gap": holed,
        "the gap filled": drawn["filled"],
    }
    cells = [MontageCell(caption, two_slices(voxels)) for caption, voxels in pictures.items()]
    title = f"64x256x256 voxels; above: slice z={SHOWN_Z}, below: slice x={SHOWN_X} (z down)"
    draw_grid(cells, title, ScaleBar(1, voxel_size_um(arguments.volume)), 3).save(arguments.picture, optimize=True)


def voxel_size_um(path: Path) -> FloatTriple | None:
    """Edge lengths (z, y, x) that the metadata of a volume state."""
    with closing(open_volume(ArrayConfig(path=str(path)))) as volume:
        return volume.voxel_size_um


def read_box(path: Path) -> NDArray[Any]:
    """The finest level of a volume, no more than the box."""
    return np.asarray(zarr.open_array(str(path / "0"), mode="r")[slices(BOX)])


def bare_call(checkpoint: Path, overrides: tuple[str, ...]) -> Callable[[], float]:
    """What measures a call of the network for a batch of tiles: CPU seconds, the mean of 20."""
    network = Network(GenerateRequest(checkpoint, "ema", overrides, 0, BATCH, 0))
    config, patch = network.info.config, network.info.config.data.patch_size
    estimate = network.estimate_for(np.zeros((BATCH, 1, *patch), np.uint8), BATCH)
    level = sampling_levels(network.schedule, config.diffusion)[1]
    x = torch.zeros((BATCH, 1, *patch))
    estimate(x, level)

    def seconds() -> float:
        started = time.process_time()
        for _ in range(20):
            estimate(x, level)
        return (time.process_time() - started) / 20

    return seconds


def draw_and_time(name: str, request: VolumeRequest, call: Callable[[], float]) -> None:
    """Draw, and print the CPU time over that of the calls of the network alone."""
    calls, before = [0], call()

    def count(phase: str, done: int, total: int) -> None:
        if phase == "batches of tiles":
            calls[0] = total

    started = time.process_time()
    if request.out.exists():
        return
    generate_volume(request, count)
    seconds, after = time.process_time() - started, call()
    bare = (before + after) / 2 * calls[0]
    print(
        f"{name}: {calls[0]} calls of {BATCH} tiles, {seconds:.0f} s of CPU time: {seconds / bare:.3f} times that of "
        f"the calls alone ({1000 * before:.1f} ms each before, {1000 * after:.1f} after)",
        flush=True,
    )


def border_ratio(voxels: NDArray[Any], inside: tuple[slice, ...]) -> float:
    """Mean squared difference across the faces of a box over that inside it."""
    border, interior = [], []
    for axis in range(3):
        along = tuple(slice(cut.start - 1, cut.stop + 1) if a == axis else cut for a, cut in enumerate(inside))
        squares = np.moveaxis(np.diff(voxels[along], axis=axis) ** 2, axis, 0)
        border += [squares[0].ravel(), squares[-1].ravel()]
        interior.append(squares[1:-1].ravel())
    return float(np.concatenate(border).mean() / np.concatenate(interior).mean())


def two_slices(voxels: NDArray[Any]) -> NDArray[np.uint8]:
    """Across z, and across x below it."""
    z, y, _ = voxels.shape
    picture = np.full((y + GAP_PX + z, y + GAP_PX), BACKGROUND, np.uint8)
    picture[:y, :y] = voxels[SHOWN_Z]
    picture[y + GAP_PX :, :y] = voxels[:, :, SHOWN_X]
    return picture


if __name__ == "__main__":
    main()
