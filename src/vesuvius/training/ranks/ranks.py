"""How the ranks of a run find each other, agree between two steps, and hear of a failure.

Tensors go through torch.distributed (NCCL on GPUs, gloo on CPUs), small messages through a TCPStore of rank 0.  Each
wait for a message ends: with the message, with the failure of a rank, or after `timeout_s`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from vesuvius.errors import EXIT_ERROR, VesuviusError, one_line
from vesuvius.training.ranks.errors import RankError, RankLostError, restart_may_help

log = logging.getLogger(__name__)

_START, _FAILED, _STOPPING = "start", "failed", "stopping"
_POLL_S = 0.5
_PIECE_BYTES = 4 * 2**20  # the store takes no value above 8 MiB
_SILENT_S = 300.0
_STORE_GRACE_S = 10.0  # for calls of the store that are answered late
_PREFLIGHT_S = 6 * 3600.0  # rank 0 may read many chunks of a slow store, and waits for an outage to end
_CAUSE_S = 5.0
_LEAVE_S = 5.0  # for the others to let go of the store
_UNWIND_S = 30.0  # after the failure of another rank, for the main thread to notice it
_SAVE_S = 1800.0  # and then to save and end, or to wait for that; timeout_s where that is more


@dataclass(frozen=True)
class Restart:
    """That the ranks of a run were restarted."""

    # number, most: which one, counted from 1, and how many there may be
    number: int
    most: int
    lost: Mapping[int, str]  # ranks that were lost, and what is known of it

    def __str__(self) -> str:
        if not self.lost:
            return "all ranks were restarted, though none was lost: Ray Train changes their number"
        lost = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(self.lost.items()))
        return f"restart {self.number} of at most {self.most}, as ranks were lost: {lost}"


@dataclass(frozen=True)
class Agreement:
    """What all ranks know before a step."""

    stop: tuple[int, str] | None = None  # exit code and reason of a stop that some rank was asked for; None = go on
    told: tuple[Mapping[str, Any], ...] = ()  # what each rank had to say, in the order of ranks; on rank 0 only


@dataclass(eq=False)
class Ranks:
    """This process among the ranks of its run.  `SINGLE` is a run of one rank, in which nothing is exchanged."""

    rank: int = 0  # of this process; 0 alone writes checkpoints and the log of the run
    world: int = 1  # number of ranks
    local_rank: int = 0  # its number on this machine, and of its GPU
    local_world: int = 1  # ranks on this machine
    timeout_s: float = 1800.0  # longest wait for another rank
    group: Any = None  # torch's process group of the ranks at work; None = all
    processes: int | None = None  # that have joined, idle ones too; None = world
    idle: bool = False  # this one has no part in the steps, as the effective batch does not divide by so many
    restart: Restart | None = None  # that they were restarted; None = they were not
    # exit code and reason with which a rank wants all to stop before the next step
    stopping: tuple[int, str] | None = None
    _store: Any = None
    _round: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)
    _unwinding: threading.Event = field(default_factory=threading.Event)
    _beat_s: float = field(default_factory=time.monotonic)
    _cause: RankError | None = None
    # whether that is this one, which may be waiting for the others while these wait for data
    asked_to_stop: Callable[[], tuple[int, str] | None] = lambda: None
    on_sign: Callable[[], None] = lambda: None  # called while another rank is awaited and lives

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def publish(self, value: object) -> None:
        """On rank 0, hand a picklable value to the others, which wait for it in `await_main`."""
        if self._store is not None:
            payload = pickle.dumps(value)
            pieces = [payload[i : i + _PIECE_BYTES] for i in range(0, len(payload), _PIECE_BYTES)]
            for number, piece in enumerate(pieces):
                self._store.set(f"{_START}/{number}", piece)
            self._store.set(_START, str(len(pieces)))

    def await_main(self) -> Any:
        """On the others, return what rank 0 publishes.

        Raises:
            RankError: rank 0 failed or did not answer.
        """
        limit_s = max(self.timeout_s, _PREFLIGHT_S)
        count = int(self._get(_START, 0, "check the config and the volumes", limit_s))
        return pickle.loads(b"".join(self._store.get(f"{_START}/{number}") for number in range(count)))

    def agree(self, stop: tuple[int, str] | None, tell: Mapping[str, Any]) -> Agreement:
        """Exchange, before a step, whether to stop, and what rank 0 is to know.  Returns the same stop on all ranks.

        Args:
            stop: exit code and reason that this rank was asked to stop with; None = it was not.
            tell: plain data for rank 0.

        Raises:
            RankError: a rank failed or did not answer.
        """
        if self._store is None:
            return Agreement(stop)
        self._round += 1
        key = f"step/{self._round}"
        if not self.is_main:
            self._store.set(f"{key}/{self.rank}", json.dumps({"stop": stop, "tell": tell}))
            agreed = json.loads(self._get(key, 0, "begin the step"))
            return Agreement(tuple(agreed) if agreed else None)
        told: list[dict[str, Any]] = [{"stop": stop, "tell": tell}]
        for rank in range(1, self.world):
            told.append(json.loads(self._get(f"{key}/{rank}", rank, "begin the step")))
            self._store.delete_key(f"{key}/{rank}")
        agreed = next((one["stop"] for one in told if one["stop"]), None)
        self._store.set(key, json.dumps(agreed))
        self._store.delete_key(f"step/{self._round - 2}")  # all have read it: they have come to a later one
        return Agreement(tuple(agreed) if agreed else None, tuple(one["tell"] for one in told))

    def wait_for(self, work: dist.Work) -> None:
        """Wait for a collective: on a GPU the device does, on a CPU the host, but not for a rank that has failed.

        gloo itself waits for a rank that lives and does not come, until its timeout.

        Raises:
            RankError: another rank has failed.
        """
        if torch.cuda.is_available():
            work.wait()
            return
        began = looked = time.monotonic()
        while not work.is_completed():
            now = time.monotonic()
            time.sleep(_nap_s(now - began))
            if now - looked >= _POLL_S:
                looked = now
                if (failure := self._failure()) is not None:
                    raise failure
        work.wait()  # raises what went wrong

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends.  The first failure counts."""
        self._unwinding.set()
        if self._store is not None and not isinstance(error, RankError):
            code = error.exit_code if isinstance(error, VesuviusError) else EXIT_ERROR
            failed = {"rank": self.rank, "exit_code": code, "text": one_line(error), "lost": restart_may_help(error)}
            with suppress(RuntimeError):  # rank 0 is gone
                self._store.compare_set(_FAILED, "", json.dumps(failed))

    def await_end(self) -> int:
        """On an idle rank, wait until rank 0 ends, and return its exit code."""
        return int(self._get("finished", 0, "end", at_most_s=math.inf))

    def explain(self, error: Exception) -> Exception:
        """Return the failure of another rank that an error of this one follows from; else the error itself."""
        again = self._unwinding.is_set()
        self._unwinding.set()
        if self._store is None or isinstance(error, VesuviusError):
            return error
        # A broken connection is noticed sooner than its reason is told.
        deadline = time.monotonic() + (0.0 if again else _CAUSE_S)
        while (failure := self._failure()) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if failure is not None:
            return failure
        ended = "process group has not been initialized" in str(error)  # Ray Train has, as it has lost a rank
        if ended or isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error):
            return RankLostError(
                f"every rank must live as long as the run; one ended without a message: {one_line(error)}"
            )
        return error

    def finish(self, exit_code: int, at_most_s: float | None = None) -> None:
        """Tell the others that rank 0 has saved, or wait for that: a launcher kills all ranks once one has ended."""
        if self._store is None:
            return
        try:
            if self.is_main:
                self._store.set("finished", str(exit_code))
            else:
                self._get("finished", 0, "save", at_most_s, failing=False)
        except (RankError, RuntimeError) as error:
            log.warning("rank %d ends before rank 0: %s", self.rank, one_line(error))

    def close(self) -> None:
        """End the connections."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(f"closed/{self.rank}", "")
                if self.is_main:  # the store ends with this process: let the others go first
                    deadline = time.monotonic() + _LEAVE_S
                    others = [f"closed/{rank}" for rank in range(self.processes or self.world)]
                    while not self._store.check(others) and time.monotonic() < deadline:
                        time.sleep(0.01)
            with suppress(RuntimeError, ValueError, AssertionError):  # as Ray Train may end the group at any moment
                dist.destroy_process_group()
        self._ended.set()

    def _get(self, key: str, rank: int, to: str, at_most_s: float | None = None, failing: bool = True) -> bytes:
        """Wait for a key that `rank` sets.

        Raises:
            RankError: a rank failed first, that one is silent, or the timeout is over.
        """
        assert self._store is not None
        limit_s = self.timeout_s if at_most_s is None else at_most_s
        began = sign = looked = time.monotonic()
        beats = b""
        while True:
            try:
                found = self._store.check([key])
                value = self._store.get(key) if found else b""
            except RuntimeError as error:
                raise RankLostError(f"rank 0 must answer; it is gone: {one_line(error)}") from error
            if found:
                return cast(bytes, value)
            now = time.monotonic()
            time.sleep(_nap_s(now - began))
            if now - looked < _POLL_S:
                continue
            looked = now
            if failing and (failure := self._failure()) is not None:
                raise failure
            if (present := self._beats(rank)) != beats:
                beats, sign = present, now
                self.on_sign()
            if now - sign > self._silent_s:
                raise RankLostError(
                    f"every rank must live as long as the run; rank {rank} has been silent for {now - sign:.0f} s"
                )
            if now - began > limit_s:
                raise RankLostError(
                    f"a rank must answer within {limit_s:g} s; rank {self.rank} waited for rank {rank} to {to}; look "
                    "at its log, and raise cluster.rank_timeout_minutes if it was only slow"
                )

    @property
    def _silent_s(self) -> float:
        """How long a rank may give no sign of life."""
        return min(_SILENT_S, self.timeout_s)

    def _beats(self, rank: int) -> bytes:
        """Signs of life of a rank."""
        assert self._store is not None
        key = f"alive/{rank}"
        return cast(bytes, self._store.get(key)) if self._store.check([key]) else b""

    @property
    def failure(self) -> RankError | None:
        """The failure of another rank, as far as `watch` has heard of it."""
        return self._cause

    def _failure(self) -> RankError | None:
        """The failure of another rank; once it is known rank 0 may go, and its store."""
        assert self._store is not None
        if self._cause is not None:
            return self._cause
        try:
            if not self._store.check([_FAILED]):
                return None
            failed = json.loads(self._store.get(_FAILED))
        except RuntimeError as error:
            return RankLostError(f"rank 0 must live as long as the run; it is gone: {one_line(error)}")
        if failed["rank"] == self.rank:
            return None
        kind = RankLostError if failed.get("lost") else RankError
        self._cause = kind(f"rank {failed['rank']} failed: {failed['text']}", failed["exit_code"])
        return self._cause

    def watch(self) -> None:
        """Begin to look for failures of other ranks: a collective that hangs because of one must end."""
        if self._store is not None:
            for look in (self._watch_others, self._watch_store):
                threading.Thread(target=look, name="rank-watch", daemon=True).start()

    def _watch_others(self) -> None:
        seen: dict[int, tuple[bytes, float]] = {}
        while not self._ended.wait(_POLL_S):
            self._beat()
            if self.is_main:
                with suppress(RuntimeError):
                    self._tell_silent(seen)
            if self.stopping is None:
                with suppress(RuntimeError):
                    self._tell_stop()
            if (failure := self._failure()) is not None:
                self._end_after(failure)
                return

    def _tell_stop(self) -> None:
        """Tell the others that this rank was asked to stop, or hear it; the first stop counts."""
        if (stop := self.asked_to_stop()) is not None:
            self._store.compare_set(_STOPPING, "", json.dumps(stop))
        if self._store.check([_STOPPING]):
            exit_code, reason = json.loads(self._store.get(_STOPPING))
            self.stopping = exit_code, reason

    def _beat(self) -> None:
        """Give a sign of life, and note that the store has taken it."""
        with suppress(RuntimeError):
            self._store.add(f"alive/{self.rank}", 1)
        self._beat_s = time.monotonic()

    def _tell_silent(self, seen: dict[int, tuple[bytes, float]]) -> None:
        """On rank 0, tell all of a rank that gives no sign of life any more: it may be awaited in a collective."""
        now = time.monotonic()
        for rank in range(1, self.world):
            if (beats := self._beats(rank)) != seen.get(rank, (b"", 0.0))[0]:
                seen[rank] = beats, now
            elif rank in seen and now - seen[rank][1] > self._silent_s:
                text = f"no sign of life for {now - seen[rank][1]:.0f} s"
                failed = {"rank": rank, "exit_code": EXIT_ERROR, "text": text, "lost": True}
                self._store.compare_set(_FAILED, "", json.dumps(failed))

    def _end_after(self, failure: RankError) -> None:
        """End this process where its main thread does not: it may be in a collective that never completes, or in a save
        on a disk that does not answer."""
        began = time.monotonic()
        while not self._ended.wait(_POLL_S):
            self._beat()
            unwinding = self._unwinding.is_set()
            if time.monotonic() - began > (max(_SAVE_S, self.timeout_s) if unwinding else _UNWIND_S):
                where = "has not ended since" if unwinding else "hangs in a collective"
                log.error("%s; rank %d %s and is ended", failure, self.rank, where)
                os._exit(failure.exit_code)

    def _watch_store(self) -> None:
        """End this process where rank 0 is stopped: calls of the store then wait for it without end."""
        while not self._ended.wait(_POLL_S):
            if (silent_s := time.monotonic() - self._beat_s) > self._silent_s + _STORE_GRACE_S:
                log.error("rank 0 has not answered for %.0f s; rank %d is ended", silent_s, self.rank)
                os._exit(EXIT_ERROR)


SINGLE = Ranks()
"""A run of one rank."""


def _nap_s(waited_s: float) -> float:
    """How long to sleep before looking again: adds at most a twentieth to a wait.  Pure."""
    return min(max(waited_s / 20, 1e-4), 0.05)
