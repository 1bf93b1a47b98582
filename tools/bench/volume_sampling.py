"""Overhead and memory of `vesuvius sample --shape`, and quality of volumes by sampler, steps and overlap.

    python tools/bench/volume_sampling.py [--config configs/demo.yaml]     # cost and memory
    python tools/bench/volume_sampling.py --run demo                       # samplers, steps, overlaps: quality, seams

Cost and memory are measured with initial weights, because neither depends on them.  CPU only; no volumes are needed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, SamplerMethod, Triple
from vesuvius.config.load import read_config
from vesuvius.diffusion.estimate import Condition, NetworkEstimate, predict
from vesuvius.diffusion.sampler import Estimate, sampling_levels
from vesuvius.diffusion.schedule import Schedule
from vesuvius.generate.common import ProgressReporter
from vesuvius.generate.volume.inputs import InputConfig
from vesuvius.generate.volume.picture import held_out_box, patches_of
from vesuvius.generate.volume.run import VolumeRequest, generate_volume
from vesuvius.generate.volume.tasks import TaskRunner, VolumeJob, VolumeSampler, run_locally
from vesuvius.generate.volume.tiling import Tiling
from vesuvius.loader.intensity import intensity_scales, normalised
from vesuvius.training.checkpoint.format import find_checkpoint
from vesuvius.training.checkpoint.trained import read_checkpoint_info
from vesuvius.training.step.setup import build_network
from vesuvius.training.validation.texture import (
    correlation_distance,
    histogram_distance,
    measure_texture,
    spectrum_distance_db,
)
from vesuvius.volumes.volume import open_volume

STEPS = (40, 20, 10, 6)
METHODS: tuple[SamplerMethod, ...] = ("dpmpp2m", "heun", "ddim")
REFERENCE: tuple[SamplerMethod, int, float] = ("heun", 40, 0.25)
CELLS = [REFERENCE, *((method, steps, 0.25) for method in METHODS for steps in STEPS)]
CELLS += [("dpmpp2m", 20, 0.5), ("dpmpp2m", 20, 0.0)]


def study(run: Path, shape_zyx: Triple, folder: Path) -> None:
    """Generate a volume from the same noise with each sampler, and print its distances from real voxels.

    A model with labels uses those of the real voxels.  The distances are those of previews.  The reference is heun with
    40 steps from the same noise; rms differences are relative to its standard deviation.  Existing volumes in `folder`
    are reused.
    """
    info = read_checkpoint_info(find_checkpoint(run))
    data, spec, scales = info.config.data, info.config.data.volumes[0], intensity_scales(info.data.greys.volumes[:1])
    box = held_out_box(info, shape_zyx)
    given = InputConfig(condition=spec.condition, box=box if spec.condition else None)
    shape = None if spec.condition else shape_zyx

    def model_values(source: ArrayConfig, cut: Any) -> NDArray[np.float32]:
        return normalised(torch.from_numpy(np.asarray(open_volume(source)[cut])[None]), scales)[0].numpy()

    real = model_values(spec, tuple(slice(lo, hi) for lo, hi in zip(*box, strict=True)))
    texture, reference, converged = measure_texture(patches_of(real, data.patch_size)), None, None
    print(
        "sampler, steps, overlap | calls per voxel | from real voxels: spectrum (dB), histogram, correlation | "
        "from the reference: spectrum, rms | seams along z, y, x"
    )
    for method, steps, overlap in dict.fromkeys(CELLS):
        out = folder / f"{method}_{steps}_{overlap:g}.zarr"
        keys = (f"diffusion.sampler={method}", f"diffusion.sampler_steps={steps}")
        request = VolumeRequest(info.checkpoint, "ema", keys, 0, 4, 0, out, shape, overlap, workers=1, inputs=given)
        generate_volume(request)
        voxels = model_values(ArrayConfig(path=str(out)), slice(None))
        found = measure_texture(patches_of(voxels, data.patch_size))
        if reference is None or converged is None:
            reference, converged = voxels, found
        tiling = Tiling(voxels.shape, data.patch_size, overlap)
        passes = 2 * steps - 1 if method == "heun" else steps
        calls = passes * tiling.tiles * np.prod(data.patch_size) / voxels.size
        distances = [far(found, texture) for far in (spectrum_distance_db, histogram_distance, correlation_distance)]
        distances.append(spectrum_distance_db(found, converged))
        away = float(np.sqrt(np.mean((voxels - reference) ** 2)) / reference.std())
        seam = " ".join(f"{ratio:.2f}" for ratio in seams(voxels, real if spec.condition else None, tiling))
        figures = " | ".join(f"{figure:.3f}" for figure in (*distances, away))
        print(f"{method} {steps} {overlap:g} | {calls:.0f} | {figures} | {seam}", flush=True)


def seams(voxels: NDArray[Any], real: NDArray[Any] | None, tiling: Tiling) -> list[float]:
    """Return how visible tiles are along z, y and x: 1 = invisible, more if neighbouring tiles do not fit together.

    The mean squared difference of neighbouring planes in the middle of overlaps (at the faces of tiles that do not
    overlap), relative to that in the middle of tiles; each relative to real voxels with the same labels, if given,
    because planes differ by up to 20 %.  The faces of overlapping tiles show nothing: they have almost no weight.
    """
    ratios = []
    for axis, (starts, patch) in enumerate(zip(tiling.starts, tiling.patch_zyx, strict=True)):
        others = tuple(other for other in range(3) if other != axis)
        log = np.log((np.diff(voxels.astype(float), axis=axis) ** 2).mean(others))  # of voxels i and i + 1
        if real is not None:
            log -= np.log((np.diff(real.astype(float), axis=axis) ** 2).mean(others))
        middles = [(here + there + patch) // 2 - 1 for here, there in pairwise(starts)]
        centres = [start + patch // 2 - 1 for start in starts]
        ratios.append(float(np.exp(log[middles].mean() - log[centres].mean())))
    return ratios


def network_job(config_path: Path, times: int, overlap: float) -> tuple[VolumeJob, Estimate]:
    """Return a job with two passes over a volume of `times` patches along each axis."""
    config = read_config(config_path)
    config = config.model_copy(update={"diffusion": config.diffusion.model_copy(update={"sampler_steps": 2})})
    network = build_network(config, torch.device("cpu")).eval()
    schedule = Schedule.from_config(config.diffusion)
    patch = config.data.patch_size
    channels = torch.zeros((1, config.condition_channels, *patch))
    condition = channels if channels.shape[1] else None

    @torch.no_grad()
    def denoise(x_t: torch.Tensor, t: torch.Tensor, shown: Condition) -> torch.Tensor:
        return predict(network, schedule, x_t, t, shown)

    z, y, x = (size * times for size in patch)
    job = VolumeJob(Tiling((z, y, x), patch, overlap), 0, sampling_levels(schedule, config.diffusion), "dpmpp2m")
    return job, NetworkEstimate(denoise, config.diffusion, condition)


def generate(job: VolumeJob, estimate: Estimate) -> None:
    """Generate the volume in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        with run_locally(lambda: TaskRunner(job, path, lambda stored: estimate, torch.device("cpu"))) as run_tasks:
            VolumeSampler(job, path, ProgressReporter(), range(job.tiling.blocks)).run(run_tasks)


