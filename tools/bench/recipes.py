"""Compare training recipes by the error at each noise level, on the same held-out patches.

    python tools/bench/recipes.py --volume volumes/demo.zarr --volume scroll.zarr --seeds 3 --steps 600 \
        --recipe adamw --recipe "muon training.optimizer=muon training.steps_per_epoch=550" --json recipes.json
    python tools/bench/recipes.py --volume volumes/demo.zarr --seeds 5 --steps 120 \
        --recipe "independent data.patches_per_region=1" --recipe "regions data.patches_per_region=null"

A recipe is a name and keys of the config; without any, those of the project's past and present are compared.  For each
volume and seed the demo's network is trained for the same number of steps with each recipe, and tested on the same
held-out patches at the same noise levels.  Figures: the squared error of x_0 over that of the best linear denoiser, at
levels from 0.02 to four times the largest amplitude of the spectrum (deviations of the data); their geometric mean, for
each average of the weights, and how it differs from the first recipe's; and the median seconds of a step, which say how
many steps another recipe could have done in the same time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.config import Config
from vesuvius.config.load import read_config
from vesuvius.diffusion.randomness import sample_noise
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.runlog.records import read_records
from vesuvius.training.checkpoint.format import find_checkpoint
from vesuvius.training.checkpoint.trained import Denoiser, read_checkpoint_info
from vesuvius.training.forecast.preflight import preflight
from vesuvius.training.step.feed import Conditioner
from vesuvius.training.step.optimizer import average_decays
from vesuvius.training.validation.validation import Reference

_FALLING = "training.lr_schedule=inverse_sqrt training.warmup_steps=50"
RECIPES = [
    "spectral",
    "cosine_noise diffusion.noise=cosine diffusion.min_snr_gamma=5.0",  # the default before spectral
    f"inverse_sqrt {_FALLING}",
    "muon training.optimizer=muon",
    f"muon_inverse_sqrt training.optimizer=muon {_FALLING}",
]
LEVELS, PATCHES = 11, 48
Guess = Callable[[Tensor, Tensor], Tensor]
DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


def main() -> None:
    """Run, print a line for each, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--volume", action="append", required=True, metavar="PATH", help="may be given again")
    parser.add_argument("--recipe", action="append", metavar="'NAME [KEY=VALUE ...]'", help="may be given again")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for volume in arguments.volume:
        for seed in range(arguments.seeds):
            for recipe in arguments.recipe or RECIPES:
                name, *keys = recipe.split()
                found = measure(Path(volume).resolve(), seed, keys, arguments.steps)
                rows.append({"volume": volume, "seed": seed, "recipe": name} | found)
                print(json.dumps(rows[-1]), flush=True)
    for line in summary(rows):
        print(line)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


def measure(volume: Path, seed: int, keys: list[str], steps: int) -> dict[str, Any]:
    """Train, and return errors by level, their geometric mean for each set of weights, and the seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        length = {"steps_per_epoch": steps, "epochs": 1, "save_every": steps, "validate_every": steps}
        adamw = {"optimizer": "adamw", "lr_schedule": "cosine", "warmup_steps": 20}
        path.write_text(yaml.safe_dump(demo_config("recipe", volume, seed, **length, **adamw)))
        command = [sys.executable, "-m", "vesuvius.train", "--config", str(path), *keys, "training.validate_every=0"]
        done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        run = Path(folder) / "runs" / "recipe"
        records = read_records(run / "metrics.jsonl")
        seconds = statistics.median(record["step_s"] for record in records if "step_s" in record)
        errors = relative_errors(read_config(path, keys), run)
    means = {weights: round(geometric_mean(of_levels), 4) for weights, of_levels in errors.items()}
    return {"errors": [round(error, 3) for error in errors["ema"]], "mean": means, "step_s": round(seconds, 3)}


def demo_config(name: str, volume: Path, seed: int, **training: Any) -> dict[str, Any]:
    """The demo's config on another volume, without conditions and Ray, with other `training.*` keys."""
    config: dict[str, Any] = yaml.safe_load(DEMO.read_text())
    del config["diffusion"]  # the dropout of conditions
    config["data"] = {"volumes": [{"path": str(volume)}], "patch_size": config["data"]["patch_size"]}
    config["training"] |= {"workers": 0, "validate_patches": PATCHES, "preview_every": 0} | training
    return config | {"name": name, "seed": seed, "monitor": {"tensorboard": False}}


