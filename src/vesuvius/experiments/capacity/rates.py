"""Rates of stores, of decoding and of steps: given, measured here, or None = unknown."""

import itertools
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vesuvius.errors import ConfigError, DataError, one_line
from vesuvius.report.records import read_run
from vesuvius.stream.reading.reader import Reader, ReaderJob, region_in
from vesuvius.stream.reading.reader_stats import ReaderTotals
from vesuvius.stream.start.prepare import PreparedData

_READ_S, _PINGS = 2.0, 5


@dataclass(frozen=True)
class Rates:
    """Rates of a store and of decoding."""

    remote: bool = True  # chunks are fetched ahead, with `data.store.requests` in flight
    latency_s: float | None = None  # of a request, without its bytes
    request_bytes_s: float | None = None  # of one request
    node_bytes_s: float | None = None  # of all requests of a node
    requests_s: float | None = None  # of all nodes
    decode_bytes_s: float | None = None  # decoded bytes per CPU second
    compression: float | None = None  # decoded bytes per byte fetched
    source: str = "given"  # of the last two


STORES = {
    # docs/scale.md names the source of each figure.
    "s3": Rates(latency_s=0.15, request_bytes_s=85e6, requests_s=5500.0),
    "http": Rates(),
    "local": Rates(remote=False, latency_s=0.0),
}


def recorded_step_s(folder: Path, patches: int) -> float:
    """Return the median time of the recorded steps of a run, profile or bench trial, scaled to `patches` per rank.

    Waits for data and pauses are left out.  Raises ConfigError: the folder has no records of steps.
    """
    records = read_run(folder)
    counted = records.timed & ~records.first
    if not counted.any():
        raise ConfigError(f"{folder} has no records of steps; choose the folder of a run, a profile or a bench trial")
    of_rank = records.columns["samples"] / max(len(records.ranks), 1)
    work_s = records.columns["work_s"] - records.columns["data_s"]
    return float(np.median((work_s * patches / of_rank)[counted]))


def measured(data: PreparedData, rates: Rates) -> Rates:
    """Measure what is unknown: the latency by reading metadata, the cost of reading by reading a few regions."""
    volume = next((array for arrays in data.arrays for array in arrays if array.source.remote), None)
    if rates.latency_s is None and volume:
        times_s = list[float]()
        for _ in range(_PINGS):
            began = time.perf_counter()
            volume.source.get(volume.node.key, cached=False)
            times_s.append(time.perf_counter() - began)
        rates = replace(rates, latency_s=statistics.median(times_s))
    if rates.decode_bytes_s is None or rates.compression is None:
        try:
            decode_bytes_s, compression, source = _reading_cost(data.job)
        except DataError as error:
            return replace(rates, source=f"not measured: {one_line(error)}")
        decode_bytes_s, compression = rates.decode_bytes_s or decode_bytes_s, rates.compression or compression
        rates = replace(rates, decode_bytes_s=decode_bytes_s, compression=compression, source=source)
    return rates


def _reading_cost(job: ReaderJob) -> tuple[float | None, float | None, str]:
    """Read regions of the plan for about two seconds, at least two.  Raises DataError: they cannot be read."""
    reader, began, cpu_s, totals = Reader(job, 1), time.monotonic(), 0.0, ReaderTotals()
    try:
        for slot in itertools.count():
            started_s = time.process_time()
            (block,) = reader.blocks((slot,))
            region = region_in(block, job)
            if slot and region.report:  # the first one touches fresh memory
                cpu_s, totals = cpu_s + time.process_time() - started_s, totals.plus(region.report.done)
                if time.monotonic() - began > _READ_S:
                    break
    finally:
        reader.close()
    regions = f"{totals.blocks} regions of {Path(job.data.volumes[0].path).name}"
    if not totals.bytes_fetched:
        return None, None, f"not measured: no chunk of {regions} is stored"
    return (
        totals.bytes_read / max(cpu_s, 1e-9),
        totals.bytes_read / totals.bytes_fetched,
        f"measured here, on {regions}",
    )
