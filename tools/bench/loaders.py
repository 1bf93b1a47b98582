"""Compare a config's data path with other loaders: patches per second, in separate processes, in rounds.

    python tools/bench/loaders.py --config C.yaml [--peer NAME=COMMAND] [--rounds 6] [--seconds 10] [key.path=value ...]

The baseline is zarr-python behind a torch DataLoader; zarrs and tensorstore are measured if they are installed.  They
read random patches of the first volume (on disk, http(s), s3 or gs), vesuvius reads as the config says.  A loader is
read as fast as it delivers, without a training step, after its buffers have been used up twice (`feeds.py`).  The data
wait is that of a consumer that takes two thirds of what vesuvius delivers.  Every other round is in reverse order, so
that drift of the machine cancels.

A peer is any command: it receives --volume, --level, --patch, --batch, --workers, --seconds and --result, the file into
which it writes JSON with `samples_s`, and `start_s` and optional others.  `tools/bench/peers.py` of commit 2dbf4e9b has
grain, SPDL, MONAI and others.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from feeds import Batches, Figures, Setup, run_feed, touch, uniform_feed
from pairs import turns

from vesuvius import PatchLoader
from vesuvius.config import AugmentConfig, Config
from vesuvius.config.load import dump_config, read_config
from vesuvius.experiments.bench.results import speed_words
from vesuvius.experiments.paired import compare_one_of
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.reading.resident import Resident
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream
from vesuvius.training.forecast.plan import plan_resident
from vesuvius.volumes.store.objects import is_remote, open_store

OURS = "vesuvius"
LOADER = "PatchLoader"
"""`PatchStream`, and what a loop of one's own takes."""
PEERS = {"zarr-python": "zarr", "zarrs": "zarrs", "tensorstore": "tensorstore"}
"""Other loaders, with the package that each needs."""
_NO_SYMMETRIES = AugmentConfig(flip=False, rot90=False)
_DEMAND = 2 / 3
"""Of what the loader delivers, by a trainer that should not wait."""


