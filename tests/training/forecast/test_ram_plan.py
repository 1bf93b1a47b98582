"""The prediction of a run's host memory: its terms, and what it warns of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import textured, write_array
from tests.support.runs import WriteConfig
from vesuvius.config import Config
from vesuvius.config.load import read_config
from vesuvius.monitor.memory.limits import MemoryLimit
from vesuvius.runlog.units import GIB
from vesuvius.stream.options import StreamOptions, store_ahead_bytes, store_bytes, store_need_bytes
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.training.forecast import run_plan
from vesuvius.training.forecast.memory_plan import plan_memory
from vesuvius.training.forecast.run_plan import RamPart, RamPlan, plan_ram, ram_warning

MIB = 2**20
Plan = Callable[..., tuple[Config, PreparedData, RamPlan]]


@pytest.fixture
def some_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of 2 MiB, for tests of what is beside it: to plan a real one takes seconds."""
    monkeypatch.setattr(run_plan, "_network", lambda config, gpu: [RamPart("trainer", "training step", 2 * MIB)])


@pytest.fixture
def planned(tiny_config: WriteConfig) -> Plan:
    """The tiny config with overrides, its data, and its plan for a CPU or, where asked for, a GPU."""

    def plan(*overrides: str, gpu: bool = False) -> tuple[Config, PreparedData, RamPlan]:
        config = read_config(tiny_config(), overrides)
        data = prepare_data(config.seed, config.data)
        return config, data, plan_ram(config, data, gpu)

    return plan


def part(plan: RamPlan, name: str) -> int:
    """Bytes of a part; 0 where the plan has none of the name."""
    return sum(part.size_bytes for part in plan.parts if part.name == name)


def limit(size_bytes: int, name: str = "the machine") -> MemoryLimit:
    return MemoryLimit(name, 0, size_bytes, size_bytes)


def test_four_terms_add_up_and_each_line_shows_its_sum(planned: Plan) -> None:
    for gpu in (False, True):
        plan = planned("training.workers=3", gpu=gpu)[2]
        terms = ("readers", "store", "Ray", "trainer")
        assert plan.total_bytes == sum(map(plan.term_bytes, terms)) == sum(part.size_bytes for part in plan.parts)
        assert [line.split()[0] for line in plan.lines()[1:]] == list(terms)
        assert all(plan.term_bytes(term) > 0 for term in terms)


@pytest.mark.usefixtures("some_network")
def test_a_worker_more_costs_a_reader_and_its_share_of_the_store(planned: Plan) -> None:
    many = "training.epochs=100"  # so that there are tasks for all of them
    _, data, two = planned("training.workers=2", many)
    config, _, three = planned("training.workers=3", many)
    options = StreamOptions.from_config(config.training, config.cluster)
    assert 2 * three.term_bytes("readers") == 3 * two.term_bytes("readers")
    assert three.term_bytes("readers") > 3 * (122 * MIB + 2 * data.job.block_bytes)
    assert three.term_bytes("store") >= store_need_bytes(data.job, options)
    assert three.term_bytes("store") > two.term_bytes("store")


@pytest.mark.usefixtures("some_network")
def test_without_workers_there_is_no_ray_and_the_trainer_holds_the_regions_in_flight(planned: Plan) -> None:
    _, data, plan = planned("training.workers=0")
    assert {part.term for part in plan.parts} == {"trainer"}
    assert part(plan, "its reader") >= (data.plan.regions_in_flight + 1) * data.job.block_bytes
    assert not any("readers" in line or "store" in line for line in plan.lines())


@pytest.mark.usefixtures("some_network")
def test_a_run_of_one_task_has_one_reader_and_a_long_one_twice_its_workers(planned: Plan) -> None:
    """A step needs the regions of one task; Ray's executions overlap beyond 500."""
    assert part(planned("training.workers=4", "training.max_steps=1")[2], "1 processes")
    assert part(planned("training.workers=4")[2], "4 processes")
    config, data, long = planned("training.workers=4", "training.steps_per_epoch=10000")
    options = StreamOptions.from_config(config.training, config.cluster)
    assert part(long, "8 processes")
    handing_over = store_need_bytes(data.job, options) + store_ahead_bytes(data.job, options)
    assert handing_over <= long.term_bytes("store") <= store_bytes(data.job, options)