@torch.no_grad()
def relative_errors(config: Config, run: Path) -> dict[str, list[float]]:
    """By weights and level, over the run's held-out patches: squared error of x_0 over that of the linear denoiser."""
    trained, device = read_checkpoint_info(find_checkpoint(run)), torch.device("cpu")
    x_0, spectrum = held_out_patches(config)
    schedule = Schedule.from_config(config.diffusion, trained.data.spectrum)

    def guess_of(network: Denoiser) -> Guess:
        def guess(noise: Tensor, t: Tensor) -> Tensor:
            x_t = schedule.q_sample(x_0, noise, t)
            return schedule.x_0_and_eps(config.diffusion.prediction, network(x_t, t), x_t, t)[0]

        return guess

    networks = {weights: Denoiser(trained, weights, schedule, device) for weights in average_decays(config.training)}
    return {weights: level_errors(x_0, spectrum, schedule, guess_of(network)) for weights, network in networks.items()}


def held_out_patches(config: Config) -> tuple[Tensor, Spectrum]:
    """Model values of `PATCHES` held-out patches of a run, and the spectrum of its training."""
    found = preflight(config.model_copy(update={"name": "another"}), resume=False, checkpoint=None)
    assert found.fixed is not None
    device = torch.device("cpu")
    conditioner = Conditioner(None, found.facts.greys.conditions, device)
    reference = Reference(found.fixed, found.facts.greys, conditioner, device)
    return reference.x_0(range(PATCHES)), found.facts.spectrum


def level_errors(x_0: Tensor, spectrum: Spectrum, schedule: Schedule, guess: Guess) -> list[float]:
    """By level: squared error of x_0 over that of the linear denoiser.

    Args:
        guess: estimate of x_0, in model values, with this noise at timesteps `t` of the schedule.
    """
    table = noise_in_model_values(schedule)
    errors = []
    for number, sigma in enumerate(np.geomspace(0.02, 4 * np.sqrt(spectrum.peak), LEVELS)):
        t = torch.full((PATCHES,), int(np.abs(np.log(table) - np.log(sigma * spectrum.std)).argmin()))
        noise = sample_noise(number, range(PATCHES), tuple(x_0.shape[1:]), x_0.device)
        linear = schedule.linear_x_0(spectrum, schedule.q_sample(x_0, noise, t), t)
        errors.append(float((guess(noise, t) - x_0).square().mean() / (linear - x_0).square().mean()))
    return errors


def noise_in_model_values(schedule: Schedule) -> NDArray[np.float64]:
    """By t, the standard deviation of the noise that is added to model values: float64 [timesteps]."""
    table: NDArray[np.float64] = np.sqrt(1 / schedule.alpha_bar_64 - 1) * schedule.std
    return table


def geometric_mean(values: list[float]) -> float:
    """Geometric mean of positive numbers."""
    return float(np.exp(np.mean(np.log(values))))


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """A table: for each recipe the mean error over seeds by volume, and the pairs with the first recipe.

    For the pairs: the number won, and the mean relative difference (standard error).
    """
    names = list(dict.fromkeys(row["recipe"] for row in rows))
    volumes = list(dict.fromkeys(row["volume"] for row in rows))
    found = {(row["recipe"], row["volume"], row["seed"]): row["mean"]["ema"] for row in rows}
    lines = [
        f"| recipe | {' | '.join(volumes)} | better than {names[0]} | difference | step s |",
        "| --- |" + " --- |" * (len(volumes) + 3),
    ]
    for name in names:
        pairs = [(error, found[names[0], *place]) for (of, *place), error in found.items() if of == name]
        means = [geometric_mean([e for (of, at, _), e in found.items() if (of, at) == (name, v)]) for v in volumes]
        seconds = statistics.median(row["step_s"] for row in rows if row["recipe"] == name)
        wins = f"{sum(own < first for own, first in pairs)} of {len(pairs)}"
        changes = [own / first - 1 for own, first in pairs]
        spread = f" ({statistics.stdev(changes) / len(changes) ** 0.5:.1%})" if len(changes) > 1 else ""
        cells = [*(f"{mean:.3f}" for mean in means), wins, f"{statistics.mean(changes):+.1%}{spread}"]
        lines.append(f"| {name} | {' | '.join(cells)} | {seconds:.3f} |")
    return lines


if __name__ == "__main__":
    main()
