"""`vesuvius doctor`: failing and hung checks, fake GPUs and torch, machines with faults, and the command."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from tests.conftest import run_vesuvius
from tests.monitor.probes.test_cores import V2, tree
from tests.monitor.probes.test_gpus import FakeNvml
from tests.support.system_trees import write_process, write_v2
from tests.support.tiny import tiny_sections
from vesuvius import accelerator, doctor
from vesuvius.commands import doctor as command
from vesuvius.config.load import parse_stored
from vesuvius.doctor import Check, Finding, examine
from vesuvius.errors import EXIT_CONFIG, EXIT_NO_RESULT, EXIT_OK, ConfigError
from vesuvius.monitor.probes.cores import TaskLimit
from vesuvius.runlog.units import GIB

WriteConfig = Callable[..., Path]
FINE = Finding("ok", "fine")
NAMES = [
    "versions", "cores", "memory", "disk", "volumes", "memory plan", "limits", "/dev/shm", "torch", "GPU", "Ray",
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "finding"),
    [
        (ZeroDivisionError("by zero"), Finding("fail", "ZeroDivisionError: by zero")),
        (OSError(), Finding("fail", "OSError: no message")),
        (SystemExit(3), Finding("fail", "SystemExit: 3")),
        (TimeoutError("late"), Finding("fail", "TimeoutError: late")),
        (ConfigError("a must be b; got c; set a=b"), Finding("fail", "a must be b; got c", "set a=b")),
    ],
)
def test_an_exception_in_a_check_is_a_failure_with_its_cause(error: BaseException, finding: Finding) -> None:
    def breaks() -> Finding:
        raise error

    checks = [Check("broken", breaks), Check("other", lambda: FINE)]
    assert list(examine(checks, 10)) == [("broken", finding), ("other", FINE)]


def test_a_hung_check_is_a_failure_and_on_a_busy_machine_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()

    def waits() -> Finding:
        end.wait(60)
        return FINE

    checks = [Check("hung", waits, "do this"), Check("plan", waits, late="warn"), Check("other", lambda: FINE)]
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    hung, plan, other = (found for _, found in examine(checks, 0.3))
    assert hung == Finding("fail", "no result within 0 s", "do this")
    assert (plan.level, other) == ("warn", FINE)
    monkeypatch.setattr(os, "getloadavg", lambda: (999.0, 0.0, 0.0))
    hung, _, other = (found for _, found in examine(checks, 0.3))
    assert (hung.level, "load 999.0" in hung.value, other) == ("warn", True, FINE)
    end.set()


def config_of(volume: str, **training: Any) -> Any:
    sections = tiny_sections("tiny", Path("x")) | {}
    sections["data"] |= {"volumes": [{"path": volume}]}
    sections["training"] |= training
    return parse_stored(sections)


def test_an_unsuitable_gpu_or_cudnn_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_torch().level == "ok"
    monkeypatch.setattr(accelerator, "choose_device", lambda: torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert doctor.check_gpus(None).level == "ok", "a GPU is optional"
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    found = doctor.check_gpus(None)
    assert (found.level, found.value[:36]) == ("fail", "NVIDIA H200, NVIDIA A100, which this")
    monkeypatch.setattr(accelerator, "choose_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(accelerator, "device_names", lambda: ["NVIDIA A100"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for version, level in ((91002, "fail"), (91500, "ok"), (90701, "ok")):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        found = doctor.check_gpus(config_of("x", amp="bf16", channels_last=False))
        remedy = "" if level == "ok" else "set training.channels_last=auto or install cuDNN 9.15 or newer"
        assert (found.level, found.remedy) == (level, remedy)
    assert found.value == "NVIDIA A100, cuDNN 90701, amp bf16"
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert doctor.check_gpus(config_of("x", amp="bf16")).level == "ok", "channels last by itself"


def test_a_ray_that_does_not_start_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hangs = f"import subprocess, sys; p = subprocess.Popen(['sleep', '600']); open({str(pid)!r}, 'w').write(str(p.pid))"
    monkeypatch.setattr(doctor, "_RAY", f"{hangs}; p.wait()")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    found = doctor.start_ray(None, 2.0)
    assert (found.level, "did not start in 2 s" in found.value) == ("fail", True)
    give_up = time.monotonic() + 60
    child = int(pid.read_text())
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:  # it is being killed
        assert time.monotonic() < give_up
        time.sleep(0.01)
    monkeypatch.setattr(doctor, "_RAY", "raise SystemExit('no room')")
    assert doctor.start_ray("h:1", 60.0).value == "the cluster at h:1 did not start: no room"


# Patches of the machine, and the line expected for each.
FAULTS: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "few processes": (
        {"training.forecast.preflight.task_limits": lambda: [TaskLimit("pids.max of cgroup /", 150, 10)]},
        ("fail", "limits", "pids.max of cgroup / allows 150"),
    ),
    "unreachable store": ({"doctor._GIVE_UP_MINUTES": 0.2 / 60}, ("fail", "volumes", "http://127.0.0.1")),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_each_fault_is_a_line_of_the_output_and_decides_the_exit_code(
    fault: str | None, tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a check that exists but is never run."""
    path = tiny_config(training={"workers": 1, "amp": "bf16"})
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(doctor, "start_ray", lambda *_: Finding("ok", "not tried here"))
    monkeypatch.setattr(doctor, "WITHIN_S", 250.0)
    patches, (level, name, words) = FAULTS[fault] if fault else ({}, ("ok", "volumes", "a patch of each was read"))
    for place, value in patches.items():
        monkeypatch.setattr(f"vesuvius.{place}", value)
    with socket.socket() as unanswered:  # bound and not listening
        unanswered.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unanswered.getsockname()[1]}/scroll.zarr"
        elsewhere = [f"data.volumes[0].path={address}"] if fault == "unreachable store" else []
        code = command.main(["--config", str(path), *elsewhere])
    lines = capsys.readouterr().out.splitlines()[1:-1]
    assert [line[6:].startswith(f"{each:12} ") for each, line in zip(NAMES, lines, strict=True)] == [True] * len(NAMES)
    (found,) = [line for line in lines if line[6:].startswith(f"{name:12} ")]
    assert (found[:5].rstrip(), words in found) == (level, True), found
    assert [line for line in lines if line.startswith("fail") and line != found] == []
    assert code == (EXIT_NO_RESULT if level == "fail" else EXIT_OK)
    assert not (path.parent / "runs").exists()


