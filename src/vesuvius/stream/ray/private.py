"""Every private interface of Ray that vesuvius uses, one small function each.

No release of Ray promises any of them: `tests/stream/test_ray_private.py` checks each against the installed Ray, and
`pyproject.toml` allows only the releases for which that test was run.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import ray
import ray._private.auto_init_hook
import ray._private.state
import ray._private.utils
import ray._private.worker
import ray.data
from ray._private.internal_api import get_memory_info_reply
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.core.generated import common_pb2, gcs_pb2
from ray.data import DataContext
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.util.debug import log_once

from vesuvius.errors import one_line

__all__ = ["ExecutionCallback"]


def worker_exits(pid: int, node: str) -> list[dict[str, Any]]:
    """How the processes of this number on the machine of this host name ended, by Ray's table of workers.

    Waits for ever for a cluster whose head is gone.

    Each says `exit_type` (`NODE_OUT_OF_MEMORY` where Ray's memory monitor killed it; `SYSTEM_ERROR` where it was gone
    without a word: SIGKILL, a crash, the kernel; else `USER_ERROR`, `INTENDED_SYSTEM_EXIT` or `INTENDED_USER_EXIT`),
    `exit_detail` in Ray's words, and `exit_time`, when Ray noticed, seconds since 1970, a few tenths of a second late.
    """
    rows = ray._private.state.state._connect_and_get_accessor().get_worker_table()
    table = [gcs_pb2.WorkerTableData.FromString(row) for row in rows]  # type: ignore[attr-defined]
    names = common_pb2.WorkerExitType.Name  # type: ignore[attr-defined]
    here = {bytes.fromhex(one["NodeID"]) for one in ray.nodes() if one["NodeManagerHostname"] == node}  # type: ignore[no-untyped-call]
    return [
        {"exit_type": names(row.exit_type), "exit_detail": _detail(row.exit_detail), "exit_time": row.end_time_ms / 1e3}
        for row in table
        if not row.is_alive and row.pid == pid and row.worker_address.node_id in here
    ]


def _detail(text: str) -> str:
    """Ray's words without its guesses, its advice and the memory of other processes."""
    if "OOM kill reason: " in text:
        return one_line(text.split("OOM kill reason: ")[1].split("\n")[0])
    return one_line(text.split(" Some common causes include")[0])


def reread_authentication() -> None:
    """Have Ray read its variables about tokens again, which it keeps."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def spilled_bytes() -> int:
    """What all object stores of the cluster have written to disk so far.  Raises grpc.RpcError after five seconds."""
    reply = get_memory_info_reply(ray._private.state.state, timeout_seconds=5)  # type: ignore[no-untyped-call]
    return int(reply.store_stats.spilled_bytes_total)


def map_with_bounded_restarts(dataset: ray.data.Dataset, reader: type[Any], deaths: int, **settings: Any) -> Any:
    """`Dataset.map_batches` whose actors are restarted, and whose tasks are retried, at most so many times.

    By default Ray Data does both without end: a task that kills its actor is tried for ever.  Ray 2.64 will drop this
    way of saying so, hence its warning.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
        return dataset.map_batches(reader, max_restarts=deaths, max_task_retries=deaths, **settings)


def set_blocks_ahead(context: DataContext, blocks: int) -> None:
    """How many blocks a task may be ahead of the trainer.  By default 2, and it then sleeps in steps of 200 ms."""
    context._max_num_blocks_in_streaming_gen_buffer = blocks


def hide_progress_warning() -> None:
    """Suppress Ray Data's one warning that progress bars are off, as asked."""
    log_once("ray_data_progress_manager_disabled")


def end_execution(executor: Any) -> None:
    """End an execution of Ray Data from another thread than the one that iterates."""
    executor.shutdown(force=True)


def data_threads() -> list[tuple[threading.Thread, bool]]:
    """The threads in which Ray Data fetches blocks, each with whether it ends by itself once it is stopped."""
    ends = {"iter_threaded": True, "Prefetcher": False}
    return [(thread, ends[thread.name]) for thread in threading.enumerate() if thread.name in ends]


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def without_sigterm_handler() -> Iterator[None]:
    """Keep `ray.init` from installing its handler of SIGTERM."""
    with _replaced(ray._private.utils, "set_sigterm_handler", lambda *_: None):
        yield


@contextmanager
def daemon_messages(take: Callable[[Any], None]) -> Iterator[None]:
    """Send what Ray's daemons report to `take` instead of the terminal."""
    with _replaced(ray._private.worker, "print_to_stdstream", lambda data, *_, **__: take(data.get("lines"))):
        yield


def shut_down(when_handlers_are_back: Callable[[], None]) -> None:
    """`ray.shutdown`, which early on restores the signal handlers that its C++ core found.

    It would send SIGTERM to each daemon and wait a second before it kills it.  Ours block SIGTERM, so they are killed
    before, which saves five seconds, and with them their children, which would notice up to a minute later.

    Args:
        when_handlers_are_back: called right after that.
    """
    disconnect, processes = ray._private.state.state.disconnect, _processes()

    def disconnect_and_kill() -> None:
        when_handlers_are_back()
        disconnect()  # type: ignore[no-untyped-call]
        _kill(processes)

    with _replaced(ray._private.state.state, "disconnect", disconnect_and_kill):
        ray.shutdown()


def kill_daemons() -> None:
    """Kill the Ray that this process has started: calls that wait for it then fail.

    Later calls do not start another one.
    """
    ray._private.auto_init_hook.enable_auto_connect = False
    _kill(_processes())


def leave_to_the_system() -> None:
    """Have Ray not shut down when the interpreter exits, where it would hang."""
    atexit.unregister(ray._private.worker.shutdown)


def _processes() -> list[psutil.Process]:
    """Daemons, workers and agents of the Ray that this process has started; none of a cluster it is connected to."""
    found: list[psutil.Process] = []
    node: Any = ray._private.worker._global_node
    for info in itertools.chain.from_iterable(node.all_processes.values() if node else ()):
        with suppress(psutil.Error):
            daemon = psutil.Process(info.process.pid)
            found += [daemon, *daemon.children(recursive=True)]
    return found


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):  # it has ended
            process.kill()
