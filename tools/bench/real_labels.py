"""Do generated pairs improve a segmenter?  One segmenter from few labeled boxes of a volume, with and without pairs.

    vesuvius volume import data/fibsem/grayscale_maps scan.zarr --voxel-size-um 0.01,0.01,0.01
    vesuvius volume import data/fibsem/groundtruth.h5:/bodies bodies.zarr --voxel-size-um 0.01,0.01,0.01 --labels
    python tools/bench/real_labels.py scan.zarr bodies.zarr --out study --unlabeled stack1.zarr stack2.zarr

The volume is split along z (--split) into a training, a validation and a test part, a patch apart.  Labels are boxes of
the training part.  The target is walls: voxels next to another body, and background.  A U-Net is trained for the same
number of steps with

    real     the boxes
    aug      the same, mirrored and turned, with jittered intensities and noise
    warped   aug, half of the patches from elastically warped copies of the boxes (scan and labels)
    pairs    aug, half of the patches from scans that a diffusion model generated from the labels of `warped`
    filtered as pairs, only the half whose walls a U-Net of `aug` finds best
    changed  as pairs, from labels that `vesuvius volume relabel` would write, in contact with --contact
    guessed  aug, half of the patches from unlabeled scans with the walls that a U-Net of `aug` finds there
    redrawn  as pairs, from tiles of these walls
    all      aug, with labels everywhere in the training part, in patches with as many walls as the boxes

The diffusion model is pretrained on the scan of the training part and on the unlabeled volumes, then trained on the
boxes with labels; it sees neither scan nor labels of the other parts.  With --whole-scan, it sees their scan, as where
the rest of a scan is to be segmented.  With --guess, the walls of `guessed` are its labels outside of the boxes (You et
al. 2023, arXiv:2302.10586).  The thresholds of walls and of the watershed are those that suit the validation part best.
A seed sets the U-Net, its patches and their jitter.  The same command continues after a stop; `--table` prints the
results so far.
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
import segment_fibsem as fibsem
import torch
import yaml
import zarr
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from study_table import table
from wall_segmenter import PATCH, WIDTHS, Floats, Labels, Source, best_edge, predict, segment, train_segmenter

import vesuvius
from vesuvius.commands import sample
from vesuvius.volume_tools.relabel import Changes, change_labels, displacement, moved

ARMS = ("real", "aug", "warped", "pairs", "filtered", "changed", "guessed", "redrawn", "all")
COUNTS, SEEDS, EDGE = (4, 2, 8), 5, 32  # boxes of EDGE^3 voxels, if --edge is not given
UNLABELED, CLASSES = 3, 4  # classes: 0 inside of a body, 1 next to another body, 2 background
INTENSITIES = {"low": 60.0, "high": 205.0}  # mapped to -1 and +1 in the diffusion model
MODEL_STEPS, STEPS = (4000, 800), 800  # of the diffusion model without labels, then with boxes; of the segmenter
SAMPLER_STEPS, PAIRS = 16, 48  # pairs, if --pairs is not given
GUIDANCE = 1.5
GUESSED, CONTEXT = 96, 16  # slices of each unlabeled scan with guessed walls; more around the slab that is predicted
WARP = 1.5  # root mean square displacement of a warped copy, voxels
DEFORM, BEND, TOUCHING = 2.0, 2.0, 0.9  # of changed labels; the gap that counts as contact
SEED_THRESHOLDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2)  # of the watershed

Labeled = tuple[NDArray[np.uint8], Labels]  # scan and bodies


def parts(depth: int) -> dict[str, slice]:
    """Return the z ranges for training, validation and test: 47, 22 and 31 % of what two gaps of a patch leave."""
    usable = depth - 2 * PATCH
    train, start = round(0.475 * usable), round(0.475 * usable) + PATCH
    stop = start + round(0.215 * usable)
    return {"train": slice(0, train), "validation": slice(start, stop), "test": slice(stop + PATCH, depth)}


def classes_of(ids: Labels) -> NDArray[np.uint8]:
    """Return 0 inside of bodies, 1 next to another body, 2 in the background (id 0)."""
    touching = fibsem.boundaries(torch.from_numpy(ids)).numpy() > 0
    return np.where(ids == 0, 2, touching).astype(np.uint8)


def choose_boxes(walls: NDArray[np.bool_], edge: int, count: int) -> list[tuple[slice, ...]]:
    """Choose disjoint boxes at random among those with at least the volume's share of walls."""
    rng, boxes, used, share = np.random.default_rng(7), list[tuple[slice, ...]](), np.zeros_like(walls), walls.mean()
    for _ in range(10**5 if edge <= min(walls.shape) else 0):
        box = tuple(slice(at, at + edge) for at in (int(rng.integers(size - edge + 1)) for size in walls.shape))
        if not used[box].any() and walls[box].mean() >= share:
            used[box] = True
            boxes.append(box)
        if len(boxes) == count:
            return boxes
    raise SystemExit(f"no {count} disjoint boxes of {edge}^3 voxels were found in {walls.shape}; use a larger scan")


