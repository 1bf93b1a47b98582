"""Situations of real runs, and what somebody who knows would say and do: written down before the code was asked.

`docs/monitoring.md` shows the same table.  A situation is recorded (files as a machine has them) or simulated
(figures); `says` and `does` are the whole of what vesuvius makes of it, `words` must stand in its line for people.  One
expectation was wrong itself and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.monitor.memory.simulated import MB
from tests.monitor.situations import (
    NOTHING,
    Found,
    bare,
    below_a_slice,
    beside,
    growing,
    nested,
    pinned,
    pod,
    ranks,
    recorded,
    steady,
    version_1,
    watched,
)
from tests.monitor.test_verdict import hungry
from vesuvius.monitor.memory.limits import Limits, ray_share_from_environment
from vesuvius.runlog.units import GIB


@dataclass(frozen=True)
class Situation:
    """One row of the table."""

    what: str
    made: Callable[[Path], Found]
    says: str
    does: str
    words: str = ""


SITUATIONS = [
    # memory
    Situation(
        "a pod with room, on a node of 2 TiB that others fill to 93 %",
        lambda p: steady(pod(p, own=12 * GIB, limit=32 * GIB, node=2048 * GIB, node_used=1905 * GIB)),
        *("LOW", NOTHING),
    ),
    Situation(
        "the same node without a limit: 143 GiB are free",
        lambda p: steady(bare(p, own=20 * GIB, total=2048 * GIB, used=1905 * GIB)),
        *("LOW", NOTHING),
    ),
    Situation(
        "10 GiB are left of 2 TiB, and we hold 20",
        lambda p: steady(bare(p, own=20 * GIB, total=2048 * GIB, used=2038 * GIB)),
        *(
            "CRITICAL, by others",
            "save",
        ),  # not "exit", as first written: 30 GiB would be left without us, and the next start find the same
    ),
    Situation(
        "4 GiB are left of 256 GiB, and we hold 2 of them",
        lambda p: steady(bare(p, own=2 * GIB, total=256 * GIB, used=252 * GIB)),
        *("CRITICAL, by others", "save"),
    ),
    Situation(
        "a pod of 16 GiB of which we hold 14.8",
        lambda p: steady(pod(p, own=int(14.8 * GIB), limit=16 * GIB)),
        *("CRITICAL", "exit", "memory.max"),
    ),
    Situation(
        "a pod of 16 GiB filled by page cache",
        lambda p: steady(pod(p, own=6 * GIB, limit=16 * GIB, file=int(9.8 * GIB))),
        *("LOW", NOTHING),
    ),
    Situation(
        "memory.high at 10 GiB below a maximum of 16: 9.4 GiB in use",
        lambda p: steady(pod(p, own=int(9.4 * GIB), limit=16 * GIB, high=10 * GIB)),
        *("CRITICAL", "exit", "slows the run to a crawl"),
    ),
    Situation(
        "a container of 8 GiB with 7 in use, in a pod of 64",
        lambda p: steady(nested(p)),
        *("WARN", "shrink", "/pod/trainer"),
    ),
    Situation(
        "a slice of 40 GiB that others fill, without a limit of our own",
        lambda p: steady(below_a_slice(p, own=3 * GIB, slice_used=38 * GIB)),
        *("CRITICAL, by others", "save", "/batch.slice"),
    ),
    Situation(
        "eight ranks of 7.5 GiB fill a pod of 64 GiB: what one holds would not help",
        lambda p: steady(ranks(p, 8), Limits(ranks_here=8)),
        *("CRITICAL", "exit", "60.00 of 64.00 GiB"),
    ),
    Situation(
        "a rank of 7.5 GiB in a pod of 64 GiB that others fill",
        lambda p: steady(ranks(p, 8)),
        *("CRITICAL, by others", "save"),
    ),
    Situation(
        "cgroups version 1 with a limit above the container: 7.5 of 8 GiB",
        lambda p: steady(version_1(p, own=int(7.5 * GIB))),
        *("CRITICAL", "exit", "an ancestor"),
    ),
    Situation(
        "the same, but 6 of 8 GiB are page cache",
        lambda p: steady(version_1(p, own=2 * GIB, cache=6 * GIB)),
        *("LOW", NOTHING),
    ),
    Situation(
        "Ray told to kill at 70 % of a pod of 32 GiB: 21 in use",
        lambda p: steady(
            pod(p, own=21 * GIB, limit=32 * GIB),
            Limits(ray_share=ray_share_from_environment({"RAY_memory_usage_threshold": "0.7"})),
        ),
        *("WARN", "shrink", "Ray's memory monitor"),
    ),
    Situation(
        "a machine that is shared by agreement: 9.5 of our 10 GiB",
        lambda p: steady(
            bare(p, own=int(9.5 * GIB), total=256 * GIB, used=40 * GIB), Limits(configured_bytes=10 * GIB)
        ),
        *("CRITICAL", "exit", "monitor.ram_limit_gib"),
    ),
    Situation(
        "a laptop that begins to swap: 15 of 16 GiB, of which we hold 12",
        lambda p: steady(bare(p, own=12 * GIB, total=16 * GIB, used=15 * GIB, swap=8 * GIB)),
        *("CRITICAL", "exit", "the machine"),
    ),
    Situation(
        "1 TiB of which we hold 950 GiB ourselves: 64 GiB are free",
        lambda p: steady(bare(p, own=950 * GIB, total=1024 * GIB, used=960 * GIB)),
        *("LOW", NOTHING),
    ),
    Situation(
        "a reader that leaks 50 MB/s, 80 s before the end",
        lambda p: watched(growing(lambda t: 6 * GIB, lambda t: GIB + 50 * MB * max(t - 120, 0), 365)),
        *("WARN", "restart", "fastest process 11"),
    ),
    Situation(
        "another program grows 496 MB/s beside a steady run of 1.4 GiB",
        lambda p: watched(beside(lambda t: 4 * GIB + 496 * MB * max(t - 100, 0), 138)),
        *("CRITICAL, by others", "save", "growing 496.0 MB/s"),
    ),
    Situation(
        "the same at 1 MB/s, from 4 to 92.5 % of the machine",
        lambda p: watched([replace(s, time=20.0 * s.time) for s in beside(lambda t: 4 * GIB + 20 * MB * t, 905)]),
        *("CRITICAL, by others", "save"),
    ),
    Situation(
        "a validation that takes 2 GB once and keeps it",
        lambda p: watched(growing(lambda t: 6 * GIB + 2000 * MB * (t >= 200), lambda t: GIB, 600)),
        *("LOW", NOTHING),
    ),
    Situation(
        "each save takes 4 GB for 20 s, every two minutes",
        lambda p: watched(growing(lambda t: 8 * GIB + 4000 * MB * (t % 120 >= 100), lambda t: GIB, 900)),
        *("LOW", NOTHING),
    ),
    Situation(
        "readers are restarted every three minutes and fill up again",
        lambda p: watched(growing(lambda t: 8 * GIB, lambda t: 3 * GIB * min(t % 180, 12) / 12, 900)),
        *("LOW", NOTHING),
    ),
    Situation(
        "9 GiB pinned and 6 of object store besides 3 of our own, of `ram_limit_gib: 20`",
        lambda p: steady(pinned(p), Limits(configured_bytes=20 * GIB)),
        *("WARN", "shrink", "18.00 of 20.00 GiB in use"),
    ),
    # speed
    Situation(
        "recorded: a quota of 1.5 processors on 8, used up in half of its periods",
        lambda p: recorded(p, hungry(), busy=1.6, readers_s=65.0, quota=1.5, throttled=0.5),
        *("data-bound (decoding)", NOTHING, "the quota of 1.5 processors was used up in 50.0 %"),
    ),
    Situation(
        "recorded: neighbours keep 6.7 of 8 processors busy",
        lambda p: recorded(p, hungry(), busy=7.9, readers_s=50.0),
        *("data-bound (decoding)", NOTHING, "other programs use 6.7 of 8 cores"),
    ),
    Situation(
        "recorded: both readers are in state T, and the trainer starves",
        lambda p: recorded(p, hungry(decode_s=20.0), busy=0.3, readers_s=0.0, stopped=True),
        *("data-bound (readers stopped)", NOTHING, "SIGSTOP) or a debugger holds 2"),
    ),
]


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.what)
def test_a_situation_is_judged_as_somebody_who_knows_would(situation: Situation, tmp_path: Path) -> None:
    found = situation.made(tmp_path)
    assert (found.says, found.does) == (situation.says, situation.does), found.line
    assert situation.words in found.line


def test_the_manual_lists_these_situations() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    missing = [s.what for s in SITUATIONS if f"| {s.what} | {s.says} | {s.does} |" not in manual]
    assert not missing
