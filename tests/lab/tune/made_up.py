"""A made-up tune of a dozen trials on a GPU: data-bound at first, then compute-bound, with two bad ends."""

from __future__ import annotations

import shlex
from dataclasses import replace

from vesuvius.lab.tune.report.options import Horizon, Option, options
from vesuvius.lab.tune.report.report import Report, build_report
from vesuvius.lab.tune.terms.known import Known
from vesuvius.lab.tune.terms.setting import Setting, in_words
from vesuvius.lab.tune.terms.space import Space
from vesuvius.lab.tune.terms.trial import Bound, Ended, Entry, Measured, Outcome, Prediction, Stage, Stop, Trial
from vesuvius.observe.units import GIB

SOURCE = Setting(
    workers=2,
    requests=16,
    prefetch_factor=2,
    train_batch_size=2,
    accumulate_steps=4,
    amp="auto",
    compile=False,
    channels_last=False,
    checkpoint_levels=(),
    cudnn_benchmark=True,
    cuda_allocator="default",
)
SPACE = Space(
    source=SOURCE,
    goal="samples_s",
    scale_batch=False,
    budget_s=1800,
    on_gpu=True,
    cores=12,
    most_workers=12,
    most_prefetch=16,
    remote=False,
    most_requests=256,
    most_batch=8,
    levels=(0, 1, 2, 3),
    deterministic=False,
    ram_limit_bytes=140 * GIB,
    vram_limit_bytes=73 * GIB,
    trial_s=90,
)
HORIZON = Horizon(steps_per_epoch=4000, epochs=32, global_batch=8, max_steps=None)
FOUR = replace(SOURCE, workers=4)
SIX = replace(SOURCE, workers=6)
BIG = replace(SIX, train_batch_size=4, accumulate_steps=2)
BEST = replace(BIG, compile=True)
FASTEST = replace(BEST, workers=8)


def measured(
    samples_s: float, ram_gib: float, vram_gib: float | None, bound: Bound = "data-bound", spread: float = 0.015
) -> Measured:
    cause = "workers too few" if bound == "data-bound" else None
    kind = f"{bound} ({cause})" if cause else bound
    return Measured(
        steps=60,
        samples_s=samples_s,
        low=samples_s * (1 - spread),
        high=samples_s * (1 + spread),
        narrow=True,
        step_p50_s=8 / samples_s,
        data_share=0.62 if bound == "data-bound" else 0.03,
        h2d_share=0.0,
        compute_share=0.36 if bound == "data-bound" else 0.95,
        host_share=0.02,
        bound=bound,
        cause=cause,
        verdict=f"{kind}: waited for data 62.0 % of the time (good: below 15 %); step p50 0.6 s, p95 1 s; try more",
        overrides=("training.workers=4",),
        trainer_s=0.03,
        reader_s=0.15,
        decode_s=0.1,
        buffer_full_share=0.0,
        ran_empty_share=0.9,
        cores_used=3.1,
        ram_bytes=int(ram_gib * GIB),
        vram_bytes=None if vram_gib is None else int(vram_gib * GIB),
    )


def entry(
    number: int,
    setting: Setting,
    stage: Stage,
    outcome: Measured | tuple[Ended, str],
    expected: tuple[float | None, float, float | None],
    before: Setting = SOURCE,
) -> Entry:
    samples_s, ram_gib, vram_gib = expected
    vram = None if vram_gib is None else int(vram_gib * GIB)
    prediction = Prediction(samples_s, int(ram_gib * GIB), vram, 95.0, "low", number)
    changed = "the config as it is" if number == 0 else in_words(setting, before)
    trial = Trial(number, setting, stage, changed, "the next step", prediction)
    if isinstance(outcome, Measured):
        return Entry(trial, Outcome("ok", "", 92.4, outcome))
    return Entry(trial, Outcome(outcome[0], outcome[1], 41.0, None))


