"""What to change so that a process does not die of the same again, overrides included.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vesuvius.monitor.memory.trend import MIN_POINTS, theil_sen
from vesuvius.monitor.postmortem.cause import NEARLY_FULL
from vesuvius.monitor.postmortem.death import Cause, Victim, share_of
from vesuvius.monitor.recent import MemorySample
from vesuvius.runlog.units import GIB, size_text

_MB = 10**6
_SUDDEN_S = 10.0
_LEAST_SPAN_S = 5.0
_LEAST_GROWTH = 1 * _MB  # bytes a second; slower, and an hour of it is what a machine has to spare
_BELOW_THE_KILL = 0.9


@dataclass(frozen=True)
class Growth:
    """Who took most memory in a span of time."""

    # who, span: for people
    who: str
    bytes_per_s: float  # the median slope, which no single peak moves
    now_bytes: int  # what it came to
    span: str = "the last minute"


def fastest_growth(moments: Sequence[MemorySample]) -> Growth | None:
    """What grew most: the trainer, a reader, the shared memory, or processes that are none of the run's.

    Of growth that began in the last seconds the median of a minute shows nothing, so they are asked where it is silent.
    None where nothing grew by at least 1 MB/s, or too little was seen.
    """
    if not moments:
        return None
    sudden = [moment for moment in moments if moment.time >= moments[-1].time - _SUDDEN_S]
    if (growth := _fastest(moments, "the last minute")) or len(sudden) < MIN_POINTS:
        return growth
    return _fastest(sudden, f"the last {_SUDDEN_S:.0f} s")


def _fastest(moments: Sequence[MemorySample], span: str) -> Growth | None:
    last = moments[-1]
    series = {
        "the trainer": [(m.time, m.trainer_bytes) for m in moments],
        "shared memory, such as Ray's object store,": [(m.time, m.shared_bytes) for m in moments],
        "something outside this run": [
            (m.time, m.killer_used_bytes - m.used_bytes) for m in moments if m.killer == last.killer
        ],
        **{f"reader {pid}": _of_reader(moments, pid) for pid in {pid for m in moments for pid in m.reader_bytes}},
    }
    grown = [Growth(who, _slope(points), points[-1][1], span) for who, points in series.items()]
    fastest = max(grown, key=lambda growth: growth.bytes_per_s)
    return fastest if fastest.bytes_per_s >= _LEAST_GROWTH else None


def _slope(points: Sequence[tuple[float, int]]) -> float:
    """Bytes a second; 0 where too little was seen.  Of few points that of the first to the last."""
    rising: list[tuple[float, int]] = []
    for point in points:
        if not rising or point[0] > rising[-1][0]:  # the clock may have been set back
            rising.append(point)
    (began, first), (ended, now) = rising[0], rising[-1]
    if ended - began < _LEAST_SPAN_S:
        return 0.0
    trend = theil_sen(rising)
    return trend.bytes_per_s if trend else (now - first) / (ended - began)


def remedy_of(
    cause: Cause, victim: Victim, workers: int, moments: Sequence[MemorySample], ray_share: float | None = None
) -> str:
    """What to do about a death.

    Args:
        workers: readers that there were.
        moments: the last minute before it.
        ray_share: share of the machine's memory at which Ray kills; None = not known.
    """
    again = "the run goes on with a new reader" if victim == "reader" else "start again with --resume"
    full = bool(moments) and (share_of(moments[-1]) or 0.0) >= NEARLY_FULL
    match cause:
        case "cgroup" | "machine":
            return _less_memory(victim, workers, moments)
        case "ray":
            at = "" if ray_share is None else f" at {100 * ray_share:.0f} % of it"
            return (
                f"{_less_memory(victim, workers, moments)} Ray counts the memory of the whole machine, everybody's, "
                f"and kills{at} (RAY_memory_usage_threshold)."
            )
        case "signal" | "unknown" if full:
            return (
                "memory was nearly used up: a container runtime, a scheduler, systemd-oomd or earlyoom ends processes "
                f"like this. {_less_memory(victim, workers, moments)}"
            )
        case "signal" | "restart":
            return f"nothing of the configuration; {again}."
        case _:
            return f"{again}; should it happen again, watch it: vesuvius memcheck --watch 2."


def _less_memory(victim: Victim, workers: int, moments: Sequence[MemorySample]) -> str:
    growth, limit = fastest_growth(moments), _ram_limit_gib(moments)
    sentences = []
    if growth is not None:
        sentences.append(
            f"{growth.who} grew most in {growth.span}: by {growth.bytes_per_s / _MB:.1f} MB/s, "
            f"to {size_text(growth.now_bytes)}."
        )
    if victim == "reader":
        sentences.append("The run goes on with a new reader; if it happens again, stop it first.")
    if workers:
        sentences.append(
            f"Start it with --resume training.workers={workers - 1} training.prefetch_factor=1 (fewer readers, fewer "
            "batches ahead), or with a smaller data.reader_mib."
        )
    else:
        sentences.append("Start it with --resume and a smaller data.reader_mib or training.train_batch_size.")
    if limit is not None:
        sentences.append(f"With monitor.ram_limit_gib={limit} the memory guard steps in before the kill.")
    return " ".join(sentences)


def _of_reader(moments: Sequence[MemorySample], pid: int) -> list[tuple[float, int]]:
    return [(moment.time, moment.reader_bytes[pid]) for moment in moments if pid in moment.reader_bytes]


def _ram_limit_gib(moments: Sequence[MemorySample]) -> float | None:
    """For the run's own memory: what others left of it before the kill, less a tenth."""
    if not moments or moments[-1].kills_at_bytes <= 0:
        return None
    last = moments[-1]
    others = max(last.killer_used_bytes - last.used_bytes, 0)
    limit = _BELOW_THE_KILL * (last.kills_at_bytes - others) / GIB
    digits = 1 if limit >= 1 else 2
    rounded = round(limit - 0.5 * 10**-digits, digits)
    return rounded if rounded > 0 else None
