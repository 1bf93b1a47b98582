"""tools/long_tests.py with real pytest processes on a folder of invented tests."""

from __future__ import annotations

import subprocess
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
    monkeypatch.setattr(long_tests, "state", lambda: "build")
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


def test_what_has_not_passed_is_not_shown_as_passed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest returns 2 for a file that it cannot import as well as for Ctrl-C; its report may have no failure."""
    (folder.parent / "tests/a/test_a.py").write_text("import missing\n")
    assert [long_tests.run_part(part, folder, COMMAND) for part in ("a", "runs/test_c.py")] == [False, True]
    (folder / "b.failed.xml").write_text('<testsuites><testsuite tests="3" time="5"/></testsuites>')
    lines = list(long_tests.summary(folder, ["a", "b", "runs/test_c.py"]))
    assert [line.split()[4] for line in lines if " tests " in line] == ["1", "STOPPED", "passed"], lines
    monkeypatch.setattr(long_tests, "state", lambda: "edited meanwhile")
    (folder / "runs.test_c.py.xml").unlink()
    with pytest.raises(SystemExit, match="files changed"):
        long_tests.run_part("runs/test_c.py", folder, COMMAND)
    assert not (folder / "runs.test_c.py.xml").exists()


def test_another_state_of_any_file_is_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_tests, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="git checkout"):
        long_tests.main([])
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org"]
    (tmp_path / "old.bin").write_bytes(b"\0\1")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    found = [long_tests.state()]
    for name, data in (("old.bin", b"\0\2"), ("old.bin", b"\0\3"), ("new.py", b"1"), ("new.py", b"2\xff")):
        (tmp_path / name).write_bytes(data)
        found.append(long_tests.state())
    assert len(set(found)) == 5, found
    (tmp_path / "old.bin").write_bytes(b"\0\1")
    (tmp_path / "new.py").unlink()
    assert long_tests.state() == found[0], "the commit again"


def test_the_parts_hold_every_test_file_once() -> None:
    files = sorted(long_tests.TESTS.rglob("test_*.py"))
    below = [path for part in long_tests.parts() for path in sorted((long_tests.TESTS / part).rglob("test_*.py"))]
    alone = [long_tests.TESTS / part for part in long_tests.parts() if part.endswith(".py")]
    assert sorted([*below, *alone]) == files
