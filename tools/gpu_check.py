"""Is the training step of a config right on this GPU, and in which setting is it fastest?  At most 10 minutes.

    python tools/gpu_check.py                          # configs/exp001_full.yaml
    python tools/gpu_check.py --minutes 4 --cap-gib 40 --config configs/demo.yaml training.amp=fp16
    python tools/gpu_check.py --rehearse               # the same code in half a minute on a CPU with tiny sizes

Needs one CUDA GPU, and torch, numpy, pyyaml, psutil and pydantic: no network, no data, no zarr, no Ray, and no
installation of vesuvius, which is then taken from ../src.  Exit codes: 0 done; 1 convolutions or losses are wrong, or
no setting ran; 2 no GPU, a missing package, or wrong options.

First each convolution of the network runs in 16 bits, in both memory orders, and is compared with float32.  Then one
table, a row for each setting:
 1. the config's own;
 2. without torch.compile, micro-batches of 1, 2, 4 and 8 at the config's effective batch;
 3. at the fastest of these, the other memory order, then recompute_norm the other way round, then the other optimizer;
 4. the fastest compiled, both switches again, and half the micro-batch.
At the end the fastest setting and the config's own take turns.  The winner is printed as overrides.  The optimizer is
measured, not chosen: it decides what is learned.  A setting that fails is a row with the reason; a setting that there
was no time for is listed.

Each row starts with 3 optimizer steps whose losses and gradient lengths are compared with those in float32, eager and
contiguous, from the same weights, patches, noise and timesteps.  A setting that is off beyond rounding is `wrong` and
cannot win.  At least 3 more steps and --seconds are timed, with the data on the device; the row has medians.

step s     a whole optimizer step: noise, forward, backward, clipping, optimizer, EMA, over all micro-batches.
MFU        operations of forward and backward (nothing that is computed twice) over the peak of the device.
peak GiB   most that is allocated by tensors (reserved by the allocator), with weights and optimizer.
plan GiB   the allocated peak by `vesuvius/training/forecast/memory_plan.py` (measured peak over plan).
waiting    share of the step in which the device waited for data, copies or the host, by its own events.
off by     largest difference from float32: of the loss of a patch, and of the length of the gradient.
warm-up s  the first 3 steps, with compilation and cuDNN's trials.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

STARTED = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("vesuvius") is None:
    sys.path.insert(0, str(ROOT / "src"))

EXIT_OK, EXIT_WRONG, EXIT_USAGE = 0, 1, 2

try:
    import torch
    from bench.machine import describe_machine
    from gpu.measure import REHEARSED_BATCH, Bench, Budget, Row, Setting, attempt
    from gpu.report import GIB, print_report, summary

    from vesuvius.config.load import read_config
    from vesuvius.errors import ConfigError
    from vesuvius.training.forecast.memory_plan import largest_batch, peak_flops_s
    from vesuvius.training.step import setup
    from vesuvius.training.step.setup import execution, is_compiled, resolve_amp, uses_channels_last
except ModuleNotFoundError as missing:
    package = {"yaml": "pyyaml"}.get(missing.name or "", missing.name)
    print(f"gpu_check cannot start: {missing}; run: python -m pip install {package}", file=sys.stderr)
    sys.exit(EXIT_USAGE)

MICRO_BATCHES = (1, 2, 4, 8)
MARGIN = 0.01  # a smaller gain does not change the setting
EAGER_S, COMPILED_S, TURN_S = 15.0, 45.0, 10.0  # least time left to begin a row; in turns all is compiled
MOST_S, MOST_COMPILED_S = 180.0, 420.0  # of one row; the first also computes the float32 reference
ROUNDS = 2
VERIFY_S = 60.0  # reserved for the turns
GRACE_S = 20.0  # after the end, for a row that is under way: they look at the clock between micro-batches
SELF_TEST_PATCHES = 2
VRAM_SHARE = 0.92  # of `training/forecast/plan.py`
PACKAGES = ("torch", "triton", "numpy", "pydantic")
REHEARSED = (
    "data.patch_size=[16,16,16]",
    "training.amp=bf16",
    f"training.train_batch_size={REHEARSED_BATCH}",
    "training.accumulate_steps=2",
    "model.channels=[8]",
    "model.full_res_channels=4",
    "model.blocks_per_level=1",
    "model.attention_heads=2",
)


class Findings:
    """All rows so far, written to the file after each, so that a crash loses nothing."""

    def __init__(self, path: Path, about: Row) -> None:
        self._path = path
        self.content: Row = {"about": about, "finished": False, "self_test": [], "rows": [], "turns": [], "skipped": []}
        self.content |= {"default": None, "best": None}
        self.write()

    def add(self, section: str, row: Row) -> Row:
        self.content[section].append(row)
        self.write()
        print(f"  {time.monotonic() - STARTED:3.0f} s  {section}: {summary(row)}", file=sys.stderr, flush=True)
        return row

    def skip(self, keys: Row) -> None:
        """Record a setting skipped because time ran out."""
        self.content["skipped"].append(keys)
        self.write()

    def write(self) -> None:
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self._path)


# ---- which settings are tried


def search(
    default: Setting, micro_batches: Sequence[int], measure: Callable[[Setting], float | None]
) -> Setting | None:
    """Change one key at a time, starting from the default, and keep faster values; None if nothing ran.

    Compiling takes a minute for each micro-batch, memory order and `recompute_norm`, so these are chosen without it
    and compared again with it.  `micro_batches` are ascending.
    """
    times: dict[Setting, float | None] = {}

    def tried(setting: Setting) -> float | None:
        if setting not in times:
            times[setting] = measure(setting)
        return times[setting]

    def fastest(**keys: bool) -> Setting | None:
        best, best_s = None, float("inf")
        for setting, seconds in times.items():
            fits = all(getattr(setting, key) == value for key, value in keys.items())
            if fits and setting.optimizer == default.optimizer and seconds and seconds < (1 - MARGIN) * best_s:
                best, best_s = setting, seconds
        return best

    tried(default)
    eager = replace(default, compile=False)
    for patches in micro_batches:
        if tried(eager.with_micro_batch(patches)) is None and patches > default.train_batch_size:
            break  # larger ones need even more memory
    if best := fastest(compile=False):
        tried(replace(best, channels_last=not best.channels_last))
    if best := fastest(compile=False):
        tried(replace(best, recompute_norm=not best.recompute_norm))
    if best := fastest(compile=False):
        tried(replace(best, optimizer="adamw" if best.optimizer == "muon" else "muon"))
        tried(replace(best, compile=True))
    for key in ("recompute_norm", "channels_last"):
        if (best := fastest()) and best.compile:
            tried(replace(best, **{key: not getattr(best, key)}))
    if (best := fastest()) and best.compile and best.train_batch_size // 2 in micro_batches:
        tried(best.with_micro_batch(best.train_batch_size // 2))
    return fastest()


def default_setting(bench: Bench) -> Setting:
    """Settings of a run of the config on a GPU."""
    training, gpu = bench.config.training, torch.device("cuda")
    return Setting(
        compile=is_compiled(training, gpu),
        channels_last=uses_channels_last(training, gpu),
        recompute_norm=execution(training).recompute_norm,
        train_batch_size=training.train_batch_size,
        accumulate_steps=training.accumulate_steps,
        optimizer=training.optimizer,
    )


class Check:
    """The measurements in order; each checks the time left first."""

    def __init__(self, bench: Bench, findings: Findings) -> None:
        self._bench, self._findings = bench, findings
        self.default = default_setting(bench)

    def run(self) -> None:
        bench, content = self._bench, self._findings.content
        content["default"] = self.default.overrides
        for last in (True, False) if bench.amp != "off" else ():
            test = functools.partial(bench.self_test, last, SELF_TEST_PATCHES)
            self._findings.add("self_test", {"channels_last": last} | attempt(bench, MOST_S, test))
        micro_batches = [patches for patches in MICRO_BATCHES if bench.patches % patches == 0]
        best = search(self.default, micro_batches, self._seconds)
        if best and best != self.default:
            best = self._verified(best)
        content["best"] = best and best.overrides

    def _seconds(self, setting: Setting) -> float | None:
        need_s = COMPILED_S if setting.compile else EAGER_S
        return self._row("rows", setting, need_s, VERIFY_S).get("step_s")

    def _row(self, section: str, setting: Setting, need_s: float, reserve_s: float) -> Row:
        left_s = self._bench.budget.left_s - reserve_s
        if left_s < need_s:
            self._findings.skip(asdict(setting))
            return {}
        measure = functools.partial(self._bench.measure, setting)
        most_s = MOST_COMPILED_S if setting.compile or not self._findings.content["rows"] else MOST_S
        row = attempt(self._bench, min(most_s, left_s), measure)
        return self._findings.add(section, asdict(setting) | row)

    def _verified(self, best: Setting) -> Setting:
        """Measure the best and the default in turns; return the faster one, the default if it did not run."""
        seconds: dict[Setting, list[float]] = {self.default: [], best: []}
        for setting in (self.default, best) * ROUNDS:
            if step_s := self._row("turns", setting, TURN_S, 0.0).get("step_s"):
                seconds[setting].append(step_s)
        own, found = (seconds[setting] for setting in (self.default, best))
        if not (own and found):
            return best
        content, ratio = self._findings.content, statistics.median(own) / statistics.median(found)
        content["speedup"], content["speedups"] = ratio, [a / b for a, b in zip(own, found, strict=False)]
        return best if ratio > 1 + MARGIN else self.default


# ---- the command


def parse() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "exp001_full.yaml")
    parser.add_argument("--minutes", type=float, default=9.5, help="what does not fit into them is skipped")
    parser.add_argument("--seconds", type=float, default=2.0, help="least length of a timed window")
    parser.add_argument("--cap-gib", type=float, help="memory this process may use of the GPU (default: all)")
    parser.add_argument("--peak-tflops", type=float, help="dense peak of the device in the config's amp")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), metavar="FILE")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with a tiny network and patch")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the config")
    arguments = parser.parse_args()
    if arguments.minutes <= 0 or (arguments.cap_gib or 1) <= 0:
        parser.error(f"--minutes {arguments.minutes} and --cap-gib {arguments.cap_gib} must both be above 0")
    return arguments


def prepare(arguments: argparse.Namespace) -> tuple[Bench, Row]:
    """Return the budget, the capped device, the config, and their description.  Raises ConfigError."""
    budget = Budget(60 * arguments.minutes - (time.monotonic() - STARTED))
    overrides = [*(REHEARSED if arguments.rehearse else ()), *arguments.overrides]
    config, device = read_config(arguments.config, overrides), torch.device("cpu" if arguments.rehearse else "cuda")
    config = config.with_training(ranks=1, amp=resolve_amp(config.training.amp, device))
    if config.training.train_batch_size == "auto":  # as `fit_micro_batch`, which needs what reads volumes
        patches, room = config.training.accumulate_steps, int(VRAM_SHARE * torch.cuda.mem_get_info()[0])
        most = largest_batch(config, room, config.training.amp)
        config = config.with_micro_batch(
            max(n for n in range(1, patches + 1) if patches % n == 0 and n <= max(most, 1))
        )
    peak_flops, about = (arguments.peak_tflops or 0) * 1e12 or None, {"device": "cpu"}
    if arguments.rehearse:
        torch.set_num_threads(1)  # at such sizes more threads only wait for one another
        # Inductor would compile C++ for minutes.
        setup.CompiledRegions = functools.partial(setup.CompiledRegions, "eager")
    else:
        about["device"], memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min((arguments.cap_gib or memory) * GIB / memory, 1.0))
        tf32 = torch.backends.cudnn.allow_tf32
        peak_flops = peak_flops or peak_flops_s(about["device"], config.training.amp, tf32)
        about["memory_gib"] = memory / GIB
    # Each micro-batch compiles its own variants of a block; a run has one micro-batch.
    torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit = 1024, 4096
    versions = describe_machine(PACKAGES)["versions"]
    versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    about |= {"config": arguments.config.name, "overrides": overrides, "amp": config.training.amp}
    about |= {"rehearsal": arguments.rehearse, "minutes": arguments.minutes, "versions": versions}
    about |= {"peak_tflops": peak_flops and peak_flops / 1e12, "cap_gib": arguments.cap_gib}
    return Bench(device, config, 0.0 if arguments.rehearse else arguments.seconds, peak_flops, budget), about


def main() -> int:
    arguments = parse()
    if not arguments.rehearse and not torch.cuda.is_available():
        print(
            f"gpu_check needs a CUDA GPU; torch {torch.__version__} sees none here; run it on a machine with one, or "
            "rehearse it with --rehearse",
            file=sys.stderr,
        )
        return EXIT_USAGE
    try:
        bench, about = prepare(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    findings = Findings(arguments.json, about)
    content = findings.content

    def end() -> None:
        # A compiler or kernel hangs: the main thread never returns, not even to a signal handler.
        print_report(content)
        print(f"gpu_check stops in the middle of a row: {arguments.minutes:g} minutes are over", flush=True)
        os._exit(EXIT_WRONG)

    watchdog = threading.Timer(max(bench.budget.left_s, 0.0) + GRACE_S, end)
    watchdog.daemon = True
    watchdog.start()
    Check(bench, findings).run()
    watchdog.cancel()
    content["finished"] = True
    findings.write()
    print_report(json.loads(json.dumps(content)))  # as gpu/report.py prints it from the file
    right = all(row["outcome"] != "wrong" for row in (*content["self_test"], *content["rows"], *content["turns"]))
    return EXIT_OK if right and content["best"] else EXIT_WRONG


if __name__ == "__main__":
    sys.exit(main())
