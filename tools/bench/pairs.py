"""Count how often `vesuvius bench` orders two programs of known speed correctly on this machine, and covers the truth.

    python tools/bench/pairs.py                # 10 benches with the defaults of `vesuvius bench`; 22 minutes
    python tools/bench/pairs.py --slower 1.03 --seconds 1

Both programs multiply matrices; a sample of one takes `--slower` times as many products as one of the other, so that
the truth is known whatever else runs on the machine.  Each measurement is a process, as in any bench, and every other
round is in reverse order.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from vesuvius.experiments.paired import Comparison, compare_one_of

_PRODUCTS = 100  # of a sample of the faster one
_PROGRAM = """
import sys, time
import numpy as np

products, seconds = int(sys.argv[1]), float(sys.argv[2])
matrix, samples, began = np.ones((128, 128), np.float32), 0, time.perf_counter()
while (elapsed_s := time.perf_counter() - began) < seconds:
    for _ in range(products):
        matrix = matrix @ matrix / 128
    samples += 1
print(samples / elapsed_s)
"""


def bench_pair(slower: float, rounds: int, seconds: float) -> Comparison:
    """Speed of the slower program over that of the faster one."""
    products, pairs = [_PRODUCTS, round(slower * _PRODUCTS)], []
    for number in range(rounds):
        rates = {}
        for count in products[:: -1 if number % 2 else 1]:
            command = [sys.executable, "-c", _PROGRAM, str(count), str(seconds)]
            rates[count] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        pairs.append((rates[products[1]], rates[products[0]]))
    return compare_one_of(pairs, cells=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benches", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--slower", type=float, default=1.1)
    args = parser.parse_args()
    truth, right, held = 1 / args.slower, 0, 0
    for number in range(args.benches):
        speed = bench_pair(args.slower, args.rounds, args.seconds)
        low, high = speed.ends or (speed.gain, speed.gain)
        right, held = right + (speed.gain < 0), held + (1 + low <= truth <= 1 + high)
        print(f"{number + 1}: {speed.text}, load {os.getloadavg()[0]:.1f}", flush=True)
    print(f"order right in {right} of {args.benches}; {truth:.3f} within the interval in {held}")


if __name__ == "__main__":
    main()
