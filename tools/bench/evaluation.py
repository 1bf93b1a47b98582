"""CPU and wall time of an evaluation of 64 + 64 patches of 72x136x136, without reading or sampling.

    python tools/bench/evaluation.py [--count 64] [--patch 72,136,136]

Patches are cut from smoothed noise: the time does not depend on their content.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import AugmentConfig
from vesuvius.generate.evaluate.metrics import compare
from vesuvius.generate.evaluate.patches import PatchSet, RealPatches


def smoothed(shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
    """Return noise with a correlation length of a few voxels, roughly in [-1, 1]."""
    voxels = rng.standard_normal(shape, np.float32)
    for axis in range(3):
        for shift in (1, 2, 4):
            voxels += np.roll(voxels, shift, axis)
    return voxels / (2 * voxels.std())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--patch", default="72,136,136")
    arguments = parser.parse_args()
    rng, count = np.random.default_rng(0), arguments.count
    pz, py, px = patch = tuple(map(int, arguments.patch.split(",")))
    volume = smoothed((2 * pz, 3 * py, 3 * px), rng)

    def cut() -> PatchSet:
        starts = rng.integers(0, np.array(volume.shape) - patch, (count, 3))
        values = np.stack([volume[z : z + pz, y : y + py, x : x + px] for z, y, x in starts])
        return PatchSet(values, side=np.arange(count) % 2)

    generated, held_out, training, *sides = (cut() for _ in range(5))
    started = time.process_time(), time.perf_counter()
    real = RealPatches(held_out, training, (sides[0], sides[1]), [volume], volume.size)
    compare(generated, real, AugmentConfig(), 200)
    cpu, wall = time.process_time() - started[0], time.perf_counter() - started[1]
    print(f"{count} + {count} patches of {arguments.patch}: {cpu:.0f} s of CPU time, {wall:.0f} s of wall time")


if __name__ == "__main__":
    main()
