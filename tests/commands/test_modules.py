"""`python -m` names: each one that a page, the Makefile or a docstring gives is a program."""

from __future__ import annotations

import re
import runpy
import sys

import pytest

from tests.conftest import REPOSITORY
from vesuvius.commands import cli

PAGES = [*REPOSITORY.glob("*.md"), REPOSITORY / "Makefile", *REPOSITORY.glob("docs/*.md")]
PAGES += [*REPOSITORY.glob("configs/*.yaml"), *REPOSITORY.glob("src/vesuvius/**/*.py")]
DOCUMENTED = {name for page in PAGES for name in re.findall(r"python -m (vesuvius[.\w]*\w)", page.read_text())}


def test_commands_that_are_modules_are_documented() -> None:
    assert {f"vesuvius.{name}" for name in ("train", "sample", "tune", "bench", "profile")} <= DOCUMENTED


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_a_documented_module_is_a_program_with_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That it can be imported is not enough: a package without `__main__` can be."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.setattr(cli, "end_soon", lambda exit_code: None)
    monkeypatch.delitem(sys.modules, name, raising=False)  # else runpy warns
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__", alter_sys=False)
    assert not ended.value.code
    assert capsys.readouterr().out.startswith("usage: ")
