"""A machine on which little is installed, for tools that need little."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from tests.conftest import REPOSITORY

# A sitecustomize module, which runs before the tool: nothing is installed but what is allowed, and no vesuvius.
BARE_MACHINE = """
import sys

INSTALLED = {installed}

class Bare:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in INSTALLED else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Bare, sys.meta_path)
sys.path[:] = [entry for entry in sys.path if entry != {source!r}]
"""


def bare_machine(folder: Path, *packages: str) -> dict[str, str]:
    """The environment of a machine with these packages, and what they need, alone."""

    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    allowed: set[str] = set()
    wanted = [*packages]
    while wanted:
        if (name := plain(wanted.pop())) in allowed:
            continue
        allowed.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system
        wanted += [match[0] for need in needs if "extra ==" not in need and (match := re.match(r"[\w.-]+", need))]
    modules = importlib.metadata.packages_distributions()
    refused = {module for module, names in modules.items() if not allowed & {plain(name) for name in names}}
    assert {"zarr", "ray", "rich"} <= refused
    text = BARE_MACHINE.format(installed=sorted(refused - {"vesuvius"}), source=str(REPOSITORY / "src"))
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": str(folder)}
