"""What the ranks tell rank 0 before each step: where the time of their last one went, their node, their private memory,
and what they could not read."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from vesuvius.monitor.clock import StepTimes
from vesuvius.monitor.probes.processes import read_process
from vesuvius.runlog.records import JsonLines
from vesuvius.stream.reading.quarantine import check_quarantine
from vesuvius.training.request import RunContext


class RankNews:
    """One rank's side of it; rank 0 records what all have told.

    Attributes:
        times: of this rank's last step, and its number.
        slowest: the rank that the others waited for in the last step that all told of; None = not known.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._told_of = len(run.progress.quarantined)
        self.times: tuple[int, StepTimes] | None = None
        self.slowest: int | None = None

    def tell(self) -> dict[str, Any]:
        """Return plain data about this rank since the last call."""
        found = self._run.progress.quarantined[self._told_of :]
        self._told_of += len(found)
        told: dict[str, Any] = {"quarantined": found, "times": None}
        if self.times is not None:
            step, times = self.times
            told["times"] = {"step": step, **vars(times), "gpu_s": times.gpu_s, "other_s": times.other_s}
            process = read_process(os.getpid())
            told["times"] |= {"node": platform.node(), "trainer_bytes": process.anon_bytes if process else None}
        return told

    def take(self, told: Sequence[Mapping[str, Any]]) -> None:
        """On rank 0, record the times of all ranks, and what the others have quarantined.

        Raises:
            DataError: more places than `data.max_quarantined` are damaged, over all ranks.
        """
        for rank, one in enumerate(told):
            if rank and one["quarantined"]:
                self._quarantine(one["quarantined"])
        times = [one["times"] for one in told]
        if times and all(times):
            work_s = [one["step_s"] - one["comm_s"] - one["pause_s"] for one in times]
            self.slowest = work_s.index(max(work_s))
            self._run.metrics.write("ranks", step=min(one["step"] for one in times), slowest=self.slowest, times=times)

    def _quarantine(self, records: Sequence[dict[str, Any]]) -> None:
        known = {_place(record) for record in self._run.progress.quarantined}
        new = [record for record in records if _place(record) not in known]  # a chunk may lie in regions of two ranks
        with closing(JsonLines(self._run.directory.quarantine)) as lines:
            for record in new:
                lines.write("region", step=self._run.progress.step, **record)
        self._run.progress.quarantined += new
        self._told_of += len(new)
        if new:
            damaged = {_place(record) for record in self._run.progress.quarantined}
            check_quarantine(len(damaged), self._run.config.data.max_quarantined, new[-1])


def _place(record: Mapping[str, Any]) -> tuple[int, str]:
    return record["number"], str([list(corner) for corner in record["box"]])
