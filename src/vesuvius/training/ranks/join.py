"""A process joins the ranks of its run, as torchrun or Ray Train has placed it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vesuvius.errors import ConfigError, one_line
from vesuvius.training.ranks.errors import RankLostError
from vesuvius.training.ranks.part import launched_ranks
from vesuvius.training.ranks.ranks import Ranks

_tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # which torch does not declare


@contextmanager
def open_ranks(device_type: str, timeout_s: float) -> Iterator[Ranks]:
    """Join the ranks that the environment names (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT), or be a single one.

    Args:
        device_type: "cuda" or "cpu".
        timeout_s: longest wait for another rank.

    Raises:
        ConfigError: the environment does not say where the others are.
        RankLostError: not all of them came, or one went while it joined.
    """
    world = launched_ranks()
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
