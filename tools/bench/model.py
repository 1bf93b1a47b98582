"""Compare our U-Net with its peers on a CPU: bytes kept for the backward pass and seconds per training step.

    python tools/bench/model.py                                   # batch 2 of 1x32x64x64, 7.2 M parameters: 3 minutes
    python tools/bench/model.py --switches                        # also ours with each of its switches
    python tools/bench/model.py --full-size --systems ""          # only the bytes of one 72x136x136 patch, 155 M
    python tools/bench/model.py --systems ours,monai --repeats 3 --json bench.json

ours, plain, monai, diffusers: see `networks.py`; all in float32, with the number of parameters of MONAI's U-Net
of 32, 64 and 128 channels, within 3 %, matched by the widths of the others.  Ours keeps the proportions of
the default model (1 : 2 : 4, a full-resolution block of a quarter of the first).

A step is forward, mean squared error and backward; no optimizer, whose share is the same for all.  Each measurement is
a separate process: one warm-up step, then the median of `--steps` steps.  Systems take turns, `--repeats` times,
in a rotating order; figures are medians with minimum and maximum over the processes.  Saved bytes are those that
autograd's saved-tensor hooks see in one more step: storages once, without parameters.  CPU seconds are those of all
threads; if other programs run, compare CPU seconds, with --threads 1.

--full-size: the same bytes for the real default model at 72x136x136, traced, without memory and without computing.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is shared with other tools

from bench.machine import describe_machine
from bench.networks import (
    FULL_MONAI,
    FULL_OURS,
    FULL_PATCH,
    FULL_PLAIN,
    MONAI_BLOCKS,
    Spec,
    build,
    count_parameters,
    experiment,
    matched,
    saved_bytes,
    saved_bytes_without_memory,
)
from gpu.report import GIB, cell, print_markdown

from vesuvius.commands.cli import triple
from vesuvius.config import Triple
from vesuvius.errors import one_line

Row = dict[str, Any]

PACKAGES = ("torch", "numpy", "monai", "diffusers", "einops")
MIB = 2**20
WARM_UP_STEPS = 1
FIGURES = ("step_s", "step_cpu_s", "saved_bytes")
# As `vesuvius train`: unbounded spinning makes a step ten times as long while another process is busy.
SPIN = {"GOMP_SPINCOUNT": "10000"}

OURS = Spec("ours", "vesuvius", (28, 56, 112), {"full_res_channels": 14, "attention_heads": 4})
PLAIN = Spec(
    "plain", "vesuvius", (28, 56, 112), {"stem_stride": (1, 1, 1), "full_res_channels": 0, "attention_heads": 4}
)
MONAI = Spec("monai", "monai", (32, 64, 128), {"num_res_blocks": 1, **MONAI_BLOCKS}, steps=(32, 32))
# 4 heads, as ours: what the constructor calls attention_head_dim is the number of heads in its blocks.
DIFFUSERS = Spec(
    "diffusers",
    "diffusers",
    (32, 64, 128),
    {"layers_per_block": 1, "norm_num_groups": 8, "cross_attention_dim": 32, "attention_head_dim": 4},
    steps=(8, 8),
)
SYSTEMS = {spec.name: spec for spec in (OURS, PLAIN, MONAI, DIFFUSERS)}


def switched(spec: Spec, compiled: bool) -> list[Spec]:
    """Ours with one switch at a time changed from its default, and together if they affect the same kernels."""
    specs = [
        spec.with_switches("ours, recompute_norm off", recompute_norm=False),
        spec.with_switches("ours, channels_last", channels_last=True),
        spec.with_switches("ours, channels_last, recompute_norm off", channels_last=True, recompute_norm=False),
        spec.with_switches("ours, checkpoint_levels [0]", checkpoint_levels=(0,)),
        spec.with_switches("ours, checkpoint_levels [0, 1]", checkpoint_levels=(0, 1)),
    ]
    return [*specs, spec.with_switches("ours, compile", compile=True)] if compiled else specs


# ---- the child: one measurement


def measure(spec: Spec, patch_zyx: Triple, batch: int, steps: int, threads: int | None) -> Row:
    """Measure seconds of each step and the saved bytes of one, in this process."""
    import torch
    from torch import Tensor
    from torch.nn import functional

    if threads:
        torch.set_num_threads(threads)
    config = experiment(spec, patch_zyx, batch)
    network = build(spec, config, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(2, batch, 1, *patch_zyx, generator=generator).unbind(0)
    t = torch.arange(batch) * 1000 // batch

    def forward() -> Tensor:
        return functional.mse_loss(network(x, t), target)

    seconds, cpu_seconds = [], []
    for _ in range(WARM_UP_STEPS + steps):
        started, cpu_started = time.perf_counter(), time.process_time()
        forward().backward()
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
        network.zero_grad(set_to_none=True)
    return {
        "step_s": statistics.median(seconds[WARM_UP_STEPS:]),
        "step_cpu_s": statistics.median(cpu_seconds[WARM_UP_STEPS:]),
        "saved_bytes": saved_bytes(network, forward),
    }


def measure_here(result: Path, spec: dict[str, Any], *arguments: Any) -> int:
    """Write one measurement as JSON, or print the error.  Returns the exit code."""
    try:
        result.write_text(json.dumps(measure(Spec(**spec), *arguments)))
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


# ---- the parent: takes turns


@dataclass(frozen=True)
class Entry:
    """One line of the table: the figures of each repeat, and the error, if any."""

    spec: Spec
    parameters: int
    samples: list[Row] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def measure_in_turn(entries: Sequence[Entry], arguments: argparse.Namespace) -> None:
    """Fill the entries, one process at a time.  An entry that failed is not tried again."""
    for repeat in range(arguments.repeats if entries else 0):
        shift = repeat % len(entries)
        for entry in [*entries[shift:], *entries[:shift]]:
            if not entry.errors:
                _measure_once(entry, arguments)
                outcome = entry.errors[-1] if entry.errors else f"{entry.samples[-1]['step_s']:.3f} s a step"
                print(f"  {repeat + 1}/{arguments.repeats} {entry.spec.name}: {outcome}", file=sys.stderr)


def _measure_once(entry: Entry, arguments: argparse.Namespace) -> None:
    what = (dataclasses.asdict(entry.spec), arguments.patch, arguments.batch, arguments.steps, arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, f"--measure={what!r}", f"--result={result}"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=arguments.timeout, env=SPIN | os.environ
            )
        except subprocess.TimeoutExpired:
            entry.errors.append(f"no result within {arguments.timeout:.0f} s")
            return
        if done.returncode == 0:
            entry.samples.append(json.loads(result.read_text()))
            return
    sys.stderr.write(done.stderr)
    entry.errors.append((done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1])


def make_entries(arguments: argparse.Namespace) -> list[Entry]:
    """The systems asked for, at the parameters of MONAI's U-Net, or of ours if MONAI is not installed."""
    reference = MONAI if importlib.util.find_spec("monai") else OURS
    parameters = count_parameters(reference)
    print(f"equal parameters: those of {reference.name} {reference.channels}, {parameters}", file=sys.stderr)
    entries = []
    for name in arguments.systems:
        if importlib.util.find_spec(SYSTEMS[name].kind) is None:
            entries.append(Entry(SYSTEMS[name], 0, errors=[f"{SYSTEMS[name].kind} is not installed"]))
            continue
        spec = SYSTEMS[name] if name == reference.name else matched(SYSTEMS[name], parameters)
        variants = switched(spec, arguments.compile) if name == "ours" and arguments.switches else []
        if name == "monai" and arguments.switches:
            variants = [spec.with_switches("monai, channels_last", channels_last=True)]
        entries += [Entry(variant, count_parameters(variant)) for variant in [spec, *variants]]
    return entries


