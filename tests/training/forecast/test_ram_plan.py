"""Predicted host memory of a run: its items and its warnings."""

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
from vesuvius.training.forecast import run_plan, start_log
from vesuvius.training.forecast.memory_plan import plan_memory
from vesuvius.training.forecast.run_plan import RamItem, RunPlan, first_pass_samples, plan_resident, plan_run
from vesuvius.training.step.setup import build_meta_network, parameter_count
from vesuvius.volumes.box import shape_of

MIB = 2**20
STEP = "training.train_batch_size and raise training.accumulate_steps"
Plan = Callable[..., tuple[Config, PreparedData, RunPlan]]


@pytest.fixture
def some_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of 2 MiB for tests of other memory, as planning a real one takes seconds."""
    monkeypatch.setattr(run_plan, "_network", lambda config, gpu: [RamItem("trainer", "training step", 2 * MIB, STEP)])


@pytest.fixture
def planned(tiny_config: WriteConfig) -> Plan:
    """The tiny config with overrides, its data, and its plan for a CPU or a GPU."""

    def plan(*overrides: str, gpu: bool = False) -> tuple[Config, PreparedData, RunPlan]:
        config = read_config(tiny_config(), overrides)
        data = prepare_data(config.seed, config.data)
        return config, data, plan_run(config, data, 80.0 if gpu else None)

    return plan


def item_bytes(plan: RunPlan, name: str) -> int:
    """Bytes of an item; 0 if the plan lacks it."""
    return sum(item.size_bytes for item in plan.items if item.name == name)


def limit(size_bytes: int, name: str = "the machine") -> MemoryLimit:
    return MemoryLimit(name, 0, size_bytes, size_bytes)


@pytest.mark.usefixtures("some_network")
def test_four_owners_add_up_and_the_line_shows_each(planned: Plan) -> None:
    plan, owners = planned("training.workers=3")[2], ("readers", "store", "Ray", "trainer")
    assert plan.ram_bytes == sum(map(plan.owner_bytes, owners)) == sum(item.size_bytes for item in plan.items)
    (line,) = plan.lines()
    assert all(f"{owner} {format_size(plan.owner_bytes(owner))}" in line for owner in owners)


@pytest.mark.usefixtures("some_network")
def test_another_worker_costs_a_reader_and_its_share_of_the_store(planned: Plan) -> None:
    many = "training.epochs=100"  # so that there are tasks for all of them
    _, data, two = planned("training.workers=2", many)
    config, _, three = planned("training.workers=3", many)
    options = StreamOptions.from_config(config.training, config.cluster)
    assert 2 * three.owner_bytes("readers") == 3 * two.owner_bytes("readers")
    assert three.owner_bytes("readers") > 3 * (122 * MIB + 2 * data.job.block_bytes)
    assert three.owner_bytes("store") >= store_peak_bytes(data.job, options)
    assert three.owner_bytes("store") > two.owner_bytes("store")


@pytest.mark.usefixtures("some_network")
def test_without_workers_there_is_no_ray_and_the_trainer_holds_the_regions_in_flight(planned: Plan) -> None:
    _, data, plan = planned("training.workers=0")
    assert {item.owner for item in plan.items} == {"trainer"}
    assert item_bytes(plan, "reading") >= (data.plan.regions_in_flight + 1) * data.job.block_bytes
    assert "readers" not in plan.lines()[0]


@pytest.mark.usefixtures("some_network")
def test_a_run_of_one_task_has_one_reader_and_a_long_one_twice_its_workers(planned: Plan) -> None:
    """One step needs the regions of one task; beyond 500 tasks Ray's executions overlap."""
    assert item_bytes(planned("training.workers=4", "training.max_steps=1")[2], "1 processes")
    assert item_bytes(planned("training.workers=4")[2], "4 processes")
    config, data, long = planned("training.workers=4", "training.steps_per_epoch=10000")
    options = StreamOptions.from_config(config.training, config.cluster)
    assert item_bytes(long, "8 processes")
    handing_over = store_peak_bytes(data.job, options) + store_prefetch_bytes(data.job, options)
    assert handing_over <= long.owner_bytes("store") <= store_bytes(data.job, options)


def test_the_training_step_is_in_host_memory_only_on_a_cpu(planned: Plan) -> None:
    config, _, on_cpu = planned()
    on_gpu = planned(gpu=True)[2]
    assert item_bytes(on_cpu, "training step") > plan_memory(config, amp="off").peak_bytes
    assert item_bytes(on_cpu, "CUDA (assumed)") == item_bytes(on_gpu, "training step") == 0
    assert item_bytes(on_gpu, "CUDA (assumed)") == 2 * GIB


def test_a_checkpoint_copy_is_counted_and_pinned_with_a_gpu(planned: Plan) -> None:
    config, _, plan = planned()
    copy = item_bytes(plan, "copy of a checkpoint")
    more = planned("training.extra_ema_decays=[0.99]")[2]
    assert item_bytes(more, "copy of a checkpoint") - copy == 4 * parameter_count(build_meta_network(config))
    assert copy < item_bytes(planned(gpu=True)[2], "copy of a checkpoint") < 2 * copy


