"""The patch stream alone: seconds to the first batch, patches/s, and patches per CPU second of this process.

Prints one line of JSON, with a hash of two batches: two versions that read the same samples print the same.  To compare
with another checkout, run both in turn, the other one with `PYTHONPATH=OTHER/src`:

    python tools/bench/stream.py VOLUME.zarr --workers 2 --batches 60
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time

from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream

_BATCH, _PATCH, _WARM_UP = 8, (72, 136, 136), 6


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("volume")
    parser.add_argument("--workers", type=int, default=0, help="readers; 0 = this process (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=40, help="that are timed (default: %(default)s)")
    args = parser.parse_args()
    began = time.perf_counter()
    data = DataConfig(volumes=(VolumeConfig(path=args.volume),), patch_size=_PATCH)
    with PatchStream(prepare_data(0, data).job, StreamOptions(_BATCH, args.workers)) as stream:
        seen = hashlib.sha256(next(stream).patches.tobytes())
        first_s = time.perf_counter() - began
        for _ in range(_WARM_UP):
            next(stream)
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(args.batches):
            batch = next(stream)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        seen.update(batch.patches.tobytes())
    patches = args.batches * _BATCH
    figures = {"first_batch_s": first_s, "patches_s": patches / wall, "patches_cpu_s": patches / cpu}
    print(json.dumps(figures | {"voxels": seen.hexdigest()[:12]}))


if __name__ == "__main__":
    main()
