"""How the ranks of a run find each other, agree between two steps, and learn of a failure.

Tensors go through torch.distributed (NCCL on GPUs, gloo on CPUs), small messages through a TCPStore of rank 0.  Each
wait for a message ends: with the message, with the failure of a rank, or after `timeout_s`.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from vesuvius.errors import EXIT_ERROR, ConfigError, VesuviusError, one_line
from vesuvius.threads import BoundedCall
from vesuvius.training.ranks.abort import Abort
from vesuvius.training.ranks.failure import RankError, RankLostError, exit_code_of, is_network_error
from vesuvius.training.ranks.share import launched_world_size

log = logging.getLogger(__name__)

_tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # which torch does not declare
_START, _FAILED, _STOPPING = "start", "failed", "stopping"
_POLL_S = 0.5
_PIECE_BYTES = 4 * 2**20  # the store takes no value above 8 MiB
_STORE_SILENT_S = 300.0  # for a call of the store, which has no timeout of its own; timeout_s where that is less
_STOPPED_S = 5.0  # longer than the pauses of a busy machine
_PREFLIGHT_S = 6 * 3600.0  # rank 0 may read many chunks of a slow store, and waits for an outage to end
_CAUSE_S = 5.0
_LEAVE_S = 5.0  # for the others to let go of the store


Stop = tuple[int, str]
"""Exit code and reason of a stop that a rank was asked for."""
Asked = Callable[[], Stop | None]
"""For the one that this rank was asked for; None = it was not."""


@dataclass(eq=False)
class Ranks:
    """This process among the ranks of its run.  `SINGLE` is a run of one rank, in which nothing is exchanged.

    Attributes:
        stopping: exit code and reason with which a rank wants all to stop before the next step.
        failure: of another rank, as far as it is known here.
        abort: how this process ends after a failure.
    """

    rank: int = 0  # of this process; 0 alone writes checkpoints and the log of the run
    world: int = 1  # number of ranks
    local_rank: int = 0  # its number on this machine, and of its GPU
    local_world: int = 1  # ranks on this machine
    timeout_s: float = 1800.0  # longest wait for another rank
    stopping: Stop | None = None
    failure: RankError | None = None
    abort: Abort = field(default_factory=Abort)
    _store: Any = None
    _round: int = 0
    _removed: int = 0
    _own_failure: RankError | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def send(self, value: object, rank: int | None = None) -> None:
        """On rank 0, hand a picklable value to the others, or to one of them, which wait for it in `receive`."""
        if self._store is not None:
            key, payload = _START if rank is None else f"{_START}{rank}", pickle.dumps(value)
            pieces = [payload[i : i + _PIECE_BYTES] for i in range(0, len(payload), _PIECE_BYTES)]
            for number, piece in enumerate(pieces):
                self._store.set(f"{key}/{number}", piece)
            self._store.set(key, str(len(pieces)))

    def receive(self, mine: bool = False) -> Any:
        """On the others, return what rank 0 publishes, for all or (`mine`) for this one, which is then taken away.

        Raises RankError: it failed or did not answer.
        """
        to, key = "check the config and the volumes", f"{_START}{self.rank}" if mine else _START
        keys = [f"{key}/{n}" for n in range(int(self._get(key, 0, to, max(self.timeout_s, _PREFLIGHT_S))))]
        pieces = []
        for each in keys:
            pieces.append(self._get(each, 0, to))
            if mine:
                self._store.delete_key(each)
        return pickle.loads(b"".join(pieces))

    def reduce_min(self, value: int) -> int:
        """On rank 0, return the smallest value that a rank calls this with; the others only tell.  Raises RankError."""
        if self._store is None:
            return value
        if not self.is_main:
            self._store.set(f"least/{self.rank}", str(value))
            return value
        told = [int(self._get(f"least/{rank}", rank, "tell its memory")) for rank in range(1, self.world)]
        return min(value, *told)

    def send_local(self, value: str) -> None:
        """On the first rank of each machine, hand a text to the others there, which wait for it in `receive_local`."""
        if self._store is not None and self.local_rank == 0:
            self._store.set(f"here/{self.rank}", value)

    def receive_local(self) -> str:
        """On the others, return what the first rank of this machine hands over.  Raises RankError."""
        first = self.rank - self.local_rank  # launchers number the ranks machine by machine
        return self._get(f"here/{first}", first, "open its data").decode()

    def sync_step(self, asked: Asked, tell: Mapping[str, Any]) -> tuple[Stop | None, list[Mapping[str, Any]]]:
        """Exchange, before a step, whether to stop, and what rank 0 is to know, in three calls of the store a rank.

        This does not travel with the losses: they are there at the end of a step, and a rank whose data do not come can
        stop with the others only before it.  An all-reduce of gloo took longer.  No host waits for a GPU here.

        Args:
            asked: also while this rank waits: the others may be waiting for data.
            tell: plain data for rank 0.

        Returns:
            The stop that was told of first, the same on all ranks, or None; on rank 0 what each has told, in the order
            of ranks.

        Raises:
            RankError: a rank failed or did not answer.
        """
        if (stop := asked()) is not None:
            self.announce_stop(stop)
        if self._store is None:
            return stop, []
        self._round += 1
        answer, *keys = self._keys_of(self._round)
        stops, told = [stop is not None], [tell]
        if self.is_main:
            for text in self._get_all(dict(enumerate(keys, 1)), "begin the step", asked=asked):
                one_stops, one_told = json.loads(text)
                stops.append(one_stops)
                told.append(one_told)
            agreed = self._store.get(_STOPPING) if any(stops) else b"null"
            self._store.set(answer, agreed)
        else:
            self._store.set(keys[self.rank - 1], json.dumps((*stops, tell)))
            agreed = self._get_all({0: answer}, "begin the step", asked=asked)[0]
        return (tuple(json.loads(agreed)) if agreed != b"null" else None), told if self.is_main else []

    def _keys_of(self, number: int) -> list[str]:
        """Of an agreement: for rank 0's answer, and for what each other rank tells."""
        return [f"step/{number}", *(f"step/{number}/{rank}" for rank in range(1, self.world))]

    def announce_stop(self, stop: Stop) -> None:
        """Tell the others that this rank was asked to stop; the first stop counts."""
        if self._store is not None and self.stopping is None:
            self._store.compare_set(_STOPPING, "", json.dumps(stop))

    def wait_for(self, work: dist.Work) -> None:
        """Wait for a collective: on a GPU the device does, on a CPU the host, but not for a rank that has failed.

        gloo itself waits for a rank that lives and does not come, until its timeout.  Raises RankError.
        """
        began, on_gpu = time.monotonic(), torch.cuda.is_available()
        while not (on_gpu or work.is_completed()):
            if self.failure is not None:
                raise self.failure
            time.sleep(_nap_s(time.monotonic() - began))
        work.wait()  # raises what went wrong

    def sum(self, tensor: Tensor) -> None:
        """Add up a tensor over all ranks, in place, as `wait_for` waits.  Raises RankError."""
        if self.world > 1:
            self.wait_for(dist.all_reduce(tensor, async_op=True))

    def check_sums(self) -> None:
        """After a wait for the device.  Raises RankError: a sum that it waited for was given up, and is none."""
        if self.abort.given_up.is_set() and self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException, saves: bool = True) -> None:
        """Tell the other ranks why this one ends, which it has to do soon.  The first failure counts.

        Args:
            saves: rank 0 saves a checkpoint now; the others wait for it.
        """
        self.abort.unwinding.set()
        self.abort.saves = self.abort.saves and saves
        if not saves:  # others go on until rank 0 has saved: NCCL ends a process that has lost the connection to this
            self.abort.give_up()
        if self._own_failure is None:
            told = f"rank {self.rank} failed: {one_line(error)}"
            self._own_failure = error if isinstance(error, RankError) else RankError(told, exit_code_of(error))
        if not isinstance(error, RankError):
            self._tell_failure(error)

    def root_cause(self, error: Exception) -> Exception:
        """Return the failure of another rank that an error of this one follows from; else the error itself."""
        again = self.abort.unwinding.is_set()
        self.abort.unwinding.set()
        if self._store is None or isinstance(error, VesuviusError):
            return error
        # A broken connection is noticed sooner than its reason is told.
        deadline = time.monotonic() + (0.0 if again else _CAUSE_S)
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if self.failure is not None:
            return self.failure
        ended = "process group has not been initialized" in str(error)  # Ray Train has, as it has lost a rank
        if ended or is_network_error(error):
            return RankLostError(f"a rank ended without a message: {one_line(error)}")
        return error

    def finish(self, exit_code: int) -> None:
        """Tell the others that rank 0 has saved, or wait for that: a launcher kills all ranks once one has ended."""
        if self._store is None:
            return
        try:
            if self.is_main:
                self._store.set("finished", str(exit_code))
            else:
                self._get("finished", 0, "save", failing=False)
        except (RankError, RuntimeError) as error:
            log.warning("rank %d ends before rank 0: %s", self.rank, one_line(error))

    def close(self) -> None:
        """End the connections; after a failure without waiting for sums that never complete."""
        self.abort.closing.set()
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(f"closed/{self.rank}", "")
                if self.is_main:  # the store ends with this process: let the others go first
                    self._store.wait([f"closed/{rank}" for rank in range(self.world)], timedelta(seconds=_LEAVE_S))
            with suppress(RuntimeError, ValueError, AssertionError):  # as Ray Train may end the group at any moment
                self.abort.close_group()
        self.abort.ended.set()

    def watch(self) -> None:
        """Begin to look for stops and failures of other ranks: a collective that hangs because of one must end."""
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def _tell_failure(self, error: BaseException) -> None:
        if self._store is not None:
            lost = isinstance(error, RankLostError)
            failed = {"rank": self.rank, "exit_code": exit_code_of(error), "text": one_line(error), "lost": lost}
            with suppress(RuntimeError):  # rank 0 is gone
                self._store.compare_set(_FAILED, "", json.dumps(failed))

    def _get(self, key: str, rank: int, to: str, limit_s: float | None = None, failing: bool = True) -> bytes:
        """Wait for a key that `rank` sets.  Raises RankError: a rank failed first, or the timeout is over."""
        return self._get_all({rank: key}, to, limit_s, failing)[0]

    def _get_all(
        self,
        keys: Mapping[int, str],
        to: str,
        limit_s: float | None = None,
        failing: bool = True,
        asked: Asked = lambda: None,
    ) -> list[bytes]:
        """Wait for a key of each of these ranks.  Raises as `_get`."""
        limit_s = limit_s or self.timeout_s
        began = time.monotonic()
        try:
            while not self._store.check(list(keys.values())):
                if failing and self.failure is not None:
                    raise self.failure
                if (stop := asked()) is not None:
                    self.announce_stop(stop)
                if (waited_s := time.monotonic() - began) > limit_s:
                    rank = next((rank for rank, key in keys.items() if not self._store.check([key])), 0)
                    lost = RankLostError(
                        f"rank {rank} did not {to} within {limit_s:g} s, while rank {self.rank} waited; look at its "
                        "log, and raise cluster.rank_timeout_minutes if it was only slow"
                    )
                    self._tell_failure(lost)  # the one that hangs is ended by its watch
                    raise lost
                time.sleep(_nap_s(waited_s))
            return cast(list[bytes], self._store.multi_get(list(keys.values())))
        except RuntimeError as error:
            if self.failure is not None:
                raise self.failure from error
            raise RankLostError(f"rank 0 is gone: {one_line(error)}") from error

    def _watch(self) -> None:
        """Look for failures, and end this process where rank 0 is stopped: calls of the store then wait without end."""
        look, looked_s = BoundedCall(self._look, _POLL_S), time.monotonic()
        answered_s = looked_s
        while self._known_failure is None and not self.abort.ended.wait(_POLL_S):
            try:
                look()
            except RuntimeError as error:  # of the store
                self.failure = RankLostError(f"rank 0 is gone: {one_line(error)}")
            before, looked_s = looked_s, time.monotonic()
            # Where this process was stopped itself, its silence says nothing of rank 0.
            if not look.is_running or looked_s - before > _STOPPED_S:
                answered_s = looked_s
            if (silent_s := looked_s - answered_s) > min(_STORE_SILENT_S, self.timeout_s):
                log.error("rank 0 has not answered for %.0f s; rank %d is ended", silent_s, self.rank)
                os._exit(EXIT_ERROR)
        if self._known_failure is not None:
            self.abort.end_after(self._known_failure, self.rank, self.timeout_s)

    @property
    def _known_failure(self) -> RankError | None:
        return self.failure or self._own_failure

    def _look(self) -> None:
        """Note what other ranks have said of a stop or a failure; on rank 0, remove what all have read of steps."""
        # All have come to a later step.  Not while this process ends, which a thread in the middle of a call may abort.
        while self.is_main and self._removed < self._round - 2 and not self.abort.closing.is_set():
            self._removed += 1
            for key in self._keys_of(self._removed):
                self._store.delete_key(key)
        if self._store.check([_STOPPING]):
            exit_code, reason = json.loads(self._store.get(_STOPPING))
            self.stopping = exit_code, reason
        if self._store.check([_FAILED]):
            failed = json.loads(self._store.get(_FAILED))
            if failed["rank"] != self.rank:
                kind = RankLostError if failed["lost"] else RankError
                self.failure = kind(f"rank {failed['rank']} failed: {failed['text']}", failed["exit_code"])


