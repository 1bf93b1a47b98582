"""What `gpu_check.py` found, as figures and as Markdown.  Needs nothing but the content of its JSON file.

python tools/gpu/report.py gpu_check.json          # the tables again, for docs/performance.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

GIB = 2**30


def figures(content: Row) -> Row:
    """What the project wants to know: ratios to MONAI, the largest micro-batch, the share of waiting; None: unknown."""
    best = {}
    for row in content["steps"]:
        if row["outcome"] == "ok" and not row["settings"]:
            best[row["system"]] = max(best.get(row["system"], 0.0), row["patches_s"])
    monai = next((speed for name, speed in best.items() if name.startswith("monai")), None)
    steps = [row for row in content["steps"] if row["system"] == "ours" and row["outcome"] == "ok"]
    default = [row for row in steps if not row["settings"]]
    swept = [row["micro_batch"] for row in default]
    found = [row["micro_batch"] for row in content["largest"] if not row["settings"]]
    errors = [
        row["predicted_peak_bytes"] / row["peak_allocated_bytes"] - 1
        for row in content["steps"]
        if row.get("predicted_peak_bytes") and row.get("peak_allocated_bytes")
    ]
    return {
        "self_test_ok": all(row["ok"] for row in content["self_test"]),
        "parity_ok": all(row["ok"] for row in content["parity"]) if content["parity"] else None,
        "patches_s_to_monai": best["ours"] / monai if monai and "ours" in best else None,
        "largest_micro_batch": max(swept + found, default=None),
        "mfu": max((row["mfu"] for row in default if row["mfu"] is not None), default=None),
        "mfu_as_shipped": next((row["mfu"] for row in steps if row["settings"].get("noise") == "edm"), None),
        "waiting_share": default[-1]["waiting_share"] if default else None,
        "prediction_errors": [min(errors), max(errors)] if errors else None,
    }


def print_report(content: Row) -> None:
    """All sections as Markdown tables."""
    _print_about(content["about"])
    for network in content["networks"]:
        widths = "/".join(map(str, network["channels"]))
        teraflops = network["training_flops_per_patch"] / 1e12
        print(
            f"network   {network['name']}: {widths}, {network['parameters'] / 1e6:.1f} M, {teraflops:.1f} TFLOP a patch"
        )
    print("\nThe network's convolutions against float32, largest relative errors\n")
    print_markdown(
        ["dtype", "output", "input gradient", "weight gradient", "bias gradient", "ok"],
        [[r["amp"], *(f"{error:.1e}" for error in r["errors"].values()), _yes(r)] for r in content["self_test"]],
    )
    print("\nLosses of a few steps, largest difference from float32\n")
    print_markdown(
        ["dtype", "difference", "first and last loss", "ok"],
        [
            [r["amp"], cell(r.get("largest_difference"), ".1e"), _ends(r.get("losses")), _yes(r)]
            for r in content["parity"]
        ],
    )
    print("\nTraining steps\n")
    heads = ["system", "micro-batch", "settings", "patches/s", "step s", "peak GiB (reserved)", "predicted GiB"]
    print_markdown([*heads, "MFU", "waiting"], [_step_cells(row) for row in content["steps"]])
    print()
    for row in content["kernels"]:
        shares = f"kernels ran {cell(row['kernel_share'], '.1%')} of the time, copies {cell(row['copy_share'], '.1%')}"
        print(f"profile   {row['system']}, {row['micro_batch']} patches: {shares} ({row['outcome']})")
    for row in content["largest"]:
        less = "" if row["too_many"] is None else f"; {row['too_many']} did not fit"
        print(f"largest   {row['system']} {_settings(row)}: {row['micro_batch']}{less}")
    for name, value in content["figures"].items():
        print(f"figure    {name}: {'-' if value is None else value}")
    for reason in {row["prediction"] for row in content["steps"] if "prediction" in row}:
        print(f"no plan   {reason}")
    for what in content["skipped"]:
        print(f"skipped   {what}")


def _print_about(about: Row) -> None:
    if about["rehearsal"]:
        print("REHEARSAL on the CPU with tiny networks: no figure below says anything about a GPU.\n")
    cap = "none" if about["cap_gib"] is None else f"{about['cap_gib']:.1f} GiB"
    print(f"device    {about['device']}, {cell(about['memory_gib'], '.1f')} GiB, cap {cap}")
    print(f"versions  {', '.join(f'{name} {version}' for name, version in about['versions'].items())}")
    print(f"peak      {about['peak_tflops'] or 'unknown: no MFU; --peak-tflops sets it'}")
    print(f"patch     {'x'.join(map(str, about['patch_size']))}, {about['minutes']:g} minutes")


def _step_cells(row: Row) -> list[str]:
    cells = [row["system"], str(row["micro_batch"]), _settings(row)]
    if row["outcome"] != "ok":
        return [*cells, f"{row['outcome']}: {row['detail'][:80]}" if row.get("detail") else row["outcome"]]
    peak, reserved = (_gib(row[f"peak_{kind}_bytes"]) for kind in ("allocated", "reserved"))
    cells += [f"{row['patches_s']:.2f}", f"{row['step_s']:.3f}", f"{peak} ({reserved})"]
    return [*cells, _gib(row.get("predicted_peak_bytes")), cell(row["mfu"], ".1%"), cell(row["waiting_share"], ".2%")]


def print_markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """A Markdown table."""
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for cells in lines:
        print(f"| {' | '.join(cells)} |")


def _settings(row: Row) -> str:
    return ", ".join(f"{name}={value}" for name, value in row["settings"].items()) or "default"


def _yes(row: Row) -> str:
    return "yes" if row["ok"] else f"NO {row.get('outcome', '')} {row.get('detail', '')}".strip()


def _ends(losses: list[float] | None) -> str:
    return "-" if not losses else f"{losses[0]:.5f}, {losses[-1]:.5f}"


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value / GIB:.2f}"


def cell(value: float | None, form: str) -> str:
    """A formatted number, or a dash where there is none."""
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    print_report(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
