"""How often `vesuvius bench` ranks two programs of known speed correctly on this machine.

    python tools/bench/pairs.py                # 10 benches with the defaults of `vesuvius bench`; 22 minutes
    python tools/bench/pairs.py --slower 1.03 --seconds 1

Both programs multiply matrices; a sample of one takes `--slower` times as many products as one of the other, so that
the truth is known whatever else the machine does.  Each measurement is a process, as in any bench.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from vesuvius.benchmark.cells.command import measure_command
from vesuvius.benchmark.cells.training import Bounds, Lab
from vesuvius.benchmark.grid import Cell
from vesuvius.benchmark.ledger import BenchLedger, Measurement
from vesuvius.benchmark.results import Result, results_of
from vesuvius.config.load import parse_stored

_PRODUCTS = 100  # of a sample of the faster one
_PROGRAM = """
import json, sys, time
import numpy as np

products, seconds = int(sys.argv[1]), float(sys.argv[-1].partition("=")[2])
matrix, samples, began = np.ones((128, 128), np.float32), 0, time.perf_counter()
while (elapsed_s := time.perf_counter() - began) < seconds:
    for _ in range(products):
        matrix = matrix @ matrix / 128
    samples += 1
print(json.dumps({"samples_s": samples / elapsed_s}))
"""
_CONFIG = {"name": "pairs", "data": {"volumes": [{"path": "none"}], "patch_size": [8, 8, 8]}}


def bench_pair(slower: float, rounds: int, seconds: float, folder: Path) -> Result:
    """The result of the slower one over the faster one."""
    products = [_PRODUCTS, round(slower * _PRODUCTS)]
    cells = [Cell(f"{n} products", (), (sys.executable, "-c", _PROGRAM, str(n))) for n in products]
    config, lab = parse_stored(_CONFIG), Lab(folder, Bounds(seconds, 600.0), None)

    def measure(cell: int, round: int) -> Measurement:
        blank = Measurement(cell, round, "ok")
        return measure_command(lab, cells[cell].command, config, blank)

    ledger = BenchLedger(folder / "ledger.json", {})
    ledger.measure_rounds(2, rounds, measure, lambda done: None)
    return results_of(cells, ledger.measurements)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benches", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--slower", type=float, default=1.1)
    args = parser.parse_args()
    truth, right, held = 1 / args.slower, 0, 0
    for number in range(args.benches):
        with tempfile.TemporaryDirectory() as folder:
            speed = bench_pair(args.slower, args.rounds, args.seconds, Path(folder)).speed
        assert speed is not None, "both were measured"
        right, held = right + (speed.mid < 1), held + (speed.low <= truth <= speed.high)
        load = f"load {os.getloadavg()[0]:.1f}"
        print(
            f"{number + 1}: {speed.mid:.3f} ({speed.low:.3f} to {speed.high:.3f}, {speed.level:.1%}), {load}",
            flush=True,
        )
    print(f"order right in {right} of {args.benches}; {truth:.3f} within the interval in {held}")


if __name__ == "__main__":
    main()
