"""Compare predicted and measured host memory of short real runs, sampled from outside.

    python tools/bench/ram_plan.py --config configs/demo.yaml
    python tools/bench/ram_plan.py --config FILE --workers 1,2,3 --batch 2,8 data.patches_per_region=4

Each run is a separate `vesuvius train` in a temporary directory.  Every `--every` seconds its memory is sampled as
the monitor does: the private memory of each process, and shared memory (Ray's object store) once.  The largest sum
counts; the table also has the largest sums of each kind of process, whenever they occurred.  Runs are too short for
two executions of Ray to overlap, and the prediction takes that into account.

Paths of volumes in the config are taken from the current directory.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from machine import describe_machine

from vesuvius.commands.cli import naturals
from vesuvius.config import Config
from vesuvius.config.load import dump_config, read_config
from vesuvius.monitor.probes.system_sample import SystemSample, Watcher
from vesuvius.training.forecast.run_plan import RunPlan, plan_run

_MIB = 2**20
KINDS = ("trainer", "readers", "store", "Ray")


@dataclass
class Peak:
    """The largest bytes: of the whole in one sample, and of each kind in any sample."""

    total: int = 0
    kinds: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def add(self, sample: dict[str, int]) -> None:
        self.total = max(self.total, sum(sample.values()))
        self.kinds = {kind: max(self.kinds[kind], sample[kind]) for kind in KINDS}


def main(argv: Sequence[str] | None = None) -> None:
    """Run, compare, print a table, and write it as JSON where asked to."""
    arguments = _parser().parse_args(argv)
    base = read_config(arguments.config, arguments.overrides)
    about = describe_machine(["torch", "ray", "zarr", "numpy"])
    print(f"{about['machine']['cpu']}, {os.cpu_count()} cores, {arguments.config}, {arguments.steps} steps; MiB")
    print("\n| workers | batch | measured | predicted | error | trainer | readers | store | Ray |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    rows = []
    for workers, batch in itertools.product(arguments.workers, arguments.batch or [base.training.micro_batch]):
        config = _short(base, workers, batch, arguments.steps)
        plan = plan_run(config)
        rows.append(_row(workers, batch, plan, _measure(config, arguments.every)))
    print("\nThe last four columns: measured / predicted.")
    if arguments.json:
        arguments.json.write_text(json.dumps(about | {"runs": rows}, indent=1) + "\n", encoding="utf-8")


def _short(config: Config, workers: int, batch: int, steps: int) -> Config:
    """The config with absolute paths, other readers and batches, and one save at the end."""
    volumes = [
        volume.model_copy(update={"path": volume.path if "://" in volume.path else str(Path(volume.path).resolve())})
        for volume in config.data.volumes
    ]
    training = {"workers": workers, "train_batch_size": batch, "max_steps": steps}
    return config.model_copy(
        update={
            "name": "bench_ram_plan",
            "data": config.data.model_copy(update={"volumes": tuple(volumes)}),
            "training": config.training.model_copy(update=training),
        }
    )


def _measure(config: Config, every_s: float) -> Peak:
    """Run a config in its own directory; returns the bytes it held."""
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "bench.yaml"
        source.write_text(dump_config(config), encoding="utf-8")
        command = [sys.executable, "-m", "vesuvius.train", "--config", str(source)]
        peak = Peak()
        with (Path(place) / "output").open("w+b") as output:
            process = subprocess.Popen(command, cwd=place, stdout=output, stderr=output)
            watcher = Watcher(process.pid)
            while process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # the process has just ended
                    peak.add(_kinds(watcher.sample(), process.pid))
                time.sleep(every_s)
            output.seek(0)
            if process.returncode:
                sys.exit(f"the run failed with exit code {process.returncode}:\n{output.read().decode()[-2000:]}")
        return peak


def _kinds(found: SystemSample, pid: int) -> dict[str, int]:
    """Bytes of each kind of process, and of shared memory: Ray's object store."""
    sample = dict.fromkeys(KINDS, 0) | {"store": found.shared_bytes}
    for process in found.processes:
        kind = "trainer" if process.pid == pid else "readers" if process.is_reader else "Ray"
        sample[kind] += process.anon_bytes
    return sample


def _row(workers: int, batch: int, plan: RunPlan, peak: Peak) -> dict[str, float]:
    """Print a row of the table; returns its figures, bytes."""
    parts = {kind: plan.owner_bytes(kind) for kind in KINDS}
    error = plan.ram_bytes / peak.total - 1
    pairs = " | ".join(f"{peak.kinds[kind] / _MIB:.0f} / {parts[kind] / _MIB:.0f}" for kind in KINDS)
    totals = f"{peak.total / _MIB:.0f} | {plan.ram_bytes / _MIB:.0f} | {error:+.1%}"
    print(f"| {workers} | {batch} | {totals} | {pairs} |", flush=True)
    figures = {"workers": workers, "batch": batch, "measured": peak.total, "predicted": plan.ram_bytes}
    measured = {f"measured_{kind.lower()}": peak.kinds[kind] for kind in KINDS}
    return figures | measured | {f"predicted_{kind.lower()}": parts[kind] for kind in KINDS}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the experiment")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="config keys to set")
    parser.add_argument("--workers", type=naturals, default=(0, 1, 2), help="readers of each run (default: 0,1,2)")
    parser.add_argument("--batch", type=naturals, default=(), help="micro-batches of each run (default: the config's)")
    parser.add_argument("--steps", type=int, default=30, help="of each run")
    parser.add_argument("--every", type=float, default=0.25, help="seconds between samples")
    parser.add_argument("--json", type=lambda path: Path(path).absolute(), help="also write the figures to this file")
    return parser


if __name__ == "__main__":
    main()
