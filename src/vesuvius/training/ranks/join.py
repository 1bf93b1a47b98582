"""How a rank finds the others: by the variables of its environment and a store on rank 0."""

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vesuvius.errors import ConfigError, VesuviusError, one_line
from vesuvius.threads import on_thread
from vesuvius.training.ranks.failure import RankLostError
from vesuvius.training.ranks.ranks import Ranks, nap_s
from vesuvius.training.ranks.share import launched_world_size

log = logging.getLogger(__name__)

_tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # not declared by torch
_POLL_S = 0.5
_MISSING_S, _MISSING_EVERY_S = 10.0, 300.0  # until a missing rank is reported, and the longest time between two reports
_NAMED = 8


@contextmanager
def open_ranks(device_type: str, timeout_s: float) -> Iterator[Ranks]:
    """Join the ranks named by the environment (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT), or be a single one.  `device_type` is "cuda" or "cpu".

    Raises ConfigError: the environment does not say where the others are; RankLostError: not all ranks joined.
    """
    world = launched_world_size()
    if world is None or world == 1:
        yield Ranks()
        return
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK") or 0)
    if device_type == "cuda":
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    backend = "cuda:nccl,cpu:gloo" if device_type == "cuda" else "gloo"
    try:
        if not dist.is_initialized():  # as Ray Train does
            joined = _join(rank, world, timeout_s)
            wait = timedelta(seconds=timeout_s)
            dist.init_process_group(backend, store=joined, rank=rank, world_size=world, timeout=wait)
        store = _open_store(rank, world, timedelta(seconds=timeout_s))
    except VesuviusError:
        raise
    except (RuntimeError, ValueError) as error:
        kind = ConfigError if isinstance(error, ValueError) else RankLostError  # Ray Train restarts it
        raise kind(
            f"rank {rank} of {world} could not join the others within {timeout_s:g} s: {one_line(error)}; start all "
            "ranks with torchrun or training.ranks, check that MASTER_ADDR and MASTER_PORT are reachable, and raise "
            "cluster.rank_timeout_minutes if they only start slowly"
        ) from error
    ranks = Ranks(rank, world, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE") or 1), timeout_s, _store=store)
    ranks.watch()
    try:
        yield ranks
    finally:
        ranks.close()


def _join(rank: int, world: int, timeout_s: float) -> Any:
    """Wait until all ranks have connected to a store at MASTER_ADDR and MASTER_PORT, and log who is missing.

    Raises ConfigError: the address cannot be used, or another process has this RANK; RuntimeError: ranks are missing.
    """
    host, port, store = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], None
    # torchrun starts another attempt after a failure, and may keep the store.
    keys = [f"joined/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{one}" for one in range(world)]
    opening = on_thread(_connect, rank, world, host, int(port), timeout_s, name="rank-join")
    began, reports_s = time.monotonic(), _MISSING_S
    while True:
        if store is None and opening.done():
            store = opening.result()
            if store.add(keys[rank], 1) > 1:
                raise ConfigError(f"RANK={rank} belongs to another process at {host}:{port}; each needs its own RANK")
        if store is not None and store.check(keys):
            return store
        waited_s = time.monotonic() - began
        if waited_s >= min(reports_s, timeout_s):
            missing = [one for one, key in enumerate(keys) if not store.check([key])] if store else [0]
            named = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
            text = f"rank {named} of {world} has not connected to MASTER_ADDR={host} MASTER_PORT={port}"
            if waited_s >= timeout_s:
                raise RuntimeError(text)
            log.warning(
                "%s after %.0f s (rank %d waits up to %.0f s); start it with these variables, WORLD_SIZE=%d and its "
                "own RANK, check that the address is reachable, or unset the variables to train as one rank",
                *(text, waited_s, rank, timeout_s, world),
            )
            reports_s += min(reports_s, _MISSING_EVERY_S)
        time.sleep(nap_s(waited_s))


def _connect(rank: int, world: int, host: str, port: int, timeout_s: float) -> Any:
    """Connect to the store, which is on rank 0 or, with torchrun, in its agent.  Raises ConfigError."""
    until = time.monotonic() + _MISSING_S
    while True:
        try:
            socket.getaddrinfo(host, port)
            break
        except (OSError, UnicodeError) as error:  # the name of a node that starts may be unknown for a while
            if time.monotonic() > until:
                text = f"MASTER_ADDR={host} cannot be resolved: {error}; set it to the address of rank 0"
                raise ConfigError(text) from error
            time.sleep(_POLL_S)
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    wait = timedelta(seconds=timeout_s)
    try:
        return _tcp_store(host, port, world, is_master=serves, timeout=wait, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        if "listen" in str(error):
            text = f"rank 0 cannot listen on MASTER_PORT={port}: {one_line(error)}; choose a free port for all ranks"
            raise ConfigError(text) from error
        raise


def _open_store(rank: int, world: int, wait: timedelta) -> Any:
    """A store on rank 0, separate from torch's own, through which its address is exchanged."""
    host = os.environ["MASTER_ADDR"]
    if rank == 0:
        server = _tcp_store(host, 0, world, is_master=True, timeout=wait, wait_for_workers=False)
        dist.broadcast_object_list([server.port])
        return server
    port: list[Any] = [None]
    dist.broadcast_object_list(port)
    return _tcp_store(host, port[0], world, is_master=False, timeout=wait, wait_for_workers=False)