@pytest.mark.usefixtures("some_network")
@pytest.mark.usefixtures("of_two_micro_batches")
def test_batches_ahead_and_fixed_patches_are_counted_in_their_stored_dtype(planned: Plan, tmp_path: Path) -> None:
    # 2 held, 3 ahead of the only reader, 2 micro-batches of the step in hand; 8 x 16 x 16 voxels, 2 a batch.
    assert item_bytes(planned("training.workers=1", "training.prefetch_factor=3")[2], "batches") == 7 * 2 * 2048
    validating = planned("training.validate_every=5", "training.validate_patches=6")[2]
    assert item_bytes(validating, "fixed patches") == 6 * 2048
    assert item_bytes(planned()[2], "fixed patches") == 0
    wide = write_array(tmp_path / "wide.zarr", textured((96, 128, 128), dtype="uint16"))
    two_bytes = planned(f"data.volumes=[{{path: {wide}}}]", "training.prefetch_factor=3")[2]
    assert item_bytes(two_bytes, "batches") == 7 * 2 * 4096


@pytest.mark.usefixtures("some_network")
def test_a_plan_close_to_the_limit_is_warned_about_with_workers_that_fit(planned: Plan) -> None:
    plan, four = (planned(f"training.workers={n}", "training.epochs=100")[2] for n in (6, 4))
    (problem,) = replace(plan, limit=limit(int(four.ram_bytes / 0.8) + 1, "memory.max of /job")).problems()
    assert problem.text.endswith("start with training.workers=4")
    assert "(memory.max of /job)" in problem.text
    assert replace(plan, limit=limit(int(plan.ram_bytes / 0.8) + 1)).problems() == []


@pytest.mark.usefixtures("some_network")
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("training step", "lower training.train_batch_size and raise training.accumulate_steps"),
        ("regions in flight and ahead", "lower data.regions_in_flight or data.region_size"),
    ],
)
def test_if_fewer_workers_do_not_help_the_warning_names_the_largest_item(planned: Plan, name: str, remedy: str) -> None:
    plan = planned("training.workers=2")[2]
    items = [replace(item, size_bytes=9 * GIB) if item.name == name else item for item in plan.items]
    large = replace(plan, items=tuple(items), limit=limit(64 * MIB))
    (problem,) = large.problems()
    assert problem.refused
    assert f": {name} (9.00 GiB); {remedy}" in problem.text
    for word in ("killed", "oom", "out of memory"):  # those who search for kills are not to be alarmed
        assert word not in "\n".join([*large.lines(), problem.text]).lower()


def test_ranks_of_one_machine_each_need_memory_but_share_one_checkpoint_copy(planned: Plan) -> None:
    one, three = planned()[2], planned("training.ranks=3")[2]
    assert item_bytes(three, "reading") == 3 * item_bytes(one, "reading") > 0
    assert item_bytes(three, "training step") == 3 * item_bytes(one, "training step")
    assert item_bytes(three, "copy of a checkpoint") == item_bytes(one, "copy of a checkpoint")
    assert "by 3 ranks on this machine" in three.lines()[0]
    assert "ranks" not in planned("training.ranks=3", "cluster.address=HEAD:6379")[2].lines()[0]


@pytest.mark.usefixtures("some_network")
def test_volumes_are_kept_if_they_fit_and_are_read_twice(planned: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    _, data, plan = planned("training.epochs=1000", "training.ranks=2")
    need = Resident.size_bytes(data.job)
    assert need > sum(math.prod(shape_of(split.train)) for split in data.splits)
    assert item_bytes(plan, "decoded") == need, "once for both ranks"
    assert f"volumes {format_size(need)}" in plan.lines()[0]
    assert item_bytes(planned("training.epochs=1000", "data.resident=0")[2], "decoded") == 0
    assert item_bytes(planned("training.epochs=1")[2], "decoded") == 0, "most of it would be read once"
    assert item_bytes(planned("training.epochs=1", "data.resident=1")[2], "decoded") == need
    assert item_bytes(planned("training.epochs=1000", "data.resident=0.0001")[2], "decoded") == 0
    kept = {"training.epochs=1000", "training.workers=0"}
    reading = sum(p.size_bytes for p in planned(*kept)[2].items if p.name == "reading")
    for free, expected in ((2 * (need + reading), need), (2 * (need + reading) - 2, 0)):
        monkeypatch.setattr(run_plan, "ram_limit", lambda _, free=free: replace(limit(free + 5), used_bytes=5))
        assert item_bytes(planned(*kept)[2], "decoded") == expected


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
    monkeypatch.setattr(run_plan, "ram_limit", lambda _: limit(5))
    assert "more than half of the free memory" in said("training.epochs=1000")
