"""Markdown report of `gpu_check.py`, from the content of its JSON file.

python tools/gpu/report.py gpu_check.json          # the table again, for docs/performance.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

GIB = 2**30
SWITCHES = ("compile", "channels_last", "recompute_norm")
HEADS = [*SWITCHES, "micro-batch", "optimizer", "step s", "patches/s", "MFU", "peak GiB (reserved)", "plan GiB"]
HEADS += ["waiting", "off by", "warm-up s"]


def summary(row: Row) -> str:
    """A row in a line, for those who wait."""
    figures = f"{row['step_s']:.3f} s a step" if "step_s" in row else _reason(row)
    return f"{_keys(row)}: {figures}"


def print_report(content: Row) -> None:
    """All that was found."""
    about = content["about"]
    if about["rehearsal"]:
        print("REHEARSAL on the CPU with a tiny network: no figure below says anything about a GPU.\n")
    peak = (
        "unknown: no MFU; --peak-tflops sets it"
        if about["peak_tflops"] is None
        else f"{about['peak_tflops']:g} TFLOP/s"
    )
    print(f"device    {about['device']}, {cell(about.get('memory_gib'), '.1f')} GiB, peak {peak}")
    print(f"versions  {', '.join(f'{name} {version}' for name, version in about['versions'].items())}")
    print(f"config    {' '.join([about['config'], *about['overrides']])}, amp {about['amp']}")
    for row in content["self_test"]:
        order = "channels last" if row["channels_last"] else "contiguous"
        errors = ", ".join(f"{part} {error:.1e}" for part, error in row.get("errors", {}).items())
        print(f"self-test {order}: {errors or _reason(row)}")
    print()
    print_markdown(HEADS, [_cells(row) for row in content["rows"]])
    print()
    for row in content["skipped"]:
        print(f"no time   {_keys(row)}")
    if "speedup" in content:
        rounds = ", ".join(f"{ratio:.2f}" for ratio in content["speedups"])
        print(f"in turns  the fastest is {content['speedup']:.2f} times as fast as the config's own (rounds: {rounds})")
    for row in content["turns"]:
        if row["outcome"] != "ok":
            print(f"in turns  {summary(row)}")
    print(f"own       {content['default']}")
    print(f"best      {content['best'] or 'none: no setting ran'}")


def _keys(row: Row) -> str:
    return " ".join(f"{key}={row[key]}" for key in (*SWITCHES, "train_batch_size", "optimizer") if key in row)


def _reason(row: Row) -> str:
    return f"{row['outcome']}: {row['detail']}" if row.get("detail") else row["outcome"]


def _cells(row: Row) -> list[str]:
    cells = [*("on" if row[key] else "off" for key in SWITCHES)]
    cells += [f"{row['train_batch_size']} x {row['accumulate_steps']}", row["optimizer"]]
    if row["outcome"] != "ok":
        return [*cells, _reason(row)[:160]]
    peak, plan = row["peak_allocated_bytes"], row["plan_peak_bytes"]
    return [
        *cells,
        f"{row['step_s']:.3f}",
        f"{row['patches_s']:.2f}",
        cell(row["mfu"], ".1%"),
        f"{_gib(peak)} ({_gib(row['peak_reserved_bytes'])})",
        f"{_gib(plan)} ({cell(peak and peak / plan, '.0%')})",
        f"{row['waiting_share']:.1%}",
        f"{row['loss_off']:.1%}, {row['gradient_off']:.1%}",
        f"{row['warm_up_s']:.0f}",
    ]


def print_markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """A Markdown table."""
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for cells in lines:
        print(f"| {' | '.join(cells)} |")


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value / GIB:.2f}"


def cell(value: float | None, form: str) -> str:
    """Format a number; a dash for None."""
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    print_report(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
