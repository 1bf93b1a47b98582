"""Measure the overhead of the trainer: `vesuvius train` against a bare PyTorch loop with the same model.

    python tools/bench/overhead.py                                    # on a CPU: a few minutes
    python tools/bench/overhead.py --patch 72,136,136 --batch 4 --width 64 --turn-steps 10

Ours is all of `training/run.py`, its terminal the null device.  The bare loop has what a script would have: noise from
`torch.randn`, the network, mean squared error, `clip_grad_norm_`, fused AdamW, an EMA by one `lerp_` a tensor; it logs
nothing, mirrors nothing, and never reads its loss.  Both have the same network, batch, accumulation and precision, and
take voxels from the same few batches in memory: the loader (`tools/bench/loaders.py`), checkpoints, validation and
previews are not compared.

The two take turns in one process, `--turn-steps` steps each, so that other load on the machine disturbs both alike.
The monitor's thread works in our turns only, and is charged to them in full.  Figures are medians over the turns; the
overhead is the median over pairs of turns.  With `--same` the bare loop is compared with itself: the error of the
method.  With `--monitor` ours with its monitor is compared with ours without (`--turn-steps` should then be some
seconds).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: as `vesuvius train` does

import numpy as np
import torch
import zarr
from machine import describe_machine
from pairs import ratios, spread
from torch import Tensor

import vesuvius.loader.device
import vesuvius.training.run
from vesuvius.accelerator import choose_device
from vesuvius.commands.cli import triple
from vesuvius.config import Config
from vesuvius.config.load import dump_config
from vesuvius.diffusion.schedule import Schedule
from vesuvius.monitor.probes.system_sample import Watcher
from vesuvius.runlog.logfile import close_logs, log_to_terminal
from vesuvius.stream.feeder import Batch
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.stream.stream import PatchStream
from vesuvius.training.request import Request
from vesuvius.training.step.setup import autocast, build_network, parameter_count, resolve_amp
from vesuvius.training.step.step import TrainStep

_BATCHES = 8


class MemoryStream(PatchStream):
    """Repeats a few batches from memory; reads nothing.

    Attributes:
        kept: the batches; a class attribute, because the run creates the object.
    """

    kept: Sequence[Batch] = ()

    def _open_readers(self) -> None:
        self._batches = itertools.cycle(self.kept)

    def __next__(self) -> Batch:
        kept = next(self._batches)
        samples = tuple(replace(sample, index=self._next_sample + n) for n, sample in enumerate(kept.samples))
        self._next_sample += len(samples)
        return replace(kept, samples=samples)


class BareLoop:
    """A training script without a trainer."""

    def __init__(self, config: Config, batches: Sequence[Batch], device: torch.device) -> None:
        training = config.training
        self._config, self._device = config, device
        self._amp = resolve_amp(training.amp, device)
        self._network = build_network(config, device)
        self._optimizer = torch.optim.AdamW(self._network.parameters(), lr=training.lr, fused=True)
        self._ema = [p.detach().clone() for p in self._network.parameters()]
        self._schedule = Schedule.from_config(config.diffusion).to(device)
        voxels = [torch.from_numpy(batch.patches.copy()) for batch in batches]
        self._batches = itertools.cycle([v.pin_memory() if device.type == "cuda" else v for v in voxels])

    def step(self) -> None:
        """One optimizer step."""
        training = self._config.training
        for _ in range(training.accumulate_steps):
            raw = next(self._batches).to(self._device, non_blocking=True)
            x_0 = raw.unsqueeze(1).float() / 127.5 - 1
            t = torch.randint(0, self._config.diffusion.timesteps, (len(x_0),), device=self._device)
            eps = torch.randn_like(x_0)
            x_t = self._schedule.q_sample(x_0, eps, t)
            with autocast(self._device, self._amp):
                prediction: Tensor = self._network(x_t, t)
            error = prediction.float() - self._schedule.target("v", x_0, eps, t)
            (error.square().mean() / training.accumulate_steps).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), training.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for average, parameter in zip(self._ema, self._network.parameters(), strict=True):
                average.lerp_(parameter, 1 - training.ema_decay)


@dataclass
class Turns:
    """Lets ours and another loop take turns: called after each of our steps.

    Attributes:
        other: a step of the other loop; None: ours again, while the monitor takes no samples.
        ours, others: seconds per step in each turn; the first turn of both is a warm-up and does not count.
        our_turn: set during our turn.
    """

    other: Callable[[], None] | None
    turn_steps: int
    device: torch.device
    ours: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    our_turn: threading.Event = field(default_factory=threading.Event)
    _steps: int = 0
    _begun: float | None = None

    def __call__(self) -> None:
        self._steps += 1
        if self._steps % self.turn_steps:
            return
        now = self._now()
        if self._begun is not None:
            (self.ours if self.our_turn.is_set() else self.others).append((now - self._begun) / self.turn_steps)
        if self.other is None and self._begun is not None and self.our_turn.is_set():
            self.our_turn.clear()
        elif self.other is None:
            self.our_turn.set()
        else:
            self.our_turn.clear()
            other_begun = self._now()
            for _ in range(self.turn_steps):
                self.other()
            if self._begun is not None:
                self.others.append((self._now() - other_begun) / self.turn_steps)
            self.our_turn.set()
        self._begun = self._now()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write it as JSON if requested."""
    arguments = _parser().parse_args(argv)
    torch.set_num_threads(arguments.threads)
    device = choose_device()
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        config = _config(arguments)
        data = prepare_data(config.seed, config.data)
        batches = _read_batches(config, data)
        bare = BareLoop(config, batches, device)
        turns = Turns(None if arguments.monitor else bare.step, arguments.turn_steps, device)
        if arguments.same:
            same = BareLoop(config, batches, device)
            for _ in range(arguments.turn_steps * (arguments.turns + 1)):
                same.step()
                turns()
        else:
            train_ours(config, batches, turns)
        parameters = parameter_count(build_network(config, device))
    _report(arguments, turns, device, parameters)


