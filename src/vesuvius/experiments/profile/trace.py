"""A few steps under torch.profiler: a trace for Chrome, of limited size, and the longest operators."""

from __future__ import annotations

import gzip
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

TOP = 10
MOST_EVENTS = 150_000  # about 3 MB compressed
SNAPSHOT = "memory_snapshot.pickle"


@dataclass(frozen=True)
class Operator:
    """An operator: calls and own milliseconds of a step, and its share of all operators' own time."""

    name: str
    calls: float
    self_ms: float
    share: float


class Trace:
    """Records from `start` to `stop`, between two steps each, on the thread that trains.

    Args:
        device: on a GPU its kernels are recorded, and operators are ranked by their time there.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._profiler = profile(activities=activities, record_shapes=False, profile_memory=True, with_stack=False)

    def start(self) -> None:
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
        self._profiler.start()

    def stop(self) -> None:
        self._profiler.stop()

    def operators(self, steps: int) -> list[Operator]:
        """The ones that took longest themselves, longest first."""
        averages = self._profiler.key_averages()
        of = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        spent = [(float(getattr(each, of)), str(each.key), int(each.count)) for each in averages]
        spent = [each for each in spent if not each[1].startswith("ProfilerStep")]
        whole = sum(us for us, _, _ in spent) or 1.0
        return [
            Operator(name, count / steps, us / 1000 / steps, us / whole)
            for us, name, count in sorted(spent, reverse=True)[:TOP]
            if us > 0
        ]

    def write(self, path: Path, most_events: int = MOST_EVENTS) -> int:
        """Write the trace, compressed; returns how many events were left out: the shortest ones.

        On a GPU, a snapshot of its memory goes to the same folder.
        """
        if self._on_gpu:
            torch.cuda.memory._dump_snapshot(str(path.with_name(SNAPSHOT)))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        with tempfile.TemporaryDirectory(prefix="vesuvius-trace-") as folder:
            whole = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(whole))
            trace = json.loads(whole.read_bytes())
        trace["traceEvents"], left_out = longest(trace["traceEvents"], most_events)
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as file:
            file.write(json.dumps(trace))  # far faster than `dump`
        return left_out


def longest(events: list[dict[str, Any]], most: int) -> tuple[list[dict[str, Any]], int]:
    """At most so many events: the ones that name things, then the longest; and how many are left out.  Pure."""
    ordered = sorted(events, key=lambda event: (event.get("ph") != "M", -float(event.get("dur", 0.0))))
    return ordered[:most], max(len(events) - most, 0)
