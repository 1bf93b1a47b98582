"""Do generated pairs improve a segmenter?  Dice on held-out boxes of a phantom, with and without pairs.

    python tools/bench/synthetic_labels.py --out dice            # 1 to 2 hours on one thread; can be resumed
    python tools/bench/synthetic_labels.py --out dice --table    # table of the results so far
    python tools/bench/synthetic_labels.py --out dice --boxes 4 --arms aug all    # is there anything to gain?

The phantom is noisy, and its contrast, brightness and mottle vary in space.  Only N boxes of one patch each have
labels; TESTS other boxes of the same scan are the test.  A U-Net is trained for the same number of steps with

    boxes    the N boxes
    aug      the same, with flips, rotations and jittered grey values
    warped   aug, with half of the patches from elastically warped copies of the boxes (scan and labels)
    pairs    aug, with half of the patches from pairs: the same warped labels, and scans generated from them by a
             diffusion model trained on the N boxes with labels and on the full scan without labels
    all      aug, with labels everywhere but in the test boxes: an upper bound for more boxes

The model sees the scan of the test boxes, as it sees all of the scan, but not their labels.  Each N has one choice of
boxes and one diffusion model.  A seed sets the U-Net, its patches and its jitter.  `--out` keeps all intermediate
results: arrays, the run of the model, and one JSON file per U-Net.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
import zarr
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import vesuvius
from vesuvius.commands import sample
from vesuvius.config import ArrayConfig, AugmentConfig, DataConfig, NormalizeConfig, ValidationConfig, VolumeConfig
from vesuvius.volume_tools.phantom import Phantom, _smooth, _white

SHAPE = (112, 256, 256)
# Mean and standard deviation over space: contrast relative to the phantom's; brightness and amplitude of the mottle in
# grey values.  Then the standard deviation of the white noise.
CONTRAST, BRIGHTNESS, MOTTLE, NOISE = (0.45, 0.2), (95.0, 12.0), (9.0, 5.0), 10.0
REACH = 24  # correlation length of these fields, voxels
BOX = (16, 32, 32)  # one patch
TESTS = 64  # boxes
GREY = (20.0, 140.0)  # mapped to -1 and +1 in all arms
GAP, UNLABELLED = 0, 2
COUNTS, ARMS, SEEDS, PAIRS = (4, 2, 8), ("boxes", "aug", "warped", "pairs"), 5, 48
GUIDANCE = 1.5  # of 1, 1.5, 2 the first with gaps and sheets of the pairs as far apart as those of the labelled boxes
MODEL_STEPS, STEPS, BATCH = 600, 300, 4
T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t for 1, 2, ... degrees of freedom

Box = tuple[slice, slice, slice]


# ---- data


def write_array(path: Path, voxels: NDArray[Any], fill: int = 0) -> None:
    """Write a zarr array under a temporary name, then rename it."""
    partial = path.with_name(f".{path.name}")
    chunks = tuple(min(size, 32) for size in voxels.shape)
    target = zarr.create_array(partial, shape=voxels.shape, dtype="u1", chunks=chunks, fill_value=fill, overwrite=True)
    target[:] = voxels
    partial.rename(path)


def make_volumes(out: Path) -> None:
    """Write scan.zarr, truth.zarr, and not_tested.zarr, which is 0 in the test boxes and in air."""
    grey, labels = Phantom(0, SHAPE).box((0, 0, 0), SHAPE)
    at = [np.arange(size) for size in SHAPE]
    contrast, brightness, mottle = (
        mean + deviation * _smooth((1, number), (REACH, REACH, REACH), *at)
        for number, (mean, deviation) in enumerate((CONTRAST, BRIGHTNESS, MOTTLE))
    )
    blobs, white = _smooth((1, 3), (4.0, 4.0, 4.0), *at), _white((1, 4), *at)
    degraded = brightness + contrast.clip(0.1) * (grey - 95.0) + mottle.clip(0) * blobs + NOISE * white
    scan = np.where(grey == 0, 0, np.rint(degraded).clip(1, 255)).astype(np.uint8)
    not_tested = scan.copy()
    for box in choose_boxes(scan)[max(COUNTS) :]:
        not_tested[box] = 0
    for name, voxels in {"truth": labels, "not_tested": not_tested, "scan": scan}.items():
        write_array(out / f"{name}.zarr", voxels)


def choose_boxes(scan: NDArray[Any]) -> list[Box]:
    """Choose disjoint boxes without air, first those with labels, then those of the test.

    They start at multiples of 8 voxels, as the cells of a foreground map do.
    """
    rng, boxes = np.random.default_rng(7), list[Box]()
    used = scan == 0
    while len(boxes) < max(COUNTS) + TESTS:
        start = [int(rng.integers((size - edge) // 8 + 1)) * 8 for size, edge in zip(scan.shape, BOX, strict=True)]
        box = tuple(slice(lo, lo + edge) for lo, edge in zip(start, BOX, strict=True))
        if not used[box].any():
            used[box] = True
            boxes.append(box)  # type: ignore[arg-type]
    return boxes


def label_boxes(out: Path, boxes: list[Box]) -> None:
    """Write labels.zarr, UNLABELLED outside the boxes, and mask.zarr, 1 inside them."""
    truth = zarr.open_array(out.parent / "truth.zarr", mode="r")[:]
    mask = np.zeros(truth.shape, np.uint8)
    for box in boxes:
        mask[box] = 1
    write_array(out / "labels.zarr", np.where(mask, truth, UNLABELLED).astype(np.uint8), UNLABELLED)
    write_array(out / "mask.zarr", mask)


# ---- diffusion model


def train_model(out: Path) -> Path:
    """Train on boxes with labels and on the full scan without, half of the patches each.  Returns the checkpoint."""
    checkpoint = out / "runs" / "model" / "checkpoints" / f"step_{MODEL_STEPS:08}"
    if checkpoint.exists():
        return checkpoint
    volume = {"path": str(out.parent / "scan.zarr"), "condition": {"path": str(out / "labels.zarr")}}
    inside = {"mask": {"path": str(out / "mask.zarr")}, "min_foreground": 0.99}
    demo = yaml.safe_load((Path(vesuvius.__file__).parent / "demo.yaml").read_text())
    data = {"volumes": [volume | inside, volume], "patch_size": list(BOX), "condition_classes": 3}
    steps = {"workers": 0, "preview_every": 0, "validate_every": 0, "train_batch_size": 4}
    steps |= {"steps_per_epoch": 50, "epochs": MODEL_STEPS // 50, "save_every": 50}
    config = demo | {
        "name": "model",
        "data": data | {"validation": {"fraction": 0}},
        "training": demo["training"] | steps,
        "diffusion": {"condition_dropout": 0.1},
    }
    (out / "model.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "vesuvius.train", "--config", "model.yaml", "--resume"]
    subprocess.run(command, check=True, cwd=out, stdout=subprocess.DEVNULL)
    return checkpoint


def warp(volumes: list[NDArray[Any]], rng: np.random.Generator) -> list[NDArray[Any]]:
    """Apply the same flips, rotation and smooth displacement (standard deviation 2 voxels) to a scan and its labels.

    Linear interpolation averages neighbours and so removes part of the white noise; as much is added again.
    """
    coarse = torch.from_numpy(rng.normal(0, 2, (1, 3, 4, 6, 6)).astype(np.float32))
    shift = functional.interpolate(coarse, BOX, mode="trilinear", align_corners=True)
    axes = [torch.arange(size, dtype=torch.float32) for size in BOX]
    position = torch.stack(torch.meshgrid(*axes, indexing="ij"))[None] + shift
    size = torch.tensor(BOX).view(1, 3, 1, 1, 1)
    grid = (2 * position / (size - 1) - 1).flip(1).permute(0, 2, 3, 4, 1)
    fraction = position - position.floor()
    kept = ((1 - fraction).square() + fraction.square()).prod(1)[0].numpy()  # share of the noise variance
    lost = NOISE * np.sqrt(1 - kept) * rng.standard_normal(BOX)
    flipped, quarter_turns, warped = [axis for axis in range(3) if rng.random() < 0.5], int(rng.integers(4)), []
    for voxels, mode, noise in zip(volumes, ("bilinear", "nearest"), (lost, 0.0), strict=True):
        moved = functional.grid_sample(
            torch.from_numpy(voxels)[None, None].float(), grid, mode, "reflection", align_corners=True
        )
        values = np.rint(moved[0, 0].numpy() + noise).clip(0, 255)
        turned = np.rot90(np.flip(values, flipped), quarter_turns, (1, 2))
        warped.append(np.ascontiguousarray(turned).astype(np.uint8))
    return warped


def make_pairs(out: Path, boxes: list[Box], checkpoint: Path) -> None:
    """Write warped/images and warped/labels, and the pairs generated from these labels."""
    scan, truth = (zarr.open_array(out.parent / name, mode="r")[:] for name in ("scan.zarr", "truth.zarr"))
    for number in range(PAIRS):
        rng, box = np.random.default_rng((len(boxes), number)), boxes[number % len(boxes)]
        images, labels = (out / "warped" / each for each in (f"images/{number}.zarr", f"labels/{number}_labels.zarr"))
        images.parent.mkdir(parents=True, exist_ok=True)
        labels.parent.mkdir(parents=True, exist_ok=True)
        if not labels.exists():
            warped = warp([scan[box], truth[box]], rng)
            write_array(images, warped[0])
            write_array(labels, warped[1])
        options = {
            "checkpoint": checkpoint,
            "condition": labels,
            "out": out / "pairs",
            "seed": number,
            "steps": 20,
            "guidance": GUIDANCE,
            "batch-size": 1,
            "workers": 1,
        }
        if sample.main([f"--{key}={value}" for key, value in options.items()]):
            raise SystemExit(f"pair {number} was not generated")


# ---- segmenter


def block(channels: int, out: int) -> nn.Module:
    """Return two convolutions, each with norm and activation."""
    first = [nn.Conv3d(channels, out, 3, padding=1), nn.InstanceNorm3d(out, affine=True), nn.LeakyReLU(0.01)]
    second = [nn.Conv3d(out, out, 3, padding=1), nn.InstanceNorm3d(out, affine=True), nn.LeakyReLU(0.01)]
    return nn.Sequential(*first, *second)


class UNet(nn.Module):
    """A U-Net of three levels; the edges of its input are multiples of 4."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(block(i, o) for i, o in zip([1, *widths], widths, strict=False))
        self.up = nn.ModuleList(block(i + o, o) for i, o in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.head = nn.Conv3d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, down in enumerate(self.down):
            x = down(functional.max_pool3d(x, 2) if level else x)
            skips.append(x)
        for up, skip in zip(self.up, skips[-2::-1], strict=True):
            x = up(torch.cat([functional.interpolate(x, scale_factor=2.0, mode="trilinear"), skip], dim=1))
        return self.head(x)  # type: ignore[no-any-return]


def entries(out: Path, arm: str) -> list[VolumeConfig]:
    """Return the volumes of an arm, with their labels as conditions."""

    def volume(images: Path, labels: Path, **more: Any) -> VolumeConfig:
        return VolumeConfig(path=str(images), condition=ArrayConfig(path=str(labels)), **more)

    scan = out.parent / "scan.zarr"
    if arm == "all":  # like the boxes, its patches hold no air: the labels would count air as gap
        mask = ArrayConfig(path=str(out.parent / "not_tested.zarr"))
        return [volume(scan, out.parent / "truth.zarr", mask=mask, min_foreground=0.99)]
    mask = ArrayConfig(path=str(out / "mask.zarr"))
    volumes = [volume(scan, out / "labels.zarr", mask=mask, min_foreground=0.99)]
    if arm in ("warped", "pairs"):
        scans = [out / arm / "images" / f"{number}.zarr" for number in range(PAIRS)]
        labels = [out / arm / "labels" / f"{number}_labels.zarr" for number in range(PAIRS)]
        volumes += [volume(*pair, weight=1 / PAIRS) for pair in zip(scans, labels, strict=True)]
    return volumes


def measure(out: Path, arm: str, seed: int) -> dict[str, Any]:
    """Train a U-Net and return the Dice of the gaps between sheets (the thin class) over all test boxes."""
    torch.manual_seed(seed)
    network, generator, started = UNet(), torch.Generator().manual_seed(seed), time.process_time()
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS)
    normalize = NormalizeConfig(low=GREY[0], high=GREY[1])
    augment = AugmentConfig(flip=False, rot90=False) if arm == "boxes" else AugmentConfig()
    data = DataConfig(
        volumes=tuple(entries(out, arm)),
        patch_size=BOX,
        normalize=normalize,
        augment=augment,
        validation=ValidationConfig(fraction=0),
    )
    with vesuvius.PatchLoader(data, batch_size=BATCH, workers=0, seed=seed, device="cpu", length=STEPS) as loader:
        for batch in loader:
            image = batch.image if arm == "boxes" else jittered(batch.image, generator)
            loss = segmentation_loss(network(image), batch.label[:, 0].long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    network.eval()
    counts = np.zeros(3)
    scan, truth = (zarr.open_array(out.parent / name, mode="r")[:] for name in ("scan.zarr", "truth.zarr"))
    for box in choose_boxes(scan)[max(COUNTS) :]:
        image = (torch.from_numpy(scan[box]).float() - GREY[0]) * (2 / (GREY[1] - GREY[0])) - 1
        with torch.no_grad():
            gap = network(image[None, None]).argmax(1)[0].numpy() == GAP
        counts += [(gap & (truth[box] == GAP)).sum(), gap.sum(), (truth[box] == GAP).sum()]
    dice = 2 * counts[0] / (counts[1] + counts[2])
    return {"dice": dice, "loss": loss.item(), "cpu_s": time.process_time() - started}


def jittered(image: Tensor, generator: torch.Generator) -> Tensor:
    """Change contrast, brightness and noise of each patch at random."""
    gain, offset, noise = torch.randn((3, len(image), 1, 1, 1, 1), generator=generator)
    white = torch.randn(image.shape, generator=generator)
    return image * (1 + 0.25 * gain) + 0.25 * offset + 0.1 * noise.abs() * white


def segmentation_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return cross-entropy plus soft Dice loss of the gaps; unlabelled voxels are ignored."""
    known = (labels != UNLABELLED).float()
    gap, truth = logits.softmax(1)[:, GAP] * known, (labels == GAP).float()
    dice = (2 * (gap * truth).sum() + 1) / (gap.sum() + truth.sum() + 1)
    return functional.cross_entropy(logits, labels, ignore_index=UNLABELLED) + 1 - dice


# ---- experiment


def run(out: Path, counts: list[int], arms: list[str]) -> None:
    """Compute all missing results."""
    if not (out / "scan.zarr").exists():
        make_volumes(out)
    boxes = choose_boxes(zarr.open_array(out / "scan.zarr", mode="r")[:])
    for count in counts:
        folder = out / f"n{count}"
        folder.mkdir(exist_ok=True)
        if not (folder / "mask.zarr").exists():
            label_boxes(folder, boxes[:count])
        if set(arms) & {"warped", "pairs"}:
            make_pairs(folder, boxes[:count], train_model(folder))
        for seed in range(SEEDS):
            for arm in arms:
                path = out / f"{arm}-n{count}-seed{seed}.json"
                if not path.exists():
                    result = json.dumps(measure(folder, arm, seed) | {"arm": arm, "count": count, "seed": seed})
                    path.write_text(result)
                    print(result, flush=True)


def table(out: Path) -> list[str]:
    """Return the mean Dice with its 95 % interval (t, over seeds), and the paired difference to `aug`."""
    rows = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    lines = ["| N | arm | Dice of gaps | difference to aug | seeds |", "| --- | --- | --- | --- | --- |"]
    dice = {(row["count"], row["arm"], row["seed"]): row["dice"] for row in rows}
    for count in sorted(COUNTS):
        for arm in (*ARMS, "all"):
            own = {seed: 100 * dice[count, arm, seed] for seed in range(SEEDS) if (count, arm, seed) in dice}
            differences = [own[s] - 100 * dice[count, "aug", s] for s in own if (count, "aug", s) in dice]
            if own:
                lines.append(
                    f"| {count} | {arm} | {interval([*own.values()])} | {interval(differences)} | {len(own)} |"
                )
    return lines


def interval(values: list[float]) -> str:
    """Format mean and half-width of the interval: `61.2 ± 0.8`."""
    if len(values) < 2:
        return "-"
    half = T_975[len(values) - 2] * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.1f} ± {half:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--boxes", type=int, nargs="+", default=list(COUNTS), metavar="N")
    parser.add_argument("--arms", nargs="+", default=[*ARMS], choices=[*ARMS, "all"])
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if not arguments.table:
        run(arguments.out.resolve(), arguments.boxes, arguments.arms)
    print("\n".join(table(arguments.out)))


if __name__ == "__main__":
    main()
