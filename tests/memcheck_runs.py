"""Small processes that stand for a trainer, and memcheck as a user runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY

MIB = 2**20
HYGIENE = re.compile("killed|oom|out of memory", re.IGNORECASE)

# A trainer of a few lines: argv are the run directory and, as JSON, its limits, its size and whether it grows.
TRAINER = """
import json, sys, time
from pathlib import Path
from vesuvius.observe.risk.risk import Limits
from vesuvius.observe.session import begin_session
directory, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
begin_session(directory / "session.json", "tiny", 0, Limits(**settings["limits"]))
held = bytearray(b"x" * settings["bytes"])
print("begun", flush=True)
while len(held) < settings["grows_to"]:
    held += b"x" * (4 * 2**20)
    time.sleep(0.02)
time.sleep(600)
"""


def memcheck_command(*arguments: object) -> list[str]:
    return [sys.executable, str(REPOSITORY / "tools/memcheck.py"), *map(str, arguments)]


def run_memcheck(*arguments: object, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(memcheck_command(*arguments), cwd=cwd, text=True, capture_output=True, timeout=60, **options)


@contextmanager
def trainer(
    directory: Path, size: int = 200 * MIB, grows_to: int = 0, **limits: float
) -> Iterator[subprocess.Popen[str]]:
    directory.mkdir(parents=True, exist_ok=True)
    settings = json.dumps({"limits": limits, "bytes": size, "grows_to": grows_to})
    command = [sys.executable, "-c", TRAINER, str(directory), settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        try:
            yield process
        finally:
            process.kill()


def found_in(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one JSON object that was printed."""
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["exit_code"] == done.returncode
    return found


def part(found: dict[str, Any], name: str) -> dict[str, Any]:
    (row,) = [row for row in found["parts"] if row["part"] == name]
    return row
