"""Compare our U-Net with MONAI's on a CPU: bytes kept for the backward pass and seconds per training step.

    python tools/bench/model.py                                   # batch 2 of 1x32x64x64, 7.2 M parameters: 3 minutes
    python tools/bench/model.py --switches                        # also ours with each of its switches
    python tools/bench/model.py --full-size --systems ""          # only the bytes of one 72x136x136 patch, 154 M

ours: `UNet`.  plain: the same without stem and full-resolution block, all levels at full width from the first voxel on.
monai: `DiffusionModelUNet(use_flash_attention=True)` with attention at its lowest level (pip install monai).  All have
the number of parameters of MONAI's U-Net of 32, 64 and 128 channels, within 3 %, by their widths.

A step is forward, mean squared error and backward in float32; no optimizer.  Each measurement is a process: one warm-up
step, then the median of `--steps` steps.  Systems take turns; figures are medians with the extremes.  Saved bytes are
those that autograd's saved-tensor hooks see in one more step: storages once, without parameters.  CPU seconds are those
of all threads; if other programs run, compare CPU seconds, with --threads 1.

--full-size: the same bytes for the default model at 72x136x136, traced, without memory and without computing.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is shared with other tools
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: as `vesuvius train` does

import torch
from bench.machine import describe_machine
from bench.pairs import ratios, spread, turns
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from vesuvius.commands.cli import triple
from vesuvius.config import Config, ModelConfig, Triple
from vesuvius.diffusion.network.unet import UNet
from vesuvius.training.step.setup import build_meta_network, build_network, execution

Row = dict[str, Any]

MIB, GIB = 2**20, 2**30
LARGEST_DEVIATION = 0.03  # relative difference of parameters that counts as equal
LAST_LEVEL_RANGE = 0.12  # share by which the last level may leave the proportions of the widths


@dataclass(frozen=True)
class Spec:
    """A network as plain data."""

    name: str
    kind: Literal["vesuvius", "monai"]
    channels: tuple[int, ...]  # width of each level, finest first
    architecture: dict[str, Any] = field(default_factory=dict)  # of `ModelConfig`, or MONAI's arguments
    switches: dict[str, Any] = field(default_factory=dict)  # of `TrainingConfig`; MONAI: `channels_last`
    steps: tuple[int, int] = (4, 4)  # the first width is a multiple of the first number, the last width of the second

    def with_channels(self, channels: tuple[int, ...]) -> Spec:
        """A copy with other widths; a full-resolution block of ours stays half as wide as the first level."""
        architecture = dict(self.architecture)
        if architecture.get("full_res_channels"):
            architecture["full_res_channels"] = channels[0] // 2
        return dataclasses.replace(self, channels=channels, architecture=architecture)

    def switched(self, **switches: Any) -> Spec:
        """A copy that is computed differently."""
        words = ", ".join(f"{key} {value}" for key, value in switches.items())
        return dataclasses.replace(self, name=f"{self.name}, {words}", switches=switches)


def _monai(name: str, channels: tuple[int, ...], blocks: int, group: int, steps: tuple[int, int]) -> Spec:
    blocks_of = {"num_res_blocks": blocks, "num_head_channels": group, "norm_num_groups": group}  # divide the widths
    return Spec(name, "monai", channels, blocks_of, steps=steps)


_NO_STEM = {"stem_stride": (1, 1, 1), "full_res_channels": 0, "attention_heads": 4}
SYSTEMS = {
    "ours": Spec("ours", "vesuvius", (28, 56, 112), {"full_res_channels": 14, "attention_heads": 4}),
    "plain": Spec("plain", "vesuvius", (28, 56, 112), _NO_STEM),
    "monai": _monai("monai", (32, 64, 128), 1, 32, (32, 32)),
}
FULL_PATCH, DEFAULT_MODEL = (72, 136, 136), ModelConfig()
_HEADS = {"attention_heads": DEFAULT_MODEL.attention_heads}
FULL_OURS = Spec(
    "ours", "vesuvius", DEFAULT_MODEL.channels, _HEADS | {"full_res_channels": DEFAULT_MODEL.full_res_channels}
)
# With 4 levels, MONAI's attention sees 9x17x17 voxels of the default patch, as in ours; with 3, 18x34x34.
FULL_PEERS = [
    Spec("plain", "vesuvius", (64, 128, 256, 512), _NO_STEM | _HEADS, {}, (8, 8)),
    _monai("monai, 4 levels", (64, 128, 256, 512), 2, 16, (32, 16)),
    _monai("monai, 3 levels", (128, 256, 512), 2, 16, (32, 16)),
]
LEVELS = [{"checkpoint_levels": (0,)}, {"checkpoint_levels": (0, 1)}]
NOT_RECOMPUTED, LAST = {"recompute_norm": False}, {"channels_last": True}
SWITCHES = [NOT_RECOMPUTED, LAST, LAST | NOT_RECOMPUTED, *LEVELS]


# ---- the networks


def experiment(spec: Spec, patch_zyx: Triple, batch: int = 1) -> Config:
    """The config of a run of this network; with cosine noise ours sees one channel, as MONAI's does."""
    any_patch = {"stem_stride": (1, 1, 1), "full_res_channels": 0, "attention_heads": 0}
    model = (
        {"channels": spec.channels} | spec.architecture if spec.kind == "vesuvius" else {"channels": (4,)} | any_patch
    )
    return Config.model_validate(
        {
            "name": "compare",
            "data": {
                "volumes": ({"path": "none"},),
                "patch_size": patch_zyx,
                "augment": {"rot90": patch_zyx[1] == patch_zyx[2]},
            },
            "training": {"train_batch_size": batch, "channels_last": False, "compile": False} | spec.switches,
            "diffusion": {"noise": "cosine"},
            "model": model,
        }
    )


