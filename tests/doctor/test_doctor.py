"""`vesuvius doctor`: the GPU and torch on fakes, volumes and a training step on real ones, and the command."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
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
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from tests.conftest import run_vesuvius
from tests.support import fork_server
from tests.support.tiny import tiny_sections
from vesuvius.commands import doctor as command
from vesuvius.config.load import parse_stored, read_config
from vesuvius.doctor import data as doctor_data
from vesuvius.doctor import device, examination, host, trial
from vesuvius.doctor.check import THREADS, Check, Finding, examine
from vesuvius.errors import EXIT_CONFIG, EXIT_ERROR, EXIT_OK
from vesuvius.monitor.probes.task_limits import TaskLimit
from vesuvius.runlog.environment import installed_version
from vesuvius.runlog.units import GIB
from vesuvius.trials import process

CUDA = torch.device("cuda")
WriteConfig = Callable[..., Path]


class FakeNvml:
    """A driver with one GPU."""

    def nvmlInit(self) -> None: ...  # noqa: N802 - NVML's names
    def nvmlShutdown(self) -> None: ...  # noqa: N802
    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "NVIDIA A100"

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "550.1"


class NoNvml:
    def nvmlInit(self) -> None:  # noqa: N802
        raise RuntimeError("Driver Not Loaded")


@pytest.fixture
def forked_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a trial are forked from one that has torch imported."""
    monkeypatch.setattr(process, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": fork_server.start}))


def config_of(volume: str, **training: Any) -> Any:
    sections = tiny_sections("tiny", Path("x")) | {}
    sections["data"] |= {"volumes": [{"path": volume}]}
    sections["training"] |= training
    return parse_stored(sections)


def looked(look: Callable[[], Finding]) -> Finding:
    ((_, found),) = examine([Check("it", look, 60.0)], 60.0)
    return found


def test_torch_2_9_is_caught() -> None:
    found = looked(lambda: device.look_at_torch("2.9.1"))
    assert (found.level, found.remedy) == ("fail", "install torch 2.10 or newer")
    assert device.look_at_torch("2.13.0").level == "ok"


def test_a_gpu_that_torch_cannot_use_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = device.look_at_gpus()
    assert found.level == "fail"
    assert found.value.startswith("NVIDIA A100, driver 550.1, but a torch ")
    monkeypatch.setitem(sys.modules, "pynvml", NoNvml())
    assert device.look_at_gpus().level == "ok", "a GPU is optional"
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A100")
    assert device.look_at_gpus().value == "NVIDIA A100, driver 550.1"


@pytest.mark.parametrize(("version", "level"), [(91002, "fail"), (91500, "ok"), (90701, "ok")])
def test_a_cudnn_that_torch_convolves_without_is_caught(
    monkeypatch: pytest.MonkeyPatch, version: int, level: str
) -> None:
    monkeypatch.setattr(device, "choose_device", lambda: CUDA)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    found = device.look_at_cudnn(config_of("x", amp="bf16"))
    assert found.level == level
    if level == "fail":
        assert found.remedy == "set training.channels_last=true or install cuDNN 9.15 or newer"


@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_a_convolution_that_is_wrong_is_caught(wrong: float) -> None:
    assert device.look_at_kernels(None).level == "ok"
    found = device.look_at_kernels(None, lambda *given, **how: wrong * F.conv3d(*given, **how))
    assert found.level == "fail"
    assert "training.amp=off" in found.remedy


@pytest.mark.parametrize(("need", "level"), [(10, "ok"), (30, "warn"), (90, "fail")])
def test_a_config_that_does_not_fit_the_gpu_is_caught(monkeypatch: pytest.MonkeyPatch, need: int, level: str) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 * GIB, 80 * GIB))
    assert device.look_at_vram(need * GIB).level == level


def test_volumes_are_opened_and_read(volume: Path) -> None:
    config = config_of(str(volume))
    found, patch_s = doctor_data.time_reads(doctor_data.open_data(config), config)
    assert patch_s > 0
    assert found.level == "ok"
    assert found.value.startswith(f"{volume}")
    assert "96x128x128 uint8, 16 patches in " in found.value
    missing = looked(lambda: Finding("ok", str(doctor_data.open_data(config_of("nowhere.zarr")))))
    assert (missing.level, "a volume must exist" in missing.value) == ("fail", True)


