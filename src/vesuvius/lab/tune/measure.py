"""From the records of a trial to its figures: samples a second with an interval, shares, readers, memory.  Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median, stdev
from typing import Any

from vesuvius.engine.memory_plan import CONTEXT_BYTES
from vesuvius.lab.tune.setting import Setting
from vesuvius.lab.tune.trial import Measured
from vesuvius.lab.tune.trial_config import LEAST_SAID, Course
from vesuvius.observe.quantile import quantile
from vesuvius.observe.recent import Moment

Record = Mapping[str, Any]

_CONFIDENCE = 0.95
_BLOCK_STEPS = (4, 8, 16, 32)
_BLOCKS_LEAST = 5
# Computing is warm once it takes no longer than this many times its median; what is slow later is no warm-up.
_WARM_WITHIN = 1.5
_COLD_STEPS_MOST = 10
# A trial's samples a second may be so many times what its readers can keep up, by chance.
_OUTRUN_BY = 1.1
# `system.jsonl` says how busy processors were in the seconds before a record.
_RATES_OVER_S = 10.0


@dataclass(frozen=True)
class Rate:
    """Samples a second.

    Attributes:
        steps: that it is the mean of.
        samples_s: samples by the time at work: pauses are no part of it.
        low, high: 95 % confidence interval.
    """

    steps: int
    samples_s: float
    low: float
    high: float

    def is_narrow(self, half_width: float) -> bool:
        """Whether the interval is no wider than `half_width`, relative to the mean, to both sides.

        Never with fewer steps than blocks can be made of.
        """
        enough = self.steps >= _BLOCKS_LEAST * _BLOCK_STEPS[0]
        return enough and (self.high - self.low) / 2 <= half_width * self.samples_s


def stretches_of(steps: Sequence[Record], course: Course) -> list[list[Record]]:
    """The measured steps of a run, in stretches of consecutive ones.

    Where computing is still slow behind the warm-up (a network that is compiled again for another shape), up to ten
    further steps are left out.  Waiting for data is not looked at: it comes in bursts, and a window that began right
    behind one would be too fast.

    Args:
        steps: the run's records of kind `step`, in order.
    """
    found: list[list[Record]] = [[]]
    for record in steps:
        if course.is_measured(record["step"]):
            found[-1].append(record)
        elif found[-1]:
            found.append([])
    found[0] = _warm(found[0])
    return [stretch for stretch in found if stretch]


def rate_of(stretches: Sequence[Sequence[Record]], samples: int) -> Rate | None:
    """The rate over measured steps; None where there are too few to say anything.

    Args:
        samples: of a step.
    """
    seconds = [[_work_s(record) for record in stretch] for stretch in stretches]
    flat = [each for stretch in seconds for each in stretch]
    if len(flat) < LEAST_SAID:
        return None
    mean, half = fmean(flat), half_width_s(seconds)
    # No faster than the fastest step: the interval of a few steps may be wider than their mean.
    return Rate(len(flat), samples / mean, samples / (mean + half), samples / max(mean - half, min(flat)))


def half_width_s(stretches: Sequence[Sequence[float]]) -> float:
    """Half of the 95 % confidence interval of a mean, by the means of blocks of consecutive values.

    Steps are not independent: data come in bursts, a task of many samples at a time, so that fast steps follow fast
    ones.  Means of blocks that are longer than a burst are nearly independent, and those of shorter ones vary too
    little, which gives too narrow an interval.  How long a burst lasts is not known.  So the widest interval is taken
    over all lengths of which there are at least five blocks; for values that are independent it is a little too wide.
    With too few values for that, each is a block.

    Args:
        stretches: of consecutive values, at least 2 values in all; a block lies within one stretch.
    """
    halves = [
        _half_width(means) for steps in _BLOCK_STEPS if len(means := _block_means(stretches, steps)) >= _BLOCKS_LEAST
    ]
    return max(halves) if halves else _half_width([each for stretch in stretches for each in stretch])


def student_t(freedom: int) -> float:
    """The quantile of Student's t that leaves 2.5 % above it, by its expansion around the normal distribution's.

    Within 0.3 % from 4 degrees of freedom on, 4 % too small with 2.  Abramowitz and Stegun, 26.7.5.
    """
    z = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def reader_seconds(steps: Sequence[Record], measured: Sequence[Record], batch: int) -> tuple[float, float] | None:
    """Seconds that a sample takes one reader, and the part of them that it decodes; None where that cannot be said.

    Readers count whole tasks, each when the first of its samples is cut, though it then lasts for many steps: what is
    counted in a window may be a task too much or too little.  So the count goes from the step before one task was
    counted to that before another: what was counted between was delivered between.  What readers have read ahead is
    in neither.  On a local disk reading is part of decoding.

    Args:
        steps: all records of kind `step`.
        measured: those that are measured; all are taken where too few tasks were counted in these.
        batch: samples of a micro-batch.
    """
    begin = {"readers": {"decode_s": 0.0, "read_s": None}, "feeder": {"batches": 0}}
    for records in (measured, [begin, *steps]):
        seconds = [_reader_s(record) for record in records]
        before = [number for number in range(len(seconds) - 1) if seconds[number + 1] > seconds[number]]
        if len(before) < 2:
            continue
        first, last = records[before[0]], records[before[-1]]
        samples = batch * (last["feeder"]["batches"] - first["feeder"]["batches"])
        decode_s = last["readers"]["decode_s"] - first["readers"]["decode_s"]
        if samples > 0:
            return (_reader_s(last) - _reader_s(first)) / samples, decode_s / samples
    return None


def outruns_readers(rate: float, reader_s: float | None, workers: int) -> bool:
    """Whether samples were consumed faster than readers can deliver them: from what they had read before.

    They finish some tasks ahead, hundreds of samples, while the network is compiled or validates.
    """
    return bool(reader_s and workers) and rate > _OUTRUN_BY * workers / (reader_s or 1.0)


def measure(
    records: Sequence[Record],
    system: Sequence[Record],
    moments: Sequence[Moment],
    setting: Setting,
    course: Course,
    half_width: float,
) -> Measured | None:
    """All figures of a trial that has ended; None where it has fewer than three measured steps or no verdict.

    Where it lived on what readers had read ahead, its rate is what they can keep up.

    Args:
        records: of `metrics.jsonl`.
        system: of `system.jsonl`.
        moments: of `recent.jsonl`.
        half_width: relative; up to this the interval is called narrow.
    """
    steps = [record for record in records if record["kind"] == "step"]
    verdict = next((record for record in reversed(records) if record["kind"] == "verdict"), None)
    stretches = stretches_of(steps, course)
    window = [record for stretch in stretches for record in stretch]
    rate = rate_of(stretches, setting.global_batch)
    if rate is None or verdict is None:
        return None
    work_s = math.fsum(map(_work_s, window))
    share = {name: math.fsum(record[name] for record in window) / work_s for name in ("data_s", "h2d_s", "gpu_s")}
    readers = reader_seconds(steps, window, setting.train_batch_size)
    reader_s, decode_s = readers or (None, None)
    full_s, batches, empty = (_fed(stretches, name) for name in ("full_s", "batches", "ran_empty"))
    fed_s = math.fsum(_work_s(record) for stretch in stretches for record in stretch[1:])
    outrun = outruns_readers(rate.samples_s, reader_s, setting.workers)
    lasting = setting.workers / reader_s / rate.samples_s if outrun and reader_s else 1.0
    trainer_s = work_s * (1 - share["data_s"]) / (rate.steps * setting.global_batch)
    return Measured(
        steps=rate.steps,
        samples_s=lasting * rate.samples_s,
        low=lasting * rate.low,
        high=lasting * rate.high,
        narrow=rate.is_narrow(half_width) and not outrun,
        step_p50_s=quantile([_work_s(record) for record in window], 0.5),
        data_share=1 - trainer_s * lasting * rate.samples_s if outrun else share["data_s"],
        h2d_share=share["h2d_s"],
        compute_share=share["gpu_s"],
        host_share=1 - sum(share.values()),
        bound="data-bound" if outrun else verdict["bound"],
        cause=None if outrun and verdict["bound"] != "data-bound" else verdict["cause"],
        verdict=verdict["text"],
        overrides=tuple(verdict["overrides"]),
        trainer_s=trainer_s,
        reader_s=reader_s,
        decode_s=decode_s,
        buffer_full_share=min(full_s / fed_s, 1.0) if fed_s else 0.0,
        ran_empty_share=empty / batches if batches else 0.0,
        cores_used=cores_used(system, window[0]["time"], window[-1]["time"]),
        ram_bytes=ram_peak_bytes(steps, system, moments),
        vram_bytes=vram_peak_bytes(steps, system, moments),
    )


def cores_used(system: Sequence[Record], begin: float, end: float) -> float | None:
    """Processors that trainer and readers kept busy between two times, on average; None where it was not seen."""
    within = [
        (record["time"], record["trainer_cores"] + math.fsum(record["reader_cores"].values()))
        for record in system
        if begin <= record["time"] <= end and "trainer_cores" in record
    ]
    # The first ones look back to before the window; a short window has no others.
    inside = [cores for time, cores in within if time >= begin + _RATES_OVER_S]
    return fmean(inside) if inside else within[-1][1] if within else None


def ram_peak_bytes(steps: Sequence[Record], system: Sequence[Record], moments: Sequence[Moment]) -> int:
    """Most memory that the run was seen to use."""
    seen = [record["used_bytes"][-1] for record in system] + [moment.used_bytes for moment in moments]
    return int(max([*seen, *(record["ram_used_bytes"] for record in steps)]))


def vram_peak_bytes(steps: Sequence[Record], system: Sequence[Record], moments: Sequence[Moment]) -> int | None:
    """Most that torch had reserved, and what CUDA itself takes; None on a CPU.

    What is in use and not torch's may be other processes' too: no more of it counts than the memory plan takes for
    CUDA itself.
    """
    looks = [record["vram"] for record in system if record.get("vram")]
    reserved = [look["reserved_bytes"][-1] for look in looks]
    reserved += [size for moment in moments if (size := moment.vram_used_bytes) is not None]
    reserved += [size for record in steps if (size := record["vram_used_bytes"]) is not None]
    if not reserved:
        return None
    foreign = [look["total_bytes"] - look["free_bytes"] - look["reserved_bytes"][-1] for look in looks]
    return int(max(reserved) + min(max([0, *foreign]), CONTEXT_BYTES))


def _warm(stretch: Sequence[Record]) -> list[Record]:
    if len(stretch) <= LEAST_SAID:
        return list(stretch)
    own_s = [_work_s(record) - record["data_s"] for record in stretch]
    slow = _WARM_WITHIN * median(own_s)
    most = min(_COLD_STEPS_MOST, len(stretch) // 2, len(stretch) - LEAST_SAID)
    cold = next((number for number in range(most) if own_s[number] <= slow), most)
    return list(stretch[cold:])


def _work_s(record: Record) -> float:
    return float(record["step_s"] - record["pause_s"])


def _reader_s(record: Record) -> float:
    return float(record["readers"]["decode_s"] + (record["readers"]["read_s"] or 0.0))


def _fed(stretches: Iterable[Sequence[Record]], name: str) -> float:
    """How much a counter of the feeder has grown from the first to the last step of each stretch."""
    return math.fsum(stretch[-1]["feeder"][name] - stretch[0]["feeder"][name] for stretch in stretches)


def _block_means(stretches: Iterable[Sequence[float]], steps: int) -> list[float]:
    return [
        fmean(stretch[begin : begin + steps])
        for stretch in stretches
        for begin in range(0, len(stretch) - steps + 1, steps)
    ]


def _half_width(means: Sequence[float]) -> float:
    return student_t(len(means) - 1) * stdev(means) / math.sqrt(len(means))
