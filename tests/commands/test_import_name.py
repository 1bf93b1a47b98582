"""Another package with our import name: the command says so in one line, whatever that package does when imported."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import subprocess
import sys
from importlib.metadata import FileHash, PackagePath
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from vesuvius import doctor


def run(folder: Path, *first: Path) -> subprocess.CompletedProcess[str]:
    """`vesuvius --version` with folders at the front of sys.path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*first, REPOSITORY / "src"]))}
    command = [sys.executable, "-m", "vesuvius_diffusion", "--version"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_command_names_the_package_that_import_finds_in_one_line(tmp_path: Path) -> None:
    assert run(tmp_path).stdout.startswith("vesuvius 0."), "ours"
    other = tmp_path / "other/vesuvius"
    other.mkdir(parents=True)
    assert run(tmp_path, other.parent).returncode == 0, "a folder without __init__.py hides nothing"
    (other / "__init__.py").write_text("raise RuntimeError('imported')\n")
    done = run(tmp_path, other.parent)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"finds {other / '__init__.py'}, which is not vesuvius-diffusion" in done.stderr
    # After both were uninstalled, or one over the other: the modules are there, `__init__.py` is not.
    src = tmp_path / "src"
    (src / "vesuvius").mkdir(parents=True)
    (src / "vesuvius_diffusion.py").write_bytes((REPOSITORY / "src/vesuvius_diffusion.py").read_bytes())
    done = subprocess.run([sys.executable, "-S", "-m", "vesuvius_diffusion"], cwd=src, capture_output=True, text=True)
    assert (done.returncode, f"finds {src / 'vesuvius'}, which" in done.stderr) == (2, True), done.stderr


def test_doctor_names_installed_files_that_another_package_overwrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str, data: bytes) -> PackagePath:
        path: Any = PackagePath(name)
        value = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        path.hash, path.size, path.dist = FileHash(f"sha256={value}"), len(data), Located()
        return path  # type: ignore[no-any-return]

    class Located:
        def locate_file(self, path: Any) -> Path:
            return tmp_path / path

    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(name)
    files = [installed("a.py", b"a.py"), installed("b.py", b"b.py")]
    monkeypatch.setattr(importlib.metadata, "files", lambda name: files)
    assert doctor.check_versions().level == "ok"
    (tmp_path / "b.py").write_text("theirs")
    found = doctor.check_versions()
    assert (found.level, found.value) == ("fail", "1 file of vesuvius-diffusion changed since its installation: b.py")
    (tmp_path / "a.py").unlink()
    assert doctor.check_versions().value.endswith("changed since its installation: a.py, b.py")
