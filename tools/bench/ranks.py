"""Predict step time by number of ranks: for GPUs, or next to measurements of `vesuvius bench --ranks`.

    python tools/bench/ranks.py                       # 8, 64 and 512 GPUs, from the figures below or given ones
    python tools/bench/ranks.py --step-s 2.9 --parameters 155e6 --samples 4 --node-gbit 200 --store-gbit 100
    python tools/bench/ranks.py --measured runs/NAME/benches/TIME/benchmark_results.json
    python tools/bench/ranks.py --through-ray --config C.yaml training.max_steps=30   # overhead of Ray Train

The prediction uses the step of one rank alone and two figures of the machine: the slowdown of a rank while other ranks
and Ray's own processes run (measured: steps of this network in N processes without exchange, next to an idle Ray with
as many actors as Ray Train has), and the time of an all-reduce of the gradient's bytes (here in a loop).

    step = compute x crowding + exposed + agreement,  exposed = max(0, all-reduce - overlap x last backward pass)
    all-reduce of a ring = 2 (N - 1) / N x bytes / bandwidth + 2 (N - 1) x latency
    data: if readers or the store deliver fewer samples/s than this, they limit the speed

On CPUs nothing hides the all-reduce, as its sums take the cores of the backward pass.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import vesuvius.stream.ray  # noqa: F401  sets Ray's environment, which has to be there before Ray is imported

# isort: split
import ray

from vesuvius.config import Config
from vesuvius.config.load import dump_config, parse_stored, read_config
from vesuvius.diffusion.schedule import Schedule
from vesuvius.runlog.records import read_records
from vesuvius.training.step.setup import build_network
from vesuvius.training.step.step import TrainStep

CPU = torch.device("cpu")
_NODE_GPUS, _COMPUTE_S = 8, 8.0
_ACTORS = 8  # in addition to the ranks: Ray Train's controller and its helpers


@dataclass(frozen=True)
class Link:
    """The link of an all-reduce: bytes/s of each rank's share, and seconds of one hop."""

    bytes_s: float
    latency_s: float


@dataclass(frozen=True)
class Workload:
    """One rank's share of a step."""

    compute_s: float  # of all its micro-batches
    last_backward_s: float  # of these, the backward pass that the all-reduce may hide behind
    gradient_bytes: float
    samples: int  # of one rank and step
    readers_samples_s: float = float("inf")  # what one rank's readers deliver
    store_samples_s: float = float("inf")  # what the store delivers to all ranks together
    overlap: float = 0.8  # share of that backward pass that hides the all-reduce: it starts with the first full bucket


def all_reduce_s(ranks: int, gradient_bytes: float, link: Link) -> float:
    """Seconds of a ring all-reduce.  Pure."""
    return 2 * (ranks - 1) / ranks * gradient_bytes / link.bytes_s + 2 * (ranks - 1) * link.latency_s


def step_s(work: Workload, ranks: int, link: Link, crowding: float = 1.0, agreement_s: float = 0.0) -> float:
    """Predicted seconds of a step.  Pure.

    Args:
        crowding: slowdown of a rank while the others compute.
        agreement_s: of the exchange before each step.
    """
    hidden_s = work.overlap * work.last_backward_s * crowding
    exposed_s = max(0.0, all_reduce_s(ranks, work.gradient_bytes, link) - hidden_s) if ranks > 1 else 0.0
    pace_s = work.compute_s * crowding + exposed_s + (agreement_s if ranks > 1 else 0.0)
    data_s = max(work.samples / work.readers_samples_s, ranks * work.samples / work.store_samples_s)
    return max(pace_s, data_s)


def predict(args: argparse.Namespace) -> None:
    """Print step time, speed-up and days for 20 TB at 1 to 512 GPUs."""
    work = Workload(
        args.step_s,
        args.step_s * 0.6,
        4 * args.parameters,
        args.samples,
        args.readers_samples_s,
        args.store_gbit * 1e9 / 8 / args.bytes_per_sample,
    )
    voxels = args.terabytes * 1e12
    print(f"{args.terabytes:g} TB = {voxels / args.voxels_per_sample:.3g} patches; one GPU: {args.step_s:g} s a step")
    _print_row("GPUs", "step s", "samples/s", "speed-up", "efficiency", "days for one pass")
    _print_row(*["---"] * 6)
    alone = work.samples / step_s(work, 1, Link(1, 0))
    for ranks in (1, 8, 64, 512):
        gbit = args.nvlink_gbit if ranks <= _NODE_GPUS else args.node_gbit / _NODE_GPUS
        seconds = step_s(work, ranks, Link(gbit * 1e9 / 8, 2e-5), agreement_s=2e-4 + 2e-5 * ranks)
        rate = ranks * work.samples / seconds
        days = voxels / args.voxels_per_sample / rate / 86400
        speed_up = rate / alone
        _print_row(ranks, f"{seconds:.3g}", f"{rate:.3g}", f"{speed_up:.3g}", f"{speed_up / ranks:.0%}", f"{days:.3g}")


