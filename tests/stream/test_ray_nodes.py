"""Readers on the nodes of a Ray cluster, which are killed, join, or cannot work.  All are on this machine."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import textured, write_array
from tests.support.ray_nodes import other_version, ray_nodes
from vesuvius.errors import ConfigError, VesuviusError
from vesuvius.stream.ray import nodes as nodes_module
from vesuvius.stream.ray.nodes import HeadCheck, Nodes, conflict

# Writes the node of a reader, index and hash of each sample; an execution of readers is followed by the next every 100
# tasks.
PROGRAM = """
import hashlib, logging, sys, time
from vesuvius.config import ClusterConfig, DataConfig, VolumeConfig
from vesuvius.errors import VesuviusError
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.ray import regions
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream
regions.TASKS_PER_SEGMENT = 100
logging.basicConfig(format="%(message)s", level=logging.WARNING)
volume, samples, address, count = sys.argv[1:]
data = DataConfig(volumes=(VolumeConfig(path=volume),), patch_size=(8, 16, 16), patches_per_region=4)
job = prepare_data(0, data).job
options = StreamOptions(4, 2, processes=bool(address), cluster=ClusterConfig(address=address or None))
try:
    with PatchStream(job, options, stop=int(count)) as stream, open(samples, "w", buffering=1) as file:
        for batch in stream:
            nodes = "+".join(sorted({each.node for each in stream.readers.values()}))
            for index, patch in zip(batch.indices, batch.patches, strict=True):
                print(index, hashlib.sha256(patch.tobytes()).hexdigest(), nodes.replace(" ", ""), file=file)
            time.sleep(0.02 if address else 0)
except VesuviusError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
WAIT_S = 300