SINGLE = Ranks()
"""A run of one rank."""


@contextmanager
def open_ranks(device_type: str, timeout_s: float) -> Iterator[Ranks]:
    """Join the ranks that the environment names (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT), or be a single one.  `device_type` is "cuda" or "cpu".

    Raises:
        ConfigError: the environment does not say where the others are.
        RankLostError: not all of them came, or one went while it joined.
    """
    world = launched_world_size()
    if world is None or world == 1:
        yield Ranks()
        return
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", 0))
    if device_type == "cuda":
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    backend = "cuda:nccl,cpu:gloo" if device_type == "cuda" else "gloo"
    try:
        if not dist.is_initialized():  # Ray Train has done it
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        store = _open_store(rank, world, timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        kind = ConfigError if isinstance(error, ValueError) else RankLostError  # which Ray Train starts again
        raise kind(
            f"rank {rank} of {world} could not join the others within {timeout_s:g} s: {one_line(error)}; start all "
            "with torchrun or training.ranks, make sure that MASTER_ADDR and MASTER_PORT are reachable, and raise "
            "cluster.rank_timeout_minutes if they only start slowly"
        ) from error
    ranks = Ranks(rank, world, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", 1)), timeout_s, _store=store)
    ranks.watch()
    try:
        yield ranks
    finally:
        ranks.close()


def _open_store(rank: int, world: int, wait: timedelta) -> Any:
    """A store on rank 0, apart from torch's own, whose address travels through that one."""
    host = os.environ["MASTER_ADDR"]
    if rank == 0:
        server = _tcp_store(host, 0, world, is_master=True, timeout=wait, wait_for_workers=False)
        dist.broadcast_object_list([server.port])
        return server
    port: list[Any] = [None]
    dist.broadcast_object_list(port)
    return _tcp_store(host, port[0], world, is_master=False, timeout=wait, wait_for_workers=False)


def _nap_s(waited_s: float) -> float:
    """How long to sleep before looking again: adds at most a twentieth to a wait.  Pure."""
    return min(max(waited_s / 20, 1e-4), 0.05)