@pytest.mark.parametrize(("ranks", "workers", "stores"), [(1, 1, 1), (3, 1, 3), (3, 0, 0), (1, 0, None)])
def test_the_object_stores_of_all_ranks_count_in_shm(
    volume: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, workers: int, stores: int | None
) -> None:
    config = config_of(str(volume), ranks=ranks, workers=workers, train_batch_size=3, accumulate_steps=1)
    looked_at: list[int] = []
    monkeypatch.setattr(doctor, "check_shm", lambda need: looked_at.append(need) or Finding("ok", ""))
    monkeypatch.setattr(doctor, "store_bytes", lambda job, options: options.num_processes * 2**30)
    {check.name: check for check in doctor.checks_of(config)}["/dev/shm"].run()
    least = 2**28  # what Ray Train itself needs
    assert looked_at == ([] if stores is None else [max(stores * 2**30, least)])


@pytest.mark.parametrize(
    ("levels", "code"), [(("ok",), EXIT_OK), (("ok", "warn"), EXIT_OK), (("fail", "ok"), EXIT_NO_RESULT)]
)
def test_the_exit_code_is_1_only_for_a_failure_or_a_wrong_config(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    levels: tuple[Any, ...],
    code: int,
) -> None:
    findings = [(f"check {level}", Finding(level, "value", "" if level == "ok" else "remedy")) for level in levels]
    monkeypatch.setattr(doctor, "examine", lambda *_: iter(findings))
    assert command.main([]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(levels[0])
    assert lines[-1] == f"{levels.count('ok')} ok, {levels.count('warn')} warn, {levels.count('fail')} fail"
    (tmp_path / "wrong.yaml").write_text("nonsense: 1\n")
    assert command.main(["--config", str(tmp_path / "wrong.yaml")]) == EXIT_NO_RESULT
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("fail  config"), "and the machine is still examined"
    assert second.startswith(f"{levels[0]:5} check")
    with pytest.raises(SystemExit, match=str(EXIT_CONFIG)):
        command.main(["seed=1"])


@pytest.mark.long
def test_the_command_takes_less_than_30_s_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = run_vesuvius("doctor", cwd=tmp_path, timeout=30)
    (ray,) = [line for line in done.stdout.splitlines() if line[6:].startswith("Ray ")]
    assert (done.returncode == EXIT_OK and ray.startswith("ok")) or "try again" in ray, done.stdout
    assert list(tmp_path.iterdir()) == []


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
    assert doctor.check_versions().level == "ok", "our own requirements are met here"
    monkeypatch.setattr(doctor, "installed_version", (GOOD | replaced).get)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: NEEDS)
    found = doctor.check_versions()
    assert (found.level, value in found.value, found.remedy) == (level, True, remedy), found


