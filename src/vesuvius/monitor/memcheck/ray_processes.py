"""Which processes are Ray's, by their command lines.

A title as `ProcessUse` has it is too short for that: daemons begin with the path of the virtual environment.
"""

from __future__ import annotations

from collections.abc import Sequence

from vesuvius.monitor.probes.files import read_text
from vesuvius.monitor.probes.processes import ProcessUse, read_process
from vesuvius.monitor.probes.roots import Roots

_DAEMONS = ("raylet", "gcs_server")


def is_reader(process: ProcessUse) -> bool:
    """Whether its title says that it is one of our readers, an actor of Ray Data."""
    return process.name.startswith("ray::") and ("_RayReader" in process.name or "MapWorker" in process.name)


def is_ray(pid: int, roots: Roots) -> bool:
    """Whether a process is a daemon or a worker of Ray."""
    return _is_ray_command(_words(pid, roots))


def is_raylet(pid: int, roots: Roots) -> bool:
    """Whether it is the daemon of which each Ray has one on a machine; it holds the object store."""
    return _base_name(_words(pid, roots)[0]) == "raylet"


def find_ray_tops(roots: Roots) -> list[int]:
    """Ray's processes whose parent is none of Ray's, raylets first, as they have the readers below them."""
    found: dict[int, ProcessUse] = {}
    for path in roots.proc.glob("[0-9]*/cmdline"):
        pid = int(path.parent.name)
        if is_ray(pid, roots) and (process := read_process(pid, roots)) is not None:
            found[pid] = process
    tops = [pid for pid, process in found.items() if process.parent not in found]
    return sorted(tops, key=lambda pid: (not is_raylet(pid, roots), pid))


def _words(pid: int, roots: Roots) -> list[str]:
    return (read_text(roots.proc / str(pid) / "cmdline") or "").split("\0")


def _is_ray_command(words: Sequence[str]) -> bool:
    """A daemon by its name, a worker by its title, and the scripts of Ray's package that Python runs."""
    if words[0].startswith("ray::") or _base_name(words[0]) in _DAEMONS:
        return True
    return any("-packages/ray/" in word and word.endswith(".py") for word in words[1:4])


def _base_name(path: str) -> str:
    return path.rsplit("/", 1)[-1]