def cost(config_path: Path, overlap: float) -> None:
    """Print CPU and wall time of a volume relative to its network calls."""
    job, estimate = network_job(config_path, 3, overlap)
    x = torch.zeros((1, 1, *job.tiling.patch_zyx))
    calls = job.tiling.tiles * len(job.passes)

    def bare() -> tuple[float, float]:
        started = time.process_time(), time.perf_counter()
        for _ in range(calls // 2):
            estimate(x, job.levels[0])
        return time.process_time() - started[0], time.perf_counter() - started[1]

    estimate(x, job.levels[0])
    before = bare()
    started = time.process_time(), time.perf_counter()
    generate(job, estimate)
    found = time.process_time() - started[0], time.perf_counter() - started[1]
    after = bare()
    cpu, wall = (found[i] / (before[i] + after[i]) * (calls // 2 * 2) / calls for i in (0, 1))
    spread = abs(before[1] - after[1]) / (before[1] + after[1])
    print(
        f"overlap {overlap}: {calls} calls of {'x'.join(map(str, job.tiling.patch_zyx))}: {cpu:.3f} times their CPU "
        f"time, {wall:.3f} times their wall time (bare calls before and after differ by {spread:.0%})"
    )


def memory(times: int) -> None:
    """Print the peak memory of this process, in MiB, before and after a volume of `times` patches along each axis."""
    patch: Triple = (32, 32, 32)
    kernel = torch.randn((8, 1, 3, 3, 3)) / 10

    def estimate(x: torch.Tensor, level: object) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.conv3d(x, kernel, padding=1).mean(1, keepdim=True), x

    schedule = Schedule.from_config(read_config(Path("configs/demo.yaml")).diffusion)
    config = read_config(Path("configs/demo.yaml")).diffusion.model_copy(update={"sampler_steps": 2})
    job = VolumeJob(Tiling((32, 32, 32), patch, 0.25), 0, sampling_levels(schedule, config), "dpmpp2m")
    generate(job, estimate)  # warm-up: permanent allocations of the first call
    before = high_water()
    generate(replace(job, tiling=Tiling((32 * times,) * 3, patch, 0.25)), estimate)
    print(before, high_water())


def high_water() -> float:
    """Peak resident memory in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--run", type=Path, help="compare samplers, steps and overlaps with the network of this run")
    parser.add_argument("--shape", type=int, nargs=3, default=(24, 96, 96), help="shape of the compared volumes")
    parser.add_argument("--folder", type=Path, default=Path("runs/volume_sampling"), help="where to write them")
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.run:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        study(arguments.run, tuple(arguments.shape), arguments.folder)
        return
    if arguments.memory:
        memory(arguments.memory)
        return
    for times in (4, 8):
        run = subprocess.run(
            [sys.executable, __file__, "--memory", str(times)], capture_output=True, text=True, check=True
        )
        before, after = map(float, run.stdout.split())
        print(f"{times**3} patches of 32x32x32: peak {after:.1f} MiB, of which the volume {after - before:.1f} MiB")
    for overlap in (0.25, 0.5):
        cost(arguments.config, overlap)


if __name__ == "__main__":
    main()
