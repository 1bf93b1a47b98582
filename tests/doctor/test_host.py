"""Checks of the machine: each on a recorded or a small real one, with what must be caught and what must not."""

from __future__ import annotations

import errno
import importlib.metadata
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def versions(monkeypatch: pytest.MonkeyPatch, **replaced: str | None) -> host.Finding:
    monkeypatch.setattr(host, "installed_version", (GOOD | replaced).get)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: NEEDS)
    return host.look_at_versions()


def test_versions_that_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = versions(monkeypatch)
    assert found.level == "ok"
    assert "torch 2.13.0+cpu, ray 2.60.0, zarr 3.2.0.dev1, numpy 2.4.0" in found.value


@pytest.mark.parametrize(
    ("replaced", "value", "remedy"),
    [
        ({"torch": "2.9.1+cu126"}, "torch 2.9.1+cu126", "pip install 'torch>=2.10'"),
        ({"ray": "2.61.0"}, "ray 2.61.0", "pip install 'ray<2.61,>=2.50'"),
        ({"zarr": None}, "zarr missing", "pip install 'zarr>=3.1.5'"),
    ],
)
def test_a_wrong_or_missing_package_is_caught(
    monkeypatch: pytest.MonkeyPatch, replaced: dict[str, str | None], value: str, remedy: str
) -> None:
    found = versions(monkeypatch, **replaced)
    assert (found.level, found.remedy) == ("fail", remedy)
    assert found.value.startswith(value)


def test_our_own_requirements_are_met_here() -> None:
    assert host.look_at_versions().level == "ok"


def test_the_name_clash_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "installed_version", {"vesuvius": "0.9"}.get)
    found = host.look_for_namesake()
    assert (found.level, found.value[:31]) == ("fail", "the distribution 'vesuvius' 0.9")
    assert "uninstall it" in found.remedy


def test_a_quota_below_the_readers_is_caught(tmp_path: Path) -> None:
    tree(tmp_path, "0::/job\n", V2, {"job/cpu.max": "50000 100000"})
    found = host.look_at_cores(2)
    assert found.level == "warn"
    assert found.value.startswith("0.5 of ")
    assert found.remedy == "set training.workers=0, or give more processors (docker run --cpus=3)"
    assert host.look_at_cores(None).level == "ok"


def test_each_rank_has_a_trainer_and_readers_of_its_own(tmp_path: Path) -> None:
    tree(tmp_path, "0::/job\n", V2, {"job/cpu.max": "190000 100000"})
    assert host.look_at_cores(0, 1).level == "ok"
    found = host.look_at_cores(1, 2)
    assert (found.level, found.remedy) == (
        "warn", "set training.workers=0, or give more processors (docker run --cpus=4)"
    )  # fmt: skip
    assert found.value.endswith("processors for 1 readers and the trainer of each of 2 ranks")


def pressure(percent: float) -> str:
    return f"some avg10=0.00 avg60={percent:.2f} avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"


def test_the_machine_is_busy_as_far_as_this_container_feels_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host may have a load of 30 while a container of two processors waits for none, and the other way round."""
    monkeypatch.setattr("os.getloadavg", lambda: (1e6, 0.0, 0.0))
    for number, (own, others, is_busy) in enumerate([(3, 99, False), (97, 0, True), (None, 97, True)]):
        files = {} if own is None else {"job/cpu.pressure": pressure(own)}
        roots = tree(tmp_path / str(number), "0::/job\n", V2, files)
        (roots.proc / "pressure" / "cpu").write_text(pressure(others))
        assert (host.busy() != "") == is_busy
    tree(tmp_path / "none", "0::/job\n", V2, {})  # a kernel without PSI
    assert host.busy() == f"load 1000000.0 on {os.cpu_count()} processors"
    monkeypatch.setattr("os.getloadavg", lambda: (float(os.cpu_count() or 1), 0.0, 0.0))
    assert host.busy() == ""


@pytest.mark.parametrize(("throttled", "level"), [(4, "ok"), (40, "warn")])
def test_a_quota_that_brakes_is_caught(tmp_path: Path, throttled: int, level: str) -> None:
    files = {"job/cpu.max": "50000 100000", "job/cpu.stat": f"nr_periods 100\nnr_throttled {throttled}\n"}
    tree(tmp_path, "0::/job\n", V2, files)
    found = host.look_at_cores(None)
    assert found.level == level
    assert f"quota of 0.5 used up in {throttled} % of its periods" in found.value


@pytest.mark.parametrize(("used", "level"), [(2, "ok"), (7, "warn")])
def test_a_cgroup_that_is_nearly_full_is_caught(tmp_path: Path, used: int, level: str) -> None:
    roots = write_v2(tmp_path, limit=8 * GIB, anon=used * GIB)
    write_process(roots, os.getpid())
    found = host.look_at_memory()
    assert found.level == level
    assert found.value.startswith("8.00 GiB (memory.max of cgroup /)")


def test_a_small_shm_is_caught_with_the_line_that_fixes_it() -> None:
    found = host.look_at_shm(3 * GIB, 64 * 2**20)
    assert (found.level, found.value) == ("fail", "64 MiB free in /dev/shm, 3.00 GiB needed by this config")
    assert "--shm-size=4g" in found.remedy
    enough = host.look_at_shm(3 * GIB, 3 * GIB)
    assert enough.level == "ok"
    assert enough.value.endswith("needed by this config (docker run --shm-size=4g)")
    assert host.look_at_shm(None, 64 * 2**20).level == "fail"  # Docker's default is too small for any Ray
    assert host.look_at_shm(None, None).level == "warn"
    assert host.look_at_shm(0, 0).level == "ok"  # no readers, no object store


@given(need=st.integers(1, 2**45))
def test_the_shm_size_that_is_named_is_enough(need: int) -> None:
    assert need < host.shm_gib(need) * GIB <= 1.1 * need + GIB


def test_a_run_directory_without_write_permission_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(directory: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(host, "_try_disk", refused)
    found = host.look_at_disk(tmp_path / "runs" / "tiny")
    assert (found.level, found.value) == ("fail", f"{tmp_path} must be writable; got Permission denied")
    assert "docker run --user" in found.remedy


def test_a_disk_is_tried_where_the_run_will_be_and_left_as_it_was(tmp_path: Path) -> None:
    found = host.look_at_disk(tmp_path / "runs" / "tiny")
    assert found.value.startswith(f"{tmp_path}: ")
    assert found.level in ("ok", "warn")  # a disk may be nearly full here
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").write_text("")
    assert host.look_at_disk(tmp_path / "runs" / "tiny").level == "fail"


@pytest.mark.parametrize(("free", "level"), [(400, "ok"), (399, "warn"), (99, "fail")])
def test_checkpoints_that_do_not_fit_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, level: str
) -> None:
    monkeypatch.setattr(host, "free_disk_bytes", lambda directory: free * GIB)
    found = host.look_at_checkpoints(tmp_path / "runs", 100 * GIB, 3)
    assert found.level == level
    assert found.value.startswith("400.00 GiB for 4 checkpoints of 100.00 GiB")
