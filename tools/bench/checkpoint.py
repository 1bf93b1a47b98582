"""Time a checkpoint: a synchronous save against one written by a thread.

    python tools/bench/checkpoint.py                                # 40 M parameters, 1.3 GB of memory: a minute
    python tools/bench/checkpoint.py --parameters-m 155 --repeats 7 --directory runs

The state is that of a network of 256-channel 3D convolutions with AdamW and one average: 16 bytes per parameter.  The
copy takes as much again.  Printed, as medians with minimum and maximum:

synchronous  `save_checkpoint`, from the call to the last flush
triggering   `CheckpointWriter.save`: wait of the step that triggers a save.  Target: a tenth of a synchronous save
first        the same for the first save of a writer, which allocates the buffers
step         a step of a small convolution on the training's thread, alone and while the writer runs

Kinds of save alternate.  With a GPU, state and step are on the GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: as `vesuvius train` does

import torch
from pairs import spread
from torch import nn

from vesuvius.config import TrainingConfig
from vesuvius.training.checkpoint.save import CheckpointWriter, save_checkpoint

CONFIG = "name: bench\n"
CHANNELS = 256


def main() -> None:
    """Measure and print; with --json also write the seconds."""
    arguments = _parser().parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    state, step = make_state(arguments.parameters_m, device), make_step(device)
    size = 16 * arguments.parameters_m / 1e3
    print(f"{arguments.parameters_m:g} M parameters, {size:.2f} GB, {device}, {torch.get_num_threads()} threads")
    arguments.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        seconds = measure(Path(directory), state, step, arguments.repeats)
    for name, values in seconds.items():
        print(f"{name:28} {spread([1e3 * value for value in values], '.1f')} ms, n={len(values)}")
    ratio = statistics.median(seconds["triggering"]) / statistics.median(seconds["synchronous"])
    busy = statistics.mean(seconds["step with the writer running"]) / statistics.mean(seconds["step alone"])
    print(f"triggering / synchronous {100 * ratio:.1f} %; steps are {busy:.2f} x as long while the writer runs (means)")
    if arguments.json:
        arguments.json.write_text(json.dumps(seconds, indent=1) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--parameters-m", type=float, default=40.0, help="millions of weights")
    parser.add_argument("--repeats", type=int, default=5, help="saves of each kind")
    parser.add_argument("--directory", type=Path, default=Path(), help="folder on the disk to measure")
    parser.add_argument("--json", type=Path, help="also write all seconds to this file")
    return parser


def make_state(parameters_m: float, device: torch.device) -> dict[str, Any]:
    """A training state after its first step."""
    count = max(1, round(parameters_m * 1e6 / (27 * CHANNELS**2)))
    network = nn.ModuleList([nn.Conv3d(CHANNELS, CHANNELS, 3, device=device) for _ in range(count)])
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    for parameter in network.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    average = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    return {
        "model": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "averages": {"ema": {"weights": average, "updates": torch.ones((), device=device)}},
    }


def make_step(device: torch.device) -> Callable[[], None]:
    """Forward and backward of a small convolution."""
    layer, values = nn.Conv3d(32, 32, 3, device=device), torch.randn(1, 32, 24, 48, 48, device=device)

    def step() -> None:
        layer(values).square().mean().backward()
        layer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(5):
        step()
    return step


def measure(directory: Path, state: dict[str, Any], step: Callable[[], None], repeats: int) -> dict[str, list[float]]:
    """Measure seconds of each save and each step."""
    waited, handed = directory / "synchronous", directory / "thread"
    seconds: dict[str, list[float]] = {"synchronous": [], "triggering": [], "until written": []}
    seconds |= {"first": [], "step alone": [], "step with the writer running": []}
    save_checkpoint(waited, 1, state, CONFIG, TrainingConfig(keep_last=1))
    with CheckpointWriter(handed, TrainingConfig(keep_last=1), CONFIG) as writer:
        writer.save(1, state)
        for number in range(2, repeats + 2):
            writer.wait()
            seconds["synchronous"] += timed(
                lambda n=number: save_checkpoint(waited, n, state, CONFIG, TrainingConfig(keep_last=1))
            )
            seconds["step alone"] += [second for _ in range(10) for second in timed(step)]
            began = time.perf_counter()
            seconds["triggering"] += timed(lambda n=number: writer.save(n, state))
            while not (handed / f"step_{number:08d}").is_dir():
                seconds["step with the writer running"] += timed(step)
            seconds["until written"].append(time.perf_counter() - began)
    for number in range(repeats):
        release_free_memory()
        with CheckpointWriter(handed, TrainingConfig(keep_last=1), CONFIG) as writer:
            seconds["first"] += timed(lambda n=number: writer.save(n + repeats + 2, state))
    return seconds


def release_free_memory() -> None:
    """Return free memory to the system, so that the next writer's buffers are fresh, as in a run."""
    ctypes.CDLL(None).malloc_trim(0)


def timed(act: Callable[[], object]) -> list[float]:
    """Return the seconds of a call, as a list of one."""
    started = time.perf_counter()
    act()
    return [time.perf_counter() - started]


if __name__ == "__main__":
    main()
