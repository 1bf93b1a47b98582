"""Predicted host memory of a run by owner, and its warnings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import textured, write_array
from tests.support.runs import WriteConfig
from vesuvius.config import Config
from vesuvius.config.load import read_config
from vesuvius.monitor.memory.limits import MemoryLimit
from vesuvius.runlog.units import GIB, format_size
from vesuvius.stream.options import StreamOptions, store_bytes, store_peak_bytes, store_prefetch_bytes
from vesuvius.stream.reading.resident import Resident
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.training.forecast import plan as plan_module
from vesuvius.training.forecast import start_log
from vesuvius.training.forecast.memory_plan import plan_memory
from vesuvius.training.forecast.plan import (
    RunPlan,
    checkpoint_sizes,
    first_pass_samples,
    plan_resident,
    plan_run,
    reading_bytes,
)
from vesuvius.training.step.setup import build_meta_network, parameter_count
from vesuvius.volumes.box import shape_of

MIB = 2**20
Plan = Callable[..., tuple[Config, PreparedData, RunPlan]]


@pytest.fixture
def some_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of 2 MiB for tests of other memory, as planning a real one takes seconds."""
    monkeypatch.setattr(plan_module, "_step_bytes", lambda config: 2 * MIB)


@pytest.fixture
def planned(tiny_config: WriteConfig) -> Plan:
    """The tiny config with overrides, its data, and its plan for a CPU or a GPU."""

    def plan(*overrides: str, gpu: bool = False) -> tuple[Config, PreparedData, RunPlan]:
        config = read_config(tiny_config(), overrides)
        data = prepare_data(config.seed, config.data)
        return config, data, plan_run(config, data, 80.0 if gpu else None)

    return plan


def of(plan: RunPlan, owner: str) -> int:
    return plan.ram.get(owner, 0)


def limit(size_bytes: int, name: str = "the machine") -> MemoryLimit:
    return MemoryLimit(name, 0, size_bytes, size_bytes)


@pytest.mark.usefixtures("some_network")
def test_another_worker_costs_a_reader_and_its_share_of_the_store_and_the_line_shows_each_owner(planned: Plan) -> None:
    many = "training.epochs=100"  # so that there are tasks for all of them
    _, data, two = planned("training.workers=2", many)
    config, _, three = planned("training.workers=3", many)
    options = StreamOptions.from_config(config.training, config.cluster)
    assert 2 * of(three, "workers") == 3 * of(two, "workers")
    assert of(three, "workers") > 3 * (122 * MIB + 2 * data.job.block_bytes)
    assert of(three, "store") >= store_peak_bytes(data.job, options)
    assert of(three, "store") > of(two, "store")
    owners = ("workers", "store", "Ray", "trainer")
    assert three.ram_bytes == sum(of(three, owner) for owner in owners)
    (line,) = three.lines()
    assert all(f"{owner} {format_size(of(three, owner))}" in line for owner in owners)


@pytest.mark.usefixtures("some_network")
def test_without_workers_there_is_no_ray_and_the_trainer_holds_the_regions_in_flight(planned: Plan) -> None:
    _, data, plan = planned("training.workers=0")
    assert set(plan.ram) == {"trainer"}
    regions = (data.plan.regions_in_flight + 1) * data.job.block_bytes
    assert of(plan, "trainer") - of(planned("training.workers=1")[2], "trainer") >= regions
    assert "workers" not in plan.lines()[0]


def test_each_rank_holds_its_share_of_the_regions_in_flight(tiny_config: WriteConfig) -> None:
    """Also if the data were opened for one rank, as by the tuner."""
    config = read_config(tiny_config())
    data = prepare_data(config.seed, config.data)
    one, many = (reading_bytes(config.with_training(ranks=n), data, cores=64)["trainer"] for n in (1, 64))
    # Of 64 regions each of 64 ranks holds one; 16 threads, or one, read two each ahead.
    assert one - many == (64 + 32 - (1 + 2)) * data.job.block_bytes