# ---- figures


def make_rows(entries: Sequence[Entry], about: Row) -> list[Row]:
    """One row per entry: medians, ranges, and the ratios of seconds and of bytes to MONAI's."""
    rows: list[Row] = []
    for entry in entries:
        row: Row = {"system": entry.spec.name, **dataclasses.asdict(entry.spec), "parameters": entry.parameters}
        row |= {**about, "repeats": len(entry.samples), "missing": "; ".join(entry.errors) or None}
        for name in FIGURES:
            values = [sample[name] for sample in entry.samples]
            row[name] = statistics.median(values) if values else None
            row[f"{name}_range"] = [min(values), max(values)] if values else None
        rows.append(row)
    reference = next((row for row in rows if row["system"] == "monai" and row["repeats"]), None)
    for row in rows:
        both = reference if row["repeats"] else None
        for name in FIGURES:
            row[f"{name}_to_monai"] = both and row[name] / both[name]
    return rows


def full_size_rows() -> list[Row]:
    """Saved bytes of the first and of each further patch of the default model, its variants and its peers."""
    parameters = count_parameters(FULL_OURS)
    peers = [FULL_PLAIN, *(FULL_MONAI.values() if importlib.util.find_spec("monai") else [])]
    # Which bytes are kept does not depend on their order in memory.
    variants = [spec for spec in switched(FULL_OURS, compiled=False) if "channels_last" not in spec.switches]
    specs = [FULL_OURS, *variants, *(matched(peer, parameters) for peer in peers)]
    rows = []
    for spec in specs:
        print(f"  tracing {spec.name} {spec.channels}", file=sys.stderr)
        row: Row = {"system": spec.name, **dataclasses.asdict(spec), "parameters": count_parameters(spec)}
        for amp in ("bf16", "off"):
            first, both = (saved_bytes_without_memory(spec, FULL_PATCH, amp, batch) for batch in (1, 2))
            row |= {f"saved_bytes_{amp}": first, f"saved_bytes_per_further_patch_{amp}": both - first}
        rows.append(row)
    reference = next((row for row in rows if row["system"] == "monai, 4 levels"), None)
    for row in rows:
        for name in ("saved_bytes_bf16", "saved_bytes_off"):
            row[f"{name}_to_monai"] = reference and row[name] / reference[name]
    return rows


