"""Contents of memcheck's table, also on a narrow terminal."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from tests.monitor.memcheck.test_inspection import NOTHING, looked, seen
from vesuvius.monitor.memcheck.inspection import Inspection, Row
from vesuvius.monitor.memcheck.memory_table import memory_table
from vesuvius.monitor.memory.limits import MemoryPolicy
from vesuvius.monitor.probes.gpus import GpuUse
from vesuvius.runlog.units import GIB

HYGIENE = re.compile("killed|oom|out of memory", re.IGNORECASE)


def text(found: Inspection, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(memory_table(found))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def cells(table: str, name: str) -> list[str]:
    """Return the cells of the line that begins with `name`."""
    (line,) = [line for line in table.splitlines() if line.strip().startswith(name)]
    return re.split(r"\s{2,}", line.strip())


def full() -> Inspection:
    """A healthy run with all figures."""
    known = replace(
        NOTHING,
        name="run exp001_full",
        state_text="process 100 is at work",
        steps={"step": 1200, "age_s": 3.2, "step_s_p95": 2.914, "verdict": "decoding; try training.workers=6 " * 2},
        vram=Row("vram", "VRAM of the trainer", None, 41.2 * GIB, 43.5 * GIB),
        vram_limit_bytes=int(79.3 * GIB),
        remarks=("a remark " * 15,),
    )
    gpu = GpuUse(0, "GPU-1", "NVIDIA A100-SXM4-80GB", 42 * GIB, 80 * GIB, 0.97, 391.2, 64.0)
    return looked(replace(seen(120.0), gpus=(gpu,)), known, MemoryPolicy(ray_share=0.95), r101=5.12 * GIB)


def test_the_table_shows_parts_peaks_growth_and_limits() -> None:
    table = text(full())
    assert cells(table, "trainer") == ["trainer", "10.00", "10.00"]
    assert cells(table, "reader 101") == ["reader 101", "5.00", "5.12"]
    assert cells(table, "shared memory") == ["shared memory", "4.00", "4.00"]
    assert cells(table, "total")[:2] == ["total", "27.00 of 100.00"]
    assert cells(table, "VRAM of")[1:3] == ["41.20 of 79.30", "43.50"]
    assert cells(table, "GPU 0") == ["GPU 0", "42.00 GiB of 80.00 GiB, busy 97 %, NVIDIA A100-SXM4-80GB"]
    assert cells(table, "risk")[:2] == ["risk", "LOW"]
    assert "Ray's memory monitor: kills at 95.00 GiB; 30.00 GiB used, 65.00" in table
    assert "1200, 3.2 s ago; 95 % of steps take less than 2.91 s" in table


def test_a_single_reader_has_no_total_row() -> None:
    rows = (Row("readers", "readers (1)", None, GIB, GIB), Row("reader", "reader 7", 7, GIB, GIB))
    assert "readers (" in text(full())
    assert "readers (" not in (table := text(replace(full(), rows=rows)))
    assert cells(table, "reader 7") == ["reader 7", "1.00", "1.00"]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_line_exceeds_the_terminal_and_no_text_is_lost(width: int) -> None:
    table = text(full(), width)
    assert max(map(len, table.splitlines())) <= width
    assert "\x1b" not in table
    assert "".join(table.split()).count("training.workers=6") == 2


def test_unknown_figures_are_a_dash_and_never_zero() -> None:
    unknown = dict.fromkeys(("step", "age_s", "step_s_p95", "verdict"))
    known = replace(NOTHING, steps=unknown, no_gpus="nvidia-ml-py is not installed")
    table = text(looked(seen(1.0), found=known))
    assert cells(table, "last step") == ["last step", "-"]
    assert cells(table, "GPU") == ["GPU", "- (nvidia-ml-py is not installed)"]
    assert "VRAM" not in table


def test_the_largest_readers_are_shown_and_the_rest_summed_up() -> None:
    found = looked(seen(1.0, readers=[1 + 0.01 * i for i in range(20)]))
    table = text(found)
    assert len(re.findall(r"reader \d", table)) == 8
    assert cells(table, "readers") == ["readers (20)", "21.90", "21.90"]
    assert cells(table, "12 more")[:2] == ["12 more", f"{sum(1 + 0.01 * i for i in range(12)):.2f}"]


def test_a_grep_for_kills_finds_only_kills_in_the_table() -> None:
    found = full()
    assert not HYGIENE.search(text(found))
    assert HYGIENE.search(text(replace(found, kills=("reader 7 was killed",))))
    assert "OOM kill" in text(replace(found, kills=("reader 7 was killed",)))


def test_cores_are_those_that_the_run_may_use() -> None:
    found = replace(full(), cores=0.5)
    assert "1, 0.5 of them usable here" in text(found)
    assert "usable" not in text(replace(full(), cores=1.0))
