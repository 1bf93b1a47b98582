"""Is a config right on this GPU, and in which setting is it fastest?  At most 15 minutes; read the first line.

    python tools/gpu_check.py                          # configs/exp001_full.yaml; options: --help
    python tools/gpu_check.py --rehearse               # the same code in minutes on a CPU with tiny sizes

Needs a CUDA GPU, and torch, numpy, pyyaml, psutil and pydantic; no network, no data and no installation of vesuvius,
which is then taken from ../src.  Rows that need more (zarr, pytest, a second GPU) are skipped with the reason.

Each row is measured in a child process and written to --json as it ends; one that hangs, crashes or breaks CUDA has
the reason.  The same command again measures what is missing or failed; --restart begins again.
Exit codes: 0 all right; 1 something is wrong or failed, or no setting ran; 2 no GPU, a missing package, wrong options,
a file that cannot be written.
The optimizer and larger effective batches are measured, not chosen: they decide what is learned.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # an installed `vesuvius` may be another's

from gpu.report import SETTING, failures, print_report, summary
from gpu.runner import Findings, Row, Worker

STARTED = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]
EXIT_OK, EXIT_WRONG, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
MARGIN = 0.01  # a smaller gain does not change the setting
# Least time left to begin a row, and longest of one, by whether it compiles.
LIMITS = {False: (10.0, 240.0), True: (45.0, 420.0)}


@dataclass(frozen=True)
class Setting:
    """How a step is computed: the keys of `training.*` that are tried."""

    compile: bool
    channels_last: bool
    recompute_norm: bool
    train_batch_size: int
    accumulate_steps: int
    optimizer: Literal["adamw", "muon"]

    def with_micro_batch(self, patches: int) -> Setting:
        """Return the same with another micro-batch and as many patches a step."""
        effective = self.train_batch_size * self.accumulate_steps
        return replace(self, train_batch_size=patches, accumulate_steps=effective // patches)

    @property
    def name(self) -> str:
        switches = [key for key in ("compile", "channels_last", "recompute_norm") if getattr(self, key)]
        return f"{self.train_batch_size} x {self.accumulate_steps} {self.optimizer} {' '.join(switches)}"

    @property
    def overrides(self) -> str:
        """For a command line.  The optimizer is left out: it decides what is learned, not only how fast."""
        keys = {key: value for key, value in asdict(self).items() if key != "optimizer"}
        return " ".join(f"training.{key}={str(value).lower()}" for key, value in keys.items())


def search(
    default: Setting, micro_batches: Sequence[int], measure: Callable[[Setting], float | None]
) -> Setting | None:
    """Change one key at a time, starting from the default, and keep faster values; None if nothing ran.

    Compiling takes a minute for each micro-batch, memory order and `recompute_norm`, so these are chosen without it
    and compared again with it.  `micro_batches` are ascending; `measure` returns seconds, None if a setting failed.
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
    for key in ("channels_last", "recompute_norm"):
        if best := fastest(compile=False):
            tried(replace(best, **{key: not getattr(best, key)}))
    if best := fastest(compile=False):
        tried(replace(best, optimizer="adamw" if best.optimizer == "muon" else "muon"))
        tried(replace(best, compile=True))
    for key in ("recompute_norm", "channels_last"):
        if (best := fastest()) and best.compile:
            tried(replace(best, **{key: not getattr(best, key)}))
    if (best := fastest()) and best.compile and best.train_batch_size // 2 in micro_batches:
        tried(best.with_micro_batch(best.train_batch_size // 2))
    return fastest()


class Check:
    """The rows in order; each is taken from the findings, measured, or noted as not run."""

    def __init__(self, worker: Worker, findings: Findings, end_s: float, device: Row) -> None:
        self._worker, self._findings, self._end_s, self._device = worker, findings, end_s, device
        self.default, self._content, self._measured = Setting(**device["setting"]), findings.content, set[str]()
        self._content |= {"not_run": [], "own": self.default.name, "best": None, "overrides": None, "speedup": None}

    def row(self, name: str, check: str, compiles: bool = False, **arguments: Any) -> Row:
        """The row of this name; empty if there is no time for it."""
        if (found := self._findings.found(name)) or name in self._measured:
            return found or self._content["rows"][name]
        (need_s, most_s), left_s = LIMITS[compiles], self._end_s - time.monotonic()
        if left_s < need_s:
            self._content["not_run"].append(name)
            return {}
        self._measured.add(name)
        limit_s = left_s if self._content["about"]["rehearsal"] else min(most_s, left_s)
        row = self._worker.measure({"check": check, "arguments": arguments}, limit_s)
        print(f"  {time.monotonic() - STARTED:3.0f} s  {name}: {summary(row)}", file=sys.stderr, flush=True)
        return self._findings.add(name, arguments.get("setting", {}) | row)

    def run(self) -> None:
        rehearse, device, default = self._content["about"]["rehearsal"], self._device, self.default
        steps = 12 if rehearse else 200
        self.row("curve float32", "curve", amp="off", steps=steps)
        self.row("muon", "muon")
        self.row("fp16 scaler", "scaler")
        self.row("fft", "fft")
        self.row("curve 16 bits", "curve", amp=device["amp"], steps=steps)
        self.row("convolutions channels last", "convolutions", channels_last=True)
        self.row("convolutions contiguous", "convolutions", channels_last=False)
        self.row("out of memory", "out_of_memory", total_bytes=device["memory_bytes"])
        self.seconds(default)
        self.row("speed of convolutions", "convolution_speeds", channels_last=default.channels_last)
        self.row("sampling", "sampling")
        self.row("train", "train", True, steps=10 if rehearse else 50)
        self.row("pytest -m gpu", "gpu_tests", True)
        self.row("ranks", "ranks", True, steps=2 if rehearse else 10)
        if best := search(default, device["micro_batches"], self.seconds):
            self._choose(best)
            for patches in device["larger"]:
                self.seconds(replace(best, train_batch_size=patches, accumulate_steps=1))
        self.row("speed in the other order", "convolution_speeds", channels_last=not default.channels_last)

    def seconds(self, setting: Setting, prefix: str = SETTING) -> float | None:
        """Of a step; None if it failed or there is no time."""
        return self.row(prefix + setting.name, "measure", setting.compile, setting=asdict(setting)).get("step_s")

    def _choose(self, best: Setting) -> None:
        """Note the best setting, unless a second turn of both shows that it is no faster than the config's own."""
        if best != self.default and (own_s := self._least(self.default)) and (best_s := self._least(best)):
            self._content["speedup"] = own_s / best_s
            best = best if own_s > (1 + MARGIN) * best_s else self.default
        self._content |= {"best": best.name, "overrides": best.overrides}

    def _least(self, setting: Setting) -> float | None:
        """Seconds of a step in the faster of two turns."""
        turns = [self.seconds(setting, prefix) for prefix in (SETTING, "second turn of ")]
        return min(filter(None, turns), default=None)


def parse() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "exp001_full.yaml")
    parser.add_argument("--minutes", type=float, default=14.5, help="what does not fit into them is not run")
    parser.add_argument("--cap-gib", type=float, help="memory this command may use of the GPU (default: all)")
    parser.add_argument("--peak-tflops", type=float, help="dense peak of the device in the config's amp")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), metavar="FILE")
    parser.add_argument("--restart", action="store_true", help="replace the rows in FILE")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with a tiny network and patch")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the config")
    return parser.parse_intermixed_args()


