"""What a network has learned at each noise level, with edm and with cosine noise, on the same held-out patches.

    python tools/bench_noise.py --volume volumes/demo.zarr --volume scroll.zarr --seeds 3 --steps 600 --json noise.json

For each volume and seed the demo's network is trained for the same steps with each noise, and shown the same held-out
patches at the same levels.  Figures: the squared error of x_0 over that of the best linear denoiser, at levels from
0.02 to four times the largest amplitude of the spectrum (standard deviations of the data), their geometric mean, and
the seconds of the training.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from vesuvius.config_file import read_config
from vesuvius.diffusion.condition import NO_CONDITION
from vesuvius.diffusion.randomness import sample_noise
from vesuvius.diffusion.schedule import Schedule
from vesuvius.engine.conditioning import Conditioner
from vesuvius.engine.found_checkpoint import find_checkpoint
from vesuvius.engine.preflight import preflight
from vesuvius.engine.reference import Reference
from vesuvius.engine.trained import TrainedNetwork, read_trained

NOISES: dict[str, dict[str, Any]] = {
    "edm": {"noise": "edm"},
    "cosine": {"noise": "cosine", "min_snr_gamma": 5.0, "sampler": "ddim", "sampler_steps": 50},
}
LEVELS, PATCHES = 11, 48


def main() -> None:
    """Run, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--volume", action="append", required=True, metavar="PATH", help="may be given again")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for volume in arguments.volume:
        for seed in range(arguments.seeds):
            for noise in NOISES:
                found = measure(Path(volume).resolve(), seed, noise, arguments.steps)
                rows.append({"volume": Path(volume).name, "seed": seed, "noise": noise} | found)
                print(json.dumps(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


def measure(volume: Path, seed: int, noise: str, steps: int) -> dict[str, Any]:
    """Train, and return errors by level, their geometric mean and the seconds."""
    config = {
        "name": "noise",
        "seed": seed,
        "data": {"volumes": [{"path": str(volume)}], "patch_size": [8, 32, 32]},
        "training": {
            "train_batch_size": 8,
            "workers": 0,
            "steps_per_epoch": steps,
            "epochs": 1,
            "lr": 2e-3,
            "warmup_steps": 20,
            "ema_decay": 0.995,
            "save_every": steps,
            "validate_every": steps,
            "validate_patches": PATCHES,
            "preview_every": 0,
        },
        "diffusion": NOISES[noise],
        "model": {
            "channels": [32, 64, 128],
            "blocks_per_level": 1,
            "full_res_channels": 16,
            "attention_heads": 4,
            "norm_groups": 8,
        },
        "monitor": {"tensorboard": False},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "noise.yaml"
        path.write_text(yaml.safe_dump(config))
        began = time.monotonic()
        command = [sys.executable, "-m", "vesuvius.train", "--config", str(path)]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        seconds = time.monotonic() - began
        errors = relative_errors(path, Path(folder) / "runs" / "noise")
    mean = float(np.exp(np.mean(np.log(errors))))
    return {"errors": [round(error, 3) for error in errors], "mean": round(mean, 4), "seconds": round(seconds, 1)}


@torch.no_grad()
def relative_errors(config_path: Path, run: Path) -> list[float]:
    """At each level, over the run's held-out patches: squared error of x_0 over that of the linear denoiser."""
    trained, device = read_trained(find_checkpoint(run)), torch.device("cpu")
    config = read_config(config_path)
    found = preflight(config.model_copy(update={"name": "another"}), resume=False, checkpoint=None)
    assert found.fixed is not None
    conditioner = Conditioner(None, found.greys.conditions, found.scalars, device)
    x_0 = Reference(found.fixed, found.greys, conditioner, device).x_0(range(PATCHES))
    spectrum = found.spectrum
    schedule = Schedule.from_config(config.diffusion, trained.spectrum)
    network = TrainedNetwork(trained, "ema", schedule, device)
    table = np.sqrt(1 / schedule.alpha_bar_64 - 1) * schedule.std  # in model values
    errors = []
    for number, sigma in enumerate(np.geomspace(0.02, 4 * np.sqrt(spectrum.peak), LEVELS)):
        t = torch.full((PATCHES,), int(np.abs(np.log(table) - np.log(sigma * spectrum.std)).argmin()))
        x_t = schedule.q_sample(x_0, sample_noise(number, range(PATCHES), tuple(x_0.shape[1:]), device), t)
        guess, _ = schedule.x_0_and_eps(config.diffusion.prediction, network(x_t, t, NO_CONDITION), x_t, t)
        linear = schedule.linear_x_0(spectrum, x_t, t)
        errors.append(float((guess - x_0).square().mean() / (linear - x_0).square().mean()))
    return errors


if __name__ == "__main__":
    main()
