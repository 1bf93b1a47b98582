"""What `vesuvius sample --shape` costs beside the network, and how its memory grows with the volume.

    python tools/bench/volume_sampling.py [--config configs/demo.yaml]

The network has its initial weights: neither figure depends on them.  CPU only; no volumes are needed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from vesuvius.config import Triple
from vesuvius.config.load import read_config
from vesuvius.diffusion.estimate import Condition, NetworkEstimate, predict
from vesuvius.diffusion.sampler import Estimate, sampling_levels
from vesuvius.diffusion.schedule import Schedule
from vesuvius.generate.drawing import Watch
from vesuvius.generate.volume.tiling import Tiling
from vesuvius.generate.volume.work import Sampling, VolumeJob, Work, this_process
from vesuvius.training.step.setup import build_network


def network_job(config_path: Path, times: int, overlap: float) -> tuple[VolumeJob, Estimate]:
    """Two passes over a volume of `times` patches along each axis."""
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


def drawn(job: VolumeJob, estimate: Estimate) -> None:
    """Draw it in a folder that is deleted then."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        with this_process(lambda: Work(job, path, lambda stored: estimate, torch.device("cpu"))) as run_parts:
            Sampling(job, path, Watch(), range(job.tiling.blocks)).run(run_parts)


def cost(config_path: Path, overlap: float) -> None:
    """CPU and wall time of a drawing, against those of the network calls that it makes."""
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
    drawn(job, estimate)
    found = time.process_time() - started[0], time.perf_counter() - started[1]
    after = bare()
    cpu, wall = (found[i] / (before[i] + after[i]) * (calls // 2 * 2) / calls for i in (0, 1))
    spread = abs(before[1] - after[1]) / (before[1] + after[1])
    print(
        f"overlap {overlap}: {calls} calls of {'x'.join(map(str, job.tiling.patch_zyx))}: {cpu:.3f} times their CPU "
        f"time, {wall:.3f} times their wall time (bare calls before and after differ by {spread:.0%})"
    )


def memory(times: int) -> None:
    """Print the peak of this process, in MiB, before and after a drawing of so many patches along each axis."""
    patch: Triple = (32, 32, 32)
    kernel = torch.randn((8, 1, 3, 3, 3)) / 10

    def estimate(x: torch.Tensor, level: object) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.conv3d(x, kernel, padding=1).mean(1, keepdim=True), x

    schedule = Schedule.from_config(read_config(Path("configs/demo.yaml")).diffusion)
    config = read_config(Path("configs/demo.yaml")).diffusion.model_copy(update={"sampler_steps": 2})
    job = VolumeJob(Tiling((32, 32, 32), patch, 0.25), 0, sampling_levels(schedule, config), "dpmpp2m")
    drawn(job, estimate)  # what the first call allocates for good
    before = high_water()
    drawn(replace(job, tiling=Tiling((32 * times,) * 3, patch, 0.25)), estimate)
    print(before, high_water())


def high_water() -> float:
    """Peak resident memory in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        memory(arguments.memory)
        return
    for times in (4, 8):
        run = subprocess.run(
            [sys.executable, __file__, "--memory", str(times)], capture_output=True, text=True, check=True
        )
        before, after = map(float, run.stdout.split())
        print(f"{times**3} patches of 32x32x32: peak {after:.1f} MiB, of which the drawing {after - before:.1f} MiB")
    for overlap in (0.25, 0.5):
        cost(arguments.config, overlap)


if __name__ == "__main__":
    main()