def test_the_name_clash_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", {"vesuvius": "0.9"}.get)
    found = doctor.check_versions()
    assert (found.level, found.value[:31]) == ("fail", "the distribution 'vesuvius' 0.9")
    assert "uninstall it" in found.remedy


def test_a_quota_below_the_readers_of_all_ranks_is_detected(tmp_path: Path) -> None:
    tree(tmp_path, "0::/job\n", V2, {"job/cpu.max": "190000 100000"})
    assert doctor.check_cores(None).level == doctor.check_cores(0).level == "ok"
    found = doctor.check_cores(2)
    assert (found.level, found.value[:7]) == ("warn", "1.9 of ")
    assert found.remedy == "set training.workers=0, or provide more cores (docker run --cpus=3)"
    assert doctor.check_cores(1, 2).value.endswith("cores for 1 worker and the trainer of each of 2 ranks")
    assert doctor.check_cores(1, 2).remedy.endswith("(docker run --cpus=4)")


@pytest.mark.parametrize(("used", "level"), [(2, "ok"), (7, "warn")])
def test_a_nearly_full_cgroup_is_detected(tmp_path: Path, used: int, level: str) -> None:
    roots = write_v2(tmp_path, limit=8 * GIB, anon=used * GIB)
    write_process(roots, os.getpid())
    found = doctor.check_memory()
    assert (found.level, found.value.startswith("8.00 GiB (memory.max of cgroup /)")) == (level, True)


def test_a_small_shm_is_reported_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=4 * GIB, free=64 * 2**20))
    found = doctor.check_shm(3 * GIB)
    assert (found.level, found.value) == ("fail", "64 MiB free in /dev/shm, 3.00 GiB needed")
    assert "--shm-size=4g" in found.remedy
    assert doctor.check_shm(doctor.LEAST_SHM_BYTES).level == "fail", "Docker's default is too small for any Ray"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=4 * GIB, free=3 * GIB))
    assert doctor.check_shm(3 * GIB).value.endswith("3.00 GiB needed (docker run --shm-size=4g)")


def test_the_disk_of_the_run_is_tested_and_left_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    assert doctor.check_disk(runs / "tiny").value.startswith(f"{tmp_path}: writable, ")
    assert list(tmp_path.iterdir()) == []
    for free, level in ((400, "ok"), (399, "warn"), (99, "fail")):
        monkeypatch.setattr(doctor, "free_disk_bytes", lambda directory, free=free: free * GIB)
        found = doctor.check_disk(runs, 100 * GIB, 3)
        assert (found.level, "400.00 GiB for 4 checkpoints" in found.value) == (level, True)

    def refused(directory: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(doctor, "_try_disk", refused)
    found = doctor.check_disk(runs / "tiny")
    assert (found.level, found.value) == ("fail", f"{tmp_path} is not writable: Permission denied")
    assert "docker run --user" in found.remedy
    runs.write_text("")
    assert doctor.check_disk(runs / "tiny").level == "fail"
