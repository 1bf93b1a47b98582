"""Ranks on the nodes of a Ray cluster, of which some are killed.  All nodes are on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.runs.test_ranks import relative, steps_of, wait_for_step
from tests.support.kill_harness import Session

WriteConfig = Callable[..., Path]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without processors, for the controller, and three nodes that take a rank with its reader each."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 2**28})
    for _ in range(3):
        nodes.add_node(num_cpus=2, object_store_memory=2**28)
    nodes.wait_for_nodes()
    yield nodes
    nodes.shutdown()


@pytest.mark.long
def test_a_run_goes_on_with_two_nodes_of_three_when_one_is_killed(
    tiny_config: WriteConfig, tmp_path: Path, cluster: Cluster
) -> None:
    plain = {"train_batch_size": 2, "epochs": 4, "save_every": 5, "workers": 1}
    cluster_keys = {"address": cluster.address, "min_ranks": 2}
    config = tiny_config("spread", training=plain | {"ranks": 3, "accumulate_steps": 1}, cluster=cluster_keys)
    tiny_config("whole", training=plain | {"accumulate_steps": 3, "workers": 0})
    run = tmp_path / "runs/spread"
    with Session(config, tmp_path) as session:
        wait_for_step(run, 12, [session.process])
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        assert session.end() == 0, session.text()
    assert "training.ranks is 3 and 2 are at work" in session.text()
    with Session(tmp_path / "whole.yaml", tmp_path) as whole:
        assert whole.end() == 0
    assert relative(steps_of(run), steps_of(tmp_path / "runs/whole")) < 1e-5
