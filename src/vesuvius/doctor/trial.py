"""Checks in processes of their own: Ray, and one training step.  What crashes or hangs there ends there."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from vesuvius.config import Config
from vesuvius.config.load import dump_config, parse_stored
from vesuvius.config.trial import trial_config
from vesuvius.doctor.check import Finding
from vesuvius.doctor.data import FASTER, LONG_S, readers_of
from vesuvius.doctor.host import busy
from vesuvius.errors import one_line
from vesuvius.runlog.records import read_records
from vesuvius.runlog.units import format_duration, format_percent, number
from vesuvius.trials.process import TrialProcess, last_words

_RAY = """
import sys
from vesuvius.config import ClusterConfig
from vesuvius.stream.ray.session import Session
address = sys.argv[1] or None
Session(ClusterConfig(address=address), workers=1, ranks=1, store_bytes=2**28).close()
"""

_running: list[TrialProcess] = []

# One step in little time: nothing but the step is tried.
_ONE_STEP = {"steps_per_epoch": 1, "epochs": 1, "workers": 0, "validate_every": 0, "warmup_steps": 0}
_ONE_STEP |= {"accumulate_steps": 1, "compile": False, "cudnn_benchmark": False}


def start_ray(address: str | None, within_s: float) -> Finding:
    """Start a private Ray and end it, or connect to the cluster."""
    began = time.monotonic()
    code, output = run([sys.executable, "-c", _RAY, address or ""], within_s)
    where = f"the cluster at {address}" if address else "a private Ray"
    if code is None:
        value, load = f"{where} did not start within {within_s:.0f} s", busy()
        if load:
            return Finding("warn", f"{value}, {load}", "try again when the processors are idle")
        return Finding("fail", value, "set training.workers=0 to run without Ray")
    if code != 0:
        value = f"{where} did not start: {one_line(last_words(output), 300)}"
        return Finding("fail", value, "see the message; training.workers=0 runs without Ray")
    return Finding("ok", f"{where} started and ended in {time.monotonic() - began:.1f} s")


def train_one_step(config: Config, on_gpu: bool, within_s: float, patch_s: float | None = None) -> Finding:
    """One step of a config in a folder that is removed: on a GPU with its own batch, on a CPU with one sample.

    `patch_s`: seconds that one reader takes for a patch; None = no config, or not known.
    """
    asked, samples = config, config.training.train_batch_size if on_gpu else 1
    batch = {} if on_gpu else {"train_batch_size": 1}
    what = f"a step of {samples} x 1 samples, without readers"
    config = trial_config(config, "doctor", _ONE_STEP | batch)
    with tempfile.TemporaryDirectory(prefix="vesuvius-doctor-") as folder:
        source = Path(folder) / "doctor.yaml"
        source.write_text(dump_config(config), encoding="utf-8")
        command = [sys.executable, "-m", "vesuvius", "train", "--config", str(source)]
        code, output = run(command, within_s, {"VESUVIUS_RUNS": folder})
        if code is None:
            value = f"{what}: not done within {within_s:.0f} s; last line: {one_line(last_words(output), 300)}"
            slow = "" if on_gpu else "; a CPU may be too slow for this network"
            return Finding("warn", value, f"check it with `vesuvius train --dry-run`{slow}")
        if code != 0:
            value = f"{what}: exit code {code}: {one_line(last_words(output), 300)}"
            return Finding("fail", value, "run `vesuvius train` and read its log")
        steps = [r for r in read_records(Path(folder) / "doctor" / "metrics.jsonl") if r["kind"] == "step"]
    if not steps or steps[-1]["loss"] is None:
        remedy = "set training.amp=off, and look at the values of the volumes"
        return Finding("fail", f"{what}: its loss was not finite", remedy)
    gpu_s = steps[-1]["gpu_s"]
    value = f"{what}: {number(gpu_s)} s of computing, loss {number(steps[-1]['loss'])}"
    return Finding("ok", value) if patch_s is None else judge_pace(asked, value, gpu_s / samples, patch_s)


def judge_pace(config: Config, value: str, compute_s: float, patch_s: float) -> Finding:
    """How long the run computes, and whether its readers keep up.  Pure.

    Args:
        config: of the run.
        value: what is known of its step.
        compute_s, patch_s: seconds of a rank to compute a sample, and of one reader to read a patch.
    """
    readers = readers_of(config)
    ranks = readers // max(config.training.workers, 1)
    run_s = compute_s * config.global_batch * config.stop_step / ranks
    value += f"; all {config.stop_step} steps: {format_duration(run_s)} of computing"
    if run_s > LONG_S:
        return Finding("warn", value, "use a GPU, a smaller network or fewer steps")
    waits = 1 - compute_s * readers / (patch_s * ranks)
    if waits > config.monitor.data_share_good:
        who = f"{config.training.workers} readers" if config.training.workers else "the trainer, which reads itself,"
        value += f"; {who} would keep it waiting {format_percent(waits)} of the time"
        return Finding("warn", value, FASTER)
    return Finding("ok", value)


def small_experiment(folder: Path) -> Config:
    """A config of a second on one core, with a volume of noise written below `folder`."""
    import numpy as np
    import zarr

    voxels = np.random.default_rng(0).integers(1, 200, (48, 64, 64), dtype=np.uint8)
    array = zarr.create_array(str(folder / "noise.zarr"), shape=voxels.shape, dtype=voxels.dtype, chunks=(16, 32, 32))
    array[...] = voxels
    model = {"channels": [8, 16], "blocks_per_level": 1, "stem_stride": [1, 2, 2], "full_res_channels": 4}
    model |= {"attention_heads": 2, "norm_groups": 4}
    data = {"volumes": [{"path": str(folder / "noise.zarr")}], "patch_size": [8, 16, 16], "patches_per_region": 4}
    return parse_stored({"name": "doctor", "data": data, "model": model})


def run(command: Sequence[str], within_s: float, environment: dict[str, str] | None = None) -> tuple[int | None, str]:
    """Exit code and output of a process; None where it took too long: then it and all below it are killed."""
    with tempfile.NamedTemporaryFile() as output:
        with TrialProcess(command, Path(output.name), environment or {}, None) as process:
            _running.append(process)
            try:
                code = process.code if process.wait(within_s) else None
            finally:
                _running.remove(process)
        return code, output.read().decode("utf-8", "replace")


def end_all() -> None:
    """Kill what still runs; the checks that wait for it then clean up."""
    for process in tuple(_running):  # each takes itself out
        process.kill()