def train_ours(config: Config, batches: Sequence[Batch], turns: Turns) -> None:
    """Train with `vesuvius.training.run`, taking turns after each optimizer step."""
    turns.our_turn.set()
    sample, apply = Watcher.sample, TrainStep.apply

    def sample_in_our_turn(watcher: Watcher) -> Any:
        turns.our_turn.wait()
        return sample(watcher)

    def apply_and_turn(step: TrainStep, *arguments: Any) -> Any:
        outcome = apply(step, *arguments)
        turns()
        return outcome

    MemoryStream.kept = batches
    source = Path("bench.yaml")
    source.write_text(dump_config(config), encoding="utf-8")
    with (
        mock.patch.object(vesuvius.loader.device, "PatchStream", MemoryStream),
        mock.patch.object(Watcher, "sample", sample_in_our_turn),
        mock.patch.object(TrainStep, "apply", apply_and_turn),
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.ExitStack() as ended,
    ):
        ended.callback(close_logs)
        log_to_terminal()
        vesuvius.training.run.train(Request(config, source, resume=False))


def _read_batches(config: Config, data: PreparedData) -> list[Batch]:
    options = StreamOptions.from_config(config.training, config.cluster)
    with PatchStream(data.job, options) as stream:
        return [
            replace(batch, arrays=(batch.patches.copy(),)) for batch, _ in zip(stream, range(_BATCHES), strict=False)
        ]


def _config(arguments: argparse.Namespace) -> Config:
    """A config on a volume of random voxels, written here."""
    shape = tuple(4 * edge for edge in arguments.patch)
    array = zarr.create_array("volume.zarr", shape=shape, dtype="uint8", chunks=(32, 32, 32), zarr_format=2)
    array[...] = np.random.default_rng(0).integers(1, 255, shape, dtype=np.uint8)
    steps = arguments.turn_steps * (1 + arguments.turns * (1 + arguments.monitor))
    width = arguments.width
    return Config.model_validate(
        {
            "name": "bench_overhead",
            "data": {
                "volumes": ({"path": "volume.zarr"},),
                "patch_size": arguments.patch,
                "normalize": {"low": 0.0, "high": 255.0},
            },
            "training": {
                "train_batch_size": arguments.batch,
                "accumulate_steps": arguments.accumulate,
                "workers": 0,
                "steps_per_epoch": steps,
                "warmup_steps": 0,
                "ema_decay": 0.999,
                "save_every": steps + 1,
                "validate_every": 0,
            },
            "diffusion": {"noise": "cosine"},  # the bare loop has no spectrum
            "model": {
                "channels": (width, 2 * width, 4 * width),
                "full_res_channels": width // 2,
                "attention_heads": 4,
            },
        }
    )


def _report(arguments: argparse.Namespace, turns: Turns, device: torch.device, parameters: int) -> None:
    overheads = [100 * (ratio - 1) for ratio in ratios(turns.ours, turns.others)]
    low, median, high = statistics.quantiles(overheads, n=4)
    about = describe_machine(["torch", "numpy"])
    patch = "x".join(map(str, arguments.patch))
    print(f"{about['machine']['cpu']}, {device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{parameters / 1e6:.1f} M parameters, patches {patch}, batch {arguments.batch} x {arguments.accumulate}")
    one, other = ("monitor", "no monitor") if arguments.monitor else ("bare" if arguments.same else "ours", "bare")
    print(f"{one}: {spread(turns.ours, '.4f')} s a step; {other}: {spread(turns.others, '.4f')}")
    print(f"{median:+.2f} %, quartiles {low:+.2f} % to {high:+.2f} %, {len(overheads)} x {arguments.turn_steps} steps")
    if arguments.json:
        found = about | {"parameters": parameters, "ours_s": turns.ours, "others_s": turns.others}
        found |= {"overhead_percent": median, "quartiles_percent": [low, high]}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    patch = triple(1, "16,64,64")
    parser.add_argument("--patch", type=patch, default=(16, 64, 64), help="z,y,x voxels (default: 16,64,64)")
    parser.add_argument("--batch", type=int, default=2, help="patches of a micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--width", type=int, default=24, help="channels of the network's first level")
    parser.add_argument("--turns", type=int, default=60, help="pairs of turns that count")
    parser.add_argument("--turn-steps", type=int, default=2, help="steps of a turn; more on a GPU, whose steps overlap")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--same", action="store_true", help="the bare loop against itself")
    parser.add_argument("--monitor", action="store_true", help="ours with its monitor against ours without")
    parser.add_argument("--json", type=lambda path: Path(path).absolute(), help="also write the figures to this file")
    return parser


if __name__ == "__main__":
    main()
