"""The check of a GPU: which settings it tries, what it takes for right, and all of it rehearsed on the CPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import REPOSITORY
from vesuvius.config.load import read_config
from vesuvius.training.step.step import StepOutcome

TOOL = REPOSITORY / "tools" / "gpu_check.py"
NEEDED = ("torch", "numpy", "pyyaml", "psutil", "pydantic")

# A sitecustomize module, which runs before the tool: nothing is installed but what is allowed, and no vesuvius.
BARE_MACHINE = """
import sys

INSTALLED = {installed}

class Bare:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in INSTALLED else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Bare, sys.meta_path)
sys.path[:] = [entry for entry in sys.path if entry != {source!r}]
"""


def bare_machine(folder: Path, *packages: str) -> dict[str, str]:
    """The environment of a machine with these packages, and what they need, alone."""

    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    allowed: set[str] = set()
    wanted = [*packages]
    while wanted:
        if (name := plain(wanted.pop())) in allowed:
            continue
        allowed.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system
        wanted += [match[0] for need in needs if "extra ==" not in need and (match := re.match(r"[\w.-]+", need))]
    modules = importlib.metadata.packages_distributions()
    refused = {module for module, names in modules.items() if not allowed & {plain(name) for name in names}}
    assert {"zarr", "ray", "rich"} <= refused
    text = BARE_MACHINE.format(installed=sorted(refused - {"vesuvius"}), source=str(REPOSITORY / "src"))
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": str(folder)}


def run_check(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), f"--json={folder / 'check.json'}", *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder, env=environment)


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


def test_without_time_every_setting_is_named(gpu_check: Any, tmp_path: Path) -> None:
    overrides = ["training.amp=bf16", "training.train_batch_size=1"]
    config = read_config(REPOSITORY / "configs/exp001_full.yaml", overrides)
    bench = gpu_check.Bench(torch.device("cpu"), config, 0.0, None, gpu_check.Budget(0.0))
    findings = gpu_check.Findings(tmp_path / "check.json", {})
    check = gpu_check.Check(bench, findings)
    check.run()
    content = read(tmp_path)
    assert content["skipped"][0] == asdict(check.default)
    assert [row["outcome"] for row in content["self_test"]] == ["out of time"] * 2
    assert content["rows"] == []
    assert findings.content["best"] is None


# ---- what is right


@pytest.mark.parametrize("losses", [(1.0, 1.1, 0.9), (1.0, math.nan, 1.0)], ids=["other patches", "not a number"])
def test_a_step_whose_losses_are_off_is_wrong_also_where_their_mean_is_right(
    gpu_check: Any, losses: tuple[float, ...]
) -> None:
    def outcome(*losses: float, grad_norm: float = 1.0) -> StepOutcome:
        return StepOutcome(sum(losses) / 3, losses, grad_norm, True, True, False, 0)

    measure = importlib.import_module("gpu.measure")
    right = [outcome(1.0, 1.0, 1.0)] * 3
    found = measure.compare([outcome(1.0, 1.0, 1.005), *right[1:]], right)
    assert found == {"loss_off": pytest.approx(0.005), "gradient_off": 0.0}
    with pytest.raises(measure.WrongResultError, match="losses are off"):
        measure.compare([*right[1:], outcome(*losses)], right)
    with pytest.raises(measure.WrongResultError, match="gradients by 20"):
        measure.compare([*right[1:], outcome(1.0, 1.0, 1.0, grad_norm=1.2)], right)


# ---- the command


@pytest.mark.long
def test_a_missing_package_is_named_with_what_installs_it(tmp_path: Path) -> None:
    done = run_check(tmp_path, "--rehearse", **bare_machine(tmp_path, "torch", "numpy", "pyyaml", "psutil"))
    assert done.returncode == 2
    assert done.stderr == ("gpu_check cannot start: No module named 'pydantic'; run: python -m pip install pydantic\n")


@pytest.mark.long
def test_without_a_gpu_it_says_so_and_exits_2(tmp_path: Path) -> None:
    done = run_check(tmp_path)
    assert done.returncode == 2
    assert "needs a CUDA GPU" in done.stderr
    assert "--rehearse" in done.stderr
    assert not (tmp_path / "check.json").exists()


@pytest.mark.long
def test_a_rehearsal_on_a_bare_machine_says_so_and_has_all_its_figures(tmp_path: Path) -> None:
    done = run_check(tmp_path, "--rehearse", "--peak-tflops=0.01", **bare_machine(tmp_path, *NEEDED))
    assert done.returncode == 0, done.stderr
    content, text = read(tmp_path), done.stdout
    assert text.startswith("REHEARSAL")
    assert content["finished"] is content["about"]["rehearsal"] is True
    assert content["skipped"] == []
    assert [row["outcome"] for row in content["self_test"]] == ["ok", "ok"]
    rows = content["rows"]
    default = {"compile": True, "channels_last": True, "recompute_norm": True, "optimizer": "muon"}
    assert default.items() <= rows[0].items(), "what auto is on a GPU"
    eager = [(row["train_batch_size"], row["accumulate_steps"], row["outcome"]) for row in rows[1:4]]
    assert eager == [(1, 4, "ok"), (2, 2, "ok"), (4, 1, "out of memory")]
    for key in default:
        assert len({row[key] for row in rows}) == 2, key
    ran = [row for row in rows if row["outcome"] != "out of memory"]
    for row in ran:
        assert row["outcome"] == "ok", row
        assert row["patches_s"] == pytest.approx(4 / row["step_s"])
        assert row["mfu"] / row["patches_s"] == pytest.approx(ran[0]["mfu"] / ran[0]["patches_s"])
        assert row["peak_allocated_bytes"] is None, "a CPU has none"
        assert row["plan_peak_bytes"] > 0
        assert max(row["loss_off"], row["gradient_off"]) > 0, "bf16 does round"
    assert content["best"] in text
    keys = dict(override.removeprefix("training.").split("=") for override in content["best"].split())
    mine = [row for row in ran if all(str(row[key]).lower() == value for key, value in keys.items())]
    assert mine, "the best is one of the rows"


# What a wrong kernel, and a machine without a compiler, come to.
BROKEN = f"""
import sys
sys.path.insert(0, {str(REPOSITORY / "tools")!r})
from vesuvius.diffusion.network import layers, regions