def write_array(path: Path, voxels: NDArray[np.uint8]) -> None:
    """Write a zarr array under a temporary name, then rename it."""
    partial = path.with_name(f".{path.name}")
    array = zarr.create_array(partial, shape=voxels.shape, dtype="u1", chunks=(PATCH,) * 3, overwrite=True)
    array[:] = voxels
    partial.rename(path)


def write_json(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    partial.rename(path)


def train_model(
    out: Path, unlabeled: Sequence[str], model_steps: Sequence[int], boxes: int = 0, guessed: Sequence[Path] = ()
) -> Path:
    """Train a diffusion model without labels, or from its weights with labeled boxes; return the checkpoint."""
    steps = model_steps[boxes > 0]
    checkpoint = out / "runs" / "model" / "checkpoints" / f"step_{steps:08}"
    if checkpoint.exists():
        return checkpoint
    volumes = []
    for number, path in enumerate(unlabeled):
        shape, condition = vesuvius.open_volume(path).shape_zyx, out / f"unlabeled{number}.zarr"
        form = {"dtype": "u1", "chunks": (PATCH,) * 3, "fill_value": UNLABELED, "overwrite": True}
        if guessed:
            condition = guessed[number]
        else:
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
        training["init_from"] = str(train_model(out.parent, unlabeled, model_steps))
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


def change(box: Labeled, kind: str, contact: float, seed: int, shares: list[list[float]]) -> Labeled:
    """Warp a box or change its labels (its scan then no longer fits), and cut a tile; `shares` gets its contacts."""
    rng, (voxels, ids) = np.random.default_rng((seed, 2)), box
    if kind == "changed":
        changes = Changes(deform=DEFORM, bend=BEND, contact=contact, within=TOUCHING)
        changed = change_labels(None, ids, changes, seed)
        shares.append([row["facing_within"] for row in changed.report["instances"]])
        ids = np.asarray(changed.instances)
    else:
        by = displacement(ids.shape, WARP, [PATCH / 2] * 3, rng)
        voxels, ids = moved(voxels, by), moved(ids, by)
    at = tuple(slice(start, start + PATCH) for start in (rng.integers(size - PATCH + 1) for size in ids.shape))
    return voxels[at], np.ascontiguousarray(ids[at])


def generate(checkpoint: Path, labels: Path, count: int) -> NDArray[np.uint8]:
    """Generate a scan from labels: from the first tiles of a row, each on its own, or from all as one volume."""
    path = labels.with_name(f"{labels.stem}-{count}.zarr")
    options = {"checkpoint": checkpoint, "condition": labels, "out": path, "seed": 1, "guidance": GUIDANCE}
    options |= {"steps": SAMPLER_STEPS, "batch-size": 2, "workers": 1}
    options |= {"box": f"0:{PATCH},0:{PATCH},0:{PATCH * count}", "overlap": 0} if count else {}
    if not path.exists() and sample.main([f"--{key}={value}" for key, value in options.items()]):
        raise SystemExit(f"{path.name} was not generated")
    return np.asarray(vesuvius.open_volume(path)[:])


class Study:
    """A scan, its bodies, and the labeled boxes; what belongs to N boxes lies in the folder n<N>."""

    def __init__(self, arguments: argparse.Namespace, out: Path) -> None:
        paths, axis = (arguments.scan, arguments.bodies), "zyx".index(arguments.split)
        self.voxels, self.ids = (np.moveaxis(vesuvius.open_volume(path)[:], axis, 0) for path in paths)
        if self.voxels.shape != self.ids.shape or not 0 <= self.ids.min() <= self.ids.max() < 2**31:
            facts = f"{self.ids.shape}, ids up to {self.ids.max()}, and {self.voxels.shape}"
            raise SystemExit(f"{paths[1]} and {paths[0]} are not ids below 2^31 in the voxels of a scan: {facts}")
        self.out, self.unlabeled = out, [str(path.resolve()) for path in (out / "train.zarr", *arguments.unlabeled)]
        self.model_steps, self.steps, self.pairs = arguments.model_steps, arguments.steps, arguments.pairs
        self.contact, self.within, self.guess = arguments.contact, arguments.within, arguments.guess
        self.first = arguments.first
        self.names = {"validation": "test", "test": "validation"} if arguments.exchange else {}
        self.depths = [len(self.ids) if arguments.whole_scan else GUESSED, *[GUESSED] * len(arguments.unlabeled)]
        self.training = self.part("train")
        self.mean, self.deviation = self.training[0].mean(), self.training[0].std()
        self.boxes = choose_boxes(classes_of(self.training[1]) > 0, arguments.edge, max(arguments.boxes))
        if not (out / "train.zarr").exists():
            write_array(out / "train.zarr", self.voxels if arguments.whole_scan else self.training[0])

    @functools.cache  # noqa: B019
    def part(self, name: str) -> Labeled:
        """Return scan and bodies; in the validation and test parts, bodies are connected components."""
        at = parts(len(self.ids))[self.names.get(name, name)]
        ids = self.ids[at].astype(np.int32)
        return self.voxels[at], ids if name == "train" else fibsem.components(ids)

    def scaled(self, voxels: NDArray[np.uint8]) -> Floats:
        return ((voxels - self.mean) / self.deviation).astype(np.float32)

    def source(self, labeled: Labeled) -> Source:
        return self.scaled(labeled[0]), (classes_of(labeled[1]) > 0).astype(np.float32)

    def labeled(self, count: int) -> list[Labeled]:
        """Return N boxes, and write them for the diffusion model."""
        folder, boxes = self.out / f"n{count}", [(self.training[0][b], self.training[1][b]) for b in self.boxes[:count]]
        for number, (voxels, ids) in enumerate(boxes):
            if not (folder / f"box{number}.labels.zarr").exists():
                folder.mkdir(exist_ok=True)
                write_array(folder / f"box{number}.zarr", voxels)
                write_array(folder / f"box{number}.labels.zarr", classes_of(ids))
        return boxes

    @functools.cache  # noqa: B019
    def tiles(self, count: int, kind: str) -> tuple[list[Labeled], Path]:
        """Return --pairs tiles from N boxes, and a row of their classes."""
        boxes, path = self.labeled(count), self.out / f"n{count}" / f"{kind}.zarr"
        shares = list[list[float]]()
        tiles = [change(boxes[number % count], kind, self.contact, number, shares) for number in range(self.pairs)]
        if shares:
            write_json(path.with_suffix(".json"), shares)
            print("in contact before and after:", np.mean(shares, 0), flush=True)
        if not path.exists():
            write_array(path, np.concatenate([classes_of(ids) for _, ids in tiles], 2))
        return tiles, path

    def generate(self, count: int, labels: Path, tiles: int = 0) -> NDArray[np.uint8]:
        """Generate a scan with the model for N boxes: from tiles of a row, or from all labels in one piece."""
        guessed = self.guesses(count) if self.guess else ()
        checkpoint = train_model(self.out / f"n{count}", self.unlabeled, self.model_steps, count, guessed)
        return generate(checkpoint, labels, tiles)

    @functools.cache  # noqa: B019
    def first_segmenter(self, count: int) -> tuple[fibsem.UNet, float]:
        """Return a U-Net of `aug` of a seed that no arm has, and its threshold of walls."""
        network = train_segmenter([self.source(each) for each in self.labeled(count)], [], self.steps, SEEDS, "aug")
        scan, walls = self.source(self.part("validation"))
        return network, best_edge(predict(network, scan), walls)

    def guesses(self, count: int) -> list[Path]:
        """Return label volumes of the unlabeled scans: the walls that a U-Net of `aug` finds in their first slices."""
        paths = [self.out / f"n{count}" / f"guessed{number}.zarr" for number in range(len(self.unlabeled))]
        if not all(path.exists() for path in paths):
            network, edge = self.first_segmenter(count)
            scans = map(vesuvius.open_volume, self.unlabeled)
            for path, scan, depth in zip(paths, scans, self.depths, strict=True):
                if path.exists():
                    continue
                classes, depth = np.full(scan.shape_zyx, UNLABELED, np.uint8), min(depth, scan.shape_zyx[0])
                for at in range(0, depth, PATCH):
                    first, last = max(0, at - CONTEXT), min(at + PATCH, depth)
                    found = predict(network, self.scaled(scan[first : last + CONTEXT]))[at - first :][: last - at]
                    classes[at:last] = found > edge
                write_array(path, classes)
        return paths

    def unlabeled_tiles(self, count: int, whole: bool) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Return the unlabeled scans and their guessed walls, or --pairs tiles of them."""
        paths, rng = self.guesses(count), np.random.default_rng(11)
        scans = [vesuvius.open_volume(each)[:depth] for each, depth in zip(self.unlabeled, self.depths, strict=True)]
        pairs = [(scan, zarr.open_array(path)[: len(scan)]) for scan, path in zip(scans, paths, strict=True)]
        if whole:
            return pairs
        found = []
        for number in range(self.pairs):
            scan, walls = pairs[number % len(pairs)]
            at = tuple(slice(start, start + PATCH) for start in (rng.integers(n - PATCH + 1) for n in scan.shape))
            found.append((scan[at], walls[at]))
        return found

    def drawn(self, count: int, arm: str) -> list[Source]:
        """Return --pairs tiles of an arm; generate them first if need be."""
        if arm in ("guessed", "redrawn"):
            tiles = self.unlabeled_tiles(count, whole=arm == "guessed")
            if arm == "redrawn":
                if not (path := self.out / f"n{count}" / "redrawn.zarr").exists():
                    write_array(path, np.concatenate([walls for _, walls in tiles], 2))
                scans = np.split(self.generate(count, path, self.pairs), self.pairs, 2)
                tiles = [(scan, walls) for scan, (_, walls) in zip(scans, tiles, strict=True)]
            return [(self.scaled(scan), walls.astype(np.float32)) for scan, walls in tiles]
        tiles, labels = self.tiles(count, "changed" if arm == "changed" else "warped")
        if arm != "warped":
            scans = np.split(self.generate(count, labels, self.pairs), self.pairs, 2)
            tiles = [(scan, ids) for scan, (_, ids) in zip(scans, tiles, strict=True)]
        sources = [self.source(tile) for tile in tiles]
        if arm == "filtered":
            network, edge = self.first_segmenter(count)
            found = [fibsem.dice(predict(network, scan) > edge, walls > 0) for scan, walls in sources]
            sources = [sources[number] for number in np.argsort(found)[len(found) // 2 :]]
        return sources

    def measure(self, count: int, arm: str, seed: int) -> dict[str, Any]:
        """Train a U-Net; choose thresholds on the validation part; return the figures of the test part."""
        started, path = time.process_time(), self.out / f"{arm}-n{count}-seed{seed}.pt"
        if not path.exists():
            drawn = self.drawn(count, arm) if arm in ARMS[2:-1] else []
            real = [self.source(each) for each in ([self.training] if arm == "all" else self.labeled(count))]
            torch.save(train_segmenter(real, drawn, self.steps, seed, arm, self.first).state_dict(), path)
        network = fibsem.UNet(WIDTHS).eval()
        network.load_state_dict(torch.load(path))
        result: dict[str, Any] = {"arm": arm, "count": count, "seed": seed}
        for part in ("validation", "test"):
            scan, walls = self.source(self.part(part))
            found, ids = predict(network, scan), self.part(part)[1]
            if part == "validation":
                edge = best_edge(found, walls)
                low = min(SEED_THRESHOLDS, key=lambda low: fibsem.adapted_rand_error(ids, segment(found, low)))
            bodies = segment(found, low)
            splits, merges = fibsem.variation_of_information(ids, bodies)
            figures = {"dice": fibsem.dice(found > edge, walls > 0), "rand": fibsem.adapted_rand_error(ids, bodies)}
            result[part] = figures | {"splits": splits, "merges": merges}
        if self.within is not None:  # in blocks: sheets that fuse elsewhere do not count
            cells = np.ndindex(*(size // PATCH for size in ids.shape))
            blocks = [tuple(slice(PATCH * n, PATCH * (n + 1)) for n in cell) for cell in cells]
            between = [ndimage.label(found[block] <= edge)[0] for block in blocks]
            fused = [fibsem.fusions(ids[at], each, self.within) for at, each in zip(blocks, between, strict=True)]
            result["fusions"] = np.sum(fused, axis=0).tolist()
        return result | {"edge": float(edge), "low": low, "cpu_s": time.process_time() - started}

    def picture(self, count: int, path: str) -> None:
        """Show a slice of the test part: scan, bodies, a scan generated from them, and bodies of a U-Net of `pairs`."""
        at = (slice(0, PATCH), slice(0, 128), slice(120, 248))
        voxels, ids = (each[at] for each in self.part("test"))
        if not (labels := self.out / "picture.zarr").exists():
            write_array(labels, classes_of(np.ascontiguousarray(ids)))
        row = json.loads((self.out / f"pairs-n{count}-seed0.json").read_text())
        network = fibsem.UNet(WIDTHS).eval()
        network.load_state_dict(torch.load(self.out / f"pairs-n{count}-seed0.pt"))
        found = segment(predict(network, self.source(self.part("test"))[0]), row["low"])[at]
        shown = [each[PATCH // 2] for each in (voxels, ids, self.generate(count, labels), found)]
        panels = [each if each.dtype == np.uint8 else fibsem.colored(each, shown[1]) for each in shown]
        row = [np.broadcast_to(each.reshape(*each.shape[:2], -1), (*each.shape[:2], 3)) for each in panels]
        Image.fromarray(np.hstack(row).repeat(2, 0).repeat(2, 1)).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("scan", "bodies"):
        parser.add_argument(name)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--unlabeled", type=Path, nargs="*", default=[], metavar="SCAN")
    parser.add_argument("--boxes", type=int, nargs="+", default=list(COUNTS), metavar="N")
    parser.add_argument("--arms", nargs="+", default=[*ARMS], choices=ARMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(SEEDS)))
    parser.add_argument("--model-steps", type=int, nargs=2, default=MODEL_STEPS, help="without labels, then with boxes")
    parser.add_argument("--split", choices="zyx", default="z", help="axis along which the volume is split")
    parser.add_argument("--exchange", action="store_true", help="exchange the validation and the test part")
    parser.add_argument("--whole-scan", action="store_true", help="the diffusion model sees the scan of all parts")
    parser.add_argument("--edge", type=int, default=EDGE, help="of a labeled box, voxels")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="generated tiles of an arm")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the segmenter")
    parser.add_argument("--guess", action="store_true", help="train the diffusion model with guessed walls, too")
    parser.add_argument("--first", action="store_true", help="train on generated tiles first, then on boxes")
    parser.add_argument("--contact", type=float, default=0, help="share of surfaces that `changed` brings together")
    parser.add_argument("--within", type=int, metavar="VOXELS", help="count fused bodies with gaps up to this")
    parser.add_argument("--picture", metavar="PNG", help="of the last N, once `pairs` has its seed 0")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not args.table:
        settings = {key: getattr(args, key) for key in ("model_steps", "steps", "contact", "within")}
        chosen = {
            key: getattr(args, key) for key in ("guess", "first", "edge", "pairs", "split", "whole_scan", "exchange")
        }
        settings |= {key: value for key, value in chosen.items() if value != parser.get_default(key)}
        if not (path := out / "settings.json").exists():
            write_json(path, settings)
        if (old := json.loads(path.read_text())) != settings | {"model_steps": list(args.model_steps)}:
            raise SystemExit(f"{out} has results of other settings, {old}, not {settings}; use another --out")
        study = Study(args, out)
        for count, seed, arm in ((n, seed, arm) for n in args.boxes for seed in args.seeds for arm in args.arms):
            path = out / f"{arm}-n{count}-seed{seed}.json"
            if not path.exists():
                write_json(path, study.measure(count, arm, seed))
                print(path.read_text(), flush=True)
        if args.picture:
            study.picture(args.boxes[-1], args.picture)
    print("\n".join(table(out, ARMS)))


if __name__ == "__main__":
    main()