def build(spec: Spec, config: Config, device: torch.device) -> nn.Module:
    """The network, called with x [B, 1, Z, Y, X] and t [B]; on the meta device it has no memory for its weights."""
    if spec.kind == "vesuvius":
        return build_meta_network(config) if device.type == "meta" else build_network(config, device)
    from monai.networks.nets import DiffusionModelUNet

    with device:
        network: nn.Module = DiffusionModelUNet(
            spatial_dims=3,
            in_channels=1,
            out_channels=1,
            channels=spec.channels,
            attention_levels=(False,) * (len(spec.channels) - 1) + (True,),
            use_flash_attention=True,
            **spec.architecture,
        )
    return network.to(memory_format=torch.channels_last_3d) if config.training.channels_last else network


def count_parameters(spec: Spec) -> int:
    """Trainable weights, without memory for them."""
    network = build(spec, experiment(spec, (64, 64, 64)), torch.device("meta"))
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def matched(spec: Spec, parameters: int) -> Spec:
    """The spec with the widths that come nearest to `parameters`.

    The proportions stay, except that the last level may deviate by up to 12 %: of the widths within 3 %, those nearest
    to the proportions are taken, or, if there are none, those nearest in parameters.
    """
    first_step, last_step = spec.steps
    proportion = [width / spec.channels[0] for width in spec.channels]
    # Almost all weights grow with the square of the width.
    guess = spec.channels[0] * math.sqrt(parameters / count_parameters(spec)) / first_step
    found: list[tuple[float, float, Spec]] = []
    for first in {max(1, math.floor(guess) + offset) * first_step for offset in (-1, 0, 1, 2)}:
        inner = [round(first * factor) for factor in proportion[:-1]]
        ideal = first * proportion[-1]
        lowest, highest = ideal * (1 - LAST_LEVEL_RANGE), ideal * (1 + LAST_LEVEL_RANGE)
        for last in range(math.ceil(lowest / last_step) * last_step, math.floor(highest) + 1, last_step):
            candidate = spec.with_channels((*inner, last))
            deviation = abs(count_parameters(candidate) / parameters - 1)
            found.append((max(deviation, LARGEST_DEVIATION), abs(last / ideal - 1) + deviation, candidate))
    return min(found, key=lambda entry: entry[:2])[2]


# ---- figures


