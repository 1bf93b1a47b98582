"""Another package with our import name: the command says so in one line, whatever that package does when imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY


def run(folder: Path, *first: Path, module: str = "vesuvius_diffusion") -> subprocess.CompletedProcess[str]:
    """`vesuvius --version` with folders at the front of sys.path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*first, REPOSITORY / "src"]))}
    command = [sys.executable, "-m", module, "--version"]
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
    # Overwritten in part: the other `__init__.py` between our modules.
    mixed = tmp_path / "mixed"
    shutil.copytree(REPOSITORY / "src/vesuvius", mixed / "vesuvius", ignore=shutil.ignore_patterns("__pycache__"))
    (mixed / "vesuvius/__init__.py").write_text("")
    for module in ("vesuvius", "vesuvius.train"):
        done = run(tmp_path, mixed, module=module)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert f"finds {mixed / 'vesuvius/__init__.py'}, which is not vesuvius-diffusion" in done.stderr
    # After both were uninstalled, or one over the other: the modules are there, `__init__.py` is not.
    src = tmp_path / "src"
    (src / "vesuvius").mkdir(parents=True)
    (src / "vesuvius_diffusion.py").write_bytes((REPOSITORY / "src/vesuvius_diffusion.py").read_bytes())
    done = subprocess.run([sys.executable, "-S", "-m", "vesuvius_diffusion"], cwd=src, capture_output=True, text=True)
    assert (done.returncode, f"finds {src / 'vesuvius'}, which" in done.stderr) == (2, True), done.stderr