@pytest.mark.usefixtures("some_network")
def test_a_run_of_one_task_has_one_reader_and_a_long_one_twice_its_workers(planned: Plan) -> None:
    """One step needs the regions of one task; beyond 500 tasks Ray's executions overlap."""
    one = of(planned("training.workers=4", "training.max_steps=1")[2], "workers")
    assert of(planned("training.workers=4")[2], "workers") == 4 * one
    config, data, long = planned("training.workers=4", "training.steps_per_epoch=10000")
    options = StreamOptions.from_config(config.training, config.cluster)
    assert of(long, "workers") == 8 * one
    handing_over = store_peak_bytes(data.job, options) + store_prefetch_bytes(data.job, options)
    assert handing_over <= of(long, "store") <= store_bytes(data.job, options)


@pytest.mark.long
def test_the_training_step_is_in_host_memory_only_on_a_cpu_and_a_gpu_pins_a_checkpoint(planned: Plan) -> None:
    config, _, on_cpu = planned()
    on_gpu, step = planned(gpu=True)[2], plan_memory(config, amp="off")
    assert step.ram_bytes > step.peak_bytes
    copy = sum(checkpoint_sizes(config))
    pinned = of(on_gpu, "trainer") - (of(on_cpu, "trainer") - step.ram_bytes) - 2 * GIB
    assert 0 < pinned < copy
    more = planned("training.extra_ema_decays=[0.99]")[2]
    assert of(more, "trainer") - of(on_cpu, "trainer") >= 4 * parameter_count(build_meta_network(config))


@pytest.mark.usefixtures("some_network", "of_two_micro_batches")
def test_batches_ahead_and_fixed_patches_are_counted_in_their_stored_dtype(planned: Plan, tmp_path: Path) -> None:
    # 2 held, 3 ahead of the only reader, 2 micro-batches of the step in hand; 8 x 16 x 16 voxels, 2 a batch.
    ahead = [of(planned("training.workers=1", f"training.prefetch_factor={n}")[2], "trainer") for n in (3, 10)]
    assert ahead[1] - ahead[0] == 7 * 2 * 2048
    validating = planned("training.workers=1", "training.prefetch_factor=3", "training.validate_every=5")[2]
    more = planned(
        "training.workers=1", "training.prefetch_factor=3", "training.validate_every=5", "training.validate_patches=22"
    )[2]
    assert of(validating, "trainer") - ahead[0] == (of(more, "trainer") - ahead[0]) * 16 // 22 == 16 * 2048
    wide = write_array(tmp_path / "wide.zarr", textured((96, 128, 128), dtype="uint16"))
    volumes = f"data.volumes=[{{path: {wide}}}]"
    two_bytes = planned(volumes, "training.workers=1", "training.prefetch_factor=3")[2]
    assert of(two_bytes, "trainer") - ahead[0] == 7 * 2 * 2048


@pytest.mark.usefixtures("some_network")
def test_a_plan_close_to_the_limit_is_warned_about_with_workers_that_fit(planned: Plan) -> None:
    plan, four = (planned(f"training.workers={n}", "training.epochs=100")[2] for n in (6, 4))
    (problem,) = replace(plan, limit=limit(int(four.ram_bytes / 0.8) + 1, "memory.max of /job")).problems()
    assert problem.text.endswith("start with training.workers=4")
    assert "(memory.max of /job)" in problem.text
    assert replace(plan, limit=limit(int(plan.ram_bytes / 0.8) + 1)).problems() == []


@pytest.mark.usefixtures("some_network")
@pytest.mark.parametrize(
    ("owner", "remedy"),
    [
        ("trainer", "lower training.train_batch_size and raise training.accumulate_steps"),
        ("store", "lower data.regions_in_flight"),
    ],
)
def test_if_fewer_workers_do_not_help_the_warning_names_the_largest_owner(
    planned: Plan, owner: str, remedy: str
) -> None:
    plan = planned("training.workers=2")[2]
    large = replace(plan, ram=plan.ram | {owner: 9 * GIB}, limit=limit(64 * MIB))
    (problem,) = large.problems()
    assert problem.refused
    assert f"most of it for {owner} (9.00 GiB); {remedy}" in problem.text
    for word in ("killed", "oom", "out of memory"):  # those who search for kills are not to be alarmed
        assert word not in "\n".join([*large.lines(), problem.text]).lower()


