"""Processors that may be used: bound ones, and quotas of version 1 and 2, of ancestors too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.system_trees import empty_roots
from vesuvius.monitor.probes.cores import quota_periods, usable_cores
from vesuvius.monitor.probes.files import Roots

PID = os.getpid()


def tree(tmp_path: Path, cgroup: str, mount: str, files: dict[str, str]) -> Roots:
    """Roots with a line of /proc/PID/cgroup, one of mountinfo, and files below /sys/fs/cgroup."""
    roots = empty_roots(tmp_path)
    (roots.proc / str(PID)).mkdir(parents=True, exist_ok=True)
    (roots.proc / str(PID) / "cgroup").write_text(cgroup)
    (roots.proc / "self").mkdir(exist_ok=True)
    (roots.proc / "self" / "mountinfo").write_text(mount)
    for name, text in files.items():
        path = roots.sys / "fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return roots


V2 = "30 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = "31 25 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"


def bound() -> float:
    return float(len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("own", "above", "cores"),
    [("max 100000", "max 100000", None), ("50000 100000", "max 100000", 0.5), ("max 100000", "25000 100000", 0.25)],
)
def test_version_2_takes_the_smallest_quota_of_the_cgroup_and_those_above(
    tmp_path: Path, own: str, above: str, cores: float | None
) -> None:
    files = {"job/cpu.max": above, "job/step/cpu.max": own}
    assert usable_cores(PID, tree(tmp_path, "0::/job/step\n", V2, files)) == (cores or bound())


@pytest.mark.parametrize(("quota", "cores"), [("-1", None), ("75000", 0.75), ("", None)])
def test_version_1_has_two_files(tmp_path: Path, quota: str, cores: float | None) -> None:
    files = {"cpu/job/cpu.cfs_quota_us": quota, "cpu/job/cpu.cfs_period_us": "100000"}
    roots = tree(tmp_path, "4:cpu,cpuacct:/job\n0::/\n", V1, files)
    assert usable_cores(PID, roots) == (cores or bound())


def test_a_quota_beyond_the_bound_processors_gives_no_more(tmp_path: Path) -> None:
    files = {"job/cpu.max": "9999900000 100000"}
    assert usable_cores(PID, tree(tmp_path, "0::/job\n", V2, files)) == bound()


@pytest.mark.parametrize(
    ("cgroup", "mount", "place"), [("0::/job/step\n", V2, "job"), ("4:cpu,cpuacct:/job/step\n0::/\n", V1, "cpu/job")]
)
def test_periods_in_which_a_quota_was_used_up_are_those_of_the_cgroup_that_holds_back(
    tmp_path: Path, cgroup: str, mount: str, place: str
) -> None:
    files = {
        f"{place}/cpu.stat": "usage_usec 5\nnr_periods 100\nnr_throttled 40\nthrottled_usec 9\n",
        f"{place}/step/cpu.stat": "nr_periods 0\nnr_throttled 0\n",
    }
    assert quota_periods(PID, tree(tmp_path, cgroup, mount, files)) == (100, 40)


def test_without_a_quota_there_are_no_periods(tmp_path: Path) -> None:
    assert quota_periods(PID, tree(tmp_path, "0::/job\n", V2, {"job/cpu.stat": "usage_usec 5\n"})) == (0, 0)


def test_this_process_may_use_some() -> None:
    assert 0 < usable_cores(PID) <= bound()
