"""Parts, peaks and slopes of what was seen from outside, and the risk, the run's own moments included."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.monitor.memory.simulated import process, sample
from vesuvius.monitor.memcheck.history import LiveHistory, is_reader, killers_then
from vesuvius.monitor.memcheck.inspection import Inspection, Row
from vesuvius.monitor.memory.limits import Limits
from vesuvius.monitor.memory.risk import Level
from vesuvius.monitor.probes.system_sample import SystemSample
from vesuvius.monitor.recent import MemorySample
from vesuvius.runlog.units import GIB

TOTAL = 100 * GIB
READER = "ray::MapWorker(MapBatches(_RayReader)).submit"
NOTHING = Inspection(0.0, "run", "run x", "running", "")


def seen(
    time: float, trainer: float = 10, readers: Iterable[float] = (5, 6), ray: float = 2, store: float = 4
) -> SystemSample:
    """A look at a run with sizes in GiB; its readers have the pids 101, 102, ..."""
    sizes = list(readers)
    processes = [process(100, trainer * GIB), *(process(101 + i, x * GIB, name=READER) for i, x in enumerate(sizes))]
    processes += [process(200, ray * GIB, name="/somewhere/raylet --head")] if ray else []
    used = trainer + sum(sizes) + ray + store
    return replace(sample(time, TOTAL, (used + 3) * GIB, processes), shared_bytes=int(store * GIB))


def moment(
    time: float, trainer: float = 10, readers: Iterable[float] = (5, 6), rest: float = 2, store: float = 4
) -> MemorySample:
    sizes = [int(x * GIB) for x in readers]
    used = int((trainer + rest + store) * GIB) + sum(sizes)
    return MemorySample(
        time, 7, used, int(store * GIB), int(trainer * GIB), {101 + i: x for i, x in enumerate(sizes)},
        "the machine", used + 3 * GIB, TOTAL,
    )  # fmt: skip


class Watched:
    """A run whose readers are known by their titles."""

    def __init__(self, age_s: float = 1000.0, **limits: Any) -> None:
        self._history = LiveHistory(Limits(**limits), 100, age_s)

    def add(self, found: Inspection, sample: SystemSample, readers: Iterable[int] = (), **known: Any) -> Inspection:
        singles = {process.pid for process in sample.processes if is_reader(process)}
        return self._history.add(found, sample, singles.union(readers), **known)


def history(**limits: Any) -> Watched:
    return Watched(**limits)


def row(found: Inspection, part: str, pid: int | None = None) -> Row:
    (one,) = [row for row in found.rows if row.part == part and (pid is None or row.pid == pid)]
    return one


def test_the_parts_are_the_total_and_the_store_counts_once() -> None:
    one_look = seen(1.0)
    found = history().add(NOTHING, one_look)
    assert [(r.part, r.pid, r.now_bytes) for r in found.rows] == [
        ("root", None, 10 * GIB),
        ("readers", None, 11 * GIB),
        ("reader", 102, 6 * GIB),
        ("reader", 101, 5 * GIB),
        ("others", None, 2 * GIB),
        ("store", None, 4 * GIB),
        ("total", None, 27 * GIB),
    ]
    assert row(found, "total").now_bytes == one_look.used_bytes
    assert found.limit_bytes == TOTAL
    found = history().add(NOTHING, seen(1.0, readers=(), ray=0, store=0))
    assert [r.part for r in found.rows] == ["root", "store", "total"], "what is not there has no row"


def test_peaks_are_the_most_that_anybody_has_seen() -> None:
    watched = history()
    known: dict[str | int, float] = {"root": 11 * GIB, 101: 4 * GIB}
    recorded = replace(NOTHING, peaks_since=-500.0)
    watched.add(recorded, seen(10.0, trainer=12), moments=[moment(5.0, readers=(7, 1))], peaks=known)
    found = watched.add(recorded, seen(11.0), peaks=known)
    assert [row(found, *part).peak_bytes for part in (("root",), ("reader", 101), ("readers",))] == [
        12 * GIB, 7 * GIB, 11 * GIB,
    ]  # fmt: skip
    assert found.peaks_since == -500.0
    assert history().add(NOTHING, seen(1.0), moments=[moment(0.5)]).peaks_since == 0.5


def test_the_slope_is_there_at_the_first_look_where_the_run_kept_moments() -> None:
    moments = [moment(float(t), readers=(5 + 0.1 * t, 6)) for t in range(120)]
    now = seen(120.0, readers=(17, 6))
    assert row(history().add(NOTHING, now), "reader", 101).trend is None
    found = history().add(NOTHING, now, moments=moments)
    leak = row(found, "reader", 101).trend
    assert leak is not None
    # Ends of windows of 5 s of a straight line: exact but for the first and last, partly filled windows.
    assert leak.bytes_per_s == pytest.approx(0.1 * GIB, rel=0.01)
    calm = row(found, "reader", 102)
    assert calm.trend is None
    assert calm.seen_s == pytest.approx(115)
    assert found.trend is not None
    assert found.trend.bytes_per_s == pytest.approx(0.1 * GIB, rel=0.01)


def test_growth_in_the_moments_is_risk_at_the_first_look() -> None:
    moments = [moment(float(t), readers=(5 + 0.5 * t, 6)) for t in range(120)]
    found = history().add(NOTHING, seen(120.0, readers=(65, 6)), moments=moments)
    assert found.level is Level.CRITICAL  # 10 of 100 GiB left, half a GiB a second
    assert found.exit_code == 11
    assert history().add(NOTHING, seen(120.0, readers=(5, 6))).level is Level.LOW


def test_the_first_killer_counted_at_a_moment_what_the_moment_says_and_the_others_moved_as_much() -> None:
    then = moment(5.0, trainer=3, readers=(7, 1, 2), rest=1)
    limits = Limits(ray_share=0.95)
    now = seen(50.0)
    first, second = killers_then(replace(then, killer="Ray's memory monitor"), now, limits)
    assert first.used_bytes == then.killer_used_bytes
    assert second.used_bytes == then.killer_used_bytes, "the machine, which counts the same"


def test_a_moment_held_against_another_killer_moves_all_by_what_the_run_used() -> None:
    now = seen(50.0)
    then = replace(moment(5.0, trainer=6), killer="memory.max of cgroup /x", killer_used_bytes=1)
    (machine,) = killers_then(then, now, Limits())
    assert machine.used_bytes == now.machine.used_bytes - 4 * GIB


def test_what_the_run_calls_a_reader_is_one_whatever_its_title() -> None:
    found = history().add(NOTHING, seen(1.0), readers=[200])
    assert row(found, "reader", 200).now_bytes == 2 * GIB


def test_a_reader_that_has_ended_has_no_row_and_no_past() -> None:
    watched = history()
    watched.add(NOTHING, seen(1.0, readers=(5, 9)))
    found = watched.add(NOTHING, seen(2.0, readers=(5,)))
    assert [r.pid for r in found.rows if r.part == "reader"] == [101]
    again = watched.add(NOTHING, seen(3.0))
    assert row(again, "reader", 102).peak_bytes == 6 * GIB


def test_what_processes_allocate_at_their_start_is_no_slope() -> None:
    young = Watched(age_s=2.0)
    moments = [moment(float(t), readers=(5 + 0.1 * t, 6)) for t in range(50)]
    found = young.add(NOTHING, seen(50.0, readers=(10, 6)), moments=moments)
    assert (row(found, "total").trend, row(found, "total").seen_s) == (None, None)
    assert found.level is Level.LOW


def test_a_process_that_is_stopped_is_said() -> None:
    now = seen(1.0)
    stopped = replace(now, processes=tuple(replace(p, status="stopped") for p in now.processes))
    (remark,) = history().add(NOTHING, stopped).remarks
    assert "process 100, 101, 102, 200" in remark
    assert not history().add(NOTHING, now).remarks
