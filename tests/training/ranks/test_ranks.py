"""Ranks agree before a step, and hear of each other's failures; here as threads over a real TCPStore."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.rank_runs import output_of, started_ranks
from vesuvius.errors import EXIT_ERROR, ConfigError, DataError
from vesuvius.training.ranks import ranks as module
from vesuvius.training.ranks.failure import RankError, RankLostError
from vesuvius.training.ranks.join import open_ranks
from vesuvius.training.ranks.ranks import Ranks
from vesuvius.training.ranks.share import launched_world_size

WORLD = 3


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ranks]]:
    """Three ranks with a connection each, watching the store."""
    monkeypatch.setattr(module, "_POLL_S", 0.05)
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    server = store("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    others = [store("127.0.0.1", server.port, is_master=False, wait_for_workers=False) for _ in range(WORLD - 1)]
    found = [Ranks(rank, WORLD, timeout_s=30, _store=one) for rank, one in enumerate([server, *others])]
    for one in found:
        one.watch()
    yield found
    for one in found:
        one.abort.ended.set()


class Counted:
    """A store that records a rank's calls, except those of the watch thread."""

    def __init__(self, store: Any) -> None:
        self.store, self.calls = store, list[str]()

    def __getattr__(self, name: str) -> Any:
        if threading.current_thread().name != "bounded-call":
            self.calls.append(name)
        return getattr(self.store, name)


def on_all(ranks: list[Ranks], act: Callable[[Ranks], Any]) -> list[Any]:
    """Results or exceptions of all ranks, run concurrently."""

    def settled(one: Ranks) -> Any:
        try:
            return act(one)
        except RankError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(settled, ranks))


def test_a_stop_of_one_is_the_stop_of_all_and_rank_0_hears_everybody(ranks: list[Ranks]) -> None:
    agreed = on_all(ranks, lambda one: one.sync_step(lambda: None, {"rank": one.rank}))
    assert [one[0] for one in agreed] == [None] * WORLD
    assert [dict(told) for told in agreed[0][1]] == [{"rank": rank} for rank in range(WORLD)]
    stops = {1: (75, "SIGTERM"), 2: (4, "memory guard")}
    agreed = on_all(ranks, lambda one: one.sync_step(lambda: stops.get(one.rank), {}))
    assert agreed[0][0] in stops.values()
    assert len({one[0] for one in agreed}) == 1, "whichever was told of first"


def test_to_agree_on_a_step_takes_three_calls_of_the_store_however_many_ranks_there_are(ranks: list[Ranks]) -> None:
    """One that asks for what each rank has told in turn, removes it then, or asks in another thread calls more often.
    How often a rank looks while it waits is not compared: the others have come before rank 0, and wait for it.
    """
    on_all(ranks, lambda one: [one.sync_step(lambda: None, {}) for _ in range(3)])
    stores = [Counted(one._store) for one in ranks]
    for one, store in zip(ranks, stores, strict=True):
        one._store = store

    def act(one: Ranks) -> None:
        while one.rank == 0 and not all("check" in store.calls for store in stores[1:]):
            time.sleep(0.01)
        one.sync_step(lambda: None, {"rank": one.rank})

    on_all(ranks, act)
    assert stores[0].calls == ["check", "multi_get", "set"]
    for store in stores[1:]:
        assert (store.calls[0], set(store.calls[1:-1]), store.calls[-1]) == ("set", {"check"}, "multi_get")


def test_hundreds_of_steps_leave_no_keys_in_the_store(ranks: list[Ranks]) -> None:
    told = on_all(ranks, lambda one: [one.sync_step(lambda: None, {one.rank: step})[1] for step in range(300)])
    assert told[0] == [[{0: step}, *({str(rank): step} for rank in range(1, WORLD))] for step in range(300)]
    deadline = time.monotonic() + 30
    while ranks[0]._store.num_keys() >= 10:
        assert time.monotonic() < deadline, ranks[0]._store.num_keys()
        time.sleep(0.05)


def test_a_failure_reaches_all_ranks_with_its_cause_and_exit_code(ranks: list[Ranks]) -> None:
    def act(one: Ranks) -> Any:
        if one.rank == 2:
            one.fail(DataError("a volume must be readable; got nothing"))
            return None
        return one.sync_step(lambda: None, {})

    failures = on_all(ranks, act)[:2]
    assert [str(failure) for failure in failures] == ["rank 2 failed: a volume must be readable; got nothing"] * 2
    assert [failure.exit_code for failure in failures] == [6, 6]
    ranks[0].fail(DataError("later"))  # the first counts
    assert "got nothing" in str(ranks[1].root_cause(RuntimeError("connection closed by gloo")))


def test_a_stop_during_synchronization_reaches_ranks_that_wait_for_data(ranks: list[Ranks]) -> None:
    """Rank 1 has begun to synchronize; the others are still waiting for data."""
    stop: list[tuple[int, str]] = []

    def act(one: Ranks) -> Any:
        while one.rank != 1 and one.stopping is None:
            time.sleep(0.02)
        return one.sync_step(lambda: stop[0] if stop and one.rank == 1 else one.stopping, {})[0]

    threading.Timer(0.5, lambda: stop.append((75, "SIGTERM"))).start()
    assert on_all(ranks, act) == [(75, "SIGTERM")] * WORLD


