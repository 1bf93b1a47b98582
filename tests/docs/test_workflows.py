"""The workflows and the devcontainer run make targets that exist; the actions and the rights that they get."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools import release_notes

from tests.conftest import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github/workflows").glob("*.yml"))
OF_OTHERS = {"actions/checkout", "actions/setup-python", "actions/upload-artifact", "actions/download-artifact"}
OF_OTHERS |= {"actions/attest", "pypa/gh-action-pypi-publish"}
MAY_WRITE = {  # by job: what more than reading it may do
    "build": {"id-token", "attestations"},
    "pypi": {"id-token"},
    "github": {"contents"},
    "docs": {"contents"},
}


def workflow_of(path: Path) -> dict[str, Any]:
    """YAML 1.1 reads the key `on` as true."""
    return {"on" if key is True else key: value for key, value in yaml.safe_load(path.read_text()).items()}


def jobs_of(path: Path) -> dict[str, Any]:
    jobs: dict[str, Any] = workflow_of(path)["jobs"]
    return jobs


def targets() -> set[str]:
    makefile = (REPOSITORY / "Makefile").read_text()
    return {name for line in re.findall(r"^\.PHONY: (.*)$", makefile, re.M) for name in line.split()}


def check_make(command: str) -> None:
    """The command is `make TARGET [NAME=VALUE]`, its target has a rule, and make can plan it."""
    program, target, *rest = shlex.split(command)
    assert (program, target in targets()) == ("make", True), command
    assert all(re.fullmatch(r"[A-Z]+=[^=]*", word) for word in rest), command
    dry = ["make", "-n", "-o", ".venv/.installed", "-o", ".venv/.runs", target, "TAG=v0.1.0"]
    planned = subprocess.run(dry, cwd=REPOSITORY, capture_output=True, text=True)
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.strip(), f"{target} does nothing"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_each_command_of_a_workflow_is_a_make_target(path: Path) -> None:
    commands = [step["run"] for job in jobs_of(path).values() for step in job.get("steps", ()) if "run" in step]
    assert commands
    for command in commands:
        # An expression in a command would run whatever a branch's name or a title holds.
        assert "${{" not in command, command
        check_make(command)


def test_the_devcontainer_runs_make_targets_and_the_demo() -> None:
    container = json.loads((REPOSITORY / ".devcontainer/devcontainer.json").read_text())
    commands = [value for key, value in container.items() if key.endswith("Command")]
    assert "make demo" in commands
    for command in commands:
        check_make(command)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_commits_and_jobs_have_only_the_rights_they_need(path: Path) -> None:
    workflow, text = workflow_of(path), path.read_text()
    assert workflow["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in workflow["on"], "it would run a stranger's code with our rights"
    assert "secrets." not in text
    for name, job in workflow["jobs"].items():
        assert {right for right, value in job.get("permissions", {}).items() if value == "write"} == (
            MAY_WRITE.get(name, set())
        ), name
        assert "uses" in job or job["timeout-minutes"] <= 120, name
        for step in job.get("steps", ()):
            if "uses" not in step:
                continue
            action, _, commit = step["uses"].partition("@")
            assert action in OF_OTHERS, action
            assert re.fullmatch("[0-9a-f]{40}", commit), f"{action} is not pinned"
            assert re.search(rf"{commit} # v\d+\.\d+\.\d+$", text, re.M), f"{action}: the version stands in a comment"
            if action == "actions/checkout" and name != "docs":
                assert step["with"]["persist-credentials"] is False, name


def test_the_tests_run_on_every_python_that_the_package_names() -> None:
    (matrix,) = (job["strategy"]["matrix"] for job in jobs_of(WORKFLOWS[0]).values() if "strategy" in job)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert matrix["python"] == named


def test_only_a_tag_that_is_the_version_of_every_file_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (version,) = set(release_notes.versions().values())
    for name in release_notes.versions():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((REPOSITORY / name).read_text())
    date = re.search(r"date-released: (.*)", (REPOSITORY / "CITATION.cff").read_text())[1]  # type: ignore[index]
    changelog = f"# Changelog\n\n## Unreleased\n\n## {version} - {date}\n\n- one\n\n## 0.0.1 - 2026-01-01\n\n- old\n"
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    monkeypatch.setattr(release_notes, "ROOT", tmp_path)
    assert release_notes.main(f"v{version}") == "- one"
    for tag in (version, f"v{version}.1", "v9"):
        with pytest.raises(ValueError, match=r"does not fit pyproject\.toml"):
            release_notes.main(tag)
    for old, new, words in (
        ("## Unreleased\n", "## Unreleased\n\n- more\n", "lines under"),
        (f"## {version} - {date}", f"## {version}", "YYYY-MM-DD"),
        (f"## {version} - {date}", f"## {version} - 2026-01-02", "date-released is to be 2026-01-02"),
    ):
        (tmp_path / "CHANGELOG.md").write_text(changelog.replace(old, new))
        with pytest.raises(ValueError, match=words):
            release_notes.main(f"v{version}")
    (tmp_path / "CITATION.cff").write_text("version: 9.9.9\n")
    with pytest.raises(ValueError, match="does not fit CITATION"):
        release_notes.main(f"v{version}")
