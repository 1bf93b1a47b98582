"""Usable cores: affinity, and quotas of cgroups version 1 and 2, including ancestors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.system_trees import Roots, empty_roots
from vesuvius.monitor.probes.cores import (
    CpuQuota,
    cpu_quotas,
    others_text,
    throttling,
    usable_cores,
)


def tree(tmp_path: Path, cgroup: str, mount: str, files: dict[str, str]) -> Roots:
    """Roots with a line in /proc/PID/cgroup, one in mountinfo, and files below /sys/fs/cgroup."""
    roots = empty_roots(tmp_path)
    (roots.proc / str(os.getpid())).mkdir(parents=True, exist_ok=True)
    (roots.proc / str(os.getpid()) / "cgroup").write_text(cgroup)
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
def test_version_2_uses_the_smallest_quota_of_the_cgroup_and_its_ancestors(
    tmp_path: Path, own: str, above: str, cores: float | None
) -> None:
    tree(tmp_path, "0::/job/step\n", V2, {"job/cpu.max": above, "job/step/cpu.max": own})
    assert usable_cores(os.getpid()) == (cores or bound())
    assert len(cpu_quotas(os.getpid())) == (cores is not None), "none, none with periods"


@pytest.mark.parametrize(("quota", "cores"), [("-1", None), ("75000", 0.75), ("", None)])
def test_version_1_reads_quota_and_period(tmp_path: Path, quota: str, cores: float | None) -> None:
    files = {"cpu/job/cpu.cfs_quota_us": quota, "cpu/job/cpu.cfs_period_us": "100000"}
    tree(tmp_path, "4:cpu,cpuacct:/job\n0::/\n", V1, files)
    assert usable_cores(os.getpid()) == (cores or bound())


def nested(tmp_path: Path, version: int, step: tuple[int, int], job: tuple[int, int]) -> tuple[CpuQuota, ...]:
    """Quotas of a step (2 cores) in a job (8 cores), each with its periods and throttled periods."""
    files = {}
    for place, cores, (periods, throttled) in (("job/step", 2, step), ("job", 8, job)):
        if version == 2:
            files[f"{place}/cpu.max"] = f"{cores * 50_000} 50000"
        else:
            files[f"cpu/{place}/cpu.cfs_quota_us"] = str(cores * 50_000)
            files[f"cpu/{place}/cpu.cfs_period_us"] = "50000"
        stat = f"usage_usec 5\nnr_periods {periods}\nnr_throttled {throttled}\nthrottled_usec 9\n"
        files[f"{place}/cpu.stat" if version == 2 else f"cpu/{place}/cpu.stat"] = stat
    cgroup, mount = ("0::/job/step\n", V2) if version == 2 else ("4:cpu,cpuacct:/job/step\n0::/\n", V1)
    tree(tmp_path, cgroup, mount, files)
    return cpu_quotas(os.getpid())


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("step", "job", "share", "cores"),
    [
        # The job's past outweighs the present throttling by the step's quota.
        ((200, 40), (90_100, 50_000), 0.4, 2.0),
        # Others use up the job's quota; the smaller one of the step is not reached.
        ((200, 0), (90_100, 50_030), 0.3, 8.0),
        ((200, 5), (90_100, 50_000), 0.05, 2.0),
    ],
)
def test_throttling_names_the_quota_used_up_most_often_since(
    tmp_path: Path, version: int, step: tuple[int, int], job: tuple[int, int], share: float, cores: float
) -> None:
    before = nested(tmp_path / "before", version, (100, 0), (90_000, 50_000))
    after = nested(tmp_path / "after", version, step, job)
    assert [(quota.cgroup, quota.cores) for quota in after] == [("/job/step", 2.0), ("/job", 8.0)]
    found = throttling(before, after)
    assert found is not None
    assert (found[0], found[1].cores) == (pytest.approx(share), cores)
    assert throttling(after, after) is None, "no period since"


def test_other_programs_are_named_from_a_tenth_of_the_cores_on() -> None:
    assert others_text(1.14, 2.0) == "other programs use 1.1 of 2 cores"
    assert others_text(0.1, 2.0) == ""
