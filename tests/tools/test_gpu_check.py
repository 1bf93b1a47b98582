"""The check of a GPU: which settings it tries, what breaks a row, what is right, and a rehearsal on the CPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from tests.conftest import REPOSITORY
from tests.support.bare_machine import bare_machine
from vesuvius.config.load import read_config

TOOL = REPOSITORY / "tools" / "gpu_check.py"
NEEDED = ("torch", "numpy", "pyyaml", "psutil", "pydantic")


def run_check(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), f"--json={folder / 'check.json'}", *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=3600, cwd=folder, env=environment)


def read(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "check.json").read_text())
    return content


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(REPOSITORY / "tools"), *sys.path])
    return importlib.import_module("gpu_check")


# ---- which settings are tried


class Machine:
    """A made-up GPU: the host takes a millisecond a micro-batch where nothing is compiled, and so on."""

    def __init__(self, most_patches: int = 8, compiles: bool = True, recomputing_s: float = 0.02) -> None:
        self.most_patches, self.compiles, self.recomputing_s = most_patches, compiles, recomputing_s
        self.tried: list[Any] = []

    def __call__(self, setting: Any) -> float | None:
        assert setting not in self.tried, "a minute, perhaps"
        self.tried.append(setting)
        if setting.train_batch_size > self.most_patches or (setting.compile and not self.compiles):
            return None
        order_s = 0.0 if setting.channels_last else 0.2
        recomputing_s = self.recomputing_s if setting.recompute_norm and not setting.compile else 0.0
        host_s = (0.02 if setting.compile else 0.08) * setting.accumulate_steps
        muon_s = 0.1 if setting.optimizer == "muon" else 0.0
        return 0.5 + order_s + recomputing_s + host_s + muon_s - 0.1 * setting.compile


def a_setting(gpu_check: Any, **keys: Any) -> Any:
    default = {"compile": True, "channels_last": True, "recompute_norm": True, "optimizer": "muon"}
    return gpu_check.Setting(**default | {"train_batch_size": 1, "accumulate_steps": 8} | keys)


def test_the_fastest_of_all_settings_is_found_without_trying_most(gpu_check: Any) -> None:
    machine, default = Machine(recomputing_s=0.2), a_setting(gpu_check)
    best = gpu_check.search(default, (1, 2, 4, 8), machine)
    # Compiled, recomputing is free here: it was turned off before, and that stays, as it is no slower.
    assert best == replace(default.with_micro_batch(8), recompute_norm=False)
    assert machine.tried[0] == default, "first what a run does"
    assert {setting.train_batch_size for setting in machine.tried} == {1, 2, 4, 8}
    for key in ("compile", "channels_last", "recompute_norm", "optimizer"):
        assert len({getattr(setting, key) for setting in machine.tried}) == 2, key
    assert len(machine.tried) <= 12
    assert sum(setting.compile for setting in machine.tried) <= 5, "each takes a minute"


def test_a_micro_batch_that_does_not_fit_ends_the_larger_ones_and_cannot_win(gpu_check: Any) -> None:
    machine = Machine(most_patches=2)
    best = gpu_check.search(a_setting(gpu_check), (1, 2, 4, 8), machine)
    assert (best.train_batch_size, best.accumulate_steps) == (2, 4)
    assert [setting.train_batch_size for setting in machine.tried if setting.train_batch_size > 2] == [4]


def test_where_nothing_compiles_or_nothing_runs_it_says_so(gpu_check: Any) -> None:
    best = gpu_check.search(a_setting(gpu_check), (1, 2, 4, 8), Machine(compiles=False))
    assert best == a_setting(gpu_check, compile=False, recompute_norm=False, train_batch_size=8, accumulate_steps=1)
    assert gpu_check.search(a_setting(gpu_check), (1, 2, 4, 8), Machine(most_patches=0)) is None


def test_a_switch_that_gains_nothing_stays_as_the_config_has_it(gpu_check: Any) -> None:
    best = gpu_check.search(a_setting(gpu_check), (1, 2, 4, 8), Machine(recomputing_s=0.001))
    assert best.recompute_norm
    assert best.overrides == (
        "training.compile=true training.channels_last=true training.recompute_norm=true training.train_batch_size=8 "
        "training.accumulate_steps=1"
    )


# ---- the command, with a device that is made up

# Rows as in `outcomes.json`, by check; the names of all that were measured go to `measured.txt`.
MADE_UP = """
import json, os, pathlib, signal, time

