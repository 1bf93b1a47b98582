"""Does it cost accuracy that patches share regions?  Short runs with shared and with separate regions, in pairs.

    python tools/bench/region_loss.py volumes/demo.zarr --out build/region_loss

Each seed trains a small network twice, as the config says and with `data.patches_per_region: 1`, and both are validated
on the same held-out patches.  All runs use the power spectrum that the first one measures: it is that of 64 patches,
which are others for other regions, and both the noise and the unit of the loss depend on it.  The same command
continues after a stop.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
from pathlib import Path
from typing import Any

import yaml

from vesuvius.commands import train
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.training.forecast import preflight

_CONFIG: dict[str, Any] = yaml.safe_load("""
data: {patch_size: [8, 32, 32]}
training: {train_batch_size: 8, accumulate_steps: 1, workers: 0, epochs: 1, optimizer: adamw, lr: 2e-3,
  lr_schedule: cosine, warmup_steps: 20, ema_decay: 0.995, validate_patches: 48, preview_every: 0}
model: {channels: [32, 64, 128], blocks_per_level: 1, stem_stride: [2, 2, 2], full_res_channels: 16, attention_heads: 4}
monitor: {tensorboard: false}
""")


def main() -> None:
    """Parse the command line, train the runs that are missing, and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("volume")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["VESUVIUS_RUNS"] = str(args.out)
    kept, measure = args.out / "spectrum.pickle", preflight.measure_spectrum

    def measure_once(*data: Any) -> Spectrum:
        if not kept.exists():
            kept.write_bytes(pickle.dumps(measure(*data)))
        spectrum: Spectrum = pickle.loads(kept.read_bytes())
        return spectrum

    preflight.measure_spectrum = measure_once
    steps = dict.fromkeys(("steps_per_epoch", "save_every", "validate_every"), args.steps)
    differences = []
    for seed in range(args.seeds):
        losses = []
        for shared in (False, True):  # the first one measures the spectrum, of patches from separate regions
            data = _CONFIG["data"] | {"volumes": [{"path": str(Path(args.volume).resolve())}]}
            name = f"{'shared' if shared else 'separate'}-{seed}"
            config = _CONFIG | {"name": name, "seed": seed, "training": _CONFIG["training"] | steps}
            config["data"] = data if shared else data | {"patches_per_region": 1}
            path = args.out / f"{name}.yaml"
            path.write_text(yaml.safe_dump(config))
            losses.append(_loss(args.out / name) or _trained(path, args.out / name))
        differences.append(100 * (losses[1] / losses[0] - 1))
        print(
            f"seed {seed}: loss {losses[0]:.4f} separate, {losses[1]:.4f} shared, {differences[-1]:+.2f} %", flush=True
        )
    error = 2 * statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    print(
        f"shared regions change the loss by {statistics.mean(differences):+.2f} +- {error:.2f} % (two standard errors)"
    )


def _trained(config: Path, run: Path) -> float:
    if code := train.main(["--config", str(config)]):
        raise SystemExit(code)
    loss = _loss(run)
    assert loss is not None, run
    return loss


def _loss(run: Path) -> float | None:
    """The last validation loss of the averaged weights; None if the run has none yet."""
    found = run / "metrics.jsonl"
    records = map(json.loads, found.read_text().splitlines()) if found.exists() else ()
    losses = [record["loss"] for record in records if record["kind"] == "validation"]
    return float(losses[-1]) if losses else None


if __name__ == "__main__":
    main()