def test_the_training_step_is_in_host_memory_on_a_cpu_alone(planned: Plan) -> None:
    config, _, on_cpu = planned()
    on_gpu = planned(gpu=True)[2]
    assert part(on_cpu, "training step") > plan_memory(config, amp="off").peak_bytes
    assert part(on_cpu, "CUDA (assumed)") == part(on_gpu, "training step") == 0
    assert part(on_gpu, "CUDA (assumed)") == 2 * GIB


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.long)])
def test_the_copy_of_a_checkpoint_holds_weights_moments_and_averages(planned: Plan, optimizer: str) -> None:
    config, _, plan = planned(f"training.optimizer={optimizer}")
    step, copy = plan_memory(config, amp="off"), part(plan, "copy of a checkpoint")
    # The optimizer counts its steps besides, a number a tensor.
    assert copy == pytest.approx(step.fixed_bytes - step.weight_bytes, rel=1e-2)
    more = planned(f"training.optimizer={optimizer}", "training.extra_ema_decays=[0.99]")[2]
    assert part(more, "copy of a checkpoint") - copy == step.weight_bytes
    pinned = part(planned(f"training.optimizer={optimizer}", gpu=True)[2], "copy of a checkpoint")
    assert copy < pinned < 2 * copy


@pytest.mark.usefixtures("some_network")
@pytest.mark.usefixtures("of_two_micro_batches")
def test_batches_ahead_and_fixed_patches_are_counted_in_their_stored_dtype(planned: Plan, tmp_path: Path) -> None:
    # 2 held, 3 ahead of the only reader, 2 micro-batches of the step in hand; 8 x 16 x 16 voxels, 2 a batch.
    assert part(planned("training.workers=1", "training.prefetch_factor=3")[2], "batches") == 7 * 2 * 2048
    validating = planned("training.validate_every=5", "training.validate_patches=6")[2]
    assert part(validating, "fixed patches") == 6 * 2048
    assert part(planned()[2], "fixed patches") == 0
    wide = write_array(tmp_path / "wide.zarr", textured((96, 128, 128), dtype="uint16"))
    two_bytes = planned(f"data.volumes=[{{path: {wide}}}]", "training.prefetch_factor=3")[2]
    assert part(two_bytes, "batches") == 7 * 2 * 4096


@pytest.mark.usefixtures("some_network")
def test_a_plan_above_its_share_of_the_limit_is_warned_of_with_workers_that_fit(planned: Plan) -> None:
    many = "training.epochs=100"
    config, data, plan = planned("training.workers=6", many)
    four = planned("training.workers=4", many)[2].total_bytes
    warning = ram_warning(config, data, plan, limit(int(four / 0.8) + 1, "memory.max of /job"))
    assert warning is not None
    assert "start with training.workers=4" in warning
    assert "(memory.max of /job)" in warning
    assert ram_warning(config, data, plan, limit(int(plan.total_bytes / 0.8) + 1)) is None


@pytest.mark.usefixtures("some_network")
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("training step", "lower training.train_batch_size and raise training.accumulate_steps"),
        ("regions in flight and ahead", "lower data.regions_in_flight or data.region_size"),
        ("batches", "lower training.prefetch_factor or training.train_batch_size"),
    ],
)
def test_where_fewer_workers_do_not_help_the_warning_names_the_largest_part(
    planned: Plan, monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    config, data, plan = planned("training.workers=2")
    keys = {"training step": "training.train_batch_size and raise training.accumulate_steps"}
    parts = [
        replace(part, size_bytes=9 * GIB, lower=keys.get(name, part.lower)) if part.name == name else part
        for part in plan.parts
    ]
    large = RamPlan(False, tuple(parts))
    warning = ram_warning(config, data, large, limit(64 * MIB))
    assert warning is not None
    assert f": {name} (9.00 GiB); {remedy}" in warning
    for word in ("killed", "oom", "out of memory"):  # those who search for kills are not to be alarmed
        assert word not in "\n".join([*large.lines(), warning]).lower()


def test_ranks_of_one_machine_take_their_memory_each_and_one_copy_of_a_checkpoint(planned: Plan) -> None:
    one, three = planned()[2], planned("training.ranks=3")[2]
    assert three.ranks == 3
    assert part(three, "its reader") == 3 * part(one, "its reader") > 0
    assert part(three, "training step") == 3 * part(one, "training step")
    assert part(three, "copy of a checkpoint") == part(one, "copy of a checkpoint")
    assert "for 3 ranks on one machine" in three.lines()[0]
    assert planned("training.ranks=3", "cluster.address=HEAD:6379")[2].ranks == 1
