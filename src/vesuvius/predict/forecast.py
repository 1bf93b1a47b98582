"""`vesuvius predict --dry-run`: tiles, bytes, memory and time of a prediction, from a few chunks and network calls."""

import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil

from vesuvius.predict.inputs import Inputs
from vesuvius.predict.job import PredictJob
from vesuvius.predict.network import probe_network
from vesuvius.predict.progress import ProgressReporter, kept_heap, one_thread
from vesuvius.predict.run import PredictRequest, Work, prepared
from vesuvius.runlog.files import free_disk_bytes
from vesuvius.runlog.units import format_count, format_duration, format_size, format_sizes
from vesuvius.volumes.box import chunk_ranges, triple

_START_S = 60.0  # for the threads
_SAMPLE = 16  # chunks that are read


def forecast(request: PredictRequest) -> str:
    """Describe the tiles, the bytes fetched, the disk, the memory and the time of a prediction.

    Reads a few chunks, and with a mask the mask; evaluates the network a few times.  Writes nothing.  Raises as
    `predict_volume`.
    """
    with prepared(request) as work:
        active = work.active_blocks(ProgressReporter())
        job = work.job_on(active, work.job.target)
        batches = -(-len(job.tiles) // job.batch_size)
        seconds, peak = measured(work)
        seconds *= batches / max(1, min(work.evaluations, batches))
        disk, where = disk_bytes(work, job, work.blocks_per_group(job, active)), request.out.parent
        volume = job.target.plan.raw_bytes
        processes = f"each of {work.evaluations} workers" if work.uses_ray else "this process"
        return (
            f"volume {format_sizes(job.tiling.shape_zyx)}: {format_count(len(job.tiles), 'tile')} of "
            f"{format_sizes(job.source.patch_zyx)}, {format_count(job.output.channels, 'channel')} {job.output.dtype}\n"
            f"bytes fetched: about {format_size(fetched_bytes(work.inputs, len(job.tiles) / job.source.tiles))}\n"
            f"disk: {format_size(disk)} while it runs, at most {format_size(volume)} for the volume, "
            f"{format_size(free_disk_bytes(where))} free\n"
            f"memory: {format_size(peak)} in {processes}\n"
            f"time: about {format_duration(seconds)}"
        )


def measured(work: Work) -> tuple[float, int]:
    """Return the seconds of a round of network calls, one for each evaluation at a time, and the peak memory."""
    calls = 1 if work.uses_ray else work.evaluations
    threads = 1 if work.uses_ray else 2 * calls  # as `run_locally`; each keeps the memory of its calls
    shape = len(work.inputs.channels), work.job.source.patch_zyx
    started_all, evaluating = threading.Barrier(threads, timeout=_START_S), threading.Semaphore(calls)

    def call(_: int) -> None:
        started_all.wait()  # so that each thread has one call
        with evaluating:
            probe_network(work.network, work.batch_size, *shape, work.device)

    with one_thread(), kept_heap(), ThreadPoolExecutor(threads) as pool:
        list(pool.map(call, range(threads)))  # warm-up
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see `peak_bytes`
        started = time.monotonic()
        list(pool.map(call, range(threads)))
        seconds = (time.monotonic() - started) * calls / threads
    return seconds, peak_bytes() + io_bytes(work.job, work.inputs, calls)


def io_bytes(job: PredictJob, inputs: Inputs, calls: int) -> int:
    """Return the memory of the threads that read and write, as many as call the network."""
    tile, result = math.prod(job.source.patch_zyx), job.channels * math.prod(job.tiling.patch_zyx)
    reading = 4 * job.batch_size * (2 * len(inputs.channels) * tile + result)
    block = math.prod(job.tiling.block_zyx)
    copies = 2 if job.output.blended is None else 1
    writing = block * (4 * (copies * job.channels + 3) + 2 * job.output.channels * job.output.dtype.itemsize)
    staging = max(2 * math.prod(array.grid.block_zyx) * array.volume.dtype.itemsize for array in inputs.arrays)
    return calls * (reading + max(writing, staging))


def disk_bytes(work: Work, job: PredictJob, per_group: int) -> int:
    """Return the largest size of tiles and staged blocks: rows along z over two groups of blocks and one more row."""
    tiling, rows = job.tiling, 2 + -(-2 * per_group // math.prod(job.tiling.block_grid[1:]))
    depth = min(rows * tiling.block_zyx[0] + 2 * tiling.patch_zyx[0], tiling.shape_zyx[0])
    tiles = len(job.tiles) * min(1.0, depth / tiling.shape_zyx[0])
    staged = sum(
        math.prod(array.grid.shape_zyx)
        * array.volume.dtype.itemsize
        * min(1.0, (depth / tiling.shape_zyx[0] + array.grid.block_zyx[0] / array.grid.shape_zyx[0]))
        for array in work.inputs.arrays
    )
    return int(4 * job.channels * math.prod(tiling.patch_zyx) * tiles + staged)


def fetched_bytes(inputs: Inputs, share: float) -> int:
    """Estimate the stored bytes of a share of all chunks from a few of them.  Raises DataError."""
    total, rng = 0.0, np.random.default_rng(0)
    for array in inputs.arrays:
        ranges = chunk_ranges(array.needed(inputs.box), array.volume.chunk_zyx)
        count, before = math.prod(map(len, ranges)), array.volume.source.stats.bytes_fetched
        chosen = rng.choice(count, min(count, _SAMPLE), replace=False)
        for index in zip(*np.unravel_index(chosen, [*map(len, ranges)]), strict=True):
            chunk = triple(each[int(i)] for each, i in zip(ranges, index, strict=True))
            array.volume.read(array.volume.grid.box_of(chunk))
        if len(chosen):
            total += count * (array.volume.source.stats.bytes_fetched - before) / len(chosen)
    return int(share * total)


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    return peak[0] if peak else psutil.Process(os.getpid()).memory_info().rss
