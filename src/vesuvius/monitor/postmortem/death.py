"""A death: who died, what killed it, the last minute of its memory, what to change; as data in `post_mortem.jsonl`
and as lines for people."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from vesuvius.monitor.recent import MemorySample
from vesuvius.runlog.records import JsonLines, read_plain
from vesuvius.runlog.units import format_time, gib

Victim = Literal["reader", "run"]
Cause = Literal["cgroup", "machine", "ray", "gpu", "guard", "signal", "restart", "unknown"]

LAST_S = 60.0

_LONGEST = 300  # characters of a line of evidence
_EVERY_S = 10.0

# Each kill has one of the words that operators search logs for: killed, oom, out of memory.
_HEADLINES: Mapping[Cause, str] = {
    "cgroup": "was killed: out of memory: its cgroup was at its limit, and the kernel chose this process",
    "machine": "was killed: out of memory: the machine had none left, and the kernel chose this process",
    "ray": "was killed: out of memory: Ray's memory monitor chose this process",
    "gpu": "ended: out of memory on the GPU",
    "guard": "was ended by the memory guard before it was out of memory",
    "signal": "was killed from outside, or crashed",
    "restart": "ended when the machine was restarted or lost its power",
    "unknown": "was killed or died; cause unknown",
}


@dataclass(frozen=True)
class Death:
    """The end of a reader or of a run."""

    time: float  # when it was noticed, seconds since 1970
    victim: Victim
    pid: int
    step: int  # optimizer steps done
    # what killed it: the kernel for a limit of the cgroup, or for want of memory on the machine; Ray's memory monitor;
    # GPU memory; our own guard; a signal from outside; a restart of the machine; or it is not known
    cause: Cause
    evidence: tuple[str, ...]  # what says so, a line each
    moments: tuple[MemorySample, ...]  # the last 60 seconds
    remedy: str  # what to change, overrides included


def headline(death: Death) -> str:
    """Victim and cause in one sentence.  Pure."""
    who = f"reader {death.pid}" if death.victim == "reader" else f"the run (pid {death.pid})"
    return f"{who} {_HEADLINES[death.cause]}"


def append_death(path: Path, death: Death) -> None:
    """Append it to `post_mortem.jsonl`.  A full disk is no error: the log says that the record is lost.

    Raises OSError: the file cannot be opened.
    """
    with closing(JsonLines(path)) as lines:
        lines.write("death", **asdict(death))


def read_deaths(path: Path) -> list[Death]:
    """All deaths of a run, oldest first; records that are torn are passed over.  Empty without a file."""
    return read_plain(Death, path)


def death_lines(death: Death) -> list[str]:
    """For people, a line each: victim, cause, evidence, the last minute as a small table, remedy."""
    return [
        headline(death),
        f"  noticed {format_time(death.time)}, after step {death.step}",
        *(f"  - {textwrap.shorten(line, _LONGEST, placeholder=' ...')}" for line in death.evidence),
        *_table(death),
        f"  what to change: {death.remedy}",
    ]


def _table(death: Death) -> list[str]:
    """The memory of the last minute, a line for every ten seconds."""
    if not death.moments:
        return ["  no sample of its memory was kept"]
    shown = [death.moments[-1]]
    for moment in reversed(death.moments):
        if shown[-1].time - moment.time >= 0.95 * _EVERY_S:  # samples come a little early or late
            shown.append(moment)
    rows = [f"  {'seconds':>9}{'run GiB':>10}{'trainer':>10}{'largest reader':>24}   share of the limit"]
    for moment in shown[int(LAST_S / _EVERY_S) :: -1]:
        pid, size = max(moment.reader_bytes.items(), key=lambda item: item[1], default=(0, 0))
        reader, share = f"{gib(size)} (pid {pid})" if pid else "-", share_of(moment)
        rows.append(
            f"  {moment.time - shown[0].time:>9.0f}{gib(moment.used_bytes):>10}{gib(moment.trainer_bytes):>10}"
            f"{reader:>24}   {'-' if share is None else f'{100 * share:.1f} %'}"
        )
    return rows


def share_of(moment: MemorySample) -> float | None:
    """What the first killer counted, as a share of where it kills; None where that was not known.  Pure."""
    return moment.killer_used_bytes / moment.kills_at_bytes if moment.kills_at_bytes > 0 else None
