"""Every `pytest` command that a document quotes names tests that exist."""

from __future__ import annotations

import re
import shlex
from itertools import chain
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

DOCUMENTS = sorted(chain(REPOSITORY.glob("*.md"), REPOSITORY.glob("docs/*.md")))
COMMAND = re.compile(r"`pytest ([^`]+)`")


def names_below(path: str) -> list[str]:
    """Names of modules and tests in a file or folder."""
    root = REPOSITORY / path
    files = [root] if root.is_file() else sorted(root.rglob("test_*.py"))
    return [name for file in files for name in (file.stem, *re.findall(r"def (test_\w+)", file.read_text()))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_pytest_commands_select_tests(document: Path) -> None:
    for command in COMMAND.findall(document.read_text()):
        words = shlex.split(command)
        paths = [word for word in words if word.startswith("tests")]
        names = [name for path in paths for name in names_below(path)]
        chosen = words[words.index("-k") + 1] if "-k" in words else ""
        wanted = re.findall(r"\w+", re.sub(r"\b(and|or|not)\b", " ", chosen))
        assert names or not paths, f"no tests in {paths}: pytest {command}"
        assert all(any(word in name for name in names) for word in wanted), f"no test is chosen by pytest {command}"


@pytest.mark.parametrize(("page", "least"), [("CONTRIBUTING.md", 20), ("SECURITY.md", 12), ("docs/upgrading.md", 3)])
def test_mutations_and_promises_name_tests_that_exist(page: str, least: int) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)", (REPOSITORY / page).read_text())
    assert len(named) >= least
    assert not [name for file, name in named if name not in names_below(f"tests/{file}")]
