"""The manifest and the scripts of docs/cluster.md hang together: none of them runs in a test."""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import Any

import yaml

from tests.conftest import REPOSITORY
from vesuvius.config.describe import iter_keys

PAGE = (REPOSITORY / "docs" / "cluster.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def pods() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The manifest, and the pods of head and workers."""
    (job,) = (found for found in map(yaml.safe_load, blocks("yaml")) if found.get("kind") == "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return job, [group["template"]["spec"] for group in groups]


def mounts(pod: dict[str, Any]) -> dict[str, str]:
    """Name of the volume by path."""
    return {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}


def test_what_a_pod_mounts_it_has_and_the_run_directory_is_one_that_all_share() -> None:
    _, all_pods = pods()
    for pod in all_pods:
        assert set(mounts(pod).values()) == {volume["name"] for volume in pod["volumes"]}
        (runs,) = (one["value"] for one in pod["containers"][0]["env"] if one["name"] == "VESUVIUS_RUNS")
        (claim,) = (volume for volume in pod["volumes"] if volume["name"] == mounts(pod)[runs])
        assert claim["persistentVolumeClaim"] == {"claimName": "runs"}
    assert "/dev/shm" in mounts(all_pods[1])


def test_the_config_of_the_job_is_mounted_and_its_ranks_are_the_gpus() -> None:
    job, (head, workers) = pods()
    words = shlex.split(job["spec"]["entrypoint"])
    config = words[words.index("--config") + 1]
    assert any(config.startswith(f"{path}/") for path in mounts(head))
    gpus = workers["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    replicas = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"]
    assert f"training.ranks={gpus * replicas}" in words


def test_the_keys_that_are_set_on_command_lines_exist() -> None:
    found = set(re.findall(r"\b((?:training|cluster)\.\w+)(?:=|`|: )", PAGE))
    assert len(found) > 5
    assert found <= {name for name, _ in iter_keys()}


def test_the_shell_scripts_can_be_parsed() -> None:
    for script in blocks("bash"):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