@pytest.mark.usefixtures("some_network")
def test_ranks_of_one_machine_each_need_memory_but_share_one_checkpoint_copy(
    planned: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = {1: 4, 3: 4}  # threads of a rank, by ranks
    monkeypatch.setattr(plan_module, "auto_threads", lambda ranks, of_machine: cores[ranks])
    config, data, one = planned()
    three, copy = planned("training.ranks=3")[2], sum(checkpoint_sizes(config))
    assert of(three, "trainer") - copy == 3 * (of(one, "trainer") - copy) > 0
    assert "by 3 ranks on this machine" in three.lines()[0]
    cores[3] = 1
    fewer = planned("training.ranks=3")[2]
    assert of(three, "trainer") - of(fewer, "trainer") >= 3 * 3 * data.job.block_bytes, "a block for each thread"
    assert "ranks" not in planned("training.ranks=3", "cluster.address=HEAD:6379")[2].lines()[0]


@pytest.mark.usefixtures("some_network")
def test_volumes_are_kept_if_they_fit_and_are_read_twice(planned: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    _, data, plan = planned("training.epochs=1000", "training.ranks=2")
    need = Resident.size_bytes(data.job)
    assert need > sum(math.prod(shape_of(split.train)) for split in data.splits)
    assert of(plan, "volumes") == need, "once for both ranks"
    assert f"volumes {format_size(need)}" in plan.lines()[0]
    assert of(planned("training.epochs=1000", "data.resident=0")[2], "volumes") == 0
    assert of(planned("training.epochs=1")[2], "volumes") == 0, "most of it would be read once"
    assert of(planned("training.epochs=1", "data.resident=1")[2], "volumes") == need
    assert of(planned("training.epochs=1000", "data.resident=0.0001")[2], "volumes") == 0
    kept = {"training.epochs=1000", "training.workers=0"}
    config, data, _ = planned(*kept)
    reading = plan_module.reading_bytes(config, data)["trainer"]
    for free, expected in ((2 * (need + reading), need), (2 * (need + reading) - 2, 0)):
        monkeypatch.setattr(plan_module, "ram_limit", lambda _, free=free: replace(limit(free + 5), used_bytes=5))
        assert of(planned(*kept)[2], "volumes") == expected


@pytest.mark.usefixtures("some_network")
def test_the_startup_log_says_when_reading_ends_or_why_volumes_are_not_kept(
    planned: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*overrides: str, resumed_at: int | None = None) -> str:
        config, data, _ = planned(*overrides)
        resumed = None if resumed_at is None else SimpleNamespace(step=resumed_at)
        checked: Any = SimpleNamespace(
            data=data, resident=plan_resident(config, data, resumed_at or 0), resumed=resumed
        )
        return "".join(start_log._resident_lines(config, checked))

    config, data, _ = planned("training.epochs=1000")
    steps = -(-first_pass_samples(config, data) // config.global_batch)
    assert f"after about step {steps};" in said("training.epochs=1000")
    assert f"after about step {500 + steps};" in said("training.epochs=1000", resumed_at=500), "it is filled again"
    late = config.stop_step - steps
    assert f"the second pass over the volumes ends only at step {late + 2 * steps}" in said(
        "training.epochs=1000", resumed_at=late
    )
    assert said("data.resident=0") == ""
    assert "exceed data.resident=0.0001 (GiB)" in said("data.resident=0.0001", "training.epochs=1000")
    assert "the second pass over the volumes ends only at step" in said("training.epochs=1")
    monkeypatch.setattr(plan_module, "ram_limit", lambda _: limit(5))
    assert "more than half of the free memory" in said("training.epochs=1000")
