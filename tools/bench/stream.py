"""Measure the patch stream alone: seconds to the first batch, patches/s, CPU ms a patch, readers' memory.

Prints one line of JSON, with a hash of two batches: two versions that read the same samples print the same.  To compare
with another checkout, alternate both, the other one with `PYTHONPATH=OTHER/src`; to compare with `PatchLoader`, run
it with and without --loader:

    python tools/bench/stream.py VOLUME.zarr --workers 2 --batches 400
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time

from feeds import tree_cpu_s

from vesuvius import PatchLoader
from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.reading.resident import Resident
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream

_BATCH, _PATCH, _WARM_UP = 8, (72, 136, 136), 60


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("volume")
    parser.add_argument(
        "--workers", type=int, default=0, help="reader threads; 0 = one per core (default: %(default)s)"
    )
    parser.add_argument("--processes", action="store_true", help="the workers are Ray processes")
    parser.add_argument("--loader", choices=("stored", "normalized"), help="through PatchLoader; kind of tensors")
    parser.add_argument("--resident", action="store_true", help="keep the volume in memory, measure after one pass")
    parser.add_argument("--batches", type=int, default=400, help="timed batches (default: %(default)s)")
    args = parser.parse_args()
    began = time.perf_counter()
    if args.loader:
        measure_loader(args, began)
        return
    data = DataConfig(volumes=(VolumeConfig(path=args.volume),), patch_size=_PATCH)
    job = prepare_data(0, data).job
    resident = Resident(job) if args.resident else None
    warm_up = 2 * job.plan.slots_per_pass * job.plan.patches_per_region // _BATCH if resident else _WARM_UP
    with PatchStream(job, StreamOptions(_BATCH, args.workers, processes=args.processes), resident=resident) as stream:
        seen = hashlib.sha256(next(stream).patches.tobytes())
        first_s = time.perf_counter() - began
        for _ in range(warm_up):
            next(stream)
        cpu, wall = tree_cpu_s(), time.perf_counter()
        for _ in range(args.batches):
            batch = next(stream)
        wall, cpu = time.perf_counter() - wall, tree_cpu_s() - cpu
        seen.update(batch.patches.tobytes())
        readers = [size >> 20 for size in stream.reader_memory().values()]
    _show(args.batches, first_s, wall, cpu, readers_mib=readers, voxels=seen.hexdigest()[:12])


def measure_loader(args: argparse.Namespace, began: float) -> None:
    """Measure `PatchLoader` on a CPU; voxels as stored are not mirrored or rotated either."""
    how = {"normalize": False, "augment": False} if args.loader == "stored" else {}
    with PatchLoader(
        args.volume, batch_size=_BATCH, patch_size=_PATCH, num_workers=args.workers, processes=args.processes,
        device="cpu", validation_fraction=0.05, cache_in_memory=args.resident, **how,
    ) as loader:  # fmt: skip
        batches = iter(loader)
        seen = hashlib.sha256(next(batches).image.numpy().tobytes())
        first_s = time.perf_counter() - began
        for _ in range(_WARM_UP):
            next(batches)
        cpu, wall = tree_cpu_s(), time.perf_counter()
        for _ in range(args.batches):
            batch = next(batches)
        wall, cpu = time.perf_counter() - wall, tree_cpu_s() - cpu
        seen.update(batch.image.numpy().tobytes())
    _show(args.batches, first_s, wall, cpu, voxels=seen.hexdigest()[:12])


def _show(batches: int, first_s: float, wall_s: float, cpu_s: float, **more: object) -> None:
    patches = batches * _BATCH
    figures = {"first_batch_s": first_s, "patches_s": patches / wall_s, "cpu_ms": 1e3 * cpu_s / patches}
    print(json.dumps(figures | more))


if __name__ == "__main__":
    main()
