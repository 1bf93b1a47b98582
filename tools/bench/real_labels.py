"""Do generated pairs improve a segmenter?  One segmenter from few labeled boxes of a volume, with and without pairs.

    vesuvius volume import data/fibsem/grayscale_maps scan.zarr --voxel-size-um 0.01,0.01,0.01
    vesuvius volume import data/fibsem/groundtruth.h5:/bodies bodies.zarr --voxel-size-um 0.01,0.01,0.01 --labels
    python tools/bench/real_labels.py scan.zarr bodies.zarr --out study --unlabeled stack1.zarr stack2.zarr

The volume is split along z into a training, a validation and a test part, a patch apart.  Labels are boxes of the
training part.  The target is walls: voxels next to another body, and background.  A U-Net is trained for the same
number of steps with

    real     the boxes
    aug      the same, mirrored and turned, with jittered intensities and noise
    warped   aug, half of the patches from elastically warped copies of the boxes (scan and labels)
    pairs    aug, half of the patches from scans that a diffusion model generated from the labels of `warped`
    changed  as pairs, from labels that `vesuvius volume relabel` would write
    all      aug, with labels everywhere in the training part, in patches with as many walls as the boxes

The diffusion model is pretrained on the scan of the training part and on the unlabeled volumes, then trained on the
boxes with labels; it sees neither scan nor labels of the other parts.  The thresholds of walls and of the watershed
are those that suit the validation part best.  A seed sets the U-Net, its patches and their jitter.  The same command
continues after a stop; `--table` prints the results so far.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
import zarr
from numpy.typing import NDArray
from scipy import ndimage
from segment_fibsem import UNet, adapted_rand_error, boundaries, components, dice, variation_of_information
from torch import nn

import vesuvius
from vesuvius.commands import sample
from vesuvius.volume_tools.relabel import Changes, change_labels, displacement, moved

PATCH = 32  # edge of the patches of both networks and of a generated tile; the gap between the parts
ARMS = ("real", "aug", "warped", "pairs", "changed", "all")
COUNTS, SEEDS, EDGE = (4, 2, 8), 5, 32  # boxes of EDGE^3
UNLABELED, CLASSES = 3, 4  # classes: 0 inside of a body, 1 next to another body, 2 background
INTENSITIES = {"low": 60.0, "high": 205.0}  # mapped to -1 and +1 in the diffusion model
PRETRAINING, TRAINING, SAMPLER_STEPS, PAIRS = 1000, 500, 16, 48
GUIDANCES, JUDGED = (1.0, 1.5, 2.0), 8  # the first that suits JUDGED tiles is used
WARP = 1.5  # root mean square displacement of a warped copy, voxels
CHANGES = Changes(deform=2.0, bend=2.0)
STEPS, BATCH, WIDTHS, RATE = 300, 2, (8, 32, 64), 4e-3  # of the segmenter
SEED_THRESHOLDS, LEAST_SEED_VOXELS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2), 300
T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t for 1, 2, ... degrees of freedom

Floats = NDArray[np.float32]
Labels = NDArray[np.int32]
Labeled = tuple[NDArray[np.uint8], Labels]  # scan and bodies
Source = tuple[Floats, Floats]  # scaled scan and walls


# ---- data


def parts(depth: int) -> dict[str, slice]:
    """Return the z ranges for training, validation and test: 47, 22 and 31 % of what two gaps of a patch leave."""
    usable = depth - 2 * PATCH
    train, start = round(0.475 * usable), round(0.475 * usable) + PATCH
    stop = start + round(0.215 * usable)
    return {"train": slice(0, train), "validation": slice(start, stop), "test": slice(stop + PATCH, depth)}


def classes_of(ids: Labels) -> NDArray[np.uint8]:
    """Return 0 inside of bodies, 1 next to another body, 2 in the background (id 0)."""
    touching = boundaries(torch.from_numpy(ids)).numpy() > 0
    return np.where(ids == 0, 2, touching).astype(np.uint8)


def choose_boxes(walls: NDArray[np.bool_], edge: int, count: int) -> list[tuple[slice, ...]]:
    """Choose disjoint boxes at random among those with at least the volume's share of walls."""
    rng, boxes, used, share = np.random.default_rng(7), list[tuple[slice, ...]](), np.zeros_like(walls), walls.mean()
    while len(boxes) < count:
        box = tuple(slice(at, at + edge) for at in (int(rng.integers(size - edge + 1)) for size in walls.shape))
        if not used[box].any() and walls[box].mean() >= share:
            used[box] = True
            boxes.append(box)
    return boxes


