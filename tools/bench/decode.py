"""Compare reads of boxes of a volume by `Volume.read` and by the pipelines of zarr-python and zarrs.

    RAYON_NUM_THREADS=1 python tools/bench/decode.py VOLUME.zarr ...    # zarr >= 3.3; pip install zarrs==0.2.3

Five interleaved rounds of eight boxes of 256^3 voxels on the grid of chunks, from the page cache.  Prints medians of
the CPU ms of a box, over all threads, and of their ratios to ours in the same round, with the extremes.  Rows "by
chunk" request the chunks of a box one by one, as a reader must to identify a damaged one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numcodecs import blosc
from pairs import ratios, spread, turns

from vesuvius.config import ArrayConfig, Triple
from vesuvius.volumes.volume import open_volume

ROUNDS, EDGE = 5, 256
OURS = "vesuvius"
CORNERS = list(product((0, EDGE), (EDGE, 2 * EDGE), (EDGE, 2 * EDGE)))
PIPELINES = {
    "zarr batched": "zarr.core.codec_pipeline.BatchedCodecPipeline",
    "zarr fused": "zarr.core.codec_pipeline.FusedCodecPipeline",
    "zarr fused, by chunk": "zarr.core.codec_pipeline.FusedCodecPipeline",
    "zarrs": "zarrs.ZarrsCodecPipeline",
}
Read = Callable[[Triple], Any]


def by_box(array: Any) -> Read:
    return lambda corner: array[tuple(slice(at, at + EDGE) for at in corner)]


def by_chunk(array: Any) -> Read:
    def read(corner: Triple) -> Any:
        voxels = np.empty((EDGE,) * 3, array.dtype)
        for start in product(*(range(0, EDGE, size) for size in array.chunks)):
            spans = list(zip(start, array.chunks, corner, strict=True))
            part = tuple(slice(at, at + size) for at, size, _ in spans)
            voxels[part] = array[tuple(slice(first + at, first + at + size) for at, size, first in spans)]
        return voxels

    return read


def main() -> None:
    blosc.set_nthreads(1)
    zarr.config.set({"codec_pipeline.max_workers": 1})
    for path in map(Path, sys.argv[1:]):
        volume = open_volume(ArrayConfig(path=str(path)))
        reads: dict[str, Read] = {OURS: lambda c, v=volume: v.read((c, tuple(at + EDGE for at in c)))}
        for name, pipeline in PIPELINES.items():
            with zarr.config.set({"codec_pipeline.path": pipeline}):
                array = zarr.open_array(path / volume.array.path, mode="r")
            reads[name] = by_chunk(array) if "by chunk" in name else by_box(array)
            np.testing.assert_array_equal(reads[name](CORNERS[0]), reads[OURS](CORNERS[0]), err_msg=name)
        print(f"{path.name}; zarr {zarr.__version__}")
        compare(reads)


def compare(reads: dict[str, Read]) -> None:
    cpu: dict[str, list[float]] = {name: [] for name in reads}
    for _, name in turns(list(reads), ROUNDS):
        began = time.process_time()
        for corner in CORNERS:
            reads[name](corner)
        cpu[name].append(1e3 * (time.process_time() - began) / len(CORNERS))
    for name, spent in cpu.items():
        print(f"  {name:22} {spread(spent, '4.0f')} CPU ms a box, {spread(ratios(spent, cpu[OURS]), '.2f')} times ours")


if __name__ == "__main__":
    main()
