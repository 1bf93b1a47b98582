"""What profiling costs: profiled steps against other steps of the same run, in turns.

    python tools/bench/profile_cost.py --config configs/demo.yaml training.train_batch_size=12

A profiled turn has what `vesuvius profile` adds to `vesuvius train`: its observer between two steps, and a record of
the monitor each second instead of every ten.  Turns go A B B A, so that drift disturbs both alike; the first two
steps of a turn are left out.  Wall time is that of the step clock, including what lies between the steps; processor
time is that of all threads of the trainer's process.  Figures are means over pairs of turns, with a bench's interval.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from vesuvius.training.request import Request

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: as `vesuvius train` does

import numpy as np

from vesuvius.config.load import read_config
from vesuvius.errors import EXIT_OK
from vesuvius.experiments.paired import compare_one_of
from vesuvius.experiments.profile.observer import Observed, Observer
from vesuvius.experiments.profile.session import profiled
from vesuvius.monitor.monitor import Monitor
from vesuvius.monitor.verdict import Verdict
from vesuvius.runlog.logfile import log_to_terminal
from vesuvius.runlog.records import read_records
from vesuvius.stream.stream import PatchStream
from vesuvius.training.loop import TrainingLoop, Tuner
from vesuvius.training.reporting.report import StepReporter
from vesuvius.training.run import train
from vesuvius.training.step.device import DeviceFeed

_LEFT_OUT = 2  # of each turn
_WARM = 10  # before the first turn
_ENDLESS = 10**6


class Turns:
    """A tuner that profiles in every other turn, and notes the processor time behind each step."""

    def __init__(self, loop: TrainingLoop, reporter: StepReporter, turn_steps: int, pairs: int) -> None:
        self._loop, self._reporter, self._turn_steps, self._turns = loop, reporter, turn_steps, 2 * pairs
        self._made = -_WARM
        self._observer: Observer | None = None
        self.cpu_s: list[float] = []

    def take(self, verdict: Verdict) -> None:
        """Nothing follows from it."""

    def act(self, stream: PatchStream, feed: DeviceFeed, monitor: Monitor) -> None:
        """Between two steps: end a turn, begin the next, or go on."""
        self.cpu_s.append(time.process_time())
        self._made += 1
        turn, place = divmod(self._made, self._turn_steps)
        if turn == self._turns:
            self._loop.run.stop.ask(EXIT_OK, "all turns are made")
        elif place == 0 and turn >= 0:
            on = is_profiled(turn)
            self._observer = self._new_observer() if on else None
            monitor._samples_per_record = 1 if on else 10
        if self._observer is not None:
            self._observer.act(stream, feed, monitor)

    def ended(self) -> None:
        """Nothing is left to do."""

    def _new_observer(self) -> Observer:
        return Observer(self._loop, self._reporter, Observed(), _ENDLESS, 0, None, lambda: None)


def is_profiled(turn: int) -> bool:
    """A B B A.  Pure."""
    return turn % 4 in (0, 3)


def ratios(each_step: np.ndarray, turn_steps: int, pairs: int) -> np.ndarray:
    """Profiled over plain, a pair of turns each, from the figures of all steps behind the warm-up.  Pure."""
    turns = each_step[: 2 * pairs * turn_steps].reshape(2 * pairs, turn_steps)[:, _LEFT_OUT:]
    middles = np.median(turns, axis=1)
    found = [
        middles[n] / middles[n + 1] if is_profiled(n) else middles[n + 1] / middles[n] for n in range(0, 2 * pairs, 2)
    ]
    return np.array(found)


def main() -> None:
    """Train, then print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--turn-steps", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=20)
    args = parser.parse_intermixed_args()
    log_to_terminal()
    steps = _WARM + 2 * args.pairs * args.turn_steps
    made: list[Turns] = []

    def make_tuner(loop: TrainingLoop, reporter: StepReporter) -> Tuner:
        made.append(Turns(loop, reporter, args.turn_steps, args.pairs))
        return made[0]

    with tempfile.TemporaryDirectory(prefix="profile-cost-") as folder:
        os.environ["VESUVIUS_RUNS"] = folder
        config = profiled(read_config(args.config, args.overrides), "cost", steps)
        train(Request(config, args.config, resume=False, make_tuner=make_tuner))
        records = read_records(Path(folder) / "cost" / "metrics.jsonl")
        wall_s = np.array([record["step_s"] for record in records if record["kind"] == "step"])[_WARM:]
    cpu_s = np.diff(made[0].cpu_s)[_WARM - 1 :]
    pairs = min(args.pairs, len(wall_s) // (2 * args.turn_steps))  # fewer where the run was stopped
    if not pairs:
        sys.exit("no pair of turns was made")
    print(f"{pairs} pairs of turns of {args.turn_steps} steps; median step {statistics.median(wall_s):.3f} s")
    for name, each in (("wall time", wall_s), ("processor time", cpu_s)):
        found = ratios(each, args.turn_steps, pairs)
        cost = compare_one_of([(each, 1.0) for each in found.tolist()], cells=1)
        quarter, three = (f"{100 * (each - 1):+.2f}" for each in np.quantile(found, [0.25, 0.75]))
        print(f"{name}: profiled {cost.text}; half of the pairs {quarter} to {three}")


if __name__ == "__main__":
    main()