LEDGER = [
    entry(0, SOURCE, "baseline", measured(13.31, 21.4, 24.1), (None, 19.5, 27.0)),
    entry(1, FOUR, "workers", measured(25.9, 27.9, 24.1), (26.6, 28.2, 24.1)),
    entry(
        2, replace(SOURCE, workers=8), "workers", measured(33.1, 41.0, 24.1, "compute-bound"), (38.0, 40.1, 24.1), FOUR
    ),
    entry(3, SIX, "workers", measured(32.8, 34.4, 24.1, "compute-bound"), (33.0, 34.6, 24.1), FOUR),
    entry(4, BIG, "batch", measured(36.2, 35.0, 41.2, "compute-bound"), (36.0, 35.1, 39.8), SIX),
    entry(
        5,
        replace(BIG, train_batch_size=8, accumulate_steps=1),
        "batch",
        ("gpu_memory", "CUDA out of memory: 2.1 GiB more were asked for"),
        (38.5, 36.4, 71.0),
        BIG,
    ),
    entry(6, BEST, "switches", measured(41.2, 35.6, 38.0, "compute-bound"), (36.2, 35.2, 41.2), BIG),
    entry(
        7,
        replace(BEST, channels_last=True),
        "switches",
        measured(40.1, 35.6, 39.0, "compute-bound"),
        (41.2, 35.6, 38.0),
        BEST,
    ),
    entry(
        8,
        replace(BEST, cuda_allocator="expandable"),
        "switches",
        ("killed", "killed by signal 9"),
        (41.2, 35.6, 38.0),
        BEST,
    ),
    entry(9, FASTEST, "check", measured(42.0, 42.3, 38.0, "compute-bound"), (41.5, 42.0, 38.0), BEST),
    entry(10, BEST, "check", measured(41.3, 35.7, 38.0, "compute-bound"), (41.2, 35.6, 38.0), BEST),
    entry(11, FASTEST, "check", measured(41.8, 42.1, 38.1, "compute-bound"), (42.0, 42.3, 38.0), BEST),
]
STOP = Stop(
    best=BEST,
    fastest=FASTEST,
    reason="every stage is over; the last gain was below the noise",
    reasons={
        "workers": "2 -> 6: 2.46 times the samples/s of the baseline (32.8 against 13.3); 8 gave +0.9 %, below 3 %",
        "train_batch_size": "+10.4 % samples/s at 41.2 GiB of VRAM",
        "accumulate_steps": "keeps the effective batch of 8",
        "compile": "+13.8 % samples/s",
    },
    ended={
        "workers": "knee: 8 gave +0.9 %, below 3 %",
        "batch": "cap: trial 5 ran out of GPU memory",
        "switches": "done",
    },
    checked=True,
)


def predict(setting: Setting) -> Prediction:
    """What a line through the made-up trials would say, roughly."""
    ram = 15 + 3.3 * setting.workers
    rate = min(6.6 * setting.workers, 34 + 2 * setting.train_batch_size)
    return Prediction(rate, int(ram * GIB), int((7 + 8.5 * setting.train_batch_size) * GIB), 95, "low", 3)


def obstacle(setting: Setting) -> str | None:
    """What the made-up machine has no room for."""
    return "too many readers" if setting.workers > 12 else None


def make_options() -> tuple[Option, Option, Option]:
    return options(Known(LEDGER), STOP, SPACE, predict, obstacle, HORIZON)


def make_report(name: str = "exp001_full", source: str = "configs/exp001_full.yaml") -> Report:
    return build_report(
        name=name,
        source=source,
        tuned=source.replace(".yaml", ".tuned.yaml"),
        command=f"vesuvius tune --config {source} --budget 30m",
        train_command="vesuvius train --config " + shlex.quote(source.replace(".yaml", ".tuned.yaml")),
        date="2026-11-22 09:01:02",
        versions={"vesuvius": "0.1.0", "torch": "2.13.0"},
        machine=["box: 12 cores, 170 GiB of RAM, NVIDIA A100-SXM4-80GB (80 GiB)"],
        space=SPACE,
        known=Known(LEDGER),
        stop=STOP,
        options=make_options(),
        horizon=HORIZON,
    )
