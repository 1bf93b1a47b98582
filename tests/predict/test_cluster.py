"""A prediction on the nodes of a Ray cluster, which are killed, join, or cannot work.  All are on this machine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.predict.test_predict import VOXELS, write
from tests.predict.test_resume import files
from tests.support.ray_nodes import other_version, ray_nodes
from vesuvius.runlog.files import write_atomically

# Each call leaves a byte in a file of its node, and does not end while there are more than the file `allowed` says.
NETWORK = """
import time
from pathlib import Path
import ray, torch

class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Conv3d(1, 1, 3, padding=1)

    def forward(self, x):
        if ray.is_initialized():
            calls, allowed = (Path(__file__).with_name(name) for name in ("calls", "allowed"))
            with calls.joinpath(ray.get_runtime_context().get_node_id()).open("a") as file:
                file.write(".")
            while sum(each.stat().st_size for each in calls.iterdir()) > int(allowed.read_text()):
                time.sleep(0.1)
        return self.layer(x)
"""
PROGRAM = """
import logging, sys, vesuvius
logging.basicConfig(format="%(message)s", level=logging.WARNING)
out, address = sys.argv[1:]
try:
    vesuvius.predict_volume("nets:Slow", "volumes/v.zarr", out, patch_size=(16, 16, 16), normalize=(0, 255),
        workers=3 if address else None, cluster=address or None)
except vesuvius.VesuviusError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
WAIT_S = 600  # of a loaded machine
FEW, ALL = 20, 10**9  # calls; the prediction takes some 100


class Driver:
    """A process that predicts."""

    def __init__(self, folder: Path, name: str, address: str = "") -> None:
        self._folder, self._log = folder, folder / f"{name}.log"
        (folder / name).mkdir(exist_ok=True)
        with self._log.open("w") as log:
            command = [sys.executable, "-c", PROGRAM, f"{name}/o.zarr", address]
            self.process = subprocess.Popen(command, cwd=folder, stderr=log)

    def text(self) -> str:
        return self._log.read_text()

    def wait_for(self, happened: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not happened():
            assert self.process.poll() is None, f"ended before {what}: {self.text()}"
            assert time.monotonic() < deadline, f"{what}: {self.text()}"
            time.sleep(0.1)

    def calls(self) -> dict[str, int]:
        """Network calls by node."""
        return {path.name: path.stat().st_size for path in (self._folder / "calls").iterdir()}

    def allow(self, more: int) -> None:
        """Let as many calls of the network end from now on, on all nodes together."""
        write_atomically(self._folder / "allowed", str(sum(self.calls().values()) + more).encode())

    def wait_for_nodes(self, count: int, since: dict[str, int]) -> None:
        """Wait until as many nodes have made calls since then."""
        self.wait_for(
            lambda: sum(made > since.get(node, 0) for node, made in self.calls().items()) == count, f"{count} at work"
        )


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A volume, and a network that stops after a few calls: no prediction ends before a node is lost."""
    (tmp_path / "nets.py").write_text(NETWORK)
    (tmp_path / "calls").mkdir()
    (tmp_path / "allowed").write_text(str(FEW))
    (tmp_path / "volumes").mkdir()
    return write(tmp_path / "volumes/v.zarr", np.tile(VOXELS, (2, 2, 2)))


@pytest.mark.long
@pytest.mark.usefixtures("volume")
def test_nodes_that_die_join_or_cannot_work_change_no_bit(tmp_path: Path) -> None:
    assert Driver(tmp_path, "once").process.wait(WAIT_S) == 0
    with ray_nodes() as cluster:
        first = [cluster.add(), cluster.add()]
        cluster.add(covered=tmp_path / "volumes")
        driver = Driver(tmp_path, "cluster", cluster.address)
        driver.wait_for_nodes(2, {})
        for node in first:  # the first and then all that worked so far
            cluster.add(env=other_version(tmp_path / "other", "zarr", "2.9.9") if node is first[0] else {})
            node.kill()
            before = driver.calls()
            driver.allow(FEW)
            driver.wait_for_nodes(1, before)
        driver.allow(ALL)
        assert driver.process.wait(2 * WAIT_S) == 0, driver.text()
    assert files(tmp_path / "cluster/o.zarr") == files(tmp_path / "once/o.zarr")
    assert len(driver.calls()) == 3, "two nodes that were killed, and one that joined; not those that cannot work"
    text = driver.text()
    assert "--workers 3 exceeds" not in text, "the node that cannot work has a core, too"
    assert text.count("gets no work") == 2
    assert f"{tmp_path}/volumes/v.zarr does not exist there; mount it" in text
    assert "zarr 2.9.9 there, 3." in text
    assert text.count("was lost; others repeat its tasks") == 2


@pytest.mark.long
@pytest.mark.usefixtures("volume")
def test_a_lost_head_ends_a_prediction_that_another_cluster_resumes(tmp_path: Path) -> None:
    assert Driver(tmp_path, "once").process.wait(WAIT_S) == 0
    with ray_nodes() as cluster:
        cluster.add(cores=3)
        driver = Driver(tmp_path, "cluster", cluster.address)
        driver.wait_for_nodes(1, {})
        cluster.head.kill()
        assert driver.process.wait(WAIT_S) == 1, driver.text()
    driver.allow(ALL)
    assert "VesuviusError: The head of Ray at" in driver.text()
    before = driver.calls()
    assert sum(before.values()) > 0
    with ray_nodes() as cluster:
        cluster.add(covered=tmp_path / "cluster/o.zarr.partial")
        driver = Driver(tmp_path, "cluster", cluster.address)
        assert driver.process.wait(WAIT_S) == 1
        assert "ConfigError: No node of the Ray cluster can work" in driver.text()
        assert "o.zarr.partial/state is another folder there" in driver.text()
        cluster.add(cores=3)
        driver = Driver(tmp_path, "cluster", cluster.address)
        assert driver.process.wait(2 * WAIT_S) == 0, driver.text()
    assert files(tmp_path / "cluster/o.zarr") == files(tmp_path / "once/o.zarr")