def write_array(path: Path, voxels: NDArray[np.uint8]) -> None:
    """Write a zarr array under a temporary name, then rename it."""
    partial = path.with_name(f".{path.name}")
    array = zarr.create_array(partial, shape=voxels.shape, dtype="u1", chunks=(PATCH,) * 3, overwrite=True)
    array[:] = voxels
    partial.rename(path)


# ---- segmenter


def patch(sources: Sequence[Source], rng: np.random.Generator, augment: bool, least: float = 0) -> Source:
    """Cut a random patch with a least share of walls; `augment` mirrors, turns, jitters contrast, offset and noise."""
    whole, walls = sources[rng.integers(len(sources))]
    at = tuple(slice(start, start + PATCH) for start in (rng.integers(size - PATCH + 1) for size in whole.shape))
    scan, walls = whole[at], walls[at]
    if walls.mean() < least:
        return patch(sources, rng, augment, least)
    if augment:
        order, mirrored = rng.permutation(3), tuple(np.flatnonzero(rng.random(3) < 0.5))
        scan, walls = (np.flip(each.transpose(order), mirrored) for each in (scan, walls))
        gain, offset, noise = rng.normal(0, (0.25, 0.3, 0.15))
        scan = scan * (1 + gain) + offset + abs(noise) * rng.standard_normal(scan.shape)
    return scan.astype(np.float32), walls.astype(np.float32)


def train_segmenter(real: Sequence[Source], drawn: Sequence[Source], seed: int, arm: str) -> tuple[UNet, float]:
    """Train a U-Net; if there are drawn sources, every other patch is from them.  Returns the last loss, too."""
    torch.manual_seed(seed)
    rng, least = np.random.default_rng((seed, 1)), float(real[0][1].mean()) if arm == "all" else 0.0
    network = UNet(WIDTHS).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    for _ in range(STEPS):
        cut = [patch(drawn if drawn and n % 2 else real, rng, arm != "real", least) for n in range(BATCH)]
        scan, walls = (torch.from_numpy(np.stack(each))[:, None] for each in zip(*cut, strict=True))
        logits = network(scan.to(memory_format=torch.channels_last_3d))
        found = logits.sigmoid()
        overlap = (2 * (found * walls).sum() + 1) / (found.sum() + walls.sum() + 1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, walls) + 1 - overlap
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network.eval(), loss.item()


def predict(network: nn.Module, scan: Floats) -> Floats:
    """Return the probability of walls over a part, in one piece."""
    padded = np.pad(scan, [(0, -size % 4) for size in scan.shape], mode="reflect")
    with torch.inference_mode():
        found = network(torch.from_numpy(padded)[None, None].to(memory_format=torch.channels_last_3d)).sigmoid()
    return found[0, 0][tuple(slice(size) for size in scan.shape)].numpy()


def segment(probability: Floats, threshold: float) -> Labels:
    """Return bodies from 1 on: components below a threshold, and the watershed of the probability from them."""
    labels, count = ndimage.label(probability < threshold)
    large = np.bincount(labels.ravel(), minlength=count + 1) >= LEAST_SEED_VOXELS
    large[0] = False
    seeds = np.where(large, np.cumsum(large), 0).astype(np.int32)[labels]
    return ndimage.watershed_ift((255 * probability).astype(np.uint8), seeds)


