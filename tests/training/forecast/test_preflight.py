"""Checks before a run: unintended settings, system limits, known facts about the data."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from tests.conftest import STORED_AIR, tiny_sections, write_array
from vesuvius.config import Config
from vesuvius.config.load import read_config
from vesuvius.errors import ConfigError, DataError
from vesuvius.monitor.probes.cores import TaskLimit
from vesuvius.training.checkpoint.trained import read_facts, write_facts
from vesuvius.training.forecast import preflight as module
from vesuvius.training.forecast.preflight import check_limits, config_warnings, preflight, tasks_needed


def tiny(workers: int, address: str | None = None) -> Config:
    sections = tiny_sections("tiny", Path("v.zarr"))
    sections["training"] |= {"workers": workers}
    sections["cluster"] = {"address": address}
    return Config.model_validate_json(json.dumps(sections))


@pytest.mark.parametrize(("workers", "address", "found"), [(64, None, 1), (8, None, 0), (64, "10.0.0.1:6379", 0)])
def test_too_many_readers_per_core_are_warned_about(workers: int, address: str | None, found: int) -> None:
    data: Any = SimpleNamespace(plan=SimpleNamespace(volumes=(), sources=(), repeats_cells=False), volumes=())
    lines = config_warnings(tiny(workers, address), data, 1, 2.0)
    assert len(lines) == found
    for line in lines:
        assert "workers on 2 cores" in line
        assert "set training.workers=2, or at most 8 for a remote store" in line


def test_unclipped_eps_prediction_is_warned_about() -> None:
    config = tiny(0)
    config = config.model_copy(update={"diffusion": config.diffusion.model_copy(update={"prediction": "eps"})})
    data: Any = SimpleNamespace(plan=SimpleNamespace(volumes=(), sources=(), repeats_cells=False), volumes=())
    (line,) = config_warnings(config, data, 2, 2.0)
    assert "diffusion.prediction=eps without diffusion.sampler_clip" in line


@pytest.mark.parametrize(("workers", "peak"), [(0, 24), (1, 305), (2, 335), (4, 407)])
def test_tasks_needed_matches_measurements_on_two_cores(workers: int, peak: int) -> None:
    """Peaks of pids cgroups.  A lower figure would let a run hang, a much higher one would refuse working setups."""
    assert peak <= tasks_needed(workers, 1, 2) <= 1.2 * peak
    assert tasks_needed(2, 4, 2) > tasks_needed(2, 1, 2) + 3 * 2 * 35, "of ranks that share a machine"


@pytest.mark.parametrize(
    ("workers", "limit", "others", "says"),
    [
        (1, 400, 10, None),
        (1, 300, 0, "allows 300 processes and threads, but this run needs about 320.*or set training.workers=0"),
        (1, 1000, 800, "allows 1000 processes and threads, 800 of them in use, but this"),
        (8, 450, 0, "or set training.workers=4"),
        (0, 20, 0, r"needs about 28; raise it \(`ulimit -u`, docker run --pids-limit\)$"),
    ],
)
def test_a_task_limit_that_is_too_low_is_named_with_workers_that_fit(
    workers: int, limit: int, others: int, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tightest, wide = TaskLimit("pids.max of cgroup /a", limit, others), TaskLimit("kernel.pid_max", 10**6, 0)
    monkeypatch.setattr(module, "task_limits", lambda: [tightest, wide])
    refused = pytest.raises(ConfigError, match=f"^pids.max of cgroup /a .*{says}") if says else nullcontext()
    with refused:
        check_limits(tiny(workers), 1, 0, cores=2)
    if workers:
        check_limits(tiny(workers, "a:1"), 1, 0, cores=20)  # its Ray runs already


def test_a_file_size_limit_below_the_object_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "task_limits", list)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**20, 2**20))
    with pytest.raises(ConfigError, match=r"`ulimit -f` limits files to 1 MiB.*needs 0.25 GiB; raise it"):
        check_limits(tiny(1), 1, 2**28)


def test_a_restart_of_ranks_does_not_check_their_existing_object_store(
    tiny_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store keeps its memory, so /dev/shm may not have room for a second one."""
    monkeypatch.chdir(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0) if str(path) == "/dev/shm" else usage)
    config = read_config(tiny_config(training={"workers": 1}))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"The object store needs .* /dev/shm has"):
        preflight(config, resume=False, checkpoint=None)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    preflight(config, resume=False, checkpoint=None)


def test_facts_measured_by_another_run_on_the_same_data_are_reused(
    tiny_config: Callable[..., Path], volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then the volume is air, of which no intensity range can be estimated."""
    monkeypatch.chdir(tmp_path)
    config = read_config(tiny_config(training={"preview_every": 0}))
    measured = preflight(config, resume=False, checkpoint=None).facts
    write_facts(tmp_path / "facts.pt", config.data, measured)
    known = read_facts(tmp_path / "facts.pt", config.data)
    shutil.rmtree(volume)
    write_array(volume, np.zeros((96, 128, 128), "u1"), **STORED_AIR)
    found = preflight(config, resume=False, checkpoint=None, known=known).facts
    assert found.intensities == measured.intensities
    assert found.spectrum is not None
    assert measured.spectrum is not None
    np.testing.assert_array_equal(found.spectrum.power, measured.spectrum.power)
    for other in (None, replace(measured, volumes=(replace(measured.volumes[0], shape_zyx=(1, 2, 3)),))):
        with pytest.raises(DataError, match="equal its fill value"):
            preflight(config, resume=False, checkpoint=None, known=other)


def test_facts_of_another_config_or_a_truncated_file_are_ignored(
    tiny_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config, path = read_config(tiny_config(training={"preview_every": 0})), tmp_path / "facts.pt"
    assert read_facts(path, config.data) is None
    write_facts(path, config.data, preflight(config, resume=False, checkpoint=None).facts)
    assert read_facts(path, read_config(tmp_path / "tiny.yaml", ["data.store.requests=3"]).data) is not None
    assert read_facts(path, read_config(tmp_path / "tiny.yaml", ["data.augment.flip=false"]).data) is None
    path.write_bytes(path.read_bytes()[:-100])
    assert read_facts(path, config.data) is None


def test_a_dry_run_plans_fixed_patches_and_reads_none(tiny_config: Callable[..., Path]) -> None:
    config = read_config(tiny_config(training={"preview_every": 1}))
    dry, real = (preflight(config, False, None, caches=caches).fixed for caches in (False, True))
    assert dry is not None
    assert real is not None
    assert (len(dry.patches), dry.held_out) == (0, real.held_out)
    assert len(real.patches) == 2
