"""docs/library.md: the loop that it shows runs as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.conftest import REPOSITORY, textured, write_array
from tests.support import fork_server


def test_the_loop_of_the_library_page_runs_as_it_stands(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/library.md").read_text(), re.DOTALL)
    assert len([line for line in code.split("data = ")[1].splitlines() if line.strip()]) <= 15
    write_array(tmp_path / "volumes" / "demo.zarr", textured((96, 128, 128)))
    script = tmp_path / "loop.py"
    script.write_text(code + "print(state['sample_index'], float(loss) > 0)\n")
    done = fork_server.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["80", "True"]
