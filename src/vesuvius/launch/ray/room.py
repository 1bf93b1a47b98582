"""Which nodes a Ray cluster has, and whether the ranks of a run fit on them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import ray

from vesuvius.config import Config
from vesuvius.errors import ConfigError, VesuviusError, one_line
from vesuvius.stream.options import reads_here
from vesuvius.stream.ray.session import Session

log = logging.getLogger(__name__)

SAY_EVERY_S = 60.0
LEAST_STORE_BYTES = 2**28  # for what Ray itself needs


def ranks_of_cluster(config: Config) -> int:
    """How many ranks the cluster that the config names has GPUs for; 1 where it has none.

    Raises:
        ConfigError: the cluster does not answer.
    """
    session = Session(config.cluster, 0, 1, LEAST_STORE_BYTES)
    try:
        nodes = living_nodes()
    finally:
        session.close()
    return max(room_for_ranks(nodes, needs_of_rank(config, on_gpu=True)), 1)


def room_for_ranks(nodes: Sequence[Mapping[str, float]], each: Mapping[str, float]) -> int:
    """How many ranks fit on these nodes, each with what it needs on a single one.  Pure."""
    return sum(min(int(node.get(name, 0) // need) for name, need in each.items()) for node in nodes)


def living_nodes() -> list[dict[str, float]]:
    """The resources of each living node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def have_gpus(nodes: Sequence[Mapping[str, float]]) -> bool:
    return any(node.get("GPU", 0) for node in nodes)


def needs_of_rank(config: Config, on_gpu: bool) -> dict[str, float]:
    """What a rank reserves on its node."""
    readers = config.training.workers if reads_here(config.cluster, world=2) else 0
    return {"CPU": 1.0 + readers} | ({"GPU": 1.0} if on_gpu else {})


def check_room(config: Config, nodes: Sequence[Mapping[str, float]]) -> None:
    """Raises ConfigError where the ranks or their readers do not fit: Ray would wait for ever, also where the ranks
    only fit in sum."""
    least = config.cluster.min_ranks or int(config.training.ranks)
    on_gpu = have_gpus(nodes)
    if (have := room_for_ranks(nodes, needs := needs_of_rank(config, on_gpu))) < least:
        raise ConfigError(
            f"each rank needs {needs['CPU']:g} processors of one node for itself and its readers"
            f"{', and a GPU' if on_gpu else ''}; got room for {have} of {least} ranks on {_text(nodes)}; lower "
            "training.ranks, cluster.min_ranks or training.workers, or set cluster.reader_nodes=any"
        )
    if (lack := _lack_for_readers(config, have, nodes)) is not None:
        raise ConfigError(lack)


def _lack_for_readers(config: Config, have: int, nodes: Sequence[Mapping[str, float]]) -> str | None:
    """What readers on any node lack, of which Ray Data says nothing; None where they have it.

    Args:
        have: ranks that the nodes have room for; as many are started, whatever their readers need.
    """
    ranks, workers = min(have, int(config.training.ranks)), config.training.workers
    processors, need = sum(int(node.get("CPU", 0)) for node in nodes), ranks * (1 + workers)
    if reads_here(config.cluster, world=2) or processors >= need:
        return None
    return (
        f"with cluster.reader_nodes=any the nodes need {need} processors: one for each of {ranks} ranks and for each "
        f"of their {ranks * workers} readers; got {processors} on {_text(nodes)}; add nodes, or lower "
        "training.workers or training.ranks"
    )


def look_for_ranks(config: Config, on_gpu: bool, waited_s: float) -> None:
    """Say what ranks or readers wait for, as Ray does not.  Raises VesuviusError where ranks have waited too long."""
    if waited_s < SAY_EVERY_S and reads_here(config.cluster, world=2):
        return
    try:
        nodes = living_nodes()
    except ray.exceptions.RayError as error:
        log.warning("Ray does not say which nodes live: %s", one_line(error))
        return
    have = room_for_ranks(nodes, needs_of_rank(config, on_gpu))
    if waited_s < SAY_EVERY_S:
        if (lack := _lack_for_readers(config, have, nodes)) is not None:
            log.warning("readers may have to wait: %s", lack)
        return
    least, limit_minutes = config.cluster.min_ranks or int(config.training.ranks), config.cluster.rank_timeout_minutes
    offer = f"the nodes have room for {have} ({_text(nodes)})"
    if waited_s > 60 * limit_minutes:
        raise VesuviusError(
            f"{least} ranks must start within cluster.rank_timeout_minutes={limit_minutes:g}; got none, and {offer}; "
            "where room is missing, add nodes, see `ray status` for what others use, or lower cluster.min_ranks; where "
            "ranks start slowly, raise cluster.rank_timeout_minutes; continue with --resume"
        )
    log.warning(
        "waiting for %d ranks for %.0f s; %s; it is tried for %g minutes; `ray status` says what is in use",
        least,
        waited_s,
        offer,
        limit_minutes,
    )


def _text(nodes: Sequence[Mapping[str, float]]) -> str:
    """The nodes for people, equal ones counted."""
    kinds = Counter(f"{node.get('CPU', 0):g} CPU + {node.get('GPU', 0):g} GPU" for node in nodes)
    return ", ".join(f"{count} x ({kind})" for kind, count in kinds.items()) or "no node"
