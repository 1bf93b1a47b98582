"""From the records of a trial to its figures: samples a second, shares, readers, memory.  Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from vesuvius.engine.memory_plan import CONTEXT_BYTES
from vesuvius.lab.tune.terms.setting import Setting
from vesuvius.lab.tune.terms.trial import Measured
from vesuvius.lab.tune.trials.config import Course
from vesuvius.lab.tune.trials.rate import Rate, Record, rate_of, stretches_of, work_s
from vesuvius.observe.quantile import quantile
from vesuvius.observe.recent import Moment

# A trial's samples a second may be so many times what its readers can keep up, by chance.
_OUTRUN_BY = 1.1
# `system.jsonl` says how busy processors were in the seconds before a record.
_RATES_OVER_S = 10.0


@dataclass(frozen=True)
class TaskSize:
    """What a reader gets to read at a time.

    Attributes:
        samples: of a task.
        blocks: regions that they are cut from, each delivered as a block.
    """

    samples: int
    blocks: int

    def period(self, setting: Setting) -> float:
        """Steps after which bursts repeat: each reader has then delivered a task."""
        return max(setting.workers, 1) * self.samples / setting.global_batch


@dataclass(frozen=True)
class Pace:
    """How fast a trial was, and whether its readers can keep that up.

    Attributes:
        stretches: the records of the measured steps, consecutive ones together; `window` is all of them.
        rate: as it was.
        reader_s, decode_s: seconds that a sample takes one reader, and the part that it decodes; None = not known.
        outrun: whether it lived on what readers had read before.
        lasting: what readers can keep up, by the rate; 1 where they can keep up all of it.
    """

    stretches: list[list[Record]]
    window: list[Record]
    rate: Rate
    reader_s: float | None
    decode_s: float | None
    outrun: bool
    lasting: float


def pace_of(steps: Sequence[Record], setting: Setting, course: Course, task: TaskSize | None) -> Pace | None:
    """The pace of a trial; None where it has fewer than three measured steps.

    Args:
        steps: its records of kind `step`, in order.
        task: None = not known, and then nothing is known of its readers.
    """
    stretches = stretches_of(steps, course)
    window = [record for stretch in stretches for record in stretch]
    rate = rate_of(stretches, setting.global_batch, None if task is None else task.period(setting))
    if rate is None:
        return None
    reader_s, decode_s = (task and reader_seconds(steps, window, task)) or (None, None)
    outrun = outruns_readers(rate.samples_s, reader_s, setting.workers)
    lasting = setting.workers / reader_s / rate.samples_s if outrun and reader_s else 1.0
    return Pace(stretches, window, rate, reader_s, decode_s, outrun, lasting)


def reader_seconds(steps: Sequence[Record], measured: Sequence[Record], task: TaskSize) -> tuple[float, float] | None:
    """Seconds that a sample takes one reader, and the part of them that it decodes; None where nothing was read.

    Readers count their blocks, and each gives the same number of samples, whether these are delivered by now or not.
    What is read while everything is cold is left out where as many blocks as a task has were counted later.  On a
    local disk reading is part of decoding.

    Args:
        steps: all records of kind `step`.
        measured: those that are measured; all are taken where no whole task was counted in these.
    """
    nothing = {"readers": {"decode_s": 0.0, "read_s": None, "blocks": 0}}
    for first, last, least in (
        (measured[0], measured[-1], task.blocks),
        (steps[0], steps[-1], task.blocks),
        (nothing, steps[-1], 1),
    ):
        blocks = last["readers"]["blocks"] - first["readers"]["blocks"]
        if blocks >= least:
            samples = blocks * task.samples / task.blocks
            decode_s = last["readers"]["decode_s"] - first["readers"]["decode_s"]
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
    task: TaskSize | None,
) -> Measured | None:
    """All figures of a trial that has ended; None where it has fewer than three measured steps or no verdict.

    Where it lived on what readers had read ahead, its rate is what they can keep up, and its shares are those that it
    would have then.

    Args:
        records: of `metrics.jsonl`.
        system: of `system.jsonl`.
        moments: of `recent.jsonl`.
        half_width: relative; up to this the interval is called narrow.
        task: as in `pace_of`.
    """
    steps = [record for record in records if record["kind"] == "step"]
    verdict = next((record for record in reversed(records) if record["kind"] == "verdict"), None)
    pace = pace_of(steps, setting, course, task)
    if pace is None or verdict is None:
        return None
    rate, window, lasting = pace.rate, pace.window, pace.lasting
    return Measured(
        steps=rate.steps,
        samples_s=lasting * rate.samples_s,
        low=lasting * rate.low,
        high=lasting * rate.high,
        narrow=rate.is_narrow(half_width) and not pace.outrun,
        step_p50_s=quantile([work_s(record) for record in window], 0.5),
        reader_s=pace.reader_s,
        decode_s=pace.decode_s,
        cores_used=cores_used(system, window[0]["time"], window[-1]["time"]),
        ram_bytes=ram_peak_bytes(steps, system, moments),
        vram_bytes=vram_peak_bytes(steps, system, moments),
        **_shares(pace, setting),
        **_feeding(pace.stretches),
        **_judged(pace, verdict),
    )


def _shares(pace: Pace, setting: Setting) -> dict[str, Any]:
    """Of the time of a step, as long as it is at the lasting pace: all that it is longer is waiting for data."""
    working_s = math.fsum(map(work_s, pace.window))
    share = {name: math.fsum(record[name] for record in pace.window) / working_s for name in _TIMES}
    others = 1 - share["data_s"]
    return {
        "data_share": 1 - pace.lasting * others,
        "h2d_share": pace.lasting * share["h2d_s"],
        "compute_share": pace.lasting * share["gpu_s"],
        "host_share": pace.lasting * (1 - sum(share.values())),
        "trainer_s": working_s * others / (pace.rate.steps * setting.global_batch),
    }


_TIMES = ("data_s", "h2d_s", "gpu_s")


def _feeding(stretches: Sequence[Sequence[Record]]) -> dict[str, Any]:
    """How often the places ahead were full, and how often empty."""
    full_s, batches, empty = (_fed(stretches, name) for name in ("full_s", "batches", "ran_empty"))
    fed_s = math.fsum(work_s(record) for stretch in stretches for record in stretch[1:])
    return {
        "buffer_full_share": min(full_s / fed_s, 1.0) if fed_s else 0.0,
        "ran_empty_share": empty / batches if batches else 0.0,
    }


def _judged(pace: Pace, verdict: Record) -> dict[str, Any]:
    """What held the run up: its own verdict, which does not know that it lived on what had been read before."""
    if not pace.outrun:
        bound, cause, text, overrides = (verdict[name] for name in ("bound", "cause", "text", "overrides"))
        return {"bound": bound, "cause": cause, "verdict": text, "overrides": tuple(overrides)}
    found = verdict["bound"] == "data-bound"
    cause = verdict["cause"] if found else None
    kind = "data-bound" if cause is None else f"data-bound ({cause})"
    rate = pace.rate.samples_s
    text = (
        f"{kind}: lived on what readers had read ahead: they give {pace.lasting * rate:.3g} samples/s, it consumed "
        f"{rate:.3g}"
    )
    overrides = tuple(verdict["overrides"]) if found else ()
    return {"bound": "data-bound", "cause": cause, "verdict": text, "overrides": overrides}


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


def _reader_s(record: Record) -> float:
    return float(record["readers"]["decode_s"] + (record["readers"]["read_s"] or 0.0))


def _fed(stretches: Iterable[Sequence[Record]], name: str) -> float:
    """How much a counter of the feeder has grown from the first to the last step of each stretch."""
    return math.fsum(stretch[-1]["feeder"][name] - stretch[0]["feeder"][name] for stretch in stretches)
