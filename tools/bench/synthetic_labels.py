"""Do labelled pairs make a segmenter better?  Dice on held-out boxes of a phantom, with and without drawn pairs.

    python tools/bench/synthetic_labels.py --out dice            # 1 to 2 hours of one thread; a stop is resumed
    python tools/bench/synthetic_labels.py --out dice --table    # of what is there
    python tools/bench/synthetic_labels.py --out dice --boxes 4 --arms aug all    # is there anything to gain?

A noisy phantom of low contrast, which with brightness and mottle differs from place to place; labels in N boxes only,
of one patch each.  A U-Net is trained for the same number of steps with

    boxes    the N boxes
    aug      the same, with symmetries and jittered grey values
    warped   aug, and half of the patches from elastically warped copies of the boxes, scan and labels
    pairs    aug, and half of the patches from pairs: the same warped labels, and scans drawn from them by a diffusion
             model that was trained on the N boxes with labels and on all of the scan without
    all      aug, with labels everywhere: what more boxes could give

For each N there is one choice of boxes and one diffusion model; the seeds are those of the U-Net, its patches and its
jitter.  Each step is kept in `--out`: arrays, the model's run, one JSON file a U-Net.
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

SHAPE, TRAINED, TESTED = (168, 256, 256), 112, 128  # planes that training sees end, those of the test begin
# What differs from place to place, mean and deviation: contrast as a share of the phantom's, and in grey values
# brightness and the deviation of a mottle; and the deviation of white noise.
CONTRAST, BRIGHTNESS, MOTTLE, NOISE = (0.45, 0.2), (95.0, 12.0), (9.0, 5.0), 10.0
REACH = 24  # voxels between the nodes of these fields
BOX, TEST_BOX, PATCH = (16, 32, 32), (40, 32, 32), (16, 32, 32)
GREY = (20.0, 140.0)  # becomes -1 to +1 in all arms
GAP, UNLABELLED = 0, 2
COUNTS, ARMS, SEEDS, PAIRS = (4, 2, 8), ("boxes", "aug", "warped", "pairs"), 5, 48
MODEL_STEPS, STEPS, BATCH = 600, 300, 4
T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t of 1, 2, ... degrees of freedom

Box = tuple[slice, slice, slice]


# ---- the data


def array(path: Path, voxels: NDArray[Any], fill: int = 0) -> None:
    """Write a zarr array as a whole; a stop leaves none of this name."""
    partial = path.with_name(f".{path.name}")
    chunks = tuple(min(size, 32) for size in voxels.shape)
    target = zarr.create_array(partial, shape=voxels.shape, dtype="u1", chunks=chunks, fill_value=fill, overwrite=True)
    target[:] = voxels
    partial.rename(path)


def make_volumes(out: Path) -> None:
    """scan.zarr and truth.zarr of the planes that training may see; the boxes of the test, test.npz."""
    grey, labels = Phantom(0, SHAPE).box((0, 0, 0), SHAPE)
    at = [np.arange(size) for size in SHAPE]
    contrast, brightness, mottle = (
        mean + deviation * _smooth((1, number), (REACH, REACH, REACH), *at)
        for number, (mean, deviation) in enumerate((CONTRAST, BRIGHTNESS, MOTTLE))
    )
    blobs, white = _smooth((1, 3), (4.0, 4.0, 4.0), *at), _white((1, 4), *at)
    degraded = brightness + contrast.clip(0.1) * (grey - 95.0) + mottle.clip(0) * blobs + NOISE * white
    scan = np.where(grey == 0, 0, np.rint(degraded).clip(1, 255)).astype(np.uint8)
    array(out / "truth.zarr", labels[:TRAINED])
    np.savez(
        out / "test.npz",
        *[volume[box] for box in places(TEST_BOX, TESTED, SHAPE[0], 12, scan) for volume in (scan, labels)],
    )
    array(out / "scan.zarr", scan[:TRAINED])


def places(size: tuple[int, ...], first: int, stop: int, count: int, scan: NDArray[Any]) -> list[Box]:
    """Boxes without air that share no voxel, at multiples of a quarter of a patch, where a foreground map has cells."""
    rng, found = np.random.default_rng(7), list[Box]()
    used = scan == 0
    for _ in range(10_000):
        high = (stop, *scan.shape[1:])
        start = [
            int(rng.integers(lo // 8, (hi - s) // 8 + 1)) * 8
            for lo, hi, s in zip((first, 0, 0), high, size, strict=True)
        ]
        box = tuple(slice(lo, lo + s) for lo, s in zip(start, size, strict=True))
        if not used[box].any():
            used[box] = True
            found.append(box)  # type: ignore[arg-type]
        if len(found) == count:
            return found
    raise SystemExit(f"only {len(found)} of {count} boxes found")


def label_boxes(out: Path, boxes: list[Box]) -> None:
    """labels.zarr, UNLABELLED outside of the boxes, and mask.zarr, 1 inside."""
    truth = zarr.open_array(out.parent / "truth.zarr", mode="r")[:]
    mask = np.zeros(truth.shape, np.uint8)
    for box in boxes:
        mask[box] = 1
    array(out / "labels.zarr", np.where(mask, truth, UNLABELLED).astype(np.uint8), UNLABELLED)
    array(out / "mask.zarr", mask)


# ---- the diffusion model


def train_model(out: Path) -> Path:
    """Half of the patches from the boxes, with labels; half from everywhere, without.  Returns the checkpoint."""
    done = out / "runs" / "model" / "checkpoints" / f"step_{MODEL_STEPS:08}"
    if done.exists():
        return done
    volume = {"path": str(out.parent / "scan.zarr"), "condition": {"path": str(out / "labels.zarr")}}
    inside = {"mask": {"path": str(out / "mask.zarr")}, "min_foreground": 0.99}
    demo = yaml.safe_load((Path(vesuvius.__file__).parent / "demo.yaml").read_text())
    data = {"volumes": [volume | inside, volume], "patch_size": list(PATCH), "condition_classes": 3}
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
    return done


def warp(volumes: list[NDArray[Any]], rng: np.random.Generator) -> list[NDArray[Any]]:
    """The same mirroring, turn and smooth displacement (deviation 2 voxels) of a scan and its labels."""
    coarse = torch.from_numpy(rng.normal(0, 2, (1, 3, 4, 6, 6)).astype(np.float32))
    shift = functional.interpolate(coarse, BOX, mode="trilinear", align_corners=True)
    axes = [torch.arange(size, dtype=torch.float32) for size in BOX]
    place = torch.stack(torch.meshgrid(*axes, indexing="ij"))[None] + shift
    size = torch.tensor(BOX).view(1, 3, 1, 1, 1)
    grid = (2 * place / (size - 1) - 1).flip(1).permute(0, 2, 3, 4, 1)
    flipped, turns, found = [axis for axis in range(3) if rng.random() < 0.5], int(rng.integers(4)), []
    for voxels, mode in zip(volumes, ("bilinear", "nearest"), strict=True):
        moved = functional.grid_sample(
            torch.from_numpy(voxels)[None, None].float(), grid, mode, "reflection", align_corners=True
        )
        turned = np.rot90(np.flip(moved[0, 0].round().numpy(), flipped), turns, (1, 2))
        found.append(np.ascontiguousarray(turned).astype(np.uint8))
    return found


def make_pairs(out: Path, boxes: list[Box], checkpoint: Path) -> None:
    """warped/images and warped/labels, and pairs, drawn from these labels."""
    scan, truth = (zarr.open_array(out.parent / name, mode="r")[:] for name in ("scan.zarr", "truth.zarr"))
    for number in range(PAIRS):
        rng, box = np.random.default_rng((len(boxes), number)), boxes[number % len(boxes)]
        images, labels = (out / "warped" / each for each in (f"images/{number}.zarr", f"labels/{number}_labels.zarr"))
        images.parent.mkdir(parents=True, exist_ok=True)
        labels.parent.mkdir(parents=True, exist_ok=True)
        if not labels.exists():
            warped = warp([scan[box], truth[box]], rng)
            array(images, warped[0])
            array(labels, warped[1])
        about = {
            "checkpoint": checkpoint,
            "condition": labels,
            "out": out / "pairs",
            "seed": number,
            "steps": 20,
            "batch-size": 1,
        }
        if sample.main([f"--{key}={value}" for key, value in (about | {"workers": 1}).items()]):
            raise SystemExit("no pair")


# ---- the segmenter


def block(channels: int, out: int) -> nn.Module:
    """Two convolutions."""
    layers = [nn.Conv3d(channels, out, 3, padding=1), nn.InstanceNorm3d(out, affine=True), nn.LeakyReLU(0.01)]
    more = [nn.Conv3d(out, out, 3, padding=1), nn.InstanceNorm3d(out, affine=True), nn.LeakyReLU(0.01)]
    return nn.Sequential(*layers, *more)


class UNet(nn.Module):
    """Three levels; sides that are multiples of 4."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(block(i, o) for i, o in zip([1, *widths], widths, strict=False))
        self.up = nn.ModuleList(block(i + o, o) for i, o in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.head = nn.Conv3d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, down in enumerate(self.down):
            x = down(functional.max_pool3d(x, 2) if level else x)
            kept.append(x)
        for up, skipped in zip(self.up, kept[-2::-1], strict=True):
            x = up(torch.cat([functional.interpolate(x, scale_factor=2.0, mode="trilinear"), skipped], dim=1))
        return self.head(x)  # type: ignore[no-any-return]


def entries(out: Path, arm: str) -> list[VolumeConfig]:
    """The volumes of an arm, their labels as conditions."""

    def volume(images: Path, labels: Path, **more: Any) -> VolumeConfig:
        return VolumeConfig(path=str(images), condition=ArrayConfig(path=str(labels)), **more)

    scan = out.parent / "scan.zarr"
    if arm == "all":
        return [volume(scan, out.parent / "truth.zarr")]
    mask = ArrayConfig(path=str(out / "mask.zarr"))
    found = [volume(scan, out / "labels.zarr", mask=mask, min_foreground=0.99)]
    if arm in ("warped", "pairs"):
        scans = [out / arm / "images" / f"{number}.zarr" for number in range(PAIRS)]
        labels = [out / arm / "labels" / f"{number}_labels.zarr" for number in range(PAIRS)]
        found += [volume(*both, weight=1 / PAIRS) for both in zip(scans, labels, strict=True)]
    return found


def measure(out: Path, arm: str, seed: int) -> dict[str, Any]:
    """Train a U-Net; the Dice of the gaps between sheets, the thin class, over all boxes of the test."""
    torch.manual_seed(seed)
    network, generator, began = UNet(), torch.Generator().manual_seed(seed), time.process_time()
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS)
    normalize = NormalizeConfig(low=GREY[0], high=GREY[1])
    plain = AugmentConfig(flip=False, rot90=False) if arm == "boxes" else AugmentConfig()
    data = DataConfig(
        volumes=tuple(entries(out, arm)),
        patch_size=PATCH,
        normalize=normalize,
        augment=plain,
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
    with np.load(out.parent / "test.npz") as test, torch.no_grad():
        for number in range(0, len(test.files), 2):
            scan, labels = (torch.from_numpy(test[f"arr_{number + k}"]) for k in range(2))
            image = (scan.float() - GREY[0]) * (2 / (GREY[1] - GREY[0])) - 1
            gap, truth = network(image[None, None]).argmax(1)[0] == GAP, labels == GAP
            counts += [int((gap & truth).sum()), int(gap.sum()), int(truth.sum())]
    dice = 2 * counts[0] / (counts[1] + counts[2])
    return {"dice": dice, "loss": loss.item(), "cpu_s": time.process_time() - began}


def jittered(image: Tensor, generator: torch.Generator) -> Tensor:
    """Other contrast, brightness and noise for each patch."""
    gain, offset, noise = torch.randn((3, len(image), 1, 1, 1, 1), generator=generator)
    white = torch.randn(image.shape, generator=generator)
    return image * (1 + 0.25 * gain) + 0.25 * offset + 0.1 * noise.abs() * white


def segmentation_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy plus soft Dice of the gaps, where there are labels."""
    known = (labels != UNLABELLED).float()
    gap, truth = logits.softmax(1)[:, GAP] * known, (labels == GAP).float()
    dice = (2 * (gap * truth).sum() + 1) / (gap.sum() + truth.sum() + 1)
    return functional.cross_entropy(logits, labels, ignore_index=UNLABELLED) + 1 - dice


# ---- all of it


def run(out: Path, counts: list[int], arms: list[str]) -> None:
    """Do what is missing."""
    if not (out / "scan.zarr").exists():
        make_volumes(out)
    boxes = places(BOX, 0, TRAINED, max(COUNTS), zarr.open_array(out / "scan.zarr", mode="r")[:])
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
                    found = measure(folder, arm, seed) | {"arm": arm, "count": count, "seed": seed}
                    path.write_text(json.dumps(found))
                    print(json.dumps(found), flush=True)


def table(out: Path) -> list[str]:
    """Mean Dice and its 95 % interval (t, over the seeds), and the difference to `aug`, seed by seed."""
    rows = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    lines = ["| N | arm | Dice of gaps | less aug's | seeds |", "| --- | --- | --- | --- | --- |"]
    dice = {(row["count"], row["arm"], row["seed"]): row["dice"] for row in rows}
    for count in sorted(COUNTS):
        for arm in (*ARMS, "all"):
            own = {seed: 100 * dice[count, arm, seed] for seed in range(SEEDS) if (count, arm, seed) in dice}
            both = [own[s] - 100 * dice[count, "aug", s] for s in own if (count, "aug", s) in dice]
            if own:
                lines.append(f"| {count} | {arm} | {interval([*own.values()])} | {interval(both)} | {len(own)} |")
    return lines


def interval(values: list[float]) -> str:
    """`61.2 ± 0.8`."""
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
