"""Lists the lines of a training step that no test executes because they need a real GPU, and those that ask for CUDA.

Runs the tests of the files below on the CPU and, with SIM_GPU=1, on the stand-in (tests/support/sim_device.py).  A line
that neither executes counts if its function chooses by device.  Exits with 1 if the table in docs/performance.md lacks
its function.  Takes minutes.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).parents[1]
SOURCE, TESTS = REPOSITORY / "src/vesuvius", REPOSITORY / "tests"
FILES = [
    "accelerator.py", "diffusion/network/regions.py", "loader/device.py", "loader/intensity.py", "monitor/clock.py",
    "monitor/probes/vram.py", "training/checkpoint/save.py", "training/forecast/preflight.py", "training/loop.py",
    *(f"training/step/{name}.py" for name in ("feed", "muon", "optimizer", "self_test", "setup", "step")),
]  # fmt: skip
CPU_TESTS = [
    "training/step", "training/test_loop.py", "training/checkpoint/test_writer.py", "diffusion/network/test_regions.py",
    "loader/test_device.py", "monitor/test_clock.py", "monitor/test_monitor.py", "monitor/probes/test_vram.py",
]  # fmt: skip
CHOICE = re.compile(r"device|cuda|gpu|pinned|accelerator")
CUDA = re.compile(r"'cuda|torch\.cuda|is_cuda|\.cudnn\b|torch\.version\.cuda")
SECTION = "#### Lines that only a GPU executes\n"
_seen: dict[str, set[int]] = {str(SOURCE / name): set() for name in FILES}


def pytest_configure() -> None:
    threading.settrace(_trace)
    sys.settrace(_trace)


def pytest_unconfigure() -> None:
    sys.settrace(None)
    lines = {name: sorted(executed) for name, executed in _seen.items()}
    Path(os.environ["GPU_LINES"]).write_text(json.dumps(lines))


def _trace(frame: FrameType, event: str, _: Any) -> Any:
    if (lines := _seen.get(frame.f_code.co_filename)) is None:
        return None
    lines.add(frame.f_lineno)
    return _trace


def executed(tests: list[str], *options: str, **environment: str) -> dict[str, set[int]]:
    """Executed lines of each file in a run of some tests, of which those that fail do not matter here."""
    with tempfile.NamedTemporaryFile() as file:
        own = os.environ | {"GPU_LINES": file.name, "PYTHONPATH": str(Path(__file__).parent)} | environment
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", Path(__file__).stem, *options]
        subprocess.run([*command, *tests], cwd=REPOSITORY, env=own, check=False, stdout=sys.stderr)
        return {name: set(lines) for name, lines in json.loads(Path(file.name).read_text()).items()}


def statements(tree: ast.AST, name: str = "", function: ast.AST | None = None) -> Iterator[Statement]:
    """All statements of a file but docstrings, each with its innermost function."""
    for node in ast.iter_child_nodes(tree):
        inner, owner = name, function
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inner = f"{name}.{node.name}".lstrip(".")
            owner = node if isinstance(node, ast.FunctionDef) else function
        elif isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield Statement(name, function, node)
        yield from statements(node, inner, owner)


class Statement(NamedTuple):
    name: str  # of the function or class
    function: ast.AST | None
    node: ast.stmt

    def text(self) -> str:
        return ast.unparse(self.node).splitlines()[0]

    def chooses_by_device(self) -> bool:
        nodes = ast.walk(self.function) if self.function else ()
        tests = (node.test for node in nodes if isinstance(node, (ast.If, ast.IfExp, ast.While)))
        return any(CHOICE.search(ast.unparse(test)) for test in tests)


def only_on_a_gpu(seen: dict[str, set[int]]) -> Iterator[tuple[str, int, str]]:
    """File and function, line and code of each line that no test executes, or that asks for CUDA."""
    for path in sorted(SOURCE.rglob("*.py")):
        for each in statements(ast.parse(path.read_text())):
            lines = seen.get(str(path))
            skipped = lines is not None and each.node.lineno not in lines and each.chooses_by_device()
            if skipped or CUDA.search(each.text()):
                name = f"{path.relative_to(SOURCE)}: {each.name or 'module'}"
                yield name, each.node.lineno, each.text()


def main() -> int:
    seen = executed([str(TESTS / name) for name in CPU_TESTS], "-m", "not long")
    on_gpu = [str(path) for path in TESTS.rglob("test_*.py") if "needs_gpu" in path.read_text()]
    for name, lines in executed(on_gpu, "-m", "gpu", SIM_GPU="1").items():
        seen[name] |= lines
    _, _, section = (REPOSITORY / "docs/performance.md").read_text().partition(SECTION)
    named = set(re.findall(r"^\| `([^`]+)`", section.partition("\n#")[0], re.MULTILINE))
    found = list(only_on_a_gpu(seen))
    for name, line, text in found:
        print(f"{'' if name in named else 'UNNAMED '}{name}:{line}: {text}")
    unnamed = {name for name, *_ in found} - named
    print(f"{len(found)} lines in {len({name for name, *_ in found})} functions, {len(unnamed)} unnamed")
    return bool(unnamed)


if __name__ == "__main__":
    sys.exit(main())
