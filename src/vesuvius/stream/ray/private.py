"""Every private interface of Ray that vesuvius uses, one small function each.

Ray guarantees none of them: `tests/stream/test_ray_private.py` checks each against the installed Ray, and
`pyproject.toml` allows only releases that passed that test.
"""

import atexit
import itertools
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import psutil
import ray
import ray._private.auto_init_hook
import ray._private.state
import ray._private.utils
import ray._private.worker
import ray.data
from ray._private.internal_api import node_stats
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.core.generated import common_pb2, gcs_pb2
from ray.data import DataContext
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.util.debug import log_once

from vesuvius.errors import one_line
from vesuvius.stream.ray.nodes import node_text
from vesuvius.stream.reading.reading_log import ObjectStore

__all__ = ["ExecutionCallback"]


def unique_node_name() -> str:
    """Host name of this machine, with Ray's id of the node if another node of the cluster has the same."""
    host, own_id = socket.gethostname(), ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    alike = [each for each in nodes if each["Alive"] and each["NodeManagerHostname"] == host]
    return next((node_text(each) for each in alike if each["NodeID"] == own_id and len(alike) > 1), host)


def worker_exits(pid: int, node: str) -> list[dict[str, Any]]:
    """Return how the processes with this pid on this node (`unique_node_name`) ended, from Ray's table of workers.

    Blocks forever if the cluster's head is gone.

    Each entry has `exit_type` (`NODE_OUT_OF_MEMORY` if Ray's memory monitor killed it; `SYSTEM_ERROR` if it vanished:
    SIGKILL, a crash, the kernel; else `USER_ERROR`, `INTENDED_SYSTEM_EXIT` or `INTENDED_USER_EXIT`), Ray's
    `exit_detail`, and `exit_time`, when Ray noticed, in seconds since 1970 and a few tenths of a second late.
    """
    rows = ray._private.state.state._connect_and_get_accessor().get_worker_table()
    table = [gcs_pb2.WorkerTableData.FromString(row) for row in rows]  # type: ignore[attr-defined]
    names = common_pb2.WorkerExitType.Name  # type: ignore[attr-defined]
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    alike = [each for each in nodes if node in (each["NodeManagerHostname"], node_text(each))]
    node_ids = {bytes.fromhex(each["NodeID"]) for each in alike}
    return [
        {"exit_type": names(row.exit_type), "exit_detail": _detail(row.exit_detail), "exit_time": row.end_time_ms / 1e3}
        for row in table
        if not row.is_alive and row.pid == pid and row.worker_address.node_id in node_ids
    ]


def _detail(text: str) -> str:
    """Shorten Ray's text: without guesses, advice and the memory of other processes."""
    if "OOM kill reason: " in text:
        return one_line(text.split("OOM kill reason: ")[1].split("\n")[0])
    return one_line(text.split(" Some common causes include")[0])


def reread_authentication() -> None:
    """Make Ray read the environment variables of its authentication again, which it caches."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def object_stores() -> list[ObjectStore]:
    """Return the object store of each node of the cluster.  Raises grpc.RpcError if a node does not answer."""
    stores = []
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"]:
            reply = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)  # type: ignore[no-untyped-call]
            stats, capacity = reply.store_stats, int(node["Resources"].get("object_store_memory", 0))
            used, spilled = stats.object_store_bytes_used, stats.spilled_bytes_total
            stores.append(ObjectStore(node_text(node), used, capacity, spilled))
    return stores


def map_with_bounded_restarts(dataset: ray.data.Dataset, reader: type[Any], deaths: int, **settings: Any) -> Any:
    """`Dataset.map_batches` with at most `deaths` restarts of an actor and retries of a task; by default unlimited.

    The warning is hidden because Ray 2.64 will drop these arguments.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
        return dataset.map_batches(reader, max_restarts=deaths, max_task_retries=deaths, **settings)


def set_blocks_ahead(context: DataContext, blocks: int) -> None:
    """Set how many blocks a task may be ahead of the trainer.  By default 2; it then sleeps in steps of 200 ms."""
    context._max_num_blocks_in_streaming_gen_buffer = blocks


def hide_progress_warning() -> None:
    """Suppress Ray Data's warning that progress bars are off."""
    log_once("ray_data_progress_manager_disabled")


def end_execution(executor: Any) -> None:
    """End an execution of Ray Data, on another thread than the one that iterates."""
    executor.shutdown(force=True)


def data_threads() -> list[tuple[threading.Thread, bool]]:
    """Return the threads in which Ray Data fetches blocks, and whether each ends by itself once stopped."""
    ends = {"iter_threaded": True, "Prefetcher": False}
    return [(thread, ends[thread.name]) for thread in threading.enumerate() if thread.name in ends]


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def without_sigterm_handler() -> AbstractContextManager[None]:
    """Keep `ray.init` from installing its SIGTERM handler."""
    return _replaced(ray._private.utils, "set_sigterm_handler", lambda *_: None)


def daemon_messages(take: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Send the output of Ray's daemons to `take` instead of the terminal."""
    return _replaced(ray._private.worker, "print_to_stdstream", lambda data, *_, **__: take(data.get("lines")))


def shut_down(on_handlers_restored: Callable[[], None]) -> None:
    """Run `ray.shutdown`, killing the daemons first.

    That sends SIGTERM to each daemon and kills it after a second.  Ours block SIGTERM, so killing them at once saves
    five seconds; their children are killed too, as they would only notice up to a minute later.  The callback comes
    after Ray's C++ core has restored the signal handlers that it had replaced.
    """
    disconnect, processes = ray._private.state.state.disconnect, _processes()

    def disconnect_and_kill() -> None:
        on_handlers_restored()
        disconnect()  # type: ignore[no-untyped-call]
        _kill(processes)

    with _replaced(ray._private.state.state, "disconnect", disconnect_and_kill):
        ray.shutdown()


def kill_daemons() -> None:
    """Kill the Ray that this process started: calls that wait for it fail, and later ones do not start another."""
    ray._private.auto_init_hook.enable_auto_connect = False
    _kill(_processes())


def skip_shutdown_at_exit() -> None:
    """Keep Ray from shutting down when the interpreter exits, where it would hang."""
    atexit.unregister(ray._private.worker.shutdown)


def _processes() -> list[psutil.Process]:
    """Return daemons, workers and agents of the Ray that this process started; none of a cluster it connected to."""
    processes: list[psutil.Process] = []
    node: Any = ray._private.worker._global_node
    for info in itertools.chain.from_iterable(node.all_processes.values() if node else ()):
        with suppress(psutil.Error):
            daemon = psutil.Process(info.process.pid)
            processes += [daemon, *daemon.children(recursive=True)]
    return processes


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):  # already ended
            process.kill()
