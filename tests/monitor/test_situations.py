"""Situations of real runs, and the expected judgement, written down before the code was run.

`docs/monitoring.md` shows the same table.  A situation is recorded (files as a machine has them) or simulated
(figures); `says` and `does` are the whole of what vesuvius makes of it, `words` must stand in its line for people.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.memory.simulated import MB, sample
from tests.monitor.test_verdict import GPU, hungry
from tests.support.system_trees import (
    Roots,
    write_cgroup_v1,
    write_cgroup_v2,
    write_machine,
    write_process,
    write_v1,
    write_v2,
)
from vesuvius.monitor.memory.guard import Guard, LoopStatus
from vesuvius.monitor.memory.limits import MemoryPolicy
from vesuvius.monitor.memory.risk import RiskWatch
from vesuvius.monitor.probes.cores import cpu_quotas, throttling, usable_cores
from vesuvius.monitor.probes.system_sample import SystemSample, Watcher, rates_between
from vesuvius.monitor.verdict import diagnose
from vesuvius.monitor.window import Knobs, Window
from vesuvius.runlog.units import GIB

TRAINER = 10
NOTHING = "nothing"
LIMITS = MemoryPolicy()


@dataclass(frozen=True)
class Found:
    """Judgement of a situation: one or two words, the action or suggestion, and the line for people."""

    says: str
    does: str
    line: str


# ---- memory, sampled every second


def watched(samples: list[SystemSample], limits: MemoryPolicy = LIMITS) -> Found:
    """Level, order of the guard if it is not carried out, and reason, at the last sample."""
    watch, guard, order = RiskWatch(limits), Guard(limits), None
    for each in samples:
        risk = watch.add(each)
        order = guard.next_action(each.time, risk, LoopStatus(step_s=1.0, can_shrink=True, readers={11: GIB}))
    blamed = ", by others" if risk.is_of_others(limits) else ""
    return Found(risk.level.name + blamed, order.action if order else NOTHING, risk.reason)


def steady(_built: Roots, limits: MemoryPolicy = LIMITS) -> Found:
    """Ten seconds without changes on the recorded machine that was just built."""
    seen = Watcher(TRAINER).sample()
    return watched([replace(seen, time=float(second)) for second in range(10)], limits)


def pod(
    directory: Path, own: int, limit: int | None = None, node: int = 256 * GIB, node_used: int = 40 * GIB, *,
    charged: int | None = None, swap: int = 0, path: str = "/", **figures: Any,
) -> Roots:  # fmt: skip
    """A process of this size, in a cgroup of version 2 that is charged with this much (the same), on a node."""
    roots = write_v2(directory, limit=limit, anon=own if charged is None else charged, path=path, **figures)
    write_machine(roots, total=node, available=node - node_used, swap_total=swap)
    write_process(roots, TRAINER, anon=own)
    return roots


def below(directory: Path, own: int, path: str, limit: int | None, above_limit: int, above_used: int) -> Roots:
    """A process in a cgroup below one with a limit, too."""
    roots = pod(directory, own, limit, path=path)
    write_cgroup_v2(roots, str(Path(path).parent), limit=above_limit, anon=above_used)
    return roots


def version_1(directory: Path, own: int) -> Roots:
    """A container without a limit at its own level, below a hidden one of 8 GiB."""
    roots = write_v1(directory, path="/docker/ab12", mount_root="/docker/ab12")
    write_cgroup_v1(roots, "/", hierarchical_limit=8 * GIB, anon=own)
    write_machine(roots, total=64 * GIB, available=40 * GIB)
    write_process(roots, TRAINER, anon=own)
    return roots


def growing(trainer: Callable[[int], float], reader: Callable[[int], float], seconds: int) -> list[SystemSample]:
    """A trainer, a reader and 2 GiB of other programs on 24 GiB, second by second."""
    return [
        sample(float(t), 24 * GIB, 2 * GIB + trainer(t) + reader(t), {TRAINER: trainer(t), 11: reader(t)})
        for t in range(seconds)
    ]


def with_others(others: Callable[[int], float], seconds: int) -> list[SystemSample]:
    """A trainer of 1 GiB, a reader of 0.4 GiB and other programs on 24 GiB, second by second."""
    own = {TRAINER: GIB, 11: 0.4 * GIB}
    return [sample(float(t), 24 * GIB, 1.4 * GIB + others(t), own) for t in range(seconds)]


def pinned(directory: Path) -> Roots:
    """A trainer with 2 GiB private and 9 GiB pinned, and a reader with 1 GiB; both map a 6 GiB object store."""
    roots = pod(directory, own=0, node=64 * GIB, node_used=20 * GIB)
    trainer = write_process(roots, TRAINER, anon=2 * GIB, shmem=9 * GIB)
    (trainer / "maps").write_text(
        f"7f0000000000-{0x7F0000000000 + 9 * GIB:x} rw-s 00000000 00:01 1 /dev/zero (deleted)\n"
    )
    write_process(roots, TRAINER + 1, TRAINER, name="ray::MapWorker(MapBatches(_RayReader_1))", anon=GIB, shmem=6 * GIB)
    return roots


# ---- speed, over a hundred seconds


def judged(figures: Window, knobs: Knobs = GPU) -> Found:
    found = diagnose(figures, knobs)
    kind = found.kind if found.cause is None else f"{found.kind} ({found.cause})"
    return Found(kind, " ".join(found.overrides) or NOTHING, found.line(100, 1000))


def recorded(
    directory: Path,
    figures: Window,
    *,
    busy: float,
    readers_s: float,
    stopped: bool = False,
    quota: float | None = None,
    throttled: float = 0.0,
) -> Found:
    """A verdict on `figures`, with cores and processes as the probes read them from files 100 s apart.

    Args:
        busy: cores of the machine's 8 that were busy all the time.
        readers_s: CPU seconds of each of the two readers; the trainer has 20.
        stopped: the readers are, by a signal.
        quota: cores that the container may use, whose quota was used up in the share `throttled` of its periods.
    """
    roots, pid = write_v2(directory), os.getpid()  # its real affinity counts, not one in a file
    cpu = roots.sys / "fs" / "cgroup"
    if quota is not None:
        (cpu / "cpu.max").write_text(f"{round(quota * 100_000)} 100000\n")
    seen, quotas = [], []
    for second in (0, 100):
        cores = [(busy / 8 * second, float(second))] * 8
        write_machine(roots, total=64 * GIB, available=40 * GIB, cores=cores)
        (cpu / "cpu.stat").write_text(f"nr_periods {10 * second}\nnr_throttled {round(10 * second * throttled)}\n")
        write_process(roots, pid, cpu_s=0.2 * second)
        for number in (1, 2):
            write_process(roots, pid + number, pid, cpu_s=readers_s / 100 * second, state="T" if stopped else "S")
        seen.append(replace(Watcher(pid).sample(), clock_s=float(second)))
        quotas.append(cpu_quotas(pid))
    rates, (share, used_up) = rates_between(*seen), throttling(*quotas) or (None, None)
    assert rates is not None
    return judged(
        replace(
            figures,
            cores=8.0 if quota is None else usable_cores(pid),
            idle_cores=rates.idle_cores(range(8)),
            own_cores=sum(rates.process_cores.values()),
            reader_cores=sum(rates.process_cores[pid + number] for number in (1, 2)),
            throttled_share=share,
            throttled_quota=used_up and used_up.cores,
            stopped_readers=sum(process.is_stopped for process in seen[1].processes),
        )
    )


@dataclass(frozen=True)
class Situation:
    """A row of the table."""

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
        "4 GiB are left of 256 GiB, of which we use 2 GiB",
        lambda p: steady(pod(p, own=2 * GIB, node_used=252 * GIB)),
        *("CRITICAL, by others", NOTHING),
    ),
    Situation(
        "a pod of 16 GiB of which we use 14.8 GiB",
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
        lambda p: steady(below(p, 7 * GIB, "/pod/trainer", 8 * GIB, 64 * GIB, 20 * GIB)),
        *("WARN", "shrink", "/pod/trainer"),
    ),
    Situation(
        "a slice of 40 GiB that others fill, without a limit of our own",
        lambda p: steady(below(p, 3 * GIB, "/batch.slice/job7", None, 40 * GIB, 38 * GIB)),
        *("CRITICAL, by others", NOTHING, "/batch.slice"),
    ),
    Situation(
        "eight ranks of 7.5 GiB fill a pod of 64 GiB: the memory of one rank would not help",
        lambda p: steady(pod(p, int(7.5 * GIB), 64 * GIB, charged=60 * GIB), MemoryPolicy(ranks_here=8)),
        *("CRITICAL", "exit", "60.00 of 64.00 GiB"),
    ),
    Situation(
        "a rank of 7.5 GiB in a pod of 64 GiB that others fill",
        lambda p: steady(pod(p, int(7.5 * GIB), 64 * GIB, charged=60 * GIB)),
        *("CRITICAL, by others", NOTHING),
    ),
    Situation(
        "cgroups version 1 with a limit above the container: 7.5 of 8 GiB",
        lambda p: steady(version_1(p, own=int(7.5 * GIB))),
        *("CRITICAL", "exit", "an ancestor"),
    ),
    Situation(
        "a laptop that begins to swap: 15 of 16 GiB, of which we use 12 GiB",
        lambda p: steady(pod(p, own=12 * GIB, node=16 * GIB, node_used=15 * GIB, swap=8 * GIB)),
        *("CRITICAL", "exit", "the machine"),
    ),
    Situation(
        "a worker that leaks 50 MB/s, 80 s before the end",
        lambda p: watched(growing(lambda t: 6 * GIB, lambda t: GIB + 50 * MB * max(t - 120, 0), 365)),
        *("WARN", "restart", "fastest process 11"),
    ),
    Situation(
        "another program grows 496 MB/s next to a steady run of 1.4 GiB",
        lambda p: watched(with_others(lambda t: 4 * GIB + 496 * MB * max(t - 100, 0), 138)),
        *("CRITICAL, by others", NOTHING, "growing 496 MB/s"),
    ),
    Situation(
        "9 GiB pinned, 6 GiB of object store and 3 GiB private, of `ram_limit_gib: 20`",
        lambda p: steady(pinned(p), MemoryPolicy(configured_bytes=20 * GIB)),
        *("WARN", "shrink", "18.00 of 20.00 GiB in use"),
    ),
    # speed
    Situation(
        "recorded: a quota of 1.5 cores on 8, used up in half of its periods",
        lambda p: recorded(p, hungry(), busy=1.6, readers_s=65.0, quota=1.5, throttled=0.5),
        *("data-bound (decoding)", NOTHING, "the quota of 1.5 cores was used up in 50.0 %"),
    ),
    Situation(
        "recorded: neighbors keep 6.7 of 8 cores busy",
        lambda p: recorded(p, hungry(), busy=7.9, readers_s=50.0),
        *("data-bound (decoding)", NOTHING, "other programs use 6.7 of 8 cores"),
    ),
    Situation(
        "recorded: both workers are in state T, and the trainer starves",
        lambda p: recorded(p, hungry(decode_s=20.0), busy=0.3, readers_s=0.0, stopped=True),
        *("data-bound (workers stopped)", NOTHING, "SIGSTOP) or a debugger has stopped 2"),
    ),
]


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.what)
def test_each_situation_is_judged_as_an_expert_would(situation: Situation, tmp_path: Path) -> None:
    found = situation.made(tmp_path)
    assert (found.says, found.does) == (situation.says, situation.does), found.line
    assert situation.words in found.line


def test_the_manual_lists_these_situations() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    missing = [s.what for s in SITUATIONS if f"| {s.what} | {s.says} | {s.does} |" not in manual]
    assert not missing
