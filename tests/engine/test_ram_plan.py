"""The prediction of a run's host memory: its arithmetic, what it warns of, and that it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import textured, write_array
from tests.runs import WriteConfig
from vesuvius.config import Config
from vesuvius.config_file import read_config
from vesuvius.engine import ram_plan
from vesuvius.engine.memory_plan import plan_memory
from vesuvius.engine.ram_parts import RamPlan
from vesuvius.engine.ram_plan import RamLimit, plan_ram, ram_limit, ram_warning
from vesuvius.observe.units import GIB
from vesuvius.stream.options import StreamOptions, store_ahead_bytes, store_bytes, store_need_bytes
from vesuvius.stream.prepare import PreparedData, prepare_data
from vesuvius.stream.ray import blocks as ray_stream

MIB = 2**20
Plan = Callable[..., tuple[Config, PreparedData, RamPlan]]


@pytest.fixture
def some_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of 3 MiB in all, for tests of what is beside it: to plan a real one takes seconds."""
    network = ram_plan._Network(gpu=False, snapshot_bytes=MIB, step_bytes=2 * MIB, vram_bytes=GIB)
    monkeypatch.setattr(ram_plan, "_plan_network", lambda config, gpu: network)


@pytest.fixture
def planned(tiny_config: WriteConfig) -> Plan:
    """The tiny config with overrides, its data, and its plan for a CPU or, where asked for, a GPU."""

    def plan(*overrides: str, gpu: bool = False) -> tuple[Config, PreparedData, RamPlan]:
        config = read_config(tiny_config(), overrides)
        data = prepare_data(config.seed, config.data)
        return config, data, plan_ram(config, data, gpu)

    return plan


def test_the_parts_add_up(planned: Plan) -> None:
    for gpu in (False, True):
        plan = planned("training.workers=3", gpu=gpu)[2]
        assert plan.cuda_bytes is not None
        assert plan.snapshot_bytes is not None
        assert plan.step_bytes is not None
        reader = plan.reader_process_bytes + plan.reader_ring_bytes + plan.reader_staged_bytes
        trainer = plan.trainer_process_bytes + plan.cuda_bytes + plan.local_reader_bytes + plan.batches_bytes
        assert plan.total_bytes == (
            plan.readers_at_once * (reader + plan.reader_scratch_bytes)
            + plan.store_bytes
            + plan.ray_bytes
            + trainer
            + plan.fixed_bytes
            + plan.snapshot_bytes
            + plan.step_bytes
        )
        assert plan.complete


@pytest.mark.usefixtures("some_network")
def test_a_worker_more_costs_a_reader_and_its_share_of_the_store(planned: Plan) -> None:
    many = "training.epochs=100"  # so that there are tasks for all of them
    _, data, two = planned("training.workers=2", many)
    config, _, three = planned("training.workers=3", many)
    options = StreamOptions.from_config(config.training, config.cluster)
    assert three.readers_bytes - two.readers_bytes == two.reader_bytes
    assert three.store_bytes >= store_need_bytes(data.job, options)
    assert three.store_bytes > two.store_bytes
    assert three.store_capacity_bytes == store_bytes(data.job, options)


@pytest.mark.usefixtures("some_network")
def test_without_workers_there_is_no_ray_and_the_trainer_holds_the_regions_in_flight(planned: Plan) -> None:
    _, data, plan = planned("training.workers=0")
    assert (plan.readers_bytes, plan.store_bytes, plan.ray_bytes) == (0, 0, 0)
    assert plan.local_reader_bytes >= (data.plan.regions_in_flight + 1) * data.job.block_bytes
    assert not any("readers" in line or "store" in line for line in plan.lines())


@pytest.mark.usefixtures("some_network")
def test_a_run_of_one_task_has_one_reader_and_a_long_one_twice_its_workers(planned: Plan) -> None:
    """A step needs the regions of one task; Ray's executions overlap beyond 500."""
    assert planned("training.workers=4", "training.max_steps=1")[2].readers_at_once == 1
    assert planned("training.workers=4")[2].readers_at_once == 4
    config, data, long = planned("training.workers=4", "training.steps_per_epoch=10000")
    options = StreamOptions.from_config(config.training, config.cluster)
    assert long.readers_at_once == 8
    handing_over = store_need_bytes(data.job, options) + store_ahead_bytes(data.job, options)
    assert handing_over <= long.store_bytes <= store_bytes(data.job, options)
    assert "and as many while one execution of Ray hands over" in "\n".join(long.lines())


def test_the_length_of_an_execution_and_the_blocks_of_a_reader_are_those_of_the_stream() -> None:
    """`ray_stream` holds the numbers, and cannot be imported without Ray."""
    assert ram_plan._TASKS_PER_EXECUTION == ray_stream.TASKS_PER_SEGMENT
    assert ram_plan._READER_RING == ray_stream._RING


