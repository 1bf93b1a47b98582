"""How near generated patches come to real ones that training has not seen.

    vesuvius volume synth volumes/unseen.zarr --shape 128,384,384 --seed 9
    vesuvius sample --checkpoint runs/demo --count 192 --guidance 0 --out samples
    python tools/judge_samples.py --samples samples/samples.zarr --real volumes/unseen.zarr

Figures of both: share of air (well darker than the material), standard deviation of the patches'
means, planarity; the distances of histogram, power spectrum and two-point correlation; and the area under the ROC curve
of a classifier that was trained on half of the patches, as mean and standard deviation over seeds: 0.5 where it cannot
tell them apart.  It takes samples of any program: a zarr array [N, Z, Y, X] in the grey values of the volume.  Real
patches for training and for testing the classifier come from different halves of the volume, from anywhere in them: a
model that was trained with `data.min_foreground` draws less air.  Samples are to be drawn without conditions
(--guidance 0), or under conditions that do not overlap: those of one place show the same sheets in both halves.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import zarr
from numpy.typing import NDArray

from vesuvius.config import VolumeConfig
from vesuvius.engine.texture import correlation_distance, histogram_distance, measure_texture, spectrum_distance_db
from vesuvius.lab.two_sample import Patches, two_sample_auc
from vesuvius.volumes.volume import Volume, open_volume


def main() -> None:
    """Read, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=Path, required=True, help="zarr array [N, Z, Y, X], or a group with one in 0")
    parser.add_argument("--real", required=True, help="zarr volume that training has not seen")
    parser.add_argument("--level", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3, help="classifiers trained")
    parser.add_argument("--steps", type=int, default=400, help="of each classifier")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    found = zarr.open(arguments.samples, mode="r")
    stored = np.asarray(found["0"] if isinstance(found, zarr.Group) else found)
    volume = open_volume(VolumeConfig(path=arguments.real, level=arguments.level))
    halves = real_patches(volume, len(stored), stored.shape[1:])
    material = np.concatenate([half[half != volume.fill_value] for half in halves])
    low, high = np.percentile(material, (0.5, 99.5))

    def model_values(voxels: NDArray[np.generic]) -> Patches:
        return ((voxels.astype(np.float32) - low) / (high - low) * 2 - 1).astype(np.float32)

    real = model_values(halves[0]), model_values(halves[1])
    middle = len(stored) // 2
    generated = model_values(stored[:middle]), model_values(stored[middle:])
    one, other = (measure_texture(np.concatenate(pair)) for pair in (generated, real))
    aucs = [two_sample_auc(real, generated, steps=arguments.steps, seed=seed) for seed in range(arguments.seeds)]
    figures = {
        "patches": len(stored),
        "air": {"generated": one.air, "real": other.air},
        "means_std": {"generated": one.means_std, "real": other.means_std},
        "planarity": {"generated": one.planarity, "real": other.planarity},
        "histogram_distance": histogram_distance(one, other),
        "spectrum_distance_db": spectrum_distance_db(one, other),
        "correlation_distance": correlation_distance(one, other),
        "auc": {"mean": float(np.mean(aucs)), "std": float(np.std(aucs))},
    }
    for name, figure in figures.items():
        parts = figure.items() if isinstance(figure, dict) else [("", figure)]
        print(f"{name:22}" + "  ".join(f"{of} {value:.4g}".strip() for of, value in parts))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def real_patches(volume: Volume, count: int, size_zyx: tuple[int, ...]) -> list[NDArray[np.generic]]:
    """`count` patches from anywhere in the volume, in two arrays: from either half of its longest axis."""
    rng, longest = np.random.default_rng(0), int(np.argmax(volume.shape_zyx))
    middle = volume.shape_zyx[longest] // 2
    found = []
    for number in range(2):
        low, high = [0, 0, 0], [size - edge for size, edge in zip(volume.shape_zyx, size_zyx, strict=True)]
        low[longest], high[longest] = (0, middle - size_zyx[longest]) if number == 0 else (middle, high[longest])
        if min(np.subtract(high, low)) < 0:
            raise SystemExit(
                f"half of the volume must hold a patch of {size_zyx}; got {volume.shape_zyx}; take a larger"
            )
        starts = [tuple(int(v) for v in rng.integers(low, high, endpoint=True)) for _ in range((count + number) // 2)]
        found.append(
            np.stack(
                [volume.read(((z, y, x), (z + size_zyx[0], y + size_zyx[1], x + size_zyx[2]))) for z, y, x in starts]
            )
        )
    return found


if __name__ == "__main__":
    main()