def prepare(options):
    folder = pathlib.Path(options["config"]).parent
    setting = {"compile": True, "channels_last": True, "recompute_norm": True, "optimizer": "muon"}
    setting |= {"train_batch_size": 8, "accumulate_steps": 1}
    about = {"device": "A1", "gpus": 1, "memory_bytes": 2**30, "peak_tflops": None, "versions": {}, "amp": "bf16"}

    def measure(request):
        check, wanted = request["check"], json.loads((folder / "outcomes.json").read_text())
        with (folder / "measured.txt").open("a") as file:
            print(check, os.getpid(), *request["arguments"].get("setting", {}).values(), file=file)
        row = dict(wanted.get(check, {}))
        act = row.pop("act", "")
        if act == "hang":
            time.sleep(60)
        if act:
            os.kill(os.getppid() if act == "kill parent" else os.getpid(), signal.SIGKILL)
            time.sleep(60)
        s = 1.0 if request["arguments"].get("setting", {}).get("compile") else wanted.get("eager", 2.0)
        return {"outcome": "ok", **({"step_s": s} if check == "measure" else {}), **row}

    return about | {"setting": setting, "micro_batches": [8], "larger": []}, measure
"""


class Checked:
    """Calls of the command, each with the outcomes of some checks."""

    def __init__(self, gpu_check: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._gpu_check = folder, gpu_check
        (folder / "made_up.py").write_text(MADE_UP)
        (folder / "config.yaml").write_text("name: any")
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
        monkeypatch.chdir(folder)
        runner, self._monkeypatch = importlib.import_module("gpu.runner"), monkeypatch
        monkeypatch.setattr(runner, "HUNG_S", 1.0)
        monkeypatch.setattr(gpu_check, "LIMITS", {True: (0.0, 1.0), False: (0.0, 1.0)})
        monkeypatch.setattr(gpu_check, "Worker", lambda _, options, log: runner.Worker("made_up", options, log))

    def __call__(self, *options: str, **outcomes: Any) -> int:
        (self.folder / "outcomes.json").write_text(json.dumps(outcomes))
        self._monkeypatch.setattr(sys, "argv", ["gpu_check", "--config=config.yaml", "--json=check.json", *options])
        code: int = self._gpu_check.main()
        return code

    @property
    def measured(self) -> list[list[str]]:
        return [line.split() for line in (self.folder / "measured.txt").read_text().splitlines()]


@pytest.fixture
def checked(gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checked:
    return Checked(gpu_check, tmp_path, monkeypatch)


def test_the_first_line_names_the_fastest_setting_and_a_second_call_measures_what_failed(
    checked: Checked, capsys: pytest.CaptureFixture[str]
) -> None:
    skipped = {"outcome": "skipped", "detail": "one GPU; buy two"}
    assert checked(ranks=skipped, sampling={"outcome": "OSError", "detail": "no compiler"}) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        "first mend sampling: OSError: no compiler; then nothing: the config's own setting is the fastest of 6 "
        "measured; not run: ranks (one GPU)"
    )
    assert len({pid for _, pid, *_ in checked.measured}) == 2, "an error may have broken CUDA, a wrong row has not"
    before = len(checked.measured)
    assert checked(eager=0.5) == 0
    assert [check for check, *_ in checked.measured[before:]] == ["sampling", "ranks"], "all else is known"
    assert "nothing: the config's own" in capsys.readouterr().out.splitlines()[0]
    assert checked("--restart", eager=0.5) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "set training.compile=false training.channels_last=true training.recompute_norm=true "
        "training.train_batch_size=8 training.accumulate_steps=1: 2.00 times as fast as the config's own, the fastest "
        "of 4 measured"
    )
    assert checked("--peak-tflops=1") == 2, "rows of another request stay"
    other = importlib.import_module("gpu.runner").Findings(checked.folder / "check.json", False)
    assert checked() == 2, "two would replace each other's rows"
    del other


def test_rows_that_are_wrong_hang_or_die_are_rows_with_the_reason_and_the_first_line(
    checked: Checked, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, late = {"outcome": "wrong", "detail": "off by 1"}, {"outcome": "out of time", "detail": "none left"}
    assert checked(muon={"act": "hang"}, fft={"act": "die"}, scaler=wrong, train=late) == 1
    rows, first = read(checked.folder)["rows"], capsys.readouterr().out.splitlines()[0]
    assert rows["muon"]["outcome"] == "hung"
    assert rows["fft"]["outcome"] == "died"
    assert "SIGKILL" in rows["fft"]["detail"]
    assert first.startswith("first mend fp16 scaler: wrong: off by 1 (and 2 more: muon, fft); then nothing: ")
    assert first.endswith("; not run: train (none left)")
    assert rows["ranks"]["outcome"] == "ok", "later rows are measured"
    settings = {"own": "a", "rows": {"setting b": {"outcome": "hung"}, "setting c": wrong}}
    assert importlib.import_module("gpu.report").failures(settings) == ["setting c"]
    # Nothing is claimed of what was not run.
    assert checked("--restart", "--minutes=-1") == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("it is unknown which setting is fastest: 0 measured")
    assert "pytest -m gpu (no time)" in first


def test_a_kill_in_the_middle_loses_one_row_and_leaves_no_process(checked: Checked) -> None:
    program = checked.folder / "main.py"
    program.write_text(
        f"import sys\nsys.path[:0] = [{str(checked.folder)!r}, {str(TOOL.parent)!r}]\nimport gpu_check\n"
        "make = gpu_check.Worker\ngpu_check.Worker = lambda module, *rest: make('made_up', *rest)\n"
        "if __name__ == '__main__':\n    sys.exit(gpu_check.main())\n"
    )
    command = [sys.executable, str(program), "--config=config.yaml", "--json=check.json"]
    (checked.folder / "outcomes.json").write_text(json.dumps({"convolutions": {"act": "kill parent"}}))
    assert subprocess.run(command, capture_output=True, timeout=100).returncode == -9
    known, measured = read(checked.folder)["rows"], checked.measured
    assert [*known] == ["curve float32", "muon", "fp16 scaler", "fft", "curve 16 bits"]
    orphan, deadline = Path("/proc", measured[-1][1]), time.monotonic() + 10
    while orphan.exists() and "Z" not in (orphan / "stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the child outlives the command"
        time.sleep(0.01)
    assert checked() == 0
    again = [check for check, *_ in checked.measured[len(measured) :]]
    assert again[:3] == ["convolutions", "convolutions", "out_of_memory"]
    rows = read(checked.folder)["rows"]
    assert {name: rows[name] for name in known} == known, "not measured again"


# ---- what is right


@pytest.fixture
def bench(gpu_check: Any) -> Any:
    measure, worker = (importlib.import_module(f"gpu.{name}") for name in ("measure", "worker"))
    in_float32 = "training.amp=off"  # which a CPU computes faster; where bf16 or fp16 matter, a check sets them
    config = read_config(REPOSITORY / "configs/exp001_full.yaml", [*worker.REHEARSED, in_float32])
    return measure.Bench(torch.device("cpu"), config)


def row_of(bench: Any, check: str, **arguments: Any) -> tuple[str, str]:
    """Outcome and detail."""
    row = importlib.import_module("gpu.worker").answer(bench, {"check": check, "arguments": arguments, "limit_s": 600})
    return row["outcome"], row.get("detail", "")


def test_a_curve_beyond_what_rounding_explains_is_wrong_and_rounding_may_grow(gpu_check: Any) -> None:
    checks, rng = importlib.import_module("gpu.checks"), np.random.default_rng(0)
    truth, growing = rng.uniform(0.5, 1.5, (50, 8)), 1e-6 * 1.1 ** np.arange(50)[:, None]
    near, found = (truth * (1 + growing * rng.standard_normal(truth.shape)) for _ in range(2))
    assert 0 < checks.judge_curve(found, truth, near)["used"] < 1
    for step, changed in ((1, found[1] * 1.0001), (30, found[30] * np.nan), (49, np.roll(found[49], 1))):
        wrong = found.copy()
        wrong[step] = changed
        with pytest.raises(RuntimeError) as raised:
            checks.judge_curve(wrong, truth, near)
        assert str(raised.value).startswith(f"losses of step {step + 1}: off by")


def test_a_kernel_that_is_wrong_on_the_device_alone_is_seen(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a rehearsal the device is that of the other memory order."""
    right = F.conv3d

    def wrong(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        out = right(x, *arguments, **options)
        is_other = x.shape[1] > 1 and x.is_contiguous(memory_format=torch.channels_last_3d) and not x.is_contiguous()
        return out * 1.001 if is_other else out

    assert row_of(bench, "curve", amp="off", steps=2) == ("ok", "")
    monkeypatch.setattr(F, "conv3d", wrong)
    outcome, detail = row_of(bench, "curve", amp="off", steps=2)
    assert (outcome, detail[:25]) == ("wrong", "losses of step 1: off by ")


@pytest.mark.long
def test_a_wrong_muon_scaler_transform_or_memory_error_is_wrong(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checks, muon = importlib.import_module("gpu.checks"), importlib.import_module("vesuvius.training.step.muon")
    split, calls, (a, b, c) = checks.split_signal_noise, count(), muon._COEFFICIENTS

    def wrong_split(*arguments: Any) -> Any:
        channels, *others = split(*arguments)
        return channels * (1.0001 if next(calls) % 2 else 1.0), *others  # the first is in float64

    wrong: dict[str, tuple[Any, str, Any]] = {
        "muon": (muon, "_COEFFICIENTS", (a, b, 1.01 * c)),
        "scaler": (torch.amp, "GradScaler", partial(torch.amp.GradScaler, backoff_factor=0.25)),
        "fft": (checks, "split_signal_noise", wrong_split),
        "out_of_memory": (checks, "is_gpu_memory_error", lambda error: False),
    }
    monkeypatch.setattr(checks, "planned_peak", lambda config: 1)  # the hook runs out, whatever is planned
    for check, patch in wrong.items():
        arguments = {"total_bytes": 0} if check == "out_of_memory" else {}
        assert row_of(bench, check, **arguments) == ("ok", "")
        with monkeypatch.context() as patched:
            patched.setattr(*patch)
            outcome, detail = row_of(bench, check, **arguments)
        assert outcome == ("out of memory" if check == "out_of_memory" else "wrong"), (check, detail)


def test_a_setting_is_compared_with_the_reference_patch_by_patch(gpu_check: Any) -> None:
    compare = importlib.import_module("gpu.measure").compare
    right = {"losses": [[1.0, 2.0]] * 3, "grad_norms": [1.0] * 3}
    twice = {"losses": [[1.0, 2.0, 1.0, 2.0]] * 3, "grad_norms": [1.01] * 3}
    assert compare(twice, right) == {"loss_off": 0.0, "gradient_off": pytest.approx(0.01)}, "a larger batch of the same"
    for losses, norm in (([2.0, 1.0], 1.0), ([float("nan"), 2.0], 1.0), ([1.0, 2.0], 1.2)):
        with pytest.raises(RuntimeError, match="allowed"):
            compare({"losses": [losses, *right["losses"][1:]], "grad_norms": [norm, 1.0, 1.0]}, right)


def test_failed_tests_of_a_gpu_are_named(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("gpu.processes"), "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    text = "import pytest\npytestmark = pytest.mark.gpu\ndef test_good(): pass\ndef test_bad(): assert False\n"
    (tmp_path / "tests" / "test_a.py").write_text(text)
    assert row_of(bench, "gpu_tests") == ("wrong", "1 of 2 tests failed: tests/test_a.py::test_bad")


@pytest.mark.parametrize("spoiled", ["", "losses", "weights"])
def test_a_resumed_run_that_differs_is_wrong(bench: Any, spoiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = importlib.import_module("gpu.processes")

    class MadeUp(processes.Commands):  # type: ignore[misc, name-defined]
        def start(self, log: str, *_: str, **__: Any) -> Any:
            never_ends = log == "killed" and not self.started
            self.started += [self] if log == "killed" else []
            return SimpleNamespace(poll=lambda: None if never_ends else 0, returncode=0, kill=int, wait=int)

        def losses(self, name: str) -> dict[int, float]:
            return {step: 1 / step + (name == "killed" and spoiled == "losses" and step == 9) for step in range(1, 11)}

        def weights(self, name: str) -> bytes:
            return b"killed" if name == "killed" and spoiled == "weights" else b""

        def records(self, name: str) -> list[dict[str, str]]:
            return [{"kind": kind} for kind in ("validation", "preview", "checkpoint")]

        kill = wait = lambda self: None

    monkeypatch.setattr(processes, "Commands", MadeUp)
    outcome, detail = row_of(bench, "train", steps=10)
    assert outcome == ("wrong" if spoiled else "ok"), detail
    assert ("from step 9 on" in detail) == (spoiled == "losses")


# ---- rehearsals


@pytest.mark.long
def test_what_is_missing_is_named_with_the_remedy(tmp_path: Path) -> None:
    done = run_check(tmp_path, "--rehearse", **bare_machine(tmp_path, "torch", "numpy", "pyyaml", "psutil"))
    assert (done.returncode, done.stdout) == (2, "")
    remedy = "run: python -m pip install pydantic"
    assert done.stderr == f"gpu_check stops: No module named 'pydantic'; {remedy}\n"
    done = run_check(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs a CUDA GPU" in done.stderr
    assert not (tmp_path / "check.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("is_bare", [True, False])
def test_a_rehearsal_has_all_rows_and_a_bare_machine_those_that_need_no_more(tmp_path: Path, is_bare: bool) -> None:
    environment = bare_machine(tmp_path, *NEEDED) if is_bare else {}
    done = run_check(tmp_path, "--rehearse", "--peak-tflops=0.01", "--minutes=60", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    content, first = read(tmp_path), done.stdout.splitlines()[0]
    assert first.startswith("REHEARSAL")
    assert content["not_run"] == []
    skipped = {name for name, row in content["rows"].items() if row["outcome"] == "skipped"}
    assert skipped == ({"train", "pytest -m gpu", "ranks"} if is_bare else set())
    assert all(name in first for name in skipped)
    settings = [row for name, row in content["rows"].items() if name.startswith("setting ")]
    for key in ("compile", "channels_last", "recompute_norm", "optimizer", "train_batch_size"):
        assert len({row[key] for row in settings}) >= 2, key
    outcomes = {row["train_batch_size"]: row["outcome"] for row in settings}
    assert outcomes == {1: "ok", 2: "ok", 4: "out of memory", 8: "out of memory"}
    for row in settings:
        assert row["outcome"] != "ok" or max(row["loss_off"], row["gradient_off"]) > 0, "bf16 does round"
    classes = content["rows"]["speed of convolutions"]["classes"]
    assert {(one["class"], one["pass"]) for one in classes} >= {
        ("few channels", "weight gradient"),
        ("1x1x1", "forward"),
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.long
def test_on_a_gpu_memory_is_measured_and_the_plan_is_near_it(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), f"--json={tmp_path / 'check.json'}", "--minutes=6"]
    subprocess.run(command, check=False, timeout=500)
    rows = [row for row in read(tmp_path)["rows"].values() if "step_s" in row]
    assert rows
    for row in rows:
        assert row["reserved_gib"] >= row["peak_gib"] > 0
        assert row["plan_gib"] == pytest.approx(row["peak_gib"], rel=0.15), row
