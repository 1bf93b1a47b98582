"""Is the training step right and fast on this GPU?  One command, under 8 minutes, a table and a JSON file.

    python tools/gpu_check.py                          # everything, what is left out for lack of time is named
    python tools/gpu_check.py --cap-gib 40 --minutes 4 --json check.json
    python tools/gpu_check.py --rehearse               # the same code in half a minute on a CPU with tiny sizes

Needs one CUDA GPU and torch, numpy and pydantic: no network, no data, no Ray, and no installation of vesuvius, which is
then taken from ../src.  Exit codes: 0 done; 1 a self-test or the parity of losses failed; 2 no GPU, or wrong options.

What is measured, most important first, at 72x136x136: a self-test of Conv3d; our default model over micro-batches
1, 2, 4, ... until one does not fit; parity of the losses in float32, bf16 and fp16, and a step, both with edm and Muon
as our configs have them (all else has cosine noise and AdamW, as the peers can);
MONAI's U-Net of as many parameters and as many halvings, where it can be imported; each switch turned from its default;
our plain full-resolution U-Net; the largest micro-batch under --cap-gib; torch.compile.  A row is some optimizer steps
of its own (at least 3 and --seconds), after two to warm up, with the data on the device; medians.

patches/s  of whole optimizer steps: noise, forward, backward, clipping, AdamW, EMA.
peak GiB   allocated by tensors (reserved by the allocator) at the most, weights and optimizer in it.
predicted  the allocated peak according to `vesuvius/training/forecast/memory_plan.py`, without having seen a GPU.
MFU        FLOPs of forward and backward (nothing that is computed twice) over the peak of the device's tensor cores.
waiting    share of the step in which the device waited for data, for copies or for the host, by its own events;
           kernels: the same by torch's profiler, the share of the time in which a kernel ran.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

if importlib.util.find_spec("vesuvius") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from bench.machine import describe_machine
from gpu.measure import Bench, Budget, find_peak_tflops, fits, kernel_share, measured, predicted
from gpu.networks import (
    FULL_MONAI,
    FULL_OURS,
    FULL_PATCH,
    FULL_PLAIN,
    SHIPPED,
    Spec,
    count_parameters,
    matched,
    training_flops,
)
from gpu.parity import AMPS, convolution_self_test, parity
from gpu.report import GIB, Row, figures, print_report

EXIT_OK, EXIT_WRONG, EXIT_USAGE = 0, 1, 2
SECTIONS = ("networks", "self_test", "parity", "steps", "kernels", "largest")
LARGEST_SWEEP = 64
LEAST_S = 8.0  # no measurement begins with less
COMPILE_S = 60.0
PACKAGES = ("torch", "numpy", "zarr", "pydantic", "monai")


# ---- what was found


class Findings:
    """All rows so far, written to the file after each, so that a crash loses nothing."""

    def __init__(self, path: Path, about: Row) -> None:
        self._path = path
        self.content: Row = {"about": about, "finished": False, "figures": {}, "skipped": []}
        self.content |= {section: [] for section in SECTIONS}
        self.write()

    def add(self, section: str, row: Row) -> Row:
        self.content[section].append(row)
        self.write()
        print(f"  {section}: {_summary(row)}", file=sys.stderr, flush=True)
        return row

    def skip(self, what: str, left_s: float) -> None:
        self.content["skipped"].append(what)
        self.write()
        print(f"  skipped, {max(left_s, 0):.0f} s left: {what}", file=sys.stderr, flush=True)

    def write(self) -> None:
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self._path)


def _summary(row: Row) -> str:
    names = "name channels system micro_batch settings amp outcome patches_s largest_difference ok detail"
    values = [row[name] for name in names.split() if name in row]
    parts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
    return " ".join(part for part in parts if part != "{}")


# ---- what is measured


@dataclasses.dataclass(frozen=True)
class Networks:
    """What is compared, at equal parameters.  `monai` is None where it cannot be imported.

    `batch` is the micro-batch of the switches.
    """

    ours: Spec
    plain: Spec
    monai: Spec | None
    batch: int


def real_networks() -> Networks:
    """The default model, and peers with as many parameters and a lowest level as small: 9x17x17."""
    parameters = count_parameters(FULL_OURS)
    monai = matched(FULL_MONAI[4], parameters) if can_import("monai") else None
    return Networks(FULL_OURS, matched(FULL_PLAIN, parameters), monai, batch=8)


def tiny_networks() -> Networks:
    """For the rehearsal: the same kinds of network, not matched."""
    heads = {"attention_heads": 2, "blocks_per_level": 1}
    ours = Spec("ours", "vesuvius", (8, 16), {"full_res_channels": 4, **heads})
    plain = Spec("plain", "vesuvius", (4, 8, 16), {"stem_stride": (1, 1, 1), "full_res_channels": 0, **heads})
    blocks = {"num_res_blocks": 1, "num_head_channels": 8, "norm_num_groups": 4}
    monai = Spec("monai", "monai", (4, 8, 16), blocks) if can_import("monai") else None
    return Networks(ours, plain, monai, batch=2)


def can_import(package: str) -> bool:
    """Whether it is there, what it needs included."""
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


class Check:
    """The measurements in their order.  Each looks at the clock first."""

    def __init__(self, bench: Bench, networks: Networks, budget: Budget, findings: Findings) -> None:
        self._bench, self._networks, self._budget, self._findings = bench, networks, budget, findings
        self._flops = {}
        for spec in (networks.ours, networks.plain, networks.monai):
            if spec is not None:
                self._flops[spec.name] = training_flops(spec, bench.patch_zyx)
                facts = {"parameters": count_parameters(spec), "training_flops_per_patch": self._flops[spec.name]}
                findings.add("networks", dataclasses.asdict(spec) | facts)

    def run(self) -> None:
        ours, monai = self._networks.ours, self._networks.monai
        self._self_tests(ours, 2)
        limits = self._sweep(ours)
        batch = max(1, min(self._networks.batch, limits[0]))
        self._parity(ours, min(batch, 2))  # one sample does not tell whether each has its own scale and shift
        self._step(ours, batch, **SHIPPED)
        self._step(ours, batch, channels_last=True)
        if monai:
            self._sweep(monai)
        else:
            self._findings.skip("monai, which cannot be imported", self._budget.left_s)
        self._step(ours, batch, recompute_norm=False)
        self._step(ours, batch, amp="fp16")
        self._step(ours, batch, amp="off")
        self._kernels(ours, batch)
        self._step(ours, batch, checkpoint_levels=(0,))
        self._step(ours, batch, checkpoint_levels=(0, 1))
        self._step(ours, batch, cudnn_benchmark=False)
        self._step(ours, batch, channels_last=True, recompute_norm=False)
        self._sweep(self._networks.plain)
        self._largest(ours, limits)
        self._largest(ours, (1, None), checkpoint_levels=(0, 1))
        if self._bench.on_gpu:  # the compiler of a CPU is another one, and takes minutes
            self._step(ours, batch, needs_s=COMPILE_S, compile=True)

    def _time_for(self, what: str, needs_s: float) -> bool:
        if self._budget.left_s >= needs_s:
            return True
        self._findings.skip(what, self._budget.left_s)
        return False

    def _step(self, spec: Spec, batch: int, needs_s: float = LEAST_S, **settings: Any) -> Row | None:
        changed = " ".join(f"{name}={value}" for name, value in settings.items())
        if not self._time_for(f"{spec.name}, micro-batch {batch} {changed}".strip(), needs_s):
            return None
        row = measured(self._bench, spec, batch, self._budget, self._flops[spec.name], **settings)
        if row["outcome"] == "ok" and spec.kind == "vesuvius":
            row |= predicted(spec, self._bench, row)
        return self._findings.add("steps", row)

    def _sweep(self, spec: Spec) -> tuple[int, int | None]:
        """Micro-batches 1, 2, 4, ... until one fails or would take a third of the time that is left.

        Returns the largest that fitted and the smallest that did not, None where it was not met.
        """
        fitting, batch, needs_s = 0, 1, LEAST_S
        while batch <= LARGEST_SWEEP:
            started = time.monotonic()
            row = self._step(spec, batch, needs_s=max(LEAST_S, 3 * needs_s))
            if row is None or row["outcome"] != "ok":
                return fitting, batch if row and row["outcome"] in {"out of memory", "ConfigError"} else None
            needs_s = 1.8 * (time.monotonic() - started)  # twice the patches, but not twice the start
            fitting, batch = batch, 2 * batch
        return fitting, None

    def _largest(self, spec: Spec, limits: tuple[int, int | None], **settings: Any) -> None:
        """The largest micro-batch, between what is known to fit and what is known not to, to a sixteenth."""
        fitting, too_many = limits
        while too_many is None or too_many - fitting > max(1, fitting // 16):
            batch = max(2 * fitting, 1) if too_many is None else (fitting + too_many) // 2
            if not self._time_for(f"largest micro-batch {settings}: at least {fitting}, less than {too_many}", LEAST_S):
                break
            went_through = fits(self._bench, spec, batch, self._budget, **settings)
            if went_through is None:
                break
            fitting, too_many = (batch, too_many) if went_through else (fitting, batch)
        row = {"system": spec.name, "settings": settings, "micro_batch": fitting, "too_many": too_many}
        self._findings.add("largest", row)

    def _self_tests(self, spec: Spec, batch: int) -> None:
        for amp in AMPS[1:]:
            self._findings.add("self_test", convolution_self_test(self._bench, spec, batch, amp))

    def _parity(self, spec: Spec, batch: int) -> None:
        if self._time_for("parity of losses", LEAST_S):
            for row in parity(self._bench, spec, batch, self._budget):
                self._findings.add("parity", row)

    def _kernels(self, spec: Spec, batch: int) -> None:
        if self._time_for("profile", LEAST_S):
            self._findings.add("kernels", kernel_share(self._bench, spec, batch, self._budget))


# ---- the command


def parse() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7.5, help="what does not fit into them is skipped")
    parser.add_argument("--seconds", type=float, default=2.0, help="least length of a timed window")
    parser.add_argument("--cap-gib", type=float, default=80.0, help="memory this process may use of the GPU")
    parser.add_argument("--peak-tflops", type=float, help="dense 16-bit peak of the GPU; TF32 counts as half of it")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), metavar="FILE")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny patches and networks")
    arguments = parser.parse_args()
    if arguments.minutes <= 0 or arguments.cap_gib <= 0:
        parser.error(f"--minutes and --cap-gib must be above 0; got {arguments.minutes} and {arguments.cap_gib}")
    return arguments


def prepare(arguments: argparse.Namespace) -> tuple[Bench, Networks, Row]:
    """The device under its cap, the networks, and what to say about them."""
    peak = (arguments.peak_tflops, arguments.peak_tflops / 2) if arguments.peak_tflops else None
    about: Row = {"rehearsal": arguments.rehearse, "minutes": arguments.minutes, "cap_gib": None, "memory_gib": None}
    if arguments.rehearse:
        torch.set_num_threads(1)  # more threads wait for one another longer than such sizes take
        # Not flatter: oneDNN's weight gradient in bf16 is wrong for levels two planes deep (step/self_test.py).
        bench, networks = Bench(torch.device("cpu"), (16, 16, 16), 0.0, peak), tiny_networks()
        about["device"] = "cpu"
    else:
        about["device"] = torch.cuda.get_device_name()
        memory_gib = torch.cuda.get_device_properties(0).total_memory / GIB
        about |= {"memory_gib": memory_gib, "cap_gib": min(arguments.cap_gib, memory_gib)}
        torch.cuda.set_per_process_memory_fraction(min(arguments.cap_gib / memory_gib, 1.0))
        peak = peak or find_peak_tflops(about["device"])
        bench, networks = Bench(torch.device("cuda"), FULL_PATCH, arguments.seconds, peak), real_networks()
    versions = describe_machine(PACKAGES)["versions"]
    versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    about |= {"peak_tflops": peak, "patch_size": bench.patch_zyx, "versions": versions}
    about["tf32"] = {"conv": torch.backends.cudnn.allow_tf32, "matmul": torch.backends.cuda.matmul.allow_tf32}
    return bench, networks, about


def main() -> int:
    arguments = parse()
    if not arguments.rehearse and not torch.cuda.is_available():
        print(
            f"gpu_check needs a CUDA GPU; torch {torch.__version__} sees none here; run it on a machine with one, or "
            "rehearse it with --rehearse",
            file=sys.stderr,
        )
        return EXIT_USAGE
    budget = Budget(60 * arguments.minutes)
    bench, networks, about = prepare(arguments)
    findings = Findings(arguments.json, about)
    Check(bench, networks, budget, findings).run()
    content = findings.content
    content |= {"figures": figures(content), "finished": True}
    findings.write()
    print_report(json.loads(json.dumps(content)))  # as gpu/report.py prints it from the file
    wrong = not content["figures"]["self_test_ok"] or content["figures"]["parity_ok"] is False
    return EXIT_WRONG if wrong else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
