"""Rows of `gpu_check.py`: measured in a child process, which may crash or hang, and written to a file one by one.

Imports no torch: nothing that a row breaks can end the process that writes the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]

START_S = 120.0  # of a child: torch's import, the plan, the CUDA context
HUNG_S = 20.0  # behind its limit, for a row that looks at the clock only between pieces of work
_END_S = 10.0
_SPAWN = multiprocessing.get_context("spawn")
_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl
# After these the process is as good as new; any other error may have broken its CUDA context.
_HARMLESS = ("ok", "wrong", "not compiled", "skipped", "out of memory", "out of time")


def die_with_parent() -> None:
    """End this process when its parent ends, even by SIGKILL.  Linux only."""
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Findings:
    """`content` of a JSON file, replaced after each row: "about" what was measured, and "rows" by name."""

    def __init__(self, path: Path, restart: bool) -> None:
        """Raises ValueError: another process measures into it."""
        self._path, self.content = path, {"about": {}, "rows": {}}
        self._lock = path.with_suffix(".log").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another gpu_check measures into {path}; end it, or name another --json") from None
        if path.exists() and not restart:
            self.content = json.loads(path.read_text(encoding="utf-8"))

    def begin(self, about: Row) -> None:
        """Say what is measured.  Raises ValueError: the rows so far are of something else."""
        before, same = self.content["about"], ("config", "code", "device", "versions")
        if changed := [key for key in same if before and before.get(key) != about[key]]:
            was, now = ([each[key] for key in changed] for each in (before, about))
            raise ValueError(f"{self._path} is of {changed} {was}, not {now}; add --restart, or name another --json")
        self.content["about"] = about
        self.write()

    def found(self, name: str) -> Row | None:
        """A row that need not be measured again."""
        row = self.content["rows"].get(name, {"outcome": None})
        is_found = row["outcome"] == "ok" or ("compile" in row and row["outcome"] == "out of memory")  # of a setting
        return row if is_found else None

    def add(self, name: str, row: Row) -> Row:
        self.content["rows"][name] = row
        self.write()
        return row

    def write(self) -> None:
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self._path)


class Worker:
    """A child that answers requests with rows, and prints into a file.  It is replaced when a row has broken it.

    `prepare(options)` of the module returns a first row, and what measures the row of a request.
    """

    def __init__(self, module: str, options: Row, log: Path) -> None:
        self._arguments, self._log = (module, options, log), log
        self._child: tuple[Any, Any] | None = None  # process and pipe

    def start(self) -> Row:
        """Start it; returns its first row."""
        pipe, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=serve, args=(theirs, *self._arguments), daemon=True)
        process.start()
        theirs.close()
        self._child = process, pipe
        return self._answer(process, pipe, START_S)

    def measure(self, request: Row, limit_s: float) -> Row:
        """The row of a request; its outcome is that of the child, or hung, or died."""
        began = time.monotonic()
        row = {"outcome": "ok"} if self._child else self.start()
        if self._child:
            with contextlib.suppress(BrokenPipeError):  # no answer will come
                self._child[1].send(request | {"limit_s": limit_s})
            row = self._answer(*self._child, limit_s)
        return row | {"seconds": time.monotonic() - began}

    def _answer(self, process: Any, pipe: Any, limit_s: float) -> Row:
        row: Row = {"outcome": "hung", "detail": f"no answer within {limit_s + HUNG_S:.0f} s; it was killed"}
        if pipe.poll(limit_s + HUNG_S):
            try:
                row = pipe.recv()
            except EOFError:
                process.join(_END_S)
                code, printed = process.exitcode or 0, self._log.read_text(errors="replace").splitlines()[-1:]
                by = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                row = {"outcome": "died", "detail": f"by {by}; last printed: {''.join(printed)[:200]}"}
        if row["outcome"] not in _HARMLESS:
            self.close()
        return row

    def close(self) -> None:
        """End it, and so all that it started."""
        if self._child is not None:
            process, pipe = self._child
            pipe.close()
            process.join(1.0)  # ends by itself if it is idle
            process.kill()
            process.join(_END_S)  # a driver may not let go of it
            self._child = None


def serve(pipe: Any, module: str, options: Row, log: Path) -> None:
    """The child's side of a `Worker`, until its parent ends."""
    die_with_parent()
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.dup2(2, 1)
    try:
        about, measure = importlib.import_module(module).prepare(options)
    except Exception as error:
        name = error.name if isinstance(error, ModuleNotFoundError) else None
        remedy = f"; run: python -m pip install {'pyyaml' if name == 'yaml' else name}" if name else ""
        pipe.send({"outcome": "cannot start", "detail": f"{error}{remedy}"})
        return
    pipe.send({"outcome": "ok"} | about)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(measure(pipe.recv()))
