"""Samples of MONAI's 3D DDPM recipe and of ours, trained for equal CPU seconds on the same patches of the same volume.

    vesuvius volume synth volumes/large.zarr --shape 128,512,512 --seed 3
    python tools/bench/recipes_peers.py --volume phantom=volumes/large.zarr --seed 0 --out peers        # both, hours
    python tools/bench/recipes_peers.py --volume phantom=volumes/large.zarr --seed 1 --out peers --only monai --lr 1e-3
    python tools/bench/recipes_peers.py --out peers                          # the table of all runs that are there

ours: the demo's recipe without labels (`configs/demo.yaml`; weights averaged over 500 steps), by `vesuvius train`.
monai: the recipe of MONAI's tutorial generation/3d_ddpm as of August 2026: DiffusionModelUNet of three levels, two
residual blocks each, attention on the last; betas of 1000 steps, scaled linear from 0.0005 to 0.0195; Adam, 5e-5, no
average of the weights; squared error of the noise; ancestral sampling with all 1000 steps or, as in its last section,
DDIM.  Grey values are 0 to 1 where ours are -1 to +1.

MONAI's network is scaled so that a step of 8 patches takes about as long as ours: a quarter of the tutorial's widths
(16, 16, 32 for 64, 64, 128; two channels a group of a norm, as there), the widest of its proportions that does not take
longer by half.  --lr sets another learning rate, as 5e-5 is low for so short a run.

`PatchLoader` and `vesuvius train` deliver the same patches in the same order, 8 a step.  The budget is the CPU time of
one single-threaded process, so other load does not change it; ours includes start-up and checkpoints, MONAI's starts at
the first step.  Sampling is not included; the table gives its network calls.  `vesuvius evaluate` compares 128 samples
of each with held-out patches.  Error by level: squared error of x_0 over that of the best linear denoiser (see
`recipes.py`); for MONAI at the levels that its schedule has within 20 %.

An interrupted training continues, as does one that ended at a smaller budget; sampling continues after the last batch.
--run judges one of our runs that another program has trained for the time of --budget.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
import yaml
from numpy.typing import NDArray
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is shared with other tools

from bench import recipes
from monai.inferers import DiffusionInferer
from monai.networks.nets import DiffusionModelUNet
from monai.networks.schedulers import DDIMScheduler, DDPMScheduler

import vesuvius
from vesuvius.config.load import read_config
from vesuvius.diffusion.schedule import Schedule
from vesuvius.generate.sample_zarr import to_grey_values
from vesuvius.training.checkpoint.format import find_checkpoint
from vesuvius.training.checkpoint.trained import read_checkpoint_info

WIDTHS = (16, 16, 32)
TIMESTEPS = 1000
BETAS = {"schedule": "scaled_linear_beta", "beta_start": 0.0005, "beta_end": 0.0195}
SAVE_EVERY_S = 60
BATCH = 16  # samples drawn at once
NEAR = 1.2  # by which MONAI's nearest level may be off
FIGURES = {
    "auc": "AUC",
    "features_auc": "AUC of fixed features",
    "air": "air",
    "means_std": "std of means",
    "planarity": "planarity",
    "histogram_distance": "histogram",
    "spectrum_distance_db": "spectrum, dB",
    "correlation_distance": "two-point",
}


@dataclass(frozen=True)
class Task:
    """One training on one volume."""

    config: Path  # of ours, whose data MONAI's sees, too
    folder: Path  # all that is kept of it
    seed: int
    budget_s: float
    samples: int
    classifier_steps: int


def main() -> None:
    """Train, sample and evaluate the requested recipes; print the table of all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of all runs")
    parser.add_argument("--volume", metavar="NAME=PATH", help="to train on; none = only the table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("ours", "monai"), help="one recipe instead of both")
    parser.add_argument("--budget", type=float, default=1440, metavar="S", help="CPU seconds of a training")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--classifier-steps", type=int, default=200, help="as in vesuvius evaluate")
    parser.add_argument("--lr", type=float, default=5e-5, help="learning rate of MONAI's recipe")
    parser.add_argument("--ddim", type=int, metavar="STEPS", help="MONAI's DDIM sampler instead of its ancestral one")
    parser.add_argument("--run", type=Path, metavar="RUN", help="a trained run of ours, with --only ours")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.volume:
        name, _, path = arguments.volume.partition("=")
        for recipe in [arguments.only] if arguments.only else ["ours", "monai"]:
            label = f"monai lr {arguments.lr:g}" if recipe == "monai" else "ours"
            folder = (arguments.out / f"{name}_{arguments.seed}_{label.replace(' ', '_')}").resolve()
            folder.mkdir(parents=True, exist_ok=True)
            config = folder / "config.yaml"
            config.write_text(yaml.safe_dump(config_of(Path(path).resolve(), arguments.seed)))
            asked = arguments.budget, arguments.samples, arguments.classifier_steps
            task = Task(config, folder, arguments.seed, *asked)
            found = ours(task, arguments.run) if recipe == "ours" else monai(task, arguments.lr, arguments.ddim)
            row = {"volume": name, "seed": task.seed, "budget_s": task.budget_s, "recipe": label} | found
            stem = f"{folder.name}_{task.budget_s:g}_{row['calls']}"
            (arguments.out / f"{stem}.json").write_text(json.dumps(row, indent=1) + "\n")
    for line in table([json.loads(path.read_text()) for path in sorted(arguments.out.glob("*.json"))]):
        print(line)


def config_of(volume: Path, seed: int) -> dict[str, Any]:
    """The demo's config for another volume, without labels, and with no end of its own."""
    endless = {"epochs": 10**4, "ema_decay": 0.998, "save_every": 250, "validate_every": 10**6}
    return recipes.demo_config("run", volume, seed, **endless)


# ---- ours


def ours(task: Task, run: Path | None) -> dict[str, Any]:
    """Train with `vesuvius train`, and judge."""
    run = run or train_ours(task)
    config = read_config(task.config)
    info = read_checkpoint_info(find_checkpoint(run))
    with torch.no_grad():
        errors = recipes.relative_errors(info.config.model_copy(update={"training": config.training}), run)["ema"]
    figures = judged(run, task, f"{task.budget_s:g}", f"--batch-size={BATCH}")
    weights = torch.load(info.checkpoint / "state.pt", mmap=True, weights_only=True)["model"]
    return {
        "steps": info.step,
        "parameters": sum(weight.numel() for weight in weights.values()),
        "calls": info.config.diffusion.sampler_steps,
        "errors": errors,
        "figures": figures,
    }


def train_ours(task: Task, *keys: str) -> Path:
    """Run `vesuvius train` until its sessions have used the CPU seconds in total; return the run."""
    spent = task.folder / "cpu_s"
    before = used = float(spent.read_text()) if spent.exists() else 0.0
    if used >= task.budget_s:
        return task.folder / "runs" / "run"
    command = [sys.executable, "-m", "vesuvius.train", "--config", str(task.config), "--resume", *keys]
    with (task.folder / "train.log").open("a") as log:
        process = psutil.Popen(command, cwd=task.folder, env=one_thread(), stdout=log, stderr=log)
        is_stopping = False  # a second signal would end it without a checkpoint
        try:
            while process.poll() is None:
                times = process.cpu_times()
                used = max(used, before + times.user + times.system)
                spent.write_text(f"{used:.1f}")
                if used >= task.budget_s and not is_stopping:
                    process.terminate()
                    is_stopping = True
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode not in (0, 75):
        raise SystemExit(f"vesuvius train failed with {process.returncode}; see {task.folder / 'train.log'}")
    return task.folder / "runs" / "run"


def one_thread() -> dict[str, str]:
    """The environment of a single-threaded child process."""
    return os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def judged(run: Path, task: Task, stem: str, argument: str) -> dict[str, Any]:
    """Run `vesuvius evaluate`; return its figures."""
    out = task.folder / f"judged_{stem}_{run.name}_{task.samples}_{task.classifier_steps}"
    if not out.exists():
        command = [sys.executable, "-m", "vesuvius", "evaluate", str(run), argument, f"--count={task.samples}"]
        command += [f"--classifier-steps={task.classifier_steps}", f"--out={out}"]
        subprocess.run(command, cwd=run.parents[1], check=True, env=one_thread(), stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads((out / "evaluation.json").read_text())["figures"]
    return {key: found[key]["values"] | {"distance": found[key]["distance"]} for key in FIGURES}


# ---- MONAI's


def monai(task: Task, lr: float, ddim: int | None) -> dict[str, Any]:
    """Train MONAI's recipe, sample and evaluate.  A run of ours of one step provides split, grey range and spectrum."""
    if not (task.folder / "runs").exists():
        train_ours(replace(task, budget_s=math.inf), "training.max_steps=1")
    run = task.folder / "runs" / "run"
    network, steps = train_monai(task, lr)
    info = read_checkpoint_info(find_checkpoint(run))
    stem = f"{task.budget_s:g}" + (f"_ddim{ddim}" if ddim else "")
    drawn = draw_monai(network, task, ddim, task.folder / f"drawn_{stem}", info.config.data.patch_size)
    samples = task.folder / f"samples_{stem}.npy"
    np.save(samples, to_grey_values(2 * drawn - 1, info.data.greys.volumes[0], info.data.volumes[0].dtype))
    return {
        "steps": steps,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "calls": ddim or TIMESTEPS,
        "sampler": "ddim" if ddim else "ddpm",
        "errors": [error if math.isfinite(error) else None for error in monai_errors(network, task.config)],
        "figures": judged(run, task, stem, f"--generated={samples}"),
    }


def train_monai(task: Task, lr: float) -> tuple[nn.Module, int]:
    """Train for the CPU seconds; return the network and its number of steps."""
    torch.manual_seed(task.seed)
    network = DiffusionModelUNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=1,
        channels=WIDTHS,
        attention_levels=(False, False, True),
        num_head_channels=(0, 0, WIDTHS[-1]),
        num_res_blocks=2,
        norm_num_groups=WIDTHS[0] // 2,
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=lr)
    inferer = DiffusionInferer(DDPMScheduler(TIMESTEPS, clip_sample=False, **BETAS))
    kept, steps, before = task.folder / "state.pt", 0, 0.0
    with vesuvius.PatchLoader(task.config, batch_size=8, workers=0, device="cpu") as loader:
        if kept.exists():
            state = torch.load(kept, weights_only=True)
            network.load_state_dict(state["network"])
            optimizer.load_state_dict(state["optimizer"])
            loader.load_state_dict(state["loader"])
            torch.set_rng_state(state["random"])
            steps, before = state["steps"], state["cpu_s"]
        started = saved = time.process_time()

        def used() -> float:
            return before + time.process_time() - started

        def save() -> None:
            state = {
                "network": network.state_dict(),
                "optimizer": optimizer.state_dict(),
                "loader": loader.state_dict(),
                "random": torch.get_rng_state(),
                "steps": steps,
                "cpu_s": used(),
            }
            torch.save(state, kept.with_suffix(".new"))
            kept.with_suffix(".new").replace(kept)

        for batch in loader if used() < task.budget_s else ():
            images = (batch.image + 1) / 2
            noise, t = torch.randn_like(images), torch.randint(0, TIMESTEPS, (len(images),))
            loss = F.mse_loss(inferer(inputs=images, diffusion_model=network, noise=noise, timesteps=t), noise)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            steps += 1
            if used() >= task.budget_s:
                break
            if time.process_time() - saved >= SAVE_EVERY_S:
                saved = time.process_time()
                print(f"step {steps}, {used():.0f} CPU s, loss {loss.item():.4f}", file=sys.stderr, flush=True)
                save()
        save()
    return network.eval(), steps


@torch.no_grad()
def draw_monai(
    network: nn.Module, task: Task, ddim: int | None, folder: Path, patch_zyx: tuple[int, int, int]
) -> NDArray[np.float32]:
    """Samples [N, Z, Y, X] from 0 to 1, not clipped; batches already in the folder are reused."""
    scheduler = (DDIMScheduler if ddim else DDPMScheduler)(TIMESTEPS, clip_sample=False, **BETAS)
    scheduler.set_timesteps(ddim or TIMESTEPS)
    inferer = DiffusionInferer(scheduler)
    folder.mkdir(exist_ok=True)
    batches = []
    for first in range(0, task.samples, BATCH):
        path = folder / f"{first}.npy"
        if not path.exists():
            torch.manual_seed(int(np.random.SeedSequence((task.seed, first)).generate_state(1)[0]))
            noise = torch.randn(min(BATCH, task.samples - first), 1, *patch_zyx)
            drawn = inferer.sample(input_noise=noise, diffusion_model=network, scheduler=scheduler, verbose=False)
            np.save(path, drawn[:, 0].numpy())
        batches.append(np.load(path))
    return np.concatenate(batches)


@torch.no_grad()
def monai_errors(network: nn.Module, config_path: Path) -> list[float]:
    """Error at each of our levels, measured at MONAI's nearest level; NaN if it has none within 20 %."""
    config = read_config(config_path)
    x_0, spectrum = recipes.held_out_patches(config)
    schedule = Schedule.from_config(config.diffusion, spectrum)
    alpha_bar = DDPMScheduler(TIMESTEPS, **BETAS).alphas_cumprod.double()
    # Model values are from -1 to +1: twice as far apart.
    table = 2 * ((1 - alpha_bar) / alpha_bar).sqrt().numpy()

    def guess(noise: Tensor, t: Tensor) -> Tensor:
        wanted = recipes.noise_in_model_values(schedule)[int(t[0])]
        near = int(np.abs(np.log(table / wanted)).argmin())
        if not 1 / NEAR < table[near] / wanted < NEAR:
            return torch.full_like(x_0, math.nan)
        alpha, sigma = float(alpha_bar[near].sqrt()), float((1 - alpha_bar[near]).sqrt())
        x_t = alpha * (x_0 + 1) / 2 + sigma * noise
        eps = torch.cat([network(part, torch.full((len(part),), near)) for part in x_t.split(BATCH)])
        return 2 * (x_t - sigma * eps) / alpha - 1

    return recipes.level_errors(x_0, spectrum, schedule, guess)


# ---- the table


def table(rows: list[dict[str, Any]]) -> list[str]:
    """One line a run; a figure that patches have by themselves as generated / held out, others are distances."""
    columns = ["volume", "recipe", "seed", "CPU s", "steps", "parameters", "network calls a sample"]
    columns += [*FIGURES.values(), "error by level, its geometric mean"]
    lines = [f"| {' | '.join(columns)} |", "| --- |" + " --- |" * (len(columns) - 1)]
    for row in sorted(rows, key=lambda row: (row["volume"], row["seed"], row["budget_s"], row["recipe"])):
        cells = [row["volume"], row["recipe"], row["seed"], f"{row['budget_s']:g}", row["steps"], row["parameters"]]
        cells.append(f"{row['calls']} {row.get('sampler', '')}".strip())
        for figure in (row["figures"][key] for key in FIGURES):
            own = [figure[of] for of in ("generated", "held_out") if of in figure] or [figure["distance"]]
            cells.append(" / ".join(f"{value:.3g}" for value in own))
        known = [error for error in row["errors"] if error is not None]
        by_level = " ".join("-" if error is None else f"{error:.2f}" for error in row["errors"])
        cells.append(f"{by_level}; {recipes.geometric_mean(known):.2f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


if __name__ == "__main__":
    main()
