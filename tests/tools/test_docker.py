"""The Dockerfile without Docker: its rules are checked, and its steps run in an empty folder, as another user.

What downloads (apt-get, the dependencies) is not run: a stand-in notes its arguments.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import REPOSITORY

TEXT = (REPOSITORY / "Dockerfile").read_text()
OUR_PLACES = re.compile(r"(?<![\w.])/(opt|home|data|var)\b")

# Stands in for apt-get, useradd and pip.  Only `pip install .` does something: nothing is fetched for it.
STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> "$ROOT/calls"
case "$(basename "$0") $*" in
"pip "*" .") exec {python} -m pip "$@" --quiet --no-index --no-build-isolation --target "$ROOT/site" ;;
esac
"""


def steps() -> list[tuple[str, str]]:
    """Instructions in their order, with their arguments on one line."""
    lines = [line for line in TEXT.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())]


def arguments_of(name: str) -> list[str]:
    return [rest for each, rest in steps() if each == name]


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets the builder have a path: the last pattern that fits it, or a folder around it."""
    sent, parts = True, Path(path).parts
    around = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    for line in (REPOSITORY / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!").replace("**/", "*")
            if any(fnmatch(each, pattern) and ("*" in pattern or "/" not in each) for each in around):
                sent = line.startswith("!")
    return sent


def test_the_usual_rules_are_kept() -> None:
    (base,) = arguments_of("FROM")
    assert re.fullmatch(r"python:3\.\d+-slim-[a-z]+", base), "a slim base of a named version, never latest"
    assert all(isinstance(json.loads(each), list) for name in ("ENTRYPOINT", "CMD") for each in arguments_of(name))
    users = [number for number, (name, rest) in enumerate(steps()) if name == "USER" and rest != "root"]
    (entry,) = [number for number, (name, _) in enumerate(steps()) if name == "ENTRYPOINT"]
    assert users
    assert users[-1] < entry
    assert not arguments_of("ADD")
    for command in arguments_of("RUN"):
        if "apt-get" in command:
            assert command.index("update") < command.index("install") < command.index("rm -rf /var/lib/apt/lists")
            assert "--no-install-recommends" in command
        if "pip install" in command:
            assert "--no-cache-dir" in command
            assert "--constraint constraints.txt" in command or "--no-deps" in command
    assert not re.search(r"https?://|sudo|curl|wget", TEXT)


def test_the_builder_gets_what_is_copied_and_nothing_of_runs_volumes_or_git() -> None:
    copied = [source for rest in arguments_of("COPY") for source in rest.split()[:-1]]
    assert {"pyproject.toml", "constraints.txt", "src"} <= set(copied)
    assert all((REPOSITORY / source).exists() and is_sent(source) for source in copied)
    assert is_sent("src/vesuvius/train.py")
    for path in (".git/config", "runs/demo/metrics.jsonl", "volumes/demo.zarr", "tests/conftest.py"):
        assert not is_sent(path)
    assert not is_sent("src/vesuvius/__pycache__/train.cpython-312.pyc")


@pytest.fixture
def root() -> Iterator[Path]:
    """An empty folder that other users may enter, which stands for the image's root."""
    folder = Path(tempfile.mkdtemp(prefix="vesuvius-image-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def build(root: Path) -> Path:
    """Run the steps below `root`; returns the last working directory."""
    tools = root / "tools"
    tools.mkdir()
    for name in ("apt-get", "useradd", "pip", "python"):
        stand_in = STAND_IN.format(python=sys.executable)
        (tools / name).write_text(stand_in if name != "python" else f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (tools / name).chmod(0o755)
    for place in ("home/vesuvius", "var/lib/apt/lists"):  # made by useradd, and there in the base
        (root / place).mkdir(parents=True)
    environment = os.environ | {"PATH": f"{tools}:/usr/bin:/bin", "ROOT": str(root)}
    here = root
    for name, rest in steps():
        if name == "WORKDIR":
            here = root / rest.removeprefix("/")
            here.mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            *sources, target = rest.split()
            for source in sources:
                copy(REPOSITORY / source, here / (source if target == "./" else target))
        elif name == "RUN":
            command = OUR_PLACES.sub(lambda found: f"{root}/{found[1]}", rest)
            subprocess.run(["sh", "-ec", command], cwd=here, env=environment, check=True, timeout=120)
    return here


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    else:
        shutil.copy(source, target)


def interpreter_for_others() -> str | None:
    """A Python that every user can run; None where there is none."""
    for candidate in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        command = [candidate, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            if subprocess.run(command, user=12345, cwd="/", env={}, check=False).returncode == 0:
                return candidate
        except OSError:
            continue
    return None


def test_its_steps_install_a_command_that_any_user_can_run(root: Path) -> None:
    here = build(root)
    assert here.stat().st_mode & 0o7777 == 0o1777, "any user may write where a run does"
    calls = (root / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["apt-get", "apt-get", "useradd", "pip", "pip"]
    pins = [line for line in (here.parent / "opt/vesuvius/constraints.txt").read_text().splitlines() if line[0] != "#"]
    wanted = [Requirement(line) for line in (here.parent / "opt/vesuvius/requirements.txt").read_text().splitlines()]
    names = {canonicalize_name(each.name) for each in wanted}
    assert {"torch", "ray", "zarr"} < names <= {canonicalize_name(pin.partition("==")[0]) for pin in pins}
    (entry,) = (json.loads(each) for each in arguments_of("ENTRYPOINT"))
    (default,) = (json.loads(each) for each in arguments_of("CMD"))
    installed = root / "site/bin" / entry[0]
    environment = {"PYTHONPATH": str(root / "site"), "PYTHONDONTWRITEBYTECODE": "1"}
    command, identity = [str(installed), *entry[1:], *default], {}
    if os.getuid() == 0 and (python := interpreter_for_others()):
        command, identity = [python, *command], {"user": 12345, "group": 12345}
    found = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=60, **identity)
    assert found.returncode == 0, found.stderr
    assert "train a model from a config file" in found.stdout
