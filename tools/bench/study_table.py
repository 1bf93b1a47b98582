"""The table of `real_labels.py`: means over seeds and differences of the same seed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def table(out: Path, arms: Sequence[str]) -> list[str]:
    """Return means over seeds, and differences to `aug` of the same seed with two standard errors."""
    rows = [json.loads(path.read_text()) for path in sorted(out.glob("*-seed*.json"))]
    known = {(row["count"], row["arm"], row["seed"]): row for row in rows}
    columns = ["N", "arm", "Dice", "adapted Rand", "splits", "merges", "Dice less aug's", "Rand less aug's"]
    columns += ["fused by gap", "fused, %, less warped's", "seeds"]
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for count, arm in itertools.product(sorted({row["count"] for row in rows}), arms):
        own = [row for row in rows if (row["count"], row["arm"]) == (count, arm)]
        if not own:
            continue
        pairs = [(row["test"], known[key]["test"]) for row in own if (key := (count, "aug", row["seed"])) in known]
        dices, *others = (np.mean([row["test"][name] for row in own]) for name in ("dice", "rand", "splits", "merges"))
        cells = [f"{100 * dices:.1f}", *(f"{each:.3f}" for each in others)]
        cells += [interval([100 * (a["dice"] - b["dice"]) for a, b in pairs], 1)]
        cells += [interval([a["rand"] - b["rand"] for a, b in pairs], 3)]
        fused = np.sum([row["fusions"] for row in own if "fusions" in row], axis=0)
        cells += [", ".join(f"{n}/{of}" for n, of in fused) if np.ndim(fused) else "-"]
        pairs = [(row, known[key]) for row in own if (key := (count, "warped", row["seed"])) in known]
        cells += [interval([fused_share(a) - fused_share(b) for a, b in pairs if "fusions" in a], 1) or "-"]
        lines.append(f"| {count} | {arm} | {' | '.join(cells)} | {len(own)} |")
    return lines


def fused_share(row: dict[str, Any]) -> float:
    """Return the percentage of fused bodies among the pairs with gaps up to --within."""
    fused, pairs = np.sum(row["fusions"], axis=0)
    return float(100 * fused / pairs)


def interval(values: Sequence[float], digits: int) -> str:
    """Format mean and two standard errors: `+4.2 ± 0.8`."""
    errors = 2 * np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
    return f"{np.mean(values):+.{digits}f} ± {errors:.{digits}f}" if values else "-"
