"""Markdown report of `gpu_check.py`, from the content of its JSON file; its first line says what to change.

python tools/gpu/report.py gpu_check.json          # again, for docs/performance.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

GIB = 2**30
UNFINISHED = ("skipped", "out of time")
HIDDEN = ("outcome", "seconds", "steps_s")
SETTING = "setting "  # begins the name of a row of one


def failures(content: Row) -> list[str]:
    """Names of the rows that are wrong, then of those that failed; of the settings only the config's own may not."""
    wrong, failed, own = list[str](), list[str](), SETTING + content["own"]
    for name, row in content["rows"].items():
        if row["outcome"] == "wrong":
            wrong.append(name)
        elif row["outcome"] not in ("ok", *UNFINISHED) and (name == own or not name.startswith(SETTING)):
            failed.append(name)
    return wrong + failed


def verdict(content: Row) -> str:
    """Name rows that are wrong, or the fastest setting; then the rows that were not run.  Pure."""
    rows, about, best, bad = content["rows"], content["about"], content["best"], failures(content)
    tried = [row for name, row in rows.items() if name.startswith(SETTING) and "step_s" in row]
    # Other optimizers and effective batches learn something else, and so do not compete.
    learned = [(s["optimizer"], s["train_batch_size"] * s["accumulate_steps"]) for s in (about["setting"], *tried)]
    ran = learned[1:].count(learned[0])
    if best is None:
        line = f"it is unknown which setting is fastest: {ran} measured"
    elif best == content["own"]:
        line = f"nothing: the config's own setting is the fastest of {ran} measured"
    else:
        gain = f"{content['speedup']:.2f} times as fast as the config's own, " if content["speedup"] else ""
        line = f"set {content['overrides']}: {gain}the fastest of {ran} measured"
    if bad:
        more = f" (and {len(bad) - 1} more: {', '.join(bad[1:])})" if bad[1:] else ""
        line = f"first mend {bad[0]}: {_reason(rows[bad[0]])}{more}; then {line}"
    not_run = [f"{name} (no time)" for name in dict.fromkeys(content["not_run"])]
    unfinished = [name for name, row in rows.items() if row["outcome"] in UNFINISHED]
    not_run += [f"{name} ({rows[name]['detail'].partition(';')[0]})" for name in unfinished]  # the table has the remedy
    line += f"; not run: {', '.join(not_run)}" if not_run else ""
    return ("REHEARSAL on a CPU, which says nothing of a GPU: " if about["rehearsal"] else "") + line


def print_report(content: Row) -> None:
    """All that was found."""
    about, rows = content["about"], content["rows"]
    print(f"{verdict(content)}\n")
    peak = "unknown (--peak-tflops)" if about["peak_tflops"] is None else f"{about['peak_tflops']:g} TFLOP/s"
    print(f"{about['gpus']} x {about['device']}, {about['memory_bytes'] / GIB:.1f} GiB, peak {peak};")
    print(f"{', '.join(f'{name} {version}' for name, version in about['versions'].items())};")
    print(f"{about['config']}, amp {about['amp']}, code {about['code']}; own setting {content['own']}\n")
    settings = {name: row for name, row in rows.items() if name.startswith(SETTING)}
    checks = [(name, row) for name, row in rows.items() if name not in settings]
    _print_table([{"check": name, "found": summary(row), "seconds": f"{row['seconds']:.0f}"} for name, row in checks])
    ran = [row for row in settings.values() if row["outcome"] == "ok"]
    _print_table([{key: value for key, value in row.items() if key not in HIDDEN} for row in ran])
    _print_table([{"setting": name, "found": _reason(row)} for name, row in settings.items() if row not in ran])
    _print_table([one | {"row": name} for name, row in checks for one in row.get("classes", ())])


def summary(row: Row) -> str:
    """The figures of a row, or why it has none."""
    if row["outcome"] != "ok":
        return _reason(row)
    shown = {key: value for key, value in row.items() if key not in HIDDEN and not isinstance(value, list | dict)}
    return "ok" + "".join(f", {key} {_text(value)}" for key, value in shown.items())


def _reason(row: Row) -> str:
    return f"{row['outcome']}: {row['detail']}"


def _print_table(rows: Sequence[Row]) -> None:
    """In Markdown, with the keys of the first row as heads; nothing without rows."""
    for cells in [rows[0], ["---"] * len(rows[0]), *(map(_text, row.values()) for row in rows)] if rows else ():
        print(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    print()


def _text(value: Any) -> str:
    """A figure; a dash for None."""
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: python tools/gpu/report.py gpu_check.json  (written by tools/gpu_check.py)")
    print_report(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
