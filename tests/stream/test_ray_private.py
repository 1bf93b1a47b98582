"""What vesuvius uses of Ray beyond its public interface is there, and does what it did, in the Ray that is installed.

It held with Ray 2.60.0; `pyproject.toml` allows no release for which nobody has run it.
"""

from __future__ import annotations

import inspect
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest

from tests.conftest import REPOSITORY
from vesuvius.stream.ray import private
from vesuvius.stream.reading.reading_log import ReaderWatch

# isort: split
import ray
from ray._private import auto_init_hook, utils, worker
from ray.data import ActorPoolStrategy, DataContext

pytestmark = pytest.mark.usefixtures("ray_cluster")

SOURCES = REPOSITORY / "src" / "vesuvius"


@ray.remote(max_restarts=1)
class Mortal:
    def pid(self) -> int:
        return os.getpid()


def until(condition: Callable[[], Any]) -> Any:
    """The first true answer; a minute is far more than Ray needs."""
    deadline = time.monotonic() + 60
    while not (answer := condition()):
        assert time.monotonic() < deadline, "Ray's tables never said so"
        time.sleep(0.1)
    return answer


def command_lines(processes: Iterable[psutil.Process]) -> list[str]:
    """Of those that have not ended: a worker may, at any moment, and is a zombie until Ray looks at it."""
    found: list[str] = []
    for process in processes:
        with suppress(psutil.Error):
            found.append(" ".join(process.cmdline()))
    return found


def test_pyproject_allows_tested_and_installed_releases() -> None:
    (low, high) = re.findall(r'"ray\[data\]>=(\d+\.\d+),<(\d+\.\d+)"', (REPOSITORY / "pyproject.toml").read_text())[0]
    installed = tuple(map(int, version("ray").split(".")[:2]))
    assert tuple(map(int, low.split("."))) <= installed < tuple(map(int, high.split(".")))


def test_only_private_py_uses_private_parts_of_ray() -> None:
    use = re.compile(r"ray\._private|ray\.data\._internal|ray\.core\.generated|streaming_gen_buffer|log_once|unittest")
    users = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py") if use.search(path.read_text())}
    assert users == {"stream/ray/private.py"}


def test_the_worker_table_reports_how_a_process_ended() -> None:
    actor = Mortal.remote()
    pid, before = ray.get(actor.pid.remote()), time.time()
    node = platform.node()
    assert private.worker_exits(pid, node) == [], "it lives"
    os.kill(pid, signal.SIGKILL)
    (ended,) = until(lambda: private.worker_exits(pid, node))
    assert ended["exit_type"] == "SYSTEM_ERROR"
    private.common_pb2.WorkerExitType.Value("NODE_OUT_OF_MEMORY")  # of the memory monitor: raises for another name
    assert ended["exit_detail"]
    assert private.worker_exits(pid, "another machine") == []
    assert before - 1 < ended["exit_time"] < time.time() + 1
    ray.kill(actor)


