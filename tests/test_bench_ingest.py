"""The benchmark of the data path measures every system that it names, and reports what it measured."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY, textured, write_array

Row = dict[str, Any]

BENCH = REPOSITORY / "tools" / "bench_ingest.py"


def run_bench(volume: Path, *options: str) -> tuple[list[Row], str]:
    """Rows and printed text of a run of the benchmark on one worker, in windows of a moment."""
    rows_file = volume.with_suffix(".json")
    tiny = ["--patch=8,16,16", "--batch=4", "--workers=1", "--repeats=1", "--seconds=0.2"]
    command = [sys.executable, BENCH, f"--volume={volume}", f"--json={rows_file}"]
    done = subprocess.run([*command, *tiny, *options], capture_output=True, text=True, timeout=120)
    assert rows_file.exists(), done.stderr
    rows: list[Row] = json.loads(rows_file.read_text())
    return rows, done.stdout


def test_each_system_is_measured_and_ratios_are_quotients_of_medians(volume: Path) -> None:
    rows, text = run_bench(volume, "--systems=a,d,e,f")
    by_system = {row["system"]: row for row in rows}
    assert list(by_system) == ["zarr-python", "torch-tasks", "ours", "decode-limit"]
    for row in rows:
        assert row["missing"] is None
        assert row["repeats"] == row["workers"] == 1
        assert min(row["patches_s"], row["bytes_per_patch"], row["rss_anon_bytes"]) > 0
        others = [other for other in rows if other is not row]
        assert row["ratios"] == {other["system"]: row["patches_s"] / other["patches_s"] for other in others}
        assert f"| ({row['letter']}) {row['system']} | 1 | {row['patches_s']:.0f} " in text
    assert all(by_system[name]["first_batch_s"] > 0 for name in ("zarr-python", "torch-tasks", "ours"))
    assert by_system["ours"]["object_store_peak_bytes"] > 0
    assert by_system["zarr-python"]["bytes_per_patch"] >= 32**3, "a patch touches one chunk at least"
    same_tasks = pytest.approx(by_system["torch-tasks"]["bytes_per_patch"], rel=0.3)  # ours may be a task ahead
    assert by_system["ours"]["bytes_per_patch"] == same_tasks
    assert {"python", "torch", "ray", "zarr", "numpy"} <= rows[0]["versions"].keys()


def test_figures_are_medians_and_ratios_their_quotients_at_equal_workers() -> None:
    bench = runpy.run_path(str(BENCH), run_name="bench_ingest")
    entries = [
        bench["Entry"]("a", "zarr-python", 1, (), [{"patches_s": value} for value in (90.0, 110.0, 700.0)]),
        bench["Entry"]("e", "ours", 1, (), [{"patches_s": value} for value in (1.0, 550.0, 560.0)]),
        bench["Entry"]("e", "ours", 2, (), [{"patches_s": 900.0}]),
        bench["Entry"]("c", "tensorstore", 2, (), [], ["ImportError: No module named 'tensorstore'"]),
    ]
    a, one, two, missing = bench["make_rows"](entries, {"batch": 8})
    assert (a["patches_s"], a["patches_s_range"], a["repeats"], a["batch"]) == (110.0, [90.0, 700.0], 3, 8)
    assert a["ratios"] == {"ours": 110 / 550}
    assert one["ratios"] == {"zarr-python": 550 / 110}
    assert two["ratios"] == missing["ratios"] == {}
    assert missing["patches_s"] is None


def test_a_system_that_fails_is_missing_with_its_reason_and_never_zero(tmp_path: Path) -> None:
    volume = write_array(tmp_path / "torn.zarr", textured((96, 128, 128)))
    for chunk in volume.glob("[0-9]/*/*"):
        chunk.write_bytes(b"torn")
    (row,), text = run_bench(volume, "--systems=a")
    assert row["patches_s"] is None
    assert row["repeats"] == 0
    assert row["missing"]
    assert f"missing: {row['missing']}" in text
