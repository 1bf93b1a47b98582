"""Ranks on the nodes of a Ray cluster, some of which are killed.  All nodes are on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

from tests.runs.test_ranks import relative, steps_of, wait_for_step
from tests.support.kill_harness import Session, left_after, processes_with
from tests.support.ray_nodes import ray_nodes
from tests.support.runs import WriteConfig
from vesuvius.monitor.session import read_session
from vesuvius.stream.reading.reading_log import read_logs

EAGER = """
import sys
from vesuvius.commands import train
from vesuvius.launch import ray_train
ray_train._GROW_EVERY_S = 5.0
sys.exit(train.main(sys.argv[1:]))
"""


# Each rank writes down what its stream delivers; an execution of readers is followed by the next every 4 tasks.
RECORDS = """
import hashlib, json, os, sys
from vesuvius.commands import train
from vesuvius.launch import ray_train
def record():
    from vesuvius.stream.ray import regions
    from vesuvius.stream.stream import PatchStream
    regions.TASKS_PER_SEGMENT, whole_next = 4, PatchStream.__next__
    def recording_next(stream):
        batch = whole_next(stream)
        with open(f"{sys.argv[-1]}.samples", "a") as file:
            for index, patch in zip(batch.indices, batch.patches, strict=True):
                file.write(json.dumps([int(index), hashlib.sha256(patch.tobytes()).hexdigest()]) + "\\n")
        return batch
    PatchStream.__next__ = recording_next
arguments, run_rank = sys.argv, ray_train.run_rank
def recording_rank(job):
    sys.argv = arguments
    record()
    return run_rank(job)
ray_train.run_rank = recording_rank
record()
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without cores, for the controller, and three nodes for a rank with its reader each."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 2**28})
    for _ in range(3):
        add_node(nodes)
    nodes.wait_for_nodes()
    yield nodes
    nodes.shutdown()


def add_node(cluster: Cluster) -> None:
    cluster.add_node(num_cpus=2, object_store_memory=2**28)


# Actors of Ray that it leaves on a cluster for the next job, one of each.
KEPT_BY_RAY = (
    "AutoscalingCoordinator",
    "StatsActor",
    "StatsSummaryActor",
    "UsageCollect",
    "LocationTracker",
    "TrainStateActor",
)


def ranks_at_work(run: Path) -> int:
    """In the last step."""
    return len(list(steps_of(run, "ranks").values())[-1]["times"])


@pytest.mark.long
def test_the_run_shrinks_and_grows_while_ten_nodes_are_killed_and_return(
    tiny_config: WriteConfig, tmp_path: Path, cluster: Cluster
) -> None:
    plain = {"train_batch_size": 2, "epochs": 1000, "save_every": 5, "workers": 1}
    cluster_keys = {"address": cluster.address, "min_ranks": 2, "max_restarts": 30}
    config = tiny_config("spread", training=plain | {"ranks": 3, "accumulate_steps": 1}, cluster=cluster_keys)
    tiny_config("whole", training=plain | {"accumulate_steps": 3, "workers": 0})
    run, kills = tmp_path / "runs/spread", int(os.environ.get("TEST_KILLS", "10"))
    marker = f"VESUVIUS_RUNS={tmp_path / 'runs'}"  # which reaches ranks and readers; the nodes do not have it
    (tmp_path / "eager.py").write_text(EAGER)
    with Session(config, tmp_path, module="eager", environment=dict([marker.split("=", 1)])) as session:
        wait_for_step(run, 6, [session.process], at_most_s=900)
        assert len(processes_with(marker)) >= 6, "three ranks and their readers"
        for number in range(kills):
            session.wait_until(lambda: ranks_at_work(run) == 3, f"growth {number}", every_s=0.5)
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
            session.wait_until(lambda: ranks_at_work(run) == 2, f"kill {number}", every_s=0.5)
            add_node(cluster)
        session.wait_until(lambda: ranks_at_work(run) == 3, "the last growth", every_s=0.5)
        print(f"{kills} kills of nodes, {max(steps_of(run))} steps, {session.age_s:.0f} s")
        session.process.terminate()
        assert session.end() == 75, session.text()
    assert left_after(marker, 60, KEPT_BY_RAY) == [], "a node ends those of a job once its command is gone"
    text = session.text()
    assert text.count("continuing from") == 2 * kills, "after each loss, and with each growth"
    steps = steps_of(run)
    assert list(steps) == list(range(1, len(steps) + 1))
    with Session(tmp_path / "whole.yaml", tmp_path, f"training.max_steps={len(steps)}") as whole:
        assert whole.end() == 0
    undisturbed = steps_of(tmp_path / "runs/whole")
    losses, norms = (relative(steps, undisturbed, name) for name in ("loss", "grad_norm"))
    print(f"of one rank's, losses differ by {losses:.1e} at most, gradient norms by {norms:.1e}")
    assert losses < 1e-5
    assert norms < 1e-3, "over hundreds of steps their rounding grows; a sample too many or too few changes tenths"