def test_a_network_error_without_a_cause_is_a_lost_rank_and_a_defect_is_not(
    ranks: list[Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = RuntimeError("[../gloo/transport/tcp] connection closed by peer")
    defect = dist.DistBackendError("NCCL error: CUDA error: device-side assert triggered")
    monkeypatch.setattr(module, "_CAUSE_S", 1.0)
    with pytest.raises(ValueError, match="has not been initialized") as ended:
        dist.barrier()
    errors = [lost, defect, ended.value]
    found = on_all(ranks, lambda one: one.root_cause(errors[one.rank]))
    assert isinstance(found[0], RankLostError)
    assert found[1] is defect
    assert isinstance(found[2], RankLostError), "the group was destroyed under this rank"


@pytest.mark.parametrize(("gaps", "is_ended"), [([0.5, 0.5, 400.0, 0.5, 0.5], False), ([0.5] * 800, True)])
def test_a_suspended_rank_0_kills_a_rank_and_its_own_suspension_does_not(
    monkeypatch: pytest.MonkeyPatch, gaps: list[float], is_ended: bool
) -> None:
    """SIGSTOP or a debugger: the process has not polled the store either."""
    now, left, ended = [0.0], iter(gaps), []

    class Hanging:
        is_running = True

        def __init__(self, *_: Any) -> None: ...

        def __call__(self) -> None: ...

    def wait(_: float) -> bool:
        gap = next(left, None)
        now[0] += gap or 0.0
        return gap is None or bool(ended)

    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.os, "_exit", ended.append)
    monkeypatch.setattr(module, "BoundedCall", Hanging)
    rank = Ranks(1, 2)
    rank.abort.ended = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    rank._watch()
    assert ended == ([EXIT_ERROR] if is_ended else [])


def test_ranks_close_after_ray_train_destroyed_their_process_group(ranks: list[Ranks]) -> None:
    """Otherwise that error would hide the lost rank, after which the ranks are to be restarted."""
    assert not dist.is_initialized()
    assert on_all(ranks, lambda one: one.close()) == [None] * WORLD


def test_a_missing_rank_raises_after_the_timeout(ranks: list[Ranks]) -> None:
    ranks[0].timeout_s = 1.0
    with pytest.raises(RankLostError, match=r"rank 1 did not begin the step within 1 s.*rank_timeout_minutes"):
        ranks[0].sync_step(lambda: None, {})


class _EndedError(Exception):
    """Represents the exit of the process."""


@pytest.mark.parametrize(
    ("after", "timeout_s", "limit_s"), [("", 7200, 15), ("fail", 60, 1800), ("fail", 7200, 7200), ("close", 7200, 10)]
)
def test_a_rank_that_hangs_after_a_failure_is_killed_but_has_time_to_save(
    monkeypatch: pytest.MonkeyPatch, after: str, timeout_s: float, limit_s: float
) -> None:
    """Also rank 0 in a save that a dead file system never completes, as Ray Train waits for all ranks indefinitely, and
    the failed rank itself while closing its connections."""
    now = [0.0]

    class Clock(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            now[0] += timeout or 0
            assert now[0] < 10_000, "it waits forever"
            return False

    def end(code: int) -> None:
        raise _EndedError(code)

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(os, "_exit", end)
    one, words = Ranks(world=2, timeout_s=timeout_s), list[RankError]()
    one.abort.on_kill = words.append
    if after:
        one.fail(DataError("a chunk must be readable"))
    if after == "close":
        one.close()
    one.abort.ended = Clock()
    one.failure = None if after else RankError("rank 1 failed: a chunk must be readable", 6)
    with pytest.raises(_EndedError, match="6"):
        one._watch()
    assert [str(word) for word in words] == [f"rank {0 if after else 1} failed: a chunk must be readable"]
    assert now[0] == pytest.approx(limit_s, abs=1)


def test_a_rank_that_cannot_join_names_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # nobody listens there
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    said = r"rank 1 of 2 could not join the others within 1.5 s: .* raise cluster.rank_timeout_minutes"
    with pytest.raises(RankLostError, match=said), open_ranks("cpu", 1.5):
        pass


def test_only_the_environment_of_a_launcher_makes_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")  # as SLURM scripts set it
    assert launched_world_size() is None
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert launched_world_size() == 4


PLACE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two is not an integer from 1 to"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is not"),
        ({"RANK": "5"}, "RANK=5 is not an integer from 0 to 1; WORLD_SIZE=2"),
        ({"RANK": "-1"}, "RANK=-1 is not"),
        ({"RANK": "1.0"}, "RANK=1.0 is not"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_WORLD_SIZE=1 is not an integer from 2 to 2"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not an integer from 1 to 65535"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http is not"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set, but RANK=1, WORLD_SIZE=2"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({"RANK": ""}, "RANK is not set"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
    ],
)
def test_variables_that_name_no_rank_are_refused_with_their_names(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], said: str
) -> None:
    for name, value in (PLACE | changed).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        launched_world_size()