def _print_row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |")


def compare(path: Path) -> None:
    """Print measured and predicted figures; the prediction starts from the cell of one rank."""
    found = json.loads(path.read_text())
    config, cells = parse_stored(found["config"]), [each for each in found["results"] if each["samples_s"]]
    one = cells[0]["figures"]
    alone = measure_together(1, config)
    print(f"gradient {alone['gradient_bytes'] / 1e6:.2f} MB, {os.cpu_count()} cores")
    _print_row(
        "ranks", "step s", "samples/s", "efficiency", "comm s", "crowding", "all-reduce s", "predicted s", "error"
    )
    _print_row(*["---"] * 9)
    for cell in cells:
        count, got = cell["ranks"], cell["figures"]
        with _ray_at_rest() if count > 1 else nullcontext():
            together = measure_together(count, config) if count > 1 else alone
        crowding = together["compute_s"] / alone["compute_s"]
        seconds = predicted_s(one["step_s"], one["compute_s"], crowding, together) if count > 1 else one["step_s"]
        error = f"{seconds / got['step_s'] - 1:+.1%}"
        efficiency = "-" if cell["efficiency"] is None else f"{cell['efficiency']:.0%}"
        figures = (f"{got['step_s']:.4f}", f"{cell['samples_s']:.2f}", efficiency, f"{got['comm_s']:.4f}")
        modelled = (f"{crowding:.2f}", f"{together['all_reduce_s']:.4f}", f"{seconds:.4f}")
        _print_row(count, *figures, *modelled, error)


@contextmanager
def _ray_at_rest() -> Iterator[None]:
    """Ray with idle actors: each of its processes wakes a hundred times a second."""
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        actors: list[Any] = [ray.remote(num_cpus=0)(_Idle).remote() for _ in range(_ACTORS)]
        ray.get([actor.__ray_ready__.remote() for actor in actors])
        yield
    finally:
        ray.shutdown()


class _Idle:
    pass


def predicted_s(one_step_s: float, one_compute_s: float, crowding: float, together: dict[str, float]) -> float:
    """Predicted seconds of a step of CPU ranks, from the step of one rank and what was measured with N.  Pure."""
    computed_s = one_compute_s * crowding + one_step_s - one_compute_s
    return computed_s + together["all_reduce_s"] + together["barrier_s"]


def measure_together(ranks: int, config: Config) -> dict[str, float]:
    """Seconds of an all-reduce of the gradient, of a barrier, and of a step while all ranks compute one.

    Returns:
        all_reduce_s, barrier_s, compute_s (without exchange), and gradient_bytes.
    """
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder) / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        _run_ranks(ranks, [__file__, "--as-rank", str(path)])
        found: dict[str, float] = json.loads(path.with_suffix(".json").read_text())
    return found


