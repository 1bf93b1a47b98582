"""What it costs the model that patches share regions: validation loss against independent uniform patches.

    python tools/bench/order.py --volume volumes/demo.zarr --volume scroll.zarr --seeds 5 --steps 300 --json order.json

For each volume and seed two runs of the same steps, `data.order=regions` and `data.order=independent`, from the same
weights, with the same noise and held-out patches.  Figures: the validation loss after the last step, the mean over
seeds of the difference (regions minus independent), its standard error, and whether it is within two of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ORDERS = ("regions", "independent")


def main() -> None:
    """Run, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--volume", action="append", required=True, metavar="PATH", help="may be given again")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for volume in arguments.volume:
        for seed in range(arguments.seeds):
            losses = {order: validation_loss(Path(volume).resolve(), seed, order, arguments.steps) for order in ORDERS}
            rows.append({"volume": Path(volume).name, "seed": seed} | losses)
            print(json.dumps(rows[-1]), flush=True)
    for volume in dict.fromkeys(row["volume"] for row in rows):
        print(summary(volume, [row for row in rows if row["volume"] == volume]))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


def validation_loss(volume: Path, seed: int, order: str, steps: int) -> float:
    """The loss over 48 held-out patches after so many steps of a tiny network."""
    config = {
        "name": "order",
        "seed": seed,
        "data": {
            "volumes": [{"path": str(volume)}],
            "patch_size": [8, 32, 32],
            "order": order,
            "normalize": {"low": 0, "high": 200},
        },
        "training": {
            "train_batch_size": 8,
            "workers": 0,
            "steps_per_epoch": steps,
            "epochs": 1,
            "lr": 2e-3,
            "warmup_steps": 20,
            "ema_decay": 0.98,
            "save_every": steps,
            "validate_every": steps,
            "validate_patches": 48,
            "preview_every": 0,
        },
        "monitor": {"tensorboard": False, "guard": "off"},
        "model": {
            "channels": [8, 16, 32],
            "blocks_per_level": 1,
            "stem_stride": [2, 2, 2],
            "full_res_channels": 8,
            "attention_heads": 4,
            "norm_groups": 8,
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "vesuvius.train", "--config", str(path)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        lines = (Path(folder) / "runs" / "order" / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return float(next(r for r in reversed(records) if r["kind"] == "validation")["loss"])


def summary(volume: str, rows: list[dict[str, Any]]) -> str:
    """One line for a volume."""
    differences = [row["regions"] - row["independent"] for row in rows]
    mean, error = statistics.mean(differences), statistics.stdev(differences) / len(rows) ** 0.5
    means = ", ".join(f"{order} {statistics.mean(row[order] for row in rows):.5f}" for order in ORDERS)
    verdict = "within" if abs(mean) <= 2 * error else "beyond"
    return f"{volume}: {means}, difference {mean:+.5f} +- {error:.5f} (standard error): {verdict} two of them"


if __name__ == "__main__":
    main()
