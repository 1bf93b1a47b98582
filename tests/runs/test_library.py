"""docs/library.md: the loop that it shows runs as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, textured, write_array
from tests.support import fork_server


@pytest.mark.parametrize(
    ("steps", "workers"), [(2, 0), pytest.param(20, 2, marks=pytest.mark.long)], ids=["short", "as it stands"]
)
def test_the_loop_of_the_library_page_runs(tmp_path: Path, steps: int, workers: int) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/library.md").read_text(), re.DOTALL)
    assert len([line for line in code.split("data = ")[1].splitlines() if line.strip()]) <= 15
    write_array(tmp_path / "volumes" / "demo.zarr", textured((96, 128, 128)))
    script = tmp_path / "loop.py"
    assert "workers=2" in code
    assert "(stream, 20)" in code
    code = code.replace("workers=2", f"workers={workers}").replace("(stream, 20)", f"(stream, {steps})")
    script.write_text(code + "print(state['sample_index'], float(loss) > 0)\n")
    done = fork_server.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(4 * steps), "True"]