def _measure_as_rank(path: Path) -> None:
    """The part of one rank of `measure_together`; rank 0 writes the result next to the config."""
    config = read_config(path)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = TrainStep(config, build_network(config, CPU), Schedule.from_config(config.diffusion), CPU)
    gradient = torch.cat([parameter.detach().flatten() for parameter in step.network.parameters()])
    sums, barriers = [], []
    for _ in range(30):
        barriers.append(timeit.timeit(dist.barrier, number=1))
        sums.append(timeit.timeit(lambda: dist.all_reduce(gradient), number=1))
    _compute(step, config)
    dist.barrier()
    count, began = 0, time.perf_counter()
    while time.perf_counter() < began + _COMPUTE_S or count < 3:
        _compute(step, config)
        count += 1
    computed = torch.tensor((time.perf_counter() - began) / count)
    _compute(step, config)  # so that a slower rank does not run alone
    dist.all_reduce(computed, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        seconds = {"all_reduce_s": statistics.median(sums[5:]), "barrier_s": statistics.median(barriers[5:])}
        figures = seconds | {"compute_s": computed.item(), "gradient_bytes": gradient.nbytes}
        path.with_suffix(".json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def _compute(step: TrainStep, config: Config) -> None:
    """One step of one rank: random data, no exchange."""
    batch, patch_size = config.training.micro_batch, config.data.patch_size
    channels = config.condition_channels
    condition = torch.zeros(batch, channels, *patch_size) if channels else None
    x_0, t = torch.zeros(batch, 1, *patch_size), np.full(batch, config.diffusion.timesteps // 2)
    for _ in range(config.training.accumulate_steps):
        step.accumulate(x_0, np.arange(batch), t, condition)
    step.apply(config.training.lr)


_WAYS = {
    "in the process": "from vesuvius.launch.launch import launch",
    "through Ray Train": "from vesuvius.launch.ray_train import train_with_ray as launch",
}
_ONE_RANK = """
import sys
from pathlib import Path
from vesuvius.config.load import read_config
from vesuvius.training.request import Request
from vesuvius.runlog.logfile import log_to_terminal
{launch}
log_to_terminal()
path = Path(sys.argv[1])
sys.exit(launch(Request(read_config(path, sys.argv[2:]), path, False)))
"""


def through_ray(config: Path, overrides: Sequence[str], rounds: int) -> None:
    """Print start and steps of one rank in the process of the command and in a worker of Ray Train, alternating."""
    figures: dict[str, list[tuple[float, float]]] = {way: [] for way in _WAYS}
    for _ in range(rounds):
        for way, launch in _WAYS.items():
            with tempfile.TemporaryDirectory() as runs:
                program = ["-c", _ONE_RANK.format(launch=launch), str(config.resolve()), *overrides]
                environment = os.environ | {"VESUVIUS_RUNS": runs, "OMP_NUM_THREADS": "1"}
                began = time.time()
                subprocess.run(
                    [sys.executable, *program], env=environment, check=True, stdout=subprocess.DEVNULL, timeout=1800
                )
                (metrics,) = Path(runs).glob("*/metrics.jsonl")
                steps = [record for record in read_records(metrics) if record["kind"] == "step"]
                first = steps[0]["time"] - steps[0]["step_s"] - began
                figures[way].append((first, statistics.median(step["step_s"] for step in steps[2:])))
    _print_row("one rank", "start of the first step, s", "median step, s")
    _print_row(*["---"] * 3)
    for way, found in figures.items():
        starts, steps_s = zip(*found, strict=True)
        _print_row(way, f"{statistics.median(starts):.1f}", f"{statistics.median(steps_s):.4f}")
    rounds_of_both = list(zip(*figures.values(), strict=True))
    ratios = [through[1] / plain[1] - 1 for plain, through in rounds_of_both]
    starts_s = [through[0] - plain[0] for plain, through in rounds_of_both]
    print(f"a step takes {statistics.median(ratios):+.1%} (rounds {min(ratios):+.1%} to {max(ratios):+.1%})")
    print(f"the start takes {statistics.median(starts_s):+.1f} s")


def _run_ranks(ranks: int, arguments: list[str]) -> None:
    """Start ranks with torchrun, one thread each, and wait for them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, timeout=1800, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, metavar="JSON", help="of a bench here; compare it instead")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--through-ray", action="store_true", help="measure the overhead of Ray Train with one rank")
    parser.add_argument("--config", type=Path, help="of that run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each of the two ways")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="of that run")
    parser.add_argument("--step-s", type=float, default=2.9, help="measured step of one GPU, s")
    parser.add_argument("--samples", type=int, default=8, help="samples of one GPU and step")
    parser.add_argument("--parameters", type=float, default=155.3e6)
    parser.add_argument("--readers-samples-s", type=float, default=300.0, help="what one rank's readers deliver")
    parser.add_argument("--bytes-per-sample", type=float, default=1.4e6, help="read from the store per patch")
    parser.add_argument("--voxels-per-sample", type=float, default=72 * 136 * 136)
    parser.add_argument("--terabytes", type=float, default=20.0, help="voxels of one byte")
    parser.add_argument("--nvlink-gbit", type=float, default=2400.0, help="of one GPU within a node")
    parser.add_argument("--node-gbit", type=float, default=200.0, help="network of a node of 8 GPUs")
    parser.add_argument("--store-gbit", type=float, default=100.0, help="of the volume store, to all nodes")
    args = parser.parse_intermixed_args()
    if args.as_rank:
        _measure_as_rank(args.as_rank)
    elif args.through_ray:
        through_ray(args.config, args.overrides, args.rounds)
    elif args.measured:
        compare(args.measured)
    else:
        predict(args)


if __name__ == "__main__":
    main()
