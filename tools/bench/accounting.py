"""Compare the accounted memory of a run with the kernel's own account of it.

    python tools/bench/accounting.py -- python -m vesuvius.train --config configs/demo.yaml

Runs a command in a new memory cgroup and samples it every second, as the monitor does: private memory of all its
processes and shared memory once (`SystemSample.used_bytes`) against what the kernel charges the cgroup with (version 1
`total_rss` + `total_shmem`, version 2 `anon` + `shmem`).  Prints the median and the largest difference in percent of
the kernel's figure, and the CPU time of a sample.  Needs root.

Sources of the difference: a sample takes some milliseconds, during which a run may grow, and a process that ends in
between counts in one figure only (samples without such a change have their own line); pages that a fork shares count
twice; only the cgroup counts shared memory that no process holds open any more.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the tests use the same cgroups

from tests.support.real_cgroup import MemoryCgroup, memory_cgroup

from vesuvius.monitor.probes.system_sample import Watcher
from vesuvius.runlog.units import GIB

_RAY_ENDS_S = 5.0


@dataclass(frozen=True)
class Sample:
    """One comparison."""

    accounted_bytes: int  # by us
    charged_bytes: int  # by the kernel
    shared_bytes: int  # the part of ours that is shared memory
    cpu_s: float  # CPU time of our sample
    processes: int
    steady: bool  # same processes as in the previous sample

    @property
    def difference(self) -> float:
        """Share of the kernel's figure, with its sign."""
        return self.accounted_bytes / self.charged_bytes - 1


def watch(
    command: Sequence[str], group: MemoryCgroup, every_s: float, seconds: float | None
) -> tuple[list[Sample], int]:
    """Run a command in a cgroup and sample it until it ends, or for some seconds.  Returns samples and exit status."""
    began = time.monotonic()
    samples: list[Sample] = []
    before: set[int] = set()
    process = group.popen(command)
    watcher = Watcher(process.pid)
    try:
        while process.poll() is None and (seconds is None or time.monotonic() - began < seconds):
            time.sleep(every_s)
            started = time.thread_time()
            try:
                sample = watcher.sample()
            except ProcessLookupError:
                break
            cpu_s = time.thread_time() - started
            now = {use.pid for use in sample.processes}
            if sample.cgroup is not None and sample.cgroup.path.endswith(group.path.name):
                charged = max(sample.cgroup.anon_bytes + sample.cgroup.shmem_bytes, 1)
                count, steady = len(sample.processes), now == before
                samples.append(Sample(sample.used_bytes, charged, sample.shared_bytes, cpu_s, count, steady))
            before = now
    finally:
        process.terminate()
        process.wait()
    return samples, process.returncode


def report(samples: Sequence[Sample]) -> None:
    """Print the comparison."""
    for name, chosen in (("all samples", samples), ("processes unchanged", [s for s in samples if s.steady])):
        if not chosen:
            print(f"{name}: none")
            continue
        differences = [sample.difference for sample in chosen]
        print(
            f"{name}: {len(chosen)}, difference median {100 * statistics.median(map(abs, differences)):.2f} %, "
            f"largest {100 * max(differences, key=abs):+.2f} %"
        )
    top = max(samples, key=lambda sample: sample.charged_bytes)
    print(
        f"peak: accounted {top.accounted_bytes / GIB:.3f} GiB, cgroup {top.charged_bytes / GIB:.3f} GiB; "
        f"shared memory at most {max(sample.shared_bytes for sample in samples) / GIB:.3f} GiB"
    )
    costs = [1000 * sample.cpu_s for sample in samples]
    print(
        f"a sample: median {statistics.median(costs):.2f} ms, largest {max(costs):.2f} ms of CPU time, "
        f"{max(sample.processes for sample in samples)} processes at most"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every-s", type=float, default=1.0, help="seconds between samples")
    parser.add_argument("--seconds", type=float, help="stop the command (SIGTERM) after this many seconds")
    parser.add_argument("--table", action="store_true", help="print each sample")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, after --")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("no command to run; give it after --")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that neither command nor cgroup is left behind
    with memory_cgroup(None) as group:
        samples, status = watch(command, group, arguments.every_s, arguments.seconds)
        time.sleep(_RAY_ENDS_S)
    if arguments.table:
        for number, sample in enumerate(samples):
            print(
                f"{number:4d} accounted {sample.accounted_bytes / GIB:7.3f} cgroup {sample.charged_bytes / GIB:7.3f} "
                f"GiB {100 * sample.difference:+6.2f} % processes {sample.processes}"
                f"{'' if sample.steady else ' changed'}"
            )
    if samples:
        report(samples)
    else:
        print("the command ended before the first sample, or its cgroup could not be read", file=sys.stderr)
    return 0 if samples and (status == 0 or arguments.seconds is not None) else 1


if __name__ == "__main__":
    sys.exit(main())
