"""The Dockerfile without Docker: it keeps the usual rules, and the builder gets what it copies and nothing else."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path

from tests.conftest import REPOSITORY

TEXT = (REPOSITORY / "Dockerfile").read_text()


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
