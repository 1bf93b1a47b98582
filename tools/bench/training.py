"""Compare validation losses of the default network and a plain full-resolution U-Net of equal compute.

    vesuvius volume synth volumes/bench_training.zarr --shape 128,384,384
    python tools/bench/training.py --volume volumes/bench_training.zarr --steps 600 --json training.json

Both networks see the same patches, noise and timesteps in the same order, in turns of a few steps, so that other load
on the machine disturbs both alike.  The plain one has three levels of 1 : 2 : 4 channels at full, half and quarter
resolution, no stem and no full-resolution ends; its width is the one whose forward pass has most nearly the same number
of floating-point operations.  The validation loss is the training loss of the averaged weights on patches of the
held-out slab, with fixed noise and timesteps that cover all noise levels evenly.  Seconds are those of training steps
alone.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: as `vesuvius train` does

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vesuvius.commands.cli import triple
from vesuvius.config import Config, ModelConfig, Triple
from vesuvius.diffusion.network.unet import UNet
from vesuvius.diffusion.randomness import Purpose, sample_noise, stratified_timesteps
from vesuvius.diffusion.schedule import Schedule, loss_per_sample
from vesuvius.loader.device import DeviceFeed
from vesuvius.loader.intensity import intensity_scales, normalised
from vesuvius.monitor.clock import HostClock
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.start.prepare import IntensityRanges, PreparedData, prepare_data
from vesuvius.training.step.setup import build_network, choose_device, parameter_count
from vesuvius.training.step.step import TrainStep, learning_rate
from vesuvius.training.validation.fixed_patches import read_fixed_patches

_WIDTHS = range(4, 257, 4)
_TURN_STEPS = 5


@dataclass
class Contender:
    """One network in training, and its validation losses by (step, seconds of training, loss)."""

    name: str
    config: Config
    step: TrainStep
    flop: int
    seconds: float = 0.0
    curve: list[tuple[int, float, float]] = field(default_factory=list)


def main() -> None:
    """Train both, print the losses during training and a table at the end."""
    arguments = _parser().parse_args()
    torch.set_num_threads(arguments.threads)
    device = choose_device()
    ours = ModelConfig(
        channels=(arguments.width, 2 * arguments.width, 4 * arguments.width),
        full_res_channels=arguments.width // 2,
        attention_heads=4,
    )
    configs = {
        "default": _config(arguments, ours),
        "plain": _config(arguments, plain_of_equal_compute(ours, arguments.patch)),
    }
    data = prepare_data(arguments.seed, configs["default"].data)
    greys = data.intensity_ranges(configs["default"].data)
    contenders = [_contender(name, config, device) for name, config in configs.items()]
    held_out = HeldOut(configs["default"], data, greys, arguments.validation, device)
    _train(contenders, arguments, data, greys, held_out, device)
    _report(contenders, arguments)


def plain_of_equal_compute(model: ModelConfig, patch_zyx: Triple) -> ModelConfig:
    """The plain full-resolution U-Net whose forward pass costs most nearly as much as that of `model`."""
    wanted = forward_flop(model, patch_zyx)
    candidates = [
        model.model_copy(update={"channels": (c, 2 * c, 4 * c), "stem_stride": (1, 1, 1), "full_res_channels": 0})
        for c in _WIDTHS
    ]
    return min(candidates, key=lambda candidate: abs(forward_flop(candidate, patch_zyx) / wanted - 1))


def forward_flop(model: ModelConfig, patch_zyx: Triple) -> int:
    """Floating-point operations of one forward pass of one patch."""
    with torch.device("meta"):
        network, x, t = UNet(model), torch.empty(1, 1, *patch_zyx), torch.zeros(1, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(x, t)
    return counter.get_total_flops()


class HeldOut:
    """Patches of the validation slabs with fixed noise and timesteps."""

    def __init__(
        self, config: Config, data: PreparedData, greys: IntensityRanges, count: int, device: torch.device
    ) -> None:
        patches = torch.from_numpy(read_fixed_patches(data, config.data, count).patches)
        self._x_0 = normalised(patches.unsqueeze(1), intensity_scales(greys.volumes[:1])).to(device)
        shape = (1, *config.data.patch_size)
        self._eps = sample_noise(config.seed, range(count), shape, device, purpose=Purpose.VALIDATION)
        self._t = torch.from_numpy(stratified_timesteps(config.seed, 0, count, config.diffusion.timesteps)).to(device)
        self._schedule = Schedule.from_config(config.diffusion).to(device)
        self._config, self._batch = config, config.training.train_batch_size

    def loss(self, step: TrainStep) -> float:
        """Mean weighted loss of the averaged weights."""
        parts: list[Tensor] = []
        batches = (tensor.split(self._batch) for tensor in (self._x_0, self._eps, self._t))
        for x_0, eps, t in zip(*batches, strict=True):
            prediction = step.denoiser("ema")(self._schedule.q_sample(x_0, eps, t), t, None)
            parts.append(loss_per_sample(prediction, x_0, eps, t, self._schedule, self._config.diffusion))
        return float(torch.cat(parts).mean())


def _train(
    contenders: Sequence[Contender],
    arguments: argparse.Namespace,
    data: PreparedData,
    greys: IntensityRanges,
    held_out: HeldOut,
    device: torch.device,
) -> None:
    config = contenders[0].config
    options = StreamOptions.from_config(config.training, config.cluster)
    feed = DeviceFeed(device, options, data.job, greys.volumes)
    with feed.open():
        for first in range(0, arguments.steps, _TURN_STEPS):
            numbers = range(first, min(first + _TURN_STEPS, arguments.steps))
            taken = (feed.next(HostClock()) for _ in numbers)
            batches = [(batch.image.clone(), stored.indices) for batch, stored in taken]
            for contender in contenders:
                _turn(contender, numbers, batches, device)
            done = numbers[-1] + 1
            if done % arguments.validate_every == 0 or done == arguments.steps:
                for contender in contenders:
                    contender.curve.append((done, contender.seconds, held_out.loss(contender.step)))
                print(
                    "  ".join(f"{c.name} step {done} {c.seconds:.0f} s {c.curve[-1][2]:.5f}" for c in contenders),
                    flush=True,
                )


def _turn(
    contender: Contender,
    numbers: range,
    batches: Sequence[tuple[Tensor, np.ndarray[Any, Any]]],
    device: torch.device,
) -> None:
    config = contender.config
    started = device_time(device)
    for number, (x_0, indices) in zip(numbers, batches, strict=True):
        t = stratified_timesteps(config.seed, number, config.global_batch, config.diffusion.timesteps)
        contender.step.accumulate(x_0, indices, t)
        contender.step.apply(learning_rate(number, config.training))
    contender.seconds += device_time(device) - started


def device_time(device: torch.device) -> float:
    """Seconds of a clock, read after the GPU has finished all launched work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _contender(name: str, config: Config, device: torch.device) -> Contender:
    step = TrainStep(config, build_network(config, device), Schedule.from_config(config.diffusion), device)
    flop = forward_flop(config.model, config.data.patch_size)
    millions = parameter_count(step.network) / 1e6
    print(
        f"{name}: channels {config.model.channels}, {millions:.2f} M parameters, {flop / 1e9:.1f} GFLOP forward a patch"
    )
    return Contender(name, config, step, flop)


