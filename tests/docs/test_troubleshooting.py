"""Every message that docs/troubleshooting.md explains is one that the program says, word for word."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
# Quotes of the first column.  A verdict is composed of a limit and a reason, and "Killed" is the shell's word.
QUOTED = [text for row in re.findall(r"^\| (.+?) \|", PAGE, re.M) for text in re.findall(r"`([^`]+)`", row)]
MESSAGES = [text for text in QUOTED if not re.match(r"data-bound|compute-bound|Killed|vesuvius ", text)]


@cache
def strings_of_the_sources() -> str:
    """All string constants of the package, the literal parts of f-strings joined."""
    found = []
    for path in (REPOSITORY / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(p.value if isinstance(p, ast.Constant) else "\0" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_there_are_messages_to_check() -> None:
    assert len(MESSAGES) > 15


@pytest.mark.parametrize("message", MESSAGES)
def test_every_quoted_message_is_one_that_the_program_says(message: str) -> None:
    pattern = ".*".join(map(re.escape, message.split("...")))  # `...` stands for a value
    assert re.search(pattern, strings_of_the_sources())


@pytest.mark.parametrize("verdict", [text for text in QUOTED if text.startswith("data-bound")])
def test_every_quoted_verdict_exists(verdict: str) -> None:
    limit, reason = re.fullmatch(r"([\w-]+) \((.+)\)", verdict).groups()  # type: ignore[union-attr]
    assert limit in strings_of_the_sources()
    assert reason in strings_of_the_sources()
