"""Contents of memcheck's table, also on a narrow terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import replace

import pytest
from rich.console import Console

from tests.monitor.memory.simulated import sample
from tests.support.memory_samples import memory_samples
from vesuvius.monitor.memcheck.inspection import Inspection
from vesuvius.monitor.memcheck.memory_table import memory_table
from vesuvius.monitor.memory.risk import Level
from vesuvius.monitor.probes.gpus import GpuUse, VramUse
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


def full(readers: Iterable[float] = (5, 6)) -> Inspection:
    """A healthy run with all figures; sizes of its readers, from pid 101 on."""
    gpu = GpuUse(0, "GPU-1", "NVIDIA A100-SXM4-80GB", 42 * GIB, 80 * GIB, 0.97, 391.2, 64.0)
    vram = VramUse(GIB, int(41.2 * GIB), GIB, GIB, int(79.3 * GIB), 0, 0)
    held = {101 + i: int(size * GIB) for i, size in enumerate(readers)}
    (seen,) = memory_samples(0.0, count=1, used_bytes=17 * GIB, readers=held, gpus=(gpu,), vram=vram)
    return Inspection(
        0.0,
        "run",
        "run exp001_full",
        state_text="process 100 is at work",
        sample=seen,
        is_live=True,
        peaks={"worker 101": 5.12 * GIB, "vram": 43.5 * GIB},
        level=Level.LOW,
        limits=seen.limits,
        steps={"step": 1200, "age_s": 3.2, "step_s_p95": 2.914, "verdict": "decoding; try training.workers=6 " * 2},
        remarks=("a remark " * 15,),
    )


def test_the_table_shows_parts_peaks_and_limits() -> None:
    table = text(full())
    assert cells(table, "trainer") == ["trainer", "4.00", "4.00"]
    assert cells(table, "worker 101") == ["worker 101", "5.00", "5.12"]
    assert cells(table, "shared memory") == ["shared memory", "1.00", "1.00"]
    assert cells(table, "total")[:2] == ["total", "17.00 of 16.00"]
    assert cells(table, "VRAM of")[1:3] == ["41.20 of 79.30", "43.50"]
    assert cells(table, "GPU 0") == ["GPU 0", "42.00 GiB of 80.00 GiB, busy 97 %, NVIDIA A100-SXM4-80GB"]
    assert cells(table, "risk")[:2] == ["risk", "LOW"]
    assert "memory.max of cgroup /job: kills at 16.00 GiB; 9.00 GiB used" in table
    assert "1200, 3.2 s ago; 95 % of steps take less than 2.91 s" in table
    assert "now GiB" in table
    assert "last GiB" in text(replace(full(), is_live=False))


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_line_exceeds_the_terminal_and_no_text_is_lost(width: int) -> None:
    table = text(full(), width)
    assert max(map(len, table.splitlines())) <= width
    assert "\x1b" not in table
    assert "".join(table.split()).count("training.workers=6") == 2


def test_unknown_figures_are_a_dash_and_never_zero() -> None:
    unknown = dict.fromkeys(("step", "age_s", "step_s_p95", "verdict"))
    assert cells(text(Inspection(0.0, "run", "run x", steps=unknown)), "last step") == ["last step", "-"]
    machine = sample(0.0, 100 * GIB, 30 * GIB)
    table = text(Inspection(0.0, "machine", "a box", machine=machine, no_gpus="nvidia-ml-py is not installed"))
    assert cells(table, "GPU") == ["GPU", "- (nvidia-ml-py is not installed)"]
    assert cells(table, "machine")[1].startswith("30.00 GiB of 100.00 GiB used")


def test_the_largest_readers_are_shown_and_the_rest_summed_up() -> None:
    table = text(full(readers=[1 + 0.01 * i for i in range(20)]))
    assert len(re.findall(r"worker \d", table)) == 8
    assert cells(table, "workers")[:2] == ["workers (20)", "21.90"]
    assert cells(table, "12 more")[:2] == ["12 more", f"{sum(1 + 0.01 * i for i in range(12)):.2f}"]
    assert "readers (" not in text(full(readers=[1])), "a single reader has no total"


def test_a_grep_for_kills_finds_only_kills_in_the_table() -> None:
    assert not HYGIENE.search(text(full()))
    killed = text(replace(full(), kills=("worker 7 was killed",)))
    assert HYGIENE.search(killed)
    assert "OOM kill" in killed