def samples_of(path: Path, global_batch: int) -> list[list[tuple[int, str]]]:
    """Index and hash of each sample received by the ranks of a run, by global batch."""
    batches: dict[int, list[tuple[int, str]]] = {}
    for line in path.read_text().splitlines():
        index, digest = json.loads(line)
        batches.setdefault(index // global_batch, []).append((index, digest))
    return [sorted(batches[number]) for number in range(len(batches))]


def raylets_of(pids: Iterable[int]) -> set[int]:
    """Nodes of processes started by Ray, identified by their parent raylets."""
    found = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found.add(psutil.Process(pid).ppid())
    return found


@pytest.mark.long
def test_readers_of_two_ranks_on_another_node_deliver_what_one_rank_gets(
    tiny_config: WriteConfig, tmp_path: Path
) -> None:
    """Each node has two cores: the ranks occupy one node, so their readers must use the other."""
    plain = {"epochs": 8, "workers": 1, "save_every": 1000}
    run, parts = tmp_path / "runs/two", [tmp_path / "runs/two", tmp_path / "runs/two/ranks/1"]
    (tmp_path / "records.py").write_text(RECORDS)
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 2**28})

    def nodes_of_readers() -> set[int]:
        return raylets_of(
            note.pid for part in parts for note in read_logs(part / "reading") if psutil.pid_exists(note.pid)
        )

    try:
        add_node(nodes)
        nodes.wait_for_nodes()
        cluster = {"address": nodes.address, "worker_nodes": "any"}
        config = tiny_config("two", training=plain | {"ranks": 2, "accumulate_steps": 1}, cluster=cluster)
        marker = f"VESUVIUS_RUNS={tmp_path / 'runs'}"
        environment = dict([marker.split("=", 1)])
        with Session(config, tmp_path, "name=two", module="records", environment=environment) as session:
            wait_for_step(run, 5, [session.process], at_most_s=900)
            trainers = raylets_of(json.loads((part / "session.json").read_text())["pid"] for part in parts)
            readers: set[int] = set()

            def seen() -> bool:  # none for a moment, where an execution of readers ends
                readers.update(nodes_of_readers())
                return bool(readers)

            session.wait_until(seen, "a reader was there", every_s=0.05)
            assert session.end() == 0, session.text()
        assert left_after(marker, 60, KEPT_BY_RAY) == [], "a node ends those of a job once its command is gone"
        raylets = {node.all_processes["raylet"][0].process.pid for node in nodes.list_all_nodes()}
    finally:
        nodes.shutdown()
    assert len(trainers) == len(readers) == 1
    assert trainers | readers == raylets
    whole = {"workers": 0, "accumulate_steps": 2}
    with Session(tiny_config("one", training=plain | whole), tmp_path, "name=one", module="records") as one:
        assert one.end() == 0, one.text()
    samples = samples_of(tmp_path / "name=two.samples", 4)
    assert len(samples) == 80
    assert samples == samples_of(tmp_path / "name=one.samples", 4)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_lost_head_ends_the_run_which_resumes_on_another_cluster(
    tiny_config: WriteConfig, tmp_path: Path, ranks: int
) -> None:
    training = {"epochs": 1000, "save_every": 5, "workers": 1, "ranks": ranks, "accumulate_steps": 1}
    run = tmp_path / "runs/lost"
    with ray_nodes(apart=True) as nodes:
        nodes.add(cores=2 * ranks, store_mib=256)
        config = tiny_config("lost", training=training, cluster={"address": nodes.address})
        with Session(config, tmp_path) as session:
            session.wait_for(" workers 1 ")
            nodes.head.kill()
            killed_s = session.age_s
            assert session.end() == 1, session.text()
            print(f"{ranks} ranks: ended {session.age_s - killed_s:.0f} s after the head")
        assert "The head of Ray at" in session.text(), "named before Ray's C++ core may end the process"
        ended = read_session(run / "session.json")
        assert ended is not None
        assert ended.exit_code == 1 or ranks > 1, "the only rank ends by itself"
    with ray_nodes() as nodes:
        nodes.add(cores=2 * ranks, store_mib=256)
        last = max(steps_of(run)) + 5
        arguments = ("--resume", f"cluster.address={nodes.address}", f"training.max_steps={last}")
        with Session(config, tmp_path, *arguments) as session:
            assert session.end() == 0, session.text()
    assert list(steps_of(run)) == list(range(1, last + 1))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_continues_without_the_raylet_of_its_command(
    tiny_config: WriteConfig, tmp_path: Path, ranks: int
) -> None:
    """Readers on the node of the command are replaced; two ranks and their readers are elsewhere."""
    training = {"epochs": 1000, "workers": 1, "ranks": ranks, "accumulate_steps": 1}
    cluster, data = {"worker_nodes": "any"}, {"resident": 0}
    run = tmp_path / "runs/alone"
    with ray_nodes(apart=True) as nodes:
        own = nodes.add(cores=2 - ranks, store_mib=256)
        nodes.add(cores=2 * ranks, store_mib=256)
        config = tiny_config("alone", training=training, data=data, cluster=cluster | {"address": nodes.address})
        with Session(config, tmp_path) as session:
            session.wait_for(" workers 1 ")
            own.kill()
            last = max(steps_of(run)) + (200 if ranks == 1 else 50)  # with one, more than its readers are ahead
            wait_for_step(run, last, [session.process], at_most_s=300)
            session.process.terminate()
            assert session.end() == 75, session.text()
    assert list(steps_of(run)) == list(range(1, max(steps_of(run)) + 1))