def _config(arguments: argparse.Namespace, model: ModelConfig) -> Config:
    return Config.model_validate(
        {
            "name": "bench_training",
            "seed": arguments.seed,
            "data": {"volumes": ({"path": str(arguments.volume)},), "patch_size": arguments.patch},
            "training": {
                "train_batch_size": arguments.batch,
                "workers": 0,
                "steps_per_epoch": arguments.steps,
                "lr": arguments.lr,
                "warmup_steps": min(50, arguments.steps // 4),
                "ema_decay": 0.99,
            },
            "diffusion": {"noise": "cosine", "min_snr_gamma": 5.0},  # one channel in, as the peers have
            "model": model.model_dump(),
        }
    )


def _report(contenders: Sequence[Contender], arguments: argparse.Namespace) -> None:
    print(f"\n| step | {' | '.join(f'{c.name}: seconds | loss' for c in contenders)} |")
    print(f"| --- |{' --- | --- |' * len(contenders)}")
    for rows in zip(*(c.curve for c in contenders), strict=True):
        print(f"| {rows[0][0]} | {' | '.join(f'{seconds:.0f} | {loss:.5f}' for _, seconds, loss in rows)} |")
    default, plain = contenders
    reached = next((seconds for _, seconds, loss in default.curve if loss <= plain.curve[-1][2]), None)
    when = "never" if reached is None else f"after {reached:.0f} s of {plain.curve[-1][1]:.0f} s"
    print(f"\nthe default network reaches the plain one's last loss {when}")
    if arguments.json:
        found = {c.name: {"channels": c.config.model.channels, "flop": c.flop, "curve": c.curve} for c in contenders}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--volume", type=Path, default=Path("volumes/bench_training.zarr"), help="a zarr volume")
    patch = triple(1, "16,64,64")
    parser.add_argument("--patch", type=patch, default=(16, 64, 64), help="z,y,x voxels (default: 16,64,64)")
    parser.add_argument("--batch", type=int, default=4, help="patches of a step")
    parser.add_argument("--width", type=int, default=28, help="channels of the default network's first level")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of each network")
    parser.add_argument("--validate-every", type=int, default=50, help="steps between validation losses")
    parser.add_argument("--validation", type=int, default=64, help="held-out patches")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate of both")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the curves to this file")
    return parser


if __name__ == "__main__":
    main()
