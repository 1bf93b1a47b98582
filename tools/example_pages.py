"""Example pages of report, profile, bench, tune and evaluate, from invented records: for the docs, and to check layout.

    PYTHONPATH=. python tools/example_pages.py DIR

Writes NAME.html for each kind and state: data-bound, compute-bound, failed, stopped early, several runs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from tests.experiments.tune.simulated import tuned
from tests.monitor.test_verdict import GPU, hungry
from tests.support.recorded_runs import BEGAN, run_end, run_start, session_file, step, system, validation, write_run
from tests.support.tiny import tiny_sections

from vesuvius.config.load import parse_stored
from vesuvius.experiments.bench.results import Measurement, make_trials, parse_axis, results_of
from vesuvius.experiments.bench.results import build_page as bench_page
from vesuvius.experiments.profile import Observed, build_profile
from vesuvius.experiments.tune.report import build_options
from vesuvius.experiments.tune.report import build_page as tune_page
from vesuvius.generate.evaluate.evaluate import evaluation_page
from vesuvius.generate.evaluate.metrics import Comparison, Metric
from vesuvius.monitor.verdict import Verdict, diagnose
from vesuvius.report.model import build, page_of
from vesuvius.report.page import RunReport, made_by, render_html
from vesuvius.report.records import read_run

_STEPS, _TOTAL = 400, 2000
_FACTS = {"machine": "box: 12 cores, 170 GiB of RAM, no GPU", "versions": "torch 2.13.0, ray 2.60.0"}
_DATA_BOUND = diagnose(hungry(), GPU)
_COMPUTE_BOUND = replace(_DATA_BOUND, kind="compute-bound", cause=None, overrides=(), advice="")


def main(folder: Path) -> None:
    """Write all pages."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name, page in example_pages(Path(temporary)):
            (folder / f"{name}.html").write_text(page.replace(temporary, "runs"), encoding="utf-8")