right = layers.norm_silu_conv

def wrong(x, weight, bias, groups, conv, recompute, before=None):
    return right(x, weight, bias, groups, conv, recompute, before) * (1.0 if recompute else 1.1)

layers.norm_silu_conv = wrong

def fails(*_):
    raise OSError("no C compiler")

begin = regions.CompiledRegions.__init__
regions.CompiledRegions.__init__ = lambda self, backend="inductor": begin(self, fails)
"""


@pytest.mark.long
def test_wrong_settings_and_those_that_do_not_compile_are_rows_with_a_reason_and_cannot_win(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    done = run_check(tmp_path, "--rehearse", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    content = read(tmp_path)
    for row in content["rows"]:
        if row["compile"]:
            assert row["outcome"] == "not compiled"
            assert "no C compiler" in row["detail"]
        elif not row["recompute_norm"]:
            assert row["outcome"] == "wrong"
            assert re.fullmatch(r"losses are off by up to \d.*% allowed", row["detail"])
    assert {"ok", "wrong", "not compiled", "out of memory"} == {row["outcome"] for row in content["rows"]}
    assert "training.compile=false" in content["best"]
    assert "training.recompute_norm=true" in content["best"]
    assert "| wrong: losses are off" in done.stdout


HANGING = f"""
import sys, time
sys.path.insert(0, {str(REPOSITORY / "tools")!r})
from vesuvius.diffusion.network import layers

right = layers.norm_silu_conv

def hang(x, *rest):
    if x.device.type != "meta":  # as which the self-test finds the convolutions
        time.sleep(600)
    return right(x, *rest)

layers.norm_silu_conv = hang
"""


@pytest.mark.long
def test_a_row_that_hangs_ends_with_the_time_and_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGING)
    done = run_check(tmp_path, "--rehearse", "--minutes=1.8", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1] == "gpu_check stops in the middle of a row: 1.8 minutes are over"
    assert done.stdout.count("self-test") == 2
    content = read(tmp_path)
    assert not content["finished"]
    assert [row["outcome"] for row in content["self_test"]] == ["ok", "ok"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.long
def test_on_a_gpu_memory_is_measured_and_the_plan_is_near_it(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), f"--json={tmp_path / 'check.json'}", "--minutes=3", "--seconds=0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [row for row in read(tmp_path)["rows"] if row["outcome"] == "ok"]
    assert rows
    for row in rows:
        assert row["peak_reserved_bytes"] >= row["peak_allocated_bytes"] > 0
        # The tolerance of the prediction.
        assert row["plan_peak_bytes"] == pytest.approx(row["peak_allocated_bytes"], rel=0.15), row
