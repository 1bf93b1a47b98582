"""Causes from the kernel's counts of kills."""

from __future__ import annotations

import pytest

from tests.support.moments import moments
from vesuvius.monitor.postmortem.death import Cause
from vesuvius.monitor.postmortem.post_mortem import KillCounts, judge
from vesuvius.monitor.recent import MemorySample
from vesuvius.runlog.units import GIB

FULL = moments(0.0, count=1, killer="the machine", killer_used_bytes=15 * GIB)[0]
FULL_CGROUP = moments(0.0, count=1, killer_used_bytes=15 * GIB)[0]
ROOMY = moments(0.0, count=1, killer="the machine", killer_used_bytes=GIB)[0]


@pytest.mark.parametrize(
    ("rise", "last", "cause", "says"),
    [
        (KillCounts(cgroup=1), None, "cgroup", "most likely this one"),
        (KillCounts(cgroup=1), FULL, "machine", "most likely this one"),
        (KillCounts(cgroup=0, machine=2), FULL, "signal", "no kill for memory in this cgroup"),
        (KillCounts(machine=0), FULL, "signal", "no kill for memory in this machine"),
        (KillCounts(machine=2), FULL, "machine", "nearly full"),
        (KillCounts(machine=2), FULL_CGROUP, "cgroup", "nearly full"),
        (KillCounts(machine=2), ROOMY, "unknown", "which ones is unknown"),
        (KillCounts(), None, "unknown", "cannot be read"),
    ],
)
def test_the_cause_follows_from_the_kernel_s_counts(
    rise: KillCounts, last: MemorySample | None, cause: Cause, says: str
) -> None:
    found, evidence = judge(rise, last, "the last sample")
    assert found == cause
    assert says in " ".join(evidence)


def test_kills_that_were_counted_long_after_a_death_with_room_may_be_those_of_others() -> None:
    """A run ended by a scheduler, looked at days later: something else in its cgroup was killed since."""
    rise = KillCounts(cgroup=2)
    found, evidence = judge(rise, ROOMY, "the last sample", counted_s=2 * 24 * 3600)
    assert found == "unknown"
    assert "which ones is not known" in evidence[0]
    assert judge(rise, ROOMY, "the last sample", counted_s=30)[0] == "machine", "it took all that was left at once"
    assert judge(rise, FULL_CGROUP, "the last sample", counted_s=2 * 24 * 3600)[0] == "cgroup"


@pytest.mark.parametrize(
    ("before", "now", "expected"), [(3, 5, 2), (3, 3, 0), (None, 5, None), (3, None, None), (5, 3, None)]
)
def test_a_count_that_falls_is_another_count(before: int | None, now: int | None, expected: int | None) -> None:
    assert KillCounts(before, before).since(KillCounts()) == KillCounts()
    assert KillCounts(now, now).since(KillCounts(before, before)) == KillCounts(expected, expected)


@pytest.mark.parametrize(("path", "cgroup"), [("/job", 2), ("", 2), ("/other", None)])
def test_counts_of_two_cgroups_are_not_compared_and_those_of_the_machine_are(path: str, cgroup: int | None) -> None:
    assert KillCounts(5, 9, path).since(KillCounts(3, 4, "/job")) == KillCounts(cgroup, 5, path)