def digest(*paths: Path) -> str:
    """Of all that a row may run; a commit would not see what is changed behind it."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()[:12]


def main() -> int:
    arguments = parse()
    options = {key: getattr(arguments, key) for key in ("overrides", "rehearse", "cap_gib", "peak_tflops")}
    worker = Worker("gpu.worker", options | {"config": arguments.config}, arguments.json.with_suffix(".log"))
    try:
        findings, device = Findings(arguments.json, arguments.restart), worker.start()
        if device.pop("outcome") != "ok":
            raise ValueError(device["detail"])
        code = digest(*(ROOT / "src").rglob("*.py"), *(ROOT / "tools/gpu").glob("*.py"), ROOT / "configs/demo.yaml")
        config = f"{arguments.config.name} {digest(arguments.config)} {json.dumps(options)}"
        findings.begin({"config": config, "code": code, "rehearsal": arguments.rehearse} | device)
        Check(worker, findings, STARTED + 60 * arguments.minutes, device).run()
    except (ValueError, OSError) as error:
        print(f"gpu_check stops: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("gpu_check was interrupted; the same command goes on with the next row", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        worker.close()
    findings.write()
    print_report(findings.content)
    return EXIT_OK if findings.content["best"] and not failures(findings.content) else EXIT_WRONG


if __name__ == "__main__":
    sys.exit(main())
