"""How the ranks of a run synchronize between steps, and learn of failures.

Tensors travel through torch.distributed (NCCL on GPUs, gloo on CPUs), small messages through a TCPStore on rank 0.
Every wait for a message ends: with the message, with the failure of a rank, or after `timeout_s`.
"""

import json
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from vesuvius.errors import EXIT_ERROR, NonFiniteError, VesuviusError, one_line
from vesuvius.threads import BoundedCall
from vesuvius.training.ranks.failure import Abort, RankError, RankLostError, exit_code_of, is_network_error

log = logging.getLogger(__name__)

_START, _FAILED, _STOPPING = "start", "failed", "stopping"
_POLL_S = 0.5
_PIECE_BYTES = 4 * 2**20  # the store's limit is 8 MiB per value
_STORE_SILENT_S = 300.0  # for a store call, which has no timeout of its own; at most timeout_s
_SUSPENDED_S = 5.0  # longer than the pauses of a busy machine
_PREFLIGHT_S = 6 * 3600.0  # rank 0 may read many chunks from a slow store and wait out an outage
_CAUSE_S = 5.0
_LEAVE_S = 5.0  # for the others to disconnect from the store


Stop = tuple[int, str]  # exit code and reason of a requested stop
PendingStop = Callable[[], Stop | None]  # returns the stop requested of this rank