def print_table(rows: Sequence[Row]) -> None:
    """The measured rows as Markdown."""
    heads = ["system", "channels", "parameters M", "saved MiB", "to monai", "s a step (min-max)", "to monai"]
    lines = []
    for row in rows:
        cells = [row["system"], _widths(row), f"{row['parameters'] / 1e6:.2f}"]
        if row["repeats"]:
            low, high = row["step_s_range"]
            cells += [f"{row['saved_bytes'] / MIB:.0f}", cell(row["saved_bytes_to_monai"], ".2f")]
            cells += [f"{row['step_s']:.2f} ({low:.2f}-{high:.2f})", cell(row["step_s_to_monai"], ".2f")]
            cells += [f"{row['step_cpu_s']:.2f}", cell(row["step_cpu_s_to_monai"], ".2f")]
        if row["missing"]:
            cells.append(f"missing: {row['missing']}")
        lines.append(cells)
    print_markdown([*heads, "CPU s", "to monai"], lines)


def print_full_size_table(rows: Sequence[Row]) -> None:
    """The traced rows as Markdown."""
    heads = ["system", "channels", "parameters M"]
    heads += ["bf16: saved GiB (each further patch)", "to monai, 4 levels", "float32", "to monai, 4 levels"]
    lines = []
    for row in rows:
        cells = [row["system"], _widths(row), f"{row['parameters'] / 1e6:.1f}"]
        for amp in ("bf16", "off"):
            first, further = row[f"saved_bytes_{amp}"], row[f"saved_bytes_per_further_patch_{amp}"]
            cells += [f"{first / GIB:.2f} ({further / GIB:.2f})", cell(row[f"saved_bytes_{amp}_to_monai"], ".2f")]
        lines.append(cells)
    print_markdown(heads, lines)


def _widths(row: Row) -> str:
    full = row["architecture"].get("full_res_channels")
    return (f"{full} + " if full else "") + "/".join(map(str, row["channels"]))


# ---- the command


def parse() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patch", type=triple(1, "32,64,64"), default=(32, 64, 64), metavar="Z,Y,X")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="processes per system")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per process")
    parser.add_argument("--threads", type=int, help="of torch (its default: all cores)")
    parser.add_argument("--systems", type=_names, default=[*SYSTEMS], metavar=",".join(SYSTEMS))
    parser.add_argument("--switches", action="store_true", help="also ours with each switch changed")
    parser.add_argument("--compile", action="store_true", help="with --switches: also torch.compile (minutes)")
    parser.add_argument("--full-size", action="store_true", help="also the bytes of the default model at 72x136x136")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument("--measure", type=ast.literal_eval, help=argparse.SUPPRESS)  # one system, once, in this process
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # where to
    arguments = parser.parse_args()
    if unknown := set(arguments.systems) - set(SYSTEMS):
        parser.error(f"--systems must be of {', '.join(SYSTEMS)}; got {', '.join(sorted(unknown))}")
    if arguments.batch < 1 or arguments.repeats < 1 or arguments.steps < 1:
        parser.error("--batch, --repeats and --steps must be at least 1; use larger numbers")
    return arguments


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main() -> int:
    arguments = parse()
    if arguments.measure:
        return measure_here(arguments.result, *arguments.measure)
    about: Row = {
        "patch_size": arguments.patch,
        "batch": arguments.batch,
        "steps": arguments.steps,
        "threads": arguments.threads,
        **describe_machine(PACKAGES),
    }
    entries = make_entries(arguments) if arguments.systems else []
    measure_in_turn(entries, arguments)
    rows = make_rows(entries, about)
    machine = about["machine"]
    print(f"machine   {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.1f} GiB")
    print(f"versions  {', '.join(f'{name} {version}' for name, version in about['versions'].items())}")
    if rows:
        patch = "x".join(map(str, arguments.patch))
        print(f"measured  batch {arguments.batch} of 1x{patch}, float32, forward + MSE + backward, on the CPU")
        print(f"          {arguments.repeats} processes of {arguments.steps} steps each, in turn\n")
        print_table(rows)
    full = full_size_rows() if arguments.full_size else []
    if full:
        print("\ntraced    1x72x136x136, bytes kept for the backward pass; no memory, no time\n")
        print_full_size_table(full)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "full_size": full}, indent=1) + "\n", encoding="utf-8")
    return 0 if full or any(row["repeats"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
