"""A thread that looks at memory every second and writes min, mean and max every ten."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from vesuvius.config import MonitorConfig
from vesuvius.observe.append_file import AppendFile
from vesuvius.observe.logfile import DATE_FORMAT
from vesuvius.observe.memory import GIB, MemoryUse, measure_memory
from vesuvius.observe.records import JsonLines

log = logging.getLogger(__name__)


class Monitor:
    """Samples memory until stopped.  A context manager.

    Args:
        config: how often.
        system_file: `system.jsonl`.
        log_file: `monitor.log`, one plain line each time.
        readers: returns bytes of private memory by pid of each reader, as last heard.
    """

    def __init__(
        self, config: MonitorConfig, system_file: Path, log_file: Path, readers: Callable[[], Mapping[int, int]]
    ) -> None:
        self._config = config
        self._records = JsonLines(system_file)
        self._lines = AppendFile(log_file)
        self._readers = readers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self.latest: MemoryUse = measure_memory()
        self._thread.start()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._records.close()
        self._lines.close()

    def _run(self) -> None:
        per_line = max(round(self._config.write_every_s / self._config.sample_every_s), 1)
        samples: list[MemoryUse] = []
        stopped = False
        while not stopped:
            stopped = self._stop.wait(self._config.sample_every_s)
            try:
                self.latest = measure_memory()
                samples.append(self.latest)
                if stopped or len(samples) >= per_line:
                    self._write(samples)
                    samples = []
            except Exception:  # a monitor must not end the run it watches; the log says that it is blind
                log.warning("the monitor could not look at memory; it goes on trying", exc_info=True)

    def _write(self, samples: list[MemoryUse]) -> None:
        readers = dict(self._readers())
        self._records.write(
            "memory",
            samples=len(samples),
            limit_bytes=samples[-1].limit_bytes,
            anon_bytes=_min_mean_max([s.anon_bytes for s in samples]),
            shared_bytes=_min_mean_max([s.shared_bytes for s in samples]),
            used_bytes=_min_mean_max([s.used_bytes for s in samples]),
            reader_anon_bytes={str(pid): value for pid, value in readers.items()},
        )
        top = max(s.used_bytes for s in samples) / GIB
        each = " ".join(f"{pid}:{value / GIB:.2f}" for pid, value in sorted(readers.items())) or "-"
        limit = samples[-1].limit_bytes / GIB
        self._lines.write_line(f"{time.strftime(DATE_FORMAT)} INFO ram_gib {top:.2f}/{limit:.1f} readers_gib {each}")


def _min_mean_max(values: list[int]) -> dict[str, float]:
    return {"min": min(values), "mean": sum(values) / len(values), "max": max(values)}
