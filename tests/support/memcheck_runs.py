"""Small processes in the role of a trainer, and memcheck as called by a user."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY
from vesuvius.commands import memcheck

MIB = 2**20
BUFFERS_IN_USE = 40 * MIB
HYGIENE = re.compile("killed|oom|out of memory", re.IGNORECASE)

# A trainer of a few lines: argv are the run directory and, as JSON, its limits and its size; so much more it holds for
# each line that it is sent.
TRAINER = """
import json, sys
from pathlib import Path
from vesuvius.monitor.memory.limits import MemoryPolicy
from vesuvius.monitor.session import begin_session
directory, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
begin_session(directory / "session.json", "tiny", 0, MemoryPolicy(**settings["limits"]))
held = bytearray(b"x" * settings["bytes"])
print("begun", flush=True)
for line in sys.stdin:
    held += b"x" * int(line)
    print("grown", flush=True)
"""


def memcheck_command(*arguments: object) -> list[str]:
    return [sys.executable, str(REPOSITORY / "tools/memcheck.py"), *map(str, arguments)]


def run_memcheck(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run it in this process, which is fast; a test of the command covers its imports."""
    out, err = io.StringIO(), io.StringIO()
    with chdir(cwd), redirect_stdout(out), redirect_stderr(err):
        code = memcheck.main(list(map(str, arguments)))
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@contextmanager
def trainer(directory: Path, size: int = BUFFERS_IN_USE, **limits: float) -> Iterator[subprocess.Popen[str]]:
    """A live run holding this much memory in addition to its interpreter; see `grow`."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = json.dumps({"limits": limits, "bytes": size})
    command = [sys.executable, "-c", TRAINER, str(directory), settings]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        try:
            yield process
        finally:
            process.kill()


def grow(process: subprocess.Popen[str], size: int) -> None:
    """Make a trainer allocate more."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(size, file=process.stdin, flush=True)
    assert process.stdout.readline() == "grown\n"


def found_in(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The printed JSON object."""
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["exit_code"] == done.returncode
    return found


def part(found: dict[str, Any], name: str) -> dict[str, Any]:
    (row,) = [row for row in found["parts"] if row["part"] == name]
    return row
