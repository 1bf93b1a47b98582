"""tools/long_tests.py with real pytest processes on a folder of invented tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tools import long_tests

COMMAND = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with the parts a, b and runs/test_c.py, of which b fails as long as there is a file `bad`."""
    tests = {
        "a/test_a.py": "import pytest\ndef test_1(): ...\n@pytest.mark.skip(reason='needs a GPU')\ndef test_2(): ...\n",
        "b/test_b.py": "import os\ndef test_b(): assert not os.path.exists('bad')\n",
        "runs/test_c.py": "import pathlib\ndef test_c(): pathlib.Path('ran').open('a').write('c')\n",
    }
    for name, text in tests.items():
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (tmp_path / "bad").touch()
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a second per process
    monkeypatch.setattr(long_tests, "ROOT", tmp_path)
    monkeypatch.setattr(long_tests, "TESTS", tmp_path / "tests")
    out = tmp_path / "build"
    out.mkdir()
    return out


def test_parts_that_passed_are_not_run_again_and_those_that_failed_are(folder: Path) -> None:
    """A wrong program would take a failed part for a finished one, or forget the finished ones."""
    root = folder.parent
    assert long_tests.parts() == ["a", "b", "runs/test_c.py"]

    def run_all() -> list[bool]:
        return [long_tests.run_part(part, folder, COMMAND) for part in long_tests.parts()]

    *lines, last = long_tests.summary(folder, ["a"])
    assert lines == ["  not finished  a"]
    assert run_all() == [True, False, True]
    text = "\n".join(long_tests.summary(folder, long_tests.parts()))
    assert "1 FAILED    b" in text
    assert "failure: tests.b.test_b::test_b" in text
    assert "skipped    1: needs a GPU" in text
    assert text.splitlines()[-1].startswith("2 passed, 1 failed, 1 skipped in 0 min")
    (root / "bad").unlink()
    assert run_all() == [True, True, True]
    assert (root / "ran").read_text() == "c", "it passed the first time"
    last = [*long_tests.summary(folder, long_tests.parts())][-1]
    assert last.startswith("3 passed, 0 failed, 1 skipped"), last


def test_the_parts_hold_every_test_file_once() -> None:
    files = sorted(long_tests.TESTS.rglob("test_*.py"))
    below = [path for part in long_tests.parts() for path in sorted((long_tests.TESTS / part).rglob("test_*.py"))]
    alone = [long_tests.TESTS / part for part in long_tests.parts() if part.endswith(".py")]
    assert sorted([*below, *alone]) == files
