"""How much of a training step is spent waiting for data when the readers could deliver more than is asked for.

A step that sleeps stands for the GPU, so the readers have the cores, as they have beside a GPU.  First the capacity of
the stream is measured, then the loop runs at a share of it (1/1.5 by default) and its waits are added up.  Measuring
the capacity leaves nothing ahead, so the readers first get ahead again at the slower pace: those waits are told apart.

    python tools/bench_wait.py [--volume PATH] [--workers 2] [--margin 1.5] [--steps 600] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

from vesuvius.config import AugmentConfig, DataConfig, VolumeConfig
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.prepare import prepare_data
from vesuvius.stream.stream import PatchStream


def main() -> None:
    """Measure and print one line; with --json also write it."""
    arguments = _parser().parse_args()
    z, y, x = map(int, arguments.patch.split(","))
    config = DataConfig(
        volumes=(VolumeConfig(path=arguments.volume),), patch_size=(z, y, x), augment=AugmentConfig(turn=y == x)
    )
    job = prepare_data(0, config).job
    options = StreamOptions(arguments.batch, arguments.workers)
    round_batches = arguments.workers * math.lcm(job.plan.samples_per_task, arguments.batch) // arguments.batch
    with PatchStream(job, options) as stream:
        for _ in range(3 * round_batches):
            next(stream)
        capacity = _batches_per_s(stream, 4 * round_batches)
        step_s = arguments.margin / capacity
        first = _waits(stream, step_s, 2 * round_batches)
        waits = _waits(stream, step_s, arguments.steps)
    figures = {
        "workers": arguments.workers,
        "batch": arguments.batch,
        "capacity_patches_s": capacity * arguments.batch,
        "demand_patches_s": arguments.batch / step_s,
        "steps": arguments.steps,
        "waiting_share": sum(waits) / (sum(waits) + arguments.steps * step_s),
        "wait_median_s": statistics.median(waits),
        "wait_max_s": max(waits),
        "settling_steps": len(first),
        "share_with_settling": sum(first + waits) / (sum(first + waits) + len(first + waits) * step_s),
    }
    print("  ".join(f"{key} {value:.4g}" for key, value in figures.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--volume", default="volumes/bench_512x1024x1024.zarr", help="made by tools/bench_ingest.py")
    parser.add_argument("--patch", default="72,136,136", help="z,y,x voxels")
    parser.add_argument("--batch", type=int, default=8, help="patches of a step")
    parser.add_argument("--workers", type=int, default=2, help="reader processes")
    parser.add_argument("--margin", type=float, default=1.5, help="capacity over demand")
    parser.add_argument("--steps", type=int, default=600, help="steps measured")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    return parser


def _batches_per_s(stream: PatchStream, count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        next(stream)
    return count / (time.perf_counter() - started)


def _waits(stream: PatchStream, step_s: float, steps: int) -> list[float]:
    """Seconds that each step waited for its batch."""
    waits = []
    for _ in range(steps):
        started = time.perf_counter()
        next(stream)
        waits.append(time.perf_counter() - started)
        time.sleep(step_s)
    return waits


if __name__ == "__main__":
    main()
