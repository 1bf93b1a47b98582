"""Compare what `vesuvius plan` predicts with real runs: readers, ranks and store latencies, on any machine.

    python tools/bench/capacity.py [--seconds 20] [--folder DIR]

A synthetic scroll lies behind an HTTP server that delays each answer.  A rank is a process that takes batches from the
stream and sleeps between them; that stands for a step, whose time as measured is given to the plan (`--step-s`).  Each
line compares patches/s of all ranks, the data wait, requests and kB per patch, and the bytes decoded per CPU second:
those that the command measures first, and those of the run's reading threads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from machine import served

from vesuvius.config import Config
from vesuvius.config.load import parse_stored
from vesuvius.experiments.capacity.node import Machines, NodePlan
from vesuvius.experiments.capacity.rates import STORES, measured
from vesuvius.runlog.units import format_percent
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream
from vesuvius.volume_tools.phantom import write_phantom

_BATCH, _IN_FLIGHT, _SHAPE = 4, 16, [512, 2048, 2048]
_COLUMNS = "readers ranks latency requests step  | patches/s: plan, run, off | wait | requests | kB | decoding GB/s"


@dataclass(frozen=True)
class Case:
    readers: int  # of a rank
    ranks: int
    latency_ms: int
    requests: int  # data.store.requests
    step_ms: int
    processes: bool = False


CASES = (
    Case(1, 1, 300, 8, 20),
    Case(2, 1, 300, 8, 20),
    Case(4, 1, 300, 8, 60),
    Case(1, 1, 30, 1, 20),
    Case(4, 1, 30, 1, 20),
    Case(2, 2, 300, 8, 20),
    Case(2, 1, 300, 8, 20, processes=True),
)


def main() -> None:
    """Parse the command line and print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a run (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the volume is kept (default: a temporary folder)")
    parser.add_argument("--only", type=int, help="number of a case, from 1")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(args.rank[0], Case(**json.loads(args.rank[1])), int(args.rank[2]), float(args.rank[3]))
        return
    with ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not (volume := folder / "large.zarr").exists():
            write_large(folder / "scroll.zarr", volume)
        print(_COLUMNS, flush=True)
        for case in CASES if args.only is None else (CASES[args.only - 1],):
            with served(folder, case.latency_ms) as url:
                compare(f"{url}/large.zarr", case, args.seconds)


def compare(url: str, case: Case, seconds: float) -> None:
    """Predict a case, run it, and print both."""
    config = config_of(url, case)
    data = prepare_data(0, config.data, world_size=case.ranks)
    rates = measured(data, STORES["http"])
    node = NodePlan(config, data, Machines(case.ranks, 1, 2 + case.ranks), rates)
    command = [sys.executable, __file__, "--rank", url, json.dumps(asdict(case))]
    ranks = [
        subprocess.Popen([*command, str(rank), str(seconds)], stdout=subprocess.PIPE, text=True)
        for rank in range(case.ranks)
    ]
    reals = [json.loads(rank.communicate()[0]) for rank in ranks]
    plan_s, plan_wait = node.simulate(max(real["step_s"] for real in reals), case.readers)
    names, patches_s, mean = (
        ("wait", "requests", "bytes", "decode"),
        sum(real["patches_s"] for real in reals),
        node.mean,
    )
    wait, requests, size, decode = (sum(real[name] for real in reals) / len(reals) for name in names)
    print(
        f"{case.readers:7} {case.ranks:5} {case.latency_ms:4} ms {case.requests:8} {case.step_ms:3} ms "
        f"{'Ray' if case.processes else '   '} | {plan_s:6.1f} {patches_s:6.1f} "
        f"{100 * (plan_s / patches_s - 1):+5.1f} % | "
        f"{format_percent(plan_wait)} {format_percent(wait)} | "
        f"{mean.requests / mean.patches:.3f} {requests:.3f} | "
        f"{mean.fetched_bytes / mean.patches / 1e3:.0f} {size / 1e3:.0f} | "
        f"{(rates.decode_bytes_s or 0) / 1e9:.2f} {'-' if case.processes else f'{decode / 1e9:.2f}'}",
        flush=True,
    )


def write_large(phantom: Path, volume: Path) -> None:
    """Write a volume of 2 GB from the chunks of a small one: links, so that it takes no time and no space."""
    write_phantom(phantom, (128, 256, 256), 0, chunk=64)
    chunks = itertools.cycle(
        sorted(path for path in (phantom / "0").rglob("*") if path.is_file() and path.name.isdecimal())
    )
    metadata = json.loads((phantom / "0" / ".zarray").read_text()) | {"shape": _SHAPE}
    for z, y, x in itertools.product(*(range(size // 64) for size in _SHAPE)):
        (folder := volume / f"{z}/{y}").mkdir(parents=True, exist_ok=True)
        os.link(next(chunks), folder / str(x))
    (volume / ".zarray").write_text(json.dumps(metadata))


def config_of(path: str, case: Case) -> Config:
    data = {"volumes": [{"path": path}], "patch_size": [40, 72, 72], "stream_gib": 0.05, "resident": 0}
    data |= {"regions_in_flight": _IN_FLIGHT, "store": {"requests": case.requests}}
    training = {"train_batch_size": _BATCH, "accumulate_steps": 1, "ranks": case.ranks}
    training["workers"] = case.readers if case.processes else 0
    return parse_stored({"name": "capacity", "data": data, "training": training})


def run_rank(url: str, case: Case, rank: int, seconds: float) -> None:
    """Take batches for a time, once the readers are at work, and print the figures."""
    data = prepare_data(0, config_of(url, case).data, rank, case.ranks)
    with PatchStream(data.job, StreamOptions(_BATCH, case.readers, processes=case.processes)) as stream:
        per_task = data.plan.regions_per_task if case.processes else 1
        while stream.reader_totals.blocks < _IN_FLIGHT / case.ranks + 3 * case.readers * per_task:
            next(stream)
            time.sleep(case.step_ms / 1e3)
        before, began, cpu_s = stream.reader_totals, time.perf_counter(), reading_cpu_s()
        wait_s, batches = 0.0, 0
        while (took_s := time.perf_counter() - began) < seconds:
            asked = time.perf_counter()
            next(stream)
            wait_s, batches = wait_s + time.perf_counter() - asked, batches + 1
            time.sleep(case.step_ms / 1e3)
        cpu_s, read = reading_cpu_s() - cpu_s, stream.reader_totals.plus(before, sign=-1)
    figures = {"patches_s": batches * _BATCH / took_s, "wait": wait_s / took_s, "step_s": (took_s - wait_s) / batches}
    figures["decode"] = read.bytes_read / max(cpu_s, 1e-9)
    regions = read.blocks * data.plan.patches_per_region / data.plan.reads_per_region(case.ranks)
    print(json.dumps(figures | {"requests": read.requests / regions, "bytes": read.bytes_fetched / regions}))


def reading_cpu_s() -> float:
    """CPU seconds of the threads that fetch and decode."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    threads = psutil.Process().threads()
    return sum(each.user_time + each.system_time for each in threads if names.get(each.id) in ("reader", "fetch"))


if __name__ == "__main__":
    main()