JOINS = """
import logging, os, sys
from vesuvius.errors import VesuviusError
from vesuvius.training.ranks import join
logging.basicConfig(level=logging.WARNING)
join._MISSING_S = 1.0
for pair in sys.argv[2:]:
    rank, name, value = pair.split(":", 2)
    if rank in ("*", os.environ["RANK"]):
        os.environ[name] = value
try:
    with join.open_ranks("cpu", float(sys.argv[1])) as found:
        print("joined", found.rank)
except VesuviusError as error:
    print(type(error).__name__, error)
    sys.exit(error.exit_code)
"""


def test_a_missing_rank_is_named_while_the_others_wait_and_after_the_timeout(tmp_path: Path) -> None:
    """The last one, rank 0; a rank with the RANK of another; a host that does not exist; a port in use."""
    with ExitStack() as all_at_once, socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        cases = {
            "absent": (2, ("*:WORLD_SIZE:3",)),
            "headless": (1, ("*:WORLD_SIZE:2", "*:RANK:1")),
            "duplicate": (3, ("2:RANK:1",)),
            "unknown": (1, ("*:WORLD_SIZE:2", "*:MASTER_ADDR:nowhere.invalid")),
            "busy": (1, ("*:WORLD_SIZE:2", f"*:MASTER_PORT:{taken.getsockname()[1]}")),
        }
        started = {}
        for name, (world, changes) in cases.items():
            (tmp_path / name).mkdir()
            program = ("-c", JOINS, "6", *changes)
            started[name] = all_at_once.enter_context(started_ranks(None, tmp_path / name, world, program=program))
        codes = {name: [process.wait(timeout=120) for process in ranks] for name, ranks in started.items()}
        said = {name: output_of(tmp_path / name, world) for name, (world, _) in cases.items()}
    assert (codes["absent"], codes["headless"]) == ([EXIT_ERROR] * 2, [EXIT_ERROR])
    assert "rank 2 of 3 has not connected to MASTER_ADDR=127.0.0.1 MASTER_PORT=" in said["absent"]
    assert "after 1 s (rank 0 waits up to 6 s)" in said["absent"]
    assert "RankLostError rank 0 of 3 could not join the others within 6 s: rank 2 of 3" in said["absent"]
    assert "rank 0 of 2 has not connected to MASTER_ADDR=127.0.0.1 MASTER_PORT=" in said["headless"]
    assert sorted(codes["duplicate"])[-1] == 2
    assert "ConfigError RANK=1 belongs to another process" in said["duplicate"]
    assert (codes["unknown"], codes["busy"]) == ([2], [2])
    assert "ConfigError MASTER_ADDR=nowhere.invalid cannot be resolved" in said["unknown"]
    assert "ConfigError rank 0 cannot listen on MASTER_PORT=" in said["busy"]


def test_a_message_larger_than_the_store_limit_reaches_all(ranks: list[Ranks]) -> None:
    value = {"large": bytes(range(256)) * 80_000}  # 20 MB
    ranks[0].send(value)
    assert on_all(ranks[1:], lambda one: one.receive() == value) == [True] * (WORLD - 1)


HANGS = """
import os, signal, sys, threading, time
from vesuvius.training.ranks import failure
from vesuvius.training.ranks.failure import RankError
from vesuvius.training.ranks.join import open_ranks
failure._UNWIND_S = 1.0
with open_ranks("cpu", float(sys.argv[1])) as ranks:
    ranks.sync_step(lambda: None, {})
    if ranks.rank == int(sys.argv[2]):
        eval(sys.argv[3])
    try:
        ranks.sync_step(lambda: None, {})
    except RankError as error:
        print(error, flush=True)
        ranks.fail(error)
        os._exit(error.exit_code)
"""
SLEEPS, STOPS = "time.sleep(1e6)", "os.kill(os.getpid(), signal.SIGSTOP)"


CASES = [
    (1, SLEEPS, "rank 1 did not begin the step"),
    (0, STOPS, "no answer from rank 0"),
    (0, SLEEPS, "rank 0 did not begin the step"),
    (1, STOPS, "rank 1 did not begin the step"),
]


@pytest.mark.parametrize("cases", [CASES[:2], pytest.param(CASES[2:], marks=pytest.mark.long)])
def test_a_hanging_or_suspended_rank_ends_the_others_after_the_timeout(
    tmp_path: Path, cases: list[tuple[int, str, str]]
) -> None:
    with ExitStack() as all_at_once:  # mostly waiting
        started = []
        for number, (rank, hang, _) in enumerate(cases):
            (place := tmp_path / str(number)).mkdir()
            program = ("-c", HANGS, "4", str(rank), hang)
            started.append(all_at_once.enter_context(started_ranks(Path("none"), place, 2, program=program)))
        for number, (rank, hang, said) in enumerate(cases):
            assert started[number][1 - rank].wait(timeout=60) == EXIT_ERROR
            if hang == SLEEPS:  # nor does the one that hangs stay behind
                assert started[number][rank].wait(timeout=60) == EXIT_ERROR
            assert said in output_of(tmp_path / str(number), 2)
