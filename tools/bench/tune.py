"""Is what `vesuvius tune` recommends as fast as the best of a full grid, and how much sooner is it known?

A synthetic scroll lies behind an HTTP server with latency; the config begins with workers 1, prefetch_factor 1 and
train_batch_size 1.  First the tune; then every setting of the grid workers x prefetch_factor x train_batch_size (same
effective batch), each in a trainer of its own; last the tuned setting and the grid's best one, in turns.  The tune
keeps requests, compile and channels_last, so that on a CPU it varies exactly what the grid varies.

    python tools/bench/tune.py [--only tune|grid|compare] [--latency-ms 200] [--repeats 3] [--tunes 1] [--folder DIR]

`--tunes 5` also shows how often the recommendation is the same; tunes are added to those in DIR.
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
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as `vesuvius train` sets it
# The trainer takes one core, as one that drives a GPU does, and leaves the others to readers and server.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from vesuvius.config import Config
from vesuvius.config.load import read_config
from vesuvius.experiments.paired import compare
from vesuvius.experiments.tune.measurement import Setting, in_words
from vesuvius.experiments.tune.session import TrialRunner

WORKERS = (1, 2, 4, 8)
PREFETCH = (1, 2, 4)
BATCHES = (1, 2, 4)
_EFFECTIVE = 4
_SECONDS, _LIMIT_S = 20.0, 600.0
_TUNES, _GRID = Path("tunes.json"), Path("grid.json")
_TUNE_LIKE_THE_GRID = ("--keep", "requests,compile,channels_last")
_CONFIG = """
name: bench_tune
data:
  volumes:
    - path: {url}/scroll.zarr
  patch_size: [16, 16, 16]
  patches_per_region: 1
  region_size: [32, 32, 32]
  regions_per_task: 4
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
    """Run what was asked for and print it; figures go to FOLDER/*.json."""
    arguments = _parser().parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    _check_latency(folder / "latency_ms", arguments.latency_ms)
    with _served(folder, arguments.latency_ms) as url:
        os.chdir(folder)
        Path("bench.yaml").write_text(_CONFIG.format(url=url), encoding="utf-8")
        config = read_config(Path("bench.yaml"))
        if arguments.only in (None, "tune"):
            _tune(arguments.tunes)
        if arguments.only in (None, "grid"):
            _grid(config)
        if arguments.only in (None, "compare"):
            _compare(config, arguments.repeats)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=("tune", "grid", "compare"), help="one part; the others must have been run")
    parser.add_argument("--latency-ms", type=float, default=200.0, help="of each answer of the server")
    parser.add_argument("--repeats", type=int, default=3, help="of tuned against best, in turns")
    parser.add_argument("--tunes", type=int, default=1, help="how many tunes, one after the other")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_tune"), help="where everything is kept")
    return parser


def _check_latency(kept: Path, latency_ms: float) -> None:
    """Figures of another latency would be added up with those of this one."""
    if kept.exists() and float(kept.read_text()) != latency_ms:
        raise SystemExit(
            f"the figures of a folder must be of one latency; {kept.parent} has those of {kept.read_text()} ms, got "
            f"--latency-ms {latency_ms:g}; take another --folder"
        )
    kept.write_text(f"{latency_ms:g}")


