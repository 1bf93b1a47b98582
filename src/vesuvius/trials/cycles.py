"""When a measurement is long enough, and how long its samples took.  Pure."""

from __future__ import annotations

_OUTRUN_BY = 1.1  # tolerated ratio of a measured rate to what the readers can sustain


def is_enough(samples: int, batch: int, elapsed_s: float, cycle: int, seconds: float) -> bool:
    """Whether a measurement is long enough: whole cycles that come nearest to `seconds`, or `seconds` if none does.

    Data come in bursts, once in `cycle` samples: a part of a cycle may be all burst or all wait.  Pure.

    Args:
        batch: samples that came last; one of them ends a cycle.
    """
    cycles = round(seconds * samples / max(elapsed_s, 1e-9) / cycle)
    if cycles and samples >= cycles * cycle and samples % cycle < batch:
        return True
    return samples > 0 and elapsed_s >= (2 * seconds if cycles else seconds)


def sustained_s(samples: int, took_s: float, reader_s: float | None, workers: int) -> float:
    """The seconds that samples took, or that the readers need for them where they were read ahead.  Pure."""
    if reader_s and workers and samples / took_s > _OUTRUN_BY * workers / reader_s:
        return samples * reader_s / workers
    return took_s
