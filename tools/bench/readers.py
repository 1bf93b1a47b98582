"""Compare readers that are threads of the trainer with readers that are Ray processes, at any number, on any machine.

    python tools/bench/readers.py --readers 1,2,4,8,16 --decode-s 1 --hold 0,0.5

A region is decoded in a fixed wait that holds no lock, so a wait stands for a core, and 16 readers run on two cores;
after it the region is written, which is real work.  The consumer takes batches as fast as they come, and spins in
Python, holding the interpreter's lock, for a share of steps of 20 ms (`--hold`).  Each cell prints patches/s, their
share of the ideal (readers x patches per region / decode_s) and the share of the time that the consumer waited.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.reading.reader import Reader, ReaderJob
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream
from vesuvius.volumes.box import Box

_BATCH, _PATCH, _SHAPE = 8, (40, 72, 72), (2048, 2048, 2048)
_IN_FLIGHT = 8  # regions: the first batches wait for all of them
_STEP_S = 0.02  # of a consumer that holds the lock for a share of it


def main() -> None:
    """Parse the command line and measure each cell, threads and processes in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", default="1,2,4,8,16", help="numbers of readers (default: %(default)s)")
    parser.add_argument("--decode-s", type=float, default=1.0, help="wait per region (default: %(default)s)")
    parser.add_argument("--hold", default="0,0.5", help="shares of time with the lock (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of a cell, once its readers are at work (default: %(default)s)"
    )
    parser.add_argument("--threads-only", action="store_true", help="without Ray")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        zarr.create_array(f"{folder}/v.zarr", shape=_SHAPE, chunks=(128, 128, 128), dtype="uint8")  # without chunks
        volumes = (VolumeConfig(path=f"{folder}/v.zarr"),)
        data = DataConfig(volumes=volumes, patch_size=_PATCH, regions_in_flight=_IN_FLIGHT)
        job = prepare_data(0, data).job
        for hold in map(float, args.hold.split(",")):
            for count in map(int, args.readers.split(",")):
                for processes in (False,) if args.threads_only else (False, True):
                    measure(job, StreamOptions(_BATCH, count, processes=processes), args.decode_s, hold, args.seconds)


def measure(job: ReaderJob, options: StreamOptions, decode_s: float, hold: float, seconds: float) -> None:
    """Measure one cell and print it as a line of JSON."""
    read = Reader.read
    slow_down(decode_s)
    if options.processes:
        use_slow_actors(decode_s)
    with PatchStream(job, options) as stream:
        waits_s, batches = 0.0, 0
        while stream.reader_totals.blocks < 2 * _IN_FLIGHT + 3 * options.num_workers:
            next(stream)
        began = time.perf_counter()
        while (elapsed_s := time.perf_counter() - began) < seconds:
            asked = time.perf_counter()
            next(stream)
            waits_s, batches = waits_s + time.perf_counter() - asked, batches + 1
            if hold:
                spin(hold * _STEP_S)
                time.sleep((1 - hold) * _STEP_S)
        ideal = options.num_workers * job.plan.patches_per_region / decode_s
        rate = batches * _BATCH / elapsed_s
        cell = {"hold": hold, "readers": options.num_workers, "processes": options.processes}
        figures = {"patches_s": round(rate), "of_ideal": round(rate / ideal, 2), "waits": round(waits_s / elapsed_s, 2)}
        print(json.dumps(cell | figures), flush=True)
    Reader.read = read  # type: ignore[method-assign]


def slow_down(decode_s: float) -> None:
    """Let each reader of this process wait instead of decoding."""

    def read(self: Reader, volume_index: int, box: Box, out: list[NDArray[Any]]) -> None:
        began = time.perf_counter()
        time.sleep(decode_s)
        for voxels in out:
            np.copyto(voxels, np.uint8(7))
        self._decode_s += time.perf_counter() - began

    Reader.read = read  # type: ignore[method-assign]


def use_slow_actors(decode_s: float) -> None:
    """Let Ray's actors wait, too: their class is sent to them by value."""
    from vesuvius.stream.ray import regions

    actor = getattr(regions, "_actor_of_vesuvius", regions.RayReader)
    regions._actor_of_vesuvius = actor  # type: ignore[attr-defined]
    slow = partial(slow_down, decode_s)

    class SlowReader(actor):  # type: ignore[misc, valid-type]
        def __init__(self, job: list[Any]) -> None:
            slow()
            super().__init__(job)

    regions.RayReader = SlowReader  # type: ignore[misc]


def spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


if __name__ == "__main__":
    sys.exit(main())
