"""Chunks that abort the process that decodes them, as a codec bug would.

`arm` arms the process and, through the task they receive, its readers.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tests.conftest import write_array
from tests.support import fork_server
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.volume_tools.verify import Reading
from vesuvius.volumes.format.decode import ChunkDecoder

ROOT = Path(__file__).parents[2]
ARM = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support import poison; poison.arm(); "
_POISON = b"this chunk aborts whoever decodes it"


def write_volume(path: Path, voxels: NDArray[Any]) -> Path:
    """A volume with chunks of 32^3, to be poisoned."""
    return write_array(path, voxels)


def poison(path: Path, chunk: tuple[int, int, int]) -> None:
    """Make a chunk abort the process that decodes it."""
    arm()
    (path / "/".join(map(str, chunk))).write_bytes(_POISON)


def run_armed(command: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Like `tests.conftest.run_vesuvius`, with poison armed."""
    code = f"{ARM}from vesuvius.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, command, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return fork_server.run(words, cwd=cwd, text=True, capture_output=True, env=environment)


def _rebuilt(kind: type, fields: dict[str, Any]) -> Any:
    arm()
    return kind(**fields)


def _reduce(self: Any) -> Any:
    return _rebuilt, (type(self), {field.name: getattr(self, field.name) for field in dataclasses.fields(self)})


def arm(decode: Any = ChunkDecoder.__call__) -> None:
    """Arm poison in this process and its readers."""

    def poisoned(self: ChunkDecoder, data: bytes) -> NDArray[Any]:
        if data == _POISON:
            os.abort()
        voxels: NDArray[Any] = decode(self, data)
        return voxels

    ChunkDecoder.__call__ = poisoned  # type: ignore[method-assign]
    ReaderJob.__reduce__ = Reading.__reduce__ = _reduce  # type: ignore[method-assign, assignment]