@dataclass(eq=False)
class Ranks:
    """This process among the ranks of its run.  `SINGLE` is a run with one rank, which exchanges nothing."""

    rank: int = 0  # rank 0 alone writes checkpoints and the run's log
    world: int = 1  # number of ranks
    local_rank: int = 0  # index on this machine, and of the GPU
    local_world: int = 1  # ranks on this machine
    timeout_s: float = 1800.0  # longest wait for another rank
    stopping: Stop | None = None  # a requested stop of all ranks before the next step
    failure: RankError | None = None  # of another rank, as soon as it is known here
    abort: Abort = field(default_factory=Abort)  # how this process ends after a failure
    _store: Any = None
    _round: int = 0
    _removed: int = 0
    _own_failure: RankError | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def send(self, value: object, rank: int | None = None) -> None:
        """On rank 0, send a picklable value to all others, or to one `rank`, which wait for it in `receive`."""
        if self._store is not None:
            key, payload = _START if rank is None else f"{_START}{rank}", pickle.dumps(value)
            pieces = [payload[i : i + _PIECE_BYTES] for i in range(0, len(payload), _PIECE_BYTES)]
            for index, piece in enumerate(pieces):
                self._store.set(f"{key}/{index}", piece)
            self._store.set(key, str(len(pieces)))

    def receive(self, mine: bool = False) -> Any:
        """On the others, return a value that rank 0 sends to all, or to this rank (`mine`).  Raises RankError."""
        action, key = "check the config and the volumes", f"{_START}{self.rank}" if mine else _START
        keys = [f"{key}/{n}" for n in range(int(self._get(key, 0, action, max(self.timeout_s, _PREFLIGHT_S))))]
        pieces = []
        for each in keys:
            pieces.append(self._get(each, 0, action))
            if mine:
                self._store.delete_key(each)
        return pickle.loads(b"".join(pieces))

    def reduce_min(self, value: int) -> int:
        """On rank 0, return the minimum over all ranks; the others return their own value.  Raises RankError."""
        if self.world == 1:
            return value
        keys = {rank: f"min/{rank}" for rank in range(1, self.world)}
        if self.is_main:
            return min(value, *map(int, self._get_all(keys, "report its memory")))
        self._store.set(keys[self.rank], str(value))
        return value

    def send_local(self, value: str) -> None:
        """On the first rank of each machine, send a text to the others there, which wait in `receive_local`."""
        if self._store is not None and self.local_rank == 0:
            self._store.set(f"here/{self.rank}", value)

    def receive_local(self) -> str:
        """On the others, return the text from the first rank of this machine.  Raises RankError."""
        first = self.rank - self.local_rank  # ranks are numbered machine by machine
        return self._get(f"here/{first}", first, "open the volumes").decode()

    def sync_step(
        self, pending_stop: PendingStop, message: Mapping[str, Any]
    ) -> tuple[Stop | None, list[Mapping[str, Any]]]:
        """Agree before a step whether to stop, and collect messages on rank 0, with three store calls per rank.

        A rank without data can stop together with the others only before the step.  No host waits for a GPU here.
        `pending_stop` is also called during the wait, as the other ranks may be waiting for data.

        Returns the first stop that was announced, the same on all ranks, or None; on rank 0 also the messages by rank.
        Raises RankError: a rank failed or did not respond.
        """
        if (stop := pending_stop()) is not None:
            self.announce_stop(stop)
        if self._store is None:
            return stop, []
        self._round += 1
        answer, *keys = self._keys_of(self._round)
        stops, messages = [stop is not None], [message]
        if self.is_main:
            for text in self._get_all(dict(enumerate(keys, 1)), "begin the step", pending_stop=pending_stop):
                other_stops, other_message = json.loads(text)
                stops.append(other_stops)
                messages.append(other_message)
            agreed = self._store.get(_STOPPING) if any(stops) else b"null"
            self._store.set(answer, agreed)
        else:
            self._store.set(keys[self.rank - 1], json.dumps((*stops, message)))
            agreed = self._get_all({0: answer}, "begin the step", pending_stop=pending_stop)[0]
        return (tuple(json.loads(agreed)) if agreed != b"null" else None), messages if self.is_main else []

    def _keys_of(self, sync_index: int) -> list[str]:
        """Store keys of rank 0's answer, and of each other rank's message."""
        return [f"step/{sync_index}", *(f"step/{sync_index}/{rank}" for rank in range(1, self.world))]

    def announce_stop(self, stop: Stop) -> None:
        """Announce to all ranks that this one was asked to stop; the first stop counts."""
        if self._store is not None and self.stopping is None:
            self._store.compare_set(_STOPPING, "", json.dumps(stop))

    def wait_for(self, work: dist.Work) -> None:
        """Wait for a collective (on a GPU the device waits, on a CPU the host), but not for a rank that has failed.

        gloo alone would wait for a live but absent rank until its timeout.  Raises RankError.
        """
        began, on_gpu = time.monotonic(), torch.accelerator.is_available()
        while not (on_gpu or work.is_completed()):
            if self.failure is not None:
                raise self.failure
            time.sleep(nap_s(time.monotonic() - began))
        work.wait()  # raises if the collective failed

    def sum(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks in place.  Waits and raises like `wait_for`."""
        if self.world > 1:
            self.wait_for(dist.all_reduce(tensor, async_op=True))

    def check_sums(self) -> None:
        """Call it after waiting for the device.  Raises RankError: a sum was aborted and is invalid."""
        if self.abort.group_aborted.is_set() and self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException, saves: bool = True) -> None:
        """Tell the other ranks why this one is about to end; the first failure counts.

        `saves`: rank 0 saves a checkpoint now; the others wait for it.
        """
        self.abort.unwinding.set()
        self.abort.saves = self.abort.saves and saves
        if not saves:  # the others continue until rank 0 has saved: NCCL kills processes that lose this connection
            self.abort.abort_group()
        if self._own_failure is None:
            text = f"rank {self.rank} failed: {one_line(error)}"
            self._own_failure = error if isinstance(error, RankError) else RankError(text, exit_code_of(error))
        if not isinstance(error, RankError | NonFiniteError):  # every rank gets the latter by itself
            self._tell_failure(error)

    def root_cause(self, error: Exception) -> Exception:
        """Return the failure of another rank that caused this rank's error; otherwise the error itself."""
        is_repeated = self.abort.unwinding.is_set()
        self.abort.unwinding.set()
        if self._store is None or isinstance(error, VesuviusError):
            return error
        # A broken connection is noticed before its cause is reported.
        deadline = time.monotonic() + (0.0 if is_repeated else _CAUSE_S)
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if self.failure is not None:
            return self.failure
        ended = "process group has not been initialized" in str(error)  # Ray Train destroyed it after losing a rank
        if ended or is_network_error(error):
            return RankLostError(f"a rank ended without a message: {one_line(error)}")
        return error

    def finish(self, exit_code: int) -> None:
        """Signal that rank 0 has saved, or wait for this signal: a launcher kills all ranks once one has ended."""
        if self._store is None:
            return
        try:
            if self.is_main:
                self._store.set("finished", str(exit_code))
            else:
                self._get("finished", 0, "save", failing=False)
        except (RankError, RuntimeError) as error:
            log.warning("rank %d exits before rank 0: %s", self.rank, one_line(error))

    def close(self) -> None:
        """Close the connections; after a failure without waiting for sums that never complete."""
        self.abort.closing.set()
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(f"closed/{self.rank}", "")
                if self.is_main:  # the store ends with this process: let the others leave first
                    self._store.wait([f"closed/{rank}" for rank in range(self.world)], timedelta(seconds=_LEAVE_S))
            with suppress(RuntimeError, ValueError, AssertionError):  # Ray Train may destroy the group at any time
                if self.abort.unwinding.is_set():
                    dist.distributed_c10d._abort_process_group()  # Ray Train copes with a group that is gone
                else:
                    dist.destroy_process_group()
        self.abort.ended.set()

    def watch(self) -> None:
        """Start watching for stops and failures of other ranks."""
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def _tell_failure(self, error: BaseException) -> None:
        if self._store is not None:
            lost = isinstance(error, RankLostError)
            failed = {"rank": self.rank, "exit_code": exit_code_of(error), "text": one_line(error), "lost": lost}
            with suppress(RuntimeError):  # rank 0 has exited
                self._store.compare_set(_FAILED, "", json.dumps(failed))

    def _get(self, key: str, rank: int, action: str, limit_s: float | None = None, failing: bool = True) -> bytes:
        """Wait for a key set by `rank`.  Raises like `_get_all`."""
        return self._get_all({rank: key}, action, limit_s, failing)[0]

    def _get_all(
        self,
        keys: Mapping[int, str],
        action: str,
        limit_s: float | None = None,
        failing: bool = True,
        pending_stop: PendingStop = lambda: None,
    ) -> list[bytes]:
        """Wait for one key from each of these ranks.  Raises RankError: a rank failed first, or the wait timed out."""
        limit_s = limit_s or self.timeout_s
        began = time.monotonic()
        try:
            while not self._store.check(list(keys.values())):
                if failing and self.failure is not None:
                    raise self.failure
                if (stop := pending_stop()) is not None:
                    self.announce_stop(stop)
                if (waited_s := time.monotonic() - began) > limit_s:
                    rank = next((rank for rank, key in keys.items() if not self._store.check([key])), 0)
                    lost = RankLostError(
                        f"rank {rank} did not {action} within {limit_s:g} s, while rank {self.rank} waited; check its "
                        "log, and raise cluster.rank_timeout_minutes if it was only slow"
                    )
                    self._tell_failure(lost)  # the watch thread of the hanging rank kills it
                    raise lost
                time.sleep(nap_s(waited_s))
            return cast(list[bytes], self._store.multi_get(list(keys.values())))
        except RuntimeError as error:
            if self.failure is not None:
                raise self.failure from error
            raise RankLostError(f"lost rank 0: {one_line(error)}") from error

    def _watch(self) -> None:
        """Poll for failures, and kill this process if rank 0 is suspended: store calls then block forever."""
        poll, polled_s = BoundedCall(self._poll, _POLL_S), time.monotonic()
        answered_s = polled_s
        while (failure := self.failure or self._own_failure) is None and not self.abort.ended.wait(_POLL_S):
            try:
                poll()
            except RuntimeError as error:  # from the store
                self.failure = RankLostError(f"lost rank 0: {one_line(error)}")
            before, polled_s = polled_s, time.monotonic()
            # If this process itself was suspended, its missed answers say nothing about rank 0.
            if not poll.is_running or polled_s - before > _SUSPENDED_S:
                answered_s = polled_s
            if (silent_s := polled_s - answered_s) > min(_STORE_SILENT_S, self.timeout_s):
                log.error("no answer from rank 0 for %.0f s; killing rank %d", silent_s, self.rank)
                os._exit(EXIT_ERROR)
        if failure is not None:
            self.abort.kill_if_hung(failure, self.rank, self.timeout_s)

    def _poll(self) -> None:
        """Take over announced stops and failures; on rank 0, delete the keys of finished synchronizations."""
        # All ranks are past these steps.  Not while this process ends: a thread inside a store call could crash it.
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


def nap_s(waited_s: float) -> float:
    """Sleep time between two polls: adds at most 5 % to a wait.  Pure."""
    return min(max(waited_s / 20, 1e-4), 0.05)
