"""`python -m vesuvius.benchmark.cells.loader SYSTEM --config FILE --seconds S --result FILE`: measures a loader.

`vesuvius` is the data path of the config; the others read random patches of its first volume.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import traceback
from pathlib import Path

import numpy as np

from vesuvius.benchmark.cells.peers import Batches, Figures, Setup, run_feed, touch, uniform_feed
from vesuvius.config import Config
from vesuvius.config.load import read_config
from vesuvius.errors import one_line
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream
from vesuvius.volumes.store.object_store import is_remote, open_store

OURS = "vesuvius"
PEERS = {"zarr-python": "zarr", "zarrs": "zarrs", "tensorstore": "tensorstore"}
"""Other loaders, with the package that each needs."""
_DEMAND = 2 / 3
"""Of what the loader delivers, by a trainer that should not wait."""


class OurFeed:
    """`PatchStream` into a ring of three buffers, as a trainer with a GPU has it."""

    def __init__(self, config: Config) -> None:
        self._job = job = prepare_data(config.seed, config.data).job
        self._options = options = StreamOptions.from_config(config.training, config.cluster)
        tasks = math.lcm(job.plan.samples_per_task, options.batch_size) // options.batch_size
        self.round_batches = max(options.workers, 1) * tasks  # whole tasks of each reader
        self.warmup_batches = max(2 * self.round_batches, -(-job.plan.regions_in_flight // options.batch_size))
        self._stream: PatchStream | None = None
        self.wait_share: float | None = None

    def batches(self) -> Batches:
        shape = (self._options.batch_size, *self._job.plan.patch_zyx)
        ring = [np.empty(shape, self._job.dtype) for _ in range(3)]
        with PatchStream(self._job, self._options, buffers=ring) as self._stream:
            for batch in self._stream:
                yield batch.patches

    def worker_pids(self) -> list[int]:
        return list(self._stream.readers) if self._stream and self._options.workers else []

    def wait(self, batches_s: float, seconds: float) -> float:
        """The share of the time that a consumer waits which sleeps so long that it needs 2/3 of these batches."""
        step_s, waited_s, steps = 1 / (_DEMAND * batches_s), 0.0, 0
        batches = self.batches()
        for _ in range(self.warmup_batches):
            touch(next(batches))
        began = time.perf_counter()
        while time.perf_counter() - began < seconds or steps < self.round_batches:
            time.sleep(step_s)
            asked = time.perf_counter()
            touch(next(batches))
            waited_s, steps = waited_s + time.perf_counter() - asked, steps + 1
        batches.close()
        return waited_s / (time.perf_counter() - began)


def measure(system: str, config: Config, seconds: float) -> Figures:
    """The figures of one loader.  Raises whatever it raises."""
    if system != OURS:
        setup = setup_of(config, seconds)
        return run_feed(uniform_feed(system, setup), seconds)  # type: ignore[arg-type]
    feed = OurFeed(config)
    figures = run_feed(feed, seconds)
    batches_s = (figures["samples_s"] or math.nan) / config.training.train_batch_size
    return figures | {"wait_share": feed.wait(batches_s, seconds)}


def setup_of(config: Config, seconds: float) -> Setup:
    """What the others read."""
    volume, training = config.data.volumes[0], config.training
    store = open_store(volume.path, config.data.store) if is_remote(volume.path) else None
    return Setup(
        volume.path,
        volume.level,
        config.data.patch_size,
        training.train_batch_size,
        training.workers,
        seconds,
        unsigned="skip_signature" in getattr(store, "config", {}),
    )


def main() -> int:
    """Measure, and write the figures as JSON; the exit code is 1 where that fails, and `error` there says why."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=(OURS, *PEERS))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    try:
        args.result.write_text(json.dumps(measure(args.system, read_config(args.config), args.seconds)))
    except Exception as error:
        traceback.print_exc()
        # An error of a DataLoader's worker has its own traceback for a message; the cause is its last line.
        lines = [line for line in str(error).splitlines() if line.strip()]
        text = one_line(f"{type(error).__name__}: {lines[-1] if lines else ''}", 300)
        args.result.write_text(json.dumps({"error": text}))
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