def test_the_training_step_is_in_host_memory_on_a_cpu_alone(planned: Plan) -> None:
    config, _, on_cpu = planned()
    on_gpu = planned(gpu=True)[2]
    step = plan_memory(config, amp="off")
    assert on_cpu.cuda_bytes == 0
    assert on_cpu.step_bytes is not None
    assert on_cpu.step_bytes > step.peak_bytes
    assert on_gpu.step_bytes == 0
    assert on_gpu.cuda_bytes == 2 * GIB
    assert on_gpu.vram_bytes == on_cpu.vram_bytes == plan_memory(config, amp="bf16").vram_bytes


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_copy_of_a_checkpoint_holds_weights_moments_and_averages(planned: Plan, optimizer: str) -> None:
    config, _, plan = planned(f"training.optimizer={optimizer}")
    step = plan_memory(config, amp="off")
    # The optimizer counts its steps besides, a number a tensor.
    assert plan.snapshot_bytes == pytest.approx(step.fixed_bytes - step.gradient_bytes, rel=1e-2)
    more = planned(f"training.optimizer={optimizer}", "training.extra_ema_decays=[0.99]")[2]
    assert more.snapshot_bytes is not None
    assert plan.snapshot_bytes is not None
    assert more.snapshot_bytes - plan.snapshot_bytes == step.weight_bytes
    pinned = planned(f"training.optimizer={optimizer}", gpu=True)[2].snapshot_bytes
    assert pinned is not None
    assert plan.snapshot_bytes < pinned < 2 * plan.snapshot_bytes


@pytest.mark.usefixtures("some_network")
def test_batches_ahead_and_fixed_patches_are_counted_in_their_stored_dtype(planned: Plan, tmp_path: Path) -> None:
    # 2 held, 3 ahead of the only reader, 2 micro-batches of the step in hand; 8 x 16 x 16 voxels, 2 a batch.
    assert planned("training.workers=1", "training.prefetch_factor=3")[2].batches_bytes == 7 * 2 * 2048
    assert planned("training.validate_every=5", "training.validate_patches=6")[2].fixed_bytes == 6 * 2048
    assert planned()[2].fixed_bytes == 0
    wide = write_array(tmp_path / "wide.zarr", textured((96, 128, 128), dtype="uint16"))
    assert planned(f"data.volumes=[{{path: {wide}}}]", "training.prefetch_factor=3")[2].batches_bytes == 7 * 2 * 4096


@pytest.mark.usefixtures("some_network")
def test_a_plan_above_its_share_of_the_limit_is_warned_of_with_workers_that_fit(planned: Plan) -> None:
    many = "training.epochs=100"
    config, data, plan = planned("training.workers=6", many)
    four = planned("training.workers=4", many)[2].total_bytes
    limit = RamLimit(int(four / 0.8) + 1, "memory.max of /job")
    warning = ram_warning(config, data, plan, limit)
    assert warning is not None
    assert "start with training.workers=4" in warning
    assert "(memory.max of /job)" in warning
    assert ram_warning(config, data, plan, RamLimit(int(plan.total_bytes / 0.8) + 1, "the machine")) is None


@pytest.mark.usefixtures("some_network")
def test_where_fewer_workers_do_not_help_the_warning_names_something_else(planned: Plan) -> None:
    config, data, plan = planned("training.workers=2")
    warning = ram_warning(config, data, plan, RamLimit(64 * MIB, "the machine"))
    assert warning is not None
    assert "workers=" not in warning
    assert "lower data.regions_in_flight" in warning


@pytest.mark.usefixtures("some_network")
def test_the_limit_is_the_smallest_and_says_whose_it_is(planned: Plan) -> None:
    config = planned("monitor.ram_limit_gib=0.0625")[0]
    assert ram_limit(config) == RamLimit(64 * MIB, "monitor.ram_limit_gib")
    own = ram_limit(planned()[0])
    assert own.limit_bytes > 64 * MIB
    assert own.whose != "monitor.ram_limit_gib"


def test_without_torch_the_network_is_unknown_and_said_to_be(tiny_config: WriteConfig) -> None:
    code = f"""
import json, sys
sys.modules["torch"] = None  # importing it raises ModuleNotFoundError
from pathlib import Path
from vesuvius.config_file import read_config
from vesuvius.engine.ram_plan import plan_ram
plan = plan_ram(read_config(Path({str(tiny_config())!r}), ["training.workers=2"]))
print(json.dumps([plan.complete, plan.gpu, plan.step_bytes, plan.vram_bytes, plan.total_bytes, plan.lines()]))
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    complete, gpu, step_bytes, vram_bytes, total_bytes, lines = json.loads(found.stdout)
    assert (complete, gpu, step_bytes, vram_bytes) == (False, None, None, None)
    assert total_bytes > 500 * MIB
    assert "at least" in lines[0]
    assert "torch is not installed here" in lines[-1]


@pytest.mark.usefixtures("some_network")
def test_the_plan_does_not_alarm_those_who_search_for_kills(planned: Plan) -> None:
    config, data, plan = planned("training.workers=2")
    warning = ram_warning(config, data, plan, RamLimit(64 * MIB, "the machine"))
    for word in ("killed", "oom", "out of memory"):
        assert word not in "\n".join([*plan.lines(), str(warning)]).lower()
