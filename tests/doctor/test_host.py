"""Checks of the machine, on recorded or small real ones: faults are found, and healthy machines pass."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.monitor.probes.test_cores import V2, tree
from tests.support.system_trees import write_process, write_v2
from vesuvius.doctor import host
from vesuvius.runlog.units import GIB

NEEDS = [
    "torch>=2.10",
    "ray[data]<2.61,>=2.50",
    "zarr>=3.1.5",
    "winonly; platform_system == 'Windows'",
    "dev; extra == 'dev'",
]
GOOD = {"torch": "2.13.0+cpu", "ray": "2.60.0", "zarr": "3.2.0.dev1", "numpy": "2.4.0"}


@pytest.mark.parametrize(
    ("replaced", "level", "value", "remedy"),
    [
        ({}, "ok", "torch 2.13.0+cpu, ray 2.60.0, zarr 3.2.0.dev1, numpy 2.4.0", ""),
        ({"torch": "2.9.1+cu126"}, "fail", "torch 2.9.1+cu126 instead of", "pip install 'torch>=2.10'"),
        ({"ray": "2.61.0"}, "fail", "ray 2.61.0 instead of", "pip install 'ray<2.61,>=2.50'"),
        ({"zarr": None}, "fail", "zarr missing instead of", "pip install 'zarr>=3.1.5'"),
    ],
)
def test_a_wrong_or_missing_package_is_detected(
    monkeypatch: pytest.MonkeyPatch, replaced: dict[str, str | None], level: str, value: str, remedy: str
) -> None:
    assert host.check_versions().level == "ok", "our own requirements are met here"
    monkeypatch.setattr(host, "installed_version", (GOOD | replaced).get)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: NEEDS)
    found = host.check_versions()
    assert (found.level, value in found.value, found.remedy) == (level, True, remedy), found


def test_the_name_clash_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "installed_version", {"vesuvius": "0.9"}.get)
    found = host.check_versions()
    assert (found.level, found.value[:31]) == ("fail", "the distribution 'vesuvius' 0.9")
    assert "uninstall it" in found.remedy


def test_a_quota_below_the_readers_of_all_ranks_is_detected(tmp_path: Path) -> None:
    tree(tmp_path, "0::/job\n", V2, {"job/cpu.max": "190000 100000"})
    assert host.check_cores(None).level == host.check_cores(0).level == "ok"
    found = host.check_cores(2)
    assert (found.level, found.value[:7]) == ("warn", "1.9 of ")
    assert found.remedy == "set training.workers=0, or provide more cores (docker run --cpus=3)"
    assert host.check_cores(1, 2).value.endswith("cores for 1 reader and the trainer of each of 2 ranks")
    assert host.check_cores(1, 2).remedy.endswith("(docker run --cpus=4)")


@pytest.mark.parametrize(("used", "level"), [(2, "ok"), (7, "warn")])
def test_a_nearly_full_cgroup_is_detected(tmp_path: Path, used: int, level: str) -> None:
    roots = write_v2(tmp_path, limit=8 * GIB, anon=used * GIB)
    write_process(roots, os.getpid())
    found = host.check_memory()
    assert (found.level, found.value.startswith("8.00 GiB (memory.max of cgroup /)")) == (level, True)


def test_a_small_shm_is_reported_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 * 2**20))
    found = host.check_shm(3 * GIB)
    assert (found.level, found.value) == ("fail", "64 MiB free in /dev/shm, 3.00 GiB needed")
    assert "--shm-size=4g" in found.remedy
    assert host.check_shm(host.LEAST_SHM_BYTES).level == "fail", "Docker's default is too small for any Ray"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * GIB))
    assert host.check_shm(3 * GIB).value.endswith("3.00 GiB needed (docker run --shm-size=4g)")


def test_the_disk_of_the_run_is_tested_and_left_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    assert host.check_disk(runs / "tiny").value.startswith(f"{tmp_path}: writable, ")
    assert list(tmp_path.iterdir()) == []
    for free, level in ((400, "ok"), (399, "warn"), (99, "fail")):
        monkeypatch.setattr(host, "free_disk_bytes", lambda directory, free=free: free * GIB)
        found = host.check_disk(runs, 100 * GIB, 3)
        assert (found.level, "400.00 GiB for 4 checkpoints" in found.value) == (level, True)

    def refused(directory: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(host, "_try_disk", refused)
    found = host.check_disk(runs / "tiny")
    assert (found.level, found.value) == ("fail", f"{tmp_path} is not writable: Permission denied")
    assert "docker run --user" in found.remedy
    runs.write_text("")
    assert host.check_disk(runs / "tiny").level == "fail"