class Driver:
    """A process that reads samples."""

    def __init__(self, folder: Path, name: str, count: int, address: str = "") -> None:
        self._samples, self._log = folder / f"{name}.samples", folder / f"{name}.log"
        with self._log.open("w") as log:
            arguments = [str(folder / "volumes/v.zarr"), str(self._samples), address, str(count)]
            self.process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], cwd=folder, stderr=log)

    def text(self) -> str:
        return self._log.read_text()

    def samples(self) -> list[tuple[str, str]]:
        """Index and hash of each."""
        return [(line[0], line[1]) for line in self._lines()]

    def nodes(self, last: int | None = None) -> set[str]:
        """Nodes of the readers, over the last samples or all."""
        lines = self._lines()
        return {node for line in lines[-(last or len(lines)) :] for node in line[2].split("+")} - {""}

    def _lines(self) -> list[list[str]]:
        text = self._samples.read_text() if self._samples.exists() else ""
        return [line.split(" ") for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait_for(self, happened: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not happened():
            assert self.process.poll() is None, f"ended before {what}: {self.text()}"
            assert time.monotonic() < deadline, f"{what}, {len(self._lines())} samples: {self.text()}"
            time.sleep(0.1)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    (tmp_path / "volumes").mkdir()
    return write_array(tmp_path / "volumes/v.zarr", textured((96, 128, 128)))


@pytest.mark.long
@pytest.mark.usefixtures("volume")
def test_nodes_that_die_join_or_cannot_read_change_no_sample(tmp_path: Path) -> None:
    count = 12000
    with ray_nodes() as cluster:
        first = [cluster.add(), cluster.add()]
        cluster.add(covered=tmp_path / "volumes")
        driver = Driver(tmp_path, "killed", count, cluster.address)
        driver.wait_for(lambda: len(driver.nodes(4)) == 2, "both nodes read")
        for node in first:
            cluster.add(env=other_version(tmp_path / "other", "zarr", "2.9.9") if node is first[0] else {})
            before, _ = len(driver.samples()), node.kill()
            driver.wait_for(lambda: len(driver.samples()) > before + 2000, "going on")  # noqa: B023
        driver.process.wait(WAIT_S)
        assert driver.process.returncode == 0, driver.text()
    refused = set(re.findall(r"Node (.*) \((.*)\) gets no work", driver.text()))
    assert len(refused) == 2
    assert not {f"{host}({node})" for host, node in refused} & driver.nodes(), "not even for a moment"
    whole = Driver(tmp_path, "whole", count)
    assert whole.process.wait(WAIT_S) == 0
    assert driver.samples() == whole.samples()


@pytest.mark.usefixtures("ray_cluster")
def test_a_node_that_hangs_is_asked_once_and_again_when_it_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each question would leave another process that hangs, and hold up the run."""
    caplog.set_level("INFO")
    monkeypatch.setattr(nodes_module, "_FIRST_S", 1.0)
    answer, real = tmp_path / "answer", nodes_module._describer()

    def hangs(files: list[str], token: str | None) -> dict[str, Any]:
        if token is not None:
            answer.with_name(f"asked{time.time_ns()}").touch()
            while not answer.exists():
                time.sleep(0.05)
        return real(files, token) | {"shm": 2**20}

    monkeypatch.setattr(nodes_module, "_describer", lambda: hangs)
    nodes = Nodes(folder=tmp_path)
    for _ in range(3):
        with pytest.raises(ConfigError, match="it has not answered; see `ray status`"):
            nodes.check()
    (node_id,) = nodes.alive
    assert nodes.placement() == {"label_selector": {"ray.io/node-id": f"!in({node_id})"}}
    assert nodes.placement(unchecked=False) == {}, "none can work"
    deadline = time.monotonic() + 60
    while not [*tmp_path.glob("asked*")]:  # the task starts late on a busy machine
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert len([*tmp_path.glob("asked*")]) == 1
    answer.touch()
    deadline = time.monotonic() + 60
    while not nodes.usable:
        assert time.monotonic() < deadline
        try:
            nodes.check()
        except ConfigError:
            time.sleep(0.1)
    nodes.check()
    assert len([*tmp_path.glob("asked*")]) == 2
    assert nodes.placement() == {}
    assert nodes.placement(unchecked=False) == {"label_selector": {"ray.io/node-id": f"in({node_id})"}}
    assert caplog.text.count("gets no work") == 1
    assert caplog.text.count("has answered and may get work") == 1
    assert "may be on a disk" not in caplog.text, "no voxels pass through the stores of a prediction"
    Nodes(folder=None, files=()).check()
    assert "but /dev/shm there 0.00 GiB: it may be on a disk; give" in caplog.text


@pytest.mark.usefixtures("ray_cluster")
def test_a_head_is_gone_after_failures_not_after_a_suspension_and_the_first_failure_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray's C++ core may end the process after any failure."""
    now = [1000.0]
    monkeypatch.setattr(nodes_module.time, "monotonic", lambda: now[0])
    check = HeadCheck()
    real, check._address = check._address, "127.0.0.1:1"
    for now[0] in (1300.0, 1329.0):  # suspended for minutes, and the first try fails
        check()
        assert caplog.text.count("The head of Ray at 127.0.0.1:1 does not answer") == 1
    now[0], check._address = 1340.0, real
    check()
    now[0], check._address = 1350.0, "127.0.0.1:1"
    check()
    now[0] = 1380.0
    with pytest.raises(VesuviusError, match=r"The head of Ray at 127\.0\.0\.1:1 has not answered for 30 s"):
        check()


HERE = {
    "versions": {
        "python": "3.11.9",
        "vesuvius-diffusion": "0.1.0",
        "torch": "2.13.0",
        "numpy": "2.3.1",
        "zarr": "3.1.6",
    }
}
HERE |= {"sources": "a", "missing": [], "other_folder": None}


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        ({}, None),
        ({"versions": HERE["versions"] | {"python": "3.11.2", "numpy": "2.3.4", "zarr": "3.1.0"}}, None),
        ({"versions": HERE["versions"] | {"zarr": "3.0.6"}}, r"zarr 3\.0\.6 there, 3\.1\.6 here; install the same"),
        ({"versions": HERE["versions"] | {"torch": "2.13.1"}}, r"torch 2\.13\.1 there, 2\.13\.0 here"),
        ({"versions": HERE["versions"] | {"torch": "2.13.0+cpu"}}, None),
        ({"versions": HERE["versions"] | {"vesuvius-diffusion": "missing"}}, None),
        (
            {"versions": HERE["versions"] | {"vesuvius-diffusion": "missing"}, "sources": "b"},
            r"vesuvius-diffusion missing there, 0\.1\.0 here",
        ),
        ({"sources": "b"}, "other source files"),
        ({"missing": ["/v/a.zarr", "/v/b.zarr"]}, "/v/a.zarr does not exist there; mount it"),
        ({"other_folder": "/runs/x"}, "/runs/x is another folder there; mount one file system"),
    ],
)
def test_a_conflict_between_nodes_is_one_line_with_the_versions_and_the_remedy(
    there: dict[str, Any], reason: str | None
) -> None:
    found = conflict(HERE | there, HERE)
    assert found is None if reason is None else found and re.search(reason, found)