def test_a_store_that_fills_is_reported_before_it_spills(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Real objects fill it by hundredths; then it spills, which is an event."""
    spills: list[int] = []
    watch = ReaderWatch(
        *(tmp_path, lambda *_: None, lambda text, fields: spills.append(fields["spilled_bytes"])),
        *(private.worker_exits, private.object_stores),
        on_cluster=True,
    )
    (store,) = private.object_stores()

    def put(hundredths: int) -> list[Any]:
        return [ray.put(np.ones(store.size_bytes // 100, np.uint8)) for _ in range(hundredths)]

    try:
        held = put(70)
        time.sleep(1.5)  # three checks
        assert caplog.text == ""
        held += put(7)
        until(lambda: "is nearly full" in caplog.text)
        assert spills == []
        assert "from 80 % on it spills to disk, which is slow; lower data.regions_in_flight" in caplog.text
        held += put(40)
        until(lambda: spills)
    finally:
        watch.close()
    assert caplog.text.count("is nearly full") == 1


class Rows:
    """Tells how far it has come, in a file, and stays for a while: an actor that is done with its task is gone."""

    def __init__(self, path: str, stay_s: float) -> None:
        self.path, self.stay_s = Path(path), stay_s
        self.path.with_name("pid").write_text(str(os.getpid()))
        self.path.with_name("actor").write_text(ray.get_runtime_context().get_actor_id() or "")

    def __call__(self, row: dict[str, Any]) -> Any:
        for number in range(12):
            self.path.write_text(str(number))
            yield {"bytes": np.full((1, 2**16), number, np.uint8)}
        time.sleep(self.stay_s)


def mapped(path: Path, context: DataContext, stay_s: float, prefetch: int = 0) -> Any:
    context.enable_progress_bars = False
    context.target_max_block_size = 2**15
    with DataContext.current(context):
        dataset = ray.data.from_blocks([pa.table({"first": [0]})])
        mapped = private.map_with_bounded_restarts(
            dataset, Rows, 3, fn_constructor_args=(str(path), stay_s), compute=ActorPoolStrategy(size=1)
        )
        return iter(mapped.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=prefetch))


@pytest.mark.long
def test_a_task_is_not_retried_forever(tmp_path: Path) -> None:
    context = DataContext.get_current().copy()
    blocks = mapped(tmp_path / "some", context, 5)
    next(blocks)
    actor = (tmp_path / "actor").read_text()
    accessor = ray._private.state.state._connect_and_get_accessor()
    table = private.gcs_pb2.ActorTableData.FromString(accessor.get_actor_info(ray.ActorID.from_hex(actor)))  # type: ignore[attr-defined]
    assert table.max_restarts == 3
    blocks.close()


def test_shutdown_disconnects_before_it_kills_the_daemons() -> None:
    ends = inspect.getsource(worker.shutdown)
    assert 0 < ends.index("del global_worker.core_worker") < ends.index("state.state.disconnect()")
    assert ends.index("state.state.disconnect()") < ends.index("kill_all_processes")
    assert "check_alive=False" in ends, "some may be dead"


def test_a_killed_ray_is_not_restarted_or_shut_down_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[psutil.Process] = []
    monkeypatch.setattr(private, "_kill", killed.extend)
    monkeypatch.setattr(auto_init_hook, "enable_auto_connect", True)
    private.kill_daemons()
    lines = command_lines(killed)
    assert all(any(part in line for line in lines) for part in ("gcs_server", "raylet", "DashboardAgent")), lines
    assert auto_init_hook.enable_auto_connect is False
    assert "if enable_auto_connect" in inspect.getsource(auto_init_hook.auto_init_ray)
    assert "atexit.register(shutdown," in inspect.getsource(worker)


def test_the_replaced_functions_exist_in_ray() -> None:
    handler = utils.set_sigterm_handler
    with private.without_sigterm_handler():
        assert utils.set_sigterm_handler is not handler
    assert utils.set_sigterm_handler is handler
    assert "set_sigterm_handler" in inspect.getsource(worker)
    taken: list[Any] = []
    before = worker.print_to_stdstream
    with private.daemon_messages(taken.append):
        worker.print_to_stdstream({"lines": ["a line"]}, False)
    assert taken == [["a line"]]
    assert worker.print_to_stdstream is before


EQUAL_HOST_NAMES = """
import os, sys
from pathlib import Path
from vesuvius.stream.ray import private
from vesuvius.stream.reading.reading_log import ReadingLogWriter, node_name, remove_ended_logs
import ray
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 2**27})
ray.init(cluster.address, log_to_driver=False)
alone = private.unique_node_name()
cluster.add_node(num_cpus=1, object_store_memory=2**27, resources={"other": 1})
cluster.wait_for_nodes()
folder = Path(sys.argv[1])

@ray.remote
class Reader:
    def __init__(self):
        node_name(private.unique_node_name())
        self.log = ReadingLogWriter(folder, "an actor")
    def about(self):
        return os.getpid(), node_name()

head = ray.get_runtime_context().get_node_id()
on_head = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(head, soft=False)
here, there = Reader.options(scheduling_strategy=on_head).remote(), Reader.options(resources={"other": 1}).remote()
(pid, name), (other_pid, other_name) = ray.get([here.about.remote(), there.about.remote()])
node_name(private.unique_node_name())
assert "(" not in alone and name == node_name() != other_name != alone, (alone, name, other_name)
assert [each.pid for each in remove_ended_logs(folder)] == [pid]
ray.kill(there)
while not private.worker_exits(other_pid, other_name): pass
assert private.worker_exits(other_pid, name) == []
assert private.worker_exits(other_pid, alone), "a node that had the name for itself"
remove_ended_logs(folder)
assert len(list(folder.iterdir())) == 2, "the other node's logs are not ours to remove"
print("right", flush=True)
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.long
def test_nodes_with_equal_host_names_are_told_apart(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EQUAL_HOST_NAMES, str(tmp_path)]
    patient = os.environ | {"RAY_raylet_start_wait_time_s": "150"}
    done = subprocess.run(command, env=patient, capture_output=True, text=True, timeout=240, check=False)
    assert "right" in done.stdout, done.stderr