@contextmanager
def _served(folder: Path, latency_ms: float) -> Iterator[str]:
    volume = folder / "scroll.zarr"
    if not volume.exists():
        command = [sys.executable, "-m", "vesuvius", "volume", "synth", str(volume), "--shape", "256,256,256"]
        subprocess.run([*command, "--chunk", "32"], check=True)
    server = Path(__file__).parents[2] / "tests" / "support" / "chunk_server.py"
    command = [sys.executable, str(server), str(folder), "--latency-ms", str(latency_ms), "--with-parent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def _tune(count: int) -> None:
    found: list[dict[str, object]] = json.loads(_TUNES.read_text(encoding="utf-8")) if _TUNES.exists() else []
    for _ in range(count):
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "vesuvius.tune", "--config", "bench.yaml", *_TUNE_LIKE_THE_GRID], check=True
        )
        report = json.loads(Path("runs/bench_tune/tune/report.json").read_text(encoding="utf-8"))
        overrides = " ".join(report["options"][1]["overrides"])
        rate, trials = report["options"][1]["samples_s"], len(report["trials"])
        seconds = time.monotonic() - began
        found.append({"overrides": overrides, "samples_s": rate, "seconds": seconds, "trials": trials})
        print(
            f"tune: {seconds:.0f} s, {trials} trials, {rate:.3g} samples/s: {overrides or 'unchanged'}",
            flush=True,
        )
        _write(_TUNES, found)
    overrides, times = Counter(str(tune["overrides"]) for tune in found).most_common(1)[0]
    print(f"the same recommendation in {times} of {len(found)}: {overrides}")


def _grid(config: Config) -> None:
    """Every setting, in an order that has nothing to do with its knobs' values."""
    settings = _settings(config)
    began, rows = time.monotonic(), []
    for number in sorted(range(len(settings)), key=lambda n: n * 25 % len(settings)):
        rate = _measure(config, settings[number])
        rows.append({"setting": asdict(settings[number]), "samples_s": rate})
        print(
            f"grid {number}: {in_words(settings[number], Setting.of(config))}: {rate:.3g} samples/s",
            flush=True,
        )
    _write(_GRID, {"seconds": time.monotonic() - began, "rows": rows})


def _settings(config: Config) -> list[Setting]:
    source = Setting.of(config)
    return [
        replace(source, workers=w, prefetch_factor=p, train_batch_size=b, accumulate_steps=_EFFECTIVE // b)
        for w, p, b in itertools.product(WORKERS, PREFETCH, BATCHES)
    ]


def _measure(config: Config, setting: Setting) -> float:
    """Samples per second of the whole run, in a trainer of its own."""
    with closing(TrialRunner(config, Path("runs/bench_tune/grid"))) as lab:
        result = lab.measure(setting, "run", _SECONDS, _LIMIT_S)
    if result.ended != "ok":
        raise SystemExit(f"a setting of the grid must be measured; got {result.ended}: {result.cause}")
    return result.rate


def _compare(config: Config, repeats: int) -> None:
    """The tuned setting against the grid's best, in turns: a figure of the grid alone is one draw of many."""
    grid = json.loads(_GRID.read_text(encoding="utf-8"))
    tunes = json.loads(_TUNES.read_text(encoding="utf-8"))
    best = Setting(**max(grid["rows"], key=lambda row: row["samples_s"])["setting"])
    usual = Counter(str(tune["overrides"]) for tune in tunes).most_common(1)[0][0]
    tuned = Setting.of(read_config(Path("bench.yaml"), usual.split()))
    rates: dict[Setting, list[float]] = {tuned: [], best: []}
    for _ in range(repeats):
        for setting in rates:
            rates[setting].append(_measure(config, setting))
    ratio = 1 + compare(list(zip(rates[tuned], rates[best], strict=False))).gain if tuned != best else 1.0
    share = statistics.median(tune["seconds"] for tune in tunes) / grid["seconds"]
    source = Setting.of(config)
    print(f"tuned  {in_words(tuned, source)}: {_spread(rates[tuned])} samples/s")
    print(f"best   {in_words(best, source)}: {_spread(rates[best])} samples/s")
    print(f"tuned over best {ratio:.2f}; tune over grid {share:.2f} of {grid['seconds']:.0f} s")
    figures = {"ratio": ratio, "time_share": share, "rates": list(rates.values())}
    _write(Path("compare.json"), figures)


def _spread(rates: list[float]) -> str:
    return f"median {statistics.median(rates):.3g} ({min(rates):.3g} to {max(rates):.3g})"


def _write(path: Path, figures: object) -> None:
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