class OurFeed:
    """`PatchStream`, as training reads it: on a CPU `DeviceFeed.copy` copies nothing.

    If the run keeps the volumes in memory (`data.resident`), the warm-up is two passes over them.
    """

    def __init__(self, config: Config) -> None:
        data = prepare_data(config.seed, config.data)
        self._job = job = data.job
        self.resident = plan_resident(config, data)[0] > 0
        self._options = options = StreamOptions.from_config(config.training, config.cluster)
        tasks = math.lcm(job.plan.samples_per_task, options.batch_size) // options.batch_size
        self.round_batches = max(options.num_workers, 1) * tasks  # whole tasks of each reader
        two_passes = 2 * job.plan.slots_per_pass * job.plan.patches_per_region
        warmup = two_passes if self.resident else job.plan.regions_in_flight
        self.warmup_batches = max(2 * self.round_batches, -(-warmup // options.batch_size))
        self._stream: PatchStream | None = None

    def batches(self) -> Batches:
        resident = Resident(self._job) if self.resident else None
        with PatchStream(self._job, self._options, resident=resident) as self._stream:
            for batch in self._stream:
                yield batch.patches

    def worker_pids(self) -> list[int]:
        return list(self._stream.readers) if self._stream and self._options.processes else []

    def wait(self, batches_s: float, seconds: float) -> float:
        """Data wait, as a share of time, of a consumer that sleeps so long that it takes 2/3 of these batches."""
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


class OurLoader(OurFeed):
    """Feed of `PatchLoader`, voxels as stored: on a CPU, without symmetries and normalization."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._data, self._seed = config.data.model_copy(update={"augment": _NO_SYMMETRIES}), config.seed

    def batches(self) -> Batches:
        options = self._options
        with PatchLoader(
            self._data,
            batch_size=options.batch_size,
            num_workers=options.num_workers,
            processes=options.processes,
            prefetch_factor=options.prefetch_factor,
            seed=self._seed,
            normalize=False,
            device="cpu",
            cache_in_memory=self.resident,
        ) as loader:
            self._stream = loader.stream
            for batch in loader:
                yield batch.image.numpy()


def measure(system: str, config: Config, seconds: float) -> Figures:
    """Measure one loader.  Errors of the loader propagate."""
    if system not in (OURS, LOADER):
        return run_feed(uniform_feed(system, setup_of(config, seconds)), seconds)  # type: ignore[arg-type]
    feed = OurFeed(config) if system == OURS else OurLoader(config)
    figures = run_feed(feed, seconds)
    batches_s = (figures["samples_s"] or math.nan) / config.training.micro_batch
    return figures | {"wait_share": feed.wait(batches_s, seconds), "resident": float(feed.resident)}


def setup_of(config: Config, seconds: float) -> Setup:
    """The setup for other loaders."""
    volume, training = config.data.volumes[0], config.training
    store = open_store(volume.path, config.data.store) if is_remote(volume.path) else None
    return Setup(
        volume.path,
        volume.level,
        config.data.patch_size,
        training.micro_batch,
        training.workers,
        seconds,
        unsigned="skip_signature" in getattr(store, "config", {}),
    )


def commands(config: Config, source: Path, seconds: float, peers: list[str]) -> dict[str, list[str]]:
    """The command of each loader, the baseline first."""
    setup, here = setup_of(config, seconds), [sys.executable, str(Path(__file__).resolve())]
    found = {
        f"torch DataLoader + {name}": [*here, "--config", str(source), "--measure", name]
        for name, package in PEERS.items()
        if find_spec(package)
    }
    found |= {name: [*here, "--config", str(source), "--measure", name] for name in (OURS, LOADER)}
    options = [f"--volume={setup.volume}", f"--level={setup.level}", f"--patch={','.join(map(str, setup.patch_zyx))}"]
    options += [f"--batch={setup.batch}", f"--workers={setup.workers}"]
    for peer in peers:
        name, equals, command = peer.partition("=")
        if not equals:
            raise SystemExit(f"--peer must have the form NAME=COMMAND, not {peer!r}")
        found[name] = [*shlex.split(command), *options]
    return found


def run_rounds(loaders: dict[str, list[str]], rounds: int, seconds: float, folder: Path) -> dict[str, list[Figures]]:
    """The figures of each loader in each round; a loader that fails is skipped in later rounds."""
    found: dict[str, list[Figures]] = {name: [] for name in loaders}
    for number, name in turns(list(loaders), rounds):
        if name not in found:
            continue
        result = folder / "result.json"
        result.unlink(missing_ok=True)
        done = subprocess.run(
            [*loaders[name], f"--seconds={seconds}", f"--result={result}"], capture_output=True, text=True
        )
        if done.returncode or not result.exists():
            print(f"{name} failed and is skipped: {(done.stderr.splitlines() or ['no output'])[-1]}", flush=True)
            del found[name]
            continue
        found[name].append(json.loads(result.read_text()))
        print(f"round {number + 1} of {rounds}: {name}: {figures_words(found[name][-1:])}", flush=True)
    return found


def figures_words(rounds: list[Figures]) -> str:
    """The median patches/s, CPU and largest worker of some rounds."""
    words = {"samples_s": "{:.4g} patches/s", "cpu_ms": "CPU {:.3g} ms a patch", "worker_bytes": "worker {:.0f} MiB"}
    parts = []
    for key, form in words.items():
        if known := [value for each in rounds if (value := each.get(key)) is not None]:
            parts.append(form.format(median(known) / (2**20 if key == "worker_bytes" else 1)))
    return ", ".join(parts + ["resident"] * bool(rounds and rounds[-1].get("resident")))


def main() -> None:
    """Measure all loaders in rounds and print the table; with --measure, one loader once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--measure", choices=(OURS, LOADER, *PEERS), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    config = read_config(args.config, args.overrides)
    if args.measure:
        args.result.write_text(json.dumps(measure(args.measure, config, args.seconds)))
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "config.yaml"
        source.write_text(dump_config(config), encoding="utf-8")
        loaders = commands(config, source, args.seconds, args.peer)
        found = run_rounds(loaders, args.rounds, args.seconds, Path(folder))
    base, *others = found.items()
    print(f"\n{base[0]}: median {figures_words(base[1])}")
    for name, figures in others:
        rates = [(a["samples_s"], b["samples_s"]) for a, b in zip(figures, base[1], strict=False)]
        pairs = [(a, b) for a, b in rates if a and b]
        wait = [share for each in figures if (share := each.get("wait_share")) is not None]
        print(
            f"{name}: median {figures_words(figures)}, "
            + (speed_words(compare_one_of(pairs, len(others)), base[0]) if pairs else "speed not known")
            + (f", data wait {100 * median(wait):.1f} %" if wait else "")
        )


if __name__ == "__main__":
    main()