def example_pages(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and HTML of each page; run directories are written to `folder`."""
    runs = {
        "report": _run(folder / "scroll", _DATA_BOUND, "running"),
        "report-compute-bound": _run(folder / "compute", _COMPUTE_BOUND, 0, "done", _STEPS),
        "report-failed": _run(folder / "failed", _DATA_BOUND, 4, "memory guard: 92 % of 8 GiB"),
        "report-stopped": _run(folder / "stopped", _COMPUTE_BOUND, 75, "SIGTERM"),
    }
    for name, run in runs.items():
        yield name, page_of([build(read_run(run))], "vesuvius report scroll")
    yield "report-two", page_of([build(read_run(run)) for run in list(runs.values())[:2]], "vesuvius report a b")
    config = parse_stored(tiny_sections("scroll", Path("scroll.zarr")))
    for name, verdict in (("profile", _DATA_BOUND), ("profile-compute-bound", _COMPUTE_BOUND)):
        records, observed = read_run(runs["report"]), Observed(10, verdict, 153_600_000, "CPU", "off")
        page = build_profile(config, records, observed, 20, 1, "vesuvius tune --config scroll.yaml")
        yield name, _html(page, "vesuvius profile --config scroll.yaml")
    for name, machine in (("tune", "data-bound on cores"), ("tune-compute-bound", "compute-bound")):
        search, found = tuned(machine)
        options, commands = build_options(found, search, 128_000), ["vesuvius train --config scroll.tuned.yaml"]
        page = tune_page("scroll", "runs/scroll/tune", found, search, options, _FACTS, commands, "")
        yield name, _html(page, "vesuvius tune --config scroll.yaml")
    yield "bench", _bench("training.workers=0,1,2,4", "training.compile=false,true", [2.1, 3.9, 7.2, 8.3, None])
    yield "bench-ranks", _bench("training.ranks=1,2,4,8", "", [10, 19.2, 36, 61])
    yield "evaluation", _html(_evaluation(), "vesuvius evaluate scroll")


def _html(page: RunReport, command: str) -> str:
    return render_html([page], made_by(command))


def _run(path: Path, verdict: Verdict, end: int | str, cause: str = "", total: int = _TOTAL) -> Path:
    """A run of 400 steps that is `running` or ended with an exit code."""
    rng, records = np.random.default_rng(0), [run_start()]
    waits_s = 0.9 if verdict.kind == "data-bound" else 0.004
    for n in range(1, _STEPS + 1):
        a, b = rng.lognormal(0, 0.1, 2)
        parts = {"data_s": waits_s * a + 20.0 * (n == 1), "forward_s": 0.28 * b, "backward_s": 0.55 * b}
        pause_s = 3.0 if n % 100 == 0 else 0.0
        parts |= {"optimizer_s": 0.05, "h2d_s": 0.002, "other_s": 0.03 + pause_s}
        learning = {"loss": 0.02 + 0.3 * a / n**0.5, "lr": 1e-4 * min(1, n / 50), "grad_norm": 0.4 * a}
        times = {"step_s": sum(parts.values()), "pause_s": pause_s, "total_s": 1.8 * n, "eta_s": 1.8 * (total - n)}
        records.append(step(n, steps=total, **parts, **learning, **times))
        if n % 100 == 0:
            saved = {"kind": "checkpoint", "time": BEGAN + n, "step": n, "saved_time": BEGAN + n}
            judged = {"kind": "verdict", "time": BEGAN + n, "step": n, **verdict.record()}
            records += [saved, judged, validation(n, 0.9 - n / 1500)]
    if isinstance(end, int):
        records.append(run_end(_STEPS, BEGAN + 999, end, cause))
    write_run(path, records, [system(n, used_gib=1 + n / 400) for n in range(1, _STEPS, 5)])
    session_file(path, end)
    return path


def _bench(sweep: str, compare: str, rates: list[float | None]) -> str:
    """A bench of six rounds; None = the trial failed."""
    rng, trials = np.random.default_rng(0), make_trials([parse_axis(sweep)], [parse_axis(compare)] if compare else [])
    done = []
    for trial, rate in [(trial, rate) for _ in range(6) for trial, rate in enumerate(rates)]:
        index = len(done) // len(rates)
        if rate is None:
            done.append(Measurement(trial, index, "gpu_memory", "needs 90 GiB of VRAM, 79 GiB are left"))
            continue
        figures = {"step_s": 4 / rate, "data_share": 0.3, "comm_s": 0.1, "ram_bytes": 3.2 * 2**30}
        samples_s = rate * float(rng.lognormal(0, 0.02))
        done.append(Measurement(trial, index, samples_s=samples_s, start_s=12.3, figures=figures))
    command = f"vesuvius bench --config scroll.yaml --sweep {sweep}"
    page = bench_page("scroll: bench", "", _FACTS, results_of(trials, done), "", "vesuvius train --config scroll.yaml")
    return _html(page, command)


def _evaluation() -> RunReport:
    values = ("generated", "held_out", "training")
    metrics = (
        Metric("air", "share of air", dict(zip(values, (0.12, 0.11, 0.118), strict=True)), 0.01, 0.008, 0.4),
        Metric("planarity", "planarity", dict(zip(values, (0.61, 0.70, 0.69), strict=True)), 0.09, 0.03, 0.004),
        Metric("histogram_distance", "histogram distance", {}, 0.031, 0.028, 0.3),
        Metric("spectrum_distance_db", "spectrum distance, dB", {}, 0.8, 0.42, 0.002),
        Metric("correlation_distance", "correlation distance", {}, 0.021, 0.018, 0.33),
        Metric("porosity", "porosity", dict(zip(values, (0.22, 0.21, 0.218), strict=True)), 0.01, 0.008, 0.6),
        Metric(
            "euler",
            "Euler number",
            dict(zip(values, (-910, -720, -735), strict=True)),
            190,
            15,
            0.01,
        ),
        Metric("sheet_thickness", "sheet thickness", dict(zip(values, (9.1, 9.4, 9.3), strict=True)), 0.3, 0.1, 0.7),
        Metric("kid", "kernel distance (KID)", {}, 0.041, 0.002, 0.08, "95 % 0.012 to 0.07", (0.012, 0.07)),
        Metric("frechet", "Frechet distance", {}, 3.1, 2.2, 0.09),
        Metric("auc", "classifier AUC at 200 steps", {}, 0.58, 0.5, 0.06, "a lower bound; 64 samples are a weak test"),
        Metric(
            "auc_1000",
            "classifier AUC at 1000 steps",
            {},
            0.69,
            0.5,
            0.002,
            "a lower bound; 64 samples are a weak test",
        ),
        Metric(
            "features_auc", "AUC of fixed features", {}, 0.52, 0.5, 0.4, "a lower bound; 64 samples are a weak test"
        ),
        Metric("copies", "share of copies", {"generated": 0.05, "held_out": 0.05}, 0.0, None, 1.0),
    )
    facts = {"step": "2000", "held out": "64", "patch": "72x136x136", "training": "64"}
    return evaluation_page("scroll", "", facts, Comparison(metrics, {}), [])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