def saved_bytes(network: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps between `forward` and its backward pass; inputs count, parameters do not."""
    parameters = {p.untyped_storage()._cdata for p in network.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    del out  # until here the graph kept every storage, so that no address was used twice
    return sum(kept.values())


def saved_bytes_without_memory(spec: Spec, amp: Literal["off", "bf16"], batch: int) -> int:
    """The saved bytes of patches of the default size, traced with tensors that have shapes only, for CPU kernels.

    CUDA's autocast computes GroupNorm in float32, the CPU's in bfloat16: MONAI's network, which leaves its norms to
    autocast, keeps more on a GPU than this returns.
    """
    config = experiment(spec, FULL_PATCH)
    with FakeTensorMode():
        if spec.kind == "vesuvius":  # its own initial weights have values, which these tensors do not have
            network: nn.Module = UNet(config.model, execution=execution(config.training))
        else:
            network = build(spec, config, torch.device("cpu"))
        x, t = torch.empty(batch, 1, *FULL_PATCH), torch.zeros(batch, dtype=torch.int64)

        def forward() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16) if amp == "bf16" else nullcontext():
                out = network(x, t)
            return functional.mse_loss(out.float(), torch.empty_like(x))

        return saved_bytes(network, forward)


def measure(spec: Spec, patch_zyx: Triple, batch: int, steps: int) -> Row:
    """Seconds and CPU seconds of a step, and its saved bytes, in this process."""
    network = build(spec, experiment(spec, patch_zyx, batch), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(2, batch, 1, *patch_zyx, generator=generator).unbind(0)
    t = torch.arange(batch) * 1000 // batch

    def forward() -> Tensor:
        return functional.mse_loss(network(x, t), target)

    seconds, cpu_seconds = [], []
    for _ in range(1 + steps):
        started, cpu_started = time.perf_counter(), time.process_time()
        forward().backward()
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
        network.zero_grad(set_to_none=True)
    saved = saved_bytes(network, forward)
    return {"s": statistics.median(seconds[1:]), "cpu_s": statistics.median(cpu_seconds[1:]), "saved_bytes": saved}


def measured_rows(args: argparse.Namespace) -> list[Row]:
    """Measure each system in processes of its own, in turns, at MONAI's parameters (at ours without MONAI)."""
    reference = SYSTEMS["monai" if find_spec("monai") else "ours"]
    parameters, specs = count_parameters(reference), []
    for name in args.systems:
        spec = SYSTEMS[name] if name == reference.name else matched(SYSTEMS[name], parameters)
        switches = {"ours": SWITCHES, "monai": [LAST]}.get(name, []) if args.switches else []
        specs += [spec, *(spec.switched(**each) for each in switches)]
    found: dict[str, list[Row]] = {spec.name: [] for spec in specs}
    by_name = {spec.name: spec for spec in specs}
    for number, name in turns(list(found), args.repeats):
        what = repr((dataclasses.asdict(by_name[name]), args.patch, args.batch, args.steps, args.threads))
        done = subprocess.run([sys.executable, __file__, "--measure", what], check=True, stdout=subprocess.PIPE)
        found[name].append(json.loads(done.stdout))
        print(f"  {number + 1}/{args.repeats} {name}: {found[name][-1]['s']:.3f} s a step", file=sys.stderr)
    rows = []
    for spec in specs:
        row: Row = {"system": spec.name, "channels": _widths(spec), "parameters": count_parameters(spec)}
        for key in ("saved_bytes", "s", "cpu_s"):
            row[key] = [each[key] for each in found[spec.name]]
            row[f"{key}_to_monai"] = "-"
            if "monai" in found:
                of_monai = [each[key] for each in found["monai"]]
                row[f"{key}_to_monai"] = f"{statistics.median(ratios(row[key], of_monai)):.2f}"
        rows.append(row)
    return rows


def full_size_rows() -> list[Row]:
    """Saved bytes of the first and of each further patch of the default model, its variants and its peers."""
    parameters, rows = count_parameters(FULL_OURS), []
    peers = [peer for peer in FULL_PEERS if peer.kind == "vesuvius" or find_spec("monai")]
    variants = [FULL_OURS.switched(**each) for each in (NOT_RECOMPUTED, *LEVELS)]
    for spec in [FULL_OURS, *variants, *(matched(peer, parameters) for peer in peers)]:
        print(f"  tracing {spec.name} {spec.channels}", file=sys.stderr)
        row: Row = {"system": spec.name, "channels": _widths(spec), "parameters": count_parameters(spec)}
        for amp in ("bf16", "off"):
            first, both = (saved_bytes_without_memory(spec, amp, batch) for batch in (1, 2))
            row |= {f"saved_bytes_{amp}": first, f"saved_bytes_per_further_patch_{amp}": both - first}
        rows.append(row)
    return rows


def _widths(spec: Spec) -> str:
    full = spec.architecture.get("full_res_channels")
    return (f"{full} + " if full else "") + "/".join(map(str, spec.channels))


# ---- the command


def print_markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    for cells in (heads, ["---"] * len(heads), *lines):
        print(f"| {' | '.join(cells)} |")


def print_measured(rows: Sequence[Row]) -> None:
    heads = ["system", "channels", "parameters M", "saved MiB", "to monai", "s a step", "to monai", "CPU s", "to monai"]
    lines = []
    for row in rows:
        cells = [row["system"], row["channels"], f"{row['parameters'] / 1e6:.2f}"]
        cells += [f"{statistics.median(row['saved_bytes']) / MIB:.0f}", row["saved_bytes_to_monai"]]
        cells += [spread(row["s"], ".2f"), row["s_to_monai"], spread(row["cpu_s"], ".2f"), row["cpu_s_to_monai"]]
        lines.append(cells)
    print_markdown(heads, lines)


def print_full_size(rows: Sequence[Row]) -> None:
    reference = next((row for row in rows if row["system"] == "monai, 4 levels"), None)
    heads, lines = ["system", "channels", "parameters M"], []
    heads += ["bf16: saved GiB (each further patch)", "to monai, 4 levels", "float32", "to monai, 4 levels"]
    for row in rows:
        cells = [row["system"], row["channels"], f"{row['parameters'] / 1e6:.1f}"]
        for amp in ("bf16", "off"):
            first, further = row[f"saved_bytes_{amp}"], row[f"saved_bytes_per_further_patch_{amp}"]
            share = reference and first / reference[f"saved_bytes_{amp}"]
            cells += [f"{first / GIB:.2f} ({further / GIB:.2f})", "-" if share is None else f"{share:.2f}"]
        lines.append(cells)
    print_markdown(heads, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patch", type=triple(1, "32,64,64"), default=(32, 64, 64), metavar="Z,Y,X")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="processes per system")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per process")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    default = [name for name in SYSTEMS if name != "monai" or find_spec("monai")]
    parser.add_argument("--systems", type=lambda text: text.split(",") if text else [], default=default)
    parser.add_argument("--switches", action="store_true", help="also with each switch changed")
    parser.add_argument("--full-size", action="store_true", help="also the bytes of the default model at 72x136x136")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument("--measure", type=ast.literal_eval, help=argparse.SUPPRESS)  # one system, once, in this process
    args = parser.parse_args()
    if args.measure:
        spec, patch, batch, steps, threads = args.measure
        torch.set_num_threads(threads)
        print(json.dumps(measure(Spec(**spec), patch, batch, steps)))
        return
    about = describe_machine(("torch", "numpy", "monai"))
    print(f"{about['machine']}, {about['versions']}, {args.threads} threads")
    rows = measured_rows(args) if args.systems else []
    if rows:
        patch = "x".join(map(str, args.patch))
        print(f"batch {args.batch} of 1x{patch}, float32, {args.repeats} processes of {args.steps} steps\n")
        print_measured(rows)
    full = full_size_rows() if args.full_size else []
    if full:
        print("\ntraced: 1x72x136x136, bytes kept for the backward pass\n")
        print_full_size(full)
    if args.json:
        args.json.write_text(json.dumps(about | {"rows": rows, "full_size": full}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
