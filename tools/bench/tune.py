"""Is what `vesuvius tune` recommends as fast as the best of a full grid, and how much sooner is it known?

A synthetic scroll lies behind an HTTP server with latency; the config begins with workers 1, prefetch_factor 1 and
train_batch_size 1.  First the tune; then every setting of the grid workers x prefetch_factor x train_batch_size (same
effective batch), each in a trainer of its own; last the tuned setting and the grid's best one, in turns.  The tune
keeps requests, compile and channels_last, so that on a CPU it varies exactly what the grid varies.

    python tools/bench/tune.py [--latency-ms 200] [--repeats 3] [--tunes 1] [--folder DIR]

`--tunes 5` also shows how often the recommendation is the same.  The grid, an hour and more, is kept in DIR.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as `vesuvius train` sets it
# The trainer takes one core, as one that drives a GPU does, and leaves the others to readers and server.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from machine import served
from pairs import ratios, spread, turns

from vesuvius.config import Config
from vesuvius.config.load import read_config
from vesuvius.experiments.tune.measurement import Setting, in_words
from vesuvius.experiments.tune.session import TrialRunner

WORKERS = (1, 2, 4, 8)
PREFETCH = (1, 2, 4)
BATCHES = (1, 2, 4)
_EFFECTIVE = 4
_SECONDS, _LIMIT_S = 20.0, 600.0
_CONFIG = """
name: bench_tune
data:
  volumes:
    - path: {url}/scroll.zarr
  patch_size: [16, 16, 16]
  patches_per_region: 1
  store: {{requests: 2}}
training:
  train_batch_size: 1
  accumulate_steps: 4
  workers: 1
  prefetch_factor: 1
  steps_per_epoch: 1000
  epochs: 8
  warmup_steps: 10
model:
  channels: [4, 8]
  full_res_channels: 2
  blocks_per_level: 1
  attention_heads: 2
"""


def main() -> None:
    """Run the parts and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-ms", type=float, default=200.0, help="of each answer of the server")
    parser.add_argument("--repeats", type=int, default=3, help="of tuned against best, in turns")
    parser.add_argument("--tunes", type=int, default=1, help="how many tunes, one after the other")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_tune"), help="where everything is kept")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    grid = Path(f"grid_{arguments.latency_ms:g}_ms.json")
    _write_volume(folder)
    with served(folder, arguments.latency_ms) as url:
        os.chdir(folder)
        Path("bench.yaml").write_text(_CONFIG.format(url=url), encoding="utf-8")
        config = read_config(Path("bench.yaml"))
        tunes = [_tune() for _ in range(arguments.tunes)]
        if not grid.exists():
            grid.write_text(json.dumps(_grid(config), indent=1) + "\n", encoding="utf-8")
        _compare(config, tunes, json.loads(grid.read_text(encoding="utf-8")), arguments.repeats)


def _write_volume(folder: Path) -> None:
    volume = folder / "scroll.zarr"
    if not volume.exists():
        command = [sys.executable, "-m", "vesuvius", "volume", "synth", str(volume), "--shape", "256,256,256"]
        subprocess.run([*command, "--chunk", "32"], check=True)


def _tune() -> tuple[str, float]:
    """The overrides that a tune recommends, and the seconds that it took."""
    began = time.monotonic()
    keep = ["--keep", "requests,compile,channels_last"]
    subprocess.run([sys.executable, "-m", "vesuvius.tune", "--config", "bench.yaml", *keep], check=True)
    report = json.loads(Path("runs/bench_tune/tune/report.json").read_text(encoding="utf-8"))
    recommended, seconds = report["options"][1], time.monotonic() - began
    overrides = " ".join(recommended["overrides"])
    print(f"tune: {seconds:.0f} s, {recommended['samples_s']:.3g} samples/s: {overrides or 'unchanged'}", flush=True)
    return overrides, seconds


def _grid(config: Config) -> dict[str, Any]:
    """Every setting, in an order that has nothing to do with its knobs' values."""
    source, began, rows = Setting.of(config), time.monotonic(), []
    settings = [
        replace(source, workers=w, prefetch_factor=p, train_batch_size=b, accumulate_steps=_EFFECTIVE // b)
        for w, p, b in itertools.product(WORKERS, PREFETCH, BATCHES)
    ]
    for number in sorted(range(len(settings)), key=lambda n: n * 25 % len(settings)):
        rate = _measure(config, settings[number])
        rows.append({"setting": asdict(settings[number]), "samples_s": rate})
        print(f"grid {number}: {in_words(settings[number], source)}: {rate:.3g} samples/s", flush=True)
    return {"seconds": time.monotonic() - began, "rows": rows}


def _measure(config: Config, setting: Setting) -> float:
    """Samples per second of the whole run, in a trainer of its own."""
    with closing(TrialRunner(config, Path("runs/bench_tune/grid"))) as lab:
        result = lab.measure(setting, "run", _SECONDS, _LIMIT_S)
    if result.ended != "ok":
        raise SystemExit(f"a setting of the grid must be measured; got {result.ended}: {result.cause}")
    return result.rate


def _compare(config: Config, tunes: list[tuple[str, float]], grid: dict[str, Any], repeats: int) -> None:
    """The tuned setting against the grid's best, in turns: a figure of the grid alone is one draw of many."""
    (usual, times), *_ = Counter(overrides for overrides, _ in tunes).most_common(1)
    settings = {
        "tuned": Setting.of(read_config(Path("bench.yaml"), usual.split())),
        "best": Setting(**max(grid["rows"], key=lambda row: row["samples_s"])["setting"]),
    }
    rates: dict[str, list[float]] = {name: [] for name in settings}
    for _, name in turns(list(settings), repeats):
        rates[name].append(_measure(config, settings[name]))
    for name, setting in settings.items():
        print(f"{name}: {in_words(setting, Setting.of(config))}: {spread(rates[name])} samples/s")
    share = statistics.median(seconds for _, seconds in tunes) / grid["seconds"]
    print(
        f"the same recommendation in {times} of {len(tunes)}; tuned over best {spread(ratios(*rates.values()), '.2f')}"
    )
    print(f"tune over grid {share:.2f} of {grid['seconds']:.0f} s")


if __name__ == "__main__":
    main()
