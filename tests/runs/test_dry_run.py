"""`--dry-run` describes the run and writes nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.chunk_server import ChunkServer
from tests.support.runs import WriteConfig, vesuvius_train
from vesuvius.config.load import read_config
from vesuvius.errors import EXIT_CONFIG, EXIT_OK
from vesuvius.runlog.units import format_duration
from vesuvius.training.forecast import start_log
from vesuvius.volumes.store.cache import DiskCache


def test_the_dry_run_describes_the_run_and_writes_nothing(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_log, "convolution_flops_s", lambda *_: 2e5)
    arguments = ("--dry-run", "training.workers=2", "training.amp=off", "training.epochs=40")
    assert vesuvius_train(tiny_config(), *arguments) == 0
    text = capsys.readouterr().out
    assert not Path("runs").exists()
    for fact in (
        "96x128x128 uint8",
        "validation",
        "read amplification",
        "M parameters",
        r"memory +RAM [\d.]+ GiB planned of [\d.]+ GiB \(.*\): workers [\d.]+ GiB, store [\d.]+ MiB, Ray [\d.]+ GiB, t",
        "GiB free",
    ):
        assert re.search(fact, text), fact
    assert "WARN " not in text
    assert "VRAM" not in text, "no GPU here, and none asked for"
    time = r"time +([\d.]+) GFLOP per step, about (\w+) to (\w+) on this CPU: (\w+) to (\w+) for (\d+) steps"
    found = re.search(time, text)
    assert found
    step_s, steps = float(found[1]) * 1e9 / 1e5, read_config(tiny_config(), ["training.epochs=40"]).stop_step
    assert int(found[6]) == steps
    for factor, of_step, of_run in ((0.6, found[2], found[4]), (2.5, found[3], found[5])):
        assert of_step[:3] == format_duration(factor * step_s)[:3], "to the digits of the operations shown"
        assert of_run[:3] == format_duration(factor * step_s * steps)[:3]


def test_another_effective_batch_than_the_file_is_named_with_what_usually_follows(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong programs compare with the config that has the overrides already, count `auto` as one rank, scale by the
    ratio instead of its root, or name overrides that give another batch."""
    monkeypatch.setattr(start_log, "convolution_flops_s", lambda *_: 2e5)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    path = tiny_config(training={"train_batch_size": 2, "accumulate_steps": 4, "lr": 1e-3, "workers": 0})

    def dry_run(*overrides: str) -> str:
        assert vesuvius_train(path, "--dry-run", *overrides) == 0
        return capsys.readouterr().out

    text = dry_run("training.ranks=auto")
    assert f"batch      2 x 4 x 4 ranks = 32 samples per step, but 8 in {path}\n" in text
    assert "WARN       32 samples per step instead of 8 at the same training.lr=0.001; the square-root rule" in text
    follows = re.search(r"rule gives training.lr=(\S+), or keep 8 samples with (\S+ \S+)", text)
    assert follows
    assert follows[1] == "0.002"
    assert "2 x 1 x 4 ranks = 8 samples per step\n" in dry_run("training.ranks=4", *follows[2].split())
    text = dry_run("training.ranks=4", f"training.lr={follows[1]}")
    assert "32 samples per step, but 8 in" in text
    assert "rule" not in text, "the learning rate was set, too"
    text = dry_run("training.ranks=3")
    assert "24 samples per step instead of 8" in text
    assert "keep 8" not in text, "three ranks cannot share eight samples"


@pytest.mark.long
def test_the_dry_run_refuses_a_gpu_that_is_too_small_and_names_what_fits(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = ("--dry-run", "--vram-gib", "0.65")
    assert vesuvius_train(tiny_config(), *planned, "training.train_batch_size=512") == EXIT_CONFIG
    refusal = re.search(r"train_batch_size 512 does not fit: .* set (\S+) and", capsys.readouterr().err)
    assert refusal
    assert vesuvius_train(tiny_config(), *planned, refusal[1]) == EXIT_OK
    text = capsys.readouterr().out
    for fact in (
        r"VRAM 0\.6\d GiB planned of 0.65 GiB \(--vram-gib\): [\d.]+ MiB at the peak of train_batch_size \d+, amp",
        r"largest micro-batch that fits: \d+",
        r"time +[\d.]+ GFLOP per step; the time per step cannot be measured without the GPU",
    ):
        assert re.search(fact, text), fact
    assert "WARN       training.train_batch_size" not in text
    assert vesuvius_train(tiny_config(), "--dry-run", "--vram-gib", "0.5") == EXIT_CONFIG
    shown = capsys.readouterr()
    assert "largest micro-batch that fits: 0" in shown.out
    assert "GPU memory; add training.checkpoint_levels" in shown.err, "recompute_norm is on already"


def test_the_dry_run_refuses_too_much_memory_and_its_suggested_workers_fit(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--dry-run", "monitor.ram_limit_gib=1.3", "training.epochs=9")
    assert vesuvius_train(tiny_config(), *arguments, "training.workers=6") == EXIT_CONFIG
    shown = capsys.readouterr()
    assert "passed" not in shown.out
    refusal = re.search(
        r"of host memory are planned.*monitor.ram_limit_gib.*most of it for workers.* with (\S+)", shown.err
    )
    assert refusal
    assert vesuvius_train(tiny_config(), *arguments, refusal[1]) == EXIT_OK
    assert "of host memory" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--vram-gib", "80"], *(["--dry-run", "--vram-gib", n] for n in ("0", "x", "inf", "1e300"))]
)
def test_vram_gib_is_positive_and_requires_a_dry_run(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        vesuvius_train(tiny_config(), *arguments)
    assert exit_info.value.code == 2
    assert "--vram-gib" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.long
def test_a_dry_run_does_not_change_the_chunk_cache(
    tiny_config: WriteConfig, volume: Path, server: ChunkServer, tmp_path: Path
) -> None:
    """It creates no folder, does not shrink an existing larger cache, and stores no chunk."""
    path = tmp_path / "cache"
    store = {"cache_dir": str(path), "cache_gib": 0.01}
    config = tiny_config(data={"volumes": [{"path": server.url_of(volume)}], "store": store})
    assert vesuvius_train(config, "--dry-run") == 0
    assert not path.exists()
    cache = DiskCache(path / "vesuvius-chunk-cache", 2**30)
    cache.check()
    for number in range(20):
        cache.put(str(number), bytes(2**20))
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    assert vesuvius_train(config, "--dry-run") == 0
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before
    assert vesuvius_train(config, "training.max_steps=1") == 0
    assert sum(file.stat().st_size for file in path.rglob("*")) <= 0.01 * 2**30
