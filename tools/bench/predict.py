"""Compare `predict_volume` with MONAI's sliding window: seconds, differences, bytes fetched and peak memory.

    python tools/bench/predict.py [--edge 160] [--patch 64] [--overlap 0.25] [--rounds 3] [--blend gaussian]

Both evaluate the same small U-Net on a volume that fits into memory, in separate processes, in rounds of which every
other is in reverse order.  MONAI computes with torch's default threads on an array that it has read; ours reads the
zarr and writes the OME-Zarr.  Then ours runs on a volume four times as large, and both peaks of its memory are compared
with the forecast.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from machine import describe_machine
from pairs import ratios, spread, turns

from vesuvius import open_volume, predict_volume
from vesuvius.predict.forecast import measured, peak_bytes
from vesuvius.predict.run import PredictRequest, prepared

OURS, MONAI, FORECAST = "vesuvius", "MONAI", "forecast"


def build_network() -> torch.nn.Module:
    from monai.networks.nets import UNet

    torch.manual_seed(0)
    return UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=1).eval()


def run_monai(volume: Path, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    from monai.inferers import sliding_window_inference

    network, started, size = build_network(), time.perf_counter(), (options.patch,) * 3
    with open_volume(volume) as opened, torch.inference_mode():
        image = torch.from_numpy(opened[:].astype(np.float32) / 127.5 - 1)[None, None]
        found = sliding_window_inference(image, size, 1, network, overlap=options.overlap, mode=options.blend)
    seconds = time.perf_counter() - started
    np.save(out, np.asarray(found[0]))
    return {"seconds": seconds}


def run_ours(volume: Path, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    network, size = build_network(), (options.patch,) * 3
    arguments: dict[str, Any] = {"overlap": options.overlap, "blend": options.blend, "normalize": (0, 255)}
    if options.child == FORECAST:
        with prepared(PredictRequest(network, volume, out, size, **arguments)) as work:
            return {"peak": measured(work)[1]}
    done = predict_volume(network, volume, out, patch_size=size, device="cpu", **arguments)
    return {"seconds": done.seconds, "fetched": done.fetched_bytes, "peak": peak_bytes()}


def child(name: str, volume: Path, out: Path, arguments: list[str]) -> dict[str, Any]:
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, __file__, *arguments, "--child", name, "--volume", volume, "--out", out]
    environment = {
        key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"
    }  # torch's default threads
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def write_volume(path: Path, shape: tuple[int, int, int]) -> int:
    """Write a volume with noise and air; returns the bytes of its chunks."""
    rng, array = np.random.default_rng(0), zarr.create_array(path, shape=shape, dtype="u1", chunks=(64, 64, 64))
    for z in range(0, shape[0], 64):
        array[z : z + 64] = rng.integers(0, 200, (min(64, shape[0] - z), *shape[1:])).astype(np.uint8) + 20
    return sum(file.stat().st_size for file in path.rglob("c/*/*/*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--edge", type=int, default=160)
    parser.add_argument("--patch", type=int, default=64)
    parser.add_argument("--overlap", type=float, default=0.25)
    parser.add_argument("--blend", default="gaussian")
    parser.add_argument("--rounds", type=int, default=3)
    for hidden in ("--child", "--volume", "--out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run = run_monai if options.child == MONAI else run_ours
        print(json.dumps(run(Path(options.volume), Path(options.out), options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        volume, large, edge = Path(folder, "v.zarr"), Path(folder, "large.zarr"), options.edge
        outs = {OURS: Path(folder, "o.zarr"), MONAI: Path(folder, "o.npy")}
        stored = write_volume(volume, (edge, edge, edge))
        write_volume(large, (edge, 2 * edge, 2 * edge))
        print(json.dumps(describe_machine(["torch", "monai", "zarr"])))
        runs: dict[str, list[dict[str, Any]]] = {OURS: [], MONAI: []}
        for _, name in turns([OURS, MONAI], options.rounds):
            runs[name].append(child(name, volume, outs[name], sys.argv[1:]))
        seconds = {name: [run["seconds"] for run in runs[name]] for name in runs}
        for name, values in seconds.items():
            print(f"{name}: {spread(values)} s")
        print(f"time over MONAI's: {spread(ratios(seconds[OURS], seconds[MONAI]))}")
        found, expected = zarr.open_array(outs[OURS] / "0", mode="r")[:], np.load(outs[MONAI])
        print(f"largest difference: {np.abs(found - expected).max():.2g} of {np.abs(expected).max():.2g}")
        print(f"bytes fetched over stored: {runs[OURS][0]['fetched'] / stored:.4f}")
        forecast = child(FORECAST, volume, outs[OURS], sys.argv[1:])["peak"]
        peaks = [runs[OURS][-1]["peak"], child(OURS, large, outs[OURS], sys.argv[1:])["peak"]]
        for name, peak in zip(("", ", four times as large"), peaks, strict=True):
            print(f"peak memory{name}: {peak / 2**20:.0f} MiB, {peak / forecast:.2f} of the forecast")


if __name__ == "__main__":
    main()