def test_reading_is_judged_by_what_the_run_needs(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same speed serves a short run and not a long one; more readers and ranks share it."""
    monkeypatch.setattr(doctor_data, "_read", lambda data, number: ("scroll", 1.23))  # 2 patches in 2.46 s
    data = doctor_data.open_data(config_of(str(volume)))
    for training, level in (
        ({"steps_per_epoch": 1000}, "ok"),
        ({"steps_per_epoch": 10**6, "workers": 1}, "warn"),
        ({"steps_per_epoch": 10**6, "workers": 32}, "ok"),
    ):
        found, patch_s = doctor_data.time_reads(data, config_of(str(volume), **{"train_batch_size": 16} | training))
        assert patch_s == pytest.approx(1.23)
        assert (found.level, "for all patches of this run" in found.value) == (level, level == "warn")


@pytest.mark.parametrize(
    ("compute_s", "patch_s", "training", "level", "words"),
    [
        (0.5, 0.9, {"workers": 2}, "ok", "all 1000 steps: 8m20s of computing"),
        (0.5, 1.3, {"workers": 2}, "warn", "2 readers would keep it waiting 23.1 % of the time"),
        (0.5, 1.3, {"workers": 4}, "ok", ""),
        (0.5, 1.3, {"workers": 0}, "warn", "the trainer, which reads itself, would keep it waiting 61.5 %"),
        (0.5, 1.3, {"workers": 2, "ranks": 2}, "warn", "keep it waiting 23.1 %"),  # each rank has its own readers
        (0.01, 1.23, {"workers": 1}, "warn", "1 readers would keep it waiting 99.2 %"),  # 2 patches in 2.46 s
        (3000.0, 0.9, {"workers": 2}, "warn", "34d17h"),
    ],
)
def test_a_step_is_judged_by_the_length_of_the_run_and_by_its_readers(
    compute_s: float, patch_s: float, training: dict[str, Any], level: str, words: str
) -> None:
    config = config_of(
        "x", **{"steps_per_epoch": 1000, "epochs": 1, "accumulate_steps": 1, "train_batch_size": 1} | training
    )
    found = trial.judge_pace(config, "a step", compute_s, patch_s)
    assert (found.level, words in found.value) == (level, True), found
    assert bool(found.remedy) == (level == "warn")


def test_a_process_that_takes_too_long_ends_with_all_that_it_has_started() -> None:
    code, output = trial.run(["sh", "-c", "sleep 600 & echo $!; wait"], 0.5)
    assert code is None
    child = int(output)
    give_up = time.monotonic() + 60
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:  # it is being killed
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_the_small_experiment_is_a_config_with_a_volume_that_can_be_read(tmp_path: Path) -> None:
    config = trial.small_experiment(tmp_path)
    found, patch_s = doctor_data.time_reads(doctor_data.open_data(config), config)
    assert patch_s > 0
    assert "48x64x64 uint8, 16 patches in" in found.value


@pytest.mark.parametrize(
    ("ended", "level", "value"),
    [
        ((6, "INFO begin\nERROR no volume\n\n"), "fail", "exit code 6: ERROR no volume"),
        ((None, "INFO begin\n"), "warn", "not done within 9 s; last line: INFO begin"),
        ((0, "INFO done\n"), "fail", "its loss was not finite"),  # no step was recorded
    ],
)
def test_a_step_that_fails_or_takes_too_long_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: tuple[int | None, str], level: str, value: str
) -> None:
    def run(command: list[str], within_s: float, environment: dict[str, str]) -> tuple[int | None, str]:
        (Path(environment["VESUVIUS_RUNS"]) / "doctor").mkdir()
        (Path(environment["VESUVIUS_RUNS"]) / "doctor" / "metrics.jsonl").touch()
        return ended

    monkeypatch.setattr(trial, "run", run)
    found = trial.train_one_step(config_of("x"), on_gpu=True, within_s=9)
    assert (found.level, value in found.value) == (level, True)


@pytest.mark.parametrize(("load", "level"), [("", "fail"), ("load 9 on 2 processors", "warn")])
def test_a_ray_that_does_not_start_is_caught_unless_the_machine_is_busy(
    monkeypatch: pytest.MonkeyPatch, load: str, level: str
) -> None:
    monkeypatch.setattr(trial, "run", lambda command, within_s: (None, ""))
    monkeypatch.setattr(trial, "busy", lambda: load)
    assert trial.start_ray(None, 9).level == level


def test_processes_of_checks_that_hang_end_with_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int | None] = []

    def hangs() -> Finding:
        ended.append(trial.run(["sleep", "600"], 600)[0])
        return Finding("ok", "")

    monkeypatch.setattr(examination, "TOTAL_S", 2.0)
    monkeypatch.setattr(examination._Examination, "checks", lambda self: [Check("hung", hangs, within_s=1.0)])
    ((_, found),) = examination.examination(None)
    assert "no answer within 1 s" in found.value
    for thread in threading.enumerate():
        if thread.name.startswith(THREADS):
            thread.join(60)
    assert ended == [-signal.SIGKILL]


_FEW_TASKS = TaskLimit("pids.max of cgroup /", 150, 10)
NAMES = [
    "versions", "import name", "processors", "memory", "disk", "volumes", "memory plan", "checkpoints", "/dev/shm",
    "limits", "torch", "GPU", "cuDNN", "kernels", "Ray", "one step",
]  # fmt: skip


def refused(directory: Path) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


# What is patched where the machine is asked, and the line that must say so.
FAULTS: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "few processes": (
        {"examination.task_limits": lambda: [_FEW_TASKS]},
        ("fail", "limits", "pids.max of cgroup / allows 150"),
    ),
    "small /dev/shm": ({"host.free_shm": lambda: 64 * 2**20}, ("fail", "/dev/shm", "--shm-size=1g")),
    "no write permission": ({"host._try_disk": refused}, ("fail", "disk", "Permission denied")),
    "unreachable store": ({"data._GIVE_UP_MINUTES": 0.2 / 60}, ("fail", "volumes", "http://127.0.0.1")),
    "wrong torch": (
        {"host.installed_version": lambda name: "2.9.1" if name == "torch" else installed_version(name)},
        ("fail", "versions", "torch 2.9.1 where"),
    ),
    "name clash": (
        {"host.installed_version": lambda name: "0.9" if name == "vesuvius" else installed_version(name)},
        ("fail", "import name", "the distribution 'vesuvius' 0.9"),
    ),
    "quota below the readers": ({"host.usable_cores": lambda pid: 0.5}, ("warn", "processors", "0.5 of ")),
    "old cuDNN": (
        {"device.choose_device": lambda: CUDA, "device.torch.backends.cudnn.version": lambda: 91002},
        ("fail", "cuDNN", "got cuDNN 9.10"),
    ),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_each_fault_is_a_line_of_the_whole_examination_and_decides_the_exit_code(
    fault: str | None, tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check that is written and tested, and is not among those that are made, catches nothing."""
    path = tiny_config(training={"workers": 1, "amp": "bf16"})
    monkeypatch.chdir(path.parent)
    for slow in ("trial.start_ray", "trial.train_one_step", "device.look_at_kernels"):
        monkeypatch.setattr(f"vesuvius.doctor.{slow}", lambda *_: Finding("ok", "not tried here"))
    patches, (level, name, words) = FAULTS[fault] if fault else ({}, ("ok", "import name", "no conflicting"))
    for place, value in patches.items():
        monkeypatch.setattr(f"vesuvius.doctor.{place}", value)
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
    assert code == (EXIT_ERROR if level == "fail" else EXIT_OK)


@pytest.mark.parametrize(("ranks", "workers", "stores"), [(1, 1, 1), (3, 1, 3), (3, 0, 0)])
def test_each_rank_counts_its_store_in_shm(
    volume: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, workers: int, stores: int
) -> None:
    config = config_of(str(volume), ranks=ranks, workers=workers, train_batch_size=3, accumulate_steps=1)
    looked_at: list[int | None] = []
    monkeypatch.setattr(host, "look_at_shm", lambda need, free: looked_at.append(need) or Finding("ok", ""))
    monkeypatch.setattr(examination, "store_bytes", lambda job, options: options.workers * 2**30)
    checks = {check.name: check for check in examination._Examination(config).checks()}
    checks["volumes"].look()
    checks["/dev/shm"].look()
    assert looked_at == [max(stores * 2**30, 2**28)]  # Ray Train itself needs the least


@pytest.mark.usefixtures("forked_trials")
def test_a_whole_examination_of_a_config_that_is_fine(
    tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_config(training={"workers": 0})
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(examination, "TOTAL_S", 250.0)
    monkeypatch.setattr(examination, "_TRIAL_S", 250.0)
    found = dict(examination.examination(read_config(path)))
    assert list(found) == NAMES
    assert [(name, one) for name, one in found.items() if one.level == "fail"] == []
    assert found["/dev/shm"].value == found["Ray"].value == "not needed with training.workers=0"
    assert "16 patches in" in found["volumes"].value
    assert "RAM" in found["memory plan"].value
    assert "loss" in found["one step"].value
    assert not (path.parent / "runs").exists()


def examined(monkeypatch: pytest.MonkeyPatch, *levels: Any) -> None:
    findings = [(f"check {level}", Finding(level, "value", "" if level == "ok" else "remedy")) for level in levels]
    monkeypatch.setattr(examination, "examination", lambda config: iter(findings))


@pytest.mark.parametrize(
    ("levels", "code"), [(("ok",), EXIT_OK), (("ok", "warn"), EXIT_OK), (("fail", "ok"), EXIT_ERROR)]
)
def test_the_exit_code_is_1_for_a_failure_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], levels: tuple[str, ...], code: int
) -> None:
    examined(monkeypatch, *levels)
    assert command.main([]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(levels[0])
    assert lines[-1] == f"{levels.count('ok')} ok, {levels.count('warn')} warn, {levels.count('fail')} fail"


def test_a_wrong_config_is_a_failure_and_the_machine_is_still_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examined(monkeypatch, "ok")
    (tmp_path / "wrong.yaml").write_text("nonsense: 1\n")
    assert command.main(["--config", str(tmp_path / "wrong.yaml")]) == EXIT_ERROR
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("fail  config")
    assert second.startswith("ok    check ok")
    with pytest.raises(SystemExit, match=str(EXIT_CONFIG)):
        command.main(["seed=1"])


@pytest.mark.long
def test_the_command_takes_less_than_thirty_seconds_and_leaves_nothing(tmp_path: Path) -> None:
    done = run_vesuvius("doctor", cwd=tmp_path, timeout=30)
    assert done.returncode == EXIT_OK, done.stdout
    (ray,) = [line for line in done.stdout.splitlines() if line[6:].startswith("Ray ")]
    assert ray.startswith("ok") or "try again when the processors are idle" in ray, ray
    assert list(tmp_path.iterdir()) == []