def fusions(truth: Labels, found: Labels, within: int) -> list[tuple[int, int]]:
    """Return (fused, all) pairs of bodies with 0, 1, ... `within` free voxels between them at their nearest approach.

    A pair is fused if most of both is the same found body.
    """
    ids = [int(each) for each in np.unique(truth) if each]
    mostly = {body: int(np.bincount(found[truth == body]).argmax()) for body in ids}
    pairs = np.zeros((within + 1, 2), int)
    for number, body in enumerate(ids):
        gaps = ndimage.distance_transform_cdt(truth != body, "taxicab") - 1
        nearest = ndimage.minimum(gaps, truth, ids[number + 1 :]) if ids[number + 1 :] else []
        for other, gap in zip(ids[number + 1 :], nearest, strict=True):
            if gap <= within:
                pairs[int(gap)] += (mostly[body] == mostly[other], 1)
    return [(int(fused), int(count)) for fused, count in pairs]


# ---- diffusion model and pairs


def train_model(out: Path, unlabeled: Sequence[str], boxes: int = 0) -> Path:
    """Train a diffusion model without labels, or from its weights with labeled boxes; return the checkpoint."""
    steps = TRAINING if boxes else PRETRAINING
    checkpoint = out / "runs" / "model" / "checkpoints" / f"step_{steps:08}"
    if checkpoint.exists():
        return checkpoint
    volumes = []
    for number, path in enumerate(unlabeled):
        shape, condition = vesuvius.open_volume(path).shape_zyx, out / f"unlabeled{number}.zarr"
        form = {"dtype": "u1", "chunks": (PATCH,) * 3, "fill_value": UNLABELED, "overwrite": True}
        with zarr.config.set({"array.write_empty_chunks": True}):
            zarr.create_array(condition, shape=shape, **form)[:1, :1, :1] = UNLABELED
        volumes.append({"path": path, "condition": {"path": str(condition)}, "weight": 1 / len(unlabeled)})
    for number in range(boxes):
        names = {"path": f"box{number}.zarr", "condition": {"path": f"box{number}.labels.zarr"}}
        volumes.append({**names, "weight": 1 / boxes})
    demo = yaml.safe_load((Path(vesuvius.__file__).parent / "demo.yaml").read_text())
    training = {"workers": 0, "preview_every": 0, "validate_every": 0, "train_batch_size": 2, "save_every": 100}
    training |= {"steps_per_epoch": 100, "epochs": steps // 100, "keep_last": 1}
    if boxes:
        training["init_from"] = str(train_model(out.parent, unlabeled))
    data = {"volumes": volumes, "patch_size": [PATCH] * 3, "condition_classes": CLASSES}
    config = demo | {
        "name": "model",
        "data": data | {"normalize": INTENSITIES, "validation": {"fraction": 0}},
        "training": demo["training"] | training,
        "diffusion": {"condition_dropout": 0.1},
    }
    (out / "model.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "vesuvius.train", "--config", "model.yaml", "training.resume=auto"]
    subprocess.run(command, check=True, cwd=out, stdout=subprocess.DEVNULL)
    return checkpoint


def change(box: Labeled, kind: str, seed: int) -> Labeled:
    """Warp a box or change its labels, and cut a tile of PATCH^3; the scan fits `warped` labels only."""
    rng, (voxels, ids) = np.random.default_rng((seed, 2)), box
    if kind == "changed":
        ids = np.asarray(change_labels(None, ids, CHANGES, seed).instances)
    else:
        by = displacement(ids.shape, WARP, [PATCH / 2] * 3, rng)
        voxels, ids = moved(voxels, by), moved(ids, by)
    at = tuple(slice(start, start + PATCH) for start in (rng.integers(size - PATCH + 1) for size in ids.shape))
    return voxels[at], np.ascontiguousarray(ids[at])


def generate(checkpoint: Path, labels: Path, guidance: float, count: int) -> list[NDArray[np.uint8]]:
    """Generate scans from the first tiles of a row of labels, each tile on its own."""
    path = labels.with_name(f"{labels.stem}-{guidance}-{count}.zarr")
    options = {"checkpoint": checkpoint, "condition": labels, "out": path, "seed": 1, "guidance": guidance}
    options |= {"box": f"0:{PATCH},0:{PATCH},0:{PATCH * count}", "overlap": 0, "steps": SAMPLER_STEPS}
    options |= {"batch-size": 2, "workers": 1}
    if not path.exists() and sample.main([f"--{key}={value}" for key, value in options.items()]):
        raise SystemExit(f"{path.name} was not generated")
    return np.split(np.asarray(vesuvius.open_volume(path)[:]), count, 2)


def contrast(tiles: Sequence[Labeled]) -> float:
    """Return the mean intensity inside of bodies less that of their walls."""
    voxels, walls = (np.stack(each) for each in zip(*((v, classes_of(ids) > 0) for v, ids in tiles), strict=True))
    return float(voxels[~walls].mean() - voxels[walls].mean())


# ---- experiment


class Study:
    """A scan, its bodies, and the labeled boxes; what belongs to N boxes lies in the folder n<N>."""

    def __init__(self, scan: str, bodies: str, out: Path, unlabeled: Sequence[str], edge: int) -> None:
        self.voxels, self.ids = (np.asarray(vesuvius.open_volume(path)[:]) for path in (scan, bodies))
        self.out, self.unlabeled = out, [str(out / "train.zarr"), *unlabeled]
        self.training = self.part("train")
        self.mean, self.deviation = self.training[0].mean(), self.training[0].std()
        self.boxes = choose_boxes(classes_of(self.training[1]) > 0, edge, max(COUNTS))
        if not (out / "train.zarr").exists():
            write_array(out / "train.zarr", self.training[0])

    @functools.cache  # noqa: B019
    def part(self, name: str) -> Labeled:
        """Return scan and bodies; in the validation and test parts, bodies are connected components."""
        at = parts(len(self.ids))[name]
        ids = self.ids[at].astype(np.int32)
        return self.voxels[at], ids if name == "train" else components(ids)

    def source(self, labeled: Labeled) -> Source:
        voxels, ids = labeled
        return ((voxels - self.mean) / self.deviation).astype(np.float32), (classes_of(ids) > 0).astype(np.float32)

    def labeled(self, count: int) -> list[Labeled]:
        """Return N boxes, and write them for the diffusion model."""
        folder, boxes = self.out / f"n{count}", [(self.training[0][b], self.training[1][b]) for b in self.boxes[:count]]
        for number, (voxels, ids) in enumerate(boxes):
            if not (folder / f"box{number}.labels.zarr").exists():
                folder.mkdir(exist_ok=True)
                write_array(folder / f"box{number}.zarr", voxels)
                write_array(folder / f"box{number}.labels.zarr", classes_of(ids))
        return boxes

    def drawn(self, count: int, arm: str) -> list[Source]:
        """Return PAIRS tiles of an arm; generate them first if need be."""
        boxes, folder = self.labeled(count), self.out / f"n{count}"
        tiles = {k: [change(boxes[n % count], k, n) for n in range(PAIRS)] for k in {"warped", arm} - {"pairs"}}
        for kind, row in tiles.items():
            if not (folder / f"{kind}.zarr").exists():
                write_array(folder / f"{kind}.zarr", np.concatenate([classes_of(ids) for _, ids in row], 2))
        if arm == "warped":
            return [self.source(tile) for tile in tiles[arm]]
        checkpoint, wanted = train_model(folder, self.unlabeled, count), contrast(boxes)
        ids = [each for _, each in tiles["warped"]]
        for guidance in GUIDANCES:
            apart = contrast([*zip(generate(checkpoint, folder / "warped.zarr", guidance, JUDGED), ids, strict=False)])
            print(f"guidance {guidance}: bodies less walls {apart:.1f}; labeled boxes {wanted:.1f}", flush=True)
            if apart >= wanted:
                break
        kind = "warped" if arm == "pairs" else arm
        scans = generate(checkpoint, folder / f"{kind}.zarr", guidance, PAIRS)
        return [self.source((scan, ids)) for scan, (_, ids) in zip(scans, tiles[kind], strict=True)]

    def measure(self, count: int, arm: str, seed: int, within: int | None) -> dict[str, Any]:
        """Train a U-Net; choose thresholds on the validation part; return the figures of the test part."""
        started, drawn = time.process_time(), self.drawn(count, arm) if arm in ARMS[2:5] else []
        real = [self.source(each) for each in ([self.training] if arm == "all" else self.labeled(count))]
        network, loss = train_segmenter(real, drawn, seed, arm)
        result: dict[str, Any] = {"arm": arm, "count": count, "seed": seed, "loss": loss}
        for part in ("validation", "test"):
            scan, walls = self.source(self.part(part))
            found, ids = predict(network, scan), self.part(part)[1]
            if part == "validation":
                edge = max(np.arange(0.1, 0.91, 0.05), key=lambda level: dice(found > level, walls > 0))
                low = min(SEED_THRESHOLDS, key=lambda low: adapted_rand_error(ids, segment(found, low)))
            bodies = segment(found, low)
            splits, merges = variation_of_information(ids, bodies)
            figures = {"dice": dice(found > edge, walls > 0), "rand": adapted_rand_error(ids, bodies)}
            result[part] = figures | {"splits": splits, "merges": merges}
        if within is not None:
            result["fusions"] = fusions(ids, bodies, within)
        return result | {"edge": float(edge), "low": low, "cpu_s": time.process_time() - started}


def table(out: Path) -> list[str]:
    """Return means over seeds, and differences to `aug` of the same seed with their 95 % intervals (t)."""
    rows = [json.loads(path.read_text()) for path in sorted(out.glob("*-seed*.json"))]
    known = {(row["count"], row["arm"], row["seed"]): row for row in rows}
    titles = (
        "N",
        "arm",
        "Dice",
        "adapted Rand",
        "splits",
        "merges",
        "Dice less aug's",
        "Rand less aug's",
        "fused",
        "seeds",
    )
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for count, arm in ((count, arm) for count in sorted(COUNTS) for arm in ARMS):
        own = [known[count, arm, seed] for seed in range(SEEDS) if (count, arm, seed) in known]
        if not own:
            continue
        pairs = [(row["test"], known[key]["test"]) for row in own if (key := (count, "aug", row["seed"])) in known]
        dices, *others = (np.mean([row["test"][name] for row in own]) for name in ("dice", "rand", "splits", "merges"))
        cells = [f"{100 * dices:.1f}", *(f"{each:.3f}" for each in others)]
        cells += [interval([100 * (a["dice"] - b["dice"]) for a, b in pairs], 1)]
        cells += [interval([a["rand"] - b["rand"] for a, b in pairs], 3)]
        fused = np.sum([row["fusions"] for row in own if "fusions" in row], axis=0)
        cells += [", ".join(f"{n}/{of}" for n, of in fused) if np.ndim(fused) else "-"]
        lines.append(f"| {count} | {arm} | {' | '.join(cells)} | {len(own)} |")
    return lines


def interval(values: Sequence[float], digits: int) -> str:
    """Format mean and half-width of the 95 % interval: `+4.2 ± 0.8`."""
    half = T_975[len(values) - 2] * np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
    return f"{np.mean(values):+.{digits}f} ± {half:.{digits}f}" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("scan", "bodies"):
        parser.add_argument(name)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--unlabeled", nargs="*", default=[], metavar="SCAN")
    parser.add_argument("--boxes", type=int, nargs="+", default=list(COUNTS), metavar="N")
    parser.add_argument("--edge", type=int, default=EDGE, help="of a box, voxels")
    parser.add_argument("--arms", nargs="+", default=[*ARMS], choices=ARMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(SEEDS)))
    parser.add_argument("--within", type=int, metavar="VOXELS", help="count fused bodies with gaps up to this")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not args.table:
        study = Study(args.scan, args.bodies, out, [str(Path(path).resolve()) for path in args.unlabeled], args.edge)
        for count, seed, arm in ((n, seed, arm) for n in args.boxes for seed in args.seeds for arm in args.arms):
            path = out / f"{arm}-n{count}-seed{seed}.json"
            if not path.exists():
                path.write_text(json.dumps(study.measure(count, arm, seed, args.within)))
                print(path.read_text(), flush=True)
    print("\n".join(table(out)))


if __name__ == "__main__":
    main()
